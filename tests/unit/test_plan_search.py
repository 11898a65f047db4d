"""The search for plans: stages and recomputation against every choice there is, and whole searches."""

from __future__ import annotations

import math
import random
import re
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from plan_blocks import chain, cluster, layer
from tiers import examples

from mcr_plus.errors import InvalidArgument
from mcr_plus.plans.foretell import cluster_costs
from mcr_plus.plans.memory import memory_of
from mcr_plus.plans.search import search
from mcr_plus.plans.stage_search import CELLS, BlockCosts, solve

MIB = 1 << 20
Costs = dict[str, list[Any]]


# -- stages and recomputation --------------------------------------------------------------------------------


def instance(draw: random.Random) -> tuple[Costs, int, int, int]:
    """Return costs of blocks, stages, micro-batches, and a bound: too small, tight, or loose."""
    blocks = draw.randint(2, 6)
    stages, micro_batches = draw.randint(1, min(3, blocks)), draw.randint(1, 4)
    size = 10 ** draw.randint(1, 9)

    def sizes(most: float) -> list[int]:
        return [draw.choice([0, draw.randint(0, int(most * size))]) for _ in range(blocks)]

    def times() -> list[float]:
        return [draw.choice([0.0, float(draw.randint(1, 3)), draw.random()]) for _ in range(blocks)]

    transient = sizes(1)
    costs: Costs = {
        "seconds": [0.1 + draw.random() for _ in range(blocks)], "again": times(), "kept": sizes(2),
        "kept_input": sizes(0.5), "fixed": sizes(1), "transient": transient,
        "transient_again": [own + more for own, more in zip(transient, sizes(0.5), strict=True)],
        "output": sizes(0.3), "sends": [draw.choice([0.0, 1.5]) * draw.random() for _ in range(blocks)],
        "sums": times(),
    }  # fmt: skip
    return costs, stages, micro_batches, draw.randint(1, 8 * size)


def stage_of(
    costs: Costs, blocks: range, again: set[int], inflight: int, most: int
) -> tuple[float, int, bool]:
    """Return the seconds and bytes of a stage, and whether its parts, each rounded up to cells, fit."""
    seconds, sizes = 0.0, []
    for block in blocks:
        seconds += costs["seconds"][block] + (costs["again"][block] if block in again else 0.0)
        kept = costs["kept_input" if block in again else "kept"][block]
        sizes.append(costs["fixed"][block] + inflight * kept)
    sizes.append(max(costs["transient_again" if again else "transient"][block] for block in blocks))
    sizes.append(inflight * costs["output"][blocks[-1]])
    cells = sum(-(-size * CELLS // most) for size in sizes)
    return seconds, sum(sizes), cells <= CELLS


def step_of(
    costs: Costs, stages: list[range], recomputed: set[int], micro_batches: int, most: int
) -> tuple[float, int, bool]:
    """Return the seconds of a step by the formula, most bytes of a stage, and whether all stages fit."""
    total, slowest, peak, fits = sum(costs["sums"][block] for block in stages[0]), 0.0, 0, True
    for number, blocks in enumerate(stages):
        inflight = min(len(stages) - number, micro_batches)
        seconds, nbytes, own = stage_of(costs, blocks, recomputed & set(blocks), inflight, most)
        send = costs["sends"][blocks[-1]] if number < len(stages) - 1 else 0.0
        total += seconds + send
        slowest = max(slowest, seconds, send)
        peak, fits = max(peak, nbytes), fits and own
    return total + (micro_batches - 1) * slowest, peak, fits


def every_choice(blocks: int, stages: int) -> list[tuple[list[range], set[int]]]:
    subsets = [{block for block in range(blocks) if number >> block & 1} for number in range(1 << blocks)]
    cuts = [(0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1)]
    return [([range(low, high) for low, high in pairwise(cut)], subset) for cut in cuts for subset in subsets]


def compare(draw: random.Random) -> bool:
    """Compare the search with all choices; return whether any fits."""
    costs, stages, micro_batches, most = instance(draw)
    given = BlockCosts(**{name: np.array(values) for name, values in costs.items()})
    found = solve(given, stages, micro_batches, most)
    steps = [
        step_of(costs, *choice, micro_batches, most) for choice in every_choice(len(costs["seconds"]), stages)
    ]
    best = min((seconds for seconds, _, fits in steps if fits), default=math.inf)
    assert found.seconds == pytest.approx(best, rel=1e-12), (costs, stages, micro_batches, most)
    if math.isinf(best):
        assert found.memory == min(nbytes for _, nbytes, _ in steps)
        return False
    seconds, *others = step_of(costs, list(found.stages), set(found.recompute), micro_batches, most)
    assert seconds == pytest.approx(best, rel=1e-12)
    assert others == [found.memory, True]
    assert found.memory <= most
    assert solve(given, stages, micro_batches, most, best * (1 + 1e-9)) == found
    return True


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_beats_the_one_found(seed: int) -> None:
    draw = random.Random(seed)
    fits = [compare(draw) for _ in range(50)]
    assert 5 < sum(fits) < 45


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


@pytest.mark.parametrize("seed", range(examples(20)))
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
    """Its sequence is shorter than its number of heads; and a block that draws numbers has no replicas."""
    short = chain([layer(number, length=3, heads=8) for number in range(4)], length=3)
    found = search(short, 4, costs_of(1, 4), best=40)
    assert {each.choice.outside for each in found.plans} == {None, "sequence"}
    assert all(each.plan for each in found.plans)
    draws = chain([layer(0), layer(1, heads=0, random=True), layer(2)])
    found = search(draws, 2, costs_of(1, 2), best=12)
    assert all(
        each.plan and not (each.choice.tensor > 1 and each.choice.outside is None) for each in found.plans
    )


def test_a_search_among_many_ranks_ends() -> None:
    """Those plans are not simulated, but have a time and a size."""
    profile = chain([layer(number, items=256) for number in range(12)], items=256)
    found = search(profile, 256, costs_of(32, 8), memory=500 * MIB)
    best = found.plans[0]
    assert best.memory <= 500 * MIB
    assert best.step == best.seconds
    assert 0 < found.gap < 1
