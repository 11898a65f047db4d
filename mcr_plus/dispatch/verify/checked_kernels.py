"""Compiled functions of the direct collectives of shared memory that take checksums of what they move.

The phases are those of `mcr_plus.backends.shm.collectives_kernels`, for kinds whose sizes are equal on all
ranks. Data pass in blocks of 64 KiB: the checksum of a block is taken while it is in the core's cache, of the
source right before it is copied into the slot, and of the target once a block has been copied there. Of a
reduction, a part of 8 KiB is taken of a peer's slot, then added, and the sums are taken once they are stored,
all in the nearest cache. Copies are those of the C library, which write to memory without reading it first: a
loop that copies and takes the checksum at once does not, and takes longer than the two one after the other.
Then the words of the flows are joined, this rank's row is posted, and the rows of all ranks are compared, all
in one call.

A state is that of `DirectCollectives.bind` with further words.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numba
import numpy as np

from mcr_plus.backends.shm.atomics import call, copy, load_acquire, pause, store_release
from mcr_plus.backends.shm.collectives_kernels import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_WHOLE,
    ALL_TO_ALL,
    BASE,
    BELLS,
    BROADCAST,
    COMBINE,
    COUNT,
    DIVIDE,
    KIND,
    KNOWN_AT,
    LINES,
    PUT,
    PUT_AT,
    RANK,
    RANKS,
    REDUCE_SCATTER,
    REDUCED,
    REDUCED_AT,
    RING,
    ROOT,
    SLICE,
    SLICES,
    SOURCE,
    SPINS,
    TAG,
    TAGS_AT,
    TAKEN,
    TAKEN_AT,
    TARGET,
    WIDTH,
    WORDS,
    YIELDS,
    all_put,
    all_reached,
    block_of,
    bounds_of,
    may_put,
    slot_of,
)
from mcr_plus.backends.shm.segment import LINE
from mcr_plus.backends.shm.wakeup import give_way, may_yield, ring
from mcr_plus.dispatch.verify.flows import GOT, GOT_SUMS, SENT, SENT_SUMS
from mcr_plus.dispatch.verify.row_kernels import MISSING, claim, gathered, post
from mcr_plus.kernels.checksum import (
    BLOCK,
    CHAIN_BYTES,
    begin_block,
    block_checksum,
    end_block,
    join,
    take_part,
)
from mcr_plus.kernels.cpu import compiled

_types: Any = numba.types  # partly annotated, which type checkers report here

# Further words of the state.
STEP: Final = WORDS  # blocks of each flow in a slice that is not the last
FLOWS: Final = WORDS + 1  # `join`: address and number of flows, addresses of checksums and of the row
FLOW_COUNT: Final = WORDS + 2
CHECKSUMS: Final = WORDS + 3
ROW: Final = WORDS + 4
ROW_WORDS: Final = WORDS + 5
ROWS: Final = WORDS + 6  # address of the rows of all ranks
STRIDE: Final = WORDS + 7  # bytes from a rank's rows to those of the next one
NUMBER: Final = WORDS + 8  # of the exchange, and address of its rows
FIRST: Final = WORDS + 9
POSTED: Final = WORDS + 10
VERDICT: Final = WORDS + 11
FAULT: Final = WORDS + 12  # where a bit flips in tests: one of the places below, 0 for nowhere
FAULT_AFTER: Final = WORDS + 13  # after so many times at that place
FAULT_BYTE: Final = WORDS + 14  # modulo the bytes there
FAULT_MASK: Final = WORDS + 15  # of the bit, in its byte
FAULT_WORD: Final = WORDS + 16
CHAINS: Final = WORDS + 17  # address of `CHAIN_BYTES` for each rank and for the sums
COUNTER: Final = WORDS + 18  # address of the number of the last exchange
TABLE: Final = WORDS + 19  # for each end and peer the address of the first checksum of the flow, or 0
KINDS: Final = (ALL_REDUCE, ALL_REDUCE_WHOLE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, BROADCAST)

IN_SLOT: Final = 1  # values that have been put
IN_SUMS: Final = 2  # sums in a slot
IN_TARGET: Final = 3  # what has been copied to the target
IN_PEER: Final = 4  # in a peer's slot, before it is added

_TRIES: Final = 20  # looks at the rows of others for each of a state's spins
_PART: Final = 8 << 10  # bytes that are added in one go: they stay in the nearest cache


@compiled
def _damage(state, place, address, nbytes):  # type: ignore[no-untyped-def]
    """Flip the bit that a test has asked for."""
    if state[FAULT] != place or nbytes <= 0:
        return
    if state[FAULT_AFTER]:
        state[FAULT_AFTER] -= 1
        return
    at, byte = address + state[FAULT_BYTE] % nbytes, state.ctypes.data + 8 * FAULT_WORD
    state[FAULT_WORD] = 0
    copy(byte, at, 1)
    store_release(byte, load_acquire(byte) ^ state[FAULT_MASK])
    copy(at, byte, 1)
    state[FAULT] = 0


@compiled
def _check(out, block, address, nbytes):  # type: ignore[no-untyped-def]
    store_release(out + 8 * block, block_checksum(address, nbytes))


@compiled
def _first(state, end, peer, index):  # type: ignore[no-untyped-def]
    """Address of the checksum of the first block of a flow in slice `index`."""
    return state[TABLE + end * state[RANKS] + peer] + 8 * index * state[STEP]


@compiled
def _send(state, peer, index, slot, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy values into the slot."""
    out = _first(state, SENT, peer, index)
    for block in range((nbytes + BLOCK - 1) // BLOCK):
        skip = block * BLOCK
        size = min(BLOCK, nbytes - skip)
        _check(out, block, source + skip, size)
        copy(slot + skip, source + skip, size)
    _damage(state, IN_SLOT, slot, nbytes)


@compiled
def _deliver(state, end, peer, index, target, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy what a peer has sent to the target, unless it is there."""
    out, own = _first(state, end, peer, index), np.int64(0)
    if state[KIND] == ALL_TO_ALL and peer == state[RANK]:  # what no slot holds is checked here
        own = _first(state, SENT, peer, index)
    for block in range((nbytes + BLOCK - 1) // BLOCK):
        skip = block * BLOCK
        size = min(BLOCK, nbytes - skip)
        if own:
            _check(own, block, source + skip, size)
        if target != source:
            copy(target + skip, source + skip, size)
        _damage(state, IN_TARGET, target + skip, size)
        _check(out, block, target + skip, size)


@compiled
def _put(state, index, elements):  # type: ignore[no-untyped-def]
    kind, me, width = state[KIND], state[RANK], state[WIDTH]
    first = index * state[SLICE]
    slot, source = slot_of(state, me, index), state[SOURCE]
    if kind == ALL_REDUCE:
        for rank in range(state[RANKS]):
            low, size = bounds_of(state, rank, elements)
            if rank != me:
                _send(state, rank, index, slot + low * width, source + (first + low) * width, size * width)
    elif kind in (ALL_TO_ALL, REDUCE_SCATTER):
        for rank in range(state[RANKS]):
            at = source + (rank * state[COUNT] + first) * width
            if rank != me:
                _send(state, rank, index, slot + rank * state[SLICE] * width, at, elements * width)
    elif kind != BROADCAST or me == state[ROOT]:
        _send(state, 0, index, slot, source + first * width, elements * width)


@compiled
def _reduce(state, index, elements):  # type: ignore[no-untyped-def]
    """Add up a slice in blocks: the order of ranks is that of `collectives_kernels`."""
    kind, me, width = state[KIND], state[RANK], state[WIDTH]
    first = index * state[SLICE]
    own, result, skip, count = np.int64(0), state[TARGET] + first * width, np.int64(0), elements
    if kind == ALL_REDUCE:
        low, count = bounds_of(state, me, elements)
        own, skip = state[SOURCE] + (first + low) * width, low * width
        result = slot_of(state, me, index) + skip
    elif kind == REDUCE_SCATTER:
        own = state[SOURCE] + (me * state[COUNT] + first) * width
        skip = me * state[SLICE] * width
    nbytes = count * width
    for block in range((nbytes + BLOCK - 1) // BLOCK):
        at = block * BLOCK
        _reduce_block(state, index, block, own + at, result + at, skip + at, min(BLOCK, nbytes - at))
    if kind == ALL_REDUCE:
        _damage(state, IN_SUMS, result, nbytes)


@compiled
def _reduce_block(state, index, block, own, result, skip, nbytes):  # type: ignore[no-untyped-def]
    kind, me, ranks, width = state[KIND], state[RANK], state[RANKS], state[WIDTH]
    whole, sums = kind == ALL_REDUCE_WHOLE, state[CHAINS] + ranks * CHAIN_BYTES
    for rank in range(ranks + 1):
        begin_block(state[CHAINS] + rank * CHAIN_BYTES)
    for part in range((nbytes + _PART - 1) // _PART):
        at = part * _PART
        size = min(_PART, nbytes - at)
        left = own + at
        for rank in range(ranks):
            if rank == me and not whole:
                continue
            right = slot_of(state, rank, index) + skip + at
            _damage(state, IN_PEER, right, size)
            take_part(state[CHAINS] + rank * CHAIN_BYTES, right, size)
            if whole and rank == 0:
                left = right
                continue
            call(state[COMBINE], result + at, left, right, size // width)
            left = result + at
        if state[DIVIDE]:
            call(state[DIVIDE], result + at, result + at, ranks, size // width)
        if whole:
            _damage(state, IN_SUMS, result + at, size)
        if kind != REDUCE_SCATTER:
            take_part(sums, result + at, size)
    for rank in range(ranks):
        if rank != me or whole:
            end = end_block(state[CHAINS] + rank * CHAIN_BYTES)
            store_release(_first(state, GOT, rank, index) + 8 * block, end)
    if kind != REDUCE_SCATTER:
        store_release(_first(state, SENT_SUMS, np.int64(0), index) + 8 * block, end_block(sums))


@compiled
def _take(state, index, elements):  # type: ignore[no-untyped-def]
    kind, me, width = state[KIND], state[RANK], state[WIDTH]
    first = index * state[SLICE]
    if kind == BROADCAST:
        root = state[ROOT]
        if me == root:
            target = state[SOURCE] + first * width
            _deliver(state, GOT, root, index, target, target, elements * width)
        else:
            at = slot_of(state, root, index)
            _deliver(state, GOT, root, index, state[TARGET] + first * width, at, elements * width)
    elif kind == ALL_REDUCE:
        for rank in range(state[RANKS]):
            low, size = bounds_of(state, rank, elements)
            at, target = slot_of(state, rank, index) + low * width, state[TARGET] + (first + low) * width
            _deliver(state, GOT_SUMS, rank, index, target, at, size * width)
    elif kind in (ALL_GATHER, ALL_TO_ALL):
        for rank in range(state[RANKS]):
            target, at = state[TARGET] + (rank * state[COUNT] + first) * width, block_of(state, rank, index)
            _deliver(state, GOT, rank, index, target, at, elements * width)


@compiled
def _elements(state, index):  # type: ignore[no-untyped-def]
    return min(state[SLICE], state[COUNT] - index * state[SLICE])


@compiled
def _step(state):  # type: ignore[no-untyped-def]
    """Run each phase for one slice if possible; returns whether any ran."""
    kind, base = state[KIND], state[BASE]
    line = state[LINES] + state[RANK] * LINE
    put, reduced, taken = state[PUT], state[REDUCED], state[TAKEN]
    moved = False
    if put < state[SLICES] and put < taken + state[RING] and may_put(state, base + put + 1 - state[RING]):
        _put(state, put, _elements(state, put))
        store_release(line + TAGS_AT + (base + put) % state[RING] * 8, state[TAG])
        put += 1
        state[PUT] = put
        store_release(line + PUT_AT, base + put)
        moved = True
    reduces = kind in (ALL_REDUCE, REDUCE_SCATTER, ALL_REDUCE_WHOLE)
    if reduces and reduced < put and all_put(state, reduced):
        _reduce(state, reduced, _elements(state, reduced))
        reduced += 1
        state[REDUCED] = reduced
        moved = True
        if kind == ALL_REDUCE:
            store_release(line + REDUCED_AT, base + reduced)
    if kind == ALL_REDUCE:
        may_take = taken < reduced and all_reached(state, np.int64(REDUCED_AT), base + taken + 1)
    elif reduces:
        may_take = taken < reduced
    else:
        may_take = taken < put and all_put(state, taken)
    if may_take:
        _take(state, taken, _elements(state, taken))
        taken += 1
        state[TAKEN] = taken
        store_release(line + TAKEN_AT, base + taken)
        moved = True
    return moved


@compiled
def advance(state, patient):  # type: ignore[no-untyped-def]
    """Advance as far as possible: 1 once `VERDICT` is there, else 0, after microseconds if `patient`."""
    spins = yields = 0
    while not state[POSTED] or state[VERDICT] == MISSING:
        if state[TAKEN] < state[SLICES]:
            moved = _step(state)
        elif not state[POSTED]:
            store_release(state[LINES] + state[RANK] * LINE + KNOWN_AT, state[BASE])
            join(state[FLOWS], state[FLOW_COUNT], state[CHECKSUMS], state[ROW])
            place = state[FIRST] + state[RANK] * state[STRIDE]
            post(state[ROW], state[ROW_WORDS], place, state[NUMBER])
            state[POSTED] = 1
            moved = True
        else:
            tries = np.int64(_TRIES) if patient else np.int64(0)
            state[VERDICT] = gathered(state[FIRST], state[STRIDE], state[RANKS], state[NUMBER], tries)
            moved = False
        if moved:
            ring(state[BELLS])
            spins = 0
        elif state[POSTED] and state[VERDICT] != MISSING:
            break
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
    """Start an operation, and `advance` it."""
    state[BASE] = load_acquire(state[LINES] + state[RANK] * LINE + TAKEN_AT)
    state[PUT] = state[REDUCED] = state[TAKEN] = 0
    state[POSTED] = state[VERDICT] = 0
    state[NUMBER] = claim(state[COUNTER])
    state[FIRST] = state[ROWS] + state[NUMBER] % 2 * (state[STRIDE] // 2)
    state[SOURCE] = source
    state[TARGET] = target
    return advance(state, np.int64(1))


@cache
def prepare() -> None:
    """Compile the functions, or load them from disk."""
    words, address = _types.int64[::1], _types.int64
    advance.compile((words, address))
    begin.compile((words, address, address))
