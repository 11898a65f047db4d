"""Check that all ranks of a job issue operations that fit together, and that none waits forever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import numpy as np

from mcr_plus.bucketing.events import ISSUE
from mcr_plus.bucketing.programs import ProgramOperation
from mcr_plus.bucketing.simulation_result import SimulationResult
from mcr_plus.core.kinds import MESSAGES
from mcr_plus.errors import short
from mcr_plus.simulate.cluster import FoldedJob, FoldedSimulation
from mcr_plus.simulate.records import IssuedCall

_SHOWN: Final = 6  # ranks of a circle in a text


class OrderProblem(NamedTuple):
    """Operations that do not fit together: a text, and the ranks that it names."""

    text: str
    ranks: tuple[int, ...]


def problems(job: FoldedJob) -> list[OrderProblem]:
    """Return the operations that do not fit together, or else the ranks that wait forever."""
    simulation = job.whole()
    return [*_groups(job), *_operations(simulation)] or [*_calls(job), *_stuck(simulation)]


def _groups(job: FoldedJob) -> Iterator[OrderProblem]:
    """Yield ranks that make other groups of all ranks than the first."""
    first, *others = (job.records[rank] for rank in sorted(job.records))
    for record in others:
        for one, other in zip_longest(first.created, record.created):
            if (one and one[0]) != (other and other[0]):
                texts = [
                    "no further group" if each is None else f"the group {short(each[0])} at {each[1]}"
                    for each in (one, other)
                ]
                yield OrderProblem(
                    f"rank {first.rank} makes {texts[0]}, rank {record.rank} {texts[1]}; all ranks of a job "
                    "must make the same groups in the same order",
                    (first.rank, record.rank),
                )
                break


def _operations(job: FoldedSimulation) -> Iterator[OrderProblem]:
    """Yield queues whose ranks issue different operations; one for each set of roles."""
    order = np.argsort(job.queue, kind="stable")
    begins = np.flatnonzero(np.diff(job.queue[order], prepend=-1))
    known: set[tuple[int, ...]] = set()
    for rows in np.split(order, begins[1:]) if len(order) else ():
        group = job.groups[int(job.queue[rows[0]])]
        if len(rows) == len(group):
            alike = tuple(sorted({*job.operations[rows].tolist()}))
            if len(alike) == 1 or alike in known:
                continue
            known.add(alike)
        issued = {int(job.rank[row]): job.lists[job.operations[row]] for row in rows}
        first = next(iter(issued))
        for rank in group:
            place = _difference(issued[first], issued.get(rank, []))
            if place is not None:
                texts = [
                    f"{each[place].name if place < len(each) else 'nothing'} on rank {at}"
                    for at in (first, rank)
                    for each in [issued.get(at, [])]
                ]
                what = "message" if issued[first][0].kind == "send" else "operation"
                ranks = (
                    short(tuple(group))
                    if len(group) <= 16
                    else f"{group[0]} to {group[-1]} ({len(group)} ranks)"
                )
                yield OrderProblem(f"{what} {place} of the ranks {ranks}: {', '.join(texts)}", (first, rank))
                break


def _difference(one: list[ProgramOperation], other: list[ProgramOperation]) -> int | None:
    """Return the first place in which two sequences differ."""
    pairs = zip_longest(one, other)
    return next((at for at, (a, b) in enumerate(pairs) if a is None or b is None or a[1:] != b[1:]), None)


def _calls(job: FoldedJob) -> Iterator[OrderProblem]:
    """Yield operations that belong to other calls on other ranks that have run, such as redistributions."""
    known: dict[Any, tuple[int, IssuedCall]] = {}
    for record in job.records.values():
        turns = Counter[int]()
        for event in record.events:
            if isinstance(event, IssuedCall) and event.kind not in MESSAGES:
                key = record.groups[event.group], turns[event.group]
                turns[event.group] += 1
                rank, first = known.setdefault(key, (record.rank, event))
                if first.call != event.call:
                    said = [f"{each.call}, {each.words}" for each in (first, event)]
                    what = f"operation {key[1]} of the ranks {short(key[0][0])}"
                    text = f"{what}: {said[0]} on rank {rank}; {said[1]} on rank {record.rank}"
                    yield OrderProblem(text, (rank, record.rank))
                    return


def _stuck(simulation: FoldedSimulation) -> Iterator[OrderProblem]:
    """Yield one problem: a circle of ranks that wait for each other forever."""
    found = StuckRanks(simulation, simulation.run())
    if circle := found.circle():
        texts = [found.words(at) for at in circle[:_SHOWN]]
        more = f"; and {len(circle) - _SHOWN} more ranks" if len(circle) > _SHOWN else ""
        yield OrderProblem(
            f"ranks wait for each other: {'; '.join(texts)}{more}",
            tuple(int(found.result.ranks[at]) for at in circle),
        )


class StuckRanks:
    """Ranks of a simulation that never end; each by its index among those simulated."""

    def __init__(self, simulation: FoldedSimulation, result: SimulationResult) -> None:
        self.simulation, self.result = simulation, result
        self.stopped: dict[int, int] = {}  # the event at which each rank waits
        for at, own in enumerate(simulation.of_rank[result.ranks].tolist()):
            begin, end = result.programs.begins[own : own + 2].tolist()
            never = np.flatnonzero(np.isnan(result.ran.when[at, : end - begin]))
            if len(never):
                self.stopped[at] = int(never[0])

    def circle(self) -> list[int]:
        """Return ranks of which each waits for the next, and the last for the first; empty if all end."""
        seen: list[int] = []
        at = next(iter(self.stopped), None)
        while at is not None and at not in seen:
            seen.append(at)
            at = self._missing(at)
        return seen if at is None else seen[seen.index(at) :]

    def words(self, at: int) -> str:
        """Return for which operation of which group a rank waits."""
        event, queue = self._awaited(at)
        own = int(self.simulation.of_rank[self.result.ranks[at]])
        programs = self.result.programs
        name = self.simulation.programs[own].sent[programs.slot[event]][programs.number[event]].name
        group = self.simulation.groups[int(self.result.queues[queue])]
        return f"rank {self.result.ranks[at]} waits for {name} of {short(tuple(group))}"

    def _awaited(self, at: int) -> tuple[int, int]:
        """Return the event at which a rank waits, and the queue for which it does."""
        programs = self.result.programs
        own = int(self.simulation.of_rank[self.result.ranks[at]])
        event = int(programs.begins[own]) + self.stopped[at]
        return event, int(self.result.queue_of[at, programs.slot[event]])

    def _missing(self, at: int) -> int | None:
        """Return a stuck rank that has not issued the operation for which this rank waits."""
        event, queue = self._awaited(at)
        made, number = self.result.made, int(self.result.programs.number[event])
        for member in range(made.members[queue], made.members[queue + 1]):
            rank, slot = int(made.rank[member]), int(made.slot[member])
            if rank in self.stopped and self._issued(rank, slot) <= number:
                return rank
        return None

    def _issued(self, at: int, slot: int) -> int:
        """Return how many operations a rank has issued in a slot before it stopped."""
        programs = self.result.programs
        begin = int(programs.begins[int(self.simulation.of_rank[self.result.ranks[at]])])
        reached = slice(begin, begin + self.stopped[at])
        return int(np.sum((programs.code[reached] == ISSUE) & (programs.slot[reached] == slot)))
