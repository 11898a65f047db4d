"""All ranks of a job, from the records of those that have run: programs and queues for the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcr_plus.bucketing.events import COMPUTE, WAIT
from mcr_plus.bucketing.network import NetworkSimulation
from mcr_plus.bucketing.programs import CapturedProgram, ProgramOperation
from mcr_plus.bucketing.scaling import ClusterCosts, Cost, Use
from mcr_plus.bucketing.topology import Topology
from mcr_plus.core.units import about
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.simulate.folding import QueueSlot, RankFolding
from mcr_plus.simulate.records import AwaitedCall, EndedStep, IssuedCall, RecordedEvent, RecordedRank

Ints = NDArray[np.int64]


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

    Attributes:
        records: of the ranks that have run. ran: those of each role, which have done the same.
        of_rank: the role of each rank.
    """

    def __init__(self, records: Mapping[int, RecordedRank], stands: Ints, folding: RankFolding) -> None:
        self.families, self.world, self.records = folding.families.all, len(stands), records
        alike: dict[object, list[int]] = {}
        for rank in sorted(records):
            alike.setdefault(folding.events[rank], []).append(rank)
        self.ran = list(alike.values())
        self._slots = [
            [each[0] for each in folding.events[ran[0]] if isinstance(each, tuple)] for ran in self.ran
        ]
        role_of = np.zeros(self.world, np.int64)
        for role, ranks in enumerate(self.ran):
            role_of[ranks] = role
        self.of_rank: Ints = role_of[stands]

    def whole(self) -> FoldedSimulation:
        """Return a simulation of all that the ranks did, without times.

        The codec of an operation is the text of what its ranks must agree on.
        """
        programs = [self._program(role, 0, None) for role in range(len(self.ran))]
        return FoldedSimulation(self, FreeCosts(self.world), programs)

    def step(self, costs: ClusterCosts, first: int, scale: float) -> FoldedSimulation:
        """Return a simulation of the last step; times are medians over the steps from `first` on.

        `scale`: factor of the computation.
        """
        programs = []
        for role, ran in enumerate(self.ran):
            events = [self.records[rank].events for rank in ran]
            *_, (begin, end) = _steps(events[0])
            kinds = _kinds(events[0][begin:end])
            alike = [
                [event.seconds for event in each[one : other + 1]]
                for each in events
                for one, other in _steps(each)[first:] or _steps(each)[-1:]
                if _kinds(each[one:other]) == kinds
            ]
            times = np.array(alike)
            middle: NDArray[np.float64] = np.median(times, axis=0)
            if whole := float(middle.sum()):  # medians of skewed times add up to less
                middle *= scale * float(np.median(times.sum(axis=1))) / whole
            programs.append(self._program(role, begin, middle.tolist()))
        return FoldedSimulation(self, costs, programs)

    def _program(self, role: int, begin: int, seconds: list[float] | None) -> CapturedProgram:
        """Return the events of a role from `begin` on, as many as `seconds`; None: all, without times."""
        made = CapturedProgram()
        places: dict[int, tuple[int, int]] = {}
        events = self.records[self.ran[role][0]].events
        call = sum(isinstance(each, IssuedCall) for each in events[:begin])
        until = None if seconds is None else begin + len(seconds)
        for at, event in enumerate(events[begin:until]):
            if seconds is not None:
                made.add(COMPUTE, seconds[at])
            if isinstance(event, IssuedCall):
                slot: Any = self._slots[role][call]
                kind = "send" if event.kind == "recv" else event.kind
                if slot is not None and seconds is None:
                    facts = repr((event.dtype, event.op, event.root, event.library))
                    sent = ProgramOperation(event.words, kind, event.nbytes or 0, facts)
                    places[call] = made.issue(slot._replace(library=""), sent)
                elif slot is not None:
                    size = event.own if event.nbytes is None else event.nbytes
                    name = f"{event.tag or event.kind} {about(size)} at {event.site}"
                    places[call] = made.issue(slot, ProgramOperation(name, kind, size, None))
                call += 1
            elif isinstance(event, AwaitedCall) and event.call in places:
                made.add(WAIT, 0.0, *places[event.call])
        return made

    def ends(self, slot: QueueSlot, ranks: Ints) -> Ints:
        """Return sender and receiver of a slot, or (group, -1), for each of these ranks."""
        family = self.families[slot.family]
        owner = family.owner[ranks]
        if len(absent := ranks[owner < 0]):
            raise InvalidArgument(
                f"rank {absent[0]} is folded, but its group like {short(family.groups[0])} is unknown; "
                "expected --all"
            )
        if slot.distance is None:
            return np.stack([owner, np.full_like(owner, -1)], axis=1)
        peer = family.table[owner, (family.place[ranks] + slot.distance) % family.size]
        return np.stack([ranks, peer] if slot.sends else [peer, ranks], axis=1)


def _steps(events: Sequence[RecordedEvent]) -> list[tuple[int, int]]:
    """Return the first and the last event of each step; the whole program if there is none."""
    ends = [at for at, each in enumerate(events) if isinstance(each, EndedStep)]
    begins = [0, *(end + 1 for end in ends[:-1])]
    return list(zip(begins, ends or [len(events)], strict=True))


def _kinds(events: Sequence[RecordedEvent]) -> list[tuple[object, ...]]:
    return [(type(each), getattr(each, "kind", ""), getattr(each, "group", 0)) for each in events]


class FoldedSimulation(NetworkSimulation):
    """Simulation of a folded job.

    Attributes:
        queue: queue of each pair of a rank and one of its slots. rank, slot: the pair.
        operations: its operations, as an index in `lists`.
    """

    def __init__(self, job: FoldedJob, costs: Any, programs: Sequence[CapturedProgram]) -> None:
        self.costs, self.world, self.by_caller, self.unknown = costs, job.world, False, {}
        self.programs, self.of_rank = list(programs), job.of_rank
        self.lists: list[list[ProgramOperation]] = []
        keys: dict[tuple[Any, ...], int] = {}
        rows = [np.zeros((0, 6), np.int64)]
        for role, program in enumerate(programs):
            ranks = np.flatnonzero(self.of_rank == role)
            for at, each in enumerate(program.slots):
                slot: Any = each
                key = keys.setdefault(slot.shared, len(keys))
                columns = [np.full(len(ranks), value) for value in (key, len(self.lists), at)]
                rows.append(np.column_stack([columns[0], job.ends(slot, ranks), ranks, *columns[1:]]))
                self.lists.append(program.sent[at])
        table = np.concatenate(rows)
        _, first, queue = np.unique(table[:, :3], axis=0, return_index=True, return_inverse=True)
        self.queue, (self.rank, self.operations, self.slot) = queue.reshape(-1), table[:, 3:].T
        most = max((len(program.slots) for program in programs), default=0)
        self.queue_of = np.full((job.world, max(most, 1)), -1, np.int64)
        self.queue_of[self.rank, self.slot] = self.queue
        self.sent, self.groups, self.library = [], [], []
        shared = list(keys)
        for key, one, other, _, operations, _ in table[first].tolist():
            family, _, library, *_ = shared[key]
            self.groups.append(job.families[family].groups[one] if other < 0 else (one, other))
            self.sent.append(self.lists[operations])
            self.library.append(library)
        self._make_links()
