"""What to measure next: everything roughly, every size, what is in doubt again, and where winners change.

What decides about nothing comes last: whole times of asynchronous operations whose exposed time is measured.

Pure: what was measured comes in, the next cell goes out, so that a run can stop and go on anywhere and always
has a table to show. Sizes of one stage are gone through over all kinds: the largest, the smallest, then the
middles of what lies between, so that a small budget measures a few sizes over the whole range. A time that
cannot be is measured again at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from math import inf, sqrt
from typing import Final

from mcr_plus.tuning.operations import Cell, Kind, whole_size
from mcr_plus.tuning.points import Point, settled
from mcr_plus.tuning.statistics import Timing
from mcr_plus.units import Range, size_words

_COARSE: Final = 4  # of so many powers of two the first stage takes one
_DOUBT: Final = 1.5  # a size that takes so many times as long as a larger one was disturbed, most likely
_NONSENSE: Final = 8  # one that takes so many times as long as a larger one says nothing at all
_DISTURBED: Final = 5  # so often at most is it measured: the median counts
_CONTESTED: Final = 3  # so often at most is a size measured at which no way has clearly won
_CLOSE: Final = 1.3  # two sizes with different winners that are closer than this are not divided further
_TIE: Final = 1.03  # to win by less than this does not matter


@dataclass(frozen=True)
class Task:
    """A cell to measure, and the manner: `overlap` beside a computation."""

    cell: Cell
    overlap: bool = False


@dataclass(frozen=True)
class Request:
    """What a table shall be about. Sizes in bytes, both ends included.

    `ways`: the libraries to compare; `algorithms`: further ways of a kind, `library:algorithm`; `spans`: the
    sizes that a way is for, all where it is not named.
    """

    kinds: tuple[Kind, ...]
    smallest: int
    largest: int
    ranks: int
    ways: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32",)
    asynchronous: bool = True
    overlap: bool = True
    algorithms: Mapping[Kind, tuple[str, ...]] = field(default_factory=dict)
    spans: Mapping[str, Range] = field(default_factory=dict)

    def ways_of(self, cell: Cell) -> tuple[str, ...]:
        """All that is compared for a kind, at a size."""
        ways = (*self.ways, *self.algorithms.get(cell.kind, ()))
        return tuple(way for way in ways if self.serves(way, cell.nbytes))

    def serves(self, way: str, nbytes: int) -> bool:
        """Whether a way is for operations of a size."""
        return way not in self.spans or self.spans[way].covers(nbytes)

    def manners(self, kind: Kind) -> list[tuple[bool, bool]]:
        """(async_op, overlap) of the manners that decide about a kind; messages have one."""
        if kind == "send" or not self.asynchronous:
            return [(False, False)]
        return [(False, False), (True, self.overlap)]

    def further(self, kind: Kind) -> list[tuple[bool, bool]]:
        """(async_op, overlap) of what is measured to be known, and decides about nothing."""
        return [(True, False)] if (True, True) in self.manners(kind) else []

    def relevant(self, points: Iterable[Point]) -> list[Point]:
        """Of points from earlier runs, those of our libraries and manners; of all kinds and sizes."""
        return [
            point
            for point in points
            if point.way in self.ways_of(point.cell)
            and (point.cell.async_op, point.overlap)
            in (*self.manners(point.cell.kind), *self.further(point.cell.kind))
        ]


def next_task(request: Request, points: Sequence[Point], *, further: bool = True) -> Task | None:
    """The first task that has not been done, or must be again; None if there is none.

    Without `further`, of those that decide about something: None if the table is complete.
    """
    points = request.relevant(points)
    counts = Counter((Task(point.cell, point.overlap), point.way) for point in points)
    # A library that an earlier run did not have leaves its sizes to be measured, by all in turns.
    done = {task: min(counts[task, way] for way in request.ways_of(task.cell)) for task, _ in counts}
    absurd = (task for task in _absurd(request, points) if done[task] < _DISTURBED)
    fresh = (task for task in _grid(request) if not done.get(task))
    again = (task for task, most in _doubtful(request, points) if done[task] < most)
    between = (task for task in _refinements(request, points) if not done.get(task))
    last = (task for task in _further(request) if further and not done.get(task))
    return next(chain(absurd, fresh, again, between, last), None)


def stages(request: Request) -> int:
    """How many tasks there are before winners are looked at, for a progress bar."""
    return len({*_grid(request), *_further(request)})


def coverage(request: Request, points: Iterable[Point]) -> tuple[int, int]:
    """(measured, all) of the combinations of operation, manner and size that every table has."""
    planned = {*_grid(request)}
    return len(planned & {Task(point.cell, point.overlap) for point in points}), len(planned)


def _grid(request: Request) -> Iterator[Task]:
    sizes = _powers(request)
    for chosen in (sorted({*sizes[::_COARSE], sizes[-1]}), sizes):
        for size in _spread(chosen):
            yield from _of_size(request, size, request.manners)


def _spread(sizes: Sequence[int]) -> list[int]:
    """The largest, the smallest, and then the middles of what lies between."""
    order, between = [sizes[-1], sizes[0]], deque([(0, len(sizes) - 1)])
    while between:
        low, high = between.popleft()
        middle = (low + high) // 2
        if low < middle:
            order.append(sizes[middle])
            between += [(low, middle), (middle, high)]
    return list(dict.fromkeys(order))


def _further(request: Request) -> Iterator[Task]:
    for size in _powers(request):
        yield from _of_size(request, size, request.further)


def _of_size(
    request: Request, size: int, manners: Callable[[Kind], list[tuple[bool, bool]]]
) -> Iterator[Task]:
    for kind in request.kinds:
        for dtype in request.dtypes:
            nbytes = whole_size(kind, size, dtype, request.ranks)
            for async_op, overlap in manners(kind):
                cell = Cell(kind, nbytes, dtype, async_op)
                if request.ways_of(cell):
                    yield Task(cell, overlap)


def _powers(request: Request) -> list[int]:
    size = 1 << max(request.smallest - 1, 0).bit_length()
    sizes = []
    while size <= request.largest:
        sizes.append(size)
        size *= 2
    return sizes or [request.largest]


def _curves(request: Request, points: Sequence[Point]) -> Iterator[tuple[Task, dict[int, dict[str, Timing]]]]:
    """What was measured of each operation, by size; the task's own size means nothing."""
    apart: dict[Task, list[Point]] = {}
    for point in points:
        apart.setdefault(Task(replace(point.cell, nbytes=0), point.overlap), []).append(point)
    for kind in request.kinds:
        for dtype in request.dtypes:
            for async_op, overlap in request.manners(kind):
                like = Task(Cell(kind, 0, dtype, async_op), overlap)
                yield like, by_size(apart.get(like, ()), like.cell, overlap)


def _doubtful(request: Request, points: Sequence[Point]) -> Iterator[tuple[Task, int]]:
    """What is worth measuring again, and how often in all at most."""
    for like, found in _curves(request, points):
        sizes = sorted(found)
        for low, high in pairwise(sizes):
            if _disturbed(found[low], found[high]):
                yield Task(replace(like.cell, nbytes=low), like.overlap), _DISTURBED
        for size in sizes:
            if _contested(found[size]):
                yield Task(replace(like.cell, nbytes=size), like.overlap), _CONTESTED


def _absurd(request: Request, points: Sequence[Point]) -> Iterator[Task]:
    """Of the operation that was measured last, so that there never is another."""
    if not points or points[-1].overlap:  # what is exposed need not grow with the size
        return
    cell = points[-1].cell
    if cell.kind not in request.kinds or cell.dtype not in request.dtypes:
        return
    alike = [each for each in points if replace(each.cell, nbytes=0) == replace(cell, nbytes=0)]
    for size in nonsense(by_size(alike, cell, overlap=False)):
        yield Task(replace(cell, nbytes=size))


def nonsense(found: Mapping[int, Mapping[str, Timing]]) -> dict[int, list[str]]:
    """The ways, by size, that took many times as long as at a larger size; for whole times, not exposed."""
    least: dict[str, float] = {}
    odd: dict[int, list[str]] = {}
    for size in sorted(found, reverse=True):
        for way, timing in found[size].items():
            if timing.p50 > _NONSENSE * least.get(way, inf):
                odd.setdefault(size, []).append(way)
            least[way] = min(timing.p50, least.get(way, inf))
    return odd


def impossible(request: Request, points: Sequence[Point]) -> list[str]:
    """What `nonsense` finds of each operation, as `all_reduce 8 B by mpi`."""
    return [
        f"{like.cell.kind}{' async' if like.cell.async_op else ''} {size_words(size)} by {', '.join(ways)}"
        for like, found in _curves(request, request.relevant(points))
        if not like.overlap
        for size, ways in sorted(nonsense(found).items())
    ]


def _contested(timings: Mapping[str, Timing]) -> bool:
    return len(_good(timings)) > 1


def _disturbed(smaller: Mapping[str, Timing], larger: Mapping[str, Timing]) -> bool:
    return any(smaller[way].p50 > _DOUBT * larger[way].p50 for way in smaller.keys() & larger.keys())


def _refinements(request: Request, points: Sequence[Point]) -> Iterator[Task]:
    """Sizes between neighbours with different winners."""
    for like, found in _curves(request, points):
        for low, high in pairwise(sorted(found)):
            middle = whole_size(like.cell.kind, round(sqrt(low * high)), like.cell.dtype, request.ranks)
            cell = replace(like.cell, nbytes=middle)
            apart = low < middle < high and high / low > _CLOSE and _differ(found[low], found[high])
            if apart and request.ways_of(cell):
                yield Task(cell, like.overlap)


def by_size(points: Sequence[Point], like: Cell, overlap: bool) -> dict[int, dict[str, Timing]]:
    """Timings by size and way, of the cells that differ from `like` in size only."""
    found: dict[int, dict[str, Timing]] = {}
    for point in settled(points):
        cell = point.cell
        alike = (cell.kind, cell.dtype, cell.async_op) == (like.kind, like.dtype, like.async_op)
        if alike and point.overlap == overlap and point.timing is not None:
            found.setdefault(cell.nbytes, {})[point.way] = point.timing
    return found


def _differ(one: Mapping[str, Timing], other: Mapping[str, Timing]) -> bool:
    """Whether no way may be (nearly) the best at both sizes."""
    return not _good(one) & _good(other)


def _good(timings: Mapping[str, Timing]) -> set[str]:
    """The ways that have not been shown to be slower than the best by more than matters."""
    best = min(timings.values(), key=lambda timing: timing.p50)
    return {way for way, timing in timings.items() if timing.low <= _TIE * best.high}
