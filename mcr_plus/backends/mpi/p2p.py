"""Match MPI messages: post a receive only after its message has been probed.

MPI libraries do not check dtypes, and Open MPI 5.0.11 writes a message that is too long past the end of the
buffer before it reports the truncation. So a receive is posted only when a message of the right size and
dtype has arrived. The tag encodes the dtype, and whether the message carries a checksum, see `checked`. Of
the 29 bits of MPICH's tags, 24 are for the program and 4 for the dtype. The last dtypes share a code, and
have fewer bits for the program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import Any, Final

import torch

from mcr_plus.backends.base import ReceivePoll, advice
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import DTYPES, dtype_name
from mcr_plus.core.message import Signature
from mcr_plus.errors import OrderMismatch, Unsupported

_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}
_CHECKED: Final = 1 << 4  # in a tag: the message carries a checksum; lower bits are for the dtype
_BITS: Final = 5
_SHARED: Final = _CHECKED - 1  # shared code of this dtype and all later ones
_MORE: Final = 4  # bits that distinguish dtypes with the shared code
_PROBE_OTHERS_EVERY: Final = 256  # polls without a message before probing for other dtypes
CHECKSUM: Final = 8
"""Bytes of the checksum that a message may carry."""
_AT_ONCE: Final = 16  # tags matched by one call of `progress`


class Receive(ReceivePoll):
    """Poll of a receive; `source` is set once the message has begun to arrive.

    Attributes:
        checked: bytes of the checksum in the message; 0 without a checksum.
    """

    checked = 0

    def __init__(
        self,
        queue: MatchingQueue,
        signature: Signature,
        peer: int | None,
        tag: int,
        target: torch.Tensor,
        spec: Any,
    ) -> None:
        self._queue = queue
        self.signature = signature
        self.peer = peer
        self.tag = tag
        self.target = target
        self.spec = spec
        self.number = 0  # order of posting
        self.polls = 0
        self.request: Any = None
        self.error: Exception | None = None

    def __call__(self) -> bool:
        """Poll; raises `OrderMismatch` for a message of another dtype or size, and the library's errors."""
        if self.request is None:
            if self.error is None:
                self._queue.match(self.tag)
            if self.error is not None:
                raise self.error
            if self.request is None:
                return False
        return bool(self.request.Test())


class MatchingQueue:
    """All receives on one MPI communicator. Not thread-safe.

    As in MPI, a message goes to the first posted receive with a matching source and tag.
    """

    def __init__(self, mpi: Any, comm: Any, group: Group, busy: set[MatchingQueue]) -> None:
        """`busy`: a set that contains this object while it has waiting receives."""
        self._busy = busy
        self._mpi = mpi
        self._comm = comm
        self._group = group
        self._status = mpi.Status()
        self._tag_limit = (comm.Get_attr(mpi.TAG_UB) + 1) >> _BITS
        self._waiting: dict[int, dict[int | None, deque[Receive]]] = {}  # by tag and peer
        self._posted = 0

    def tag(self, dtype: torch.dtype, match_tag: int, *, checked: bool = False) -> int:
        """Return the MPI tag for tensors of `dtype`; raises `Unsupported` if MPI has no such tag."""
        code, number, limit = _CODES[dtype], match_tag, self._tag_limit
        if code >= _SHARED:
            code, number, limit = _SHARED, match_tag << _MORE | code - _SHARED, limit >> _MORE
        if match_tag >= limit:
            of = f" of {dtype_name(dtype)}" if code == _SHARED else ""
            raise Unsupported(f"tag: this MPI library takes tags below {limit}{of}, got {match_tag}")
        return number << _BITS | _CHECKED * checked | code

    def post(self, receive: Receive) -> Receive:
        """Queue a receive; returns it."""
        self._posted += 1
        receive.number = self._posted
        self._waiting.setdefault(receive.tag, {}).setdefault(receive.peer, deque()).append(receive)
        self._busy.add(self)
        self.match(receive.tag)
        return receive

    def progress(self) -> None:
        """Receive messages that have arrived, so that a sender does not wait until the receiver polls."""
        for tag in list(self._waiting)[:_AT_ONCE]:
            self.match(tag)
            if (queues := self._waiting.pop(tag, None)) is not None:
                self._waiting[tag] = queues  # moved to the end, so that the next call starts with other tags

    def match(self, tag: int) -> None:
        """Post the receives under `tag` whose messages have arrived."""
        queues = self._waiting.get(tag)
        if queues is None:
            return
        for peer, queue in list(queues.items()):
            while queue and self._is_matched(queue[0], queues):
                queue.popleft()
            if not queue:
                del queues[peer]
        if not queues:
            del self._waiting[tag]
            if not self._waiting:
                self._busy.discard(self)

    def _sources(self, receive: Receive, queues: dict[int | None, deque[Receive]]) -> Sequence[int]:
        """Return the sources of which this receive may take a message: sources without an earlier receive."""
        if len(queues) == 1:
            return (self._mpi.ANY_SOURCE if receive.peer is None else receive.peer,)
        earlier = {peer for peer, queue in queues.items() if queue and queue[0].number < receive.number}
        if receive.peer is not None:
            return () if None in earlier else (receive.peer,)
        return [rank for rank in range(self._group.size) if rank not in earlier]

    def _is_matched(self, receive: Receive, queues: dict[int | None, deque[Receive]]) -> bool:
        """Match a receive; return whether it leaves the queue. Its own poll raises errors."""
        try:
            return self._match_one(receive, self._sources(receive, queues))
        except Exception as error:
            receive.error = error
            return True

    def _match_one(self, receive: Receive, sources: Sequence[int]) -> bool:
        """Match a receive if its message has arrived; return whether it was posted or has failed."""
        assert receive.signature.dtype is not None
        tag = self.tag(receive.signature.dtype, receive.tag, checked=receive.checked > 0)
        receive.polls += 1
        for source in sources:
            if self._accept(receive, source, tag):
                return True
        if receive.polls % _PROBE_OTHERS_EVERY:
            return False
        for source in sources:
            known = list(_CODES)[: None if receive.tag < self._tag_limit >> _MORE else _SHARED]
            for dtype, checked in product(known, (False, True)):
                other = self.tag(dtype, receive.tag, checked=checked)
                if other != tag and self._comm.Iprobe(source, other, self._status):
                    return self._other(receive, source, tag, dtype, CHECKSUM * checked)
        return False

    def _accept(self, receive: Receive, source: int, tag: int) -> bool:
        status = self._status
        if not self._comm.Iprobe(source, tag, status):
            return False
        receive.source = sender = status.Get_source()
        assert receive.signature.dtype is not None
        # The count is in elements: the bytes of a large message may exceed MPI's counts.
        count = status.Get_count(receive.spec[1])
        if receive.checked:  # small, with a buffer description in bytes
            count = (count - receive.checked) // receive.signature.dtype.itemsize
        if count == receive.target.numel():
            receive.request = self._comm.Irecv(receive.spec, sender, tag)
            receive.arriving = True
        else:
            self._refuse(receive, sender, receive.signature.dtype, count)
        return True

    def _other(self, receive: Receive, source: int, tag: int, dtype: torch.dtype, checked: int) -> bool:
        """Handle a message of another dtype, or with a size for which checksums differ.

        An earlier message of the right dtype from this sender may have arrived, too.
        """
        sender = self._status.Get_source()
        count = (self._status.Get_count(self._mpi.BYTE) - checked) // dtype.itemsize
        if not self._accept(receive, source, tag):
            self._refuse(receive, sender, dtype, count)
        return True

    def _refuse(self, receive: Receive, sender: int, dtype: torch.dtype, count: int) -> None:
        receive.error = mismatch(self._group, receive.signature, receive.tag, sender, dtype, count)


def mismatch(
    group: Group, wanted: Signature, tag: int, sender: int, dtype: torch.dtype, count: int
) -> OrderMismatch:
    """Return the error of receive `wanted`, whose message has `count` elements of `dtype`."""
    return OrderMismatch(
        f"message with tag {tag} in group '{group.name}': {group.named(sender)} issued send "
        f"{dtype_name(dtype)}[{count}] ({count * dtype.itemsize} bytes); {group.named(group.rank)} issued "
        f"{wanted.describe()} ({wanted.nbytes} bytes){advice(wanted.dtype is dtype, count)}"
    )
