"""Ranks that delay others: which ranks arrive late at operations, by how much, and where.

A rank arrives at an operation when it issues it. Its own delay is the smaller of two values: its arrival less
the median arrival of the other ranks, and its own time since the previous operation less their median own
time. Own time excludes waits for operations and for a core, so the second value is small for a rank that
another rank, or another process on its core, has delayed.

On one host, the arrivals are on the boards of the groups: ranks share a clock, exact to a microsecond or two.
Arrivals in groups across hosts come from `cross_host_stragglers`, with an error; only a delay beyond the
error counts. Sends and receives are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Signature
    from mcr_plus.core.stacks import Site
    from mcr_plus.observe.cross_host_stragglers import AcrossHosts

Times = tuple[list[float], list[float]]
Floats = npt.NDArray[np.float64]
LATE: Final = 0.005
"""Seconds; shorter delays come from the operating system."""
LEAST_SHARE: Final = 0.05
"""Least share of the time by which a straggler delays the others."""
_LEAST_EVENTS: Final = 4
_WINDOWS: Final = 5  # equal parts of the time
_LATE_WINDOWS: Final = 4  # windows that must each reach half that share
_TIMES_OTHERS: Final = 3.0  # least ratio of its delay to that of the other ranks
_CHUNK: Final = 512  # operations that are evaluated together


@dataclass(frozen=True)
class Lateness:
    """Delays of one rank at the operations of one kind and tag that one line of the program issues.

    Attributes:
        rank: rank in the job.
        site: the line, `file:line, in function`.
        count: number of operations; in `late` of them the rank's own delay was `LATE` seconds or more.
        seconds: sum of these delays; `mean` and `longest` are per operation.
    """

    rank: int
    kind: str
    tag: str | None
    site: str
    count: int
    late: int
    seconds: float
    longest: float

    @property
    def mean(self) -> float:
        """Return the mean delay in seconds over its late operations."""
        return self.seconds / self.late if self.late else 0.0


@dataclass(frozen=True)
class Straggler:
    """A rank that persistently delays others.

    Attributes:
        rank: rank in the job.
        seconds, share: its total delay, and as a share of the recording's time.
        events: number of its late operations.
        sites: the lines of the program, longest delay first.
    """

    rank: int
    seconds: float
    share: float
    events: int
    sites: tuple[Lateness, ...]

    def __str__(self) -> str:
        site = self.sites[0]
        tag = f" {site.tag}" if site.tag else ""
        return (
            f"rank {self.rank} keeps the others waiting for {self.share:.0%} of the time: "
            f"{self.seconds:.3g} s, {self.events} times, mostly {1e3 * site.mean:.3g} ms "
            f"before {site.kind}{tag} at {site.site}"
        )


class Stragglers(list[Straggler]):
    """The ranks that are persistently late, the latest first; empty if none is. Prints as a table.

    Attributes:
        rows: delays of each rank, by kind, tag and line of the program, longest first.
        compared: number of operations whose arrivals are all known.
        left_out: number of other operations.
        missing: ranks on other hosts that have not recorded some operations, or still record.
        error: largest remaining difference of two hosts' clocks, in seconds; 0 on one host.
    """

    def __init__(
        self,
        found: Sequence[Straggler],
        rows: Sequence[Lateness],
        compared: int,
        left_out: int,
        missing: Sequence[int] = (),
        error: float = 0.0,
    ) -> None:
        super().__init__(found)
        self.rows = list(rows)
        self.compared, self.left_out = compared, left_out
        self.missing, self.error = tuple(missing), error

    def __str__(self) -> str:
        from mcr_plus.observe.record_table import lateness_text  # a circular import otherwise

        return lateness_text(self)


class _OpenOperations:
    """Operations of a group that are not evaluated yet, and the last evaluated one."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.keys: list[int] = []
        self.numbers: list[int] = []
        self.arrivals: list[list[float]] = []
        self.idle: list[list[float]] = []
        self.last: Floats | None = None  # own times at the last operation
        self.sites: dict[int, _Site] = {}


class ArrivalCollector:
    """Collects the ranks' arrivals at recorded operations.

    Its memory grows with late arrivals, and with the operations of groups across hosts.

    Attributes:
        across: operations of groups across hosts; None on one host.
    """

    def __init__(self, across: AcrossHosts | None = None) -> None:
        self.across = across
        self._error = 0.0
        self._groups: dict[tuple[str, tuple[int, ...]], _OpenOperations] = {}
        self._keys: dict[_Key, int] = {}
        self._events: list[tuple[float, int, float]] = []  # time, rank, seconds
        self._compared = self._left_out = 0

    def add(
        self, of: Group, signature: Signature, number: int, known: Times | None, site: Site | None
    ) -> float | None:
        """Add operation `number` of a group; return its skew, the last arrival less the median one.

        `known`: the arrivals by group rank, NaN where unknown, and the idle times until then.
        """
        if known is None:
            self._left_out += 1
            return None
        arrivals = sorted(known[0])
        if not sum(arrivals) > 0:  # false for NaN
            self._left_out += 1
            return None
        group = self._group(of)
        group.keys.append(self.key(signature, site))
        group.numbers.append(number)
        group.arrivals.append(known[0])
        group.idle.append(known[1])
        self._compared += 1
        if len(group.keys) == _CHUNK:
            self._evaluate(group)
        return arrivals[-1] - arrivals[(len(arrivals) - 1) // 2]

    def key(self, signature: Signature, site: Site | None) -> int:
        """Return a number for an operation's kind and tag and the line that issued it."""
        return self._keys.setdefault((signature.kind, signature.tag, site), len(self._keys))

    def _group(self, of: Group) -> _OpenOperations:
        name = of.name, of.ranks
        if name not in self._groups:
            self._groups[name] = _OpenOperations(of.ranks)
        return self._groups[name]

    def _evaluate(self, group: _OpenOperations) -> None:
        if not group.keys:
            return
        order = np.argsort(group.numbers, kind="stable")  # they are in the order of completion
        arrivals, idle = np.array(group.arrivals)[order], np.array(group.idle)[order]
        self._take(group, np.array(group.keys)[order], arrivals, idle)
        for each in (group.keys, group.numbers, group.arrivals, group.idle):
            each.clear()

    def _take(
        self,
        group: _OpenOperations,
        keys: npt.NDArray[np.int64],
        arrivals: Floats,
        idle: Floats,
        shifts: Floats | float = 0.0,
        error: float = 0.0,
    ) -> None:
        """Evaluate operations in order; each row has the times of all ranks, see `Compared`."""
        own = arrivals - idle
        before = np.vstack([own[:1] if group.last is None else group.last, own[:-1]])
        arrivals = arrivals + shifts
        late = np.minimum(_beyond_others(arrivals) - error, _beyond_others(own - before))
        late[late < LATE] = 0.0
        for key in np.unique(keys).tolist():
            if key not in group.sites:
                group.sites[key] = _Site(len(group.ranks))
            group.sites[key].count(late[keys == key])
        for row, column in zip(*np.nonzero(late), strict=True):
            event = float(arrivals[row, column]), group.ranks[column], float(late[row, column])
            self._events.append(event)
        group.last = own[-1:]

    def _evaluate_across(self, across: AcrossHosts) -> None:
        for of, some in across.compared():
            group = self._group(of)
            self._take(group, np.array(some.keys), some.arrivals, some.idle, some.shifts, some.error)
            self._compared += len(some.keys)
            self._error = max(self._error, some.error)

    def stragglers(self, began: float, seconds: float) -> Stragglers:
        """Return the stragglers of a recording of `seconds` from `began`, in seconds of `perf_counter`."""
        for group in self._groups.values():
            self._evaluate(group)
        left_out, missing = self._left_out, list[int]()
        if self.across is not None:
            self._evaluate_across(self.across)
            left_out, missing = left_out + self.across.left, sorted(self.across.missing)
        rows = self._rows()
        rows.sort(key=lambda row: (-row.seconds, row.rank))
        ranks = sorted({rank for group in self._groups.values() for rank in group.ranks})
        totals = {rank: sum(late for _, who, late in self._events if who == rank) for rank in ranks}
        found = [
            self._straggler(rank, rows, seconds)
            for rank in ranks
            if self._is_persistent(rank, totals, began, seconds)
        ]
        found.sort(key=lambda each: -each.seconds)
        return Stragglers(found, rows, self._compared, left_out, missing, self._error)

    def _rows(self) -> list[Lateness]:
        """Return the delays per rank, kind, tag and line, summed over the groups."""
        names = list(self._keys)
        sums: dict[tuple[int, int], Floats] = {}
        for group in self._groups.values():
            for key, site in group.sites.items():
                for rank, figures in zip(group.ranks, site.figures, strict=True):
                    known = sums.setdefault((key, rank), np.zeros(4))
                    known[:3] += figures[:3]
                    known[3] = max(known[3], figures[3])
        rows = []
        for (key, rank), (count, late, seconds, longest) in sums.items():
            kind, tag, at = names[key]
            line = site_text(at)
            rows.append(
                Lateness(rank, kind, tag, line, int(count), int(late), float(seconds), float(longest))
            )
        return rows

    def _is_persistent(self, rank: int, totals: dict[int, float], began: float, seconds: float) -> bool:
        events = [(when, late) for when, who, late in self._events if who == rank]
        others = [total for other, total in totals.items() if other != rank]
        if len(events) < _LEAST_EVENTS or totals[rank] < LEAST_SHARE * seconds:
            return False
        if totals[rank] < _TIMES_OTHERS * float(np.median(others)):
            return False
        length = seconds / _WINDOWS
        windows = np.zeros(_WINDOWS)
        for when, late in events:
            windows[min(max(int((when - began) / length), 0), _WINDOWS - 1)] += late
        return bool(np.sum(windows >= LEAST_SHARE / 2 * length) >= _LATE_WINDOWS)

    def _straggler(self, rank: int, rows: Sequence[Lateness], seconds: float) -> Straggler:
        sites = tuple(row for row in rows if row.rank == rank and row.late)
        total = sum(row.seconds for row in sites)
        return Straggler(rank, total, total / seconds, sum(row.late for row in sites), sites)


_Key = tuple[str, "str | None", "Site | None"]
"""Kind, tag and line of the program."""


class _Site:
    """Sums over the operations of one kind, tag and line, by rank: count, late ones, seconds, longest."""

    def __init__(self, ranks: int) -> None:
        self.figures = np.zeros((ranks, 4))

    def count(self, late: Floats) -> None:
        """Add operations; each row has the delays of all ranks in seconds."""
        self.figures[:, 0] += len(late)
        self.figures[:, 1] += (late > 0).sum(axis=0)
        self.figures[:, 2] += late.sum(axis=0)
        self.figures[:, 3] = np.maximum(self.figures[:, 3], late.max(axis=0))


def site_text(site: Site | None) -> str:
    """Format a line of the program for people; empty if it is unknown."""
    return "" if site is None else f"{site[0]}:{site[1]}, in {site[2]}"


def _beyond_others(times: Floats) -> Floats:
    """Return each time less the median of the other columns of its row."""
    ranks = times.shape[1]
    if ranks == 2:
        return times - times[:, ::-1]
    beyond = np.empty_like(times)
    for rank in range(ranks):
        beyond[:, rank] = times[:, rank] - np.median(np.delete(times, rank, axis=1), axis=1)
    return beyond
