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

A rank whose memory all peers can read may expose its data: it puts addresses into the slot, and peers copy
from there (decision 62). An all_reduce then leaves the sums of a part in the target of the rank that reduces
it. Operations that expose data end when all peers have taken them.

If sizes differ between ranks, the number of slices is unknown at first. Then each slot begins with a header:
the rank's number of slices, and the number of elements for each other rank. All ranks continue to the largest
number of slices. A rank that receives an unexpected count discards the data, and `collectives.mismatch`
returns the sender.

`advance` is resumable: it returns after a moment without progress, so that Python checks deadlines, and it
never blocks on a dead peer.
"""

# Long because all kinds share the phases and a state.

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np

from mcr_plus.backends.shm.atomics import (
    call,
    fence,
    load_acquire,
    pause,
    store_release,
)
from mcr_plus.backends.shm.collectives_state import (
    AGREED,
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_WHOLE,
    ALL_TO_ALL,
    BASE,
    BEGAN,
    BELLS,
    BOUNCE,
    BROADCAST,
    CHUNK,
    COMBINE,
    COPIED,
    COUNT,
    DIVIDE,
    EXCHANGE,
    EXPOSES,
    GATHER,
    GIVEN,
    HEADER,
    IN_PLACE,
    KIND,
    KNOWN_AT,
    LINES,
    MISMATCH,
    NEVER,
    PAGE,
    PAST_CACHES,
    PUT,
    RANK,
    RANKS,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_V,
    REDUCED,
    ROOT,
    SCATTER,
    SHARE,
    SHARING,
    SLICE,
    SLICES,
    SOURCE,
    SPINS,
    STREAMS,
    SUMS,
    TABLE,
    TAKEN,
    TAKEN_AT,
    TARGET,
    UNEVEN,
    UNREADABLE,
    WAY,
    WIDTH,
    WORDS,
    YIELDS,
)
from mcr_plus.backends.shm.segment import LINE
from mcr_plus.backends.shm.slice_kernels import (
    all_put,
    block_of,
    bounds_of,
    deliver,
    expose,
    fill,
    first_of,
    hands_over,
    has_ended,
    has_put,
    has_reduced,
    has_taken,
    is_exposed,
    may_expose,
    may_put_next,
    may_reduce_next,
    may_take_next,
    move,
    next_way,
    note_trial,
    place_of,
    read_exposed,
    slot_of,
)
from mcr_plus.backends.shm.wakeup import give_way, may_yield, ring
from mcr_plus.kernels.cpu import compiled, linked

_numba: Any = numba  # partly annotated, which type checkers report
_types: Any = _numba.types


@linked
def _left(state, count, index):  # type: ignore[no-untyped-def]
    """Return the number of elements of slice `index` of `count` elements."""
    return max(0, min(state[SLICE], count - index * state[SLICE]))


@linked
def _put_uneven(state, index):  # type: ignore[no-untyped-def]
    me, ranks, width = state[RANK], state[RANKS], state[WIDTH]
    slot, source, skip = slot_of(state, me, index), state[SOURCE], index * state[SLICE] * width
    store_release(slot, state[SLICES])
    most = 0
    for rank in range(ranks):
        store_release(slot + 8 * (1 + rank), state[WORDS + rank])
        if rank != me:
            most = max(most, state[WORDS + rank])
    place = place_of(state, index, most)
    store_release(slot + 8 * (1 + ranks), place)
    if state[EXPOSES]:
        expose(state, index)
        return
    slot += state[HEADER] + place
    if state[KIND] == SHARE:
        fill(state, slot, source + skip, _left(state, most, index) * width)
        return
    for rank in range(ranks):
        count = state[WORDS + rank]
        if rank != me:
            at = slot + rank * state[SLICE] * width
            fill(state, at, source + skip, _left(state, count, index) * width)
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
    """Copy a slice of every rank's data for this rank; this rank's own part comes from the source.

    Return False if the memory of a rank cannot be read.
    """
    me, ranks, width = state[RANK], state[RANKS], state[WIDTH]
    skip = index * state[SLICE] * width
    target = state[TARGET] + skip
    start = first_of(me, ranks)
    for before in range(start):
        target += state[WORDS + ranks + before] * width
    for step in range(ranks):
        rank = (start + step) % ranks
        if rank == 0:
            target = state[TARGET] + skip
        expected = state[WORDS + ranks + rank]
        nbytes = _left(state, expected, index) * width
        slot, first = slot_of(state, rank, index), skip
        if state[KIND] == EXCHANGE:
            for before in range(me):
                sent = state[WORDS + before] if rank == me else load_acquire(slot + 8 * (1 + before))
                first += sent * width
        if rank != me and is_exposed(state, rank, index):
            if nbytes and not read_exposed(state, rank, index, 1, first, target, nbytes):
                return False
        else:
            at = state[SOURCE] + first
            if rank != me:
                at = slot + state[HEADER] + load_acquire(slot + 8 * (1 + ranks))
                if state[KIND] == EXCHANGE:
                    at += me * state[SLICE] * width
            if at != target:
                deliver(state, target, at, nbytes)
        target += expected * width
    return True


@linked
def _sum_all(state, result, own, elements):  # type: ignore[no-untyped-def]
    """Reduce this rank's values at `own`, and those of peers, whose addresses are in the table."""
    store_release(state[TABLE] + 8 * state[RANK], own)
    call(state[SUMS], result, state[TABLE], state[RANKS], elements)
    if state[DIVIDE]:
        call(state[DIVIDE], result, result, state[RANKS], elements)


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
            slot = slot_of(state, rank, index)
            at = slot + state[HEADER] + load_acquire(slot + 8 * (1 + ranks)) + me * state[SLICE] * width
            if state[SUMS]:
                store_release(state[TABLE] + 8 * rank, at)
                continue
            call(combine, result, left, at, elements)
            left = result
    if state[SUMS]:
        _sum_all(state, result, left, elements)
        return
    if divide:
        call(divide, result, result, ranks, elements)


@linked
def _put_and_keep(state, slot, source, first, nbytes):  # type: ignore[no-untyped-def]
    """Copy into the slot, and to this rank's own block while the caches hold the data."""
    own = state[TARGET] + (state[RANK] * state[COUNT] + first) * state[WIDTH]
    for low in range(0, nbytes, CHUNK):
        size = min(CHUNK, nbytes - low)
        fill(state, slot + low, source + low, size)
        if source != own:
            deliver(state, own + low, source + low, size)


@linked
def _put(state, index):  # type: ignore[no-untyped-def]
    kind, me, ranks, width = state[KIND], state[RANK], state[RANKS], state[WIDTH]
    if kind in UNEVEN:
        _put_uneven(state, index)
        return
    if state[EXPOSES]:
        expose(state, index)
        return
    first = index * state[SLICE]
    elements = min(state[SLICE], state[COUNT] - first)
    slot, source = slot_of(state, me, index), state[SOURCE]
    if kind in (ALL_REDUCE, REDUCE):
        for rank in range(ranks):
            low, size = bounds_of(state, rank, elements)
            if rank != me and size > 0:
                fill(state, slot + low * width, source + (first + low) * width, size * width)
    elif kind in (ALL_TO_ALL, REDUCE_SCATTER) or (kind == SCATTER and me == state[ROOT]):
        block = state[COUNT]
        for rank in range(ranks):
            if rank != me:
                at = source + (rank * block + first) * width
                fill(state, slot + rank * state[SLICE] * width, at, elements * width)
    elif kind == ALL_GATHER and state[STREAMS]:
        _put_and_keep(state, slot, source + first * width, first, elements * width)
    elif (
        kind in (ALL_GATHER, ALL_REDUCE_WHOLE)
        or (kind == BROADCAST and me == state[ROOT])
        or (kind == GATHER and me != state[ROOT])
    ):
        fill(state, slot, source + first * width, elements * width)


@linked
def _reduce_parts(state, index, result, left, at, skip, elements):  # type: ignore[no-untyped-def]
    """Combine `left` with the parts of peers: at `at` in slots, at `skip` in sources that are exposed."""
    combine, divide, width = state[COMBINE], state[DIVIDE], state[WIDTH]
    step = CHUNK // width
    streams = state[WAY] == PAST_CACHES and state[KIND] in (ALL_REDUCE, REDUCE)  # to a slot
    for low in range(0, elements, step):
        offset, size = low * width, min(step, elements - low)
        own = left + offset
        into = state[BOUNCE] + CHUNK if streams else result + offset
        for rank in range(state[RANKS]):
            if rank != state[RANK]:
                other = slot_of(state, rank, index) + at + offset
                if is_exposed(state, rank, index):
                    other = state[BOUNCE] + (2 + rank) * CHUNK * (state[SUMS] != 0)
                    if not read_exposed(state, rank, index, 1, skip + offset, other, size * width):
                        return False
                if state[SUMS]:
                    store_release(state[TABLE] + 8 * rank, other)
                    continue
                call(combine, into, own, other, size)
                own = into
        if state[SUMS]:
            _sum_all(state, into, own, size)
        elif divide:
            call(divide, own, own, state[RANKS], size)
        if streams:
            move(result + offset, into, size * width, True)
    return True


@linked
def _reduce(state, index):  # type: ignore[no-untyped-def]
    """Reduce this rank's part of a slice; return False if the memory of a rank cannot be read."""
    kind, me, ranks, width = state[KIND], state[RANK], state[RANKS], state[WIDTH]
    combine, divide = state[COMBINE], state[DIVIDE]
    if kind == REDUCE_SCATTER_V:
        if not state[MISMATCH]:
            _reduce_uneven(state, index)
        return True
    first = index * state[SLICE]
    elements = min(state[SLICE], state[COUNT] - first)
    if kind == ALL_REDUCE_WHOLE:
        target = state[TARGET] + first * width
        if state[SUMS]:
            return _reduce_parts(
                state, index, target, slot_of(state, me, index), np.int64(0), np.int64(0), elements
            )
        call(combine, target, slot_of(state, 0, index), slot_of(state, 1, index), elements)
        for rank in range(2, ranks):
            call(combine, target, target, slot_of(state, rank, index), elements)
        if divide:
            call(divide, target, target, ranks, elements)
        return True
    if kind == REDUCE_SCATTER:
        skip = (me * state[COUNT] + first) * width
        result, at, size = state[TARGET] + first * width, me * state[SLICE] * width, elements
    else:
        low, size = bounds_of(state, me, elements)
        skip, at = (first + low) * width, low * width
        # Peers read this rank's part in neither phase but from here.
        result = state[TARGET] + skip if state[EXPOSES] else slot_of(state, me, index) + at
    return _reduce_parts(state, index, result, state[SOURCE] + skip, at, skip, size)


@linked
def _receive(state, rank, index, target, at, word, skip, nbytes):  # type: ignore[no-untyped-def]
    """Copy data of a rank: at `at`, or at `skip` in the buffer of `word` if it exposes them.

    Return False if its memory cannot be read.
    """
    if rank != state[RANK] and is_exposed(state, rank, index):
        return read_exposed(state, rank, index, word, skip, target, nbytes)
    if at != target:
        deliver(state, target, at, nbytes)
    return True


@linked
def _receive_from_root(state, index, target, skip, nbytes):  # type: ignore[no-untyped-def]
    """Copy a slice of a broadcast, as `_receive`; several readers of the same memory begin at other pages."""
    root, ranks, low = state[ROOT], state[RANKS], np.int64(0)
    if ranks > 2 and is_exposed(state, root, index):
        low = (state[RANK] - root) % ranks * (nbytes // ranks) // PAGE * PAGE
    at = slot_of(state, root, index)
    return _receive(state, root, index, target + low, at, 1, skip + low, nbytes - low) and (
        low == 0 or _receive(state, root, index, target, at, 1, skip, low)
    )


@linked
def _take(state, index):  # type: ignore[no-untyped-def]
    """Copy a slice of results; return False if the memory of a rank cannot be read."""
    kind, me, width, root = state[KIND], state[RANK], state[WIDTH], state[ROOT]
    ranks = state[RANKS]
    start = first_of(me, ranks)
    if kind in UNEVEN:
        return kind == REDUCE_SCATTER_V or state[MISMATCH] != 0 or _take_uneven(state, index)
    first = index * state[SLICE]
    elements = min(state[SLICE], state[COUNT] - first)
    skip, nbytes = first * width, elements * width
    target = state[TARGET] + skip
    if kind == ALL_REDUCE or (kind == REDUCE and me == root):
        for step in range(ranks):
            rank = (start + step) % ranks
            low, size = bounds_of(state, rank, elements)
            if size > 0 and not (rank == me and state[EXPOSES]):
                at, low = slot_of(state, rank, index) + low * width, low * width
                if not _receive(state, rank, index, target + low, at, 2, skip + low, size * width):
                    return False
    elif kind in (ALL_GATHER, ALL_TO_ALL) or (kind == GATHER and me == root):
        block = state[COUNT] * width
        for step in range(ranks):
            rank = (start + step) % ranks
            if rank == me and kind == ALL_GATHER and state[STREAMS] and not state[EXPOSES]:
                continue  # copied by `_put_and_keep`
            theirs = skip + (me * block if kind == ALL_TO_ALL else 0)
            at = block_of(state, rank, index)
            if not _receive(state, rank, index, target + rank * block, at, 1, theirs, nbytes):
                return False
    elif kind == BROADCAST and me != root:
        return _receive_from_root(state, index, target, skip, nbytes)
    elif kind == SCATTER:
        theirs = me * state[COUNT] * width + skip
        at = slot_of(state, root, index) + me * state[SLICE] * width if me != root else state[SOURCE] + theirs
        return _receive(state, root, index, target, at, 1, theirs, nbytes)
    return True


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
        if not _reduce(state, state[REDUCED]):
            return moved
        has_reduced(state)
        moved = True
    if may_take_next(state) and _take(state, state[TAKEN]):
        has_taken(state)
        moved = True
    return moved


@compiled
def advance(state, patient):  # type: ignore[no-untyped-def]
    """Advance as far as possible; return 1 once done, otherwise 0 (after microseconds if `patient`)."""
    spins = yields = 0
    while not has_ended(state):
        if not state[UNREADABLE] and _step(state):
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
    if state[BEGAN]:
        note_trial(state)
    return 1


@compiled
def begin(state, source, target):  # type: ignore[no-untyped-def]
    """Start an operation described by `DirectCollectives.bind`, and `advance` it."""
    # At the end of an operation this rank has taken all slices that were put.
    state[BASE] = load_acquire(state[LINES] + state[RANK] * LINE + TAKEN_AT)
    state[PUT] = state[REDUCED] = state[TAKEN] = 0
    state[MISMATCH] = state[UNREADABLE] = 0
    state[BEGAN] = 0
    # Ranks that only receive do not count as trials: their times are those of their peers' ways.
    way = next_way(state) if hands_over(state) else np.int64(COPIED)
    exposes = way == IN_PLACE and state[SHARING] != NEVER and may_expose(state, source, target)
    state[EXPOSES] = exposes
    if way == IN_PLACE and not exposes:
        way, state[BEGAN] = np.int64(COPIED), 0
    state[WAY] = way
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
