"""The search for plans: stages and recomputation against every choice there is, and whole searches."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
from plan_blocks import chain, cluster, layer
from tiers import examples

from mcr_plus.errors import InvalidArgument
from mcr_plus.plans.blocks import Axis
from mcr_plus.plans.foretell import OVERHEAD, BestCosts, cluster_costs, foretell
from mcr_plus.plans.memory import memory_of
from mcr_plus.plans.named import hybrid
from mcr_plus.plans.proof import prove
from mcr_plus.plans.search import _prepare, search
from mcr_plus.plans.stage_search import CELLS, BlockCosts, solve

MIB = 1 << 20
Costs = dict[str, list[Any]]


# -- stages and recomputation --------------------------------------------------------------------------------


def instance(draw: random.Random) -> tuple[Costs, int, int, int]:
    """Return costs of blocks, stages, micro-batches, and a bound: too small, tight, or loose."""
    ways = draw.randint(1, 3)
    blocks = draw.randint(2, 5 if ways == 3 else 6)
    stages, micro_batches = draw.randint(1, min(3, blocks)), draw.randint(1, 4)
    size = 10 ** draw.randint(1, 9)

    def sizes(most: float) -> list[int]:
        return [draw.choice([0, draw.randint(0, int(most * size))]) for _ in range(blocks)]

    def times() -> list[float]:
        return [draw.choice([0.0, float(draw.randint(1, 3)), draw.random()]) for _ in range(blocks)]

    def in_ways(make: Any, least: float) -> list[list[Any]]:
        return [list(each) for each in zip(*(make(least + way) for way in range(ways)), strict=True)]

    costs: Costs = {
        "seconds": [0.1 + draw.random() for _ in range(blocks)],
        "extra": [[0.0, *sorted(more)] for more in zip(*(times() for _ in range(1, ways)), strict=True)]
        if ways > 1 else [[0.0]] * blocks,
        "kept": in_ways(sizes, 1), "fixed": in_ways(sizes, 1), "transient": in_ways(sizes, 0.5),
        "output": sizes(0.3), "input": sizes(0.3), "sends": [
            [draw.choice([0.0, 1.5]) * draw.random() for _ in range(stages)] for _ in range(blocks)
        ],
    }  # fmt: skip
    return costs, stages, micro_batches, draw.randint(1, 8 * size)


def stage_of(
    costs: Costs, blocks: range, ways: tuple[int, ...], inflight: int, most: int
) -> tuple[float, int, bool]:
    """Return the seconds and bytes of a stage, and whether its parts, each rounded up to cells, fit."""
    seconds, sizes = 0.0, []
    for block in blocks:
        way = ways[block]
        seconds += costs["seconds"][block] + costs["extra"][block][way]
        sizes.append(costs["fixed"][block][way] + inflight * costs["kept"][block][way])
    plain = not any(ways[block] for block in blocks)
    transient = max(
        max(costs["transient"][block][:1] if plain else costs["transient"][block]) for block in blocks
    )
    moved = costs["output"][blocks[-1]], costs["input"][blocks[0]]
    sizes += [transient, *(each * (inflight + 1) for each in moved)]
    return seconds, sum(sizes), sum(-(-size * CELLS // most) for size in sizes) <= CELLS


def step_of(
    costs: Costs, stages: list[range], ways: tuple[int, ...], micro_batches: int, most: int
) -> tuple[float, int, bool]:
    """Return the seconds of a step by the formula, most bytes of a stage, and whether all stages fit."""
    total, slowest, peak, fits = 0.0, 0.0, 0, True
    for number, blocks in enumerate(stages):
        inflight = min(len(stages) - number, micro_batches)
        seconds, nbytes, own = stage_of(costs, blocks, ways, inflight, most)
        send = costs["sends"][blocks[-1]][number] if number < len(stages) - 1 else 0.0
        total += seconds + send
        slowest = max(slowest, seconds, send)
        peak, fits = max(peak, nbytes), fits and own
    return total + (micro_batches - 1) * slowest, peak, fits


def every_choice(blocks: int, stages: int, ways: int) -> list[tuple[list[range], tuple[int, ...]]]:
    cuts = [(0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1)]
    each = list(product(range(ways), repeat=blocks))
    return [([range(low, high) for low, high in pairwise(cut)], one) for cut in cuts for one in each]


def compare(draw: random.Random) -> bool:
    """Compare the search with all choices; return whether any fits."""
    costs, stages, micro_batches, most = instance(draw)
    given = BlockCosts(**{name: np.array(values) for name, values in costs.items()})
    found = solve(given, stages, micro_batches, most)
    choices = every_choice(len(costs["seconds"]), stages, len(costs["extra"][0]))
    steps = [step_of(costs, *choice, micro_batches, most) for choice in choices]
    best = min((seconds for seconds, _, fits in steps if fits), default=math.inf)
    assert found.seconds == pytest.approx(best, rel=1e-12), (costs, stages, micro_batches, most)
    if math.isinf(best):
        assert found.memory == min(nbytes for _, nbytes, _ in steps)
        return False
    seconds, *others = step_of(costs, list(found.stages), found.ways, micro_batches, most)
    assert seconds == pytest.approx(best, rel=1e-12)
    assert others == [found.memory, True]
    assert found.memory <= most
    return True


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_beats_the_one_found(seed: int) -> None:
    draw = random.Random(seed)
    fits = [compare(draw) for _ in range(25)]
    assert 5 < sum(fits) < 25


@pytest.mark.long
def test_no_choice_beats_the_one_found_in_a_thousand() -> None:
    draw = random.Random(99)
    assert 100 < sum(compare(draw) for _ in range(1000)) < 900


# -- whole searches ------------------------------------------------------------------------------------------


def transformer(draw: random.Random, layers: int, **options: Any) -> Any:
    """Return layers of different sizes with heads and hidden units; numbers of bytes in MiB."""
    blocks = [
        layer(
            number, forward=0.01 * (1 + draw.random()), params=draw.randint(1, 6) * MIB,
            saved=draw.randint(4, 40) * MIB, transient=draw.randint(0, 4) * MIB,
            output=draw.randint(1, 3) * MIB, **options,
        )
        for number in range(layers)
    ]  # fmt: skip
    return chain(blocks)


def costs_of(nodes: int, ranks_per_node: int, **options: Any) -> Any:
    return cluster_costs(cluster(nodes, ranks_per_node, **options))


@pytest.mark.parametrize("seed", range(examples(4)))
def test_plans_that_are_found_are_right_and_fit(seed: int) -> None:
    draw = random.Random(seed)
    nodes, per_node = draw.choice([(1, 2), (1, 4), (2, 2), (3, 2), (2, 4)])
    ranks = nodes * per_node
    profile = transformer(draw, draw.randint(2, 7))
    costs = costs_of(nodes, per_node, inside="10GB/s", nic="1Gbit/s")
    free = search(profile, ranks, costs)
    bound = free.plans[0].peak * draw.choice([40, 60, 80, 99, 100]) // 100
    try:
        found = search(profile, ranks, costs, memory=bound)
    except InvalidArgument as error:
        more = raised(bound, str(error))
        found = search(profile, ranks, costs, memory=more)
        rounded = (len(profile.blocks) + 2) / CELLS  # sizes of blocks, each up to a cell of the bound
        assert max(each.peak for each in found.plans) > bound * (1 - rounded)
        bound = more
    for each in found.plans:
        proved = each.plan
        assert proved.plan.ranks == ranks
        assert each.peak == max(memory_of(proved, rank).peak for rank in range(ranks)) <= bound
    assert [each.step for each in found.plans] == sorted(each.step for each in found.plans)
    assert 0 < found.gap < 1
    work = sum(block.forward + block.backward for block in profile.blocks)
    assert found.bound == pytest.approx(work / ranks)


@pytest.mark.parametrize("dealt", [False, True])
def test_gradients_that_come_from_other_ranks_within_a_stage_are_counted(dealt: bool) -> None:
    """Of an input that ranks share, before a layer whose heads or experts are cut."""
    experts = {"experts": Axis(dims=(), parts=(4,), how="exchange", params=MIB)}
    blocks = [layer(number, output=8 * MIB, heads=4 * number * (not dealt)) for number in range(2)]
    if dealt:
        blocks[1] = blocks[1].model_copy(update={"axes": blocks[1].axes | experts})
    found = search(chain(blocks), 4, costs_of(1, 4), best=20, micro_batches=[1, 2]).plans
    assert any(each.choice.tensor > 1 == len(each.choice.stages) for each in found)
    assert all(each.peak <= each.memory for each in found)


@pytest.mark.parametrize(("nodes", "per_node", "cores"), [(1, 4, 2), (2, 2, 1), (2, 2, 3)])
def test_the_bound_knows_of_shared_cores(nodes: int, per_node: int, cores: int) -> None:
    profile = transformer(random.Random(1), 3)
    found = search(profile, 4, costs_of(nodes, per_node, inside="10GB/s", nic="1Gbit/s", cores=cores))
    work = sum(block.forward + block.backward for block in profile.blocks)
    assert found.bound == pytest.approx(work / min(4, nodes * cores))
    assert found.bound <= found.plans[0].step


def raised(bound: int, text: str) -> int:
    """Return a bound, raised by what an error says is missing."""
    (missing,) = re.findall(r"needs ([\d,.]+) MiB more", text)
    return bound + math.floor(float(missing.replace(",", "")) * MIB)


@pytest.mark.long
def test_what_is_missing_is_what_is_missing() -> None:
    """With so much more there is a plan; without a good part of it there is none."""
    draw = random.Random(5)
    for ranks in (1, 2, 4):
        profile, costs = transformer(draw, 5), costs_of(1, ranks)
        for bound in (0, MIB, 9 * MIB):
            with pytest.raises(InvalidArgument, match="more on some rank") as error:
                search(profile, ranks, costs, memory=bound)
            enough = raised(bound, str(error.value))
            search(profile, ranks, costs, memory=enough)
            with pytest.raises(InvalidArgument, match="more on some rank"):
                search(profile, ranks, costs, memory=int(enough * 0.985))


def test_ranks_for_which_there_is_no_combination() -> None:
    """Seven ranks have neither as many blocks, heads, nor items of a batch."""
    profile = chain([layer(number, items=4, heads=4) for number in range(3)], items=4)
    with pytest.raises(InvalidArgument, match="ranks: 7"):
        search(profile, 7, costs_of(1, 7))


@pytest.mark.long
def test_combinations_that_a_model_has_not_are_left_out() -> None:
    """Its sequence is shorter than its number of heads."""
    short = chain([layer(number, length=3, heads=8) for number in range(4)], length=3)
    found = search(short, 4, costs_of(1, 4), best=40)
    assert {each.choice.outside for each in found.plans} == {None, "sequence"}
    assert all(each.plan for each in found.plans)


def test_one_process_of_a_host_compiles_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    @contextmanager
    def preparing(what: str) -> Iterator[None]:
        entered.append(what)
        yield

    monkeypatch.setattr("mcr_plus.plans.search.preparing", preparing)
    _prepare.cache_clear()
    for _ in range(2):
        search(chain([layer(0)]), 1, costs_of(1, 1))
    assert entered == ["searches for plans"]


def test_blocks_that_no_plan_runs_are_named() -> None:
    with pytest.raises(InvalidArgument, match=r"^b1: it draws random numbers"):
        search(chain([layer(0), layer(1, random=True)]), 2, costs_of(1, 2))


def test_experts_are_dealt_where_they_do_not_fit_beside_a_head_of_one_column() -> None:
    experts = Axis(dims=(), parts=(6,), how="exchange", params=100 * MIB)
    column = Axis(dims=(), parts=(1,), how="columns")
    first, last = layer(0, heads=0, params=100 * MIB), layer(1, heads=0)
    first = first.model_copy(update={"axes": {**first.axes, "experts": experts}})
    last = last.model_copy(update={"axes": {**last.axes, "hidden": column}})
    best = search(chain([first, last]), 2, costs_of(1, 2), memory=300 * MIB).plans[0]
    assert best.choice.tensor == 2
    assert best.plan.plan.cuts[0][0].axes == ("experts",)


def test_experts_are_dealt_among_ranks_that_share_the_batch() -> None:
    """Their sums of gradients take longer than their exchanges, and cut along the batch they need none."""
    experts = Axis(dims=(), parts=(8,), how="exchange", params=200 * MIB, input=1 << 18)
    blocks = [layer(number, heads=0, forward=0.02, params=MIB) for number in range(4)]
    for number in (1, 2):
        block = layer(number, heads=0, forward=0.02, params=200 * MIB)
        blocks[number] = block.model_copy(update={"axes": {**block.axes, "experts": experts}})
    best = search(chain(blocks), 4, costs_of(1, 4, inside="1GB/s")).plans[0]
    assert (best.choice.tensor, best.choice.outside) == (4, "batch")
    axes = [[(cut.axes, cut.outside) for cut in cuts] for cuts in best.plan.plan.cuts]
    split, own = [(("batch",), None)], [(("experts",), "batch")]
    assert axes == [split, own, own, split]
    sums = 2 * costs_of(1, 4, inside="1GB/s").of("all_reduce", MIB, range(4), "assumed").seconds
    assert best.seconds == pytest.approx(0.06 + sums, rel=0.05)


def test_experts_get_items_in_every_micro_batch() -> None:
    """Of 12 items in 8 micro-batches, some have one, which two ranks cannot share; a sequence they can."""
    experts = Axis(dims=(), parts=(4,), how="exchange", params=MIB)
    for heads, sequence in ((0, False), (4, True)):
        blocks = [layer(number, items=12, heads=heads, saved=64 * MIB) for number in range(3)]
        axes = {name: axis for name, axis in blocks[1].axes.items() if sequence or name != "sequence"}
        blocks[1] = blocks[1].model_copy(update={"axes": {**axes, "experts": experts}})
        found = search(chain(blocks, items=12), 2, costs_of(1, 2), best=40, micro_batches=[8]).plans
        shared = {each.choice.outside for each in found if each.choice.tensor > 1}
        assert shared == ({"sequence"} if sequence else set())
        assert all(each.plan for each in found)


def test_rows_stay_whole_beside_tables() -> None:
    """Tables need their input along the batch, and rows all of it."""
    first = layer(0, heads=0)
    more = {
        "tables": Axis(dims=(), parts=(8,), how="exchange", params=MIB // 4),
        "rows": Axis(dims=(), parts=(8,), how="sum", params=MIB // 4),
    }
    first = first.model_copy(update={"axes": {**first.axes, **more}})
    plan = hybrid(chain([first, layer(1)]), 2, tensor=2)
    assert [(cut.axes, cut.outside) for cut in plan.cuts[0]] == [(("tables",), "batch")]


def test_an_axis_of_another_name_is_no_choice_of_a_search() -> None:
    """`hybrid` cuts known axes alone: blocks cut along the batch have sums of gradients."""
    block = layer(0, heads=0, params=200 * MIB)
    own = Axis(dims=(), parts=(4,), how="sum", params=200 * MIB)
    profile = chain([block.model_copy(update={"axes": {**block.axes, "channels": own}})])
    found = search(profile, 2, costs_of(1, 2), best=40).plans
    assert {each.choice.tensor for each in found} == {1}


@pytest.mark.parametrize("seed", range(examples(3)))
def test_each_layer_is_cut_along_its_batch_or_in_its_parameters(seed: int) -> None:
    """Layers have large parameters, whose sums take long, or a large input, which takes long to gather."""
    draw = random.Random(seed)
    large = [draw.random() < 0.5 for _ in range(4)]
    large[:2] = [True, False]
    blocks = []
    for number, of_parameters in enumerate(large):
        params, moved = (64 * MIB, 1 << 18) if of_parameters else (MIB, 32 * MIB)
        axes = layer(number, params=2 * params, output=moved).axes  # all of them are cut
        blocks.append(layer(number, params=params, output=1 << 18, axes=axes))
    profile, costs = chain(blocks), costs_of(1, 4, inside="1GB/s")
    found = search(profile, 4, costs, micro_batches=[1]).plans[0]
    cut = tuple(np.flatnonzero(large).tolist())
    assert (found.choice.outside, found.choice.tensor_blocks) == ("batch", cut)
    plans = [
        hybrid(profile, 4, data=4 // tensor, tensor=tensor, outside="batch", tensor_blocks=own)
        for tensor in (1, 2, 4) for number in range(5) for own in combinations(range(4), number)
    ]  # fmt: skip
    assert found.step == min(foretell(prove(each), costs).step_s for each in plans)


def test_shards_of_the_optimizer_cost_their_gathering() -> None:
    profile, costs = chain([layer(0, heads=0, params=100 * MIB)]), costs_of(1, 2, inside="1GB/s")
    proved = prove(hybrid(profile, 2, data=2, held="optimizer"))
    best = BestCosts(costs.measured, costs.topology, costs.measured_on, costs.guessed)
    gather = best.of("all_gather", 100 * MIB, range(2), "gloo").seconds
    more = foretell(proved, costs, gathers=True).step_s - foretell(proved, costs).step_s
    assert more == pytest.approx(gather, abs=2 * OVERHEAD)
    assert search(profile, 2, costs, micro_batches=[1]).plans[0].step >= gather


@pytest.mark.parametrize("sliced", [False, True])
def test_a_pipeline_gets_the_fastest_schedule_that_fits(sliced: bool) -> None:
    """Parameters are large, so that there are stages; of two items, slices fill the gaps, else W does."""
    blocks = [
        layer(number, items=2, length=16, heads=0, params=1 << 28, saved=MIB, output=1 << 14, forward=0.1)
        for number in range(4)
    ]
    profile = chain(blocks, items=2, length=16).model_copy(update={"sliced": sliced})
    costs = costs_of(4, 1, nic="1Gbit/s")
    best = search(profile, 4, costs).plans[0]
    assert len(best.choice.stages) == 4
    assert (best.choice.schedule, best.choice.slices) == (("1f1b", 8) if sliced else ("zero-bubble", 1))
    plain = foretell(prove(hybrid(profile, 4, stages=4, micro_batches=2)), costs).step_s
    assert best.step < plain == pytest.approx((2 + 3) * 0.15, rel=0.015)
    if sliced:  # passes of 16 parts on 4 stages
        assert best.step == pytest.approx((16 + 3) * (0.3 / 16 + 2 * OVERHEAD), rel=0.1)


def test_a_search_among_many_ranks_ends() -> None:
    """Those plans are not simulated, but have a time and a size."""
    profile = chain([layer(number, items=256) for number in range(12)], items=256)
    found = search(profile, 256, costs_of(32, 8), memory=500 * MIB)
    best = found.plans[0]
    assert best.memory <= 500 * MIB
    assert best.step == best.seconds
    assert 0 < found.gap < 1
