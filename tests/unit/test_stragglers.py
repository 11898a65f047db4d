"""Who is late at recorded operations: against a brute-force oracle, and who is named."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcr_plus.board.base import RING
from mcr_plus.board.shared import SharedBoard, arrival_times, map_shared
from mcr_plus.core.group import Group
from mcr_plus.observe.stragglers import LATE, ArrivalCollector, Stragglers


def add(
    to: ArrivalCollector,
    number: int,
    known: tuple[list[float], list[float]] | None,
    *,
    ranks: tuple[int, ...],
    group: str = "world",
    tag: str | None = None,
    line: int = 1,
) -> float | None:
    signature: Any = SimpleNamespace(kind="all_reduce", tag=tag)
    return to.add(Group(group, ranks, 0), signature, number, known, ("train.py", line, "step"))


def oracle(steps: list[tuple[list[float], list[float]]]) -> list[float]:
    """Seconds by which each rank is late by its own doing, in all."""
    ranks = range(len(steps[0][0]))
    totals = [0.0] * len(ranks)
    for (before, waited_before), (arrivals, waited) in pairwise(steps):
        own = [arrivals[r] - before[r] - (waited[r] - waited_before[r]) for r in ranks]
        for rank in ranks:
            others = [other for other in ranks if other != rank]
            skew = arrivals[rank] - median(arrivals[other] for other in others)
            excess = own[rank] - median(own[other] for other in others)
            late = min(skew, excess)
            totals[rank] += late if late >= LATE else 0.0
    return totals


def simulated(
    ranks: int, steps: int, late: dict[int, float], noise: float, seed: int
) -> list[tuple[list[float], list[float]]]:
    """Steps that end with an operation in which all wait for the last: arrivals, and waits before."""
    random = np.random.default_rng(seed)
    now, waited = [100.0] * ranks, [0.0] * ranks
    found = []
    for _ in range(steps):
        arrivals = [
            time + 0.05 + late.get(rank, 0.0) + abs(random.normal(0, noise)) for rank, time in enumerate(now)
        ]
        found.append((list(arrivals), list(waited)))
        ends = max(arrivals)
        waited = [before + ends - time for before, time in zip(waited, arrivals, strict=True)]
        now = [ends] * ranks
    return found


def evaluated(steps: list[tuple[list[float], list[float]]], order: list[int] | None = None) -> Stragglers:
    ranks = tuple(range(10, 10 + len(steps[0][0])))
    arrivals = ArrivalCollector()
    for index in order or range(len(steps)):
        add(arrivals, index + 1, steps[index], ranks=ranks)
    return arrivals.stragglers(100.0, max(steps[-1][0]) - 100.0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_lateness_is_that_of_the_oracle(ranks: int) -> None:
    steps = simulated(ranks, 1300, {1: 0.02}, 0.01, ranks)
    rows = {row.rank - 10: row for row in evaluated(steps).rows}
    for rank, expected in enumerate(oracle(steps)):
        assert rows[rank].seconds == pytest.approx(expected, abs=1e-6)
        assert rows[rank].count == len(steps)
        assert rows[rank].site == "train.py:1, in step"
        assert rows[rank].longest <= rows[rank].seconds + 1e-9


def test_operations_that_complete_in_another_order() -> None:
    steps = simulated(3, 200, {0: 0.03}, 0.01, 5)
    order = list(np.random.default_rng(1).permutation(200))
    rows, expected = evaluated(steps, order).rows, evaluated(steps).rows
    assert [row.rank for row in rows] == [row.rank for row in expected]
    assert [row.seconds for row in rows] == pytest.approx([row.seconds for row in expected])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(10))
def test_the_late_rank_is_named_and_nobody_else(ranks: int, seed: int) -> None:
    late = ranks - 1
    found = evaluated(simulated(ranks, 20, {late: 0.2}, 0.01, seed))
    assert [each.rank for each in found] == [10 + late]
    assert found[0].share == pytest.approx(0.8, abs=0.1)
    assert found[0].events >= 18
    assert found[0].sites[0].mean == pytest.approx(0.2, rel=0.2)
    assert f"rank {10 + late} keeps the others waiting for" in str(found)
    assert evaluated(simulated(ranks, 20, {}, 0.01, seed)) == []


def test_two_ranks_of_many_may_be_late() -> None:
    found = evaluated(simulated(8, 40, {2: 0.2, 5: 0.1}, 0.002, 0))
    assert [each.rank for each in found] == [12, 15]
    calm = evaluated(simulated(2, 40, {}, 0.0, 0))
    assert calm == []
    assert "no rank is late all the time" in str(calm)


def test_a_delay_once_makes_no_straggler() -> None:
    steps = simulated(2, 100, {}, 0.001, 3)
    arrivals, waited = steps[50]
    later = [([times[0] + 3.0, times[1] + 3.0], [before[0], before[1] + 3.0]) for times, before in steps[51:]]
    steps = [*steps[:50], ([arrivals[0] + 3.0, arrivals[1]], waited), *later]
    found = evaluated(steps)
    assert found == []
    assert found.rows[0].longest == pytest.approx(3.0, abs=0.01)


def test_a_rank_delayed_elsewhere_is_not_late_by_itself() -> None:
    """Rank 0 is late in the group of 0 and 1, so rank 1 arrives late in the group of 1 and 2."""
    arrivals = ArrivalCollector()
    now = 100.0
    waited = [0.0, 0.0, 0.0]
    for step in range(1, 31):
        add(arrivals, step, ([now + 0.1, now + 0.01], waited[:2]), ranks=(0, 1), group="a")
        waited[1] += 0.09
        add(arrivals, step, ([now + 0.11, now + 0.02], waited[1:]), ranks=(1, 2), group="b")
        waited[2] += 0.09
        now += 0.2
    found = arrivals.stragglers(100.0, now - 100.0)
    assert [each.rank for each in found] == [0]


def test_operations_without_all_arrivals_are_counted() -> None:
    arrivals = ArrivalCollector()
    assert add(arrivals, 1, ([1.0, math.nan], [0.0, 0.0]), ranks=(0, 1)) is None
    assert add(arrivals, 1, None, ranks=(0, 1)) is None
    assert add(arrivals, 2, ([1.0, 1.5], [0.0, 0.0]), ranks=(0, 1)) == pytest.approx(0.5)
    assert add(arrivals, 3, ([1.0, 4.0, 2.0], [0.0] * 3), ranks=(0, 1, 2)) == pytest.approx(2.0)
    found = arrivals.stragglers(0.0, 10.0)
    assert (found.compared, found.left_out) == (2, 2)
    assert "at 2 operations, without 2 of which not all are known" in str(found)


def test_boards_hold_the_arrivals_of_the_latest_operations() -> None:
    store: dict[str, bytes] = {}
    group = Group("world", (0, 1), 0)
    fake: Any = SimpleNamespace(set=lambda key, value: store.update({key: value.encode()}), get=store.get)
    memory, descriptor = map_shared(fake, group)
    assert memory is not None
    assert descriptor is not None
    os.close(descriptor)
    boards = [SharedBoard(memory, Group("world", (0, 1), rank)) for rank in range(2)]
    for number in (5, 70_000, 70_000 + RING):
        boards[0].arrive(number, 1000.25 + number, 1.5)
        times, waited = arrival_times(boards[1].arrival_words(number), number)
        assert times[0] == pytest.approx(1000.25 + number, abs=2e-6)
        assert math.isnan(times[1])
        assert waited[0] == pytest.approx(1.5, abs=2e-6)
    overwritten = arrival_times(boards[1].arrival_words(70_000), 70_000)
    assert math.isnan(overwritten[0][0])
