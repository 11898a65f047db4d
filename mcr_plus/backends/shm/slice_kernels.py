"""Slices of a direct collective: counters, slots, and data that peers read in place."""

from __future__ import annotations

import numpy as np

from mcr_plus.backends.shm.atomics import (
    STREAMED,
    clock,
    copy,
    fence,
    load_acquire,
    remote_read,
    store_release,
    stream,
)
from mcr_plus.backends.shm.collectives_state import (
    AGREED,
    ALL_REDUCE,
    ALL_REDUCE_WHOLE,
    ALL_TO_ALL,
    ALWAYS,
    AREA,
    AREAS,
    ASK,
    BASE,
    BEGAN,
    BOUNCE,
    BROADCAST,
    CALLS_AT,
    CHOICE_AT,
    COUNT,
    EXCHANGE,
    EXPOSED,
    EXPOSES,
    FIRST,
    GATHER,
    HEADER,
    IN_PLACE,
    KIND,
    KNOWN_AT,
    LEAST_AT,
    LINES,
    NEVER,
    PAGE,
    PAST_CACHES,
    PERIOD,
    PLACES,
    PROCESS,
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
    ROUND,
    ROUNDS,
    SCATTER,
    SHARING,
    SLICE,
    SLICES,
    SOURCE,
    STREAMS,
    STRIDE,
    TAG,
    TAGS_AT,
    TAKEN,
    TAKEN_AT,
    TARGET,
    TRIALS,
    UNKNOWN,
    UNREADABLE,
    WAY,
    WAYS,
    WIDTH,
)
from mcr_plus.backends.shm.readable import READS, REFUSED, VERDICT_AT
from mcr_plus.backends.shm.segment import LINE
from mcr_plus.kernels.cpu import compiled, linked


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
            or load_acquire(line + TAGS_AT + number % ring * 8) & ~EXPOSED != state[TAG]
        ):
            return False
    return True


@compiled
def slot_of(state, rank, slice_number):  # type: ignore[no-untyped-def]
    """Return the address of a rank's slot for a slice of this operation."""
    ring, number = state[RING], state[BASE] + slice_number
    place = number // ring % state[PLACES] * state[STRIDE]
    return state[AREAS] + (rank * ring + number % ring) * state[AREA] + place


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
    if state[WAY] == PAST_CACHES:
        fence()
    line, number = state[LINES] + state[RANK] * LINE, state[BASE] + state[PUT]
    mark = EXPOSED if state[EXPOSES] else 0
    store_release(line + TAGS_AT + number % state[RING] * 8, state[TAG] | mark)
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
    if state[WAY] == PAST_CACHES:
        fence()
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
def _tag_of(state, rank, index):  # type: ignore[no-untyped-def]
    """Return the tag of a rank's slot of slice `index`, with `EXPOSED`."""
    at = (state[BASE] + index) % state[RING] * 8
    return load_acquire(state[LINES] + rank * LINE + TAGS_AT + at)


@compiled
def is_exposed(state, rank, index):  # type: ignore[no-untyped-def]
    """Return whether a rank's slot of slice `index` holds addresses instead of data."""
    return _tag_of(state, rank, index) & EXPOSED != 0


@compiled
def expose(state, index):  # type: ignore[no-untyped-def]
    """Put the addresses of this rank's data in the slot of slice `index`."""
    slot = slot_of(state, state[RANK], index) + state[HEADER]
    store_release(slot, state[PROCESS])
    store_release(slot + 8, state[SOURCE])
    store_release(slot + 16, state[TARGET])


@compiled
def read_exposed(state, rank, index, word, skip, target, nbytes):  # type: ignore[no-untyped-def]
    """Copy data of a rank that exposes slice `index`; return False, now and from now on, if that fails.

    `word`: 1 for its source, 2 for its target; `skip`: bytes after that address. The copy is right only if
    the rank has not withdrawn the operation meanwhile, and used its memory for something else.
    """
    slot = slot_of(state, rank, index) + state[HEADER]
    source = load_acquire(slot + 8 * word) + skip
    nread = remote_read(load_acquire(slot), target, source, nbytes)
    fence()  # data before the tag
    if nread != nbytes or _tag_of(state, rank, index) != state[TAG] | EXPOSED:
        state[UNREADABLE] = 1 + rank
        return False
    return True


@compiled
def has_ended(state):  # type: ignore[no-untyped-def]
    """Return whether this rank has taken all slices, and peers have taken what this rank exposes."""
    if state[TAKEN] < state[SLICES] or not state[AGREED]:
        return False
    return not state[EXPOSES] or all_reached(state, np.int64(TAKEN_AT), state[BASE] + state[SLICES])


@compiled
def hands_over(state):  # type: ignore[no-untyped-def]
    """Return whether this rank gives data to others."""
    kind, is_root = state[KIND], state[RANK] == state[ROOT]
    return not (kind in (BROADCAST, SCATTER) and not is_root) and not (kind == GATHER and is_root)


@compiled
def next_way(state):  # type: ignore[no-untyped-def]
    """Return how the next operation hands over its data; begin a trial if its time is to be noted."""
    trials, first = state[TRIALS], state[FIRST]
    if not trials:
        return first
    calls = load_acquire(trials + CALLS_AT)
    store_release(trials + CALLS_AT, calls + 1)
    if calls == 0:
        store_release(trials + CHOICE_AT, first)
    calls %= PERIOD
    if calls < ROUNDS * ROUND:
        if calls == 0:
            for way in range(WAYS):
                store_release(trials + LEAST_AT + 8 * way, UNKNOWN)
        turn = calls % ROUND
        if turn < WAYS:
            state[BEGAN] = clock()
            return turn
        if turn == WAYS:
            store_release(trials + CHOICE_AT, _fastest(state))
    return load_acquire(trials + CHOICE_AT)


@linked
def _fastest(state):  # type: ignore[no-untyped-def]
    """Return the way with the least time, if that saves an eighth of the first way's."""
    trials, best = state[TRIALS], state[FIRST]
    # A rank that only sends does not see its peers' time, so others must save more.
    is_rooted = state[KIND] in (BROADCAST, GATHER, SCATTER)
    factor = 24 if best == IN_PLACE and is_rooted else 8
    least = 7 * load_acquire(trials + LEAST_AT + 8 * best)
    for way in range(WAYS):
        time = factor * load_acquire(trials + LEAST_AT + 8 * way)
        if time < least:
            best, least = np.int64(way), time
    return best


@compiled
def may_expose(state, source, target):  # type: ignore[no-untyped-def]
    """Return whether peers can read the data of a new operation in this process's memory."""
    if state[SHARING] == ASK:
        for rank in range(state[RANKS]):
            if rank != state[RANK]:
                verdict = load_acquire(state[LINES] + rank * LINE + VERDICT_AT)
                if verdict != READS:
                    if verdict == REFUSED:
                        state[SHARING] = NEVER
                    return False
        state[SHARING] = ALWAYS
    kind = state[KIND]
    if state[SHARING] == NEVER or not hands_over(state):
        return False
    if kind in (ALL_TO_ALL, EXCHANGE) and source == target:  # peers would read what this rank has received
        return False
    if state[EXPOSES] and source == state[SOURCE] and target == state[TARGET]:
        return True
    nbytes = state[COUNT] * state[WIDTH]
    if kind == ALL_REDUCE and not _is_readable(state, target, nbytes):
        return False
    blocks = state[RANKS] if kind in (ALL_TO_ALL, SCATTER) else 1
    return _is_readable(state, source, blocks * nbytes)


@linked
def _is_readable(state, address, nbytes):  # type: ignore[no-untyped-def]
    """Return whether the kernel reads the ends of a buffer for others: mappings of devices are refused."""
    process, bounce = state[PROCESS], state[BOUNCE]
    return (
        remote_read(process, bounce, address, np.int64(1)) == 1
        and remote_read(process, bounce, address + nbytes - 1, np.int64(1)) == 1
    )


@compiled
def note_trial(state):  # type: ignore[no-untyped-def]
    """Note the time of a trial that ends, if it is the least of its way."""
    at = state[TRIALS] + LEAST_AT + 8 * state[WAY]
    nbytes = max(np.int64(1), state[COUNT] * state[WIDTH])
    store_release(at, min(load_acquire(at), 1000 * (clock() - state[BEGAN]) // nbytes))


@compiled
def move(target, source, nbytes, streams):  # type: ignore[no-untyped-def]
    """Copy, past the caches if `streams`."""
    if not streams or nbytes < 2 * STREAMED:
        copy(target, source, nbytes)
        return
    head = -target % STREAMED
    copy(target, source, head)
    for _ in range((nbytes - head) // STREAMED):
        stream(target + head, source + head)
        head += STREAMED
    copy(target + head, source + head, nbytes - head)


@compiled
def fill(state, slot, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy into a slot."""
    move(slot, source, nbytes, state[WAY] == PAST_CACHES)


@compiled
def deliver(state, target, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy into the caller's buffer, past the caches if the result is larger than the caches."""
    move(target, source, nbytes, state[STREAMS] != 0)


@compiled
def place_of(state, index, most):  # type: ignore[no-untyped-def]
    """Return the offset of this rank's data in the parts of a slot, of at most `most` elements each."""
    stride = -(-most * state[WIDTH] // PAGE) * PAGE
    places = state[SLICE] * state[WIDTH] // max(stride, PAGE)
    if index or places < 2 or stride == PAGE:
        return np.int64(0)
    return state[BASE] // state[RING] % places * stride


@compiled
def first_of(me, ranks):  # type: ignore[no-untyped-def]
    """Return whose data a rank takes first: readers of the same pages hinder each other in the kernel.

    Of two ranks one reads while the other copies its own data.
    """
    return me + 1 if ranks > 2 else np.int64(0)
