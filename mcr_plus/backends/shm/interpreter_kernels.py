"""Compiled, resumable interpreter for the steps of an algorithm, over queues.

Every chunk is cut into tiles that fit a queue's slot, and all steps run once per tile, as in MSCCL's own
runtime. Thread blocks are not threads: `advance` runs the next step of each block in turn, if the step's
inputs and slots are ready. It returns after a moment without progress, so that Python checks deadlines.

If the number of elements is not divisible by the number of chunks, the remaining elements form another tile
with one element per chunk, padded with arbitrary values in a separate buffer. So all chunks of a tile have
the same size. Steps over scratch chunks, and steps that move a chunk, rely on this: with boundaries at k n /
N each chunk would have its own size, and a rank could not determine the size of a received chunk.

An operation begins when the previous one has ended on this rank, and queue counters continue from one
operation to the next. So the two ends of a queue agree as long as all ranks run the same operations in the
same order. The tag of each slot's operation is next to the counter of filled slots: data of another operation
is never received. A rank that finds another tag has detected a mismatch (`interpreter.mismatched_peer`),
since its earlier operations have received all slots that were sent for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numba
import numpy as np

from mcr_plus.backends.shm.atomics import call, copy, load_acquire, pause, store_release
from mcr_plus.backends.shm.wakeup import give_way, may_yield, ring
from mcr_plus.kernels.cpu import compiled, linked

if TYPE_CHECKING:
    from mcr_plus.msccl.algorithm import Operation

_types: Any = numba.types  # partly annotated, which type checkers report

# Numbers of the operations are defined here, because compiled functions stay in the disk cache as long as
# this file does not change.
_S: Final = 0
_R: Final = 1
_RCS: Final = 2
_RRS: Final = 3
_RRC: Final = 4
_RRCS: Final = 5
_CPY: Final = 6
_RE: Final = 7
_NOP: Final = 8
NUMBERS: Final[Mapping[Operation, int]] = {
    "s": _S, "r": _R, "rcs": _RCS, "rrs": _RRS, "rrc": _RRC, "rrcs": _RRCS,
    "cpy": _CPY, "re": _RE, "nop": _NOP,
}  # fmt: skip

# Words of the state: constants, then the buffers, then the thread blocks, then their steps.
RANK: Final = 0
RANKS: Final = 1
DEPTH: Final = 2
SLOT: Final = 3  # bytes of a queue's slot
SPINS: Final = 4
YIELDS: Final = 5
WIDTH: Final = 6  # bytes of an element
COMBINE: Final = 7  # addresses of kernels
DIVIDE: Final = 8
COUNT: Final = 9  # elements of a block of the buffers: the whole buffer, or the block of one rank
PER_BLOCK: Final = 10  # chunks of a block
CHUNK: Final = 11  # elements of a chunk, without the remaining elements
TILE: Final = 12  # elements of a tile
TILES: Final = 13  # including the tile of the remaining elements
REST: Final = 14  # remaining elements, per block
INPUTS: Final = 15  # blocks of the input, and of the output
OUTPUTS: Final = 16
STAGE: Final = 17  # address to which the input is copied first: 0 none, 1 its place in the output
OWN_INPUT: Final = 18  # elements from the start of the output to the input of an in-place call
OWN_OUTPUT: Final = 19  # elements from the start of the input to the output
DELIVERS: Final = 20  # flag: this rank has a result
FINISHED: Final = 21
SPACE: Final = 22  # addresses of input, output and scratch
REST_SPACE: Final = 25  # the same for the remaining elements: 3 words; two may be one buffer
REST_BUFFERS: Final = 28  # candidate addresses for `REST_SPACE`
STAND_IN: Final = 31  # an output for a rank without one, 0 if not needed
BLOCKS: Final = 32  # number of thread blocks
TAG: Final = 33  # tag of the operation, equal on all ranks
MISMATCHED: Final = 34  # 1 + a rank that sends data of another operation
BELLS: Final = 35
HEAD: Final = 36

# Words of a thread block.
FIRST: Final = 0  # word of its first step
STEPS: Final = 1
FILLED: Final = 2  # addresses of counters (followed by tags) and slots of the queue to which the block sends
EMPTIED: Final = 3
TO: Final = 4
PEER_FILLED: Final = 5  # the same for the queue from which it receives
PEER_EMPTIED: Final = 6
FROM: Final = 7
SENT: Final = 8  # slots filled by this rank; slots known to be emptied
FREED: Final = 9
TAKEN: Final = 10  # slots emptied by this rank; slots known to be filled
ARRIVED: Final = 11
AT_TILE: Final = 12  # position of the block
AT_STEP: Final = 13
RECEIVES: Final = 14  # the rank from which it receives
BLOCK: Final = 15

# Words of a step.
OPERATION: Final = 0
SOURCE_SPACE: Final = 1
SOURCE_AT: Final = 2
TARGET_SPACE: Final = 3
TARGET_AT: Final = 4
CHUNKS: Final = 5
AFTER_BLOCK: Final = 6
AFTER_STEP: Final = 7
TAKES: Final = 8  # flags: the step receives, the step sends
PUTS: Final = 9
STEP: Final = 10


@linked
def _place(state, space, chunk, tile):  # type: ignore[no-untyped-def]
    """Return the address of a chunk's part of a tile."""
    width = state[WIDTH]
    if state[REST] and tile == state[TILES] - 1:
        return state[REST_SPACE + space] + chunk * width
    block, index = chunk // state[PER_BLOCK], chunk % state[PER_BLOCK]
    block_elements = state[COUNT] if space != 2 else state[CHUNK] * state[PER_BLOCK]
    at = block * block_elements + index * state[CHUNK] + tile * state[TILE]
    return state[SPACE + space] + at * width


@linked
def _piece(state, operation, source, target, arrived, leaving, elements):  # type: ignore[no-untyped-def]
    """Run a step on one chunk's part of a tile; unused addresses may have any value."""
    nbytes, combine = elements * state[WIDTH], state[COMBINE]
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


@linked
def _tag_of(state, counter, number):  # type: ignore[no-untyped-def]
    """Return the address of the tag of slot `number`; state word `counter` has the counter's address."""
    return state[counter] + 8 * (1 + number % state[DEPTH])


@linked
def _ready(state, block, step, tile, receives, sends):  # type: ignore[no-untyped-def]
    """Return whether a step can run: its dependency is done, a slot is filled, a slot is empty."""
    awaited = state[step + AFTER_BLOCK]
    if awaited >= 0:
        other = HEAD + awaited * BLOCK
        there = state[other + AT_TILE]
        if there < tile or (there == tile and state[other + AT_STEP] <= state[step + AFTER_STEP]):
            return False
    if receives and state[block + ARRIVED] <= state[block + TAKEN]:
        state[block + ARRIVED] = load_acquire(state[block + PEER_FILLED])
        if state[block + ARRIVED] <= state[block + TAKEN]:
            return False
    if receives and load_acquire(_tag_of(state, block + PEER_FILLED, state[block + TAKEN])) != state[TAG]:
        state[MISMATCHED] = 1 + state[block + RECEIVES]
        return False
    if sends and state[block + SENT] - state[block + FREED] >= state[DEPTH]:
        state[block + FREED] = load_acquire(state[block + EMPTIED])
        if state[block + SENT] - state[block + FREED] >= state[DEPTH]:
            return False
    return True


@linked
def _turn(state, block):  # type: ignore[no-untyped-def]
    """Run a thread block's next step if it can run; return whether it ran."""
    tile = state[block + AT_TILE]
    if tile == state[TILES]:
        return False
    step = state[block + FIRST] + state[block + AT_STEP] * STEP
    operation, chunks = state[step + OPERATION], state[step + CHUNKS]
    receives, sends = state[step + TAKES], state[step + PUTS]
    if not _ready(state, block, step, tile, receives, sends):
        return False
    depth = state[DEPTH]
    # The last tile has the remaining elements, one per chunk.
    if state[REST] and tile == state[TILES] - 1:
        elements = 1
    else:
        elements = min(state[TILE], state[CHUNK] - tile * state[TILE])
    arrived = state[block + FROM] + state[block + TAKEN] % depth * state[SLOT]
    leaving = state[block + TO] + state[block + SENT] % depth * state[SLOT]
    for chunk in range(chunks):
        _piece(
            state,
            operation,
            _place(state, state[step + SOURCE_SPACE], state[step + SOURCE_AT] + chunk, tile),
            _place(state, state[step + TARGET_SPACE], state[step + TARGET_AT] + chunk, tile),
            arrived,
            leaving,
            elements,
        )
        arrived += elements * state[WIDTH]
        leaving += elements * state[WIDTH]
    # Data first, then tag and counters: a peer that sees a counter also sees the data.
    if receives:
        state[block + TAKEN] += 1
        store_release(state[block + PEER_EMPTIED], state[block + TAKEN])
    if sends:
        store_release(_tag_of(state, block + FILLED, state[block + SENT]), state[TAG])
        state[block + SENT] += 1
        store_release(state[block + FILLED], state[block + SENT])
    state[block + AT_STEP] += 1
    if state[block + AT_STEP] == state[block + STEPS]:
        state[block + AT_STEP] = 0
        state[block + AT_TILE] += 1
    return True


@linked
def _move_rest(state, space, blocks, fills):  # type: ignore[no-untyped-def]
    """Copy the remaining elements of each block into their buffer, or out of it."""
    width, per_block, rest = state[WIDTH], state[PER_BLOCK], state[REST]
    for block in range(blocks):
        at = state[SPACE + space] + (block * state[COUNT] + state[CHUNK] * per_block) * width
        aside = state[REST_SPACE + space] + block * per_block * width
        if fills:
            copy(aside, at, rest * width)
        else:
            copy(at, aside, rest * width)


@compiled
def advance(state, patient):  # type: ignore[no-untyped-def]
    """Advance as far as possible; return 1 once done, otherwise 0 (after microseconds if `patient`)."""
    spins = yields = 0
    while not state[FINISHED]:
        moved, ended = False, True
        for index in range(state[BLOCKS]):
            block = HEAD + index * BLOCK
            if _turn(state, block):
                moved = True
            if state[block + AT_TILE] < state[TILES]:
                ended = False
        if ended:
            if state[DELIVERS]:
                if state[REST]:
                    _move_rest(state, np.int64(1), state[OUTPUTS], np.int64(0))
                if state[DIVIDE]:
                    target = state[SPACE + 1]
                    call(state[DIVIDE], target, target, state[RANKS], state[OUTPUTS] * state[COUNT])
            state[FINISHED] = 1
            ring(state[BELLS])
        elif moved:
            ring(state[BELLS])
            spins = 0
        elif patient and spins < state[SPINS]:
            spins += 1
            pause()
        elif patient and yields < state[YIELDS] and may_yield(state[BELLS]):
            yields += 1
            give_way(state[BELLS])
        else:
            return 0
    return 1


@compiled
def begin(state, source, target):  # type: ignore[no-untyped-def]
    """Start an operation described by `Interpreter.bind`, and `advance` it."""
    width = state[WIDTH]
    if state[STAND_IN] and target != source:
        target = state[STAND_IN]
    if state[STAGE] and source:  # a rank without an input has nothing to copy
        stage = state[STAGE]
        if stage == 1:
            stage = target + state[OWN_INPUT] * width * state[COUNT]
        if stage != source:
            copy(stage, source, state[INPUTS] * state[COUNT] * width)
            source = stage
    state[SPACE], state[SPACE + 1] = source, target
    state[REST_SPACE], state[REST_SPACE + 1] = state[REST_BUFFERS], state[REST_BUFFERS + 1]
    if state[OWN_INPUT] >= 0 and source == target + state[OWN_INPUT] * width * state[COUNT]:
        aside = state[REST_BUFFERS + 1] + state[OWN_INPUT] * width * state[PER_BLOCK]
        state[REST_SPACE] = aside
    elif state[OWN_OUTPUT] >= 0 and target == source + state[OWN_OUTPUT] * width * state[COUNT]:
        aside = state[REST_BUFFERS] + state[OWN_OUTPUT] * width * state[PER_BLOCK]
        state[REST_SPACE + 1] = aside
    if state[REST] and source:
        _move_rest(state, np.int64(0), state[INPUTS], np.int64(1))
    for index in range(state[BLOCKS]):
        block = HEAD + index * BLOCK
        state[block + AT_TILE] = state[TILES] if state[block + STEPS] == 0 else 0
        state[block + AT_STEP] = 0
        if state[block + FILLED]:
            state[block + SENT] = load_acquire(state[block + FILLED])
            state[block + FREED] = load_acquire(state[block + EMPTIED])
        if state[block + PEER_FILLED]:
            state[block + TAKEN] = state[block + ARRIVED] = load_acquire(state[block + PEER_EMPTIED])
    state[FINISHED] = state[MISMATCHED] = 0
    return advance(state, np.int64(1))  # int64, since numba would compile `advance` again for a literal


@cache
def prepare() -> None:
    """Compile the functions, or load them from disk. Takes seconds, during which no peer should wait."""
    words, address = _types.int64[::1], _types.int64
    advance.compile((words, address))
    begin.compile((words, address, address))
