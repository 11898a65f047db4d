"""Check that all ranks of a job issue operations that fit together, and that none waits forever."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from mcr_plus.bucketing.simulation_result import SimulationResult
from mcr_plus.errors import short
from mcr_plus.simulate.cluster import FoldedJob, FoldedSimulation, FreeCosts, QueueSlot, RankRole
from mcr_plus.simulate.records import IssuedCall


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
    """Yield one problem with the ranks that wait for each other forever."""
    simulation = job.simulation(FreeCosts(job.world), job.whole())
    waits = _waits(simulation, simulation.run())
    if not waits:
        return
    names = [f"rank {rank} waits for {name} in {short(group)}" for rank, name, group in waits]
    more = f"; and {len(names) - 4} others" if len(names) > 4 else ""
    yield OrderProblem(
        f"these ranks wait for each other: {'; '.join(names[:4])}{more}", tuple(rank for rank, *_ in waits)
    )


def _waits(job: FoldedSimulation, result: SimulationResult) -> list[tuple[int, str, tuple[int, ...]]]:
    """Return the ranks that never end, with the operation for which they wait, and its group."""
    found = []
    programs = result.programs
    for at, rank in enumerate(result.ranks.tolist()):
        own = int(job.of_rank[rank])
        begin, end = int(programs.begins[own]), int(programs.begins[own + 1])
        stopped = np.flatnonzero(np.isnan(result.ran.when[at, : end - begin]))
        if len(stopped):
            event = begin + int(stopped[0])
            slot, number = int(programs.slot[event]), int(programs.number[event])
            queue = int(result.queues[result.queue_of[at, slot]])
            name = job.programs[own].sent[slot][number].name
            found.append((rank, name, tuple(job.groups[queue])))
    return found
