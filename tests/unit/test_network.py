"""A step on many ranks: closed forms, small steps of time, every link by an LP, and folded as unfolded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from tiers import examples

from mcr_plus.bucketing.events import fill
from mcr_plus.bucketing.network import simulate
from mcr_plus.bucketing.programs import BucketPlan, PlannedBucket
from mcr_plus.bucketing.scaling import ClusterCosts, Cost, Use
from mcr_plus.bucketing.simulate import simulate as course
from mcr_plus.bucketing.simulation_result import Timeline
from mcr_plus.bucketing.step import (
    CapturedStep,
    ComputeEvent,
    Event,
    IssueEvent,
    NeedEvent,
    ReadyEvent,
    Role,
    WaitEvent,
)
from mcr_plus.bucketing.topology import Topology
from mcr_plus.errors import InvalidArgument
from mcr_plus.tables.scaling import LinkClass, Placement

NO_LINKS = Topology.of({"nodes": 64})


@dataclass
class Given(ClusterCosts):
    """Costs as a test wants them: seconds are bytes / 1000."""

    share: float = 0.0
    busy: Mapping[LinkClass, float] = field(default_factory=dict)

    def use(self, kind: str, nbytes: int, to: Placement, library: str, codec: str | None = None) -> Use:
        return Use(Cost(nbytes / 1000, self.share, "measured"), self.busy, 1.0 if self.busy else 0.0)


def given(topology: Topology = NO_LINKS, **more: Any) -> Given:
    return Given([], topology, **more)


def step_of(*programs: Sequence[Event], by_caller: bool = False) -> CapturedStep:
    roles = tuple(Role((rank,), tuple(events)) for rank, events in enumerate(programs))
    return CapturedStep(len(programs), len(programs), "", 1.0, 0.0, roles, by_caller=by_caller)


def gradients(count: int, compute: float, group: tuple[int, ...]) -> list[Event]:
    events: list[Event] = []
    for index in range(count):
        events += [ComputeEvent("", compute), ReadyEvent(f"p{index}", 1000, "")]
        events.append(IssueEvent(index, "all_reduce", 1000, group, gradients=(f"p{index}",)))
    return [*events, *(WaitEvent(index) for index in range(count))]


def per_tensor(count: int) -> BucketPlan:
    return BucketPlan([PlannedBucket((f"p{index}",)) for index in range(count)])


# -- closed forms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("compute", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("by_caller", [False, True])
def test_gradients_one_by_one_and_in_one_bucket(count: int, compute: float, by_caller: bool) -> None:
    """Operations of one second each run after each other, or after computing."""
    events = gradients(count, compute, (0, 1))
    step = step_of(events, events, by_caller=by_caller)
    each = simulate(step, per_tensor(count), given())
    one = simulate(step, BucketPlan([PlannedBucket(tuple(f"p{index}" for index in range(count)))]), given())
    as_captured = simulate(step, None, given())
    if not by_caller or compute >= 1.0:  # otherwise operations begin late, at the marks
        assert each.step_s == max(compute + count, count * compute + 1)
    assert one.step_s == count * compute + count
    assert as_captured.step_s == each.step_s
    assert each.bound <= each.step_s
    assert one.exposed == {"bucket 0 (" + one.per_op[0].name.partition("(")[2]: float(count)}
    assert each.exposed_s == pytest.approx(each.step_s - count * compute)
    assert each.compute_s == count * compute


@pytest.mark.parametrize(("share", "compute"), [(0.0, 2.0), (0.25, 2.0), (0.5, 1.0), (0.5, 0.1), (1.0, 2.0)])
def test_an_operation_takes_its_share_of_computing(share: float, compute: float) -> None:
    """One second in flight costs `share` of a second if there is enough to compute meanwhile."""
    events: list[Event] = [IssueEvent(0, "all_reduce", 1000, (0, 1)), ComputeEvent("", compute), WaitEvent(0)]
    found = simulate(step_of(events, events), None, given(share=share))
    left = compute - (1 - share)
    assert found.step_s == pytest.approx(1 + left if left > 0 else 1.0, rel=1e-12)


@pytest.mark.parametrize(("stages", "batches"), [(2, 1), (2, 5), (4, 3), (5, 8)])
@pytest.mark.parametrize("transfer", [0.25, 1.0])
def test_a_pipeline(stages: int, batches: int, transfer: float) -> None:
    """The last batch has passed all stages and the links between them: (s-1)(f+t) + m·f, for t ≤ f."""
    forward, nbytes = 1.0, int(1000 * transfer)
    programs: list[list[Event]] = []
    for stage in range(stages):
        events: list[Event] = []
        if stage:  # before they are needed
            events += [IssueEvent(2 * batch, "recv", nbytes, (stage - 1, stage)) for batch in range(batches)]
        for batch in range(batches):
            events += (
                [WaitEvent(2 * batch), ComputeEvent("", forward)] if stage else [ComputeEvent("", forward)]
            )
            if stage < stages - 1:
                events.append(IssueEvent(2 * batch + 1, "send", nbytes, (stage, stage + 1)))
        programs.append(events)
    found = simulate(step_of(*programs), None, given())
    assert found.step_s == (stages - 1) * (forward + transfer) + batches * forward
    assert [part.what for part in found.critical].count("computing") >= 1
    assert sum(part.end - part.start for part in found.critical) == pytest.approx(found.step_s)


def test_the_critical_path_has_no_gaps_and_names_its_waits() -> None:
    slow: list[Event] = [
        ComputeEvent("", 3.0),
        IssueEvent(0, "all_reduce", 500, (0, 1), "loss"),
        WaitEvent(0),
        ComputeEvent("", 1.0),
    ]
    fast: list[Event] = [
        ComputeEvent("", 1.0),
        IssueEvent(0, "all_reduce", 500, (0, 1), "loss"),
        WaitEvent(0),
        ComputeEvent("", 2.0),
    ]
    found = simulate(step_of(slow, fast), None, given())
    assert [tuple(part) for part in found.critical] == [
        (0.0, 3.0, "computing", 0),
        (3.0, 3.5, "loss 0", 1),
        (3.5, 5.5, "computing", 1),
    ]
    assert found.exposed == {"loss 0": 2.5}
    assert (found.step_s, found.compute_s, found.distinct) == (5.5, 4.0, 2)


@pytest.mark.parametrize("by_caller", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_one_queue_is_the_course_of_a_plan(seed: int, by_caller: bool) -> None:
    """`plan.simulate`, separate code, has the same result."""
    draw = random.Random(seed)
    for _ in range(examples(10)):
        count = draw.randint(1, 8)
        gaps = [draw.random() for _ in range(count)]
        sizes = [draw.randint(1, 800) for _ in range(count)]
        events: list[Event] = []
        for index, (gap, size) in enumerate(zip(gaps, sizes, strict=True)):
            events += [ComputeEvent("", gap), ReadyEvent(f"p{index}", size, "")]
        tail, share = draw.random(), draw.choice([0.0, 0.3, 0.9])
        events.append(ComputeEvent("", tail))
        cuts = sorted(draw.sample(range(1, count), draw.randint(0, count - 1)))
        parts = list(zip([0, *cuts], [*cuts, count], strict=True))
        plan = BucketPlan([PlannedBucket(tuple(f"p{index}" for index in range(lo, hi))) for lo, hi in parts])
        found = simulate(step_of(events, events, by_caller=by_caller), plan, given(share=share))
        marks = np.cumsum(gaps)
        expected = course(
            marks,
            float(marks[-1]) + tail,
            np.array([hi - 1 for _, hi in parts]),
            np.array([sum(sizes[lo:hi]) / 1000 for lo, hi in parts]),
            np.full(len(parts), share),
            by_caller=by_caller,
        )
        assert found.step_s == pytest.approx(expected.step, rel=1e-12)
        assert [each.start for each in found.per_op] == pytest.approx(expected.starts.tolist(), rel=1e-12)
        assert found.bound <= found.step_s * (1 + 1e-12)


# -- every order ---------------------------------------------------------------------------------------------


def orders(count: int) -> Iterator[list[int]]:
    """Return every order of issues (n) and waits (~n) of this many operations."""

    def more(issued: int, open_: frozenset[int], before: list[int]) -> Iterator[list[int]]:
        if issued == count and not open_:
            yield before
        if issued < count:
            yield from more(issued + 1, open_ | {issued}, [*before, issued])
        for each in open_:
            yield from more(issued, open_ - {each}, [*before, ~each])

    yield from more(0, frozenset(), [])


def end_by_definition(programs: Sequence[Sequence[Event]], seconds: Sequence[float]) -> float:
    """An operation begins when all have issued it and the one before has ended; until nothing changes."""
    ends = [0.0] * len(seconds)
    while True:
        issued = [0.0] * len(seconds)
        last = 0.0
        for program in programs:
            now = 0.0
            for each in program:
                if isinstance(each, ComputeEvent):
                    now += each.seconds
                elif isinstance(each, IssueEvent):
                    issued[each.id] = max(issued[each.id], now)
                elif isinstance(each, WaitEvent):
                    now = max(now, ends[each.id])
            last = max(last, now)
        before, found = 0.0, []
        for issue, took in zip(issued, seconds, strict=True):
            before = max(before, issue) + took
            found.append(before)
        if found == ends:
            return max(last, *ends)
        ends = found


def test_every_order_of_eight_calls_ends_as_by_definition() -> None:
    """Four operations, issued and waited for in all 105 orders, on two ranks in different ones."""
    seconds = [1.0, 0.5, 2.0, 0.25]
    pauses = [0.125, 1.0, 0.0, 0.5, 2.0, 0.25, 0.0625, 0.75]
    every = list(orders(4))
    assert len(every) == 105
    others = every[:: max(1, 105 // examples(10))]
    for one, other in product(every, others):
        programs: list[list[Event]] = []
        for order, first in ((one, 0), (other, 3)):
            events: list[Event] = []
            for position, call in enumerate(order):
                events.append(ComputeEvent("", pauses[(first + position) % len(pauses)]))
                events.append(
                    IssueEvent(call, "all_reduce", int(1000 * seconds[call]), (0, 1))
                    if call >= 0
                    else WaitEvent(~call)
                )
            programs.append(events)
        found = simulate(step_of(*programs), None, given())
        assert found.step_s == end_by_definition(programs, seconds)
        assert found.bound <= found.step_s


# -- links ---------------------------------------------------------------------------------------------------


def filled(flows: Sequence[float], needs: Sequence[Mapping[int, float]], links: int) -> list[float]:
    begins = np.cumsum([0, *(len(need) for need in needs)])
    link = np.array([at for need in needs for at in need], np.int64)
    part = np.array([value for need in needs for value in need.values()], np.float64)
    speed = np.zeros(len(flows))
    fill(begins.astype(np.int64), link, part, np.array(flows, np.float64), links, speed)
    return list(speed.tolist())


def by_programs(flows: Sequence[float], needs: Sequence[Mapping[int, float]], links: int) -> list[float]:
    """Max-min fair by its definition: the lowest rate is as high as it can be, then the next lowest, …"""
    from scipy import optimize  # here, as every process of pytest imports this file and few need it

    count = len(flows)
    capacity = np.array(
        [[need.get(at, 0.0) / flow for need, flow in zip(needs, flows, strict=True)] for at in range(links)]
    )
    fixed: dict[int, float] = {}

    def best(goal: np.ndarray[Any, Any], floor: float) -> float:
        """Return the maximum of `goal` over (rates, level): rates are fixed, or at least the level."""
        rows = [[*row, 0.0] for row in capacity]
        limits = [1.0] * links
        for i in range(count):
            if i not in fixed:
                rows.append([*(-1.0 if k == i else 0.0 for k in range(count)), 1.0])
                limits.append(0.0)
        bounds = [(fixed[i], fixed[i]) if i in fixed else (floor, flows[i]) for i in range(count)]
        found = optimize.linprog(-goal, A_ub=rows, b_ub=limits, bounds=[*bounds, (floor, None)])
        assert found.success
        return float(-found.fun)

    while len(fixed) < count:
        level = best(np.array([0.0] * count + [1.0]), 0.0)
        floor = level * (1 - 1e-9)
        stuck = [
            i for i in range(count)
            if i not in fixed and best(np.eye(count + 1)[i], floor) <= level * (1 + 1e-6)
        ]  # fmt: skip
        assert stuck
        fixed |= dict.fromkeys(stuck, level * (1 - 1e-9))
    return [fixed[i] / flows[i] for i in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_links_are_shared_as_by_linear_programs(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(examples(8)):
        count, links = draw.randint(1, 5), draw.randint(1, 4)
        flows = [draw.choice([1.0, 0.5, draw.uniform(0.1, 2)]) for _ in range(count)]
        needs = [
            {at: draw.uniform(0.05, 1) for at in draw.sample(range(links), draw.randint(1, links))}
            for _ in range(count)
        ]
        expected = by_programs(flows, needs, links)
        assert filled(flows, needs, links) == pytest.approx(expected, rel=1e-4)


def test_links_by_hand() -> None:
    assert filled([1, 1], [{0: 1}, {0: 1}], 1) == [0.5, 0.5]
    assert filled([1, 1, 1], [{0: 1}, {0: 1, 1: 1}, {1: 0.25}], 2) == [0.5, 0.5, 1.0]
    assert filled([3, 1], [{0: 1}, {0: 1}], 1) == pytest.approx([0.25, 0.75])  # equal bytes per second
    assert filled([1, 0], [{}, {0: 1}], 1) == [1.0, 1.0]


def test_two_groups_of_a_node_share_its_link() -> None:
    """Two operations need the whole link for 1 s: together both take 2 s, one after another 1 s each."""
    topology = Topology.of({"nodes": 2, "ranks_per_node": 2, "links": {"nic": {"rate": "1Gbit/s"}}})
    events: list[list[Event]] = [
        [IssueEvent(0, "all_reduce", 1000, (rank % 2, rank % 2 + 2)), WaitEvent(0)] for rank in range(4)
    ]
    costs = given(topology, busy={"nic": 1.0})
    assert simulate(step_of(*events), None, costs).step_s == 2.0
    assert simulate(step_of(*events), None, given(topology, busy={"nic": 0.5})).step_s == 1.0
    later: list[list[Event]] = [
        [ComputeEvent("", 0.5 * (rank % 2)), *program] for rank, program in enumerate(events)
    ]
    found = simulate(step_of(*later), None, costs)  # alone, together, alone
    assert [each.end for each in found.per_op] == [2.0]
    assert found.bound_by == "communication over the link nic"
    assert (
        simulate(step_of(*events), None, given(topology.changed(["nic.per=rank"]), busy={"nic": 1.0})).step_s
        == 1
    )


class InRounds(Given):
    """All_reduces in two rounds, other operations in one, over a link that an operation alone fills."""

    def use(self, kind: str, nbytes: int, to: Placement, library: str, codec: str | None = None) -> Use:
        rounds = 2 if kind == "all_reduce" else 1
        return super().use(kind, nbytes, to, library, codec)._replace(turn=nbytes / 1000 / rounds)


@pytest.mark.parametrize("sent", [0, 1, 2])
@pytest.mark.parametrize(("library", "shares"), [("mpi", True), ("gloo", False)])
def test_an_operation_waits_for_a_message_of_each_operation_before_it(
    sent: int, library: str, shares: bool
) -> None:
    """Each all_reduce takes 2 s, one of them for a message, and an all_to_all takes half a second.

    Another library has connections of its own, so that its messages have the same rate as this one.
    """
    ready: list[Event] = [ReadyEvent(f"p{index}", 2000, "") for index in range(sent)]
    carriers = [
        IssueEvent(index, "all_reduce", 2000, (0, 1), gradients=(f"p{index}",)) for index in range(sent)
    ]
    waits = [WaitEvent(index) for index in range(sent)]
    events = [*ready, IssueEvent(9, "all_to_all", 500, (0, 1), "tokens"), WaitEvent(9), *carriers, *waits]
    plan = BucketPlan([PlannedBucket((f"p{index}",), library) for index in range(sent)])
    found = simulate(step_of(events, events), plan, InRounds([], NO_LINKS, busy={"nic": 1.0}))
    (exchange,) = (each for each in found.per_op if each.kind == "all_to_all")
    assert exchange.end == pytest.approx(0.5 + sent * 1.0 if shares or not sent else 1.0)
    assert found.step_s == pytest.approx(0.5 + sent * 2.0)  # the link is never idle


# -- small steps of time -------------------------------------------------------------------------------------


class Stepped:
    """The step as the module's text says it, by steps of time."""

    def __init__(
        self, programs: Sequence[Sequence[Event]], share: float, busy: float, *, by_caller: bool
    ) -> None:
        self.programs, self.share, self.busy, self.by_caller = programs, share, busy, by_caller
        self.queues: dict[tuple[int, ...], list[IssueEvent]] = {}
        for rank, program in enumerate(programs):
            for each in program:
                if isinstance(each, IssueEvent) and each.group[0] == rank:
                    self.queues.setdefault(each.group, []).append(each)
        self.order = {each.id: (group, at) for group, of in self.queues.items() for at, each in enumerate(of)}
        self.at = [0] * len(programs)
        self.left = [0.0] * len(programs)
        self.issued = [dict.fromkeys(self.queues, 0) for _ in programs]
        self.arrived = {group: set[int]() for group in self.queues}
        self.done = dict.fromkeys(self.queues, 0)
        self.rest = dict.fromkeys(self.queues, -1.0)  # seconds of the operation that runs

    def poll(self, rank: int) -> None:
        for group in self.queues:
            if rank in group and self.rest[group] < 0 and self.issued[rank][group] > self.done[group]:
                self.arrived[group].add(rank)

    def goes_on(self, rank: int) -> bool:
        """Return whether the rank has passed its event."""
        each = self.programs[rank][self.at[rank]]
        if isinstance(each, IssueEvent):
            self.issued[rank][each.group] += 1
        if isinstance(each, IssueEvent | ReadyEvent | WaitEvent):
            self.poll(rank)
        if isinstance(each, WaitEvent):
            group, number = self.order[each.id]
            if self.done[group] <= number:
                return False
        self.at[rank] += 1
        self.left[rank] = each.seconds if isinstance(each, ComputeEvent) else 0.0
        return True

    def settle(self) -> None:
        """Do everything that takes no time."""
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(self.programs):
                while self.at[rank] < len(program) and self.left[rank] <= 0 and self.goes_on(rank):
                    moved = True
                if not self.by_caller or self.left[rank] <= 0:
                    self.poll(rank)
            for group, issues in self.queues.items():
                if self.rest[group] < 0 and len(self.arrived[group]) == len(group):
                    self.rest[group] = issues[self.done[group]].nbytes / 1000
                    self.arrived[group] = set()
                    moved = True

    def end(self, node_of: Sequence[int], dt: float) -> float:
        now = 0.0
        while True:
            self.settle()
            running = [group for group in self.queues if self.rest[group] >= 0]
            programs = zip(self.at, self.programs, self.left, strict=True)
            if not running and all(at == len(program) and left <= 0 for at, program, left in programs):
                return now
            speeds = shared(running, self.busy, node_of)
            for rank in range(len(self.programs)):
                taken = sum(speeds[group] * self.share for group in running if rank in group)
                self.left[rank] -= dt * max(1 - taken, 0)
            for group in running:
                self.rest[group] -= dt * speeds[group]
                if self.rest[group] <= 0:
                    self.rest[group] = -1.0
                    self.done[group] += 1
            now += dt


def shared(
    running: Sequence[tuple[int, ...]], busy: float, node_of: Sequence[int]
) -> dict[tuple[int, ...], float]:
    """Speeds of equal messages on links of nodes, in fractions."""
    need = Fraction(busy)
    speeds: dict[tuple[int, ...], Fraction] = {}
    while len(speeds) < len(running):
        levels = {}
        for group in running:
            if group in speeds:
                continue
            fair = [Fraction(1)]
            for node in {node_of[rank] for rank in group}:
                users = [other for other in running if node in {node_of[rank] for rank in other}]
                taken = sum((speeds[other] for other in users if other in speeds), Fraction(0))
                if need and len(users) > 1:
                    fair.append((1 / need - taken) / sum(other not in speeds for other in users))
            levels[group] = min(fair)
        lowest = min(levels.values())
        speeds |= {group: lowest for group, level in levels.items() if level == lowest}
    return {group: float(speed) for group, speed in speeds.items()}


def random_programs(draw: random.Random, ranks: int, operations: int) -> list[list[Event]]:
    """Programs that issue and wait in one order, so that none can wait without end."""
    choices = [tuple(sorted(draw.sample(range(ranks), size))) for size in (2, 2, ranks)]
    issues = [
        IssueEvent(number, "all_reduce", draw.randint(100, 900), draw.choice(choices))
        for number in range(operations)
    ]
    programs: list[list[Event]] = []
    for rank in range(ranks):
        events: list[Event] = []
        waiting: list[int] = []
        for each in issues:
            if rank not in each.group:
                continue
            events += [ComputeEvent("", draw.choice([0.0, draw.random()])), each]
            waiting.append(each.id)
            while waiting and draw.random() < 0.4:
                events.append(WaitEvent(waiting.pop(0)))
            if draw.random() < 0.3:
                events += [ComputeEvent("", draw.random() / 2), ReadyEvent("p", 1, "")]
        programs.append(
            [*events, *(WaitEvent(number) for number in waiting), ComputeEvent("", draw.random() / 3)]
        )
    return programs


@pytest.mark.parametrize("by_caller", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_programs_run_as_by_small_steps_of_time(seed: int, by_caller: bool) -> None:
    draw = random.Random(10 * seed + by_caller)
    dt = 5e-4
    for _ in range(examples(3)):
        ranks = draw.randint(2, 4)
        programs = random_programs(draw, ranks, draw.randint(1, 8))
        share, busy = draw.choice([0.0, 0.3]), draw.choice([0.0, 0.6, 1.0])
        topology = Topology.of({"nodes": 2, "ranks_per_node": 2, "links": {"nic": {"rate": "1Gbit/s"}}})
        costs = given(topology, share=share, busy={"nic": busy} if busy else {})
        found = simulate(step_of(*programs, by_caller=by_caller), None, costs)
        expected = Stepped(programs, share, busy, by_caller=by_caller).end(
            [rank // 2 for rank in range(ranks)], dt
        )
        assert found.step_s == pytest.approx(expected, abs=60 * dt)
        assert found.bound <= found.step_s * (1 + 1e-12)
        assert sum(part.end - part.start for part in found.critical) <= found.step_s * (1 + 1e-9)


# -- many ranks ----------------------------------------------------------------------------------------------


def tensor_and_data_parallel(layers: int, draw: random.Random) -> CapturedStep:
    """Return a step of two ranks per node that share each layer, with gradients over two nodes."""
    times = [draw.random() / 10 for _ in range(layers)]
    sizes = [draw.randint(10, 200) for _ in range(layers)]
    programs = []
    for rank in range(4):
        node = (rank - rank % 2, rank - rank % 2 + 1)
        across = (rank % 2, rank % 2 + 2)
        events: list[Event] = []
        for index in range(layers):
            events += [
                NeedEvent("m"),
                ComputeEvent("", times[index]),
                IssueEvent(2 * index, "all_reduce", 30, node),
                WaitEvent(2 * index),
            ]
            events += [ReadyEvent(f"p{index}", sizes[index], "")]
            events.append(
                IssueEvent(2 * index + 1, "all_reduce", sizes[index], across, gradients=(f"p{index}",))
            )
        programs.append([*events, *(WaitEvent(2 * index + 1) for index in range(layers))])
    return step_of(*programs)


def results(found: Timeline) -> tuple[Any, ...]:
    return found.step_s, found.bound, found.compute_s, found.exposed_s, [each[5:8] for each in found.per_op]


@pytest.mark.parametrize("ranks", [4, 8, 24])
def test_ranks_that_do_the_same_are_simulated_once(ranks: int) -> None:
    step = tensor_and_data_parallel(5, random.Random(ranks))
    links = {"nic": {"rate": "1Gbit/s"}, "inside": {"rate": "1Gbit/s", "per": "node"}}
    topology = Topology.of({"nodes": 16, "ranks_per_node": 2, "links": links})
    costs = given(topology, share=0.2, busy={"nic": 0.8, "inside": 0.7})
    folded, whole = (simulate(step, per_tensor(5), costs, ranks=ranks, fold=fold) for fold in (True, False))
    assert (folded.distinct, whole.distinct) == (1, ranks)
    assert results(folded) == results(whole)


@pytest.mark.parametrize("seed", range(4))
def test_folding_never_changes_a_result(seed: int) -> None:
    """The test includes different ranks, and ranks with two equal queues: a ring of pairs."""
    draw = random.Random(seed)
    topology = Topology.of({"nodes": 4, "ranks_per_node": 2, "links": {"nic": {"rate": "1Gbit/s"}}})
    costs = given(topology, share=0.2, busy={"nic": 0.9})
    ring: list[list[Event]] = [
        [
            ComputeEvent("", 0.1),
            *(
                IssueEvent(pair, "send", 50, tuple(sorted((pair, (pair + 1) % 4))))
                for pair in sorted((rank, (rank - 1) % 4))
            ),
        ]
        for rank in range(4)
    ]
    for programs in (ring, random_programs(draw, 4, 8)):
        step = step_of(*programs)
        folded, whole = (simulate(step, None, costs, fold=fold) for fold in (True, False))
        assert results(folded) == results(whole)


def test_four_thousand_ranks_have_the_shape_of_four() -> None:
    """Groups with gradients extend over all ranks; groups of a node do not."""
    step = tensor_and_data_parallel(40, random.Random(1))
    links = {"nic": {"rate": "1Gbit/s"}, "inside": {"rate": "1Gbit/s", "per": "node"}}
    topology = Topology.of({"nodes": 2048, "ranks_per_node": 2, "links": links})
    costs = given(topology, share=0.2, busy={"nic": 0.8, "inside": 0.7})
    found = simulate(step, per_tensor(40), costs, ranks=4096)
    assert (found.ranks, found.distinct) == (4096, 1)
    assert {each.ranks for each in found.per_op} == {2, 2048}
    assert (
        found.step_s == simulate(step, per_tensor(40), costs, ranks=4).step_s
    )  # the costs are the same here


# -- refused arguments
# -----------------------------------------------------------------------------------------

PAIR = (0, 1)


@pytest.mark.parametrize(
    ("programs", "plan", "ranks", "message"),
    [
        ([[ComputeEvent("layer", -1.0)]], None, None, "layer: expected seconds of at least 0, got -1.0"),
        ([[WaitEvent(3)]], None, None, "operation 3"),
        ([[]], None, 65, "ranks: expected 1 to 64"),
        ([[], [IssueEvent(0, "all_reduce", 8, (1, 2))], []], None, 4, "multiple of the 3 captured"),
        ([[IssueEvent(0, "all_reduce", 8, PAIR)], []], None, None, "rank 1: it does not issue"),
        (
            [[IssueEvent(0, "all_reduce", 8, (1,))], []], None, None,
            "rank 0: it issues operations in the group",
        ),
        (
            [[IssueEvent(0, "all_reduce", 8, PAIR)], [IssueEvent(0, "broadcast", 8, PAIR)]], None, None,
            "all_reduce of 8 B on rank 0, broadcast of 8 B on rank 1",
        ),
        ([[ReadyEvent("a", 8, "")]], BucketPlan([PlannedBucket(("a", "b"))]), None, "gradient 'b'"),
        ([[ReadyEvent("a", 8, "")]], BucketPlan([]), None, "gradient 'a' of ranks .0,.: it is in no bucket"),
        (
            [
                [IssueEvent(0, "all_reduce", 8, (0, 1)), WaitEvent(0),
                 IssueEvent(1, "all_reduce", 8, (0, 1, 2)), WaitEvent(1)],
                [IssueEvent(1, "all_reduce", 8, (0, 1, 2)), WaitEvent(1),
                 IssueEvent(0, "all_reduce", 8, (0, 1)), WaitEvent(0)],
                [IssueEvent(1, "all_reduce", 8, (0, 1, 2))],
            ],
            None, None, "deadlock: it waits for all_reduce 0",
        ),
    ],
)  # fmt: skip
def test_invalid_programs_of_the_simulation_are_refused(
    programs: list[list[Event]], plan: BucketPlan | None, ranks: int | None, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        simulate(step_of(*programs), plan, given(), ranks=ranks)


def test_ranks_in_no_role_are_refused() -> None:
    step = CapturedStep(3, 1, "", 1.0, 0.0, (Role((0, 2), ()),))
    with pytest.raises(InvalidArgument, match="rank 1: it is in no role"):
        simulate(step, None, given())


def test_a_step_without_operations_takes_as_long_as_its_slowest_rank() -> None:
    step = step_of([ComputeEvent("", 0.5)], [ComputeEvent("", 2.0)])
    assert simulate(step, None, given()).step_s == 2.0


def test_a_library_that_runs_by_itself_does_not_wait_for_the_program() -> None:
    """The second operation begins when the first has ended; of MPI, when the next gradient is ready."""
    events: list[Event] = [
        IssueEvent(0, "all_reduce", 1000, PAIR), IssueEvent(1, "all_reduce", 1000, PAIR),
        ComputeEvent("", 5.0), WaitEvent(0), WaitEvent(1),
    ]  # fmt: skip
    step = step_of(events, events, by_caller=True)
    ends = {
        library: simulate(step, BucketPlan(None, library), given()).step_s
        for library in ("mpi", "gloo", "captured")
    }
    assert ends == {"mpi": 6.0, "gloo": 5.0, "captured": 6.0}
    by_itself = step_of(events, events)
    assert simulate(by_itself, BucketPlan(None, "mpi"), given()).step_s == 5.0


def test_unknown_operations_are_barriers_and_named() -> None:
    events: list[Event] = [IssueEvent(0, "sparse_exchange", 8, PAIR), WaitEvent(0)]
    assert simulate(step_of(events, events), None, given()).unknown == ("sparse_exchange",)
