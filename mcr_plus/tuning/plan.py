"""Order of measurements: a coarse grid, all sizes, unclear sizes again, sizes where the winner changes.

If the exposed time of an asynchronous operation is measured, the whole time comes last, since no rule uses
it. The functions are pure: they compute the next task from the samples, so a run can stop and continue
anywhere and always has a table. In each stage, all kinds are measured at the smallest size, then at the
largest, then at the middles between, so that a small budget covers the whole range. Among first sizes, those
come first for which the budget allows all kinds. A task that does not fit into the budget is not started. An
impossible time is measured again immediately.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from math import inf, sqrt
from typing import Final

from mcr_plus.core.kinds import Kind
from mcr_plus.core.units import Range, size_words
from mcr_plus.tables.statistics import Timing
from mcr_plus.tuning.measurements import Sample, median_of_repeats
from mcr_plus.tuning.operations import BenchCase, whole_size

_SHARE: Final = 0.5  # share of the remaining budget for one size over all kinds
_COARSE: Final = 4  # the first stage measures every fourth power of two
_DOUBT: Final = 1.5  # ratio to the time at a larger size: most likely disturbed
_NONSENSE: Final = 8  # ratio to the time at a larger size: useless
_DISTURBED: Final = 5  # limit of measurements of a disturbed size: the median counts
_CONTESTED: Final = 3  # limit of measurements of a size without a clear winner
_CLOSE: Final = 1.3  # at a smaller ratio of sizes with different winners, no size between them is measured
_TIE: Final = 1.03  # a smaller ratio of times is a tie


@dataclass(frozen=True)
class Task:
    """A case to measure; `overlap`: measure the exposed time beside a computation."""

    case: BenchCase
    overlap: bool = False


@dataclass(frozen=True)
class TableRequest:
    """The operations that a table must cover. Sizes are in bytes, both ends included.

    `libraries`: candidates for all kinds. `algorithms`: further candidates of a kind, `library:algorithm`.
    `spans`: sizes that a candidate supports, if not all.
    """

    kinds: tuple[Kind, ...]
    smallest: int
    largest: int
    ranks: int
    libraries: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32",)
    asynchronous: bool = True
    overlap: bool = True
    algorithms: Mapping[Kind, tuple[str, ...]] = field(default_factory=dict)
    spans: Mapping[str, Range] = field(default_factory=dict)

    def candidates_for(self, case: BenchCase) -> tuple[str, ...]:
        """Return the candidates for a case."""
        candidates = (*self.libraries, *self.algorithms.get(case.kind, ()))
        return tuple(candidate for candidate in candidates if self.supports(candidate, case.nbytes))

    def supports(self, candidate: str, nbytes: int) -> bool:
        """Return True if a candidate supports operations of a size."""
        return candidate not in self.spans or self.spans[candidate].covers(nbytes)

    def manners(self, kind: Kind) -> list[tuple[bool, bool]]:
        """Return (async_op, overlap) for each kind of timing that a kind's rules use; messages have one."""
        if kind == "send" or not self.asynchronous:
            return [(False, False)]
        return [(False, False), (True, self.overlap)]

    def further(self, kind: Kind) -> list[tuple[bool, bool]]:
        """Return (async_op, overlap) for timings that are measured although no rule uses them."""
        return [(True, False)] if (True, True) in self.manners(kind) else []

    def relevant(self, samples: Iterable[Sample]) -> list[Sample]:
        """Return the samples of this request's candidates and kinds of timing, for all kinds and sizes."""
        return [
            sample
            for sample in samples
            if sample.candidate in self.candidates_for(sample.case)
            and (sample.case.async_op, sample.overlap)
            in (*self.manners(sample.case.kind), *self.further(sample.case.kind))
        ]


def next_task(
    request: TableRequest,
    samples: Sequence[Sample],
    *,
    further: bool = True,
    left: float = inf,
    expected: Callable[[Task], float] = lambda _: 0.0,
) -> Task | None:
    """Return the first task that has not been done, or must be repeated; None if there is none.

    Without `further`, only tasks that rules use are considered, so None means that the table is complete.
    `left`: the seconds left in the budget; tasks that are `expected` to take longer are skipped.
    """
    samples = request.relevant(samples)
    counts = Counter((Task(sample.case, sample.overlap), sample.candidate) for sample in samples)
    # If an earlier run lacked a library, all candidates are measured again in turns at the sizes of that run.
    done = {
        task: min(counts[task, candidate] for candidate in request.candidates_for(task.case))
        for task, _ in counts
    }
    absurd = (task for task in _absurd(request, samples) if done[task] < _DISTURBED)
    fresh = (task for task in _grid(request, done, left, expected) if not done.get(task))
    again = (task for task, most in _doubtful(request, samples) if done[task] < most)
    between = (task for task in _refinements(request, samples) if not done.get(task))
    last = (task for task in _further(request) if further and not done.get(task))
    return next((t for t in chain(absurd, fresh, again, between, last) if expected(t) <= left), None)


def coverage(request: TableRequest, samples: Iterable[Sample]) -> tuple[int, int]:
    """Return the numbers of (measured, all) tasks that every table has."""
    planned = set(whole_grid(request))
    return len(planned & {Task(sample.case, sample.overlap) for sample in samples}), len(planned)


def whole_grid(request: TableRequest) -> list[Task]:
    """Return the tasks that every table has."""
    tasks = (_of_size(request, size, request.manners) for size in _powers(request))
    return list(dict.fromkeys(chain.from_iterable(tasks)))


def rough_grid(request: TableRequest) -> dict[int, list[Task]]:
    """Return the tasks at the first sizes, which every table has, by ascending size."""
    return {size: list(_of_size(request, size, request.manners)) for size in _rough_sizes(request)}


def _grid(
    request: TableRequest, done: Mapping[Task, int], left: float, expected: Callable[[Task], float]
) -> Iterator[Task]:
    rough = rough_grid(request)
    costs = {size: sum(expected(t) for t in tasks if not done.get(t)) for size, tasks in rough.items()}
    for sizes in ([size for size in rough if costs[size] <= _SHARE * left], list(rough), _powers(request)):
        for size in _spread(sizes):
            yield from _of_size(request, size, request.manners)


def _rough_sizes(request: TableRequest) -> list[int]:
    sizes = _powers(request)
    return sorted({*sizes[::_COARSE], sizes[-1]})


def _spread(sizes: Sequence[int]) -> list[int]:
    """Return the smallest size, the largest, and then the middles between neighbours."""
    order, between = [*sizes[:1], *sizes[-1:]], deque([(0, len(sizes) - 1)])
    while between:
        low, high = between.popleft()
        middle = (low + high) // 2
        if low < middle:
            order.append(sizes[middle])
            between += [(low, middle), (middle, high)]
    return list(dict.fromkeys(order))


def _further(request: TableRequest) -> Iterator[Task]:
    for size in _powers(request):
        yield from _of_size(request, size, request.further)


def _of_size(
    request: TableRequest, size: int, manners: Callable[[Kind], list[tuple[bool, bool]]]
) -> Iterator[Task]:
    for kind in request.kinds:
        for dtype in request.dtypes:
            nbytes = whole_size(kind, size, dtype, request.ranks)
            for async_op, overlap in manners(kind):
                case = BenchCase(kind, nbytes, dtype, async_op)
                if request.candidates_for(case):
                    yield Task(case, overlap)


def _powers(request: TableRequest) -> list[int]:
    size = 1 << max(request.smallest - 1, 0).bit_length()
    sizes = []
    while size <= request.largest:
        sizes.append(size)
        size *= 2
    return sizes or [request.largest]


def _curves(
    request: TableRequest, samples: Sequence[Sample]
) -> Iterator[tuple[Task, dict[int, dict[str, Timing]]]]:
    """Yield the timings of each operation by size; the task has size 0."""
    apart: dict[Task, list[Sample]] = {}
    for sample in samples:
        apart.setdefault(Task(replace(sample.case, nbytes=0), sample.overlap), []).append(sample)
    for kind in request.kinds:
        for dtype in request.dtypes:
            for async_op, overlap in request.manners(kind):
                like = Task(BenchCase(kind, 0, dtype, async_op), overlap)
                yield like, by_size(apart.get(like, ()), like.case, overlap)


def _doubtful(request: TableRequest, samples: Sequence[Sample]) -> Iterator[tuple[Task, int]]:
    """Yield disturbed and contested tasks, each with the limit of its measurements."""
    for like, timings in _curves(request, samples):
        sizes = sorted(timings)
        for low, high in pairwise(sizes):
            if _disturbed(timings[low], timings[high]):
                yield Task(replace(like.case, nbytes=low), like.overlap), _DISTURBED
        for size in sizes:
            if _contested(timings[size]):
                yield Task(replace(like.case, nbytes=size), like.overlap), _CONTESTED


def _absurd(request: TableRequest, samples: Sequence[Sample]) -> Iterator[Task]:
    """Yield tasks with impossible times for the latest operation; earlier ones have already been repeated."""
    if not samples or samples[-1].overlap:  # exposed time need not grow with the size
        return
    case = samples[-1].case
    if case.kind not in request.kinds or case.dtype not in request.dtypes:
        return
    alike = [sample for sample in samples if replace(sample.case, nbytes=0) == replace(case, nbytes=0)]
    for size in nonsense(by_size(alike, case, overlap=False)):
        yield Task(replace(case, nbytes=size))


def nonsense(timings: Mapping[int, Mapping[str, Timing]]) -> dict[int, list[str]]:
    """Return, by size, candidates that took many times longer than at a larger size; whole times only."""
    least: dict[str, float] = {}
    odd: dict[int, list[str]] = {}
    for size in sorted(timings, reverse=True):
        for candidate, timing in timings[size].items():
            if timing.p50 > _NONSENSE * least.get(candidate, inf):
                odd.setdefault(size, []).append(candidate)
            least[candidate] = min(timing.p50, least.get(candidate, inf))
    return odd


def impossible(request: TableRequest, samples: Sequence[Sample]) -> list[str]:
    """Return the results of `nonsense` for each operation, as `all_reduce 8 B by mpi`."""
    return [
        f"{like.case.kind}{' async' if like.case.async_op else ''} {size_words(size)} by {', '.join(names)}"
        for like, timings in _curves(request, request.relevant(samples))
        if not like.overlap
        for size, names in sorted(nonsense(timings).items())
    ]


def _contested(timings: Mapping[str, Timing]) -> bool:
    return len(_good(timings)) > 1


def _disturbed(smaller: Mapping[str, Timing], larger: Mapping[str, Timing]) -> bool:
    return any(
        smaller[candidate].p50 > _DOUBT * larger[candidate].p50
        for candidate in smaller.keys() & larger.keys()
    )


def _refinements(request: TableRequest, samples: Sequence[Sample]) -> Iterator[Task]:
    """Yield tasks at sizes between neighbours with different winners."""
    for like, timings in _curves(request, samples):
        for low, high in pairwise(sorted(timings)):
            middle = whole_size(like.case.kind, round(sqrt(low * high)), like.case.dtype, request.ranks)
            case = replace(like.case, nbytes=middle)
            apart = low < middle < high and high / low > _CLOSE and _differ(timings[low], timings[high])
            if apart and request.candidates_for(case):
                yield Task(case, like.overlap)


def by_size(samples: Sequence[Sample], like: BenchCase, overlap: bool) -> dict[int, dict[str, Timing]]:
    """Return timings, by size and candidate, of cases that differ from `like` only in size."""
    timings: dict[int, dict[str, Timing]] = {}
    for sample in median_of_repeats(samples):
        case = sample.case
        alike = (case.kind, case.dtype, case.async_op) == (like.kind, like.dtype, like.async_op)
        if alike and sample.overlap == overlap and sample.timing is not None:
            timings.setdefault(case.nbytes, {})[sample.candidate] = sample.timing
    return timings


def _differ(one: Mapping[str, Timing], other: Mapping[str, Timing]) -> bool:
    """Return True if no candidate can be (nearly) the best at both sizes."""
    return not _good(one) & _good(other)


def _good(timings: Mapping[str, Timing]) -> set[str]:
    """Return the candidates that are not significantly slower than the best."""
    best = min(timings.values(), key=lambda timing: timing.p50)
    return {candidate for candidate, timing in timings.items() if timing.low <= _TIE * best.high}
