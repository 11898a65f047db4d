"""Tuning: statistics, the plan, the table that is made of it, and real runs on real ranks."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msccl_samples as samples
import pytest
from command import mcr_plus
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from test_cli import mcr_plus_process

import mcr_plus as mcr
from mcr_plus import registry
from mcr_plus.backends.gloo import GlooBackend
from mcr_plus.backends.msccl.writer import write_algorithm
from mcr_plus.cli.tune import _left_out
from mcr_plus.environment import cores
from mcr_plus.errors import ConfigError, Unsupported
from mcr_plus.interfaces import Channel, Poll, Start
from mcr_plus.launch import mpi_flavour, mpi_usable
from mcr_plus.message import Group, Message, Signature
from mcr_plus.selection.table import Query, load_table, parse_table
from mcr_plus.selection.writing import table_text
from mcr_plus.tuning.algorithms import check_sizes
from mcr_plus.tuning.derive import choose, crossover, derive, justified
from mcr_plus.tuning.load import busy_words, scatter_words, used_share
from mcr_plus.tuning.measure import Effort, Meter
from mcr_plus.tuning.operations import KINDS, Cell, Kind, Subject, whole_size
from mcr_plus.tuning.plan import Request, Task, impossible, next_task, stages
from mcr_plus.tuning.plot import plot_rows, plot_tuning
from mcr_plus.tuning.points import Point, PointFile, settled
from mcr_plus.tuning.statistics import Timing, bus_bandwidth, confidence_rank
from mcr_plus.tuning.worker import Job, _meter
from mcr_plus.units import Range, size_words

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
HERE = {"torch": ("2.13",), "ranks": ("2",)}


def timing(us: float) -> Timing:
    return Timing(us, us, us, us, us, 9)


# -- statistics -----------------------------------------------------------------------------------


def below(count: int, rank: int) -> float:
    """P(at most `rank` of `count` fair coins show heads)."""
    return float(sum(math.comb(count, k) for k in range(rank + 1)) / 2**count)


@pytest.mark.parametrize("count", range(1, 60))
def test_the_interval_is_the_narrowest_that_encloses_the_median_often_enough(count: int) -> None:
    rank = confidence_rank(count)
    assert 0 <= rank <= (count - 1) // 2
    if count >= 6:
        assert 2 * below(count, rank) <= 0.05 < 2 * below(count, rank + 1)
    else:
        assert rank == 0


def test_the_interval_encloses_the_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    hits = 0
    for _ in range(2000):
        found = Timing.of([draw.expovariate(1.0) for _ in range(15)])
        hits += found.low <= math.log(2) <= found.high
    assert hits >= 0.94 * 2000


def test_percentiles() -> None:
    found = Timing.of([float(value) for value in range(101)])
    assert (found.p20, found.p50, found.p80) == (20.0, 50.0, 80.0)
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0, 3.0, 3.0, 1)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("all_to_all", 0.75), ("broadcast", 1.0), ("send", 1.0)],
)
def test_bus_bandwidth(kind: str, factor: float) -> None:
    # 4 ranks, 1 GB in a second
    assert bus_bandwidth(kind, 10**9, 1e6, 4) == pytest.approx(factor)


# -- the plan -------------------------------------------------------------------------------------

REQUEST = Request(("all_reduce", "send"), 8, 1 << 20, 2, ("a", "b"))


def play(request: Request, time_of: dict[str, Any], limit: int = 10_000) -> list[Point]:
    """Follow the plan to its end, with invented times."""
    points: list[Point] = []
    for _ in range(limit):
        task = next_task(request, points)
        if task is None:
            return points
        for way, us in time_of.items():
            if way in request.ways_of(task.cell):
                points.append(Point(task.cell, way, task.overlap, timing(us(task.cell))))
    raise AssertionError("the plan does not end")


def alpha_beta(alpha: float, beta: float) -> Any:
    return lambda cell: alpha + beta * cell.nbytes


def test_all_sizes_come_before_any_refinement_and_rough_ones_first() -> None:
    points: list[Point] = []
    seen: list[Task] = []
    while (task := next_task(REQUEST, points)) is not None:
        seen.append(task)
        points += [Point(task.cell, way, task.overlap, timing(us)) for way, us in (("a", 1.0), ("b", 2.0))]
    assert len(seen) == len(set(seen)) == stages(REQUEST)
    powers = {1 << exponent for exponent in range(3, 21)}
    assert {task.cell.nbytes for task in seen} == powers
    assert {(t.cell.async_op, t.overlap) for t in seen if t.cell.kind == "all_reduce"} == {
        (False, False), (True, False), (True, True)
    }  # fmt: skip
    assert {(t.cell.async_op, t.overlap) for t in seen if t.cell.kind == "send"} == {(False, False)}
    rough = {8, 128, 2048, 32768, 524288, 1 << 20}
    assert [t.cell.nbytes for t in seen[:9]] == [1 << 20] * 3 + [8] * 3 + [2048] * 3
    first = seen[: 3 * len(rough)]
    assert all((task.cell.async_op, task.overlap) != (True, False) for task in seen[: -len(powers)])
    assert {task.cell.nbytes for task in first} == rough


def test_the_place_where_the_winner_changes_is_found() -> None:
    # 1 + n/1000 against 100 + n/10000: equal at 110,000 bytes
    request = Request(("all_reduce",), 8, 1 << 20, 2, ("a", "b"), asynchronous=False)
    ways = {"a": alpha_beta(1.0, 1e-3), "b": alpha_beta(100.0, 1e-4)}
    points = play(request, ways)
    odd = sorted({p.cell.nbytes for p in points if p.cell.nbytes & (p.cell.nbytes - 1)})
    assert odd
    assert all(65536 < size < 131072 for size in odd)
    table = derive(request, points, HERE, 1)
    assert [rule.backend for rule in table.rules] == ["a", "b", "built-in"]
    assert table.rules[1].lo == pytest.approx(110_000, rel=0.02)


def test_a_rule_against_the_medians_has_a_reason() -> None:
    """`a` is surely 5 % faster at one size, `b` perhaps 25 % at the other: less than a change must save."""
    points = [
        Point(Cell("all_reduce", size), way, False, Timing(us, us, us, us - scatter, us + scatter, 9))
        for size, way, us, scatter in (
            (1024, "a", 20.0, 0.0), (1024, "b", 21.0, 0.0), (2048, "a", 50.0, 30.0), (2048, "b", 40.0, 30.0)
        )
    ]  # fmt: skip
    request = Request(("all_reduce",), 1024, 2048, 2, ("a", "b"), asynchronous=False)
    rule, rest = derive(request, points, HERE, 1).rules
    assert (rule.backend, rest.backend) == ("a", "built-in")
    assert "scatter" in rule.reason
    assert rest.reason == ""
    plain = [replace(point, timing=timing(1.0)) if point.way == "a" else point for point in points]
    assert [rule.reason for rule in derive(request, plain, HERE, 1).rules] == ["", ""]


def test_a_disturbed_size_is_measured_again_and_the_median_counts() -> None:
    request = Request(("all_reduce",), 8, 1 << 12, 2, ("a",), asynchronous=False)
    visits: dict[int, int] = {}

    def disturbed(cell: Cell) -> float:
        visits[cell.nbytes] = visits.get(cell.nbytes, 0) + 1
        if cell.nbytes == 64:
            return 50.0 if visits[64] < 3 else 1.5  # twice by chance
        return {1024: 90.0, 256: 4.0}.get(cell.nbytes, 1.0 + cell.nbytes / 1000)  # once and for all

    points = play(request, {"a": disturbed})
    assert {size: count for size, count in visits.items() if count > 1} == {64: 4, 256: 5, 1024: 5}
    measured = derive(request, points, HERE, 1).rules[0].measured["a"]
    assert measured[64] == 1.5
    assert measured[256] == 4.0  # odd, but it may be so
    assert 1024 not in measured  # 30 times the time of 2048 bytes
    assert impossible(request, points) == ["all_reduce 1 KiB by a"]


def test_a_time_that_cannot_be_is_measured_again_before_anything_else() -> None:
    request = Request(("all_reduce", "broadcast"), 8, 1 << 15, 2, ("a",))
    tasks: list[Task] = []
    points: list[Point] = []
    while len(tasks) < 14 and (task := next_task(request, points)) is not None:
        tasks.append(task)
        waited = task.cell == Cell("all_reduce", 8)
        us = 0.05 if task.overlap and task.cell.nbytes > 8 else 9000.0 if waited else 30.0
        points.append(Point(task.cell, "a", task.overlap, timing(us)))
    places = [index for index, task in enumerate(tasks) if task.cell == Cell("all_reduce", 8)]
    assert places == list(range(places[0], places[0] + 5))
    again = [task for task, count in Counter(tasks).items() if count > 1]
    assert again == [Task(Cell("all_reduce", 8))]  # and not what is exposed, which need not grow


def test_rules_are_for_what_was_measured() -> None:
    """Nothing beyond, nothing between sizes far apart; without a size the largest measured one counts."""
    request = Request(("all_reduce", "all_gather", "barrier"), 8, 1 << 26, 2, ("a", "b"), asynchronous=False)
    sizes: dict[Kind, list[int]] = {
        "all_reduce": [8, 256, 1 << 20, 1 << 22], "all_gather": [1 << 16], "barrier": [0]
    }  # fmt: skip
    points = [
        Point(Cell(kind, size), way, False, timing(us))
        for kind, found in sizes.items() for size in found for way, us in (("a", 2.0), ("b", 1.0))
    ]  # fmt: skip
    table = derive(request, points, HERE, 1)
    assert [(rule.key.kind, rule.span(), rule.backend) for rule in table.rules] == [
        ("all_reduce", "0..512", "b"), ("all_reduce", "512B..512KiB", "built-in"),
        ("all_reduce", "512KiB..8MiB", "b"), ("all_reduce", "8MiB..", "built-in"),
        ("all_gather_v", "0..32KiB", "built-in"), ("all_gather_v", "32KiB..", "b"),
        ("all_gather", "0..32KiB", "built-in"), ("all_gather", "32KiB..128KiB", "b"),
        ("all_gather", "128KiB..", "built-in"), ("barrier", "0..", "b"),
    ]  # fmt: skip
    vector = table.lookup(Query("all_gather_v", None))
    assert vector is not None
    assert vector.backend == "b"


@pytest.mark.parametrize(
    ("shares", "spreads", "switches", "said"),
    [
        ([0.02, 0.05], [0.01] * 9 + [0.9], 1.0, []),
        ([0.02, 0.5], [0.01], 1.0, ["50% of the processor time of rank 1's host"]),
        ([0.0], [0.01, 0.4], 1.0, ["1 of 2 are known to no better than ± 25%"]),
        ([0.0], [], 300.0, ["300 times per second"]),
    ],
)
def test_a_machine_that_is_busy_or_figures_that_scatter_are_named(
    shares: list[float], spreads: list[float], switches: float, said: list[str]
) -> None:
    points = [
        Point(Cell("all_reduce", 8), "a", False, Timing(10, 10, 10, 10 - 10 * each, 10 + 10 * each, 9))
        for each in spreads
    ]
    words = [*busy_words(shares), *scatter_words(points, switches)]
    assert len(words) == len(said)
    assert all(expected in word for expected, word in zip(said, words, strict=True))


def test_used_share_sees_a_process_that_computes() -> None:
    spinning = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=-1)
    try:
        assert spinning.stdout is not None
        spinning.stdout.readline()
        assert used_share() > 0.5 / (os.cpu_count() or 1)
    finally:
        spinning.kill()
        spinning.wait()
        assert spinning.stdout is not None
        spinning.stdout.close()


def test_a_size_without_a_clear_winner_is_measured_three_times() -> None:
    request = Request(("all_reduce",), 8, 1 << 10, 2, ("a", "b"), asynchronous=False)
    points = play(request, {"a": lambda cell: 10.0, "b": lambda cell: 10.2 if cell.nbytes == 64 else 14.0})
    assert Counter(p.cell.nbytes for p in points if p.way == "b") == {
        size: 3 if size == 64 else 1 for size in (8, 16, 32, 64, 128, 256, 512, 1024)
    }


@pytest.mark.parametrize(
    ("times", "expected"),
    [([5.0], 5.0), ([5.0, 3.0], 3.0), ([5.0, 3.0, 4.0], 4.0), ([9.0, 1.0, 8.0, 2.0], 2.0), ([3.0, 3.0], 3.0)],
)
def test_the_median_of_repeated_measurements_counts(times: list[float], expected: float) -> None:
    points = [Point(Cell("all_reduce", 8, "float32"), "a", False, timing(us)) for us in times]
    other = Point(Cell("all_reduce", 16, "float32"), "a", False, timing(1.0))
    first, second = settled([other, *points])
    assert first is other
    assert second.timing is not None
    assert second.timing.p50 == expected


def test_a_library_that_comes_later_is_measured_and_one_that_goes_is_forgotten() -> None:
    """Whatever an earlier run compared: the table is about the libraries of this one, and complete."""
    both = Request(("all_reduce",), 8, 64, 2, ("a", "b"))
    alone = replace(both, ways=("a",))
    points = play(alone, {"a": alpha_beta(1.0, 0.0)})
    assert next_task(alone, points) is None
    again = next_task(both, points)
    assert again is not None
    assert again.cell.nbytes == 64
    points = play(both, {"a": alpha_beta(2.0, 0.0), "b": alpha_beta(1.0, 0.0)})
    assert {rule.backend for rule in derive(both, points, HERE, 1).rules} == {"b", "built-in"}
    table = derive(alone, points, HERE, 1)
    assert {rule.backend for rule in table.rules} == {"a", "built-in"}
    assert {way for rule in table.rules for way in rule.measured} == {"a"}
    whole = replace(both, asynchronous=False)
    assert {rule.key.async_op for rule in derive(whole, points, HERE, 1).rules} == {None}


def test_kinds_of_earlier_runs_stay_in_the_table() -> None:
    cells = [Cell("all_reduce", 8), Cell("broadcast", 8), Cell("broadcast", 8, "int8")]
    points = [Point(cell, "a", False, timing(1.0)) for cell in cells]
    table = derive(Request(("all_reduce",), 8, 8, 2, ("a",)), points, HERE, 1)
    assert [(rule.key.kind, rule.key.dtype) for rule in table.rules] == [
        ("broadcast", "int8"), ("broadcast", "int8"), ("all_reduce", None), ("all_reduce", None),
        ("broadcast", None), ("broadcast", None),
    ]  # fmt: skip


def test_a_way_that_is_always_wrong_ends_nothing_but_its_own_rules() -> None:
    request = Request(("all_reduce", "reduce"), 8, 8, 2, ("a",), asynchronous=False)
    right = Point(Cell("all_reduce", 8), "a", False, timing(1.0))
    wrong = Point(Cell("reduce", 8), "a", False, None, "wrong result on rank 1")
    assert next_task(request, [right, wrong]) is None
    assert {rule.key.kind for rule in derive(request, [right, wrong], HERE, 1).rules} == {"all_reduce"}
    with pytest.raises(Unsupported, match="reduce on a: wrong result on rank 1"):
        derive(request, [wrong], HERE, 1)


def test_a_way_once_wrong_stays_left_out() -> None:
    cell = Cell("all_reduce", 8, "float32")
    right, wrong = Point(cell, "a", False, timing(1.0)), Point(cell, "a", False, None, "wrong result")
    assert settled([right, wrong, right]) == [wrong]


def test_nothing_is_refined_where_winners_agree() -> None:
    points = play(REQUEST, {"a": alpha_beta(1.0, 1e-3), "b": alpha_beta(2.0, 2e-3)})
    assert {p.cell.nbytes for p in points} == {1 << exponent for exponent in range(3, 21)}


@pytest.mark.parametrize(
    ("kind", "nbytes", "dtype", "ranks", "expected"),
    [
        ("all_reduce", 10, "float32", 3, 8),
        ("all_reduce", 1, "float64", 3, 8),
        ("all_gather", 64, "float32", 3, 60),
        ("all_to_all", 8, "float32", 3, 12),
        ("barrier", 64, "float32", 3, 0),
    ],
)
def test_whole_sizes(kind: str, nbytes: int, dtype: str, ranks: int, expected: int) -> None:
    assert whole_size(kind, nbytes, dtype, ranks) == expected


# -- the table ------------------------------------------------------------------------------------


def best_by_force(times: list[dict[str, float]], price: float) -> float:
    ways = sorted({way for each in times for way in each})
    return min(
        sum(math.log(each[way]) for each, way in zip(times, path, strict=True))
        + price * sum(a != b for a, b in pairwise(path))
        for path in product(ways, repeat=len(times))
    )


@given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_choice_is_the_cheapest_of_all(rows: list[list[float]]) -> None:
    times = [dict(zip("abc", row, strict=True)) for row in rows]
    chosen = choose(times)
    cost = sum(math.log(each[way]) for each, way in zip(times, chosen, strict=True))
    cost += math.log(1.05) * sum(a != b for a, b in pairwise(chosen))
    assert cost == pytest.approx(best_by_force(times, math.log(1.05)), abs=1e-9)


@given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=2), min_size=1, max_size=20))
def test_no_size_is_worse_than_the_price_of_two_changes(rows: list[list[float]]) -> None:
    times = [dict(zip("ab", row, strict=True)) for row in rows]
    for each, way in zip(times, choose(times), strict=True):
        assert each[way] <= min(each.values()) * 1.05**2 * (1 + 1e-9)


def test_noise_makes_no_patchwork() -> None:
    draw = random.Random(3)
    times = [{"a": 1 + 0.005 * draw.random(), "b": 1 + 0.005 * draw.random()} for _ in range(20)]
    assert len(set(choose(times))) == 1


def test_only_what_the_intervals_bear_out_counts_in_full() -> None:
    apart = justified({"a": Timing(1, 1.0, 1, 0.9, 1.1, 9), "b": Timing(3, 3.0, 3, 2.2, 4.0, 9)})
    assert apart["a"] == 1.0
    assert apart["b"] == pytest.approx(2.0 * 3**0.2)
    blurred = justified({"a": Timing(1, 1.0, 1, 0.5, 3.0, 9), "b": Timing(2, 2.0, 2, 0.9, 4.0, 9)})
    assert blurred["b"] == pytest.approx(2**0.2)


def test_an_advantage_within_the_noise_counts_where_it_is_everywhere() -> None:
    a, b = Timing(1, 1.0, 1, 0.8, 1.2, 9), Timing(1, 1.1, 1, 0.9, 1.3, 9)
    assert set(choose([justified({"b": b, "a": a}) for _ in range(5)])) == {"a"}
    once = [justified({"b": a, "a": b}) for _ in range(5)]
    once[2] = justified({"b": b, "a": a})
    assert set(choose(once)) == {"b"}


def test_a_crossover_lies_where_two_lines_meet() -> None:
    # 16 → 256 bytes: a from 1 to 16 µs, b constant 4 µs: a power law meets it at 64 bytes
    times = {16: {"a": timing(1.0), "b": timing(4.0)}, 256: {"a": timing(16.0), "b": timing(4.0)}}
    assert crossover(times, 16, 256, "a", "b") == 64


@settings(deadline=None)
@given(st.data())
def test_tables_are_whole_and_survive_a_file(data: st.DataObject) -> None:
    """Whatever was measured: the table passes its own checks and chooses a way that was measured there."""
    request = Request(("all_reduce", "all_to_all", "send"), 8, 4096, 2, ("gloo", "mpi"), ("float32", "int8"))
    points = []
    for kind in request.kinds:
        for dtype, (async_op, overlap), exponent in product(
            request.dtypes, request.manners(kind), range(3, 13, 3)
        ):
            for way in ("gloo", "mpi"):
                us = data.draw(st.floats(1, 8))  # more would be left out
                points.append(Point(Cell(kind, 1 << exponent, dtype, async_op), way, overlap, timing(us)))
    points = [p for p in points if p.way == "mpi" or p.cell.kind != "send"]
    table = derive(request, points, HERE, 1)
    again = parse_table(table_text(table), "t")
    assert [(r.backend, r.lo, r.hi, r.key) for r in again.rules] == [
        (r.backend, r.lo, r.hi, r.key) for r in table.rules
    ]
    for name in ("send", "recv"):
        rule = again.lookup(Query(name, 100, "float64"))
        assert rule is not None
        assert rule.backend == "mpi"


@settings(deadline=None)
@given(st.data())
def test_no_rule_holds_for_sizes_that_its_way_is_not_for(data: st.DataObject) -> None:
    """Whatever was measured, also when a file was for other sizes: a way for every size around the ends."""
    spans = {}
    for name in ("msccl:one", "msccl:two"):
        lo = data.draw(st.integers(0, 70_000))
        spans[name] = Range(lo, data.draw(st.none() | st.integers(lo + 1, 140_000)))
    ways, algorithms = data.draw(st.sampled_from([("mpi", "gloo"), ("mpi",)])), tuple(spans)
    kinds: tuple[Kind, ...] = ("all_reduce", "all_gather")
    request = Request(
        kinds, 8, 1 << 16, 2, ways, asynchronous=False,
        algorithms=dict.fromkeys(kinds, algorithms), spans=spans,
    )  # fmt: skip
    points = []
    for kind, exponent in product(kinds, data.draw(st.sets(st.integers(3, 16), min_size=1))):
        for way in (*ways, *algorithms):
            us = data.draw(st.floats(1, 8))  # more would be left out
            points.append(Point(Cell(kind, 1 << exponent), way, False, timing(us)))
    table = parse_table(table_text(derive(request, points, HERE, 1)), "t")
    edges = {0, 1 << 40, *(rule.lo for rule in table.rules)}
    edges |= {end for span in spans.values() for end in (span.lo, span.hi) if end is not None}
    for kind, size in product(kinds, sorted({max(edge + by, 0) for edge in edges for by in (-1, 0, 1)})):
        rule = table.lookup(Query(kind, size))
        assert rule is not None
        assert rule.backend not in spans or spans[rule.backend].covers(size)
        vector = table.lookup(Query(f"{kind}_v", None)) if kind == "all_gather" else None
        assert vector is None or vector.backend in ways


def test_the_next_best_takes_over_where_an_algorithm_ends() -> None:
    spans = {"msccl:mine": Range(100, 34_001)}
    request = Request(
        ("all_reduce",), 8, 1 << 16, 2, ("msccl", "mpi", "gloo"), asynchronous=False,
        algorithms={"all_reduce": ("msccl:mine",)}, spans=spans,
    )  # fmt: skip
    times = {
        "msccl": alpha_beta(3, 1e-3),
        "mpi": alpha_beta(2, 9e-3),
        "gloo": alpha_beta(200, 1e-3),
        "msccl:mine": alpha_beta(1, 1e-4),
    }
    points = play(request, times)
    tried = {p.cell.nbytes for p in points if p.way == "msccl:mine"}
    assert (min(tried), max(tried)) == (104, 1 << 15)
    rules = derive(request, points, HERE, 1).rules
    assert [(rule.backend, rule.lo, rule.hi) for rule in rules] == [
        ("mpi", 0, 100), ("msccl:mine", 100, 34_001), ("msccl", 34_001, 1 << 17),
        ("built-in", 1 << 17, None),
    ]  # fmt: skip


def test_sizes_that_nothing_can_do_are_left_to_the_built_in_preference() -> None:
    spans = {"msccl:mine": Range(0, 10)}
    algorithms: dict[Kind, tuple[str, ...]] = {"all_reduce": ("msccl:mine",)}
    request = Request(("all_reduce", "send"), 8, 64, 2, ("mpi",), algorithms=algorithms, spans=spans)
    cells: dict[Kind, str] = {"all_reduce": "msccl:mine", "send": "mpi"}
    points = [Point(Cell(kind, 8), way, False, timing(1.0)) for kind, way in cells.items()]
    rules = [rule for rule in derive(request, points, HERE, 1).rules if rule.key.kind == "all_reduce"]
    assert [(rule.backend, rule.hi) for rule in rules] == [
        ("msccl:mine", 10), ("built-in", None)
    ]  # fmt: skip


def test_rules_of_asynchronous_operations_follow_the_exposed_time() -> None:
    request = Request(("all_reduce",), 8, 8, 2, ("mpi", "gloo"))
    sync, later = Cell("all_reduce", 8), Cell("all_reduce", 8, async_op=True)
    times = [
        (sync, False, {"mpi": 1.0, "gloo": 9.0}),
        (later, False, {"mpi": 1.0, "gloo": 9.0}),
        (later, True, {"mpi": 1.0, "gloo": 0.1}),
    ]
    points = [Point(c, way, o, timing(us)) for c, o, found in times for way, us in found.items()]
    table = derive(request, points, HERE, 1)
    for async_op, backend in ((False, "mpi"), (True, "gloo")):
        rule = table.lookup(Query("all_reduce", 8, async_op=async_op))
        assert rule is not None
        assert rule.backend == backend
    without = derive(request, [p for p in points if not p.overlap], HERE, 1)
    rule = without.lookup(Query("all_reduce", 8, async_op=True))
    assert rule is not None
    assert rule.backend == "mpi"


def test_what_was_excluded_is_in_no_table() -> None:
    request = Request(("all_reduce",), 8, 8, 2, ("mpi", "gloo"), asynchronous=False)
    cell = Cell("all_reduce", 8)
    points = [Point(cell, "mpi", False, None, "wrong"), Point(cell, "gloo", False, timing(5.0))]
    table = derive(request, points, HERE, 1)
    assert [rule.backend for rule in table.rules] == ["gloo", "built-in"]
    assert "mpi" not in table.rules[0].measured


# -- points on disk -------------------------------------------------------------------------------

POINTS = [
    Point(Cell("all_reduce", 8), "mpi", False, Timing.of([1.0, 2.0, 3.0])),
    Point(Cell("send", 8, "int8"), "gloo", False, None, "wrong result on rank 1"),
]


def test_points_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    PointFile(path, HERE, fresh=False).add(POINTS)
    assert PointFile(path, HERE, fresh=False).points == POINTS
    assert PointFile(path, HERE, fresh=True).points == []
    assert PointFile(path, HERE, fresh=False).points == []


def test_a_line_cut_short_by_a_kill_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    PointFile(path, HERE, fresh=False).add(POINTS)
    path.write_text(path.read_text()[:-30])
    assert PointFile(path, HERE, fresh=False).points == POINTS[:1]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("nothing of ours\n", ":1: not a file of measurements"),
        ("[]\n", ":1: not a file of measurements"),
        ('{"version": 2, "fingerprint": {}}\n', "unknown version 2; known: 1"),
        ('{"version": 1, "fingerprint": {"ranks": ["4"]}}\n', "ranks: 2, measured with 4"),
        ('{"version": 1, "fingerprint": {}}\n{}\n{}\n', ":2: not a measurement"),
    ],
)
def test_other_files_are_refused_and_kept(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(what)):
        PointFile(path, HERE, fresh=False)
    assert path.read_text() == text


# -- on ranks -------------------------------------------------------------------------------------


class _WrongChannel:
    """gloo, but rank 1 finds its last element one too high."""

    def __init__(self, channel: Channel, group: Group) -> None:
        self._channel, self._group = channel, group

    def bind(self, signature: Signature) -> Start:
        start, spoils = self._channel.bind(signature), self._group.rank == 1

        def wrong(message: Message) -> Poll:
            poll = start(message)

            def finish() -> bool:
                if not poll():
                    return False
                if spoils:
                    message.outputs[0].view(-1)[-1] += 1
                return True

            return finish

        return wrong

    def close(self) -> None:
        self._channel.close()


class WrongBackend(GlooBackend):
    name = "wrong"

    def open(self, group: Group) -> Any:
        return _WrongChannel(super().open(group), group)


def measured(backends: list[str], kinds: list[str]) -> dict[str, Any]:
    """Runs on ranks: every kind, sync and async and overlapped; which ways were timed and which left out."""
    registry.register("backends", "wrong", WrongBackend)
    comm = mcr.init(
        {"version": 1, "backends": backends, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "20s"}}]}
    )
    everyone = list(range(comm.size))
    meter = Meter(lambda: mcr.new_group(everyone), mcr.new_group(everyone), Effort(3, 5, 0.5, 0.5))
    found: dict[str, Any] = {}
    for kind in kinds:
        for async_op, overlap in ((False, False), (True, False), (True, True)):
            if kind == "send" and async_op:
                continue
            cell = Cell(kind, whole_size(kind, 120, "float32", comm.size), "float32", async_op)  # type: ignore[arg-type]
            outcome = meter.measure(cell, [*backends, "tuned"], overlap=overlap)
            found[f"{kind} {async_op} {overlap}"] = [
                {way: time.p50 for way, time in outcome.timings.items()},
                outcome.excluded,
            ]
    mcr.finalize()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("via", [pytest.param("mpi", marks=needs_mpi), "torch"])
def test_every_kind_can_be_measured_and_ranks_agree(via: Any, ranks: int) -> None:
    backends = ["mpi", "gloo"] if via == "mpi" else ["gloo"]
    results = run_ranks(measured, ranks, args=[backends, list(KINDS)], via=via, timeout=240)
    assert all(result.value == results[0].value for result in results)
    assert len(results[0].value) == 3 * len(KINDS) - 2
    for name, (timings, excluded) in results[0].value.items():
        assert excluded == {}, name
        assert set(timings) == {*backends, "tuned"}
        assert all(0 < us < 1e6 for us in timings.values())


@needs_mpi
def test_a_way_with_wrong_results_is_left_out() -> None:
    kinds = ["all_reduce", "all_to_all"]
    for result in run_ranks(measured, 2, args=[["mpi", "wrong"], kinds], timeout=120):
        for timings, excluded in result.value.values():
            assert set(timings) == {"mpi", "tuned"}
            assert set(excluded) == {"wrong"}
            assert "wrong result on rank 1: 1 of 30 elements" in excluded["wrong"]


def verified(dtypes: list[str]) -> list[str]:
    """Runs on ranks: what verification finds wrong with torch's own gloo under mcr_plus, over dtypes."""
    with mcr.init(backends=["gloo"]) as comm:
        cells = [
            Cell(kind, whole_size(kind, 240, dtype, comm.size), dtype) for kind in KINDS for dtype in dtypes
        ]
        found = [(cell, Subject(comm, cell).verify("gloo")) for cell in cells]
        return [f"{cell}: {problem}" for cell, problem in found if problem is not None]


def test_verification_accepts_right_results_of_all_dtypes() -> None:
    dtypes = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int64", "bool"]
    for result in run_ranks(verified, 3, args=[dtypes], via="torch", timeout=120):
        assert result.value == []


# -- pictures -------------------------------------------------------------------------------------


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is saved."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    found: list[Any] = []
    save = figure.savefig

    def keep(self: Any, *args: Any, **options: Any) -> None:
        save(self, *args, **options)
        found.append(self)

    monkeypatch.setattr(figure, "savefig", keep)
    return found


def test_a_picture_says_what_the_table_says(figures: list[Any], tmp_path: Path) -> None:
    def point(way: str, size: int, time: float, kind: Kind = "all_reduce", **manner: bool) -> Point:
        cell = Cell(kind, size, "float32", manner.get("async_op", False))
        timing = Timing(time, time, time, time, time, 9)
        return Point(cell, way, manner.get("async_op", False), timing)

    sizes = [8 << power for power in range(8)]
    points = [point("a", size, 10.0 + (size > 100) * 50) for size in sizes]
    points += [point("b", size, 20.0) for size in sizes]
    points += [point("a", size, 7.0, async_op=True) for size in sizes]
    points += [point("a", 64, 3.0, "broadcast"), point("b", 64, 2.0, "broadcast")]
    request = Request(("all_reduce", "broadcast"), 8, 1 << 10, 2, ("a", "b"))
    table = derive(request, points, {"ranks": ("2",), "nodes": ("1",)}, 1)
    (change,) = {rule.lo for rule in table.rules if rule.backend == "b" and rule.key.kind == "all_reduce"}
    assert 64 < change <= 128
    assert plot_tuning(table, points, tmp_path / "t.png") == 3
    (figure,) = figures
    shown = {axis.get_title(): axis for axis in figure.axes if axis.get_visible()}
    assert list(shown) == ["all_reduce, sync", "all_reduce, async, exposed time", "broadcast, sync, 64 B"]
    axis = shown["all_reduce, sync"]
    assert [text.get_text() for text in axis.texts] == ["a", "b", size_words(change)]
    assert [label.get_text() for label in axis.get_xticklabels()][:2] == ["8 B", "32 B"]
    curves = [line for line in axis.lines if len(line.get_xdata()) > 2]
    assert [list(line.get_ydata()) for line in curves] == [[10.0] * 4 + [60.0] * 4, [20.0] * 8]
    for difference in ("color", "marker", "linewidth"):
        assert len({getattr(line, f"get_{difference}")() for line in curves}) == 2
    assert [label.get_text() for label in shown["broadcast, sync, 64 B"].get_xticklabels()] == [
        "a",
        "b\n(chosen)",
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]


def test_nothing_of_a_picture_is_cut_off(figures: list[Any], tmp_path: Path) -> None:
    ways = [f"msccl:some_long_algorithm_{number}" for number in range(12)]
    row = {"kind": "all_reduce", "ranks": 2, "dtype": "float32", "verified": True}
    times = {"p20_us": 1.0, "p50_us": 2.0, "p80_us": 3.0}
    rows = [{**row, **times, "backend": way, "bytes": size} for way in ways for size in (8, 16)]
    assert plot_rows(rows, tmp_path / "b.png") == 1
    (figure,) = figures
    image = matplotlib_image(tmp_path / "b.png")
    edge = [*image[0], *image[-1], *image[:, 0], *image[:, -1]]
    assert all((pixel[:3] == 1).all() for pixel in edge)  # white all around
    assert len(figure.legends[0].get_texts()) == len(ways)


def matplotlib_image(path: Path) -> Any:
    from matplotlib import image

    return image.imread(path)


# -- the commands ---------------------------------------------------------------------------------


def json_of(*words: str) -> Any:
    answer = mcr_plus_process(*words)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_tune_writes_a_table_and_goes_on_where_it_stopped(tmp_path: Path) -> None:

    table, plot = tmp_path / "t.yaml", tmp_path / "t.png"
    words = [
        "tune", "-n", "2", "-o", str(table), "--kinds", "all_reduce,all_to_all_single", "--max", "64",
        "--json", "--plot", str(plot),
    ]  # fmt: skip
    begun = mcr_plus_process(*words[:-3], "--budget", "1ms", "--fresh")
    assert begun.returncode == 0, begun.stderr
    assert (
        "with 1 of 16 combinations of operation, manner and size measured, none of all_to_all" in begun.stdout
    )
    assert begun.stderr.count("The machine was busy") <= 1
    first = json_of(*words, "--budget", "1ms")
    assert not first["complete"]
    assert table.is_file()
    second = json_of(*words)
    assert second["complete"]
    assert second["points"][: len(first["points"])] == first["points"]
    assert len(second["points"]) > len(first["points"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert {rule["kind"] for rule in second["rules"]} == {"all_reduce", "all_to_all_v", "all_to_all"}
    config = tmp_path / "p.yaml"
    config.write_text("version: 1\npipeline:\n  - select: {table: t.yaml}\n  - dispatch: {}\n")
    way = json_of("explain", "all_to_all", "32", "--config", str(config), "--json")
    assert way["table_rule"].startswith(str(table))
    assert way["expected_us"] > 0
    again = mcr_plus_process(*[word for word in words if word != "--json"])
    assert again.returncode == 0, again.stderr
    assert "what wins where" in again.stdout
    assert "< 128 B" in again.stdout
    assert re.search(
        rf"^{re.escape(str(table))}: \d+ rules? from \d+ measurements$", again.stderr, re.MULTILINE
    )
    assert f"{plot}: 4 panels, one for each operation and manner" in again.stderr


@needs_mpi
def test_inside_a_job_of_mpirun_the_command_is_a_rank(tmp_path: Path) -> None:
    launcher = mpi_flavour()
    assert launcher is not None
    words = ["tune", "-o", str(tmp_path / "t.yaml"), "--kinds", "barrier", "--no-async", "--json"]
    options = ["--allow-run-as-root", "--oversubscribe"] if launcher.flavour == "openmpi" else []
    command = [launcher.path, *options, "-n", "2", sys.executable, "-m", "mcr_plus.cli.main", *words]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    assert [rule["kind"] for rule in json.loads(answer.stdout)["rules"]] == ["barrier"]
    assert load_table(tmp_path / "t.yaml").fingerprint["ranks"] == ("2",)


def test_bench_prints_rows_of_the_contract(tmp_path: Path) -> None:
    rows = json_of(
        "bench", "-n", "2", "--kinds", "all_gather", "--min", "1KiB", "--max", "2KiB", "--against", "torch",
        "--plot", str(tmp_path / "b.svg"), "--json",
    )  # fmt: skip
    keys = {
        "kind", "backend", "bytes", "ranks", "dtype", "p20_us", "p50_us", "p80_us", "algbw_GBps",
        "busbw_GBps", "verified",
    }  # fmt: skip
    assert {frozenset(row) for row in rows} == {frozenset(keys)}
    assert {row["bytes"] for row in rows} == {1024, 2048}
    assert {"gloo", "tuned", "torch"} <= {row["backend"] for row in rows}
    for row in rows:
        assert row["verified"]
        assert 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        assert row["algbw_GBps"] == pytest.approx(row["bytes"] / row["p50_us"] / 1e3)
        assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"] / 2)
    assert (tmp_path / "b.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["tune", "-n", "2"], "Missing option"),
        (["tune", "-n", "1", "-o", "t.yaml"], "-n"),
        (["tune", "-o", "t.yaml"], "how many ranks"),
        (["tune", "-n", "2", "-o", "no/such/folder/t.yaml"], "no such folder"),
        (["tune", "-n", "2", "-o", "t.yaml", "--kinds", "all_redcue"], "did you mean 'all_reduce'"),
        (["tune", "-n", "2", "-o", "t.yaml", "--backends", "mip"], "did you mean 'mpi'"),
        (
            ["tune", "-n", "2", "-o", "t.yaml", "--backends", "gloo,msccl:nope"],
            "unknown algorithm 'nope'; known: ",
        ),
        (["tune", "-n", "2", "-o", "t.yaml", "--backends", "msccl:"], "'msccl:' names no algorithm"),
        (
            ["tune", "-n", "2", "-o", "t.yaml", "--backends", "gloo:ring"],
            "gloo has no algorithms to choose from",
        ),
        (["bench", "-n", "2", "--backends", "msccl:all_reduce_ring"], "did you mean 'ring'"),
        (["tune", "-n", "2", "-o", "t.yaml", "--min", "1MiB", "--max", "1KiB"], "--min"),
        (["tune", "-n", "2", "-o", "t.yaml", "--budget", "soon"], "expected a duration"),
        (["tune", "-n", "2", "-o", "t.yaml", "--plot", "t.gif"], "known: .png, .svg, .pdf"),
        (["tune", "-n", "2", "-o", "."], "expected a file, got the folder"),
        (["tune", "-n", "2", "-o", "t.yaml", "--measurements", "t.yaml"], "expected another file"),
        (["tune", "-n", "2", "-o", __file__], "was not written by mcr-plus tune, and would be lost"),
        (["bench", "-n", "2", "--against", "horovod"], "known: torch"),
        (["bench", "-n", "2", "--dtype", "float32,float16"], "expected one type"),
        (["bench", "-n", "2", "--min", "²"], "expected a size"),
        (["bench", "-n", "2", "--max", "64MB"], "wrong unit 'MB'"),
    ],
)
def test_bad_usage(words: list[str], what: str) -> None:
    answer = mcr_plus(*words)
    assert answer.returncode == 2, answer.stderr
    assert what in re.sub(r"[\s│]+", " ", answer.stderr)


@pytest.mark.parametrize(
    ("options", "at"),
    [
        (["-o"], "-o"),
        (["-o", "t.yaml", "--measurements"], "--measurements"),
        (["-o", "t.yaml", "--plot"], "--plot"),
    ],
)
def test_a_fifo_is_no_place_for_results(tmp_path: Path, options: list[str], at: str) -> None:
    fifo = tmp_path / "fifo.png"
    os.mkfifo(fifo)
    # In a process of its own, with a limit: opening it would wait for whoever reads.
    answer = mcr_plus_process("tune", "-n", "2", *options, str(fifo), cwd=tmp_path)
    assert answer.returncode == 2
    told = re.sub(r"[\s│]+", "", answer.stderr)
    assert f"Invalidvaluefor{at}" in told
    assert f"expectedaregularfile,got{fifo}" in told
    with pytest.raises(ConfigError, match="expected a regular file"):
        PointFile(fifo, HERE, fresh=False)


def test_files_of_algorithms_are_compared_and_a_table_says_that_it_needs_them(tmp_path: Path) -> None:
    """One that is only for small sizes, one for other ranks, one for one root."""
    ring = samples.ring(2)
    for name, algorithm in {
        "small": replace(ring, least=100, most=1000),
        "of-three": samples.ring(3),
        "chain": samples.chain(2, 0),
    }.items():
        write_algorithm(algorithm, tmp_path / f"{name}.xml")
    out = tmp_path / "t.yaml"
    useless = mcr_plus("tune", "-n", "2", "-o", out, "--backends", "gloo", "--algorithms", tmp_path)
    assert useless.returncode == 2
    assert "nothing runs algorithm files" in re.sub(r"[\s│]+", " ", useless.stderr)
    answer = mcr_plus_process(
        "tune", "-n", "2", "-o", str(out), "--kinds", "all_reduce,broadcast", "--max", "4KiB", "--no-async",
        "--algorithms", str(tmp_path), "--backends", "gloo,msccl:small,msccl:chain", "--budget", "60s",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    told = " ".join(answer.stderr.split())
    assert "of-three.xml: not compared; it is for all_reduce on 3 ranks" in told
    assert "chain.xml: not compared; it is for broadcast from or to rank 0 on 2 ranks" in told
    assert "small.xml" not in told
    chosen = [(rule.key.kind, rule.backend, rule.lo, rule.hi) for rule in load_table(out).rules]
    assert ("all_reduce", "msccl:small", 100, 1001) in chosen
    assert {backend for kind, backend, *_ in chosen if kind == "broadcast"} == {"gloo", "built-in"}
    needs = f"need algorithms: [{tmp_path / 'small.xml'}]"
    assert needs in " ".join(answer.stdout.split())
    assert needs in out.read_text()
    pipeline = tmp_path / "p.yaml"
    pipeline.write_text("version: 1\npipeline: [{select: {table: t.yaml}}, {dispatch: {}}]\n")
    assert re.search(r"t.yaml:\d+: backend 'msccl:small': unknown", mcr_plus("validate", pipeline).stderr)
    pipeline.write_text(f"{pipeline.read_text()}algorithms: [small.xml]\n")
    assert mcr_plus("validate", pipeline).returncode == 0


def test_sizes_that_nothing_compared_is_for_are_told_before_anything_is_measured() -> None:
    algorithms: dict[Kind, tuple[str, ...]] = {"all_reduce": ("msccl:one", "msccl:two")}
    request = Request(("all_reduce",), 8, 64, 2, (), algorithms=algorithms)
    for spans, missing in (
        ({"msccl:one": Range(8, 100), "msccl:two": Range(0, 50)}, "100 B"),
        ({"msccl:one": Range(8, 100), "msccl:two": Range(100)}, "0 B"),
        ({"msccl:one": Range(0, 0), "msccl:two": Range(0, 0)}, "0 B"),
    ):
        with pytest.raises(Unsupported, match=f"all_reduce: nothing in --backends is for {missing}"):
            check_sizes(replace(request, spans=spans))
        check_sizes(replace(request, spans=spans, ways=("gloo",)))
    check_sizes(replace(request, spans={"msccl:one": Range(0, 100), "msccl:two": Range(50)}))


def test_algorithms_alone_are_refused_for_a_kind_that_has_a_vector_form() -> None:
    named: dict[Kind, tuple[str, ...]] = dict.fromkeys(KINDS, ("msccl:direct", "msccl:two_level"))
    request = Request(("all_reduce", "all_to_all"), 8, 64, 2, (), algorithms=named)
    what = r"^all_to_all: nothing in --backends is for all_to_all_v, .* add a library: "
    with pytest.raises(Unsupported, match=what + "--backends msccl,msccl:direct,msccl:two_level$"):
        check_sizes(request)
    check_sizes(replace(request, ways=("msccl",)))
    check_sizes(replace(request, kinds=("all_reduce", "broadcast", "reduce")))


def test_a_kind_whose_vector_form_no_library_did_has_no_rules() -> None:
    """Those of its algorithm would be for vector operations too, and send them where they are refused."""
    named: dict[Kind, tuple[str, ...]] = {"all_to_all": ("msccl:direct",)}
    request = Request(("all_to_all", "send"), 8, 64, 2, ("gloo",), asynchronous=False, algorithms=named)
    failed = Point(Cell("all_to_all", 8), "gloo", False, None, "it failed")
    points = [failed, Point(Cell("all_to_all", 8), "msccl:direct", False, timing(1.0))]
    points.append(Point(Cell("send", 8), "gloo", False, timing(1.0)))
    assert {rule.key.kind for rule in derive(request, points, HERE, 1).rules} == {"send"}
    with pytest.raises(Unsupported, match="nothing to choose from: all_to_all on gloo: it failed"):
        derive(request, points[:2], HERE, 1)
    points[0] = Point(Cell("all_to_all", 8), "gloo", False, timing(2.0))
    rules = [(rule.key.kind, rule.backend) for rule in derive(request, points, HERE, 1).rules]
    assert rules[:2] == [("all_to_all_v", "gloo"), ("all_to_all", "msccl:direct")]


def test_what_was_left_out_is_said_once_for_each_reason() -> None:
    points = [
        Point(Cell("all_reduce", 8 << n), "a", False, None, f"{8 << n} B is too much") for n in range(4)
    ]
    points += [Point(Cell("all_reduce", 8), "a", True, None, "another reason")]
    assert _left_out(points) == [
        ("all_reduce", "a", "8 B to 64 B", "8 B is too much"),
        ("all_reduce", "a", "8 B", "another reason"),
    ]


def test_a_library_that_is_not_here_is_refused_before_ranks_are_started() -> None:
    if registry.BACKENDS["nccl"] and __import__("torch").cuda.is_available():
        pytest.skip("NCCL can be used here")
    answer = mcr_plus("tune", "-n", "2", "-o", "t.yaml", "--backends", "nccl")
    assert answer.returncode == 1
    assert "--backends: nccl cannot be used here: " in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


@needs_mpi
def test_figures_from_elsewhere_are_a_line_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "t.measurements.jsonl").write_text('{"version": 1, "fingerprint": {"cpu": ["Elbrus"]}}\n')
    answer = mcr_plus_process("tune", "-n", "2", "-o", str(tmp_path / "t.yaml"), "--kinds", "barrier")
    assert answer.returncode == 1
    assert "ConfigError" in answer.stderr
    assert "measured with Elbrus); name another file with --measurements, or use --fresh" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (tmp_path / "t.yaml").exists()


def cores_of_threads() -> tuple[list[int], list[list[int]]]:
    """Runs on ranks: the cores of the thread that measures, and those of all others, while it is bound."""
    job = Job("bench", ("barrier",), 8, 8, backends=("gloo",))
    with mcr.init(backends=["gloo"]) as comm:
        _meter(comm, job)
        own = threading.get_native_id()
        others = [int(name) for name in os.listdir("/proc/self/task") if int(name) != own]
        return sorted(os.sched_getaffinity(own)), [sorted(os.sched_getaffinity(each)) for each in others]


@pytest.mark.skipif(cores() < 2, reason="needs two cores")
def test_the_thread_that_measures_has_a_core_and_the_library_s_threads_all() -> None:
    (first, others), (second, _) = (
        result.value for result in run_ranks(cores_of_threads, 2, via="torch", timeout=60)
    )
    assert len(first) == len(second) == 1
    assert first != second
    assert others
    assert all(each == sorted(os.sched_getaffinity(0)) for each in others)


def test_points_are_json() -> None:
    assert [Point.from_document(json.loads(json.dumps(p.document()))) for p in POINTS] == POINTS
