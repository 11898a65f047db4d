"""Owners of matrices beside the optimum of an integer program, and the memory of their rounds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from mcr_plus.errors import InvalidArgument
from mcr_plus.layout.layout import Layout
from mcr_plus.owners.balance import assign, cost_function, muon_cost
from mcr_plus.owners.matrices import OwnedMatrix, plan_memory

SIZES = (64, 128, 256, 384, 512, 768, 1024)


class Instance(NamedTuple):
    costs: list[float]
    candidates: list[list[int]]


def instance(seed: int) -> Instance:
    """Costs of several kinds; in every third instance, some matrices have two candidates alone."""
    chance = random.Random(seed)
    ranks = chance.choice([2, 3, 4, 5, 6])
    count = chance.randint(1, 4 * ranks)
    kinds: tuple[Callable[[], float], ...] = (
        lambda: chance.uniform(1, 10),
        lambda: muon_cost((chance.choice(SIZES), chance.choice(SIZES))),
        lambda: float(chance.choice([3, 4, 5, 7, 11, 12, 24])),
    )
    kind = chance.choice(kinds)
    whole = list(range(ranks))
    few = [
        sorted(chance.sample(whole, 2)) if seed % 3 == 0 and chance.random() < 0.3 else whole
        for _ in range(count)
    ]
    return Instance([kind() for _ in range(count)], few)


def optimum(one: Instance) -> float:
    """Lower bound, by at most 1 %, of the fullest rank's load: no load exceeds the last variable."""
    ranks = sorted({rank for few in one.candidates for rank in few})
    pairs = [(index, rank) for index, few in enumerate(one.candidates) for rank in few]
    rows: list[Any] = []
    for index in range(len(one.costs)):
        row = [float(index == each) for each, _ in pairs]
        rows.append(LinearConstraint([*row, 0.0], 1, 1))
    for rank in ranks:
        row = [one.costs[each] if rank == owner else 0.0 for each, owner in pairs]
        rows.append(LinearConstraint([*row, -1.0], -np.inf, 0))
    bounds: Any = Bounds
    least = max(sum(one.costs) / len(ranks), *one.costs)
    found = milp(
        [*[0.0] * len(pairs), 1.0],
        constraints=rows,
        integrality=[*[1] * len(pairs), 0],
        bounds=bounds([*[0.0] * len(pairs), least], [*[1.0] * len(pairs), np.inf]),
        options={"mip_rel_gap": 1e-2, "time_limit": 20},
    )
    return float(found.mip_dual_bound)


def check_near_optimum(seeds: Sequence[int]) -> None:
    for seed in seeds:
        one = instance(seed)
        owners = assign(one.costs, one.candidates)
        assert all(owner in few for owner, few in zip(owners, one.candidates, strict=True)), seed
        loads: Counter[int] = Counter()
        for owner, cost in zip(owners, one.costs, strict=True):
            loads[owner] += cost  # type: ignore[assignment]
        assert max(loads.values()) <= 1.05 * optimum(one), seed


def test_fullest_rank_is_near_the_optimum() -> None:
    check_near_optimum(range(30))


@pytest.mark.long
def test_fullest_rank_is_near_the_optimum_of_1000() -> None:
    check_near_optimum(range(30, 1030))


def test_owners_of_many_matrices_on_many_ranks() -> None:
    shapes = [(4096, 4096), (4096, 1024), (1024, 4096), (14336, 4096), (4096, 14336)] * 80
    costs = [muon_cost(shape) for shape in shapes]
    for ranks in (8, 512, 4096):
        owners = assign(costs, [range(ranks)] * len(costs))
        loads: dict[int, float] = {}
        for owner, cost in zip(owners, costs, strict=True):
            loads[owner] = loads.get(owner, 0.0) + cost
        assert max(loads.values()) <= 1.05 * max(sum(costs) / ranks, *costs)


@pytest.mark.parametrize(("shape", "flops"), [((2, 3), 5 * (4 * 12 + 16)), ((3, 2), 5 * (4 * 12 + 16))])
def test_cost_of_muon_counts_its_products(shape: tuple[int, int], flops: int) -> None:
    assert muon_cost(shape) == flops


def test_cost_is_a_name_or_a_function() -> None:
    assert cost_function(max) is max
    with pytest.raises(
        InvalidArgument, match=r"expected 'muon' or a function of a matrix's shape .* got 'soap'"
    ):
        cost_function("soap")


def matrices(seed: int, ranks: int) -> list[OwnedMatrix]:
    chance = random.Random(seed)
    found = []
    for index in range(chance.randint(1, 12)):
        shape = chance.randint(1, 40), chance.randint(1, 40)
        is_whole = chance.random() < 0.2
        layout = (
            Layout.replicated(shape, range(ranks))
            if is_whole
            else Layout.sharded(shape, range(ranks), chance.randrange(2))
        )
        parameter = torch.nn.Parameter(torch.empty(shape, device="meta"))
        owner = chance.randrange(ranks)
        found.append(OwnedMatrix(f"w{index}", parameter, layout, 1.0, owner, is_whole))
    return found


def test_rounds_have_each_matrix_once_and_fit_into_the_memory() -> None:
    ahead = set()
    for seed in range(300):
        ranks = random.Random(seed).randint(1, 4)
        given = matrices(seed, ranks)
        for limit in (None, 1 << 20, 200_000, 60_000, 30_000):
            try:
                plan = plan_memory(given, limit)
            except InvalidArgument:
                assert limit is not None
                continue
            assert sorted(each.name for few in plan.rounds for each in few) == sorted(
                each.name for each in given
            )
            assert limit is None or plan.nbytes <= limit
            ahead.add((plan.keeps_weights, min(plan.ahead, 2)))
            kept = 0
            for rank in range(ranks):
                moved = [each for each in given if each.owner == rank and not each.is_whole]
                kept = max(kept, sum(each.nbytes for each in moved))
                for few in plan.rounds:
                    whole = sum(each.nbytes for each in few if each in moved)
                    assert whole * (1 if plan.keeps_weights else 2) <= plan.slot
            assert plan.kept == (kept if plan.keeps_weights else 0)
    assert ahead >= {(True, 0), (True, 1), (True, 2), (False, 0)}


def test_matrices_above_the_memory_are_named() -> None:
    parameter = torch.nn.Parameter(torch.empty(512, 300, device="meta"))
    layout = Layout.sharded((512, 300), range(2), 0)
    given = [OwnedMatrix("wide", parameter, layout, 1.0, 0, False)]
    with pytest.raises(
        InvalidArgument, match=r"memory: 1 MiB is too little; .* wide 2\.38 MiB on their owners"
    ):
        plan_memory(given, 1 << 20)
