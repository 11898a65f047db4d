"""The search for cuts and buckets together, against every choice there is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, combinations

import numpy as np
import pytest
from tiers import examples
from unit.test_plan import every_plan, some_prices

from mcr_plus.bucketing.costs import BucketCurve, prices
from mcr_plus.bucketing.cut_search import search_cuts
from mcr_plus.bucketing.search import Prices, search


def end_of(
    plan: Sequence[tuple[int, int, int]],
    cuts: Sequence[tuple[int, float]],
    ready: Sequence[float],
    compute: float,
    of: Prices,
) -> float:
    """Return the end of a step: a gradient is ready at the end of its part, later by all cuts before it."""
    free = lost = 0.0
    for i, j, choice in plan:
        part_end = min([position for position, _ in cuts if position >= j], default=len(ready))
        delay = lost + sum(cost for position, cost in cuts if position < j)
        time = float(of.seconds[choice, i, j])
        free = max(free, ready[part_end - 1] + delay) + time
        lost += float(of.shares[choice, i, j]) * time + of.overhead
    return max(free, compute + lost + sum(cost for _, cost in cuts))


@pytest.mark.parametrize("seed", range(6))
def test_no_cuts_and_buckets_end_before_those_that_are_found(seed: int) -> None:
    draw = random.Random(seed)
    for round_ in range(examples(10)):
        count = 8 if round_ == 0 else draw.randint(1, 6)
        choices = 1 if count == 8 else draw.randint(1, 2)
        ready = sorted(draw.random() for _ in range(count))
        compute = ready[-1] + draw.choice([0.0, 0.3 * draw.random()])
        of = some_prices(draw, count, choices)
        positions = sorted(draw.sample(range(1, count), draw.randint(0, count - 1)))
        costs = [draw.choice([0.0, 0.01, 0.2 * draw.random()]) for _ in positions]
        found = search_cuts(ready, compute, of, positions, costs)
        places = list(zip(positions, costs, strict=True))
        plans = [
            plan
            for plan in every_plan(count, choices)
            if all(np.isfinite(of.seconds[choice, i, j]) for i, j, choice in plan)
        ]
        subsets = chain.from_iterable(combinations(places, size) for size in range(len(places) + 1))
        best = min(end_of(plan, cuts, ready, compute, of) for cuts in subsets for plan in plans)
        assert found.step == pytest.approx(best, rel=1e-12)
        taken = [places[at] for at in found.cuts]
        assert end_of(found.buckets, taken, ready, compute, of) == pytest.approx(best, rel=1e-12)
        assert found.exact
        assert found.bound <= best * (1 + 1e-12)


def test_cuts_without_a_cost_are_the_search_without_cuts_and_dear_ones_are_left_out() -> None:
    draw = np.random.default_rng(5)
    ready = np.sort(draw.random(16))
    curves = [BucketCurve.through({10**3: (1e-3, share), 10**6: (0.03, share)}) for share in (0.4, 0.1)]
    of = prices(draw.integers(1000, 10**6, 16).tolist(), 64, curves, 1e-4)
    everywhere = range(1, 16)
    free = search_cuts(ready, 1.1, of, everywhere, [0.0] * 15, 400)
    assert free.step == pytest.approx(search(ready, 1.1, of, 400).step, rel=1e-12)
    dear = search_cuts(ready, 1.1, of, everywhere, [9.0] * 15)
    assert dear.cuts == ()
    assert dear.step == pytest.approx(search(np.full(16, ready[-1]), 1.1, of).step, rel=1e-12)
    few, many = (search_cuts(ready, 1.1, of, everywhere, [0.01] * 15, labels) for labels in (2, 400))
    assert many.exact
    assert few.bound <= few.least <= many.step * (1 + 1e-9)
    assert many.bound <= many.step <= few.step <= few.least * (1 + few.gap) * (1 + 1e-12)


def test_invalid_arguments_of_the_search_are_refused() -> None:
    of = prices([8, 8], 8, [BucketCurve.through({8: (1.0, 0.0)})], 0.0)
    with pytest.raises(ValueError, match="ready: expected in ascending"):
        search_cuts([1.0, 0.5], 1.0, of, [1], [0.0])
    for positions in ([0], [2], [1, 1]):
        with pytest.raises(ValueError, match="positions: expected ascending ones from 1 to 1"):
            search_cuts([1.0, 1.0], 1.0, of, positions, [0.0] * len(positions))
    for costs in ([-1.0], [float("nan")], []):
        with pytest.raises(ValueError, match="costs: expected 1"):
            search_cuts([1.0, 1.0], 1.0, of, [1], costs)
    nothing = search_cuts([], 2.0, prices([], 8, [BucketCurve.through({8: (1.0, 0.0)})], 0.0), [], [])
    assert (nothing.buckets, nothing.cuts, nothing.step) == ([], (), 2.0)
