"""The search for buckets against every plan there is; the course of a step against small steps of time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiers import examples

from mcr_plus.bucketing.buckets import units_of
from mcr_plus.bucketing.costs import BucketCurve, prices
from mcr_plus.bucketing.scaling import ClusterCosts, from_table
from mcr_plus.bucketing.search import Prices, rest, search
from mcr_plus.bucketing.simulate import simulate
from mcr_plus.bucketing.step import CapturedStep, ComputeEvent, IssueEvent, ReadyEvent, Role, WaitEvent
from mcr_plus.bucketing.topology import Topology
from mcr_plus.tables.table import parse_table

Floats = NDArray[np.float64]


def some_prices(draw: random.Random, count: int, choices: int) -> Prices:
    """Return random prices that follow no curve, so they are not monotone in size."""
    seconds = np.full((choices, count + 1, count + 1), np.inf)
    shares = np.zeros_like(seconds)
    for choice, i, j in product(range(choices), range(count), range(1, count + 1)):
        if i < j and (choice == 0 or draw.random() < 0.8):
            seconds[choice, i, j] = draw.choice([0.01, 0.1, 0.1, 1.0]) * draw.random()
            shares[choice, i, j] = draw.choice([0.0, 0.5, draw.random(), 1.0])
    return Prices(seconds, shares, draw.choice([0.0, 0.02]))


def every_plan(count: int, choices: int) -> Iterator[list[tuple[int, int, int]]]:
    for cuts in product([False, True], repeat=count - 1):
        ends = [at + 1 for at, cut in enumerate(cuts) if cut] + [count]
        parts = list(zip([0, *ends], ends, strict=False))
        for taken in product(range(choices), repeat=len(parts)):
            yield [(i, j, choice) for (i, j), choice in zip(parts, taken, strict=True)]


def end_of(plan: Sequence[tuple[int, int, int]], ready: Sequence[float], compute: float, of: Prices) -> float:
    """Return the end of a step by the model's definition in words."""
    free = delay = 0.0
    for i, j, choice in plan:
        time = float(of.seconds[choice, i, j])
        free = max(free, ready[j - 1] + delay) + time
        delay += float(of.shares[choice, i, j]) * time + of.overhead
    return max(free, compute + delay)


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_ends_before_the_one_that_is_found(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(examples(20)):
        count, choices = draw.randint(1, 6), draw.randint(1, 3)
        ready = sorted(draw.random() for _ in range(count))
        compute = ready[-1] + draw.choice([0.0, 0.3 * draw.random()])
        of = some_prices(draw, count, choices)
        found = search(ready, compute, of)
        best = min(
            end_of(plan, ready, compute, of)
            for plan in every_plan(count, choices)
            if all(np.isfinite(of.seconds[choice, i, j]) for i, j, choice in plan)
        )
        assert found.step == pytest.approx(best, rel=1e-12)
        assert end_of(found.buckets, ready, compute, of) == pytest.approx(found.step, rel=1e-12)
        assert found.exact
        assert rest(np.array(ready), compute, of.seconds, of.lost).bound <= best * (1 + 1e-12)


def test_search_that_drops_labels_has_a_gap_and_ends_within_it() -> None:
    draw = np.random.default_rng(3)
    ready = np.sort(draw.random(60))
    curves = [
        BucketCurve.through({10**3: (1e-3, share), 10**6: (time, share)})
        for time, share in ((0.02, 0.4), (0.03, 0.1))
    ]
    of = prices(draw.integers(1000, 10**6, 60).tolist(), 64, curves, 1e-4)
    few, many = search(ready, 1.1, of, 2), search(ready, 1.1, of, 4000)
    assert many.exact
    assert not few.exact
    assert many.bound <= many.step <= few.step
    assert few.bound <= few.least <= many.step  # dropped states only lead to ends from there on
    assert few.step == pytest.approx(few.least * (1 + few.gap))
    assert many.gap == 0.0


def test_a_search_keeps_as_many_labels_as_there_is_time_for() -> None:
    draw = np.random.default_rng(5)
    ready = np.sort(draw.random(80))
    curves = [
        BucketCurve.through({10**3: (1e-3, 0.4), 10**6: (0.02, 0.4)}),
        BucketCurve.through({10**3: (2e-3, 0.1)}),
    ]
    of = prices(draw.integers(1000, 10**6, 80).tolist(), 64, curves, 1e-4)
    assert search(ready, 1.1, of, seconds=0.0).step == search(ready, 1.1, of, 8).step
    assert search(ready, 1.1, of).gap <= search(ready, 1.1, of, seconds=0.0).gap


def test_no_plan_of_eight_gradients_and_two_libraries_is_better() -> None:
    draw = random.Random(8)
    for _ in range(examples(3)):
        ready = sorted(draw.random() for _ in range(8))
        of = some_prices(draw, 8, 2)
        known = [
            plan
            for plan in every_plan(8, 2)
            if all(np.isfinite(of.seconds[choice, i, j]) for i, j, choice in plan)
        ]
        best = min(end_of(plan, ready, ready[-1], of) for plan in known)
        found = search(ready, ready[-1], of)
        assert found.step == pytest.approx(best, rel=1e-12)
        assert found.exact
        few = search(ready, ready[-1], of, 2)
        assert few.least <= best * (1 + 1e-9)


def test_invalid_arguments_of_the_search_are_refused() -> None:
    of = prices([8, 8], 8, [BucketCurve.through({8: (1.0, 0.0)})], 0.0)
    with pytest.raises(ValueError, match="ascending"):
        search([1.0, 0.5], 1.0, of)
    with pytest.raises(ValueError, match="3, 3"):
        search([1.0, 1.0], 1.0, Prices(of.seconds[:, 1:, 1:], of.shares[:, 1:, 1:]))
    assert search([], 2.0, prices([], 8, [BucketCurve.through({8: (1.0, 0.0)})], 0.0)).buckets == []


def test_prices_are_those_of_aligned_buckets() -> None:
    """Gradients are aligned one by one: padding lies between gradients, not after the last."""
    sizes, alignment = [100, 64, 1, 300], 64
    curve = BucketCurve.through({1: (1.0, 0.0), 10**6: (10.0**6, 0.5)})  # a second per byte
    of = prices(sizes, alignment, [curve], 0.0)
    for i in range(4):
        for j in range(i + 1, 5):
            at = 0
            for size in sizes[i:j]:
                begin = -(-at // alignment) * alignment
                at = begin + size
            assert of.seconds[0, i, j] == pytest.approx(at)
    assert np.isinf(of.seconds[0, 2, 2])


def test_curves_are_monotone_and_extrapolated() -> None:
    curve = BucketCurve.through({100: (2.0, 0.1), 200: (1.0, 0.9), 400: (5.0, 3.0)})
    assert curve.times(np.array([10, 100, 200, 300, 400, 600])).tolist() == [2.0, 2.0, 2.0, 3.5, 5.0, 8.0]
    assert curve.losses(np.array([10, 150, 1000])).tolist() == pytest.approx([0.1, 0.5, 1.0])


# -- the course ---------------------------------------------------------------------------------------------


def course_in_steps(
    marks: Sequence[float], compute: float, last: Sequence[int], seconds: Sequence[float],
    shares: Sequence[float], overhead: float, step: float,
) -> tuple[float, float]:  # fmt: skip
    """Return the end of computing and of everything, by steps of time; progress by a thread."""
    now = done = extra = computed = 0.0
    issued = running = begun = 0
    left = 0.0
    while done < compute + extra or begun < len(last) or running:
        while issued < len(last) and done >= marks[last[issued]] + extra:
            issued, extra = issued + 1, extra + overhead
        if not running and begun < issued:
            running, left = 1, seconds[begun]
            begun += 1
        rate = 1 - shares[begun - 1] if running else 1.0
        if done < compute + extra:
            done += rate * step
            computed = now + step
        if running:
            left -= step
            running = int(left > 0)
        now += step
    return computed, now


@pytest.mark.parametrize("seed", range(6))
def test_the_course_of_a_plan_is_between_the_bound_and_the_model(seed: int) -> None:
    """The model counts the whole share of an operation at once, and nothing beats the bound."""
    draw = random.Random(100 + seed)
    for _ in range(examples(10)):
        count = draw.randint(1, 6)
        ready = sorted(draw.random() for _ in range(count))
        compute = ready[-1] + draw.random() / 5
        of = some_prices(draw, count, 2)
        least = rest(np.array(ready), compute, of.seconds, of.lost).bound
        for plan in every_plan(count, 2):
            parts = [(of.seconds[choice, i, j], of.shares[choice, i, j]) for i, j, choice in plan]
            if not all(np.isfinite(time) for time, _ in parts):
                continue
            last = np.array([j - 1 for _, j, _ in plan])
            seconds, shares = (np.array(each) for each in zip(*parts, strict=True))
            step = simulate(np.array(ready), compute, last, seconds, shares, overhead=of.overhead).step
            assert least * (1 - 1e-9) <= step <= end_of(plan, ready, compute, of) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_the_course_is_that_of_small_steps(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(examples(10)):
        count = draw.randint(1, 8)
        marks = sorted(draw.random() for _ in range(count))
        last = sorted(draw.sample(range(count), draw.randint(1, count)))
        seconds = [draw.choice([0.02, 0.2]) * draw.random() + 0.01 for _ in last]
        shares = [draw.choice([0.0, 0.3, 0.9]) for _ in last]
        compute, overhead = 1.0 + draw.random() / 5, draw.choice([0.0, 0.01])
        course = simulate(
            np.array(marks), compute, np.array(last), np.array(seconds), np.array(shares), overhead=overhead
        )
        computed, ended = course_in_steps(marks, compute, last, seconds, shares, overhead, 1e-4)
        room = 1e-4 * (3 + 2 * len(last))
        assert course.computed == pytest.approx(computed, abs=room)
        assert course.step == pytest.approx(max(computed, ended), abs=room)


def test_closed_forms_of_the_course() -> None:
    none, marks = np.zeros(0), np.array([1.0, 2.0, 3.0])
    assert simulate(marks, 4.0, np.zeros(0, np.int64), none, none).step == 4.0
    one = simulate(marks, 4.0, np.array([2]), np.array([5.0]), np.array([0.5]))  # from 3 to 8
    assert (one.computed, one.step, one.exposed) == (5.0, 8.0, 3.0)
    # Operations run one after another as gradients become ready: the channel is never idle.
    each = simulate(marks, 3.0, np.arange(3), np.full(3, 2.0), np.zeros(3))
    assert each.starts.tolist() == [1.0, 3.0, 5.0]
    assert each.step == 7.0
    # A caller that computes from 1 to 3 starts the second operation there, and not when the first ends.
    two = np.array([1.0, 1.0, 3.0])
    late = simulate(two, 3.0, np.array([0, 1]), np.full(2, 0.5), np.zeros(2), by_caller=True)
    soon = simulate(two, 3.0, np.array([0, 1]), np.full(2, 0.5), np.zeros(2))
    assert late.starts.tolist() == [1.0, 3.0]
    assert soon.starts.tolist() == [1.0, 1.5]
    other = simulate(two, 3.0, np.array([0, 1]), np.full(2, 0.5), np.zeros(2), by_caller=[True, False])
    assert other.starts.tolist() == [1.0, 1.5]  # a library with threads of its own needs no caller
    # The share of the whole core: nothing is computed meanwhile.
    full = simulate(np.array([1.0]), 2.0, np.array([0]), np.array([0.75]), np.array([1.0]))
    assert full.computed == 2.75


def test_a_gradient_that_is_ready_twice_counts_with_its_last_part() -> None:
    """A gradient that accumulates is ready twice; the search needs ascending times."""
    issue = IssueEvent(0, "all_reduce", 8, (0, 1), "g", None, ("b", "a"))
    times: list[Any] = [
        ReadyEvent("b", 4, "x"),
        ComputeEvent("", 1.0),
        ReadyEvent("a", 4, "x"),
        ComputeEvent("", 2.0),
        ReadyEvent("b", 4, "x"),
    ]
    (unit,) = units_of(CapturedStep(2, 1, "", 3.0, 0.0, (Role((0, 1), (*times, issue, WaitEvent(0))),)))
    assert list(unit.ready.items()) == [("a", 1.0), ("b", 3.0)]
    assert list(unit.sizes) == ["a", "b"]


def test_gradients_have_the_time_until_the_program_waits_for_them() -> None:
    """The program waits for other operations, too, before and after this wait."""
    events = (
        ComputeEvent("forward", 1.0), IssueEvent(0, "all_reduce", 4, (0, 1), "loss"), WaitEvent(0),
        ComputeEvent("backward", 2.0), ReadyEvent("b", 8, "float32 cpu"), ComputeEvent("backward", 3.0),
        ReadyEvent("a", 4, "float32 cpu"), IssueEvent(1, "all_reduce", 12, (0, 1), None, None, ("b", "a")),
        IssueEvent(2, "all_reduce", 4, (0, 1), "norm"), ComputeEvent("metrics", 4.0), WaitEvent(1),
        ComputeEvent("step", 5.0), WaitEvent(2), ComputeEvent("end", 6.0),
    )  # fmt: skip
    (unit,) = units_of(CapturedStep(2, 1, "", 21.0, 0.0, (Role((0, 1), events),)))
    assert unit.ready == {"b": 3.0, "a": 6.0}
    assert (unit.until, unit.computed) == (10.0, 21.0)


def test_an_operation_takes_at_most_a_whole_core() -> None:
    """The limit holds even if an operation in the background took longer than a synchronous one."""
    table = parse_table(
        """version: 1
fingerprint: {ranks: 2, nodes: 1, ranks_per_node: 2}
rules:
  - {kind: all_reduce, async: false, bytes: 0.., backend: gloo, measured: {gloo: {1KiB: 100, 1MiB: 1000}}}
  - {kind: all_reduce, async: true, bytes: 0.., backend: gloo, measured: {gloo: {1KiB: 120, 1MiB: 250}}}
"""
    )
    known = ClusterCosts(from_table(table), Topology.of({"nodes": 1, "ranks_per_node": 2}))
    shares = [known.of("all_reduce", size, (0, 1), "gloo").share for size in (1 << 10, 1 << 20)]
    assert shares == [1.0, 0.25]
