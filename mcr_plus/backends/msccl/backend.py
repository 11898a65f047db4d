"""The backend `msccl`: the ranks of one host, through memory that they share."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.backends.msccl import catalog, direct, executor, messages
from mcr_plus.backends.msccl.arena import Arena, Shape, open_arena
from mcr_plus.backends.msccl.combining import Combining, combining
from mcr_plus.backends.msccl.direct import Direct
from mcr_plus.backends.msccl.executor import Interpreter
from mcr_plus.backends.msccl.lane import Lane, Run, done_at_once
from mcr_plus.backends.msccl.messages import Messages
from mcr_plus.errors import AlgorithmError, OperationsDiffer, OrderMismatch
from mcr_plus.interfaces import NATIVE, Availability, Support
from mcr_plus.kernels.compiling import preparing
from mcr_plus.message import REDUCING, VECTOR, Kind

if TYPE_CHECKING:
    from mcr_plus.interfaces import Channel, Poll, Start, World
    from mcr_plus.message import Group, Message, Signature
    from mcr_plus.units import Range

_KINDS: Final[dict[Kind, int]] = {
    "barrier": direct.BARRIER,
    "all_reduce": direct.ALL_REDUCE,
    "all_gather": direct.ALL_GATHER,
    "all_to_all": direct.ALL_TO_ALL,
    "reduce_scatter": direct.REDUCE_SCATTER,
    "broadcast": direct.BROADCAST,
    "reduce": direct.REDUCE,
    "gather": direct.GATHER,
    "scatter": direct.SCATTER,
    "all_to_all_v": direct.EXCHANGE,
    "scatter_v": direct.EXCHANGE,
    "all_gather_v": direct.SHARE,
    "gather_v": direct.SHARE,
    "reduce_scatter_v": direct.REDUCE_SCATTER_V,
}
_WHOLE: Final = ("all_reduce", "reduce", "broadcast")  # count is of the buffer, and not of a rank's block
_SHARED_MEMORY: Final = Path("/dev/shm")
_MOST_RANKS: Final = 128  # beyond, the memory grows with the square
# Bytes of a slot. At each slice ranks wait for each other, which beside other work costs them the time slice
# of whatever has the core. Larger slots make that rarer; those beyond 2 MiB leave the caches.
_AREA: Final = 2 << 20
_ASIDE: Final = 768 << 10  # bytes from which on asynchronous operations go on in a thread
_SPINS: Final = 20  # of a poll, which then takes as long as one of MPI: the engine says how many
_YIELDS: Final = 4
_AREAS: Final = 24 << 20  # bytes for all ranks
_MESSAGES: Final = 1  # channel of sends and receives; those of algorithms follow
_DEPTH: Final = 4
_SLOT: Final = 128 << 10
_SLOTS: Final = 16 << 20  # bytes for all queues
_LEAST_SLOT: Final = 256  # bytes
_PATIENCE_S: Final = (
    0.25  # before ranks whose orders differ are told so without the names of what they issued
)


class MscclBackend:
    """Collectives and messages over shared memory, for groups of ranks on one host."""

    name = "msccl"
    on_stream = False
    needs_polls = True
    keeps_apart = True  # what a rank has put belongs to an operation by its tag
    rings = True
    spins = 40  # each may take 5 µs, and other work is looked for after the last

    def __init__(self, world: World) -> None:
        self._world = world
        self._channels: list[_Channel] = []
        with preparing("msccl"):
            direct.prepare()

    @classmethod
    def availability(cls) -> Availability:
        """Needs Linux's shared memory."""
        if not _SHARED_MEMORY.is_dir():
            return Availability(False, reason=f"no {_SHARED_MEMORY} on {sys.platform}", remedy="use Linux")
        return Availability(True, cls.library_version())

    @classmethod
    def library_version(cls) -> str:
        """It has no version of its own: it is that of this package."""
        return f"mcr_plus {metadata.version('mcr_plus')}"

    @classmethod
    def serves(cls, world: World) -> str:
        """Why it cannot serve this job, empty if it can: some ranks must share a host."""
        if world.size > 1 and len(set(world.hosts)) == world.size:
            return "every rank is on a host of its own, and hosts share no memory"
        return ""

    @classmethod
    def reaches(cls, world: World, group: Group) -> str:
        """Why it cannot serve this group, empty if it can; a function of what all ranks know."""
        hosts = len({world.hosts[rank] for rank in group.ranks})
        if hosts > 1:
            return f"group '{group.name}' is on {hosts} hosts, which share no memory"
        if group.size > _MOST_RANKS:
            return f"group '{group.name}' has {group.size} ranks; msccl serves up to {_MOST_RANKS}"
        return ""

    @classmethod
    def algorithms(cls, kind: Kind, ranks: int) -> list[str]:
        """See `Backend`."""
        return catalog.candidates(kind, ranks)

    @classmethod
    def unknown_algorithm(cls, name: str) -> str:
        """See `Backend`."""
        return catalog.nowhere(name)

    @classmethod
    def sizes(cls, algorithm: str) -> Range:
        """See `Backend`."""
        return catalog.sizes(algorithm)

    @classmethod
    def supports(cls, signature: Signature) -> Support:
        """Everything on CPU tensors."""
        if signature.algorithm is not None:
            why = catalog.refusal(signature) or _too_large(signature)
            if why:
                return Support("no", why)
        if signature.device != "cpu":
            return Support("emulated", "staged through host memory")
        return NATIVE

    @classmethod
    def descriptors(cls, size: int) -> int:  # noqa: ARG003 - a Backend
        """See `Backend`: the shared memory."""
        return 1

    def open(self, group: Group) -> Channel:
        """See `Backend.open`."""
        bells = self._world.bells
        table = 0 if bells is None else bells.table
        store = self._world.store_of(group)
        arena = open_arena(store, group, _shape(group.size), self._world.timeout, table)
        channel = _Channel(arena, group, self._channels, self._world)
        self._channels.append(channel)
        return channel

    def progress(self) -> None:
        """See `Backend`."""
        for channel in self._channels:
            channel.progress()

    def refuses_threads(self) -> str:
        """See `Backend`: a lane lets in one thread, and messages have the engine's lock."""
        return ""

    def close(self, clean: bool) -> None:  # noqa: ARG002 - a Backend
        """See `Backend.close`."""
        for channel in self._channels:
            channel.end()


def _too_large(signature: Signature) -> str:
    """Why an algorithm is too large for so many ranks, empty if it is not: for the verifier or the memory."""
    try:
        most, slot = catalog.algorithm_of(signature).largest_step, _shape(signature.ranks).slot
    except AlgorithmError as error:
        return str(error)
    if most * 64 <= slot:
        return ""
    return (
        f"algorithm '{signature.algorithm}' has steps of {most} chunks, too many for {signature.ranks} ranks"
    )


def _shape(ranks: int) -> Shape:
    unit = 64 * ranks
    channels = _MESSAGES + catalog.channels(ranks)
    slots = ranks * (ranks - 1) * channels * _DEPTH
    return Shape(
        ranks,
        channels=channels,
        depth=_DEPTH,
        slot=max(_LEAST_SLOT, min(_SLOT, _SLOTS // slots)) // 64 * 64,
        area=min(_AREA, _AREAS // (2 * ranks)) // unit * unit,
    )


class _Channel:
    def __init__(self, arena: Arena, group: Group, open_ones: list[_Channel], world: World) -> None:
        self._closed = False
        self._open_ones = open_ones
        self._arena = arena
        self._group = group
        self._lane = Lane(None if world.bells is None else world.bells.ring_own)
        # Whoever yields a core of its own loses it to some other program for milliseconds, not to its peer.
        self._yields = _YIELDS if world.crowded else 0
        self._direct = Direct(arena, spins=_SPINS, yields=self._yields)
        self._messages = Messages(arena, group, yields=self._yields)

    def bind(self, signature: Signature) -> Start:
        if signature.kind in ("send", "recv"):
            with preparing("msccl's messages"):
                messages.prepare()
            bind = self._messages.bind_send if signature.kind == "send" else self._messages.bind_receive
            return bind(signature)
        width = 1 if signature.dtype is None else signature.dtype.itemsize
        kernels = Combining()
        if signature.kind in REDUCING:
            assert signature.dtype is not None
            assert signature.reduce_op is not None
            kernels = combining(signature.dtype, signature.reduce_op)
            width //= kernels.parts
        if signature.kind in VECTOR:
            return self._bind_uneven(signature, width, kernels)
        count = (signature.nbytes or 0) // width
        if signature.kind not in _WHOLE:
            count //= signature.ranks
        if signature.algorithm is not None:
            return self._bind_algorithm(signature, count, width, kernels)
        # One state for all calls: the lane begins one only when the one before it is done.
        state = self._direct.bind(
            _KINDS[signature.kind], count, width, kernels, signature.root or 0, tag=signature.digest()
        )
        # What is smaller is done by the time the thread is awake.
        aside = signature.async_op and (signature.nbytes or 0) > _ASIDE
        begin = self._lane.bind(direct.begin, direct.advance, state, aside=aside)
        if signature.kind == "barrier":
            return lambda message: begin(0, 0, None)  # noqa: ARG005 - a Start

        def start(message: Message) -> Poll:
            target = message.outputs[0].data_ptr() if message.outputs else 0
            source = message.inputs[0].data_ptr() if message.inputs else target
            return begin(source, target, (message.inputs, message.outputs))

        return start

    def _bind_algorithm(self, signature: Signature, count: int, width: int, kernels: Combining) -> Start:
        algorithm = catalog.algorithm_of(signature)
        with preparing("msccl's algorithms"):
            executor.prepare()
        interpreter = Interpreter(self._arena, algorithm, skip=_MESSAGES, spins=_SPINS, yields=self._yields)
        lane, begins = self._lane, dict[bool, Run]()
        aside = signature.async_op and (signature.nbytes or 0) > self._arena.shape.slot
        stand_in = int(signature.kind == "broadcast")  # whose only buffer is an output
        tag, offset, group = signature.digest(), interpreter.offset(count * width), self._group

        def bound(in_place: bool) -> Run:
            state = interpreter.bind(count, width, kernels, in_place=in_place, tag=tag)
            begin = lane.bind(executor.begin, executor.advance, state, aside=aside)

            def run(source: int, target: int, keep: object) -> Poll:
                poll = begin(source, target, keep)
                return poll if poll is done_at_once else _Stepping(poll, state, signature, group)

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

    def _bind_uneven(self, signature: Signature, width: int, kernels: Combining) -> Start:
        tag, async_op = signature.digest(), signature.async_op
        pattern = self._direct.bind(_KINDS[signature.kind], 0, width, kernels, tag=tag)
        parts = kernels.parts
        group, lane, of_sizes = self._group, self._lane, self._direct.of_sizes

        def start(message: Message) -> Poll:
            sent, expected = message.flows(group.rank)
            if parts > 1:
                sent, expected = [parts * each for each in sent], [parts * each for each in expected]
            state = of_sizes(pattern, sent, expected)
            target = message.outputs[0].data_ptr() if message.outputs else 0
            source = message.inputs[0].data_ptr() if message.inputs else target
            large = async_op and width * max(sum(sent), sum(expected)) > _ASIDE
            begin = lane.bind(direct.begin, direct.advance, state, aside=large)
            poll = begin(source, target, (message.inputs, message.outputs))
            return _Uneven(poll, state, message, group, parts)

        return start

    def progress(self) -> None:
        """Go on with what is in flight."""
        if not self._closed:
            self._lane.progress()
            self._messages.progress()

    def end(self) -> None:
        """Nothing runs after this. What is in flight keeps its memory: the process is at its end."""
        self._closed = True
        self._lane.close()

    def close(self) -> None:
        self._open_ones.remove(self)
        self.end()
        self._arena.close()

    release = close  # while other ranks may still use theirs: their memory is their own


class _Stepping:
    """Poll of an algorithm. Ranks may have issued different operations, and some may wait for nobody."""

    def __init__(self, poll: Poll, state: Any, signature: Signature, group: Group) -> None:
        self._poll, self._state, self._signature, self._group = poll, state, signature, group
        self._since: float | None = None

    def __call__(self) -> bool:
        if self._poll():
            return True
        if (rank := executor.stranger(self._state)) is not None:
            now = monotonic()
            if self._since is None:
                self._since = now  # whoever waits there too says soon what it has issued, and that is told
            elif now - self._since > _PATIENCE_S:
                raise OrderMismatch(
                    f"{self._signature.describe()} in group '{self._group.name}': rank "
                    f"{self._group.ranks[rank]} has issued another operation in its place"
                )
        return False


class _Uneven:
    """Poll of an operation whose ranks may have disagreed on sizes."""

    def __init__(self, poll: Poll, state: Any, message: Message, group: Group, parts: int) -> None:
        self._poll, self._state, self._message, self._group = poll, state, message, group
        self._parts = parts  # numbers that an element is reduced as

    def __call__(self) -> bool:
        if not self._poll():
            return False
        if (found := direct.mismatch(self._state)) is not None:
            rank, given = found
            group, expected = self._group, self._message.flows(self._group.rank)[1]
            raise OperationsDiffer(
                f"rank {rank} sends {given // self._parts} elements to rank {group.rank}, which expects "
                f"{expected[rank]}",
                explained=True,
            )
        return True
