"""Receives over MPI that look at a message before they let it in.

A library cannot tell dtypes apart, and Open MPI 5.0.11 writes a message that is too long past the end of
the buffer before it reports the truncation. So a receive is posted only once a message is there whose
dtype, which travels in the tag, and size are right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import torch

from mcr_plus.errors import OrderMismatch, Unsupported
from mcr_plus.message import DTYPES, Group, Signature, dtype_name

_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}
_BITS: Final = 4  # of a tag, for the dtype
_LOOK_AROUND_EVERY: Final = 256  # polls without a message before looking for one of another dtype
_AT_ONCE: Final = 16  # tags that one call of `progress` looks at


class Receive:
    """A receive being polled; knows its source once its message is there."""

    source: int

    def __init__(
        self, box: Mailbox, signature: Signature, peer: int | None, tag: int, target: torch.Tensor, spec: Any
    ) -> None:
        self._box = box
        self.signature = signature
        self.peer = peer
        self.tag = tag
        self.target = target
        self.spec = spec
        self.number = 0  # order of posting
        self.polls = 0
        self.request: Any = None
        self.error: Exception | None = None

    @property
    def arriving(self) -> bool:
        """Whether its message is there, if not all of it."""
        return self.request is not None

    def __call__(self) -> bool:
        """Poll; raises `OrderMismatch` for a message that does not fit, and what the library raises."""
        if self.request is None:
            if self.error is None:
                self._box.match(self.tag)
            if self.error is not None:
                raise self.error
            if self.request is None:
                return False
        return bool(self.request.Test())


class Mailbox:
    """Sends and receives of one MPI communicator, which nothing else receives from. Not thread-safe.

    A message goes to the receive posted first among those it fits by source and tag, as in MPI.
    """

    def __init__(self, mpi: Any, comm: Any, group: Group, busy: set[Mailbox]) -> None:
        """Stand in `busy` whenever receives wait here."""
        self._busy = busy
        self._mpi = mpi
        self._comm = comm
        self._group = group
        self._status = mpi.Status()
        self._tag_limit = (comm.Get_attr(mpi.TAG_UB) + 1) >> _BITS
        self._waiting: dict[int, dict[int | None, deque[Receive]]] = {}  # by tag and peer
        self._posted = 0

    def tag(self, dtype: torch.dtype, match_tag: int) -> int:
        """The tag under which tensors of `dtype` travel; raises `Unsupported` for one MPI has no room for."""
        if match_tag >= self._tag_limit:
            raise Unsupported(f"tag: this MPI library takes tags below {self._tag_limit}, got {match_tag}")
        return match_tag << _BITS | _CODES[dtype]

    def post(self, receive: Receive) -> Receive:
        """Queue a receive; returns it."""
        self._posted += 1
        receive.number = self._posted
        self._waiting.setdefault(receive.tag, {}).setdefault(receive.peer, deque()).append(receive)
        self._busy.add(self)
        self.match(receive.tag)
        return receive

    def progress(self) -> None:
        """Let in what has come, so that a sender need not wait until its receiver looks."""
        for tag in list(self._waiting)[:_AT_ONCE]:
            self.match(tag)
            if (queues := self._waiting.pop(tag, None)) is not None:
                self._waiting[tag] = queues  # to the end: the next call looks at others

    def match(self, tag: int) -> None:
        """Start the receives under `tag` whose messages are there."""
        queues = self._waiting.get(tag)
        if queues is None:
            return
        for peer, queue in list(queues.items()):
            while queue and self._is_over(queue[0], queues):
                queue.popleft()
            if not queue:
                del queues[peer]
        if not queues:
            del self._waiting[tag]
            if not self._waiting:
                self._busy.discard(self)

    def _sources(self, receive: Receive, queues: dict[int | None, deque[Receive]]) -> Sequence[int]:
        """From where this receive may take a message, which is not where an earlier one waits for it."""
        if len(queues) == 1:
            return (self._mpi.ANY_SOURCE if receive.peer is None else receive.peer,)
        earlier = {peer for peer, queue in queues.items() if queue and queue[0].number < receive.number}
        if receive.peer is not None:
            return () if None in earlier else (receive.peer,)
        return [rank for rank in range(self._group.size) if rank not in earlier]

    def _is_over(self, receive: Receive, queues: dict[int | None, deque[Receive]]) -> bool:
        """Whether a receive's time here is over. Its poll raises what went wrong, whoever noticed."""
        try:
            return self._meets(receive, self._sources(receive, queues))
        except Exception as error:
            receive.error = error
            return True

    def _meets(self, receive: Receive, sources: Sequence[int]) -> bool:
        """Whether the message has come: then the receive has been started, or has failed."""
        assert receive.signature.dtype is not None
        tag = self.tag(receive.signature.dtype, receive.tag)
        receive.polls += 1
        for source in sources:
            if self._let_in(receive, source, tag):
                return True
        if receive.polls % _LOOK_AROUND_EVERY:
            return False
        for source in sources:
            for dtype, code in _CODES.items():
                other = receive.tag << _BITS | code
                if other != tag and self._comm.Iprobe(source, other, self._status):
                    return self._stranger(receive, source, tag, dtype)
        return False

    def _let_in(self, receive: Receive, source: int, tag: int) -> bool:
        status = self._status
        if not self._comm.Iprobe(source, tag, status):
            return False
        receive.source = status.Get_source()
        # In elements: the bytes of a large message may not fit MPI's counts.
        count = status.Get_count(receive.spec[1])
        if count == receive.target.numel():
            receive.request = self._comm.Irecv(receive.spec, receive.source, tag)
        else:
            assert receive.signature.dtype is not None
            self._refuse(receive, receive.source, receive.signature.dtype, count)
        return True

    def _stranger(self, receive: Receive, source: int, tag: int, dtype: torch.dtype) -> bool:
        """A message of another dtype is there. One of the right dtype sent before it would be there too."""
        sender = self._status.Get_source()
        count = self._status.Get_count(self._mpi.BYTE) // dtype.itemsize
        if not self._let_in(receive, source, tag):
            self._refuse(receive, sender, dtype, count)
        return True

    def _refuse(self, receive: Receive, sender: int, dtype: torch.dtype, count: int) -> None:
        receive.error = mismatch(self._group, receive.signature, receive.tag, sender, dtype, count)


def mismatch(
    group: Group, wanted: Signature, tag: int, sender: int, dtype: torch.dtype, count: int
) -> OrderMismatch:
    """The error of a receive of `wanted` that has met `count` elements of `dtype` from rank `sender`."""
    return OrderMismatch(
        f"message with tag {tag} in group '{group.name}': rank {sender} issued send "
        f"{dtype_name(dtype)}[{count}] ({count * dtype.itemsize} bytes); rank {group.rank} issued "
        f"{wanted.describe()} ({wanted.nbytes} bytes)"
    )
