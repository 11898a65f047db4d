"""Runs an algorithm: a compiled, resumable interpreter of its steps over queues in shared memory.

Every chunk is cut into tiles that fit a slot of a queue, and all steps run once per tile, as in MSCCL's own
runtime. Thread blocks are not threads: `advance` runs the next step of each in turns, if its inputs and slots
are ready, and returns after a moment without progress, so that Python checks deadlines.

Where the number of elements is not divisible by that of chunks, the remaining elements form one more tile, of
one element per chunk, padded with any values in a separate buffer. So all chunks of a tile have one size, on
which steps over scratch chunks, and steps that move a chunk to another place, rely: with boundaries at k n /
N each chunk would have its own size, and a rank could not determine the size of a received chunk.

An operation begins when the one before has ended on this rank, and the counters of queues continue from one
operation to the next. So the two ends of a queue agree as long as all ranks run the same operations in the
same order. Beside the counter of filled slots is the tag of the operation of each slot: data of another
operation is never received. A rank that finds another tag has detected a mismatch (`mismatched_peer`), since
its earlier operations have received all slots that were sent for them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

import numba
import numpy as np

from mcr_plus.backends.shm.atomics import call, copy, load_acquire, pause, store_release
from mcr_plus.backends.shm.reduce_kernels import ReduceKernels
from mcr_plus.backends.shm.segment import LINE
from mcr_plus.backends.shm.wakeup import give_way, may_yield, ring
from mcr_plus.errors import Unsupported
from mcr_plus.kernels.cpu import compiled
from mcr_plus.msccl.algorithm import OPERATIONS, READS, RECEIVES, SENDS, SPACES, WRITES

if TYPE_CHECKING:
    from mcr_plus.backends.shm.segment import Segment
    from mcr_plus.msccl.algorithm import Algorithm, Collective, Program

_types: Any = numba.types  # partly annotated, which type checkers report here
_NOTHING: Final = ReduceKernels()
_LINE_BYTES: Final = 64

_S: Final = OPERATIONS.index("s")
_R: Final = OPERATIONS.index("r")
_RCS: Final = OPERATIONS.index("rcs")
_RRS: Final = OPERATIONS.index("rrs")
_RRC: Final = OPERATIONS.index("rrc")
_RRCS: Final = OPERATIONS.index("rrcs")
_CPY: Final = OPERATIONS.index("cpy")
_RE: Final = OPERATIONS.index("re")
_NOP: Final = OPERATIONS.index("nop")

# Words of the state: constants, then the buffers, then the thread blocks, then their steps.
_RANK: Final = 0
_RANKS: Final = 1
_DEPTH: Final = 2
_SLOT: Final = 3  # bytes of a queue's slot
_SPINS: Final = 4
_YIELDS: Final = 5
_WIDTH: Final = 6  # bytes of an element
_COMBINE: Final = 7  # addresses of kernels
_DIVIDE: Final = 8
_COUNT: Final = 9  # elements of a block of the buffers: of the whole one, or of the block of one rank
_PER_BLOCK: Final = 10  # chunks of such a block
_CHUNK: Final = 11  # elements of a chunk, but for those left over
_TILE: Final = 12  # elements of a tile
_TILES: Final = 13  # with the one of the elements left over
_REST: Final = 14  # elements left over, per block
_INPUTS: Final = 15  # blocks of the input, and of the output
_OUTPUTS: Final = 16
_STAGE: Final = 17  # address to which the input is copied first: 0 none, 1 its place in the output
_OWN_INPUT: Final = 18  # elements from the start of the output to the input of a call in place
_OWN_OUTPUT: Final = 19  # and from the start of the input to the output
_DELIVERS: Final = 20  # whether this rank has a result
_FINISHED: Final = 21
_SPACE: Final = 22  # addresses of input, output and scratch
_REST_SPACE: Final = 25  # the same for the elements left over: 3 words, of which two may be one buffer
_REST_BUFFERS: Final = 28  # candidate addresses for them
_STAND_IN: Final = 31  # an output for a rank without one, 0 if not needed
_BLOCKS: Final = 32  # number of thread blocks
_TAG: Final = 33  # of the operation, equal on all ranks
_MISMATCHED: Final = 34  # 1 + a rank that sends data of another operation
_BELLS: Final = 35
_HEAD: Final = 36

# Words of a thread block.
_FIRST: Final = 0  # word of its first step
_STEPS: Final = 1
_FILLED: Final = 2  # addresses of the counters, with tags behind them, and slots of the queue it sends to
_EMPTIED: Final = 3
_TO: Final = 4
_PEER_FILLED: Final = 5  # and of the one it receives from
_PEER_EMPTIED: Final = 6
_FROM: Final = 7
_SENT: Final = 8  # slots filled by this rank, and known to be emptied
_FREED: Final = 9
_TAKEN: Final = 10  # slots emptied by this rank, and known to be filled
_ARRIVED: Final = 11
_AT_TILE: Final = 12  # its position
_AT_STEP: Final = 13
_RECEIVES: Final = 14  # the rank it receives from
_BLOCK: Final = 15

# Words of a step.
_OPERATION: Final = 0
_SOURCE_SPACE: Final = 1
_SOURCE_AT: Final = 2
_TARGET_SPACE: Final = 3
_TARGET_AT: Final = 4
_CHUNKS: Final = 5
_AFTER_BLOCK: Final = 6
_AFTER_STEP: Final = 7
_STEP: Final = 8


@compiled
def _place(state, space, chunk, tile):  # type: ignore[no-untyped-def]
    """Address of a chunk's part of a tile."""
    width = state[_WIDTH]
    if state[_REST] and tile == state[_TILES] - 1:
        return state[_REST_SPACE + space] + chunk * width
    block, index = chunk // state[_PER_BLOCK], chunk % state[_PER_BLOCK]
    block_elements = state[_COUNT] if space != 2 else state[_CHUNK] * state[_PER_BLOCK]
    at = block * block_elements + index * state[_CHUNK] + tile * state[_TILE]
    return state[_SPACE + space] + at * width


@compiled
def _piece(state, operation, source, target, arrived, leaving, elements):  # type: ignore[no-untyped-def]
    """Run a step on one chunk's part of a tile; unused addresses have any value."""
    nbytes, combine = elements * state[_WIDTH], state[_COMBINE]
    if operation == _S:
        copy(leaving, source, nbytes)
    elif operation == _R:
        copy(target, arrived, nbytes)
    elif operation == _RCS:
        copy(target, arrived, nbytes)
        copy(leaving, arrived, nbytes)
    elif operation == _RRS:
        call(combine, leaving, arrived, source, elements)
    elif operation == _RRC:
        call(combine, target, arrived, source, elements)
    elif operation == _RRCS:
        call(combine, target, arrived, source, elements)
        copy(leaving, target, nbytes)
    elif operation == _CPY:
        if target != source:
            copy(target, source, nbytes)
    elif operation == _RE:
        call(combine, target, target, source, elements)


@compiled
def _tag_of(state, counter, number):  # type: ignore[no-untyped-def]
    """Address of the tag of a queue's slot `number`; `counter` is the word of the address of its counter."""
    return state[counter] + 8 * (1 + number % state[_DEPTH])


@compiled
def _ready(state, block, step, tile, receives, sends):  # type: ignore[no-untyped-def]
    """Whether a step can run: its dependency is done, a slot is filled, a slot is empty."""
    awaited = state[step + _AFTER_BLOCK]
    if awaited >= 0:
        other = _HEAD + awaited * _BLOCK
        there = state[other + _AT_TILE]
        if there < tile or (there == tile and state[other + _AT_STEP] <= state[step + _AFTER_STEP]):
            return False
    if receives and state[block + _ARRIVED] <= state[block + _TAKEN]:
        state[block + _ARRIVED] = load_acquire(state[block + _PEER_FILLED])
        if state[block + _ARRIVED] <= state[block + _TAKEN]:
            return False
    if receives and load_acquire(_tag_of(state, block + _PEER_FILLED, state[block + _TAKEN])) != state[_TAG]:
        state[_MISMATCHED] = 1 + state[block + _RECEIVES]
        return False
    if sends and state[block + _SENT] - state[block + _FREED] >= state[_DEPTH]:
        state[block + _FREED] = load_acquire(state[block + _EMPTIED])
        if state[block + _SENT] - state[block + _FREED] >= state[_DEPTH]:
            return False
    return True


@compiled
def _turn(state, block):  # type: ignore[no-untyped-def]
    """Run a thread block's next step if it can run; returns whether it ran."""
    tile = state[block + _AT_TILE]
    if tile == state[_TILES]:
        return False
    step = state[block + _FIRST] + state[block + _AT_STEP] * _STEP
    operation, chunks = state[step + _OPERATION], state[step + _CHUNKS]
    receives = _R <= operation <= _RRCS
    sends = operation in (_S, _RCS, _RRS, _RRCS)
    if not _ready(state, block, step, tile, receives, sends):
        return False
    depth = state[_DEPTH]
    if state[_REST] and tile == state[_TILES] - 1:
        elements = 1
    else:
        elements = min(state[_TILE], state[_CHUNK] - tile * state[_TILE])
    arrived = state[block + _FROM] + state[block + _TAKEN] % depth * state[_SLOT]
    leaving = state[block + _TO] + state[block + _SENT] % depth * state[_SLOT]
    for chunk in range(chunks):
        _piece(
            state,
            operation,
            _place(state, state[step + _SOURCE_SPACE], state[step + _SOURCE_AT] + chunk, tile),
            _place(state, state[step + _TARGET_SPACE], state[step + _TARGET_AT] + chunk, tile),
            arrived,
            leaving,
            elements,
        )
        arrived += elements * state[_WIDTH]
        leaving += elements * state[_WIDTH]
    if receives:
        state[block + _TAKEN] += 1
        store_release(state[block + _PEER_EMPTIED], state[block + _TAKEN])
    if sends:
        store_release(_tag_of(state, block + _FILLED, state[block + _SENT]), state[_TAG])
        state[block + _SENT] += 1
        store_release(state[block + _FILLED], state[block + _SENT])
    state[block + _AT_STEP] += 1
    if state[block + _AT_STEP] == state[block + _STEPS]:
        state[block + _AT_STEP] = 0
        state[block + _AT_TILE] += 1
    return True


@compiled
def _move_rest(state, space, blocks, fills):  # type: ignore[no-untyped-def]
    """Copy the remaining elements of each block into their buffer, or out of it."""
    width, per_block, rest = state[_WIDTH], state[_PER_BLOCK], state[_REST]
    for block in range(blocks):
        at = state[_SPACE + space] + (block * state[_COUNT] + state[_CHUNK] * per_block) * width
        aside = state[_REST_SPACE + space] + block * per_block * width
        if fills:
            copy(aside, at, rest * width)
        else:
            copy(at, aside, rest * width)


@compiled
def advance(state, patient):  # type: ignore[no-untyped-def]
    """Advance as far as possible: 1 once the operation is done, else 0, after microseconds if `patient`."""
    spins = yields = 0
    while not state[_FINISHED]:
        moved, ended = False, True
        for index in range(state[_BLOCKS]):
            block = _HEAD + index * _BLOCK
            if _turn(state, block):
                moved = True
            if state[block + _AT_TILE] < state[_TILES]:
                ended = False
        if ended:
            if state[_DELIVERS]:
                if state[_REST]:
                    _move_rest(state, np.int64(1), state[_OUTPUTS], np.int64(0))
                if state[_DIVIDE]:
                    target = state[_SPACE + 1]
                    call(state[_DIVIDE], target, target, state[_RANKS], state[_OUTPUTS] * state[_COUNT])
            state[_FINISHED] = 1
            ring(state[_BELLS])
        elif moved:
            ring(state[_BELLS])
            spins = 0
        elif patient and spins < state[_SPINS]:
            spins += 1
            pause()
        elif patient and yields < state[_YIELDS] and may_yield(state[_BELLS]):
            yields += 1
            give_way(state[_BELLS])
        else:
            return 0
    return 1


@compiled
def begin(state, source, target):  # type: ignore[no-untyped-def]
    """Start an operation described by `Interpreter.bind`, and `advance` it."""
    width = state[_WIDTH]
    if state[_STAND_IN] and target != source:
        target = state[_STAND_IN]
    if state[_STAGE] and source:  # a rank without an input has nothing to copy
        stage = state[_STAGE]
        if stage == 1:
            stage = target + state[_OWN_INPUT] * width * state[_COUNT]
        if stage != source:
            copy(stage, source, state[_INPUTS] * state[_COUNT] * width)
            source = stage
    state[_SPACE], state[_SPACE + 1] = source, target
    state[_REST_SPACE], state[_REST_SPACE + 1] = state[_REST_BUFFERS], state[_REST_BUFFERS + 1]
    if state[_OWN_INPUT] >= 0 and source == target + state[_OWN_INPUT] * width * state[_COUNT]:
        aside = state[_REST_BUFFERS + 1] + state[_OWN_INPUT] * width * state[_PER_BLOCK]
        state[_REST_SPACE] = aside
    elif state[_OWN_OUTPUT] >= 0 and target == source + state[_OWN_OUTPUT] * width * state[_COUNT]:
        aside = state[_REST_BUFFERS] + state[_OWN_OUTPUT] * width * state[_PER_BLOCK]
        state[_REST_SPACE + 1] = aside
    if state[_REST] and source:
        _move_rest(state, np.int64(0), state[_INPUTS], np.int64(1))
    for index in range(state[_BLOCKS]):
        block = _HEAD + index * _BLOCK
        state[block + _AT_TILE] = state[_TILES] if state[block + _STEPS] == 0 else 0
        state[block + _AT_STEP] = 0
        if state[block + _FILLED]:
            state[block + _SENT] = load_acquire(state[block + _FILLED])
            state[block + _FREED] = load_acquire(state[block + _EMPTIED])
        if state[block + _PEER_FILLED]:
            state[block + _TAKEN] = state[block + _ARRIVED] = load_acquire(state[block + _PEER_EMPTIED])
    state[_FINISHED] = state[_MISMATCHED] = 0
    return advance(state, np.int64(1))  # int64, since numba would compile `advance` again for a literal


@cache
def prepare() -> None:
    """Compile the functions, or load them from disk: some seconds, during which no peer should wait."""
    words, address = _types.int64[::1], _types.int64
    advance.compile((words, address))
    begin.compile((words, address, address))


class Interpreter:
    """One rank's program of one algorithm on a segment.

    Operations run one at a time, in the same order on all ranks. `spins` and `yields`: number of retries of
    `advance` with and without the core before it returns. The first `skip` channels of the segment are not
    used.

    Raises:
        Unsupported: the algorithm needs more channels than the segment has, or its chunks cannot be divided
            among the ranks.
    """

    def __init__(
        self, segment: Segment, algorithm: Algorithm, *, spins: int = 200, yields: int = 4, skip: int = 0
    ) -> None:
        shape, channels = segment.shape, segment.shape.channels - skip
        if algorithm.ranks != shape.ranks or algorithm.channels > channels:
            raise Unsupported(
                f"algorithm '{algorithm.name}' is for {algorithm.ranks} ranks and {algorithm.channels} "
                f"channels; there are {shape.ranks} ranks and {channels} channels"
            )
        blocks = _blocks(algorithm.collective, shape.ranks)
        if algorithm.chunks % max(blocks):
            raise Unsupported(
                f"algorithm '{algorithm.name}': {algorithm.chunks} chunks cannot be divided among "
                f"{shape.ranks} ranks"
            )
        self.algorithm = algorithm
        self._segment, self._spins, self._yields = segment, spins, yields
        self._inputs, self._outputs = blocks
        self._per_block = algorithm.chunks // max(blocks)
        self._program = algorithm.programs[segment.rank]
        self._skip = skip
        self._kept: list[Any] = []

    def bind(
        self, count: int, width: int = 1, kernels: ReduceKernels = _NOTHING, *, in_place: bool, tag: int = 0
    ) -> Any:
        """Return the state of an operation, for `begin`, and for `advance` until that returns 1.

        `begin(state, source, target)` takes addresses. For a call `in_place` they are equal, except for
        allgather, whose source is this rank's block of the target, and for reducescatter, the other way
        round. `count` elements of `width` bytes are the whole buffer, or for allgather, reducescatter,
        alltoall, gather and scatter one rank's block of it. A state may be begun again when it is done; its
        memory lives as long as this object. Ranks with different `tag`s wait for each other for ever;
        `mismatched_peer` returns such a rank.
        """
        shape, segment = self._segment.shape, self._segment
        steps = [step for block in self._program.blocks for step in block.steps]
        # All ranks need the same tiles, so the largest step of any rank counts.
        most = self.algorithm.largest_step
        chunk, rest = divmod(count, self._per_block)
        room = shape.slot // most // _LINE_BYTES * _LINE_BYTES // width
        if not room:
            raise Unsupported(
                f"algorithm '{self.algorithm.name}': steps of {most} chunks, for slots of {shape.slot} bytes"
            )
        tile = min(room, chunk)
        stage = self._stage(in_place)
        state: Any = np.zeros(_HEAD + len(self._program.blocks) * _BLOCK + len(steps) * _STEP, np.int64)

        def buffer(elements: int) -> int:
            self._kept.append(np.zeros(elements * width + _LINE_BYTES, np.uint8))
            address: int = self._kept[-1].ctypes.data
            return -(-address // _LINE_BYTES) * _LINE_BYTES

        scratch = -(-max(self._program.scratch, 1) // self._per_block) * self._per_block
        collective = self.algorithm.collective
        root = collective not in ("reduce", "gather") or segment.rank == self.algorithm.root
        own_input, own_output = self._aliased
        settings = {
            _RANK: segment.rank,
            _RANKS: shape.ranks,
            _DEPTH: shape.depth,
            _SLOT: shape.slot,
            _SPINS: self._spins,
            _YIELDS: self._yields,
            _WIDTH: width,
            _COMBINE: kernels.combine,
            _DIVIDE: kernels.divide,
            _COUNT: count,
            _PER_BLOCK: self._per_block,
            _CHUNK: chunk,
            _TILE: tile,
            _TILES: (-(-chunk // tile) if chunk else 0) + bool(rest),
            _REST: rest,
            _INPUTS: self._inputs,
            _OUTPUTS: self._outputs,
            _STAGE: buffer(count * self._inputs) if stage == "buffer" else int(stage == "output"),
            _OWN_INPUT: own_input,
            _OWN_OUTPUT: own_output,
            _DELIVERS: root,
            _SPACE + 2: buffer(chunk * scratch),
            _REST_SPACE + 2: buffer(scratch),
            _REST_BUFFERS: buffer(self._per_block * self._inputs),
            _REST_BUFFERS + 1: buffer(self._per_block * self._outputs),
            _STAND_IN: 0 if root else buffer(count * self._outputs),
            _BLOCKS: len(self._program.blocks),
            _TAG: tag,
            _BELLS: self._segment.bells,
        }
        for word, value in settings.items():
            state[word] = value
        self._write_program(state, self._program)
        return state

    def offset(self, nbytes: int) -> int:
        """Return the bytes from output to input in a call in place; `nbytes` as `count` of `bind`."""
        own_input, own_output = self._aliased
        return -own_output * nbytes if own_output >= 0 else own_input * nbytes

    @property
    def _aliased(self) -> tuple[int, int]:
        """In place: block of the output that is the input, and of the input that is the output; or -1."""
        rank = self._segment.rank
        if self.algorithm.collective in ("allgather", "gather"):
            return rank, -1
        return (-1, rank) if self.algorithm.collective in ("reducescatter", "scatter") else (0, -1)

    def _stage(self, in_place: bool) -> Literal["", "buffer", "output"]:
        """Return the place to which the input must be copied first; '' if the algorithm can read it."""
        algorithm = self.algorithm
        if in_place:
            return "" if algorithm.in_place else "buffer"
        if not algorithm.out_of_place:
            if self._inputs > self._outputs:
                raise Unsupported(f"algorithm '{algorithm.name}' works in place only")
            return "output"
        writes_input = any(
            step.operation in WRITES and step.target.space == "i"
            for block in self._program.blocks
            for step in block.steps
        )
        return "buffer" if writes_input else ""

    def _write_program(self, state: Any, program: Program) -> None:
        shape, base, me = self._segment.shape, self._segment.base, self._segment.rank

        def queue(source: int, target: int, channel: int) -> tuple[int, int, int]:
            number = shape.queue(source, target, channel + self._skip)
            counters = base + shape.queues + 2 * number * LINE
            return counters, counters + LINE, base + shape.slots + number * shape.depth * shape.slot

        at = _HEAD + len(program.blocks) * _BLOCK
        for index, block in enumerate(program.blocks):
            word = _HEAD + index * _BLOCK
            state[word + _FIRST], state[word + _STEPS] = at, len(block.steps)
            if any(step.operation in SENDS for step in block.steps):
                state[word + _FILLED : word + _TO + 1] = queue(me, block.send, block.channel)
            if any(step.operation in RECEIVES for step in block.steps):
                state[word + _PEER_FILLED : word + _FROM + 1] = queue(block.receive, me, block.channel)
                state[word + _RECEIVES] = block.receive
            for step in block.steps:
                # A step without a buffer of its own describes the peer's, which is ignored.
                source, target = step.source, step.target
                reads, writes = step.operation in READS, step.operation in WRITES
                after = step.after or (-1, -1)
                state[at : at + _STEP] = (
                    OPERATIONS.index(step.operation),
                    SPACES.index(source.space) if reads else 0,
                    source.at if reads else 0,
                    SPACES.index(target.space) if writes else 0,
                    target.at if writes else 0,
                    0 if step.operation == "nop" else step.count,
                    *after,
                )
                at += _STEP


def mismatched_peer(state: Any) -> int | None:
    """Return a rank that sends data of another operation, None without one: the orders of ranks differ."""
    return int(state[_MISMATCHED]) - 1 if state[_MISMATCHED] else None


def _blocks(collective: Collective, ranks: int) -> tuple[int, int]:
    """Return the numbers of blocks of the input and of the output."""
    return {
        "allgather": (1, ranks),
        "gather": (1, ranks),
        "reducescatter": (ranks, 1),
        "scatter": (ranks, 1),
        "alltoall": (ranks, ranks),
    }.get(collective, (1, 1))
