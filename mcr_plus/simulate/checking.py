"""Check that all ranks of a job issue operations that fit together, and that none waits forever."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Final, NamedTuple

import numpy as np

from mcr_plus.bucketing.events import ISSUE
from mcr_plus.bucketing.simulation_result import SimulationResult
from mcr_plus.errors import short
from mcr_plus.simulate.cluster import FoldedJob, FoldedSimulation, FreeCosts, QueueSlot, RankRole
from mcr_plus.simulate.records import IssuedCall

_SHOWN: Final = 6  # ranks of a circle in a text


class OrderProblem(NamedTuple):
    """Operations that do not fit together: a text, and the ranks that it names."""

    text: str
    ranks: tuple[int, ...]


def problems(job: FoldedJob) -> list[OrderProblem]:
    """Return the operations that do not fit together, or else the ranks that wait forever."""
    return [*_groups(job), *_collectives(job), *_messages(job)] or list(_stuck(job))


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


def _collectives(job: FoldedJob) -> Iterator[OrderProblem]:
    """Yield groups whose members issue different collectives; once for each set of roles."""
    by_role = [_by_group(role) for role in job.roles]
    for family, number in sorted({key for calls in by_role for key in calls}):
        table = job.families.all[family].table
        _, first = np.unique(job.of_rank[table], axis=0, return_index=True)
        for group in first.tolist():
            ranks = table[group].tolist()
            one = by_role[job.of_rank[ranks[0]]].get((family, number), [])
            seen = {int(job.of_rank[ranks[0]])}
            for rank in ranks[1:]:
                role = int(job.of_rank[rank])
                if role in seen:
                    continue
                seen.add(role)
                other = by_role[role].get((family, number), [])
                place = _difference(one, other)
                if place is not None:
                    texts = [
                        each[place].words if place < len(each) else "nothing more" for each in (one, other)
                    ]
                    yield OrderProblem(
                        f"operation {place} of the group {short(tuple(ranks))}: {texts[0]} on rank "
                        f"{ranks[0]}, {texts[1]} on rank {rank}; expected the same",
                        (ranks[0], rank),
                    )


def _by_group(role: RankRole) -> dict[tuple[int, int], list[IssuedCall]]:
    """Return the collectives of a role by family and number, in order, whatever their library."""
    found: dict[tuple[int, int], list[IssuedCall]] = {}
    calls = (each for each in role.record.events if isinstance(each, IssuedCall))
    for call, at in zip(calls, role.of_call, strict=True):
        if at is not None and role.slots[at[0]].distance is None:
            slot = role.slots[at[0]]
            found.setdefault((slot.family, slot.number), []).append(call)
    return found


def _difference(one: list[IssuedCall], other: list[IssuedCall]) -> int | None:
    """Return the first place in which two sequences of a group differ."""
    for place in range(max(len(one), len(other))):
        if place >= min(len(one), len(other)) or _facts(one[place]) != _facts(other[place]):
            return place
    return None


def _facts(call: IssuedCall) -> tuple[object, ...]:
    return call.kind, call.nbytes, call.dtype, call.op, call.root, call.library


def _messages(job: FoldedJob) -> Iterator[OrderProblem]:
    """Yield sends without their receives, receives without their sends, and those of other sizes."""
    seen: set[tuple[object, ...]] = set()
    for number, role in enumerate(job.roles):
        ranks = np.flatnonzero(job.of_rank == number)
        for slot, calls in zip(role.slots, role.calls, strict=True):
            if slot.distance is None:
                continue
            size = job.families.all[slot.family].size
            back = slot._replace(sends=not slot.sends, distance=-slot.distance % size)
            ends = job.queue_of(role, slot, ranks)[:, 1 if slot.sends else 0]
            _, first = np.unique(job.of_rank[ends], return_index=True)
            for rank, peer in zip(ranks[first].tolist(), ends[first].tolist(), strict=True):
                other = int(job.of_rank[peer])
                key = frozenset({(number, slot), (other, back)})
                if (key,) not in seen:
                    seen.add((key,))
                    yield from _paired(slot, (rank, calls), (peer, _at(job.roles[other], back)))


def _at(role: RankRole, slot: QueueSlot) -> list[IssuedCall]:
    return role.calls[role.slots.index(slot)] if slot in role.slots else []


def _paired(
    slot: QueueSlot, one: tuple[int, list[IssuedCall]], other: tuple[int, list[IssuedCall]]
) -> Iterator[OrderProblem]:
    (sender, sent), (receiver, received) = (one, other) if slot.sends else (other, one)
    for place in range(max(len(sent), len(received))):
        a = sent[place] if place < len(sent) else None
        b = received[place] if place < len(received) else None
        if a is None or b is None or (a.own, a.dtype) != (b.own, b.dtype):
            texts = "no send" if a is None else a.words, "no recv" if b is None else b.words
            yield OrderProblem(
                f"message {place} from rank {sender} to rank {receiver}: {texts[0]} on rank {sender}, "
                f"{texts[1]} on rank {receiver}",
                (sender, receiver),
            )
            return


def _stuck(job: FoldedJob) -> Iterator[OrderProblem]:
    """Yield one problem: a circle of ranks that wait for each other forever."""
    simulation = job.simulation(FreeCosts(job.world), job.whole())
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
