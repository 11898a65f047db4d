"""Evaluate a simulated step: operations, exposed time, critical path, lower bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mcr_plus.bucketing.events import ISSUE, LinkShares, Programs, Queues, Ran
from mcr_plus.bucketing.programs import ProgramOperation
from mcr_plus.bucketing.scaling import How, Use
from mcr_plus.errors import InvalidArgument
from mcr_plus.tables.scaling import LinkClass

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CLASSES: Final[tuple[LinkClass, ...]] = ("inside", "nic", "uplink")
"""Link classes, in the order of the columns of `Queues.busy`."""
_RANKED: Final[tuple[How, ...]] = ("measured", "scaled", "assumed")
_LONGEST: Final = 10_000  # maximum number of parts of a critical path
_MATTERS: Final = 0.01  # smallest relevant fraction of the step


class SimulatedOperation(NamedTuple):
    """An operation of the slowest rank; times are seconds from the beginning of the step.

    `exposed`: seconds in which the rank only waited for the operation. `how`: origin of the duration when
    alone. `share_how`: origin of the core share.
    """

    name: str
    kind: str
    nbytes: int
    ranks: int
    library: str
    start: float
    end: float
    exposed: float
    how: How
    share_how: How = "assumed"


class PathPart(NamedTuple):
    """A part of the critical path, in seconds from the beginning of the step, and its rank.

    `what`: "computing", or the name of an operation.
    """

    start: float
    end: float
    what: str
    rank: int


@dataclass(frozen=True)
class Timeline:
    """Timeline of a simulated step.

    `step_s`: seconds of the step; `compute_s`: seconds of computation, the maximum over ranks. `bound`: lower
    bound of the step with these operations and costs; `bound_by`: its cause. `critical`: the critical path,
    from the beginning of the step. `per_op`: operations of the slowest rank, by start time. `ranks`: number
    of simulated ranks; `distinct`: number of different ranks. `how`: weakest origin of the costs, including
    core shares that could change the step by more than 1 %; `times_how`: the same without core shares.
    `unknown`: unknown kinds of operations, simulated as barriers.
    """

    step_s: float
    compute_s: float
    bound: float
    bound_by: str
    critical: tuple[PathPart, ...]
    per_op: tuple[SimulatedOperation, ...]
    ranks: int
    distinct: int
    how: How
    times_how: How
    unknown: tuple[str, ...] = ()

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds in which the slowest rank only waited, by operation."""
        found: dict[str, float] = {}
        for each in self.per_op:
            if each.exposed > 0:
                found[each.name] = found.get(each.name, 0.0) + each.exposed
        return found

    @property
    def exposed_s(self) -> float:
        """Seconds in which the slowest rank only waited."""
        return sum(each.exposed for each in self.per_op)


class SimulatedJob(Protocol):
    """A step on all ranks.

    By queue: operations `sent`, link `uses` of the operations, ranks (`groups`), and `library`. `of_rank`:
    program of each rank. `world`: number of ranks. `unknown`: unknown kinds of operations.
    """

    sent: list[list[ProgramOperation]]
    uses: list[list[Use]]
    groups: list[Sequence[int]]
    library: list[str]
    of_rank: Ints
    world: int
    unknown: dict[str, None]


@dataclass
class SimulationResult:
    """Evaluation of a finished simulation."""

    job: SimulatedJob
    ranks: Ints
    queues: Ints
    queue_of: Ints
    programs: Programs
    made: Queues
    shares: LinkShares
    ran: Ran

    def check_end(self) -> None:
        """Raise `InvalidArgument` on a deadlock."""
        for at, rank in enumerate(self.ranks):
            begin, end = self._events(at)
            stopped = np.flatnonzero(np.isnan(self.ran.when[at, : end - begin]))
            if len(stopped):
                event = begin + int(stopped[0])
                queue = self.queues[self.queue_of[at, self.programs.slot[event]]]
                name = self.job.sent[queue][self.programs.number[event]].name
                raise InvalidArgument(
                    f"rank {rank}: deadlock: it waits for {name}, and other ranks wait for it"
                )

    def timeline(self) -> Timeline:
        """Return the timeline of the step."""
        done = np.array([self._computed(at) for at in range(len(self.ranks))])
        latest = [self._latest(at) for at in range(len(self.ranks))]
        slowest = int(np.argmax([max(done[at], latest[at]) for at in range(len(self.ranks))]))
        step_s = float(max(done.max(initial=0.0), self.ran.ends.max(initial=0.0)))
        compute = np.array([self._compute(at) for at in range(len(self.ranks))])
        bound, bound_by = self._bound(compute)
        costs = [use.cost.how for number in self.queues for use in self.job.uses[number]]
        times_how: How = max(costs, key=_RANKED.index, default="measured")
        operations = self._operations(slowest)
        shares_how = _shares_how(operations, step_s)
        return Timeline(
            step_s,
            float(compute.max(initial=0.0)),
            min(bound, step_s),
            bound_by,
            tuple(self._critical(slowest)),
            tuple(operations),
            self.job.world,
            len(self.ranks),
            times_how if _RANKED.index(times_how) > _RANKED.index(shares_how) else shares_how,
            times_how,
            tuple(self.job.unknown),
        )

    def _events(self, at: int) -> tuple[int, int]:
        program = self.job.of_rank[self.ranks[at]]
        return int(self.programs.begins[program]), int(self.programs.begins[program + 1])

    def _computed(self, at: int) -> float:
        begin, end = self._events(at)
        return float(self.ran.when[at, end - begin - 1]) if end > begin else 0.0

    def _compute(self, at: int) -> float:
        begin, end = self._events(at)
        return float(self.programs.value[begin:end].sum())

    def _own(self, at: int) -> Iterator[tuple[int, int]]:
        """Yield the operations of a rank as (queue, index of the operation)."""
        for queue in dict.fromkeys(self.queue_of[at].tolist()):
            if queue >= 0:
                for index in range(self.made.begins[queue], self.made.begins[queue + 1]):
                    yield queue, index

    def _latest(self, at: int) -> float:
        return max((float(self.ran.ends[index]) for _, index in self._own(at)), default=0.0)

    # -- bound ----------------------------------------------------------------------------------------------

    def _bound(self, compute: Floats) -> tuple[float, str]:
        """Return the lower bound of the step in seconds, and its cause.

        The bound is the maximum of three terms. Computation: while an operation runs, the rank loses the
        operation's core share, or does not compute. Links: the busy time of each link. Queues: after the
        earliest time at which an operation can be issued, the operation and all later ones of its queue must
        run.
        """
        found: list[tuple[float, str]] = []
        for at in range(len(self.ranks)):
            lost: dict[int, list[float]] = {}
            for queue, index in self._own(at):
                lost.setdefault(queue, []).append(float(self.made.share[index]))
            slots = [queue for queue in self.queue_of[at].tolist() if queue >= 0]
            each = [
                float(np.sum(self.made.share[b:e] * self.made.seconds[b:e]))
                for queue in slots
                for b, e in [self.made.begins[queue : queue + 2]]
            ]
            together = sum(max(lost[queue]) for queue in slots) <= 1.0
            shares = sum(each) if together else max(each, default=0.0)
            found.append(
                (
                    float(compute[at]) + shares,
                    f"computation on rank {self.ranks[at]}, with the core's share of communication",
                )
            )
        first = self._first_issues()
        for queue, number in enumerate(self.queues):
            begin, end = self.made.begins[queue : queue + 2]
            behind = np.cumsum(self.made.seconds[begin:end][::-1])[::-1]
            ends = first[begin:end] + behind
            at = int(np.argmax(ends))
            found.append((float(ends[at]), f"{self.job.sent[number][at].name} and later operations"))
        used = np.zeros(max(len(self.shares.of_link) - 1, 0))
        kinds = np.zeros(len(used), np.int64)
        for queue in range(len(self.queues)):
            begin, end = self.made.begins[queue : queue + 2]
            for k in range(self.shares.of_queue[queue], self.shares.of_queue[queue + 1]):
                kind = self.shares.kind[k]
                seconds = float(np.sum(self.made.seconds[begin:end] * self.made.busy[begin:end, kind]))
                used[self.shares.link[k]] += seconds * self.shares.times[k]
                kinds[self.shares.link[k]] = kind
        if len(used):
            at = int(np.argmax(used))
            found.append((float(used[at]), f"communication over the link {CLASSES[kinds[at]]}"))
        return max(found, key=lambda pair: pair[0])

    def _first_issues(self) -> Floats:
        """Return the seconds of computation before the last rank issues an operation, for each operation."""
        first = np.zeros(len(self.made.seconds))
        for at in range(len(self.ranks)):
            begin, end = self._events(at)
            issues = np.flatnonzero(self.programs.code[begin:end] == ISSUE)
            before = np.cumsum(self.programs.value[begin:end])[issues]
            queue = self.queue_of[at, self.programs.slot[begin:end][issues]]
            index = self.made.begins[queue] + self.programs.number[begin:end][issues]
            np.maximum.at(first, index, before)
        return first

    # -- operations -----------------------------------------------------------------------------------------

    def _operations(self, at: int) -> list[SimulatedOperation]:
        own = sorted(self._own(at), key=lambda pair: float(self.ran.ends[pair[1]]))
        ends = np.array([self.ran.ends[index] for _, index in own])
        exposed = np.zeros(len(own))
        begin, end = self._events(at)
        waits = [
            (self._time_before(at, event), float(self.ran.when[at, event]))
            for event in np.flatnonzero(self.ran.blocked[at, : end - begin]).tolist()
        ]
        for since, until in (*waits, (self._computed(at), np.inf)):
            for position in range(int(np.searchsorted(ends, since, side="right")), len(own)):
                exposed[position] += max(min(ends[position], until) - since, 0.0)
                since = max(since, min(ends[position], until))
                if ends[position] >= until:
                    break
        found = []
        for (queue, index), waited in zip(own, exposed, strict=True):
            number = self.queues[queue]
            order = index - int(self.made.begins[queue])
            sent = self.job.sent[number][order]
            found.append(
                SimulatedOperation(
                    sent.name, sent.kind, sent.nbytes, len(self.job.groups[number]), self.job.library[number],
                    float(self.ran.starts[index]), float(self.ran.ends[index]), float(waited),
                    *self.job.uses[number][order].cost[2:4],
                )
            )  # fmt: skip
        return sorted(found, key=lambda each: (each.start, each.end))

    def _time_before(self, at: int, event: int) -> float:
        return float(self.ran.when[at, event - 1]) if event else 0.0

    def _critical(self, slowest: int) -> list[PathPart]:
        """Return the critical path, found by tracing back from the end of the step."""
        parts: list[PathPart] = []
        computed = self._computed(slowest)
        last = max(self._own(slowest), key=lambda pair: float(self.ran.ends[pair[1]]), default=None)
        begin, end = self._events(slowest)
        at, event = slowest, end - begin
        operation = last if last is not None and self.ran.ends[last[1]] > computed else None
        while len(parts) < _LONGEST:
            if operation is not None:
                queue, index = operation
                number = self.queues[queue]
                name = self.job.sent[number][index - int(self.made.begins[queue])].name
                start, stop = float(self.ran.starts[index]), float(self.ran.ends[index])
                parts.append(PathPart(start, stop, name, int(self.ranks[at])))
                if self.ran.cause[index, 0] < 0:
                    operation = queue, index - 1
                    continue
                at, event = int(self.ran.cause[index, 0]), int(self.ran.cause[index, 1])
            stop = self._time_before(at, event)
            begin, _ = self._events(at)
            waits = np.flatnonzero(self.ran.blocked[at, :event])
            since = float(self.ran.when[at, waits[-1]]) if len(waits) else 0.0
            if stop > since:
                parts.append(PathPart(since, stop, "computing", int(self.ranks[at])))
            if not len(waits):
                break
            waited = begin + int(waits[-1])
            queue = int(self.queue_of[at, self.programs.slot[waited]])
            operation = queue, int(self.made.begins[queue] + self.programs.number[waited])
        return parts[::-1]


def _shares_how(operations: Sequence[SimulatedOperation], step_s: float) -> How:
    """Return the weakest origin of the core shares that matter."""
    beside = dict.fromkeys(_RANKED, 0.0)
    for each in operations:
        beside[each.share_how] += each.end - each.start - each.exposed
    matter = {how for how, seconds in beside.items() if seconds > _MATTERS * step_s}
    return "assumed" if "assumed" in matter else "scaled" if "scaled" in matter else "measured"
