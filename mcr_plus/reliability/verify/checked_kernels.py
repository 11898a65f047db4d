"""Kernels of shared-memory collectives that take checksums of moved data.

The phases are the same as in `mcr_plus.backends.shm.collectives_kernels`, for kinds with equal sizes on all
ranks. Data pass in blocks of 64 KiB. One loop copies a block into the slot and takes its checksum; the
checksum of the target is taken right after a block is copied there, while it is in the core's cache. Results
larger than the caches bypass the caches, as without checksums; then the checksum is taken of the written
values. A reduction takes the checksum of 8 KiB in a peer's slot, adds them, and takes the checksum of the
stored sums, all in the nearest cache. Data that a rank sends to itself are copied and compared, without a
checksum.

Then the words of the flows are joined, this rank's row is posted, and the rows of all ranks are compared, all
in one call.

A state is the state of `DirectCollectives.bind` with further words.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numba
import numpy as np

from mcr_plus.backends.shm.atomics import (
    STREAMED,
    call,
    copy,
    differs,
    fence,
    load_acquire,
    pause,
    store_release,
    stream,
)
from mcr_plus.backends.shm.collectives_state import (
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
    RANK,
    RANKS,
    REDUCE_SCATTER,
    REDUCED,
    ROOT,
    SLICE,
    SLICES,
    SOURCE,
    SPINS,
    STREAMS,
    TAKEN,
    TAKEN_AT,
    TARGET,
    WIDTH,
    WORDS,
    YIELDS,
)
from mcr_plus.backends.shm.faults import FAULT_WORDS, damage
from mcr_plus.backends.shm.segment import LINE
from mcr_plus.backends.shm.slice_kernels import (
    block_of,
    bounds_of,
    has_put,
    has_reduced,
    has_taken,
    may_put_next,
    may_reduce_next,
    may_take_next,
    slot_of,
)
from mcr_plus.backends.shm.wakeup import give_way, may_yield, ring
from mcr_plus.kernels.checksum import (
    begin_block,
    block_checksum,
    copy_block,
    end_block,
    join,
    stream_block,
    take_part,
)
from mcr_plus.kernels.checksum_sizes import BLOCK, CHAIN_BYTES
from mcr_plus.kernels.cpu import compiled, linked
from mcr_plus.reliability.verify.checksum_table import GOT, GOT_SUMS, SENT, SENT_SUMS
from mcr_plus.reliability.verify.row_kernels import MISSING, claim, gathered, post

_types: Any = numba.types  # numba's partial annotations make type checkers report errors here

# Further words of the state.
STEP: Final = WORDS  # blocks of each flow in every slice but the last
FLOWS: Final = WORDS + 1  # `join`: address and number of flows, addresses of checksums and of the row
FLOW_COUNT: Final = WORDS + 2
CHECKSUMS: Final = WORDS + 3
ROW: Final = WORDS + 4
ROW_WORDS: Final = WORDS + 5
ROWS: Final = WORDS + 6  # address of the rows of all ranks
STRIDE: Final = WORDS + 7  # bytes from one rank's rows to the next rank's
NUMBER: Final = WORDS + 8  # number of the exchange, and address of its rows
FIRST: Final = WORDS + 9
POSTED: Final = WORDS + 10
VERDICT: Final = WORDS + 11
FAULT: Final = WORDS + 12  # see `faults`
CHAINS: Final = FAULT + FAULT_WORDS  # address of `CHAIN_BYTES` for each rank and for the sums
COUNTER: Final = CHAINS + 1  # address of the number of the last exchange
TABLE: Final = CHAINS + 2  # address of the first checksum of the flow for each end and peer, or 0
KINDS: Final = (ALL_REDUCE, ALL_REDUCE_WHOLE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, BROADCAST)

IN_SLOT: Final = 1  # values put into the slot
IN_SUMS: Final = 2  # sums in a slot
IN_TARGET: Final = 3  # values copied to the target
IN_PEER: Final = 4  # a peer's slot, before it is added, or values written past the caches

_TRIES: Final = 20  # checks of other ranks' rows per spin of a state
_PART: Final = 8 << 10  # bytes added at a time: they stay in the nearest cache


@linked
def _damage(state, place, address, nbytes):  # type: ignore[no-untyped-def]
    damage(state.ctypes.data + 8 * FAULT, np.int64(place), address, nbytes)


@linked
def _first(state, end, peer, index):  # type: ignore[no-untyped-def]
    """Return the address of the checksum of a flow's first block in slice `index`."""
    return state[TABLE + end * state[RANKS] + peer] + 8 * index * state[STEP]


@linked
def _send(state, peer, index, slot, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy values into the slot."""
    out = _first(state, SENT, peer, index)
    for block in range((nbytes + BLOCK - 1) // BLOCK):
        skip = block * BLOCK
        size = min(BLOCK, nbytes - skip)
        store_release(out + 8 * block, copy_block(slot + skip, source + skip, size))
    _damage(state, IN_SLOT, slot, nbytes)


@linked
def _deliver(state, end, peer, index, target, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy a peer's data to the target.

    The checksum is taken from the target, read again, or, if the write bypasses the caches, from the written
    values.
    """
    out = _first(state, end, peer, index)
    streams = state[STREAMS] and target % STREAMED == 0
    for block in range((nbytes + BLOCK - 1) // BLOCK):
        skip = block * BLOCK
        size = min(BLOCK, nbytes - skip)
        if streams:
            _damage(state, IN_PEER, source + skip, size)
            store_release(out + 8 * block, stream_block(target + skip, source + skip, size))
            continue
        copy(target + skip, source + skip, size)
        _damage(state, IN_TARGET, target + skip, size)
        store_release(out + 8 * block, block_checksum(target + skip, size))


@linked
def _keep(state, index, target, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy this rank's data to its own target unless they are in place, and compare both.

    If both are equal, the received checksums are set to the sent ones (0 for an all_to_all), otherwise to
    other values.
    """
    me = state[RANK]
    sent = _first(state, SENT, me if state[KIND] == ALL_TO_ALL else np.int64(0), index)
    out = _first(state, GOT, me, index)
    moves, streams = target != source, state[STREAMS] and target % STREAMED == 0
    for block in range((nbytes + BLOCK - 1) // BLOCK):
        end, different = min((block + 1) * BLOCK, nbytes), np.int64(0)
        for skip in range(block * BLOCK, end, _PART):
            size = min(np.int64(_PART), end - skip)
            if moves and streams:
                for at in range(skip, skip + size - STREAMED + 1, STREAMED):
                    stream(target + at, source + at)
                rest = size % STREAMED
                copy(target + skip + size - rest, source + skip + size - rest, rest)
            elif moves:
                copy(target + skip, source + skip, size)
                _damage(state, IN_TARGET, target + skip, size)
                different |= differs(target + skip, source + skip, size)
        store_release(out + 8 * block, load_acquire(sent + 8 * block) + different)


@linked
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


@linked
def _reduce(state, index, elements):  # type: ignore[no-untyped-def]
    """Add a slice block by block, in the rank order of `collectives_kernels`."""
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


@linked
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


@linked
def _take(state, index, elements):  # type: ignore[no-untyped-def]
    kind, me, width = state[KIND], state[RANK], state[WIDTH]
    first = index * state[SLICE]
    if kind == BROADCAST:
        root = state[ROOT]
        if me == root:
            _keep(state, index, state[SOURCE], state[SOURCE], elements * width)
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
            if rank == me:
                _keep(state, index, target, at, elements * width)
            else:
                _deliver(state, GOT, rank, index, target, at, elements * width)


@linked
def _elements(state, index):  # type: ignore[no-untyped-def]
    return min(state[SLICE], state[COUNT] - index * state[SLICE])


@linked
def _step(state):  # type: ignore[no-untyped-def]
    """Run each phase for one slice if possible; return whether any phase ran."""
    moved = False
    if may_put_next(state):
        _put(state, state[PUT], _elements(state, state[PUT]))
        has_put(state)
        moved = True
    if may_reduce_next(state):
        _reduce(state, state[REDUCED], _elements(state, state[REDUCED]))
        has_reduced(state)
        moved = True
    if may_take_next(state):
        _take(state, state[TAKEN], _elements(state, state[TAKEN]))
        has_taken(state)
        moved = True
    return moved


@compiled
def advance(state, patient):  # type: ignore[no-untyped-def]
    """Advance as far as possible; return 1 once `VERDICT` is set, else 0. `patient`: wait microseconds."""
    spins = yields = 0
    while not state[POSTED] or state[VERDICT] == MISSING:
        if state[TAKEN] < state[SLICES]:
            moved = _step(state)
        elif not state[POSTED]:
            store_release(state[LINES] + state[RANK] * LINE + KNOWN_AT, state[BASE])
            if state[STREAMS]:
                fence()
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
