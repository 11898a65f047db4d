"""Simulate a step on many ranks: operations in queues, over shared links.

    timeline = simulate(step, plan, costs, ranks=4096)
    timeline.step_s, timeline.bound, timeline.exposed

The model:

- A rank repeats the captured computation, at the rate 1 minus the core shares of its operations in flight.
- Each group has a queue for each library, in which operations run one after another. An operation begins when
  all ranks of the group have arrived: each has issued the operation, and the previous operation has ended. If
  the program drives progress (`by_caller`) of a library that must be polled, a rank arrives when the program
  next issues, waits, or has a gradient ready.
- An operation alone takes the time in `ClusterCosts`, and uses a fraction of the rate of each of its links.
  Operations on an overloaded link are slowed down so that their messages have equal rates. If a link's rate
  is unknown, an operation is assumed to use the whole link, and so are operations of the same ranks by other
  libraries.
- MPI sends all messages between two ranks over one connection, in the order of posting, and
  every issued operation has one message on it. So an operation waits for one message of every other operation
  in flight on its ranks, and its part of the rate is the part of its message in all messages in flight.

Additional ranks are copies of the captured ranks (data parallelism): groups of all captured ranks, and groups
that carry gradients, extend over all copies; other groups exist once per copy. The bytes of operations stay
the same.

Equivalent ranks, queues and links are simulated once. Equivalence is computed by the coarsest equitable
partition (colour refinement), so the times equal those of a simulation of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mcr_plus import registry
from mcr_plus.backends import backend_class, is_polled
from mcr_plus.bucketing import events
from mcr_plus.bucketing.events import LinkShares, Queues
from mcr_plus.bucketing.programs import (
    BucketPlan,
    CapturedProgram,
    CapturedQueue,
    ProgramBuilder,
    ProgramOperation,
    bounds_of,
    gradients_of,
    joined,
    sizes_of,
)
from mcr_plus.bucketing.scaling import ClusterCosts, Use
from mcr_plus.bucketing.simulation_result import CLASSES, SimulationResult, Timeline
from mcr_plus.bucketing.step import CapturedStep
from mcr_plus.bucketing.topology import Topology
from mcr_plus.core.kinds import KINDS
from mcr_plus.core.units import about
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.tables.scaling import Placement

Ints = NDArray[np.int64]
_Words = NDArray[np.uint64]


def simulate(
    step: CapturedStep,
    plan: BucketPlan | None,
    costs: ClusterCosts,
    topology: Topology | None = None,
    *,
    ranks: int | None = None,
    overhead: float = 0.0,
    fold: bool = True,
) -> Timeline:
    """Simulate `step` under `plan`.

    Args:
        plan: None for the captured operations. costs: costs of operations, with their topology. topology:
            replaces the topology of `costs`. ranks: None for the captured number. overhead: seconds of
            computation to issue an operation. fold: simulate equivalent ranks only once.

    Raises:
        InvalidArgument: more ranks than the topology has; a number of ranks that is not a multiple of the
            captured number although ranks differ or form several groups; an operation in a group that does
            not contain the issuing rank; different operations of a group's ranks; a plan with gradients that
            the step does not have; negative times; a deadlock.
        Unsupported: the cost of an operation is unknown.
    """
    if topology is not None and topology is not costs.topology:
        costs = costs.on(topology)
    world = step.ranks if ranks is None else ranks
    if not 1 <= world <= costs.topology.ranks:
        raise InvalidArgument(
            f"ranks: expected 1 to {costs.topology.ranks}, those of the topology, got {world}"
        )
    job = NetworkSimulation(step, plan or BucketPlan(), costs, world, overhead)
    return job.timeline(fold=fold)


class NetworkSimulation:
    """A step on all ranks: programs, queues and links."""

    def __init__(
        self, step: CapturedStep, plan: BucketPlan, costs: ClusterCosts, world: int, overhead: float
    ) -> None:
        self.step, self.plan, self.costs, self.world = step, plan, costs, world
        self.by_caller = step.by_caller
        self.unknown: dict[str, None] = {}
        self.extends: set[tuple[int, ...]] = {tuple(range(step.ranks))}
        programs: list[CapturedProgram] = []
        sizes = sizes_of(step)
        base = np.full(step.ranks, -1, np.int64)
        for role in step.roles:
            for rank in role.ranks:
                if not 0 <= rank < step.ranks or base[rank] >= 0:
                    raise InvalidArgument(f"rank {rank}: expected each of 0 to {step.ranks - 1} in one role")
                base[rank] = len(programs)
            builder = ProgramBuilder(role, plan, overhead, step.ranks, gradients_of(step, role), sizes)
            programs.append(builder.build())
            self.extends |= builder.extends
            self.unknown |= builder.unknown
        if np.any(base < 0):
            raise InvalidArgument(
                f"rank {int(np.argmin(base))}: it is in no role; expected all {step.ranks} ranks"
            )
        self.programs = programs
        self._check_copies(base)
        self.of_rank = base[np.arange(world) % step.ranks]
        self._make_queues()
        self._make_links()

    def _check_copies(self, base: Ints) -> None:
        """Raise `InvalidArgument` if the step cannot be extended to `world` ranks."""
        groups = [slot.group for program in self.programs for slot in program.slots]
        partial = next((group for group in groups if len(group) < self.step.ranks), None)
        if self.world % self.step.ranks and (partial is not None or np.any(base != base[0])):
            raise InvalidArgument(
                f"ranks: expected a multiple of the {self.step.ranks} captured ones, since these differ or "
                f"form several groups, got {self.world}"
            )

    # -- queues -------------------------------------------------------------------------------------------

    def _make_queues(self) -> None:
        """Number the queues of all ranks, and set `queue_of[rank, slot]`."""
        captured, world = self.step.ranks, self.world
        slots = max((len(program.slots) for program in self.programs), default=0)
        self.queue_of = np.full((world, max(slots, 1)), -1, np.int64)
        self.sent: list[list[ProgramOperation]] = []
        self.groups: list[Sequence[int]] = []
        self.library: list[str] = []
        numbers: dict[tuple[CapturedQueue, int], int] = {}
        issuers: list[int] = []
        for rank in range(world):
            copy, origin = divmod(rank, captured)
            program = self.programs[self.of_rank[rank]]
            for at, slot in enumerate(program.slots):
                if origin not in slot.group and world >= captured:
                    raise InvalidArgument(
                        f"rank {origin}: it issues operations in the group {short(slot.group)}"
                    )
                everywhere = slot.group in self.extends
                key = slot, -1 if everywhere else copy
                number = numbers.get(key)
                if number is None:
                    number = numbers[key] = len(self.sent)
                    self.sent.append(program.sent[at])
                    self.groups.append(members(slot.group, captured, world, None if everywhere else copy))
                    self.library.append(slot.library)
                    issuers.append(rank)
                elif self.sent[number] is not program.sent[at]:
                    _check_alike(self.sent[number], program.sent[at], slot.group, issuers[number], rank)
                self.queue_of[rank, at] = number
        self._check_members()

    def _check_members(self) -> None:
        """Raise `InvalidArgument` if a member of a group does not issue its operations."""
        entries = self.queue_of[self.queue_of >= 0]
        counts = np.bincount(entries, minlength=len(self.groups))
        for number, group in enumerate(self.groups):
            if counts[number] != len(group):
                present = set(np.argwhere(self.queue_of == number)[:, 0].tolist())
                absent = next(rank for rank in group if rank not in present)
                raise InvalidArgument(
                    f"rank {absent}: it does not issue the {len(self.sent[number])} operations of its group "
                    f"{short(tuple(group))}, the first of which is {self.sent[number][0].name}"
                )

    # -- links --------------------------------------------------------------------------------------------

    def _make_links(self) -> None:
        """Set the costs of operations, and (queue, link, class) for links shared by several queues.

        An operation that runs alone is assumed to use all of a link of unknown rate, so the libraries of a
        group share one such link.
        """
        topology = self.costs.topology
        self.uses: list[list[Use]] = []
        found: list[NDArray[np.int64]] = []
        first = {0: 0, 1: self.world, 2: 2 * self.world}  # first link number of each class
        unknown: dict[tuple[int, ...], int] = {}  # numbers of links of unknown rate, by their ranks
        of_alike: dict[tuple[int, Placement, str], list[Use]] = {}  # equivalent queues share operations
        for number, (sent, group, library) in enumerate(
            zip(self.sent, self.groups, self.library, strict=True)
        ):
            placement = topology.placement(group)
            key = id(sent), placement, library
            if key not in of_alike:
                of_alike[key] = [
                    self.costs.use(_known(each.kind), each.nbytes, placement, library, each.codec)
                    for each in sent
                ]
            self.uses.append(of_alike[key])
            members = np.asarray(group, np.int64)
            for index, name in enumerate(CLASSES):
                if not any(name in use.busy for use in self.uses[-1]):
                    continue
                owners = members
                if name == "nic" and placement.slowest is not None:  # it cannot fill wider ones
                    owners = members[self._nic_rates(members) <= placement.slowest]
                if topology.rate(name) is None:
                    link = np.array([3 * self.world + unknown.setdefault(tuple(group), len(unknown))])
                else:
                    link = first[index] + np.unique(self._owner(index, owners))
                found.append(np.stack([np.full_like(link, number), link, np.full_like(link, index)], axis=1))
        self.entries = np.concatenate(found) if found else np.zeros((0, 3), np.int64)
        _, inverse, counts = np.unique(self.entries[:, 1], return_inverse=True, return_counts=True)
        self.entries = self.entries[counts[inverse.reshape(-1)] > 1]  # a queue alone cannot fill its links

    def _nic_rates(self, ranks: Ints) -> NDArray[np.float64]:
        """Return the rate of each rank's NIC."""
        topology, nic = self.costs.topology, self.costs.topology.links.nic
        assert nic is not None
        return np.array([nic.rate_of(rank // topology.ranks_per_node) for rank in ranks.tolist()])

    def _owner(self, index: int, ranks: Ints) -> Ints:
        """Return the owner of each rank's link: the rank, the node or the rack."""
        topology = self.costs.topology
        nodes = ranks // topology.ranks_per_node
        if CLASSES[index] == "uplink":
            assert topology.links.rack is not None
            return nodes // topology.links.rack.nodes
        return nodes if topology.shared(CLASSES[index]) else ranks

    # -- folding ------------------------------------------------------------------------------------------

    def _colours(self, *, fold: bool) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the representative of each rank, queue and link, and the numbers of the links."""
        links, link_at = np.unique(self.entries[:, 1], return_inverse=True)
        link_at = link_at.reshape(-1)
        count, total = len(self.sent), len(links)
        if not fold:
            return np.arange(self.world), np.arange(count), np.arange(total), links
        # Initial colours: programs, costs of operations, and classes of links.
        alike: dict[object, int] = {}
        rank = _numbers([alike.setdefault(_likeness(each), len(alike)) for each in self.programs])[
            self.of_rank
        ]
        alike = {}
        likeness = {
            id(uses): (tuple(use.cost for use in uses), tuple(tuple(use.busy.items()) for use in uses))
            for uses in {id(uses): uses for uses in self.uses}.values()
        }
        numbers = {key: alike.setdefault(each, len(alike)) for key, each in likeness.items()}
        queue = _numbers(
            [
                (4 * numbers[id(uses)] + 2 * self._by_caller(library) + shares_connections(library))
                for uses, library in zip(self.uses, self.library, strict=True)
            ]
        )
        kinds = np.zeros(total, np.int64)
        kinds[link_at] = self.entries[:, 2]
        link = _numbers(kinds.tolist())
        who, slot = np.nonzero(self.queue_of >= 0)
        of = self.queue_of[who, slot]
        at_slot = _mixed(slot.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))  # unlike all colours
        # Refine until no colour splits. Equal colours then have equal neighbours, and therefore equal times.
        before = -1
        while True:
            distinct = len(np.unique(rank)) + len(np.unique(queue)) + len(np.unique(link))
            if distinct == before:
                break
            before = distinct
            seen = np.zeros(count, np.uint64)
            np.add.at(seen, of, _mixed(rank[who] ^ at_slot))
            across = np.zeros(count, np.uint64)
            np.add.at(across, self.entries[:, 0], _mixed(link[link_at] ^ np.uint64(0x5555)))
            queue = _mixed(queue ^ _mixed(seen ^ _mixed(across)))
            held = np.zeros(total, np.uint64)
            np.add.at(held, link_at, _mixed(queue[self.entries[:, 0]]))
            link = _mixed(link ^ held)
            does = np.zeros(self.world, np.uint64)
            np.add.at(does, who, _mixed(queue[of] ^ at_slot))
            rank = _mixed(rank ^ does)
        return _first(rank), _first(queue), _first(link), links

    # -- running ------------------------------------------------------------------------------------------

    def timeline(self, *, fold: bool) -> Timeline:
        """Return the timeline; raises `InvalidArgument` on a deadlock."""
        course = self.run(fold=fold)
        course.check_end()
        return course.timeline()

    def run(self, *, fold: bool = True) -> SimulationResult:
        """Return the result, possibly with ranks that wait forever."""
        fold = fold and not self.costs.topology.is_full
        rank_of, queue_rep, link_rep, links = self._colours(fold=fold)
        ranks, queues = np.unique(rank_of), np.unique(queue_rep)
        rank_at = np.searchsorted(ranks, rank_of)
        queue_at = np.searchsorted(queues, queue_rep)
        queue_of = np.append(queue_at, -1)[self.queue_of[ranks]]  # -1 for missing queues
        members = self._members(queues, rank_at)
        made = self._queues(queues, members)
        shares = self._shares(queues, queue_at, link_rep, links)
        programs = joined(self.programs)
        ran = events.run(programs, self.of_rank[ranks], queue_of, made, shares, *self._cores(ranks))
        return SimulationResult(self, ranks, queues, queue_of, programs, made, shares, ran)

    def _cores(self, ranks: Ints) -> tuple[Ints, float]:
        """Return the number of each rank's node among theirs, and the cores of a node."""
        topology = self.costs.topology
        _, nodes = np.unique(ranks // topology.ranks_per_node, return_inverse=True)
        return nodes.reshape(-1).astype(np.int64), topology.cores or np.inf

    def _members(self, queues: Ints, rank_at: Ints) -> list[tuple[Ints, Ints]]:
        """Return the distinct members of each queue: representative ranks, and their slots."""
        order = np.argsort(self.queue_of, axis=None, kind="stable")
        values = self.queue_of.reshape(-1)[order]
        lo, hi = np.searchsorted(values, queues), np.searchsorted(values, queues, side="right")
        slots = self.queue_of.shape[1]
        found = []
        for begin, end in zip(lo, hi, strict=True):
            places = order[begin:end]
            distinct = np.unique(rank_at[places // slots] * slots + places % slots)
            found.append((distinct // slots, distinct % slots))
        return found

    def _queues(self, queues: Ints, members: list[tuple[Ints, Ints]]) -> Queues:
        uses = [use for number in queues for use in self.uses[number]]
        busy = [[use.busy.get(link, 0.0) for link in CLASSES] for use in uses]
        return Queues(
            bounds_of([len(self.sent[number]) for number in queues]),
            np.array([use.cost.seconds for use in uses], np.float64),
            np.array([use.cost.share for use in uses], np.float64),
            np.array(busy, np.float64).reshape(len(uses), len(CLASSES)),
            np.array([use.flow for use in uses], np.float64),
            np.array([use.turn for use in uses], np.float64),
            bounds_of([len(each) for each, _ in members]),
            np.concatenate([np.zeros(0, np.int64), *(each for each, _ in members)]),
            np.concatenate([np.zeros(0, np.int64), *(each for _, each in members)]),
            np.array([self._by_caller(self.library[number]) for number in queues], np.bool_),
            self._connections(queues),
        )

    def _connections(self, queues: Ints) -> Ints:
        """Number the connections of queues; queues of the same ranks share one if their library does so."""
        alike: dict[object, int] = {}
        keys = [
            tuple(self.groups[at]) if shares_connections(self.library[at]) else int(at)
            for at in queues.tolist()
        ]
        return np.array([alike.setdefault(key, len(alike)) for key in keys], np.int64)

    def _by_caller(self, library: str) -> bool:
        """Return whether the program drives a library's operations; gloo and NCCL need no polls."""
        return self.by_caller and is_polled(library)

    def _shares(self, queues: Ints, queue_at: Ints, link_rep: Ints, links: Ints) -> LinkShares:
        """Return the entries of representative links: representative queues, each with its multiplicity."""
        link_at = np.searchsorted(links, self.entries[:, 1])
        kept = link_rep[link_at] == link_at if len(links) else np.zeros(0, np.bool_)
        reps, dense = np.unique(link_at[kept], return_inverse=True)
        rows = np.stack([queue_at[self.entries[kept, 0]], dense.reshape(-1), self.entries[kept, 2]], axis=1)
        rows, times = np.unique(rows, axis=0, return_counts=True)  # sorted by queue
        by_link = np.argsort(rows[:, 1], kind="stable")
        return LinkShares(
            np.searchsorted(rows[:, 0], np.arange(len(queues) + 1)).astype(np.int64),
            np.ascontiguousarray(rows[:, 0]),
            np.ascontiguousarray(rows[:, 1]),
            np.ascontiguousarray(rows[:, 2]),
            times.astype(np.float64),
            np.searchsorted(rows[by_link, 1], np.arange(len(reps) + 1)).astype(np.int64),
            by_link.astype(np.int64),
        )


def members(group: Sequence[int], captured: int, world: int, copy: int | None = None) -> list[int]:
    """Return the ranks of a captured group on `world` ranks: in one copy of the captured ranks, or in all."""
    shifts = range(-(-world // captured)) if copy is None else [copy]
    return [rank for shift in shifts for each in group if (rank := each + shift * captured) < world]


def _check_alike(
    one: list[ProgramOperation],
    other: list[ProgramOperation],
    group: tuple[int, ...],
    first: int,
    second: int,
) -> None:
    for position in range(max(len(one), len(other))):
        a = one[position][1:] if position < len(one) else None
        b = other[position][1:] if position < len(other) else None
        if a != b:
            texts = ["nothing" if each is None else f"{each[0]} of {about(each[1])}" for each in (a, b)]
            raise InvalidArgument(
                f"operation {position} in the group {short(group)}: {texts[0]} on rank {first}, {texts[1]} "
                f"on rank {second}; expected the same"
            )


@cache
def shares_connections(library: str) -> bool:
    """Return whether all groups of a library share connections between ranks; True for an unknown library."""
    name = library.partition(":")[0]
    return name not in registry.names("backends") or backend_class(name).shares_connections


def _known(kind: str) -> str:
    return kind if kind in KINDS else "barrier"


def _likeness(program: CapturedProgram) -> tuple[object, ...]:
    """Return a key that equivalent programs share: all fields except the groups."""
    return tuple(program.code), tuple(program.value), tuple(program.slot), tuple(program.number)


def _numbers(values: Sequence[int]) -> _Words:
    return _mixed(np.array(values, np.uint64) + np.uint64(1))


def _mixed(values: _Words) -> _Words:
    """Return hashed 64-bit words, whose sums identify multisets (SplitMix; Steele, Lea, Flood 2014)."""
    found = values.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        found = (found ^ (found >> np.uint64(shift))) * np.uint64(factor)
    mixed: _Words = found ^ (found >> np.uint64(31))
    return mixed


def _first(colours: _Words) -> Ints:
    """Return, for each element, the index of the first element of its colour."""
    _, first, inverse = np.unique(colours, return_index=True, return_inverse=True)
    found: Ints = first[inverse.reshape(-1)].astype(np.int64)
    return found
