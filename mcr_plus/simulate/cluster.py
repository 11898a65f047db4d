"""All ranks of a job, from the records of those that have run: programs and queues for the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.bucketing.events import COMPUTE, ISSUE, WAIT
from mcr_plus.bucketing.network import NetworkSimulation
from mcr_plus.bucketing.programs import CapturedProgram, ProgramOperation
from mcr_plus.bucketing.scaling import ClusterCosts, Cost, Use
from mcr_plus.bucketing.topology import Topology
from mcr_plus.core.kinds import MESSAGES
from mcr_plus.core.units import about
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.simulate.folding import GroupFamilies, RankFolding
from mcr_plus.simulate.records import AwaitedCall, EndedStep, IssuedCall, RecordedRank

Ints = NDArray[np.int64]


class QueueSlot(NamedTuple):
    """A queue as seen by a rank: a family's group of this rank, or messages to or from a member of it.

    `distance`: places from this rank to the peer; None for collectives. `sends`: whether it sends.
    """

    family: int
    number: int
    library: str
    sends: bool = False
    distance: int | None = None
    match: int = 0


@dataclass
class RankRole:
    """What a rank that has run did, by slot.

    `calls`: the operations of each slot. `of_call`: slot and number of each operation; None for a receive
    from any rank.
    """

    rank: int
    slots: list[QueueSlot]
    of_call: list[tuple[int, int] | None]
    calls: list[list[IssuedCall]]
    record: RecordedRank

    @classmethod
    def of(cls, record: RecordedRank, families: GroupFamilies) -> RankRole:
        """Return the role of a rank. Receives from any rank are in no slot."""
        known: dict[QueueSlot, int] = {}
        calls: list[list[IssuedCall]] = []
        of_call: list[tuple[int, int] | None] = []
        groups = [
            (families.add(ranks), number, ranks.index(record.rank), len(ranks))
            for ranks, number in record.groups
        ]
        for event in record.events:
            if not isinstance(event, IssuedCall):
                continue
            family, number, place, size = groups[event.group]
            slot = QueueSlot(family, number, event.library)
            if event.kind in MESSAGES:
                if event.peer is None:
                    of_call.append(None)
                    continue
                distance = (event.peer - place) % size
                slot = slot._replace(sends=event.kind == "send", distance=distance, match=event.match)
            at = known.setdefault(slot, len(known))
            if at == len(calls):
                calls.append([])
            of_call.append((at, len(calls[at])))
            calls[at].append(event)
        return cls(record.rank, list(known), of_call, calls, record)


class FreeCosts:
    """Costs of nothing, to find out only whether a job comes to its end."""

    def __init__(self, world: int) -> None:
        self.topology = Topology.of({"nodes": world})
        self._use = Use(Cost(0.0, 0.0, "measured", "measured"), {}, 0.0)

    def use(self, *_: Any) -> Use:
        """Return a use of no time and no link."""
        return self._use


class FoldedJob:
    """All ranks of a job.

    `stands`: the rank that has run for each rank. `records`: of all ranks that have run; those that are alike
    have one role.
    """

    def __init__(self, records: Mapping[int, RecordedRank], stands: Ints, folding: RankFolding) -> None:
        self.families, self.world, self.records = folding.families, len(stands), records
        alike: dict[object, list[int]] = {}
        for rank in sorted(records):
            alike.setdefault(folding.events[rank], []).append(rank)
        self.ran = list(alike.values())
        self.roles = [RankRole.of(records[ranks[0]], self.families) for ranks in self.ran]
        role_of = np.zeros(self.world, np.int64)
        for role, ranks in enumerate(self.ran):
            role_of[ranks] = role
        self.of_rank: Ints = role_of[stands]

    def queue_of(self, role: RankRole, slot: QueueSlot, ranks: Ints) -> Ints:
        """Return the ranks at both ends of a slot for these ranks: [ranks, 2]; (group, -1) of collectives."""
        family = self.families.all[slot.family]
        owner = family.owner[ranks]
        if len(absent := ranks[owner < 0]):
            raise InvalidArgument(
                f"rank {absent[0]} was folded with rank {role.rank}, but its group like "
                f"{short(family.groups[0])} is unknown; expected --all"
            )
        if slot.distance is None:
            return np.stack([owner, np.full_like(owner, -1)], axis=1)
        peer = family.table[owner, (family.place[ranks] + slot.distance) % family.size]
        return np.stack([ranks, peer] if slot.sends else [peer, ranks], axis=1)

    def simulation(
        self, costs: ClusterCosts | FreeCosts, programs: Sequence[CapturedProgram]
    ) -> FoldedSimulation:
        """Return the simulation of programs, one of each role."""
        return FoldedSimulation(self, costs, programs)

    def whole(self) -> list[CapturedProgram]:
        """Return the programs of all roles without their computation."""
        return [_program(role, 0, len(role.record.events), [], 0.0) for role in self.roles]

    def step(self, first: int, scale: float) -> list[CapturedProgram]:
        """Return the programs of the last step; times are medians over the steps from `first` on."""
        programs = []
        for role, ran in zip(self.roles, self.ran, strict=True):
            *_, (begin, end) = _steps(role.record)
            kinds = _kinds(role.record.events[begin:end])
            alike = [
                [each.seconds for each in events[one : other + 1]]
                for events, bounds in (
                    (each.events, _steps(each)) for each in map(self.records.get, ran) if each
                )
                for one, other in bounds[min(first, len(bounds) - 1) :]
                if _kinds(events[one:other]) == kinds
            ]
            times = np.array(alike)
            middle = np.median(times, axis=0)
            whole = float(middle.sum())
            middle *= float(np.median(times.sum(axis=1))) / whole if whole else 1.0
            programs.append(_program(role, begin, end, [*middle.tolist(), 0.0], scale))
        return programs


def _steps(record: RecordedRank) -> list[tuple[int, int]]:
    """Return the first and the last event of each step; the whole program if there is none."""
    ends = [at for at, each in enumerate(record.events) if isinstance(each, EndedStep)]
    begins = [0, *(end + 1 for end in ends[:-1])]
    return list(zip(begins, ends or [len(record.events)], strict=True))


def _kinds(events: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [(type(each), getattr(each, "kind", ""), getattr(each, "group", 0)) for each in events]


def _program(role: RankRole, begin: int, end: int, seconds: list[float], scale: float) -> CapturedProgram:
    """Return the events `begin` to `end` of a role; a wait for an earlier operation is left out."""
    made = CapturedProgram()
    places: dict[int, tuple[int, int]] = {}
    call = sum(isinstance(each, IssuedCall) for each in role.record.events[:begin])
    for at, event in enumerate(role.record.events[begin:end]):
        if seconds:
            made.add(COMPUTE, scale * seconds[at])
        if isinstance(event, IssuedCall):
            if (slot := role.of_call[call]) is not None:
                kind = "send" if event.kind == "recv" else event.kind
                size = event.own if event.nbytes is None else event.nbytes
                name = f"{event.tag or event.kind} {about(size)} at {event.site}"
                queue: Any = role.slots[slot[0]]
                if queue not in made.slots:
                    made.slots.append(queue)
                    made.sent.append([])
                index = made.slots.index(queue)
                made.sent[index].append(ProgramOperation(name, kind, size, None))
                places[call] = index, len(made.sent[index]) - 1
                made.add(ISSUE, 0.0, *places[call])
            call += 1
        elif isinstance(event, AwaitedCall) and event.call in places:
            made.add(WAIT, 0.0, *places[event.call])
    if seconds:
        made.add(COMPUTE, scale * seconds[end - begin])
    return made


class FoldedSimulation(NetworkSimulation):
    """Simulation of a folded job."""

    def __init__(self, job: FoldedJob, costs: Any, programs: Sequence[CapturedProgram]) -> None:
        self.costs, self.world, self.by_caller = costs, job.world, False
        self.unknown = {}
        self.programs, self.of_rank = list(programs), job.of_rank
        slots = max((len(program.slots) for program in programs), default=0)
        self.queue_of = np.full((job.world, max(slots, 1)), -1, np.int64)
        self.sent, self.groups, self.library = [], [], []
        rows: list[Ints] = []
        keys: dict[tuple[Any, ...], int] = {}
        operations: list[list[ProgramOperation]] = []
        for number, (role, program) in enumerate(zip(job.roles, programs, strict=True)):
            ranks = np.flatnonzero(self.of_rank == number)
            for at, slot in enumerate(program.slots):
                found: Any = slot
                key = (*found[:3], found.distance is None, found.match)
                of = keys.setdefault(key, len(keys))
                ends = job.queue_of(role, found, ranks)
                fields = [np.full(len(ranks), value) for value in (of, len(operations), at)]
                rows.append(np.column_stack([fields[0], ends, fields[1], ranks, fields[2]]))
                operations.append(program.sent[at])
        table = np.concatenate(rows) if rows else np.zeros((0, 6), np.int64)
        named = list(keys)
        _, first, inverse = np.unique(table[:, :3], axis=0, return_index=True, return_inverse=True)
        self.queue_of[table[:, 4], table[:, 5]] = inverse.reshape(-1)
        for of, one, other, sent, *_ in table[first].tolist():
            family = job.families.all[named[of][0]]
            self.groups.append(family.groups[one] if other < 0 else (one, other))
            self.sent.append(operations[sent])
            self.library.append(named[of][2])
        self._make_links()
