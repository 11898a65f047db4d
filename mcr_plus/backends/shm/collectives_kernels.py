"""Compiled direct collectives: each rank writes to its own area and reads the areas of peers.

Data passes in slices through a ring of slots per rank, in up to three phases. A phase may be ahead of the
next phase by as many slices as there are slots:

    put      copy this rank's data for other ranks into the slot               then `put` += 1
    reduce   once all have put: combine this rank's part in the slot          then `reduced` += 1
    take     once owners have reduced: copy their parts out of their slots     then `taken` += 1

A slot is reused when all ranks have taken from it. The three counters of a rank are on one line that only
this rank writes; they count slices since the creation of the segment, so that operations
follow each other without synchronisation. Each part is reduced by one rank, or in rank order, so all ranks
get the same bits.

If sizes differ between ranks, the number of slices is unknown at first. Then each slot begins with a header:
the rank's number of slices, and the number of elements for each other rank. All ranks continue to the largest
number of slices. A rank that receives an unexpected count discards the data, and `collectives.mismatch`
returns the sender.

`advance` is resumable: it returns after a moment without progress, so that Python checks deadlines, and it
never blocks on a dead peer.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np

from mcr_plus.backends.shm.atomics import (
    STREAMED,
    call,
    copy,
    fence,
    load_acquire,
    pause,
    store_release,
    stream,
)
from mcr_plus.backends.shm.collectives_state import (
    AGREED,
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_WHOLE,
    ALL_TO_ALL,
    AREA,
    AREAS,
    BASE,
    BELLS,
    BROADCAST,
    COMBINE,
    COUNT,
    DIVIDE,
    EXCHANGE,
    GATHER,
    GIVEN,
    HEADER,
    KIND,
    KNOWN_AT,
    LINES,
    MISMATCH,
    PUT,
    PUT_AT,
    RANK,
    RANKS,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_V,
    REDUCED,
    REDUCED_AT,
    RING,
    ROOT,
    SCATTER,
    SHARE,
    SLICE,
    SLICES,
    SOURCE,
    SPINS,
    STREAMS,
    TAG,
    TAGS_AT,
    TAKEN,
    TAKEN_AT,
    TARGET,
    UNEVEN,
    WIDTH,
    WORDS,
    YIELDS,
)
from mcr_plus.backends.shm.segment import LINE
from mcr_plus.backends.shm.wakeup import give_way, may_yield, ring
from mcr_plus.kernels.cpu import compiled, linked

_numba: Any = numba  # partly annotated, which type checkers report
_types: Any = _numba.types


@compiled
def all_reached(state, offset, count):  # type: ignore[no-untyped-def]
    """Return whether the counter at `offset` of every other rank's line is at least `count`."""
    lines = state[LINES]
    for rank in range(state[RANKS]):
        if rank != state[RANK] and load_acquire(lines + rank * LINE + offset) < count:
            return False
    return True


@compiled
def all_put(state, index):  # type: ignore[no-untyped-def]
    """Return whether every other rank has put slice `index` for the same operation.

    A slice of another operation is never taken, so mismatched operations stay pending.
    """
    lines, ring, number = state[LINES], state[RING], state[BASE] + index
    for rank in range(state[RANKS]):
        line = lines + rank * LINE
        if rank != state[RANK] and (
            load_acquire(line + PUT_AT) <= number
            or load_acquire(line + TAGS_AT + number % ring * 8) != state[TAG]
        ):
            return False
    return True


@compiled
def slot_of(state, rank, slice_number):  # type: ignore[no-untyped-def]
    """Return the address of a rank's slot for a slice of this operation."""
    ring = state[RING]
    return state[AREAS] + (rank * ring + (state[BASE] + slice_number) % ring) * state[AREA]


@compiled
def bounds_of(state, rank, elements):  # type: ignore[no-untyped-def]
    """Return the first element of a rank's part of a slice, and the number of elements.

    Parts are whole cache lines, so that ranks never write to the same line.
    """
    ranks, line = state[RANKS], 64 // state[WIDTH]
    part = (elements + ranks * line - 1) // (ranks * line) * line
    low = min(rank * part, elements)
    return low, min((rank + 1) * part, elements) - low


@compiled
def block_of(state, rank, index):  # type: ignore[no-untyped-def]
    """Return the address of a slice of the block from a rank to this rank: in a slot, or in our source."""
    me, width = state[RANK], state[WIDTH]
    exchanged = state[KIND] == ALL_TO_ALL
    if rank != me:
        skip = me * state[SLICE] * width if exchanged else np.int64(0)
        return slot_of(state, rank, index) + skip
    skip = me * state[COUNT] * width if exchanged else np.int64(0)
    return state[SOURCE] + index * state[SLICE] * width + skip


@linked
def _left(state, count, index):  # type: ignore[no-untyped-def]
    """Return the number of elements of slice `index` of `count` elements."""
    return max(0, min(state[SLICE], count - index * state[SLICE]))


@linked
def _put_uneven(state, index):  # type: ignore[no-untyped-def]
    me, ranks, width = state[RANK], state[RANKS], state[WIDTH]
    slot, source, skip = slot_of(state, me, index), state[SOURCE], index * state[SLICE] * width
    store_release(slot, state[SLICES])
    for rank in range(ranks):
        store_release(slot + 8 * (1 + rank), state[WORDS + rank])
    slot += state[HEADER]
    if state[KIND] == SHARE:
        most = 0
        for rank in range(ranks):
            if rank != me:
                most = max(most, state[WORDS + rank])
        copy(slot, source + skip, _left(state, most, index) * width)
        return
    for rank in range(ranks):
        count = state[WORDS + rank]
        if rank != me:
            at = slot + rank * state[SLICE] * width
            copy(at, source + skip, _left(state, count, index) * width)
        source += count * width


@linked
def _agree(state):  # type: ignore[no-untyped-def]
    """Read the number of slices from the headers of all ranks, and check the sizes."""
    me, ranks = state[RANK], state[RANKS]
    for rank in range(ranks):
        slot = slot_of(state, rank, 0)
        state[SLICES] = max(state[SLICES], load_acquire(slot))
        given = load_acquire(slot + 8 * (1 + me))
        if given != state[WORDS + ranks + rank]:
            state[MISMATCH], state[GIVEN] = 1 + rank, given
    state[AGREED] = 1


@linked
def _take_uneven(state, index):  # type: ignore[no-untyped-def]
    """Copy a slice of every rank's data for this rank; this rank's own part comes from the source."""
    me, ranks, width = state[RANK], state[RANKS], state[WIDTH]
    skip = index * state[SLICE] * width
    target = state[TARGET] + skip
    for rank in range(ranks):
        expected = state[WORDS + ranks + rank]
        if rank != me:
            at = slot_of(state, rank, index) + state[HEADER]
            if state[KIND] == EXCHANGE:
                at += me * state[SLICE] * width
        else:
            at = state[SOURCE] + skip
            if state[KIND] == EXCHANGE:
                for before in range(me):
                    at += state[WORDS + before] * width
        if at != target:
            _deliver(state, target, at, _left(state, expected, index) * width)
        target += expected * width


@linked
def _reduce_uneven(state, index):  # type: ignore[no-untyped-def]
    me, ranks, width = state[RANK], state[RANKS], state[WIDTH]
    combine, divide = state[COMBINE], state[DIVIDE]
    elements = _left(state, state[WORDS + me], index)
    left, skip = state[SOURCE], index * state[SLICE] * width
    for before in range(me):
        left += state[WORDS + before] * width
    left, result = left + skip, state[TARGET] + skip
    for rank in range(ranks):
        if rank != me:
            at = slot_of(state, rank, index) + state[HEADER] + me * state[SLICE] * width
            call(combine, result, left, at, elements)
            left = result
    if divide:
        call(divide, result, result, ranks, elements)


@linked
def _put(state, index):  # type: ignore[no-untyped-def]
    kind, me, ranks, width = state[KIND], state[RANK], state[RANKS], state[WIDTH]
    if kind in UNEVEN:
        _put_uneven(state, index)
        return
    first = index * state[SLICE]
    elements = min(state[SLICE], state[COUNT] - first)
    slot, source = slot_of(state, me, index), state[SOURCE]
    if kind in (ALL_REDUCE, REDUCE):
        for rank in range(ranks):
            low, size = bounds_of(state, rank, elements)
            if rank != me and size > 0:
                copy(slot + low * width, source + (first + low) * width, size * width)
    elif kind in (ALL_TO_ALL, REDUCE_SCATTER) or (kind == SCATTER and me == state[ROOT]):
        block = state[COUNT]
        for rank in range(ranks):
            if rank != me:
                at = source + (rank * block + first) * width
                copy(slot + rank * state[SLICE] * width, at, elements * width)
    elif (
        kind in (ALL_GATHER, ALL_REDUCE_WHOLE)
        or (kind == BROADCAST and me == state[ROOT])
        or (kind == GATHER and me != state[ROOT])
    ):
        copy(slot, source + first * width, elements * width)


@linked
def _reduce(state, index):  # type: ignore[no-untyped-def]
    kind, me, ranks, width = state[KIND], state[RANK], state[RANKS], state[WIDTH]
    combine, divide = state[COMBINE], state[DIVIDE]
    if kind == REDUCE_SCATTER_V:
        if not state[MISMATCH]:
            _reduce_uneven(state, index)
        return
    first = index * state[SLICE]
    elements = min(state[SLICE], state[COUNT] - first)
    if kind == ALL_REDUCE_WHOLE:
        target = state[TARGET] + first * width
        call(combine, target, slot_of(state, 0, index), slot_of(state, 1, index), elements)
        for rank in range(2, ranks):
            call(combine, target, target, slot_of(state, rank, index), elements)
        if divide:
            call(divide, target, target, ranks, elements)
        return
    if kind == REDUCE_SCATTER:
        left = state[SOURCE] + (me * state[COUNT] + first) * width
        result = state[TARGET] + first * width
        at, size = me * state[SLICE] * width, elements
    else:
        low, size = bounds_of(state, me, elements)
        left, at = state[SOURCE] + (first + low) * width, low * width
        result = slot_of(state, me, index) + at
    if size > 0:
        for rank in range(ranks):
            if rank != me:
                call(combine, result, left, slot_of(state, rank, index) + at, size)
                left = result
        if divide:
            call(divide, result, result, ranks, size)


@linked
def _deliver(state, target, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy into the caller's buffer, past the caches if the result is larger than the caches."""
    if not state[STREAMS] or nbytes < 2 * STREAMED:
        copy(target, source, nbytes)
        return
    head = -target % STREAMED
    copy(target, source, head)
    for _ in range((nbytes - head) // STREAMED):
        stream(target + head, source + head)
        head += STREAMED
    copy(target + head, source + head, nbytes - head)


@linked
def _take_reduced(state, index, first, elements):  # type: ignore[no-untyped-def]
    """Copy every rank's part of a reduced slice."""
    width = state[WIDTH]
    for rank in range(state[RANKS]):
        low, size = bounds_of(state, rank, elements)
        if size > 0:
            at = slot_of(state, rank, index) + low * width
            _deliver(state, state[TARGET] + (first + low) * width, at, size * width)


@linked
def _take_blocks(state, index, first, elements):  # type: ignore[no-untyped-def]
    """Copy a slice of every rank's block; this rank's own block comes from the source."""
    width = state[WIDTH]
    for rank in range(state[RANKS]):
        target, at = state[TARGET] + (rank * state[COUNT] + first) * width, block_of(state, rank, index)
        if at != target:
            _deliver(state, target, at, elements * width)


@linked
def _take(state, index):  # type: ignore[no-untyped-def]
    kind, me, width, root = state[KIND], state[RANK], state[WIDTH], state[ROOT]
    if kind in UNEVEN:
        if kind != REDUCE_SCATTER_V and not state[MISMATCH]:
            _take_uneven(state, index)
        return
    first = index * state[SLICE]
    elements = min(state[SLICE], state[COUNT] - first)
    target = state[TARGET] + first * width
    if kind == ALL_REDUCE or (kind == REDUCE and me == root):
        _take_reduced(state, index, first, elements)
    elif kind in (ALL_GATHER, ALL_TO_ALL) or (kind == GATHER and me == root):
        _take_blocks(state, index, first, elements)
    elif kind == BROADCAST and me != root:
        _deliver(state, target, slot_of(state, root, index), elements * width)
    elif kind == SCATTER and me != root:
        skip = me * state[SLICE] * width
        _deliver(state, target, slot_of(state, root, index) + skip, elements * width)
    elif kind == SCATTER:
        own = state[SOURCE] + (me * state[COUNT] + first) * width
        if own != target:
            _deliver(state, target, own, elements * width)


@compiled
def may_put(state, count):  # type: ignore[no-untyped-def]
    """Return whether all ranks have taken `count` slices; usually known without reading their lines."""
    if load_acquire(state[LINES] + state[RANK] * LINE + KNOWN_AT) >= count:
        return True
    return all_reached(state, np.int64(TAKEN_AT), count)


@compiled
def may_put_next(state):  # type: ignore[no-untyped-def]
    """Return whether the next slice may be put."""
    put, ring = state[PUT], state[RING]
    return put < state[SLICES] and put < state[TAKEN] + ring and may_put(state, state[BASE] + put + 1 - ring)


@compiled
def has_put(state):  # type: ignore[no-untyped-def]
    """Publish that the next slice has been put."""
    line, number = state[LINES] + state[RANK] * LINE, state[BASE] + state[PUT]
    store_release(line + TAGS_AT + number % state[RING] * 8, state[TAG])
    state[PUT] += 1
    store_release(line + PUT_AT, number + 1)


@compiled
def may_reduce_next(state):  # type: ignore[no-untyped-def]
    """Return whether the next slice may be reduced; False for kinds without a reduction."""
    kind, reduced = state[KIND], state[REDUCED]
    reduces = kind in (ALL_REDUCE, REDUCE, REDUCE_SCATTER, REDUCE_SCATTER_V, ALL_REDUCE_WHOLE)
    return reduces and reduced < state[PUT] and all_put(state, reduced)


@compiled
def has_reduced(state):  # type: ignore[no-untyped-def]
    """Publish that the next slice has been reduced, if peers take the sums."""
    state[REDUCED] += 1
    if state[KIND] in (ALL_REDUCE, REDUCE):
        store_release(state[LINES] + state[RANK] * LINE + REDUCED_AT, state[BASE] + state[REDUCED])


@compiled
def may_take_next(state):  # type: ignore[no-untyped-def]
    """Return whether the next slice may be taken."""
    kind, taken = state[KIND], state[TAKEN]
    if kind in (REDUCE_SCATTER, REDUCE_SCATTER_V, ALL_REDUCE_WHOLE):
        return taken < state[REDUCED]
    if kind in (ALL_REDUCE, REDUCE):
        return taken < state[REDUCED] and all_reached(state, np.int64(REDUCED_AT), state[BASE] + taken + 1)
    return taken < state[PUT] and all_put(state, taken)


@compiled
def has_taken(state):  # type: ignore[no-untyped-def]
    """Publish that the next slice has been taken."""
    state[TAKEN] += 1
    store_release(state[LINES] + state[RANK] * LINE + TAKEN_AT, state[BASE] + state[TAKEN])


@linked
def _step(state):  # type: ignore[no-untyped-def]
    """Run each phase for one slice if possible; return whether any phase ran."""
    moved = False
    if may_put_next(state):
        _put(state, state[PUT])
        has_put(state)
        moved = True
    if not state[AGREED]:
        if not state[PUT] or not all_put(state, np.int64(0)):
            return moved
        _agree(state)
        moved = True
    if may_reduce_next(state):
        _reduce(state, state[REDUCED])
        has_reduced(state)
        moved = True
    if may_take_next(state):
        _take(state, state[TAKEN])
        has_taken(state)
        moved = True
    return moved


@compiled
def advance(state, patient):  # type: ignore[no-untyped-def]
    """Advance as far as possible; return 1 once done, otherwise 0 (after microseconds if `patient`)."""
    spins = yields = 0
    while state[TAKEN] < state[SLICES] or not state[AGREED]:
        if _step(state):
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
    if state[SLICES]:  # a rank that has put a slice of this operation has taken all earlier slices
        store_release(state[LINES] + state[RANK] * LINE + KNOWN_AT, state[BASE])
    if state[STREAMS]:
        fence()
    return 1


@compiled
def begin(state, source, target):  # type: ignore[no-untyped-def]
    """Start an operation described by `DirectCollectives.bind`, and `advance` it."""
    # At the end of an operation this rank has taken all slices that were put.
    state[BASE] = load_acquire(state[LINES] + state[RANK] * LINE + TAKEN_AT)
    state[PUT] = state[REDUCED] = state[TAKEN] = 0
    state[MISMATCH] = 0
    state[SOURCE] = source
    state[TARGET] = target
    return advance(state, np.int64(1))  # int64, since numba would compile `advance` again for a literal


@cache
def prepare() -> None:
    """Compile the functions, or load them from disk. Takes seconds, during which no peer should wait."""
    words, address = _types.int64[::1], _types.int64
    advance.compile((words, address))
    begin.compile((words, address, address))


def begin_at() -> tuple[Any, Any]:
    """Describe `begin` as a C function of the address of a state, see `images.image`."""

    def begin_there(state, source, target):  # type: ignore[no-untyped-def]
        return begin(_numba.carray(state, (WORDS,)), source, target)

    return _types.int64(_types.CPointer(_types.int64), _types.int64, _types.int64), begin_there


def advance_at() -> tuple[Any, Any]:
    """Describe `advance` as a C function of the address of a state."""

    def advance_there(state, patient):  # type: ignore[no-untyped-def]
        return advance(_numba.carray(state, (WORDS,)), patient)

    return _types.int64(_types.CPointer(_types.int64), _types.int64), advance_there
