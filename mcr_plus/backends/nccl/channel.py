"""A group of ranks in NCCL: its communicators, and its operations as NCCL calls.

A group has one communicator for collectives. For messages, it has one communicator for each ordered pair of
ranks, created on first use, so that a send never waits for a collective or a receive. NCCL has neither tags
nor receives from any source.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch

from mcr_plus.backends.base import NATIVE, Channel, Poll, Start, Support
from mcr_plus.backends.nccl.abi import DATATYPES, OPS, SUCCESS, UINT8, Call, Nccl, NcclError
from mcr_plus.backends.nccl.link import NcclLink
from mcr_plus.backends.nccl.meeting import Meeting
from mcr_plus.core.deadline import Deadline
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import KINDS, REDUCING, VECTOR, collective, dtype_name
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.streams import Streams
from mcr_plus.errors import Unsupported
from mcr_plus.rendezvous.world import World

_log = logging.getLogger("mcr_plus")
_EMULATIONS: Final = {
    **{
        kind: "grouped ncclSend and ncclRecv" for kind in KINDS if kind in VECTOR or not collective(kind).nccl
    },
    "reduce_scatter_v": "grouped ncclReduce, one per rank",
    "barrier": "ncclAllReduce of one element, waited for by the host",
}
_BOOL_OPS: Final = {"SUM": "MAX", "MAX": "MAX", "BOR": "MAX", "PRODUCT": "MIN", "MIN": "MIN", "BAND": "MIN"}
_PARTS: Final = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class _NcclReduction(NamedTuple):
    """A reduction in NCCL: datatype, op, and number of NCCL elements per tensor element."""

    datatype: int
    op: int
    width: int = 1
    how: str = ""


def _reduction(signature: Signature) -> _NcclReduction | None:
    """Return NCCL's reduction for a signature's reduce op and dtype; None if NCCL has none."""
    op, dtype = signature.reduce_op or "", signature.dtype
    if dtype is torch.bool and op in _BOOL_OPS:
        return _NcclReduction(
            UINT8, OPS[_BOOL_OPS[op]], how=f"{_BOOL_OPS[op]} of uint8, which is the same on bool"
        )
    if dtype in _PARTS and op in ("SUM", "AVG"):
        return _NcclReduction(DATATYPES[_PARTS[dtype]], OPS[op], 2, "as twice as many real numbers")
    if op in OPS and dtype in DATATYPES:
        return _NcclReduction(DATATYPES[dtype], OPS[op])
    return None


def _known_reductions() -> str:
    names = ", ".join(map(dtype_name, DATATYPES))
    return f"{', '.join(OPS)} on {names}; SUM and AVG on complex; all but BXOR on bool"


def support(signature: Signature) -> Support:
    """Return the support for a signature, see `Backend.supports`."""
    if signature.algorithm is not None:
        return Support("no", f"algorithm '{signature.algorithm}'; nccl has none to choose from")
    how = _EMULATIONS.get(signature.kind)
    if signature.kind == "barrier":
        return Support("emulated", how or "")
    if signature.device == "cpu":
        return Support("no", "CPU tensors; nccl takes CUDA tensors, backends mpi and gloo take CPU tensors")
    if signature.device != "cuda":
        return Support("no", f"{signature.device} tensors; nccl takes CUDA tensors, mpi and gloo take all")
    if signature.kind not in REDUCING:
        return Support("emulated", how) if how else NATIVE
    reduction = _reduction(signature)
    if reduction is None:
        what = f"reduce op {signature.reduce_op} on {dtype_name(signature.dtype)}"
        return Support("no", f"{what}; NCCL has {_known_reductions()}")
    return Support("emulated", how) if how else Support("native", reduction.how)


class _PeerBytes(NamedTuple):
    """Bytes to send to or receive from a peer."""

    peer: int
    address: int
    nbytes: int


def _whole(tensor: torch.Tensor, peer: int) -> _PeerBytes:
    return _PeerBytes(peer, tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _parts(tensor: torch.Tensor, size: int, counts: Sequence[int] | None) -> list[_PeerBytes]:
    """Return the consecutive parts of a tensor, one per rank, with equal sizes or `counts` elements."""
    counts = [tensor.numel() // size] * size if counts is None else counts
    parts, address = [], tensor.data_ptr()
    for peer, count in enumerate(counts):
        parts.append(_PeerBytes(peer, address, count * tensor.element_size()))
        address += parts[-1].nbytes
    return parts


class NcclChannel(Channel):
    """Communicators of a group."""

    def __init__(
        self,
        nccl: Nccl,
        streams: Streams,
        group: Group,
        world: World,
        drive: Callable[[], None],
        closing: Callable[[NcclChannel], None],
        library: str,
    ) -> None:
        """`drive`: progresses all channels. `closing`: called when this channel is closed.

        `library`: name of the backend; another backend may open the same groups over the same store.
        """
        self._nccl = nccl
        self.streams = self._streams = streams
        self._group = group
        self._drive = drive
        self._closing = closing
        self._library = library
        self._timeout = world.timeout
        self._store = None if world.store is None else world.store_of(group)
        self._scratch = streams.scratch()
        self._link = self._join("all", tuple(range(group.size)))
        self._directions: dict[tuple[int, int], NcclLink] = {}

    # -- communicators ----------------------------------------------------------------------------

    def _join(self, key: str, ranks: tuple[int, ...]) -> NcclLink:
        """Return a link between the group ranks `ranks`."""
        own = ranks.index(self._group.rank)
        meeting = f"{self._library}/{self._group.name}/{key}"
        among = "" if key == "all" else f" for messages {key}"
        return NcclLink(
            self._nccl,
            self._streams,
            len(ranks),
            own,
            name=f"communicator of group '{self._group.name}'{among}",
            identity=Meeting(self._store, meeting, len(ranks), own, self._nccl.unique_id),
            drive=self._drive,
            timeout=self._timeout,
        )

    def _direction(self, source: int, target: int) -> NcclLink:
        pair = (source, target)
        link = self._directions.get(pair)
        if link is None:
            link = self._directions[pair] = self._join(f"{source} to {target}", pair)
        return link

    def _links(self) -> list[NcclLink]:
        # The order is the same at both ends of every link, so that ranks cannot wait in a cycle.
        return [self._link, *(self._directions[pair] for pair in sorted(self._directions))]

    def connect(self) -> None:
        """Wait until the group's communicator is ready; see `NcclLink.connect`."""
        self._link.connect()

    def progress(self) -> None:
        """Launch queued operations."""
        for link in (self._link, *self._directions.values()):
            if not link.is_idle:
                link.advance()

    def close(self) -> None:
        """See `Channel.close`. A link that cannot be closed is logged; the others are still closed."""
        self._closing(self)
        links, deadline = self._links(), Deadline(self._timeout)
        for link in links:
            link.finish()
        for link in links:
            try:
                link.destroy(deadline)
            except NcclError as error:  # noqa: PERF203 - each on its own
                _log.warning("backend nccl: %s; its memory is freed at the end of the process", error)

    def abort(self) -> None:
        """Abort all links at once."""
        for link in self._links():
            link.abort()

    # -- binding ----------------------------------------------------------------------------------

    def bind(self, signature: Signature) -> Start:
        """See `Channel.bind`."""
        supported = support(signature)
        if not supported:
            raise Unsupported(f"backend nccl cannot do {signature.describe()}: {supported.how}")
        if signature.kind in REDUCING:
            reduction = _reduction(signature)
            start: Start = getattr(self, f"_{signature.kind}")(signature, reduction)
            return start
        bound: Start = getattr(self, f"_{signature.kind}")(signature)
        return bound

    # -- native -----------------------------------------------------------------------------------

    def _all_reduce(self, signature: Signature, how: _NcclReduction) -> Start:  # noqa: ARG002 - binders share a shape
        return self._reducing(self._nccl.all_reduce, "all_reduce", how)

    def _reducing(self, call: Callable[..., int], name: str, how: _NcclReduction) -> Start:
        submit = self._link.submit

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            what = out.numel() * how.width, how.datatype, how.op
            key = name, *what
            return submit(partial(call, value.data_ptr(), out.data_ptr(), *what), key, value, out)

        return start

    def _reduce(self, signature: Signature, how: _NcclReduction) -> Start:
        call, submit, root = self._nccl.reduce, self._link.submit, signature.root or 0
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            value = message.inputs[0]
            tensors = (value, message.outputs[0]) if is_root else (value,)
            target = tensors[-1].data_ptr() if is_root else 0
            what = value.numel() * how.width, how.datatype, how.op, root
            return submit(partial(call, value.data_ptr(), target, *what), ("reduce", *what), *tensors)

        return start

    def _reduce_scatter(self, signature: Signature, how: _NcclReduction) -> Start:  # noqa: ARG002
        return self._reducing(self._nccl.reduce_scatter, "reduce_scatter", how)

    def _broadcast(self, signature: Signature) -> Start:
        call, submit, root = self._nccl.broadcast, self._link.submit, signature.root or 0

        def start(message: Message) -> Poll:
            out = message.outputs[0]
            _, address, nbytes = _whole(out, root)
            key = "broadcast", nbytes, root
            return submit(partial(call, address, address, nbytes, UINT8, root), key, out)

        return start

    def _all_gather(self, signature: Signature) -> Start:  # noqa: ARG002
        call, submit, rank = self._nccl.all_gather, self._link.submit, self._group.rank

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            _, address, nbytes = _whole(value, rank)
            key = "all_gather", nbytes
            return submit(partial(call, address, out.data_ptr(), nbytes, UINT8), key, value, out)

        return start

    def _send(self, signature: Signature) -> Start:  # noqa: ARG002
        rank = self._group.rank

        def start(message: Message) -> Poll:
            peer = self._peer(message)
            value = message.inputs[0]
            return self._moved(self._direction(rank, peer), [_whole(value, 1)], [], value)

        return start

    def _recv(self, signature: Signature) -> Start:  # noqa: ARG002
        rank = self._group.rank

        def start(message: Message) -> Poll:
            peer = self._peer(message)
            out = message.outputs[0]
            return self._moved(self._direction(peer, rank), [], [_whole(out, 0)], out)

        return start

    def _peer(self, message: Message) -> int:
        others = "backends mpi and gloo can"
        if message.peer is None:
            raise Unsupported(f"backend nccl cannot receive from any source: name the source; {others}")
        if message.match_tag != 0:
            raise Unsupported(f"backend nccl has no match tags, got tag={message.match_tag}; {others}")
        if message.peer == self._group.rank:
            raise Unsupported("backend nccl cannot send to the rank itself: copy the tensor")
        return message.peer

    # -- emulated ---------------------------------------------------------------------------------

    def _moved(
        self,
        link: NcclLink,
        sends: Sequence[_PeerBytes],
        receives: Sequence[_PeerBytes],
        *tensors: torch.Tensor,
    ) -> Poll:
        """Submit sends and receives of bytes as one operation; both ends omit empty parts."""
        nccl = self._nccl
        sends, receives = [p for p in sends if p.nbytes], [p for p in receives if p.nbytes]
        calls: list[Call] = [partial(nccl.send, p.address, p.nbytes, UINT8, p.peer) for p in sends]
        calls += [partial(nccl.recv, p.address, p.nbytes, UINT8, p.peer) for p in receives]
        # Ranks connect at their first exchange in a direction, whatever its size.
        key = frozenset([*(("to", p.peer) for p in sends), *(("from", p.peer) for p in receives)])
        return link.submit(self._together(calls), key, *tensors, parts=len(calls))

    def _together(self, calls: Sequence[Call]) -> Call:
        if not calls:
            return _nothing
        return calls[0] if len(calls) == 1 else partial(self._nccl.grouped, calls)

    def _all_to_all(self, signature: Signature) -> Start:  # noqa: ARG002
        size, link = self._group.size, self._link

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            sends = _parts(value, size, message.input_counts)
            return self._moved(link, sends, _parts(out, size, message.output_counts), value, out)

        return start

    _all_to_all_v = _all_to_all

    def _all_gather_v(self, signature: Signature) -> Start:  # noqa: ARG002
        size, link = self._group.size, self._link

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            sends = [_whole(value, peer) for peer in range(size)]
            return self._moved(link, sends, _parts(out, size, message.output_counts), value, out)

        return start

    def _gather(self, signature: Signature) -> Start:
        size, link, root = self._group.size, self._link, signature.root or 0
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            value = message.inputs[0]
            sends = [_whole(value, root)]
            if not is_root:
                return self._moved(link, sends, [], value)
            out = message.outputs[0]
            return self._moved(link, sends, _parts(out, size, message.output_counts), value, out)

        return start

    _gather_v = _gather

    def _scatter(self, signature: Signature) -> Start:
        size, link, root = self._group.size, self._link, signature.root or 0
        is_root = self._group.rank == root

        def start(message: Message) -> Poll:
            out = message.outputs[0]
            receives = [_whole(out, root)]
            if not is_root:
                return self._moved(link, [], receives, out)
            value = message.inputs[0]
            return self._moved(link, _parts(value, size, message.input_counts), receives, value, out)

        return start

    _scatter_v = _scatter

    def _reduce_scatter_v(self, signature: Signature, how: _NcclReduction) -> Start:  # noqa: ARG002
        reduce, size, rank, submit = self._nccl.reduce, self._group.size, self._group.rank, self._link.submit

        def start(message: Message) -> Poll:
            value, out = message.inputs[0], message.outputs[0]
            counts = message.input_counts or ()
            calls: list[Call] = [
                partial(
                    reduce,
                    address,
                    out.data_ptr() if root == rank else 0,  # only the root writes its output
                    counts[root] * how.width,
                    how.datatype,
                    how.op,
                    root,
                )
                for root, address, nbytes in _parts(value, size, counts)
                if nbytes
            ]
            key = "reduce_scatter_v", counts, how.datatype, how.op
            return submit(self._together(calls), key, value, out, parts=len(calls))

        return start

    def _barrier(self, signature: Signature) -> Start:  # noqa: ARG002
        address, submit = self._scratch.data_ptr(), self._link.submit
        call: Call = partial(
            self._nccl.all_reduce, address, address, 1, DATATYPES[self._scratch.dtype], OPS["SUM"]
        )

        def start(message: Message) -> Poll:  # noqa: ARG001
            return submit(call, "barrier", on_host=True)

        return start


def _nothing(comm: int, stream: int) -> int:  # noqa: ARG001 - a Call
    return SUCCESS
