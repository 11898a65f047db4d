"""What to measure next: everything roughly, every size, what is in doubt again, and where winners change.

What decides about nothing comes last: whole times of asynchronous operations whose exposed time is measured.

Pure: what was measured comes in, the next cell goes out, so that a run can stop and go on anywhere and always
has a table to show. Sizes of one stage are gone through from small to large over all kinds, because the large
ones take the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from math import sqrt
from typing import Final

from mcr_plus.tuning.operations import Cell, Kind, whole_size
from mcr_plus.tuning.points import Point, settled
from mcr_plus.tuning.statistics import Timing
from mcr_plus.units import Range

_COARSE: Final = 4  # of so many powers of two the first stage takes one
_DOUBT: Final = 1.5  # a size that takes so many times as long as a larger one was disturbed, most likely
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
    fresh = (task for task in _grid(request) if not done.get(task))
    again = (task for task, most in _doubtful(request, points) if done[task] < most)
    between = (task for task in _refinements(request, points) if not done.get(task))
    last = (task for task in _further(request) if further and not done.get(task))
    return next(chain(fresh, again, between, last), None)


def stages(request: Request) -> int:
    """How many tasks there are before winners are looked at, for a progress bar."""
    return len({*_grid(request), *_further(request)})


def _grid(request: Request) -> Iterator[Task]:
    sizes = _powers(request)
    for chosen in (sorted({*sizes[::_COARSE], sizes[-1]}), sizes):
        for size in chosen:
            yield from _of_size(request, size, request.manners)


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
