"""Backend `msccl`: collectives and messages between ranks of one host, through shared memory."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.backends.base import NATIVE, Availability, Backend, Channel, Preference, Support
from mcr_plus.backends.shm import collectives_state
from mcr_plus.backends.shm.collectives import (
    DirectCollectives,
    addresses,
    begin_and_advance,
    mismatch,
    unreadable,
)
from mcr_plus.backends.shm.queue import Advance, Begin, Run, WorkQueue, done_at_once
from mcr_plus.backends.shm.reductions import ReduceKernels, SumTable, kernels_for
from mcr_plus.backends.shm.segment import Segment, Shape, open_segment
from mcr_plus.core.environment import package_version
from mcr_plus.core.kinds import IN_PLACE, KINDS, MESSAGES, REDUCING, VECTOR, Kind, collective
from mcr_plus.errors import AlgorithmError, BackendError, OperationsDiffer, OrderMismatch
from mcr_plus.kernels.compiling import preparing
from mcr_plus.msccl import channels

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcr_plus.backends.base import Corrupted, Poll, Start
    from mcr_plus.backends.shm.p2p import PointToPoint
    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Message, Signature
    from mcr_plus.core.units import Range
    from mcr_plus.rendezvous.world import World


def kernel_of(kind: str) -> int | None:
    """Return the number of a collective in `collectives_state`; None for an unknown name."""
    found: int | None = getattr(collectives_state, kind.upper(), None)
    if found is None and kind in VECTOR:
        return collectives_state.EXCHANGE if collective(kind).sends == "each" else collectives_state.SHARE
    return found


_KERNELS: Final = {kind: number for kind in KINDS if (number := kernel_of(kind)) is not None}
_SHARED_MEMORY: Final = Path("/dev/shm")
_MOST_RANKS: Final = 128  # the memory grows with the square of this
# Bytes of a slot. Ranks wait for each other at each slice, and on busy cores each wait costs a time slice of
# another process. Larger slots mean fewer waits, but slots above 2 MiB do not fit the caches.
_AREA: Final = 2 << 20
_IN_THREAD: Final = 768 << 10  # bytes above which asynchronous operations run in the thread
_NATIVE: Final = 1 << 20  # most bytes of an operation that may hold the GIL
_SPINS: Final = 20  # per poll, which makes a poll as long as an MPI poll; the engine sets the number of polls
_YIELDS: Final = 4
_AREAS: Final = 24 << 20  # bytes for all ranks
_MESSAGES: Final = 1  # channel of sends and receives; the channels of algorithms follow
_DEPTH: Final = 4
_SLOT: Final = 128 << 10
_SLOTS: Final = 8 << 20  # bytes for all queues of algorithms, and for all of messages
_CELL: Final = (16 << 10) + 64  # 16 KiB and a header
_CELLS: Final = 128
_CHECKED: Final = 576  # bytes of a slot for messages with checksums
_LEAST_CELLS: Final = 8  # so that sender and receiver copy at the same time
_LEAST_SLOT: Final = 256  # bytes
_UNREADABLE_S: Final = 5.0  # s in which the engine notices that a peer has died or has given up
_PATIENCE_S: Final = 0.25  # s before a mismatch is reported without the description of the peer's operation


class MscclBackend(Backend):
    """Collectives and messages over shared memory, for groups of ranks on one host."""

    name = "msccl"
    on_stream = False
    host_driven = True
    keeps_apart = True  # every slot has the tag of its operation
    rings = True
    adds_in_order = True
    spins = 40  # a poll may take 5 µs; the engine checks for other work after the last one
    preference = Preference(cpu=1)

    def __init__(self, world: World) -> None:
        self._world = world
        self._channels: list[SharedMemoryChannel] = []
        begin_and_advance()

    @classmethod
    def availability(cls) -> Availability:
        """Report the backend as available if the system has shared memory like Linux."""
        if not _SHARED_MEMORY.is_dir():
            return Availability(False, reason=f"no {_SHARED_MEMORY} on {sys.platform}", remedy="use Linux")
        return Availability(True, cls.library_version())

    @classmethod
    def library_version(cls) -> str:
        """Version of this package."""
        return f"mcr_plus {package_version()}"

    @classmethod
    def unavailable_in(cls, world: World) -> str:
        """See `Backend`. Some ranks must share a host."""
        if world.size > 1 and len(set(world.hosts)) == world.size:
            return "every rank is on a host of its own, and hosts share no memory"
        return ""

    @classmethod
    def unavailable_for(cls, world: World, group: Group) -> str:
        """See `Backend`. All ranks must share a host."""
        hosts = world.hosts_of(group)
        if hosts > 1:
            return f"group '{group.name}' is on {hosts} hosts, which share no memory"
        if group.size > _MOST_RANKS:
            return f"group '{group.name}' has {group.size} ranks; msccl serves up to {_MOST_RANKS}"
        return ""

    @classmethod
    def algorithms(cls, kind: Kind, ranks: int) -> list[str]:
        """See `Backend`."""
        from mcr_plus.msccl import catalog  # imported here, as below: most jobs name no algorithm

        return catalog.candidates(kind, ranks)

    @classmethod
    def unknown_algorithm(cls, name: str) -> str:
        """See `Backend`."""
        from mcr_plus.msccl import catalog

        return catalog.nowhere(name)

    @classmethod
    def sizes(cls, algorithm: str) -> Range:
        """See `Backend`."""
        from mcr_plus.msccl import catalog

        return catalog.sizes(algorithm)

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        """Support messages and all operations for which `collectives_kernels` has a kernel."""
        if signature.kind not in _KERNELS and signature.kind not in MESSAGES:
            return Support("no", f"{signature.kind}; msccl has {', '.join((*_KERNELS, *MESSAGES))}")
        if signature.algorithm is not None:
            from mcr_plus.msccl import catalog

            why = catalog.refusal(signature) or _too_large(signature)
            if why:
                return Support("no", why)
        if signature.device != "cpu":
            return Support("emulated", "staged through host memory")
        return NATIVE

    @classmethod
    def descriptors(cls, size: int) -> int:  # noqa: ARG003 - a Backend
        """See `Backend`. A group has one shared memory file."""
        return 1

    def open(self, group: Group) -> Channel:
        """See `Backend.open`."""
        bells = self._world.bells
        table = 0 if bells is None else bells.table
        store = self._world.store_of(group)
        segment = open_segment(store, group, shape_of(group.size), self._world.timeout, table)
        channel = SharedMemoryChannel(segment, group, self._channels, self._world)
        self._channels.append(channel)
        return channel

    def progress(self) -> None:
        """See `Backend`."""
        for channel in self._channels:
            channel.progress()

    def thread_restriction(self) -> str:
        """See `Backend`. A work queue admits one thread; the engine's lock protects messages."""
        return ""

    def close(self, clean: bool) -> None:  # noqa: ARG002 - a Backend
        """See `Backend.close`."""
        for channel in self._channels:
            channel.end()


def _too_large(signature: Signature) -> str:
    """Return why an algorithm is too large for the verifier or for the shared memory, or ''."""
    from mcr_plus.msccl import catalog

    try:
        most, slot = catalog.algorithm_of(signature).largest_step, shape_of(signature.ranks).slot
    except AlgorithmError as error:
        return str(error)
    if most * 64 <= slot:
        return ""
    return (
        f"algorithm '{signature.algorithm}' has steps of {most} chunks, too many for {signature.ranks} ranks"
    )


def shape_of(ranks: int) -> Shape:
    """Return the sizes of the shared memory of a group."""
    unit, pairs = 64 * ranks, ranks * (ranks - 1)
    queues, each = channels(ranks), _SLOTS // pairs
    cell = max(min(_CELL, each // _LEAST_CELLS), min(_CHECKED, each // _DEPTH), _LEAST_SLOT) // 64 * 64
    return Shape(
        ranks,
        channels=_MESSAGES + queues,
        depth=_DEPTH,
        slot=max(_LEAST_SLOT, min(_SLOT, each // (queues * _DEPTH))) // 64 * 64,
        cells=max(_DEPTH, min(_CELLS, each // cell)),
        cell=cell,
        area=min(_AREA, _AREAS // (2 * ranks)) // unit * unit,
    )


def _values(signature: Signature) -> tuple[int, ReduceKernels]:
    """Return the bytes of a value, and the kernels that reduce values; a complex number has two values."""
    width = 1 if signature.dtype is None else signature.dtype.itemsize
    if signature.kind not in REDUCING:
        return width, ReduceKernels()
    assert signature.dtype is not None
    assert signature.reduce_op is not None
    kernels = kernels_for(signature.dtype, signature.reduce_op)
    return width // kernels.parts, kernels


def _count(signature: Signature, width: int) -> int:
    """Return the number of values of a buffer, or of a rank's block, see `DirectCollectives.bind`."""
    count = (signature.nbytes or 0) // width
    return count if signature.kind in IN_PLACE else count // signature.ranks


def _shift_of(signature: Signature, rank: int) -> int | None:
    """Return at which distance in bytes the source may overlap the target: each rank's own block stays."""
    sends, receives = collective(signature.kind).buffers()
    own = rank * (signature.nbytes or 0) // signature.ranks
    return own * (receives == "each") - own * (sends == "each") if "each" in (sends, receives) else None


class SharedMemoryChannel(Channel):
    """See `Channel`."""

    def __init__(
        self, segment: Segment, group: Group, open_ones: list[SharedMemoryChannel], world: World
    ) -> None:
        self._closed = False
        self._open_ones = open_ones
        self._segment = segment
        self._group = group
        self._queue = WorkQueue(None if world.bells is None else world.bells.ring_own)
        # Do not yield when each rank has its own core: the scheduler would give it to an unrelated process
        # for milliseconds.
        self._yields = _YIELDS if world.oversubscribed else 0
        self._collectives = DirectCollectives(segment, spins=_SPINS, yields=self._yields)
        self._tables: dict[Any, SumTable] = {}  # of `sums`, by those, dtype and reduce op
        self._unreadable_since = 0.0
        self._p2p: PointToPoint | None = None  # until the first message is bound

    def bind(self, signature: Signature) -> Start:
        """See `Channel`."""
        if signature.kind in MESSAGES:
            messages = self._messages("msccl's messages")
            bind = messages.bind_send if signature.kind == "send" else messages.bind_receive
            return bind(signature)
        if signature.kind in VECTOR:
            return self._bind_uneven(signature, *_values(signature))
        if signature.algorithm is not None:
            return self._bind_algorithm(signature)
        state = self.direct(signature)
        begin = self.run_by(signature, state, *begin_and_advance())

        def start(message: Message) -> Poll:
            target = message.outputs[0].data_ptr() if message.outputs else 0
            source = message.inputs[0].data_ptr() if message.inputs else target
            return begin(source, target, (message.inputs, message.outputs))

        if not signature.async_op and (signature.nbytes or 0) <= _NATIVE:
            native = partial(self._queue.native, *begin_and_advance(), state, check=self._check)
            start.native = lambda: native(addresses())  # type: ignore[attr-defined]
        start.shift = _shift_of(signature, self._group.rank)  # type: ignore[attr-defined]
        return start

    def _check(self, state: Any) -> None:
        """Raise an error if a peer cannot be read, unless the engine soon has a better one."""
        rank = unreadable(state)
        if rank is None:
            return
        now = monotonic()
        self._unreadable_since = self._unreadable_since or now
        if now - self._unreadable_since > _UNREADABLE_S:
            raise BackendError(
                f"{self._group.named(rank)} has withdrawn the operation, or its memory can no longer be read"
            )

    def bind_checked(self, signature: Signature, every: int, corrupted: Corrupted) -> Start | None:  # noqa: ARG002
        """See `Channel`. Message headers say whether a message carries checksums."""
        what = "msccl's messages with checksums"
        messages = self._messages(what)
        with preparing(what):
            if not messages.check():
                return None
        if signature.kind == "send":
            from mcr_plus.backends.shm.p2p_kernels import CHECKED

            return messages.bind_send(signature, CHECKED)
        return messages.bind_receive(signature, corrupted)

    def _messages(self, what: str) -> PointToPoint:
        """Return the sends and receives of this channel, with their kernels ready; `what`: for messages."""
        from mcr_plus.backends.shm import p2p_kernels  # imported here: most jobs send no messages
        from mcr_plus.backends.shm.p2p import PointToPoint

        with preparing(what):
            p2p_kernels.prepare()
        if self._p2p is None:
            self._p2p = PointToPoint(self._segment, self._group, yields=self._yields)
        return self._p2p

    def _sums(self, signature: Signature) -> SumTable | None:
        """Return the reduction of an operation with `sums`; None without, or if there is one order.

        Operations run one at a time. So one table is enough, which lives as long as states that refer to it.
        """
        sums, op = signature.sums, signature.reduce_op
        if sums is None or op is None or (sums == "fixed" and signature.ranks == 2):
            return None
        assert signature.dtype is not None
        key = sums, signature.dtype, op
        if key not in self._tables:
            self._tables[key] = SumTable(*key, signature.ranks)
        return self._tables[key]

    def direct(self, signature: Signature) -> Any:
        """Return the state of a direct collective of equal sizes, see `DirectCollectives.bind`."""
        # One state for all calls: the queue begins an operation only after the previous one is done.
        width, kernels = _values(signature)
        return self._collectives.bind(
            _KERNELS[signature.kind],
            _count(signature, width),
            width,
            kernels,
            signature.root or 0,
            signature.digest(),
            self._sums(signature),
        )

    def run_by(self, signature: Signature, state: Any, begin: Begin, advance: Advance) -> Run:
        """Return the start of operations of a state; the work queue calls `begin` and `advance` in order."""
        # Smaller operations end before the thread could wake up.
        in_thread = signature.async_op and (signature.nbytes or 0) > _IN_THREAD
        return self._queue.bind(begin, advance, state, in_thread=in_thread, check=self._check)

    def _bind_algorithm(self, signature: Signature) -> Start:
        from mcr_plus.backends.shm import interpreter_kernels  # imported here: most tables name no algorithm
        from mcr_plus.backends.shm.interpreter import Interpreter, mismatched_peer
        from mcr_plus.msccl import catalog

        width, kernels = _values(signature)
        count, algorithm = _count(signature, width), catalog.algorithm_of(signature)
        with preparing("msccl's algorithms"):
            interpreter_kernels.prepare()
        program = Interpreter(self._segment, algorithm, skip=_MESSAGES, spins=_SPINS, yields=self._yields)
        queue, begins = self._queue, dict[bool, Run]()
        in_thread = signature.async_op and (signature.nbytes or 0) > self._segment.shape.slot
        stand_in = int(signature.kind == "broadcast")  # its only buffer is an output
        tag, offset, group = signature.digest(), program.offset(count * width), self._group

        def bound(in_place: bool) -> Run:
            state = program.bind(count, width, kernels, in_place=in_place, tag=tag)
            begin = queue.bind(
                interpreter_kernels.begin, interpreter_kernels.advance, state, in_thread=in_thread
            )

            def run(source: int, target: int, keep: object) -> Poll:
                poll = begin(source, target, keep)
                return (
                    poll
                    if poll is done_at_once
                    else _Stepping(poll, state, signature, group, mismatched_peer)
                )

            return run

        def start(message: Message) -> Poll:
            target = message.outputs[0].data_ptr() if message.outputs else 0
            source = message.inputs[0].data_ptr() if message.inputs else stand_in * target
            in_place = source - target == offset
            begin = begins.get(in_place)
            if begin is None:
                begin = begins[in_place] = bound(in_place)
            return begin(source, target, (message.inputs, message.outputs))

        return start

    def _bind_uneven(self, signature: Signature, width: int, kernels: ReduceKernels) -> Start:
        tag, async_op = signature.digest(), signature.async_op
        sums = self._sums(signature)
        pattern = self._collectives.bind(_KERNELS[signature.kind], 0, width, kernels, tag=tag, sums=sums)
        parts = kernels.parts
        group, queue, of_sizes = self._group, self._queue, self._collectives.of_sizes
        move = begin_and_advance()

        def start(message: Message) -> Poll:
            sent, expected = message.flows(group.rank)
            if parts > 1:
                sent, expected = [parts * each for each in sent], [parts * each for each in expected]
            state = of_sizes(pattern, sent, expected)
            target = message.outputs[0].data_ptr() if message.outputs else 0
            source = message.inputs[0].data_ptr() if message.inputs else target
            large = async_op and width * max(sum(sent), sum(expected)) > _IN_THREAD
            begin = queue.bind(*move, state, in_thread=large, check=self._check)
            poll = begin(source, target, (message.inputs, message.outputs))
            return _Uneven(poll, state, message, group, parts)

        return start

    def progress(self) -> None:
        """Progress pending operations."""
        if not self._closed:
            self._queue.progress()
            if self._p2p is not None:
                self._p2p.progress()

    def withdraw(self) -> None:
        """See `Channel`."""
        self._collectives.withdraw()

    def stop_operations(self) -> bool:
        """See `Channel`."""
        self._queue.stop()
        self.withdraw()
        return True

    def end(self) -> None:
        """Stop. Pending operations keep their memory, since the process is about to end."""
        self._closed = True
        self._queue.close()
        self.withdraw()

    def close(self) -> None:
        """See `Channel`."""
        self._open_ones.remove(self)
        self.end()
        self._segment.close()

    release = close  # each rank has its own mapping, so other ranks may still use theirs


class _Stepping:
    """Poll of an algorithm; raises `OrderMismatch` if a peer has issued another operation."""

    def __init__(
        self,
        poll: Poll,
        state: Any,
        signature: Signature,
        group: Group,
        mismatched: Callable[[Any], int | None],
    ) -> None:
        self._poll, self._state, self._signature, self._group = poll, state, signature, group
        self._mismatched = mismatched
        self._since: float | None = None

    def __call__(self) -> bool:
        if self._poll():
            return True
        if (rank := self._mismatched(self._state)) is not None:
            now = monotonic()
            if self._since is None:
                self._since = now  # the peer's description may follow, for a better error
            elif now - self._since > _PATIENCE_S:
                raise OrderMismatch(
                    f"{self._signature.describe()} in group '{self._group.name}': "
                    f"{self._group.named(rank)} has issued another operation in its place"
                )
        return False


class _Uneven:
    """Poll of an operation with uneven sizes; raises an error if ranks disagree on the sizes."""

    def __init__(self, poll: Poll, state: Any, message: Message, group: Group, parts: int) -> None:
        self._poll, self._state, self._message, self._group = poll, state, message, group
        self._parts = parts  # kernel values per element

    def __call__(self) -> bool:
        if not self._poll():
            return False
        if (found := mismatch(self._state)) is not None:
            rank, given = found
            group, expected = self._group, self._message.flows(self._group.rank)[1]
            raise OperationsDiffer(
                f"{group.named(rank)} sends {given // self._parts} elements to {group.named(group.rank)}, "
                f"which expects {expected[rank]}",
                explained=True,
            )
        return True
