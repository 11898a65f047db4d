"""Costs of a job's operations: by operation and tag, by codec and by step; and ranks that were late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.core.kinds import bus_factor
from mcr_plus.observe.report.job import Floats, Ints, RecordedJob

_FEW: Final = 4  # least number of step marks for a duration


@dataclass(frozen=True)
class OperationGroup:
    """Operations of one kind, tag, library, codec and `sums`; shares are of a rank's time, on average.

    Attributes:
        waited: share spent waiting, without overlap with earlier waits. late: the part of `waited` before the
            last rank had issued the operation.
        served_us: median of the remaining wait, in which the library runs the operation.
        dtypes: dtypes of the elements.
    """

    kind: str
    tag: str
    backend: str
    codec: str
    sums: str
    count: int
    bytes: int
    wire: int
    fused: float
    p50_us: float
    p95_us: float
    busbw: float  # GB/s
    in_flight: float
    waited: float
    late: float
    served_us: float
    failed: int
    is_async: bool
    small: float  # share of the operations of at most 16 KiB
    dtypes: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name: `all_reduce (gradients)`."""
        return f"{self.kind} ({self.tag})" if self.tag else self.kind


@dataclass(frozen=True)
class TimeShares:
    """Shares of a rank's time: computing, waiting, and communication hidden behind computing."""

    computing: float
    waiting: float
    hidden: float


@dataclass(frozen=True)
class StepDurations:
    """The steps of the first rank with marks: number, durations in seconds, and a typical step."""

    count: int
    p50: float
    p95: float
    begin: float
    end: float
    by_marks: bool


@dataclass(frozen=True)
class ArrivalDelays:
    """Arrivals of a rank at operations of several ranks.

    `last`: share of the operations at which it was last. `median`, `worst`: its delay after the previous
    rank, in seconds, where it was last. `total`: sum of its delays. `blame`: its share in the delays of all
    ranks.
    """

    rank: int
    last: float
    median: float
    worst: float
    total: float
    blame: float


@dataclass(frozen=True)
class LateAt:
    """Arrivals at one operation, with the rank that was last most often."""

    name: str
    count: int
    late: ArrivalDelays


@dataclass(frozen=True)
class Skew:
    """Arrivals of ranks: the number of compared operations, arrivals by rank, and by operation."""

    count: int
    ranks: Sequence[ArrivalDelays]
    operations: Sequence[LateAt]
    error_us: float | None


@dataclass(frozen=True)
class CodecUse:
    """Operations of one codec and kind: bytes before and after, and the median of their times."""

    codec: str
    kind: str
    count: int
    bytes: int
    wire: int
    p50_us: float


SMALL: Final = 16 << 10


def groups(job: RecordedJob) -> list[OperationGroup]:
    """Return all operations grouped by kind, tag, library, codec and `sums`, longest waits first."""
    columns = job.columns
    codes = np.stack([columns[name] for name in ("kind", "tag", "backend", "codec", "sums")])
    exposed = _exposed(job)
    return sorted(
        (_group(job, codes[:, rows[0]], rows, exposed) for rows in _runs(codes)),
        key=lambda group: (-group.waited, -group.in_flight),
    )


def _runs(codes: NDArray[Any]) -> Iterator[Ints]:
    """Yield the positions of equal columns of `codes`."""
    order = np.lexsort(codes)
    if not len(order):
        return
    sorted_ = codes[:, order]
    edges = np.flatnonzero((sorted_[:, 1:] != sorted_[:, :-1]).any(axis=0)) + 1
    yield from np.split(order, edges)


class _Waits(NamedTuple):
    """Seconds of each operation in which its rank waited for it and for no earlier operation: all seconds,
    and the seconds before the last rank had issued the operation.
    """

    all: Floats
    late: Floats


def _exposed(job: RecordedJob) -> _Waits:
    columns = job.columns
    complete = np.full(job.count, -np.inf)  # time at which the last rank issued the operation
    for members in job.collectives:
        complete[members] = columns["t_issue"][members].max(axis=1, keepdims=True)
    found = _Waits(np.zeros(job.count), np.zeros(job.count))
    begins = columns["t_done"] - columns["waited"]
    for rank in job.ranks:
        waits = np.flatnonzero((columns["rank"] == rank) & (columns["waited"] > 0))
        waits = waits[np.argsort(begins[waits], kind="stable")]
        ends = columns["t_done"][waits]
        last = np.concatenate([[-np.inf], np.maximum.accumulate(ends)])[:-1] if len(ends) else ends
        starts = np.maximum(begins[waits], last)
        found.all[waits] = np.maximum(0.0, ends - starts)
        found.late[waits] = np.maximum(0.0, np.minimum(ends, complete[waits]) - starts)
    return found


def _group(job: RecordedJob, code: NDArray[Any], rows: Ints, exposed: _Waits) -> OperationGroup:
    columns = job.columns
    good = rows[job.good[rows]]
    some = good if len(good) else rows
    times = columns["t_done"][some] - columns["t_issue"][some]
    kind = job.name("kind", code[0])
    sizes, which = np.unique(columns["ranks"][some], return_inverse=True)
    factors = np.array([bus_factor(kind, int(size)) for size in sizes])
    moved = float((columns["bytes"][some] * factors[which]).sum())
    whole = sum(span.seconds for span in job.ranks.values())
    waits = some[exposed.all[some] > 0]
    served = exposed.all[waits] - exposed.late[waits]
    return OperationGroup(
        kind=kind,
        tag=job.name("tag", code[1]),
        backend=job.name("backend", code[2]),
        codec=job.name("codec", code[3]),
        sums=job.name("sums", code[4]),
        count=len(rows),
        bytes=int(columns["bytes"][some].sum()),
        wire=int(columns["wire_bytes"][some].sum()),
        fused=float(columns["fused"][some].mean()),
        p50_us=float(np.percentile(times, 50)) * 1e6,
        p95_us=float(np.percentile(times, 95)) * 1e6,
        busbw=moved / max(float(times.sum()), 1e-12) / 1e9,
        in_flight=float(times.sum()) / whole,
        waited=float(exposed.all[some].sum()) / whole,
        late=float(exposed.late[some].sum()) / whole,
        served_us=float(np.median(served)) * 1e6 if len(served) else 0.0,
        failed=len(rows) - len(good),
        is_async=bool(columns["is_async"][some].mean() > 0.5),
        small=float((columns["bytes"][some] <= SMALL).mean()),
        dtypes=tuple(job.name("dtype", index) for index in np.unique(columns["dtype"][some])),
    )


def merged(begins: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """Return the union of intervals as disjoint intervals in order."""
    if not len(begins):
        return begins, ends
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    starts = np.concatenate([[True], begins[1:] > ends[:-1]])
    lasts = np.concatenate([starts[1:], [True]])
    return begins[starts], ends[lasts]


def waits_of(job: RecordedJob, rank: int) -> tuple[Floats, Floats]:
    """Return a rank's waits as disjoint intervals."""
    rows = np.flatnonzero((job.columns["rank"] == rank) & (job.columns["waited"] > 0))
    ends = job.columns["t_done"][rows]
    return merged(ends - job.columns["waited"][rows], ends)


def shares_of(job: RecordedJob, rank: int) -> TimeShares:
    """Return the shares of a rank's time."""
    rows = np.flatnonzero(job.columns["rank"] == rank)
    flights = merged(job.columns["t_issue"][rows], job.columns["t_done"][rows])
    waits = waits_of(job, rank)
    seconds = max(job.ranks[rank].seconds, 1e-12)
    waiting = float((waits[1] - waits[0]).sum()) / seconds
    flying = float((flights[1] - flights[0]).sum()) / seconds
    return TimeShares(max(0.0, 1 - waiting), waiting, max(0.0, flying - waiting))


def steps(job: RecordedJob) -> StepDurations:
    """Return the steps between marks of the optimizer; with too few marks, a busy part of the recording."""
    for span in job.ranks.values():
        if len(span.steps) >= _FEW:
            begins, ends = span.steps[:-1], span.steps[1:]
            seconds = ends - begins
            later = seconds[1:]  # without the first ones, which compile and warm up
            usual = 1 + int(np.argmin(np.abs(later - np.median(later))))
            return StepDurations(
                len(seconds), float(np.median(later)), float(np.percentile(later, 95)), float(begins[usual]),
                float(ends[usual]), by_marks=True,
            )  # fmt: skip
    return _busy_part(job)


_PART: Final = 60
"""Operations of the first rank in the part that is shown instead of a step."""


def _busy_part(job: RecordedJob) -> StepDurations:
    rank, span = next(iter(job.ranks.items()))
    issued = np.sort(job.columns["t_issue"][job.columns["rank"] == rank])
    if len(issued) <= _PART:
        return StepDurations(0, span.seconds, span.seconds, span.began, span.ended, by_marks=False)
    lengths = issued[_PART:] - issued[:-_PART]
    at = int(np.argmin(np.abs(lengths - np.median(lengths))))
    seconds = float(lengths[at])
    return StepDurations(0, seconds, seconds, float(issued[at]), float(issued[at]) + seconds, by_marks=False)


# -- late ranks ---------------------------------------------------------------------------------------------


def skew(job: RecordedJob) -> Skew:
    """Return the arrivals of ranks at the collectives that all of their ranks have recorded."""
    columns = job.columns
    late: dict[str, list[tuple[Ints, Floats]]] = {}  # by operation: the last ranks and their delays
    for members in job.collectives:
        size = members.shape[1]
        arrivals = columns["t_issue"][members]
        last = arrivals.argmax(axis=1)
        two = np.partition(arrivals, size - 2, axis=1)[:, -2:]
        found = columns["rank"][members[np.arange(len(members)), last]], two[:, 1] - two[:, 0]
        tags = np.stack([columns[name][members[:, 0]] for name in ("kind", "tag")])
        for run in _runs(tags):
            kind, tag = (job.name(name, tags[at, run[0]]) for at, name in enumerate(("kind", "tag")))
            name = f"{kind} ({tag})" if tag else kind
            late.setdefault(name, []).append((found[0][run], found[1][run]))
    by_name = {
        name: (np.concatenate([each[0] for each in some]), np.concatenate([each[1] for each in some]))
        for name, some in late.items()
    }
    known = [clock.error_us for clock in job.clocks.values()]
    error = None if None in known else max((each for each in known if each is not None), default=0.0)
    if not by_name:
        return Skew(0, [], [], error)
    everything = tuple(np.concatenate([each[part] for each in by_name.values()]) for part in (0, 1))
    operations = [
        LateAt(name, len(who), max(_late(who, by, job), key=lambda each: each.total))
        for name, (who, by) in by_name.items()
    ]
    return Skew(
        len(everything[0]),
        _late(everything[0], everything[1], job),
        sorted(operations, key=lambda each: -each.late.total),
        error,
    )


def _late(who: NDArray[Any], by: NDArray[Any], job: RecordedJob) -> list[ArrivalDelays]:
    found, everything = [], max(float(by.sum()), 1e-12)
    for rank in job.ranks:
        own = by[who == rank]
        some = own if len(own) else np.zeros(1)
        total = float(own.sum())
        share, median, worst = len(own) / len(who), float(np.median(some)), float(some.max())
        found.append(ArrivalDelays(rank, share, median, worst, total, total / everything))
    return found


# -- codecs -------------------------------------------------------------------------------------------------


def codecs(job: RecordedJob) -> list[CodecUse]:
    """Return operations by codec and kind."""
    coded = np.flatnonzero((job.columns["codec"] >= 0) & job.good)
    codes = np.stack([job.columns[name][coded] for name in ("codec", "kind")])
    found = []
    for run in _runs(codes):
        rows = coded[run]
        times = job.columns["t_done"][rows] - job.columns["t_issue"][rows]
        found.append(
            CodecUse(
                codec=job.name("codec", codes[0, run[0]]),
                kind=job.name("kind", codes[1, run[0]]),
                count=len(rows),
                bytes=int(job.columns["bytes"][rows].sum()),
                wire=int(job.columns["wire_bytes"][rows].sum()),
                p50_us=float(np.percentile(times, 50)) * 1e6,
            )
        )
    return sorted(found, key=lambda each: each.wire - each.bytes)
