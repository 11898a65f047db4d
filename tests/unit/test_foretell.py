"""Foretold steps, by hand: pipelines, sums of gradients, and ranks that share the cores of their node."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
from plan_blocks import ITEMS, chain, cluster, layer

from mcr_plus.bucketing.network import simulate
from mcr_plus.bucketing.programs import BucketPlan
from mcr_plus.bucketing.scaling import CAPTURED, ClusterCosts, Measured
from mcr_plus.bucketing.step import CapturedStep, ComputeEvent, IssueEvent, Role, WaitEvent
from mcr_plus.bucketing.topology import Topology
from mcr_plus.errors import Unsupported
from mcr_plus.plans.foretell import REDISTRIBUTION, BestCosts, as_step, foretell
from mcr_plus.plans.named import co_shard, hybrid, schedule_steps
from mcr_plus.plans.proof import prove
from mcr_plus.tables.cost import TimeCurve
from mcr_plus.tables.scaling import Placement

MIB = 1 << 20
RATE = 1e9  # bytes per second of each rank
ROUND = 10e-6  # seconds of a round of an operation, as assumed without measurements
Pass = tuple[str, int]


def costs_of(ranks: int, rate: str = "1GB/s", **options: Any) -> ClusterCosts:
    """Return costs by the rate of links alone."""
    links = {"inside": {"rate": rate}}
    return ClusterCosts([], Topology.of({"nodes": 1, "ranks_per_node": ranks, "links": links, **options}))


# -- pipelines -----------------------------------------------------------------------------------------------


class TwoStages:
    """Passes of two stages in order, each of which sends its result to the other stage.

    A transfer takes place once both stages have come to it, and all before it have ended. Each comes to it
    where it would be without communication.
    """

    def __init__(self, orders: list[list[Pass]], seconds: list[dict[str, float]], transfer: float) -> None:
        self.orders, self.seconds = orders, seconds
        ideal = self.ends(0.0, [[(each, "run") for each in order] for order in orders])
        items: list[list[tuple[float, int, Pass]]] = [[], []]
        for stage, order in enumerate(orders):
            for each in order:
                end = ideal[stage, each]
                items[stage].append((self.begins[stage, each], 1, each))
                if stage == (each[0] == "B"):  # F of the first stage, B of the last
                    for own in items:
                        own.append((end, 0, each))
        programs = [[(each, "run" if kind else "move") for _, kind, each in sorted(own)] for own in items]
        self.step = max(self.ends(transfer, programs).values())

    def ends(self, transfer: float, programs: list[list[tuple[Pass, str]]]) -> dict[Any, float]:
        """Return the ends of passes, and of transfers; without transfers in programs, results are at once."""
        self.begins: dict[Any, float] = {}
        found: dict[Any, float] = {}
        at, now, came, free = [0, 0], [0.0, 0.0], {}, 0.0
        moves = any(what == "move" for program in programs for _, what in program)
        while any(at[stage] < len(program) for stage, program in enumerate(programs)):
            before = list(at)
            for stage, program in enumerate(programs):
                if at[stage] == len(program):
                    continue
                each, what = program[at[stage]]
                if what == "move":
                    came[stage, each] = now[stage]
                    if (1 - stage, each) in came:
                        free = max(came[0, each], came[1, each], free) + transfer
                        found["move", each] = free
                else:
                    is_later = stage != (each[0] == "B")
                    key: Any = ("move", each) if moves else (1 - stage, each)
                    if is_later and key not in found:
                        continue
                    begin = max(now[stage], found[key] if is_later else 0.0)
                    self.begins[stage, each] = begin
                    now[stage] = found[stage, each] = begin + self.seconds[stage][each[0]]
                at[stage] += 1
            assert at != before, "a deadlock"
        return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(6))
def test_two_stages(schedule: Literal["gpipe", "1f1b"], seed: int) -> None:
    draw = random.Random(seed)
    micro_batches = draw.choice([1, 2, 4, 8])
    nbytes = draw.choice([0, 1, 64]) * MIB
    times = [draw.uniform(0.1, 0.4) for _ in range(2)]
    profile = chain([
        layer(n, forward=times[n], backward=draw.uniform(0.1, 0.9), output=nbytes) for n in range(2)
    ])  # fmt: skip
    plan = hybrid(profile, 2, stages=2, micro_batches=micro_batches, schedule=schedule)
    orders: list[list[Pass]] = [
        [(step.kind, step.micro) for step in schedule_steps(schedule, stage, 2, micro_batches)]
        for stage in range(2)
    ]
    seconds = [
        {"F": block.forward / micro_batches, "B": block.backward / micro_batches} for block in profile.blocks
    ]
    expected = TwoStages(orders, seconds, ROUND + nbytes / micro_batches / RATE).step
    assert foretell(prove(plan), costs_of(2), overhead=0.0).step_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (3, 4), (4, 8)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipelines_of_equal_stages(
    stages: int, micro_batches: int, schedule: Literal["gpipe", "1f1b"]
) -> None:
    """As many passes after each other as there are micro-batches and further stages."""
    profile = chain([layer(number, forward=0.8, backward=1.6) for number in range(stages)])
    plan = hybrid(profile, stages, stages=stages, micro_batches=micro_batches, schedule=schedule)
    expected = (micro_batches + stages - 1) * 2.4 / micro_batches
    proved = prove(plan)
    assert proved.ideal == pytest.approx(expected, rel=1e-6)
    assert foretell(proved, costs_of(stages, "1000TB/s"), overhead=0.0).step_s == pytest.approx(
        expected, 1e-3
    )


# -- sums of gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_sums_of_gradients(ranks: int, seed: int) -> None:
    """A bucket is full from 25 MiB on. Sums are in turn, and begin in calls of the program alone."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 40) * MIB for _ in range(6)]
    blocks = [layer(n, forward=draw.uniform(0.01, 0.2), params=size) for n, size in enumerate(sizes)]
    now, held = sum(block.forward for block in blocks) / ranks, 0
    buckets = []
    for block, size in zip(blocks[::-1], sizes[::-1], strict=True):
        now += block.backward / ranks
        held += size
        if held >= 25 * MIB or block is blocks[0]:
            buckets.append((now, held))
            held = 0
    end = 0.0
    for ready, nbytes in buckets:
        begin = min((call for call, _ in buckets if call >= max(ready, end)), default=end)
        rounds = 1 if ranks == 2 else 2 * (ranks - 1)  # two exchange all they have
        end = begin + rounds * ROUND + 2 * (ranks - 1) / ranks * nbytes / RATE
    plan = hybrid(chain(blocks), ranks, data=ranks)
    assert foretell(prove(plan), costs_of(ranks), overhead=0.0).step_s == pytest.approx(end, rel=1e-6)


def test_gradients_of_a_parameter_in_two_stages_are_added_up_at_the_end() -> None:
    blocks = [
        layer(0, forward=0.1, output=0, params=3 * MIB),
        layer(1, forward=0.1, output=0, shared=("b0.w",)),
    ]
    transfers, sums = 2 * ROUND, 3 * MIB / RATE + ROUND
    proved = prove(hybrid(chain(blocks), 2, stages=2))
    expected = 2 * (0.1 + 0.2) + transfers + sums
    assert foretell(proved, costs_of(2), overhead=0.0).step_s == pytest.approx(expected, rel=1e-6)


def gathered(**first: int) -> tuple[list[int], list[int]]:
    """Return bytes of gathers and of sums; the second block has the first one's parameter alone."""
    tied = layer(1, params=0, shared=("b0.w",)).model_copy(update={"params": {}})
    profile = chain([layer(0, params=3 * MIB, **first), tied])
    held = hybrid(profile, 2, data=2, held="parameters")
    sums = {"all_reduce", "reduce_scatter"}
    events = [each for each in as_step(prove(held)).roles[0].events if isinstance(each, IssueEvent)]
    return (
        [each.nbytes for each in events if each.kind == "all_gather"],
        [each.nbytes for each in events if each.kind in sums],
    )


def test_a_parameter_of_two_blocks_is_gathered_for_both_and_summed_once() -> None:
    assert gathered() == ([3 * MIB] * 4, [3 * MIB])
    assert gathered(gradients=0)[1] == []  # frozen


def test_sums_within_blocks_are_waited_for() -> None:
    """Megatron's sums: one of the output in the forward pass, one of the gradient in the backward pass."""
    blocks = [layer(number, forward=0.1, output=8 * MIB) for number in range(3)]
    proved = prove(hybrid(chain(blocks), 2, tensor=2, micro_batches=2))
    expected = 3 * (0.1 + 0.2) / 2 + 3 * 2 * (8 * MIB / RATE + 2 * ROUND)
    assert foretell(proved, costs_of(2), overhead=0.0).step_s == pytest.approx(expected, rel=1e-6)


def test_elements_for_experts_are_exchanged_and_return() -> None:
    """Each pass has two all_to_alls; half of what each of two ranks has goes to the other one."""
    block = layer(0, forward=0.1, output=8 * MIB)
    axis = block.axes["heads"].model_copy(update={"how": "exchange", "input": 8 * MIB})
    axes = {"batch": block.axes["batch"], "experts": axis}
    proved = prove(hybrid(chain([block.model_copy(update={"axes": axes})]), 2, tensor=2))
    moved = 2 * MIB / RATE + ROUND + REDISTRIBUTION
    expected = (0.1 + 0.2) / 2 + 2 * 2 * moved
    assert foretell(proved, costs_of(2), overhead=0.0).step_s == pytest.approx(expected, rel=1e-6)


def test_uneven_parts_of_a_sequence_are_foretold() -> None:
    """Ranks have different parts, and the same operations; what they gather together is all of it."""
    blocks = [layer(number, length=3, heads=8) for number in range(4)]
    proved = prove(hybrid(chain(blocks, length=3), 2, tensor=2, outside="sequence"))
    whole = 4 * 2 * (1 << 18) / RATE  # gathered and scattered: half of it moves each time
    least = sum(3 * block.forward for block in blocks) / 2
    found = foretell(proved, costs_of(2), overhead=0.0).step_s
    assert least + whole / 2 < found < 2 * least + 2 * whole


def test_what_is_beside_a_cut_is_computed_by_all_ranks() -> None:
    """A part of `work` is in the modules that are cut; gradients of several micro-batches add up, too."""
    block = layer(0, forward=0.1, accumulate=0.04)
    axes = {**block.axes, "heads": block.axes["heads"].model_copy(update={"work": 0.75})}
    profile = chain([block.model_copy(update={"axes": axes, "output": 0})])
    proved = prove(hybrid(profile, 2, tensor=2, micro_batches=2))
    sums = 2 * ((1 << 18) / RATE + 2 * ROUND)
    expected = (0.1 + 0.2) * (0.25 + 0.75 / 2) + 2 * 0.04 * 0.75 + sums
    assert foretell(proved, costs_of(2), overhead=0.0).step_s == pytest.approx(expected, rel=1e-6)


def test_parts_in_turn_take_longer() -> None:
    profile = chain([layer(0, forward=0.1)]).model_copy(update={"turn": 0.02})
    expected = 2 * (0.1 + 4 * 0.01) + 0.2
    assert foretell(prove(co_shard(profile, 1)), costs_of(1), overhead=0.0).step_s == pytest.approx(expected)
    begun = foretell(prove(co_shard(profile, 1)), costs_of(1), overhead=0.01).step_s
    assert begun == pytest.approx(expected + 2 * 0.01)  # each pass of the block


def test_an_algorithm_that_was_measured_for_another_operation_is_no_error() -> None:
    at, curve = Placement(2, 1, 2), TimeCurve.through({8: 100.0, 64 * MIB: 100.0})
    measured = [Measured(kind, kind, at, curve) for kind in ("all_gather", "all_reduce", "reduce_scatter")]
    costs = ClusterCosts(measured, Topology.of({"nodes": 1, "ranks_per_node": 2}))
    proved = prove(hybrid(chain([layer(0, forward=0.1)]), 2, data=2))
    assert foretell(proved, costs, overhead=0.0).step_s == pytest.approx(0.15 + 100e-6)
    with pytest.raises(Unsupported, match="broadcast"):
        BestCosts(measured, costs.topology).of("broadcast", 8, (0, 1), CAPTURED)


def test_a_library_without_times_between_hosts_is_not_the_fastest_there() -> None:
    """By the rate of the link alone, 1 MB a second, it would take less than what another one took."""
    inside, across = Placement(2, 1, 2), Placement(4, 2, 2)

    def measured(library: str, at: Placement, seconds: float) -> list[Measured]:
        curve = TimeCurve.through({8: 1e6 * seconds, 64 * MIB: 1e6 * seconds})
        return [Measured(kind, library, at, curve) for kind in ("all_reduce", "all_gather")]

    times = measured("msccl", inside, 0.01) + measured("gloo", inside, 0.02) + measured("gloo", across, 9.0)
    topology = Topology.of({"nodes": 2, "ranks_per_node": 2, "links": {"nic": {"rate": "1MB/s"}}})
    best = BestCosts(times, topology)
    found = {
        (kind, len(group)): best.of(kind, 1000, group, CAPTURED).seconds
        for kind in ("all_reduce", "all_gather_v") for group in (range(4), (0, 1))
    }  # fmt: skip
    wanted = {(kind, ranks): time for kind, _ in found for ranks, time in ((4, 9.0), (2, 0.01))}
    assert found == pytest.approx(wanted)
    # No library has times of this kind: all by the rate.
    sent = best.of("send", 1_000_000, (0, 2), CAPTURED)
    assert sent.how == "assumed"
    assert sent.seconds == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("outside", [None, "sequence"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_stages_of_several_ranks_are_folded_right(outside: str | None, micro_batches: int) -> None:
    """The ranks of two stages differ, though each of them has a group of two and one of four."""
    profile = chain([layer(number, output=MIB) for number in range(4)])
    plan = hybrid(profile, 4, tensor=2, stages=2, micro_batches=micro_batches, outside=outside)
    step = as_step(prove(plan))
    folded, whole = (
        simulate(step, BucketPlan(library=CAPTURED), costs_of(4), fold=fold) for fold in (True, False)
    )
    assert (folded.step_s, folded.distinct, whole.distinct) == (whole.step_s, 2, 4)


def test_many_nodes_are_folded() -> None:
    """Ranks that are simulated are on nodes of high numbers, too."""
    profile = chain([layer(number, items=256) for number in range(4)], items=256)
    proved = prove(hybrid(profile, 256, data=64, stages=4))
    found = foretell(proved, ClusterCosts([], cluster(128, 2, cores=2)))
    assert found.distinct < 16
    assert found.step_s > 0.0


# -- cores ---------------------------------------------------------------------------------------------------


def computing(programs: list[list[float]]) -> CapturedStep:
    roles = tuple(
        Role((rank,), tuple(ComputeEvent("", seconds) for seconds in each))
        for rank, each in enumerate(programs)
    )
    return CapturedStep(len(programs), 1, "", 1.0, 0.0, roles)


def step_on(programs: list[list[float]], cores: int | None, nodes: int = 1) -> float:
    given = {"nodes": nodes, "ranks_per_node": len(programs) // nodes}
    topology = Topology.of(given if cores is None else {**given, "cores": cores})
    return simulate(computing(programs), None, ClusterCosts([], topology)).step_s


@pytest.mark.parametrize(("ranks", "cores"), [(2, 1), (3, 2), (4, 2), (5, 4), (4, 4), (3, 7)])
def test_equal_ranks_share_cores_evenly(ranks: int, cores: int) -> None:
    found = step_on([[0.5, 1.0, 0.25]] * ranks, cores)
    assert found == pytest.approx(1.75 * max(ranks / cores, 1.0), rel=1e-9)


@pytest.mark.parametrize("cores", [1, 2])
def test_a_rank_that_waits_takes_little_of_a_core(cores: int) -> None:
    """One that waits for the other polls: a part of a core, if they share one."""
    issue = IssueEvent(0, "broadcast", 8, (0, 1), "", dtype="float32")
    roles = Role((0,), (ComputeEvent("", 2.0), issue)), Role((1,), (issue, WaitEvent(0)))
    step = CapturedStep(2, 1, "", 1.0, 0.0, roles)
    topology = Topology.of({"nodes": 1, "ranks_per_node": 2, "cores": cores})
    costs = ClusterCosts(
        [Measured("broadcast", "gloo", Placement(2, 1, 2), TimeCurve.through({8: 1.0}))], topology
    )
    found = simulate(step, BucketPlan(library="gloo"), costs).step_s
    assert found == pytest.approx(2.0 * (1.3 if cores == 1 else 1.0), rel=1e-5)


def test_a_rank_that_has_waited_and_ends_gives_its_share_back() -> None:
    """One that computes alone from then on has the whole core."""
    issue = IssueEvent(0, "broadcast", 8, (1, 2), "", dtype="float32")
    roles = (
        Role((0,), (ComputeEvent("", 10.0),)), Role((1,), (issue, WaitEvent(0))),
        Role((2,), (ComputeEvent("", 1.0), issue)),
    )  # fmt: skip
    step = CapturedStep(3, 1, "", 1.0, 0.0, roles)
    costs = ClusterCosts(
        [Measured("broadcast", "gloo", Placement(2, 1, 2), TimeCurve.through({8: 1.0}))],
        Topology.of({"nodes": 1, "ranks_per_node": 3, "cores": 1}),
    )
    found = simulate(step, BucketPlan(library="gloo"), costs).step_s
    assert found == pytest.approx(2.3 + 9.0, rel=1e-5)  # 1 s of each of two beside one that waits, then alone


def shared(works: list[float], cores: int) -> float:
    """Return when all work is done, if all that is left has equal shares, of at most a core."""
    left, now = sorted(works), 0.0
    while left:
        rate = min(1.0, cores / len(left))
        seconds = left[0] / rate
        now += seconds
        left = [work - seconds * rate for work in left][1:]
    return now


@pytest.mark.parametrize("seed", range(20))
def test_unequal_ranks_share_cores(seed: int) -> None:
    draw = random.Random(seed)
    nodes, ranks = draw.randint(1, 3), draw.randint(1, 6)
    programs = [
        [draw.choice([0.0, draw.uniform(0.1, 2.0)]) for _ in range(draw.randint(1, 4))]
        for _ in range(nodes * ranks)
    ]
    cores = draw.randint(1, ranks)
    works = [[sum(each) for each in programs[n * ranks : (n + 1) * ranks]] for n in range(nodes)]
    expected = max(shared([work for work in own if work], cores) for own in works)
    assert step_on(programs, cores, nodes) == pytest.approx(expected, rel=1e-9)


def test_plans_on_few_cores_take_longer() -> None:
    profile = chain([layer(number) for number in range(4)])
    proved = prove(hybrid(profile, 4, data=4))
    one, two, all_ = (
        foretell(proved, costs_of(4, "1000TB/s", cores=cores), overhead=0.0).step_s for cores in (1, 2, 4)
    )
    assert [one, two] == pytest.approx([4 * all_, 2 * all_], rel=1e-3)
    assert ITEMS % 4 == 0
