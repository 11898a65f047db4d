"""Direct collectives without an algorithm file: each rank writes to its own area, and reads those of the
others.

Data pass in slices through a ring of slots per rank, in up to three phases, each of which may be ahead of
the next one by as many slices as there are slots:

    put      copy the data that others need from this rank into the slot      then `put` += 1
    reduce   once all have put: combine the own part, store it in the slot    then `reduced` += 1
    take     once the owners are done: copy their parts out of their slots    then `taken` += 1

A slot is reused when all ranks have taken from it. The three counters of a rank are on one line that only
this rank writes; they count slices since the creation of the segment, so that operations follow each other
without any agreement. Each part is reduced by one rank, or in the order of ranks, so all ranks get the same
bits.

Where sizes differ between ranks the number of slices is unknown at first. Each slot then begins with a
header: the number of slices of its rank, and the number of elements for each of the others. All continue to
the largest number. A rank that receives an unexpected count discards the data; `mismatch` returns the sender.

`advance` is compiled and resumable: it returns after a moment without progress, so that Python checks
deadlines, and it never blocks on a dead peer.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

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
from mcr_plus.backends.shm.reduce_kernels import ReduceKernels
from mcr_plus.backends.shm.segment import LINE
from mcr_plus.backends.shm.wakeup import give_way, may_yield, ring
from mcr_plus.kernels.cpu import compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcr_plus.backends.shm.segment import Segment

_types: Any = numba.types  # partly annotated, which type checkers report here

BARRIER: Final = 0
ALL_REDUCE: Final = 1
ALL_GATHER: Final = 2
ALL_TO_ALL: Final = 3
REDUCE_SCATTER: Final = 4
BROADCAST: Final = 5
REDUCE: Final = 6
GATHER: Final = 7
SCATTER: Final = 8
EXCHANGE: Final = 9  # each rank sends different data to each other, of uneven sizes
SHARE: Final = 10  # each rank sends the same data to all that expect it, of uneven sizes
REDUCE_SCATTER_V: Final = 11
_ALL_REDUCE_WHOLE: Final = 12  # every rank reduces everything: one exchange instead of two
_UNEVEN: Final = (EXCHANGE, SHARE, REDUCE_SCATTER_V)

_NOTHING: Final = ReduceKernels()
_CACHED: Final = 768 << 10  # bytes of a slice that stay in the core's cache until a peer takes them

# Words of the state.
_KIND: Final = 0
_RANK: Final = 1
_RANKS: Final = 2
_LINES: Final = 3  # address of the ranks' lines
_AREAS: Final = 4  # address of the areas
_AREA: Final = 5  # bytes of a slot
_RING: Final = 6
_SPINS: Final = 7
_YIELDS: Final = 8
_BASE: Final = 9  # slices of all operations before this one
_SLICES: Final = 10
_PUT: Final = 11  # slices of this operation: put, reduced, taken by this rank
_REDUCED: Final = 12
_TAKEN: Final = 13
_SOURCE: Final = 14  # addresses
_TARGET: Final = 15
_COUNT: Final = 16  # elements: of the whole buffer for reductions and broadcast, else of a rank's block
_WIDTH: Final = 17  # bytes of an element
_SLICE: Final = 18  # elements of a slice
_COMBINE: Final = 19  # addresses of kernels
_DIVIDE: Final = 20
_ROOT: Final = 21
_STREAMS: Final = 22  # whether `take` writes past the caches
_HEADER: Final = 23  # bytes, where sizes differ between ranks
_AGREED: Final = 24  # whether the number of slices is known
_MISMATCH: Final = 25  # 1 + a rank that sends an unexpected count
_TAG: Final = 26  # of the operation, equal on all ranks
_BELLS: Final = 27
_GIVEN: Final = 28  # elements that the rank of `_MISMATCH` sends to this one
_WORDS: Final = 29  # for uneven sizes: elements for each rank follow, and elements expected of each

_PUT_AT: Final = 0  # in a rank's line
_REDUCED_AT: Final = 8
_TAKEN_AT: Final = 16
_TAGS_AT: Final = 24  # of the operation that each slot of the ring belongs to
_KNOWN_AT: Final = 64  # slices known to be taken by all others; on a cache line that they do not read


@compiled
def _all_reached(state, offset, count):  # type: ignore[no-untyped-def]
    """Whether the counter at `offset` of every other rank's line is at least `count`."""
    lines = state[_LINES]
    for rank in range(state[_RANKS]):
        if rank != state[_RANK] and load_acquire(lines + rank * LINE + offset) < count:
            return False
    return True


@compiled
def _all_put(state, index):  # type: ignore[no-untyped-def]
    """Whether every other rank has put slice `index`, and for the same operation.

    A slice of another operation is never taken: mismatched operations stay pending.
    """
    lines, ring, number = state[_LINES], state[_RING], state[_BASE] + index
    for rank in range(state[_RANKS]):
        line = lines + rank * LINE
        if rank != state[_RANK] and (
            load_acquire(line + _PUT_AT) <= number
            or load_acquire(line + _TAGS_AT + number % ring * 8) != state[_TAG]
        ):
            return False
    return True


@compiled
def _slot(state, rank, slice_number):  # type: ignore[no-untyped-def]
    ring = state[_RING]
    return state[_AREAS] + (rank * ring + (state[_BASE] + slice_number) % ring) * state[_AREA]


@compiled
def _part(state, elements):  # type: ignore[no-untyped-def]
    """Elements of a rank's part of a slice: whole cache lines, so that no two ranks write to the same."""
    line = 64 // state[_WIDTH]
    ranks = state[_RANKS]
    return (elements + ranks * line - 1) // (ranks * line) * line


@compiled
def _left(state, count, index):  # type: ignore[no-untyped-def]
    """Elements of slice `index` of `count` elements."""
    return max(0, min(state[_SLICE], count - index * state[_SLICE]))


@compiled
def _put_uneven(state, index):  # type: ignore[no-untyped-def]
    me, ranks, width = state[_RANK], state[_RANKS], state[_WIDTH]
    slot, source, skip = _slot(state, me, index), state[_SOURCE], index * state[_SLICE] * width
    store_release(slot, state[_SLICES])
    for rank in range(ranks):
        store_release(slot + 8 * (1 + rank), state[_WORDS + rank])
    slot += state[_HEADER]
    if state[_KIND] == SHARE:
        most = 0
        for rank in range(ranks):
            if rank != me:
                most = max(most, state[_WORDS + rank])
        copy(slot, source + skip, _left(state, most, index) * width)
        return
    for rank in range(ranks):
        count = state[_WORDS + rank]
        if rank != me:
            at = slot + rank * state[_SLICE] * width
            copy(at, source + skip, _left(state, count, index) * width)
        source += count * width


@compiled
def _agree(state):  # type: ignore[no-untyped-def]
    """Read the number of slices from the headers of all ranks, and check the sizes."""
    me, ranks = state[_RANK], state[_RANKS]
    for rank in range(ranks):
        slot = _slot(state, rank, 0)
        state[_SLICES] = max(state[_SLICES], load_acquire(slot))
        given = load_acquire(slot + 8 * (1 + me))
        if given != state[_WORDS + ranks + rank]:
            state[_MISMATCH], state[_GIVEN] = 1 + rank, given
    state[_AGREED] = 1


@compiled
def _take_uneven(state, index):  # type: ignore[no-untyped-def]
    """Copy a slice of the data of every rank for this one, its own from the source."""
    me, ranks, width = state[_RANK], state[_RANKS], state[_WIDTH]
    skip = index * state[_SLICE] * width
    target = state[_TARGET] + skip
    for rank in range(ranks):
        expected = state[_WORDS + ranks + rank]
        if rank != me:
            at = _slot(state, rank, index) + state[_HEADER]
            if state[_KIND] == EXCHANGE:
                at += me * state[_SLICE] * width
        else:
            at = state[_SOURCE] + skip
            if state[_KIND] == EXCHANGE:
                for before in range(me):
                    at += state[_WORDS + before] * width
        if at != target:
            _deliver(state, target, at, _left(state, expected, index) * width)
        target += expected * width


@compiled
def _reduce_uneven(state, index):  # type: ignore[no-untyped-def]
    me, ranks, width = state[_RANK], state[_RANKS], state[_WIDTH]
    combine, divide = state[_COMBINE], state[_DIVIDE]
    elements = _left(state, state[_WORDS + me], index)
    left, skip = state[_SOURCE], index * state[_SLICE] * width
    for before in range(me):
        left += state[_WORDS + before] * width
    left, result = left + skip, state[_TARGET] + skip
    for rank in range(ranks):
        if rank != me:
            at = _slot(state, rank, index) + state[_HEADER] + me * state[_SLICE] * width
            call(combine, result, left, at, elements)
            left = result
    if divide:
        call(divide, result, result, ranks, elements)


@compiled
def _put(state, index):  # type: ignore[no-untyped-def]
    kind, me, ranks, width = state[_KIND], state[_RANK], state[_RANKS], state[_WIDTH]
    if kind in _UNEVEN:
        _put_uneven(state, index)
        return
    first = index * state[_SLICE]
    elements = min(state[_SLICE], state[_COUNT] - first)
    slot, source = _slot(state, me, index), state[_SOURCE]
    if kind in (ALL_REDUCE, REDUCE):
        part = _part(state, elements)
        for rank in range(ranks):
            low, high = min(rank * part, elements), min((rank + 1) * part, elements)
            if rank != me and high > low:
                copy(slot + low * width, source + (first + low) * width, (high - low) * width)
    elif kind in (ALL_TO_ALL, REDUCE_SCATTER) or (kind == SCATTER and me == state[_ROOT]):
        block = state[_COUNT]
        for rank in range(ranks):
            if rank != me:
                at = source + (rank * block + first) * width
                copy(slot + rank * state[_SLICE] * width, at, elements * width)
    elif (
        kind in (ALL_GATHER, _ALL_REDUCE_WHOLE)
        or (kind == BROADCAST and me == state[_ROOT])
        or (kind == GATHER and me != state[_ROOT])
    ):
        copy(slot, source + first * width, elements * width)


@compiled
def _reduce(state, index):  # type: ignore[no-untyped-def]
    kind, me, ranks, width = state[_KIND], state[_RANK], state[_RANKS], state[_WIDTH]
    combine, divide = state[_COMBINE], state[_DIVIDE]
    if kind == REDUCE_SCATTER_V:
        if not state[_MISMATCH]:
            _reduce_uneven(state, index)
        return
    first = index * state[_SLICE]
    elements = min(state[_SLICE], state[_COUNT] - first)
    if kind == _ALL_REDUCE_WHOLE:
        target = state[_TARGET] + first * width
        call(combine, target, _slot(state, 0, index), _slot(state, 1, index), elements)
        for rank in range(2, ranks):
            call(combine, target, target, _slot(state, rank, index), elements)
        if divide:
            call(divide, target, target, ranks, elements)
        return
    if kind == REDUCE_SCATTER:
        left = state[_SOURCE] + (me * state[_COUNT] + first) * width
        result = state[_TARGET] + first * width
        at, size = me * state[_SLICE] * width, elements
    else:
        part = _part(state, elements)
        low, high = min(me * part, elements), min((me + 1) * part, elements)
        left = state[_SOURCE] + (first + low) * width
        at, size = low * width, high - low
        result = _slot(state, me, index) + at
    if size > 0:
        for rank in range(ranks):
            if rank != me:
                call(combine, result, left, _slot(state, rank, index) + at, size)
                left = result
        if divide:
            call(divide, result, result, ranks, size)


@compiled
def _deliver(state, target, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy into the caller's buffer, past the caches if the result is larger than they are."""
    if not state[_STREAMS] or nbytes < 2 * STREAMED:
        copy(target, source, nbytes)
        return
    head = -target % STREAMED
    copy(target, source, head)
    for _ in range((nbytes - head) // STREAMED):
        stream(target + head, source + head)
        head += STREAMED
    copy(target + head, source + head, nbytes - head)


@compiled
def _take_reduced(state, index, first, elements):  # type: ignore[no-untyped-def]
    """Copy every rank's part of a reduced slice."""
    width, part = state[_WIDTH], _part(state, elements)
    for rank in range(state[_RANKS]):
        low, high = min(rank * part, elements), min((rank + 1) * part, elements)
        if high > low:
            at = _slot(state, rank, index) + low * width
            _deliver(state, state[_TARGET] + (first + low) * width, at, (high - low) * width)


@compiled
def _take_blocks(state, index, first, elements):  # type: ignore[no-untyped-def]
    """Copy a slice of every rank's block, the own one from the source."""
    width, block, me = state[_WIDTH], state[_COUNT], state[_RANK]
    exchanged = state[_KIND] == ALL_TO_ALL
    for rank in range(state[_RANKS]):
        target = state[_TARGET] + (rank * block + first) * width
        if rank != me:
            at = _slot(state, rank, index)
            if exchanged:
                at += me * state[_SLICE] * width
            _deliver(state, target, at, elements * width)
        else:
            own = state[_SOURCE] + first * width
            if exchanged:
                own += me * block * width
            if own != target:
                _deliver(state, target, own, elements * width)


@compiled
def _take(state, index):  # type: ignore[no-untyped-def]
    kind, me, width, root = state[_KIND], state[_RANK], state[_WIDTH], state[_ROOT]
    if kind in _UNEVEN:
        if kind != REDUCE_SCATTER_V and not state[_MISMATCH]:
            _take_uneven(state, index)
        return
    first = index * state[_SLICE]
    elements = min(state[_SLICE], state[_COUNT] - first)
    target = state[_TARGET] + first * width
    if kind == ALL_REDUCE or (kind == REDUCE and me == root):
        _take_reduced(state, index, first, elements)
    elif kind in (ALL_GATHER, ALL_TO_ALL) or (kind == GATHER and me == root):
        _take_blocks(state, index, first, elements)
    elif kind == BROADCAST and me != root:
        _deliver(state, target, _slot(state, root, index), elements * width)
    elif kind == SCATTER and me != root:
        skip = me * state[_SLICE] * width
        _deliver(state, target, _slot(state, root, index) + skip, elements * width)
    elif kind == SCATTER:
        own = state[_SOURCE] + (me * state[_COUNT] + first) * width
        if own != target:
            _deliver(state, target, own, elements * width)


@compiled
def _may_put(state, count):  # type: ignore[no-untyped-def]
    """Whether all have taken that many slices; mostly known without reading the lines of the others."""
    if load_acquire(state[_LINES] + state[_RANK] * LINE + _KNOWN_AT) >= count:
        return True
    return _all_reached(state, np.int64(_TAKEN_AT), count)


@compiled
def _step(state):  # type: ignore[no-untyped-def]
    """Run each phase for one slice if possible; returns whether any ran."""
    kind, base = state[_KIND], state[_BASE]
    line = state[_LINES] + state[_RANK] * LINE
    put, reduced, taken = state[_PUT], state[_REDUCED], state[_TAKEN]
    moved = False
    if put < state[_SLICES] and put < taken + state[_RING] and _may_put(state, base + put + 1 - state[_RING]):
        _put(state, put)
        store_release(line + _TAGS_AT + (base + put) % state[_RING] * 8, state[_TAG])
        put += 1
        state[_PUT] = put
        store_release(line + _PUT_AT, base + put)
        moved = True
    if not state[_AGREED]:
        if not put or not _all_put(state, np.int64(0)):
            return moved
        _agree(state)
        moved = True
    reduces = kind in (ALL_REDUCE, REDUCE, REDUCE_SCATTER, REDUCE_SCATTER_V, _ALL_REDUCE_WHOLE)
    if reduces and reduced < put and _all_put(state, reduced):
        _reduce(state, reduced)
        reduced += 1
        state[_REDUCED] = reduced
        moved = True
        if kind in (ALL_REDUCE, REDUCE):
            store_release(line + _REDUCED_AT, base + reduced)
    if kind in (REDUCE_SCATTER, REDUCE_SCATTER_V, _ALL_REDUCE_WHOLE):
        may_take = taken < reduced
    elif reduces:
        may_take = taken < reduced and _all_reached(state, np.int64(_REDUCED_AT), base + taken + 1)
    else:
        may_take = taken < put and _all_put(state, taken)
    if may_take:
        _take(state, taken)
        taken += 1
        state[_TAKEN] = taken
        store_release(line + _TAKEN_AT, base + taken)
        moved = True
    return moved


@compiled
def advance(state, patient):  # type: ignore[no-untyped-def]
    """Advance as far as possible: 1 once the operation is done, else 0, after microseconds if `patient`."""
    spins = yields = 0
    while state[_TAKEN] < state[_SLICES] or not state[_AGREED]:
        if _step(state):
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
    if state[_SLICES]:  # a rank that has put a slice of this operation has taken all earlier slices
        store_release(state[_LINES] + state[_RANK] * LINE + _KNOWN_AT, state[_BASE])
    if state[_STREAMS]:
        fence()
    return 1


@compiled
def begin(state, source, target):  # type: ignore[no-untyped-def]
    """Start an operation described by `DirectCollectives.bind`, and `advance` it."""
    # At the end of an operation this rank has taken all slices that were put.
    state[_BASE] = load_acquire(state[_LINES] + state[_RANK] * LINE + _TAKEN_AT)
    state[_PUT] = state[_REDUCED] = state[_TAKEN] = 0
    state[_MISMATCH] = 0
    state[_SOURCE] = source
    state[_TARGET] = target
    return advance(state, np.int64(1))  # int64, since numba would compile `advance` again for a literal


@cache
def prepare() -> None:
    """Compile the functions, or load them from disk: some seconds, during which no peer should wait."""
    words, address = _types.int64[::1], _types.int64
    advance.compile((words, address))
    begin.compile((words, address, address))


class DirectCollectives:
    """The direct collectives of one rank of two or more on a segment.

    Operations run one at a time, in the same order on all ranks. `spins` and `yields`: number of retries of
    `advance` with and without the core before it returns. `whole`: largest bytes of which every rank reduces
    everything. `streamed`: least bytes of a result that is written past the caches.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        spins: int = 200,
        yields: int = 4,
        whole: int = 8192,
        streamed: int = 8 << 20,
    ) -> None:
        self._segment = segment
        self._spins, self._yields = spins, yields
        self._whole, self._streamed = min(whole, segment.shape.area), streamed

    def bind(
        self,
        kind: int,
        count: int = 0,
        width: int = 1,
        kernels: ReduceKernels = _NOTHING,
        root: int = 0,
        tag: int = 0,
    ) -> Any:
        """Return the state of an operation, for `begin`, and for `advance` until that returns 1.

        `begin(state, source, target)` takes addresses, equal for calls in place: all_gather's source may be
        its block of the target. `count` elements of `width` bytes are the whole buffer of all_reduce, reduce
        and broadcast, and one rank's block of all others. broadcast reads the root's `source` and does not
        write its target. A state may be begun again when it is done. Ranks with different `tag`s wait for
        each other for ever.

        For EXCHANGE, SHARE and REDUCE_SCATTER_V it is a pattern, from which `of_sizes` makes states.
        """
        shape, rank = self._segment.shape, self._segment.rank
        header = (-(-8 * (1 + shape.ranks) // 64) * 64) if kind in _UNEVEN else 0
        blocks = shape.ranks if kind in (ALL_GATHER, ALL_TO_ALL, GATHER) else 1
        streams = count * width * blocks >= self._streamed
        area = shape.area
        if kind in (ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER) and not streams:
            area = min(area, _CACHED)
        slice_elements = (area - header) // width
        if kind == ALL_REDUCE and count * width <= self._whole:
            kind = _ALL_REDUCE_WHOLE
        elif kind in (ALL_TO_ALL, REDUCE_SCATTER, SCATTER, EXCHANGE, REDUCE_SCATTER_V):
            slice_elements = (area - header) // shape.ranks // 64 * 64 // width
        state: Any = np.zeros(_WORDS + (2 * shape.ranks if kind in _UNEVEN else 0), np.int64)
        settings = {
            _KIND: kind,
            _RANK: rank,
            _RANKS: shape.ranks,
            _LINES: self._segment.base + shape.lines,
            _AREAS: self._segment.base + shape.areas,
            _AREA: shape.area,
            _RING: shape.ring,
            _SPINS: self._spins,
            _YIELDS: self._yields,
            _SLICES: 1 if kind == BARRIER else -(-count // slice_elements),
            _COUNT: count,
            _WIDTH: width,
            _SLICE: slice_elements,
            _COMBINE: kernels.combine,
            _DIVIDE: kernels.divide,
            _ROOT: root,
            _STREAMS: streams,
            _HEADER: header,
            _AGREED: kind not in _UNEVEN,
            _TAG: tag,
            _BELLS: self._segment.bells,
        }
        for word, value in settings.items():
            state[word] = value
        return state

    def of_sizes(self, pattern: Any, sent: Sequence[int], expected: Sequence[int]) -> Any:
        """Return the state of one operation: elements for each rank, and elements expected of each.

        They are contiguous in source and target, in rank order; SHARE's source is sent to all. When the
        operation is done, `mismatch` returns a disagreement on sizes.
        """
        state = pattern.copy()
        ranks = self._segment.shape.ranks
        state[_WORDS : _WORDS + ranks] = sent
        state[_WORDS + ranks :] = expected
        state[_SLICES] = max(1, -(-max(sent) // int(state[_SLICE])))
        state[_STREAMS] = sum(expected) * int(state[_WIDTH]) >= self._streamed
        return state


def mismatch(state: Any) -> tuple[int, int] | None:
    """Return, for a finished operation, a rank with an unexpected count and that count; None without one."""
    return (int(state[_MISMATCH]) - 1, int(state[_GIVEN])) if state[_MISMATCH] else None
