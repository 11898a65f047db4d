"""Tuning: statistics, the plan, the resulting table, and real runs on real ranks."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msccl_samples as samples
import pytest
from command import mcr_plus, mcr_plus_process
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus import registry
from mcr_plus.backends.base import Channel, Poll, Start
from mcr_plus.backends.gloo.backend import GlooBackend
from mcr_plus.cli.output import rule_count
from mcr_plus.cli.tune import _left_out
from mcr_plus.core.environment import cores
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import Kind
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.units import Range, size_words
from mcr_plus.errors import ConfigError, Unsupported
from mcr_plus.msccl.writer import write_algorithm
from mcr_plus.rendezvous.mpi_launcher import mpi_flavour, mpi_usable
from mcr_plus.tables.statistics import Timing, bus_bandwidth, confidence_rank
from mcr_plus.tables.table import Query, load_table, parse_table
from mcr_plus.tables.writing import table_text
from mcr_plus.tuning import worker
from mcr_plus.tuning.algorithms import check_sizes
from mcr_plus.tuning.build_table import build_table, choose, crossover, justified
from mcr_plus.tuning.load import busy_words, scatter_words, used_share
from mcr_plus.tuning.measure import Effort, Meter
from mcr_plus.tuning.measurements import MeasurementFile, Sample, median_of_repeats
from mcr_plus.tuning.operations import KINDS, BenchCase, OpUnderTest, partner, whole_size
from mcr_plus.tuning.pace import Pace, left_out_sizes, sampling_seconds
from mcr_plus.tuning.plan import TableRequest, Task, coverage, impossible, next_task, rough_grid
from mcr_plus.tuning.plot import plot_rows, plot_tuning
from mcr_plus.tuning.worker import TuningJob, _meter, progress_line

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


def test_the_interval_encloses_the_median_at_its_confidence() -> None:
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

REQUEST = TableRequest(("all_reduce", "send"), 8, 1 << 20, 2, ("a", "b"))


def play(request: TableRequest, time_of: dict[str, Any], limit: int = 10_000) -> list[Sample]:
    """Follow the plan to its end, with invented times."""
    samples: list[Sample] = []
    for _ in range(limit):
        task = next_task(request, samples)
        if task is None:
            return samples
        for candidate, us in time_of.items():
            if candidate in request.candidates_for(task.case):
                samples.append(Sample(task.case, candidate, task.overlap, timing(us(task.case))))
    raise AssertionError("the plan does not end")


def alpha_beta(alpha: float, beta: float) -> Any:
    return lambda case: alpha + beta * case.nbytes


def test_coarse_sizes_precede_all_powers_of_two_and_refinement() -> None:
    samples: list[Sample] = []
    seen: list[Task] = []
    while (task := next_task(REQUEST, samples)) is not None:
        seen.append(task)
        samples += [
            Sample(task.case, candidate, task.overlap, timing(us))
            for candidate, us in (("a", 1.0), ("b", 2.0))
        ]
    assert len(seen) == len(set(seen)) == 18 * 4  # 18 powers, all_reduce in three manners
    assert coverage(REQUEST, samples) == (18 * 3, 18 * 3)  # whole times of async operations decide nothing
    powers = {1 << exponent for exponent in range(3, 21)}
    assert {task.case.nbytes for task in seen} == powers
    assert {(t.case.async_op, t.overlap) for t in seen if t.case.kind == "all_reduce"} == {
        (False, False), (True, False), (True, True)
    }  # fmt: skip
    assert {(t.case.async_op, t.overlap) for t in seen if t.case.kind == "send"} == {(False, False)}
    rough = {8, 128, 2048, 32768, 524288, 1 << 20}
    assert [t.case.nbytes for t in seen[:9]] == [8] * 3 + [1 << 20] * 3 + [2048] * 3
    first = seen[: 3 * len(rough)]
    assert all((task.case.async_op, task.overlap) != (True, False) for task in seen[: -len(powers)])
    assert {task.case.nbytes for task in first} == rough


WIDE = replace(REQUEST, largest=64 << 20)


def with_budget(
    budget: float, takes: Callable[[Task], float], monkeypatch: pytest.MonkeyPatch, samples: list[Sample]
) -> tuple[Pace, float]:
    """Run WIDE on a clock of its own; add to `samples`, and return the pace and the total seconds."""
    now = 0.0
    monkeypatch.setattr("mcr_plus.tuning.pace.time.monotonic", lambda: now)
    pace = Pace(WIDE, 0.1, budget)
    while (task := pace.next_task(samples)) is not None:
        now += takes(task)
        pace.took(task, takes(task))
        samples += [
            Sample(task.case, candidate, task.overlap, timing(us))
            for candidate, us in (("a", 1.0), ("b", 2.0))
        ]
    return pace, now


@pytest.mark.parametrize("slow", [1, 3, 10])  # how busy the machine is
def test_a_small_budget_covers_the_range_of_sizes_for_all_operations(
    slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest size would take it whole: ten seconds for each of three operations on the free machine."""
    samples: list[Sample] = []

    def takes(task: Task) -> float:
        return slow * (0.1 + task.case.nbytes * 10 / (64 << 20))

    pace, took = with_budget(20.0 * slow, takes, monkeypatch, samples)
    assert took <= 20.0 * slow + max(takes(Task(sample.case)) for sample in samples)
    by_kind = {
        (each.case.kind, each.overlap): {
            sample.case.nbytes
            for sample in samples
            if (sample.case.kind, sample.overlap) == (each.case.kind, each.overlap)
        }
        for each in samples
        if (each.case.async_op, each.overlap) != (True, False)
    }
    assert len(by_kind) == 2 + 1  # all_reduce's exposed times among them
    for sizes in by_kind.values():
        assert {8, 128, 2048, 32768, 524288, 8 << 20} <= sizes
    found = left_out_sizes(WIDE, samples, pace.expected)
    assert [each[0] for each in found] == [64 << 20]
    _, left, every, seconds = found[0]
    assert 2 <= left <= every == 3
    assert seconds == pytest.approx(left * takes(Task(BenchCase("send", 64 << 20))), rel=0.6)


def test_runs_with_small_budgets_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run measures something, however long it takes."""
    samples: list[Sample] = []
    runs = 0
    while next_task(WIDE, samples) is not None:
        before = len(samples)
        with_budget(1.0, lambda task: 0.1 + task.case.nbytes / (1 << 20), monkeypatch, samples)
        assert len(samples) > before
        runs += 1
    assert runs > 4


def test_a_continued_run_skips_tasks_longer_than_its_budget() -> None:
    tasks = chain.from_iterable(tasks for size, tasks in rough_grid(WIDE).items() if size < 1 << 20)
    samples = [
        Sample(task.case, candidate, task.overlap, timing(1.0)) for task in tasks for candidate in ("a", "b")
    ]
    for budget, size in ((1000.0, 64 << 20), (10.0, 8 << 20), (0.001, 64 << 20)):
        task = Pace(WIDE, 0.1, budget).next_task(samples)
        assert task is not None
        assert task.case.nbytes == size


def test_expected_times_follow_the_nearest_size() -> None:
    pace = Pace(WIDE, 0.1, None)
    small, large = Task(BenchCase("send", 8)), Task(BenchCase("send", 64 << 20))
    assert pace.left == math.inf
    free = pace.expected(small), pace.expected(large)
    assert 10 * free[0] < free[1]
    pace.took(small, 3 * free[0])
    assert (pace.expected(small), pace.expected(large)) == pytest.approx([3 * each for each in free])
    pace.took(large, 20 * free[1])
    assert (pace.expected(small), pace.expected(large)) == pytest.approx((3 * free[0], 20 * free[1]))
    assert pace.expected(Task(BenchCase("send", 32 << 20))) > 5 * free[1]


def test_a_small_budget_samples_for_a_shorter_time() -> None:
    """7 first sizes of three tasks each: half of the budget is for their samples."""
    assert sampling_seconds(WIDE, [], None, 0.6) == 0.6
    assert sampling_seconds(WIDE, [], 180.0, 0.6) == 0.6
    assert sampling_seconds(WIDE, [], 10.0, 0.6) == pytest.approx(10 / 21 / 2)
    assert sampling_seconds(WIDE, [], 0.1, 0.6) == 0.05
    done = [
        Sample(task.case, "a", task.overlap, timing(1.0))
        for tasks in rough_grid(WIDE).values()
        for task in tasks
    ]
    assert sampling_seconds(WIDE, done[:18], 1.0, 0.6) == pytest.approx(1 / 3 / 2)
    assert sampling_seconds(WIDE, done, 0.1, 0.6) == 0.6


def test_the_line_of_progress_names_its_unit() -> None:
    assert progress_line("bench", "send 8 B", "sizes", 3, 16) == "bench: send 8 B; 3 of 16 sizes"
    assert progress_line("tuning", "send 8 B", "combinations", 16, 16, 2).endswith(
        "; 16 of 16 combinations, and 2 further measurements"
    )


def test_rules_for_the_built_in_preference_are_counted_apart() -> None:
    kept = "- {kind: send, bytes: 8B..1KiB, backend: mpi}"
    left = "- {kind: send, bytes: 0..8B, backend: built-in}\n- {kind: send, bytes: 1KiB.., backend: built-in}"
    text = "version: 1\nrules:\n"
    assert (
        rule_count(parse_table(f"{text}{kept}\n{left}")) == "3 rules, 2 of them for the built-in preference"
    )
    assert rule_count(parse_table(text + kept.replace("8B..1KiB", "0.."))) == "1 rule"


def test_the_place_where_the_winner_changes_is_found() -> None:
    # 1 + n/1000 against 100 + n/10000: equal at 110,000 bytes
    request = TableRequest(("all_reduce",), 8, 1 << 20, 2, ("a", "b"), asynchronous=False)
    candidates = {"a": alpha_beta(1.0, 1e-3), "b": alpha_beta(100.0, 1e-4)}
    samples = play(request, candidates)
    odd = sorted({p.case.nbytes for p in samples if p.case.nbytes & (p.case.nbytes - 1)})
    assert odd
    assert all(65536 < size < 131072 for size in odd)
    table = build_table(request, samples, HERE, 1)
    assert [rule.backend for rule in table.rules] == ["a", "b", "built-in"]
    assert table.rules[1].lo == pytest.approx(110_000, rel=0.02)


def test_a_rule_against_the_medians_has_a_reason() -> None:
    """`a` is surely 5 % faster at one size, `b` perhaps 25 % at the other: less than a change must save."""
    samples = [
        Sample(BenchCase("all_reduce", size), candidate, False, Timing(us, us, us, us - scatter, us + scatter,
        9)) for size, candidate, us, scatter in (
            (1024, "a", 20.0, 0.0), (1024, "b", 21.0, 0.0), (2048, "a", 50.0, 30.0), (2048, "b", 40.0, 30.0)
        )
    ]  # fmt: skip
    request = TableRequest(("all_reduce",), 1024, 2048, 2, ("a", "b"), asynchronous=False)
    rule, rest = build_table(request, samples, HERE, 1).rules
    assert (rule.backend, rest.backend) == ("a", "built-in")
    assert "scatter" in rule.reason
    assert rest.reason == ""
    plain = [replace(sample, timing=timing(1.0)) if sample.candidate == "a" else sample for sample in samples]
    assert [rule.reason for rule in build_table(request, plain, HERE, 1).rules] == ["", ""]


def test_a_disturbed_size_is_measured_again_and_the_median_counts() -> None:
    request = TableRequest(("all_reduce",), 8, 1 << 12, 2, ("a",), asynchronous=False)
    visits: dict[int, int] = {}

    def disturbed(case: BenchCase) -> float:
        visits[case.nbytes] = visits.get(case.nbytes, 0) + 1
        if case.nbytes == 64:
            return 50.0 if visits[64] < 3 else 1.5  # twice by chance
        return {1024: 90.0, 256: 4.0}.get(case.nbytes, 1.0 + case.nbytes / 1000)  # once and for all

    samples = play(request, {"a": disturbed})
    assert {size: count for size, count in visits.items() if count > 1} == {64: 4, 256: 5, 1024: 5}
    measured = build_table(request, samples, HERE, 1).rules[0].measured["a"]
    assert measured[64] == 1.5
    assert measured[256] == 4.0  # odd, but it may be so
    assert 1024 not in measured  # 30 times the time of 2048 bytes
    assert impossible(request, samples) == ["all_reduce 1 KiB by a"]


def test_an_impossible_time_is_measured_again_first() -> None:
    request = TableRequest(("all_reduce", "broadcast"), 8, 1 << 15, 2, ("a",))
    tasks: list[Task] = []
    samples: list[Sample] = []
    while len(tasks) < 14 and (task := next_task(request, samples)) is not None:
        tasks.append(task)
        waited = task.case == BenchCase("all_reduce", 8)
        us = 0.05 if task.overlap and task.case.nbytes > 8 else 9000.0 if waited else 30.0
        samples.append(Sample(task.case, "a", task.overlap, timing(us)))
    places = [index for index, task in enumerate(tasks) if task.case == BenchCase("all_reduce", 8)]
    at = tasks.index(Task(BenchCase("all_reduce", 1 << 15)))  # only now is it known that it cannot be
    assert places == [0, *range(at + 1, at + 5)]
    again = [task for task, count in Counter(tasks).items() if count > 1]
    assert again == [Task(BenchCase("all_reduce", 8))]  # and not the exposed time, which need not grow


def test_rules_cover_only_sizes_near_measured_ones() -> None:
    """Nothing beyond, nothing between sizes far apart; without a size the largest measured one counts."""
    request = TableRequest(
        ("all_reduce", "all_gather", "barrier"), 8, 1 << 26, 2, ("a", "b"), asynchronous=False
    )
    sizes: dict[Kind, list[int]] = {
        "all_reduce": [8, 256, 1 << 20, 1 << 22], "all_gather": [1 << 16], "barrier": [0]
    }  # fmt: skip
    samples = [
        Sample(BenchCase(kind, size), candidate, False, timing(us))
        for kind, found in sizes.items() for size in found for candidate, us in (("a", 2.0), ("b", 1.0))
    ]  # fmt: skip
    table = build_table(request, samples, HERE, 1)
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
        ([0.0], [0.01, 0.4], 1.0, ["1 of 2 are uncertain by more than ± 25%"]),
        ([0.0], [], 300.0, ["300 times per second"]),
    ],
)
def test_warnings_of_a_busy_machine_and_of_scatter(
    shares: list[float], spreads: list[float], switches: float, said: list[str]
) -> None:
    samples = [
        Sample(BenchCase("all_reduce", 8), "a", False, Timing(10, 10, 10, 10 - 10 * each, 10 + 10 * each, 9))
        for each in spreads
    ]
    words = [*busy_words(shares), *scatter_words(samples, switches)]
    assert len(words) == len(said)
    assert all(expected in word for expected, word in zip(said, words, strict=True))


def test_used_share_counts_a_process_that_computes() -> None:
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
    request = TableRequest(("all_reduce",), 8, 1 << 10, 2, ("a", "b"), asynchronous=False)
    samples = play(request, {"a": lambda case: 10.0, "b": lambda case: 10.2 if case.nbytes == 64 else 14.0})
    assert Counter(p.case.nbytes for p in samples if p.candidate == "b") == {
        size: 3 if size == 64 else 1 for size in (8, 16, 32, 64, 128, 256, 512, 1024)
    }


@pytest.mark.parametrize(
    ("times", "expected"),
    [([5.0], 5.0), ([5.0, 3.0], 3.0), ([5.0, 3.0, 4.0], 4.0), ([9.0, 1.0, 8.0, 2.0], 2.0), ([3.0, 3.0], 3.0)],
)
def test_the_median_of_repeated_measurements_counts(times: list[float], expected: float) -> None:
    samples = [Sample(BenchCase("all_reduce", 8, "float32"), "a", False, timing(us)) for us in times]
    other = Sample(BenchCase("all_reduce", 16, "float32"), "a", False, timing(1.0))
    first, second = median_of_repeats([other, *samples])
    assert first is other
    assert second.timing is not None
    assert second.timing.p50 == expected


def test_a_new_library_is_measured_and_a_removed_one_is_ignored() -> None:
    """The table has the libraries of this run, and is complete, whatever earlier runs have compared."""
    both = TableRequest(("all_reduce",), 8, 64, 2, ("a", "b"))
    alone = replace(both, libraries=("a",))
    samples = play(alone, {"a": alpha_beta(1.0, 0.0)})
    assert next_task(alone, samples) is None
    again = next_task(both, samples)
    assert again is not None
    assert again.case.nbytes == 8
    samples = play(both, {"a": alpha_beta(2.0, 0.0), "b": alpha_beta(1.0, 0.0)})
    assert {rule.backend for rule in build_table(both, samples, HERE, 1).rules} == {"b", "built-in"}
    table = build_table(alone, samples, HERE, 1)
    assert {rule.backend for rule in table.rules} == {"a", "built-in"}
    assert {candidate for rule in table.rules for candidate in rule.measured} == {"a"}
    whole = replace(both, asynchronous=False)
    assert {rule.key.async_op for rule in build_table(whole, samples, HERE, 1).rules} == {None}


def test_kinds_of_earlier_runs_stay_in_the_table() -> None:
    cases = [BenchCase("all_reduce", 8), BenchCase("broadcast", 8), BenchCase("broadcast", 8, "int8")]
    samples = [Sample(case, "a", False, timing(1.0)) for case in cases]
    table = build_table(TableRequest(("all_reduce",), 8, 8, 2, ("a",)), samples, HERE, 1)
    assert [(rule.key.kind, rule.key.dtype) for rule in table.rules] == [
        ("broadcast", "int8"), ("broadcast", "int8"), ("all_reduce", None), ("all_reduce", None),
        ("broadcast", None), ("broadcast", None),
    ]  # fmt: skip


def test_a_candidate_that_is_always_wrong_gets_no_rules() -> None:
    request = TableRequest(("all_reduce", "reduce"), 8, 8, 2, ("a",), asynchronous=False)
    right = Sample(BenchCase("all_reduce", 8), "a", False, timing(1.0))
    wrong = Sample(BenchCase("reduce", 8), "a", False, None, "wrong result on rank 1")
    assert next_task(request, [right, wrong]) is None
    assert {rule.key.kind for rule in build_table(request, [right, wrong], HERE, 1).rules} == {"all_reduce"}
    with pytest.raises(Unsupported, match="reduce on a: wrong result on rank 1"):
        build_table(request, [wrong], HERE, 1)


def test_a_candidate_once_wrong_stays_excluded() -> None:
    case = BenchCase("all_reduce", 8, "float32")
    right, wrong = Sample(case, "a", False, timing(1.0)), Sample(case, "a", False, None, "wrong result")
    assert median_of_repeats([right, wrong, right]) == [wrong]


def test_nothing_is_refined_where_winners_agree() -> None:
    samples = play(REQUEST, {"a": alpha_beta(1.0, 1e-3), "b": alpha_beta(2.0, 2e-3)})
    assert {p.case.nbytes for p in samples} == {1 << exponent for exponent in range(3, 21)}


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
    candidates = sorted({candidate for each in times for candidate in each})
    return min(
        sum(math.log(each[candidate]) for each, candidate in zip(times, path, strict=True))
        + price * sum(a != b for a, b in pairwise(path))
        for path in product(candidates, repeat=len(times))
    )


@given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_choice_has_the_least_cost(rows: list[list[float]]) -> None:
    times = [dict(zip("abc", row, strict=True)) for row in rows]
    chosen = choose(times)
    cost = sum(math.log(each[candidate]) for each, candidate in zip(times, chosen, strict=True))
    cost += math.log(1.05) * sum(a != b for a, b in pairwise(chosen))
    assert cost == pytest.approx(best_by_force(times, math.log(1.05)), abs=1e-9)


@given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=2), min_size=1, max_size=20))
def test_no_size_is_worse_than_the_price_of_two_changes(rows: list[list[float]]) -> None:
    times = [dict(zip("ab", row, strict=True)) for row in rows]
    for each, candidate in zip(times, choose(times), strict=True):
        assert each[candidate] <= min(each.values()) * 1.05**2 * (1 + 1e-9)


def test_noise_causes_no_changes() -> None:
    draw = random.Random(3)
    times = [{"a": 1 + 0.005 * draw.random(), "b": 1 + 0.005 * draw.random()} for _ in range(20)]
    assert len(set(choose(times))) == 1


def test_only_significant_differences_count_in_full() -> None:
    apart = justified({"a": Timing(1, 1.0, 1, 0.9, 1.1, 9), "b": Timing(3, 3.0, 3, 2.2, 4.0, 9)})
    assert apart["a"] == 1.0
    assert apart["b"] == pytest.approx(2.0 * 3**0.2)
    blurred = justified({"a": Timing(1, 1.0, 1, 0.5, 3.0, 9), "b": Timing(2, 2.0, 2, 0.9, 4.0, 9)})
    assert blurred["b"] == pytest.approx(2**0.2)


def test_consistent_advantage_within_the_noise_counts() -> None:
    a, b = Timing(1, 1.0, 1, 0.8, 1.2, 9), Timing(1, 1.1, 1, 0.9, 1.3, 9)
    assert set(choose([justified({"b": b, "a": a}) for _ in range(5)])) == {"a"}
    once = [justified({"b": a, "a": b}) for _ in range(5)]
    once[2] = justified({"b": b, "a": a})
    assert set(choose(once)) == {"b"}


def of_messages(times: dict[int, tuple[float, float]]) -> list[Sample]:
    """Return samples of messages, with the µs of MPI and of gloo."""
    return [
        Sample(BenchCase("send", size, "float32"), name, False, timing(us))
        for size, each in times.items() for name, us in zip(("mpi", "gloo"), each, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("nodes", [1, 2])
def test_large_messages_between_hosts_go_on_while_ranks_compute(nodes: int) -> None:
    """MPI's wait for a poll above its eager limit; gloo's threads move them, in up to ten times as long."""
    times = {
        1 << 12: (50, 900),
        1 << 16: (150, 200),
        1 << 17: (400, 3900),
        1 << 18: (400, 4100),
        1 << 20: (9e3, 1e4),
    }
    samples = of_messages(times)
    request = TableRequest(("send",), 1 << 12, 1 << 20, 2, ("mpi", "gloo"))
    table = build_table(request, samples, HERE, nodes)
    rules = [table.lookup(Query("send", size, "float32", 2, nodes, 2 // nodes)) for size in times]
    chosen = [rule.backend for rule in rules if rule is not None]
    assert chosen == (["mpi", "mpi", "gloo", "mpi", "gloo"] if nodes == 2 else ["mpi"] * 5)
    assert rules[0] is not None
    assert rules[0].measured["gloo"][1 << 12] == 900
    # scatter of a library's threads, which wait for a core
    late = Timing(3e3, 6e3, 9e3, 2800, 1e4, 3)
    samples[4:6] = [
        replace(sample, timing=timing(400) if sample.candidate == "mpi" else late) for sample in samples[4:6]
    ]
    rule = build_table(request, samples, HERE, nodes).lookup(
        Query("send", 1 << 17, "float32", 2, nodes, 2 // nodes)
    )
    assert rule is not None
    assert rule.backend == ("gloo" if nodes == 2 else "mpi")


def test_messages_change_the_library_at_the_eager_limit_and_give_a_reason_where_it_is_slower() -> None:
    times = {1 << 14: (50, 90), 1 << 18: (400, 900), 1 << 20: (9e3, 1e4), 1 << 24: (1e6, 1e4)}
    samples = of_messages(times)
    request = TableRequest(("send",), 1 << 14, 1 << 24, 2, ("mpi", "gloo"))
    near = [sample for sample in samples if sample.case.nbytes < 1 << 24]
    mpi, gloo = (rule for rule in build_table(request, near, HERE, 2).rules if rule.measured)
    assert (mpi.backend, mpi.hi) == ("mpi", gloo.lo) == ("mpi", (1 << 16) + 1)
    assert not mpi.reason
    assert "go on while ranks compute" in gloo.reason
    faster = [sample for sample in samples if sample.case.nbytes in (1 << 14, 1 << 24)]
    rules = build_table(request, faster, HERE, 2).rules
    assert {rule.backend: rule.reason for rule in rules if rule.backend == "gloo"} == {"gloo": ""}


def test_a_crossover_lies_where_two_lines_meet() -> None:
    # 16 → 256 bytes: a from 1 to 16 µs, b constant 4 µs: a power law meets it at 64 bytes
    times = {16: {"a": timing(1.0), "b": timing(4.0)}, 256: {"a": timing(16.0), "b": timing(4.0)}}
    assert crossover(times, 16, 256, "a", "b") == 64


@given(st.data())
def test_tables_are_whole_and_survive_a_file(data: st.DataObject) -> None:
    """For any samples the table passes its checks and chooses measured candidates."""
    request = TableRequest(
        ("all_reduce", "all_to_all", "send"), 8, 4096, 2, ("gloo", "mpi"), ("float32", "int8")
    )
    samples = []
    for kind in request.kinds:
        for dtype, (async_op, overlap), exponent in product(
            request.dtypes, request.manners(kind), range(3, 13, 3)
        ):
            for candidate in ("gloo", "mpi"):
                us = data.draw(st.floats(1, 8))  # more would be left out
                samples.append(
                    Sample(BenchCase(kind, 1 << exponent, dtype, async_op), candidate, overlap, timing(us))
                )
    samples = [p for p in samples if p.candidate == "mpi" or p.case.kind != "send"]
    table = build_table(request, samples, HERE, 1)
    again = parse_table(table_text(table), "t")
    assert [(r.backend, r.lo, r.hi, r.key) for r in again.rules] == [
        (r.backend, r.lo, r.hi, r.key) for r in table.rules
    ]
    for name in ("send", "recv"):
        rule = again.lookup(Query(name, 100, "float64"))
        assert rule is not None
        assert rule.backend == "mpi"


@given(st.data())
def test_no_rule_covers_sizes_that_its_candidate_does_not_support(data: st.DataObject) -> None:
    """For any samples, also of a file with a limited range: every size gets a candidate that supports it."""
    spans = {}
    for name in ("msccl:one", "msccl:two"):
        lo = data.draw(st.integers(0, 70_000))
        spans[name] = Range(lo, data.draw(st.none() | st.integers(lo + 1, 140_000)))
    candidates, algorithms = data.draw(st.sampled_from([("mpi", "gloo"), ("mpi",)])), tuple(spans)
    kinds: tuple[Kind, ...] = ("all_reduce", "all_gather")
    request = TableRequest(
        kinds, 8, 1 << 16, 2, candidates, asynchronous=False,
        algorithms=dict.fromkeys(kinds, algorithms), spans=spans,
    )  # fmt: skip
    samples = []
    for kind, exponent in product(kinds, data.draw(st.sets(st.integers(3, 16), min_size=1))):
        for candidate in (*candidates, *algorithms):
            us = data.draw(st.floats(1, 8))  # more would be left out
            samples.append(Sample(BenchCase(kind, 1 << exponent), candidate, False, timing(us)))
    table = parse_table(table_text(build_table(request, samples, HERE, 1)), "t")
    edges = {0, 1 << 40, *(rule.lo for rule in table.rules)}
    edges |= {end for span in spans.values() for end in (span.lo, span.hi) if end is not None}
    for kind, size in product(kinds, sorted({max(edge + by, 0) for edge in edges for by in (-1, 0, 1)})):
        rule = table.lookup(Query(kind, size))
        assert rule is not None
        assert rule.backend not in spans or spans[rule.backend].covers(size)
        vector = table.lookup(Query(f"{kind}_v", None)) if kind == "all_gather" else None
        assert vector is None or vector.backend in candidates


def test_the_next_best_takes_over_where_an_algorithm_ends() -> None:
    spans = {"msccl:mine": Range(100, 34_001)}
    request = TableRequest(
        ("all_reduce",), 8, 1 << 16, 2, ("msccl", "mpi", "gloo"), asynchronous=False,
        algorithms={"all_reduce": ("msccl:mine",)}, spans=spans,
    )  # fmt: skip
    times = {
        "msccl": alpha_beta(3, 1e-3),
        "mpi": alpha_beta(2, 9e-3),
        "gloo": alpha_beta(200, 1e-3),
        "msccl:mine": alpha_beta(1, 1e-4),
    }
    samples = play(request, times)
    tried = {p.case.nbytes for p in samples if p.candidate == "msccl:mine"}
    assert (min(tried), max(tried)) == (104, 1 << 15)
    rules = build_table(request, samples, HERE, 1).rules
    assert [(rule.backend, rule.lo, rule.hi) for rule in rules] == [
        ("mpi", 0, 100), ("msccl:mine", 100, 34_001), ("msccl", 34_001, 1 << 17),
        ("built-in", 1 << 17, None),
    ]  # fmt: skip


def test_sizes_without_a_candidate_get_the_built_in_preference() -> None:
    spans = {"msccl:mine": Range(0, 10)}
    algorithms: dict[Kind, tuple[str, ...]] = {"all_reduce": ("msccl:mine",)}
    request = TableRequest(("all_reduce", "send"), 8, 64, 2, ("mpi",), algorithms=algorithms, spans=spans)
    cases: dict[Kind, str] = {"all_reduce": "msccl:mine", "send": "mpi"}
    samples = [Sample(BenchCase(kind, 8), candidate, False, timing(1.0)) for kind, candidate in cases.items()]
    rules = [rule for rule in build_table(request, samples, HERE, 1).rules if rule.key.kind == "all_reduce"]
    assert [(rule.backend, rule.hi) for rule in rules] == [
        ("msccl:mine", 10), ("built-in", None)
    ]  # fmt: skip


def test_rules_of_asynchronous_operations_follow_the_exposed_time() -> None:
    request = TableRequest(("all_reduce",), 8, 8, 2, ("mpi", "gloo"))
    sync, later = BenchCase("all_reduce", 8), BenchCase("all_reduce", 8, async_op=True)
    times = [
        (sync, False, {"mpi": 1.0, "gloo": 9.0}),
        (later, False, {"mpi": 1.0, "gloo": 9.0}),
        (later, True, {"mpi": 1.0, "gloo": 0.1}),
    ]
    samples = [
        Sample(c, candidate, o, timing(us)) for c, o, found in times for candidate, us in found.items()
    ]
    table = build_table(request, samples, HERE, 1)
    for async_op, backend in ((False, "mpi"), (True, "gloo")):
        rule = table.lookup(Query("all_reduce", 8, async_op=async_op))
        assert rule is not None
        assert rule.backend == backend
    without = build_table(request, [p for p in samples if not p.overlap], HERE, 1)
    rule = without.lookup(Query("all_reduce", 8, async_op=True))
    assert rule is not None
    assert rule.backend == "mpi"


def test_excluded_candidates_are_in_no_table() -> None:
    request = TableRequest(("all_reduce",), 8, 8, 2, ("mpi", "gloo"), asynchronous=False)
    case = BenchCase("all_reduce", 8)
    samples = [Sample(case, "mpi", False, None, "wrong"), Sample(case, "gloo", False, timing(5.0))]
    table = build_table(request, samples, HERE, 1)
    assert [rule.backend for rule in table.rules] == ["gloo", "built-in"]
    assert "mpi" not in table.rules[0].measured


# -- samples on disk ------------------------------------------------------------------------------

SAMPLES = [
    Sample(BenchCase("all_reduce", 8), "mpi", False, Timing.of([1.0, 2.0, 3.0])),
    Sample(BenchCase("send", 8, "int8"), "gloo", False, None, "wrong result on rank 1"),
]


def test_samples_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    MeasurementFile(path, HERE, fresh=False).add(SAMPLES)
    assert MeasurementFile(path, HERE, fresh=False).samples == SAMPLES
    assert MeasurementFile(path, HERE, fresh=True).samples == []
    assert MeasurementFile(path, HERE, fresh=False).samples == []


def test_a_truncated_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    MeasurementFile(path, HERE, fresh=False).add(SAMPLES)
    path.write_text(path.read_text()[:-30])
    assert MeasurementFile(path, HERE, fresh=False).samples == SAMPLES[:1]


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
def test_foreign_measurement_files_are_refused_and_kept(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(what)):
        MeasurementFile(path, HERE, fresh=False)
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
    """Time every kind on ranks, sync, async and overlapped; return timed and excluded candidates."""
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
            case = BenchCase(kind, whole_size(kind, 120, "float32", comm.size), "float32", async_op)  # type: ignore[arg-type]
            outcome = meter.measure(case, [*backends, "tuned"], overlap=overlap)
            found[f"{kind} {async_op} {overlap}"] = [
                {candidate: time.p50 for candidate, time in outcome.timings.items()},
                outcome.excluded,
            ]
    mcr.finalize()
    return found


@pytest.mark.short("mpi-2")
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


def tuned_while_busy(table: str, answer: str) -> None:
    """Run a short tuning on ranks while other programs use nine tenths of the machine."""
    job = TuningJob(
        "tune", ("all_reduce",), 8, 64, backends=("gloo",), budget=2.0, answer=answer, progress=False,
        output=table, measurements=f"{table}.jsonl", asynchronous=False, overlap=False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "used_share", lambda: 0.9)
        worker.run(job)


@pytest.mark.long
def test_the_table_notes_a_busy_machine(tmp_path: Path) -> None:
    table, answer = tmp_path / "t.yaml", tmp_path / "answer.json"
    first, _ = run_ranks(tuned_while_busy, 2, args=[str(table), str(answer)], via="torch")
    words = "The machine was busy"
    assert first.stderr.count(words) == 1
    assert words in json.loads(answer.read_text())["warnings"][0]
    comment = " ".join(line.lstrip("# ") for line in table.read_text().splitlines() if line.startswith("#"))
    assert comment.count(words) == 1


@needs_mpi
def test_a_candidate_with_wrong_results_is_excluded() -> None:
    kinds = ["all_reduce", "all_to_all"]
    for result in run_ranks(measured, 2, args=[["mpi", "wrong"], kinds], timeout=120):
        for timings, excluded in result.value.values():
            assert set(timings) == {"mpi", "tuned"}
            assert set(excluded) == {"wrong"}
            assert "wrong result on rank 1: 1 of 30 elements" in excluded["wrong"]


@pytest.mark.parametrize("hosts", ["a", "ab", "aabb", "abab", "aabbcc", "abcabc", "aab", "aaabbb"])
def test_messages_are_measured_between_hosts(hosts: str) -> None:
    """Ranks have each other; one at most has nobody. Ranks of the job have other numbers than the group's."""
    ranks = range(2, 2 + len(hosts))
    comms: list[Any] = [
        SimpleNamespace(hosts=f"xy{hosts}", ranks=ranks, rank=rank, size=len(hosts))
        for rank in range(len(hosts))
    ]
    found = [partner(comm) for comm in comms]
    pairs = {(rank, peer) for rank, peer in enumerate(found) if peer is not None}
    assert pairs == {(peer, rank) for rank, peer in pairs}
    assert len(pairs) == len(hosts) // 2 * 2
    if len({hosts.count(host) for host in hosts}) == 1 and len(set(hosts)) > 1:
        assert all(hosts[rank] != hosts[peer] for rank, peer in pairs)


def verified(dtypes: list[str]) -> list[str]:
    """Run on ranks; return verification's findings on torch's own gloo under mcr_plus, over dtypes."""
    with mcr.init(backends=["gloo"]) as comm:
        cases = [
            BenchCase(kind, whole_size(kind, 240, dtype, comm.size), dtype)
            for kind in KINDS
            for dtype in dtypes
        ]
        found = [(case, OpUnderTest(comm, case).verify("gloo")) for case in cases]
        return [f"{case}: {problem}" for case, problem in found if problem is not None]


def test_verification_accepts_right_results_of_all_dtypes() -> None:
    dtypes = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int64", "bool"]
    for result in run_ranks(verified, 3, args=[dtypes], via="torch", timeout=120):
        assert result.value == []


# -- pictures -------------------------------------------------------------------------------------


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return every saved figure."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    found: list[Any] = []
    save = figure.savefig

    def keep(self: Any, *args: Any, **options: Any) -> None:
        save(self, *args, **options)
        found.append(self)

    monkeypatch.setattr(figure, "savefig", keep)
    return found


@pytest.mark.long
def test_a_plot_shows_the_choices_of_the_table(figures: list[Any], tmp_path: Path) -> None:
    def sample(candidate: str, size: int, time: float, kind: Kind = "all_reduce", **manner: bool) -> Sample:
        case = BenchCase(kind, size, "float32", manner.get("async_op", False))
        timing = Timing(time, time, time, time, time, 9)
        return Sample(case, candidate, manner.get("async_op", False), timing)

    sizes = [8 << power for power in range(8)]
    samples = [sample("a", size, 10.0 + (size > 100) * 50) for size in sizes]
    samples += [sample("b", size, 20.0) for size in sizes]
    samples += [sample("a", size, 7.0, async_op=True) for size in sizes]
    samples += [sample("a", 64, 3.0, "broadcast"), sample("b", 64, 2.0, "broadcast")]
    request = TableRequest(("all_reduce", "broadcast"), 8, 1 << 10, 2, ("a", "b"))
    table = build_table(request, samples, {"ranks": ("2",), "nodes": ("1",)}, 1)
    (change,) = {rule.lo for rule in table.rules if rule.backend == "b" and rule.key.kind == "all_reduce"}
    assert 64 < change <= 128
    assert plot_tuning(table, samples, tmp_path / "t.png") == 3
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


def test_no_text_of_a_plot_is_clipped(figures: list[Any], tmp_path: Path) -> None:
    candidates = [f"msccl:some_long_algorithm_{number}" for number in range(12)]
    row = {"kind": "all_reduce", "ranks": 2, "dtype": "float32", "verified": True}
    times = {"p20_us": 1.0, "p50_us": 2.0, "p80_us": 3.0}
    rows = [
        {**row, **times, "backend": candidate, "bytes": size} for candidate in candidates for size in (8, 16)
    ]
    assert plot_rows(rows, tmp_path / "b.png") == 1
    (figure,) = figures
    image = matplotlib_image(tmp_path / "b.png")
    edge = [*image[0], *image[-1], *image[:, 0], *image[:, -1]]
    assert all((pixel[:3] == 1).all() for pixel in edge)  # white all around
    assert len(figure.legends[0].get_texts()) == len(candidates)


def matplotlib_image(path: Path) -> Any:
    from matplotlib import image

    return image.imread(path)


# -- the commands ---------------------------------------------------------------------------------


def json_of(*words: str) -> Any:
    answer = mcr_plus_process(*words)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.long
def test_tune_writes_a_table_and_resumes(tmp_path: Path) -> None:

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
    left = r"Left out for lack of time, .*: 8 B in 3 of 4 \(about \d+ s\), 64 B in all \(about \d+ s\)\.$"
    assert re.search(left, begun.stdout, re.MULTILINE)
    assert re.search(r"^The rest takes about \d+ s at the pace of this run: ", begun.stdout, re.MULTILINE)
    assert begun.stderr.count("The machine was busy") <= 1
    first = json_of(*words, "--budget", "1ms")
    assert not first["complete"]
    assert first["combinations"] == {"measured": 2, "planned": 16}
    assert first["seconds_left"] > 0
    assert table.is_file()
    second = json_of(*words)
    assert second["complete"]
    assert second["points"][: len(first["points"])] == first["points"]
    assert len(second["points"]) > len(first["points"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert {rule["kind"] for rule in second["rules"]} == {"all_reduce", "all_to_all_v", "all_to_all"}
    config = tmp_path / "p.yaml"
    config.write_text("version: 1\npipeline:\n  - select: {table: t.yaml}\n  - dispatch: {}\n")
    candidate = json_of("explain", "all_to_all", "32", "--config", str(config), "--json")
    assert candidate["table_rule"].startswith(str(table))
    assert candidate["expected_us"] > 0
    again = mcr_plus_process(*[word for word in words if word != "--json"])
    assert again.returncode == 0, again.stderr
    assert "fastest libraries" in again.stdout
    assert "< 128 B" in again.stdout
    assert re.search(
        rf"^{re.escape(str(table))}: {len(load_table(table).rules)} rules, \d+ of them for the built-in "
        rf"preference; {len(second['points'])} measurements, each of one library$",
        again.stderr,
        re.MULTILINE,
    )
    assert f"{plot}: 4 panels, one for each operation and manner" in again.stderr


@pytest.mark.long
@needs_mpi
def test_inside_a_job_of_mpirun_the_command_is_a_rank(tmp_path: Path) -> None:
    launcher = mpi_flavour()
    assert launcher is not None
    words = ["tune", "-o", str(tmp_path / "t.yaml"), "--kinds", "barrier", "--no-async", "--json"]
    options = ["--allow-run-as-root", "--oversubscribe"] if launcher.flavour == "openmpi" else []
    command = [launcher.path, *options, "-n", "2", sys.executable, "-m", "mcr_plus.cli.main", *words]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr
    assert [rule["kind"] for rule in json.loads(answer.stdout)["rules"]] == ["barrier"]
    assert load_table(tmp_path / "t.yaml").fingerprint["ranks"] == ("2",)


@pytest.mark.long
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
        (["tune", "-o", "t.yaml"], "the number of ranks is missing"),
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
        (["tune", "-n", "2", "-o", __file__], "was not written by mcr-plus tune and would be"),
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


@contextmanager
def interrupted_after(seconds: int) -> Iterator[None]:
    """Fail the test if it takes longer, even if it blocks in a system call."""

    def late(*_: object) -> None:
        pytest.fail(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("options", "at"),
    [
        (["-o"], "-o"),
        (["-o", "t.yaml", "--measurements"], "--measurements"),
        (["-o", "t.yaml", "--plot"], "--plot"),
    ],
)
def test_a_fifo_is_refused_as_a_file_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], at: str
) -> None:
    fifo = tmp_path / "fifo.png"
    os.mkfifo(fifo)
    monkeypatch.chdir(tmp_path)
    with interrupted_after(60):  # opening a FIFO blocks until another process reads it
        answer = mcr_plus("tune", "-n", "2", *options, fifo)
    assert answer.returncode == 2
    told = re.sub(r"[\s│]+", "", answer.stderr)
    assert f"Invalidvaluefor{at}" in told
    assert f"expectedaregularfile,got{fifo}" in told
    with pytest.raises(ConfigError, match="expected a regular file"):
        MeasurementFile(fifo, HERE, fresh=False)


@pytest.mark.long
def test_algorithm_files_are_compared_and_named_in_the_table(tmp_path: Path) -> None:
    """The files: one for small sizes alone, one for other ranks, one for one root."""
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
    assert "algorithm files need the backend msccl" in re.sub(r"[\s│]+", " ", useless.stderr)
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
    small = [(lo, hi) for _, backend, lo, hi in chosen if backend == "msccl:small"]
    assert small  # in one range, but on a busy machine gloo may be faster at a size between
    assert all(lo >= 100 and hi is not None and hi <= 1001 for lo, hi in small)
    assert {backend for kind, backend, *_ in chosen if kind == "broadcast"} == {"gloo", "built-in"}
    needs = f"need algorithms: [{tmp_path / 'small.xml'}]"
    assert needs in " ".join(answer.stdout.split())
    assert needs in out.read_text()
    pipeline = tmp_path / "p.yaml"
    pipeline.write_text("version: 1\npipeline: [{select: {table: t.yaml}}, {dispatch: {}}]\n")
    assert re.search(r"t.yaml:\d+: backend 'msccl:small': unknown", mcr_plus("validate", pipeline).stderr)
    pipeline.write_text(f"{pipeline.read_text()}algorithms: [small.xml]\n")
    assert mcr_plus("validate", pipeline).returncode == 0


def test_sizes_without_a_candidate_are_refused_before_measuring() -> None:
    algorithms: dict[Kind, tuple[str, ...]] = {"all_reduce": ("msccl:one", "msccl:two")}
    request = TableRequest(("all_reduce",), 8, 64, 2, (), algorithms=algorithms)
    for spans, missing in (
        ({"msccl:one": Range(8, 100), "msccl:two": Range(0, 50)}, "100 B"),
        ({"msccl:one": Range(8, 100), "msccl:two": Range(100)}, "0 B"),
        ({"msccl:one": Range(0, 0), "msccl:two": Range(0, 0)}, "0 B"),
    ):
        with pytest.raises(Unsupported, match=f"all_reduce: no entry of --backends supports {missing}"):
            check_sizes(replace(request, spans=spans))
        check_sizes(replace(request, spans=spans, libraries=("gloo",)))
    check_sizes(replace(request, spans={"msccl:one": Range(0, 100), "msccl:two": Range(50)}))


def test_algorithms_alone_are_refused_for_a_kind_that_has_a_vector_form() -> None:
    named: dict[Kind, tuple[str, ...]] = dict.fromkeys(KINDS, ("msccl:direct", "msccl:two_level"))
    request = TableRequest(("all_reduce", "all_to_all"), 8, 64, 2, (), algorithms=named)
    what = r"^all_to_all: no entry of --backends supports all_to_all_v, .* add a library: "
    with pytest.raises(Unsupported, match=what + "--backends msccl,msccl:direct,msccl:two_level$"):
        check_sizes(request)
    check_sizes(replace(request, libraries=("msccl",)))
    check_sizes(replace(request, kinds=("all_reduce", "broadcast", "reduce")))


def test_kind_without_measured_vector_form_has_no_rules() -> None:
    """Rules of its algorithm would apply to vector operations too, which the algorithm refuses."""
    named: dict[Kind, tuple[str, ...]] = {"all_to_all": ("msccl:direct",)}
    request = TableRequest(("all_to_all", "send"), 8, 64, 2, ("gloo",), asynchronous=False, algorithms=named)
    failed = Sample(BenchCase("all_to_all", 8), "gloo", False, None, "it failed")
    samples = [failed, Sample(BenchCase("all_to_all", 8), "msccl:direct", False, timing(1.0))]
    samples.append(Sample(BenchCase("send", 8), "gloo", False, timing(1.0)))
    assert {rule.key.kind for rule in build_table(request, samples, HERE, 1).rules} == {"send"}
    with pytest.raises(Unsupported, match="no candidate to choose from: all_to_all on gloo: it failed"):
        build_table(request, samples[:2], HERE, 1)
    samples[0] = Sample(BenchCase("all_to_all", 8), "gloo", False, timing(2.0))
    rules = [(rule.key.kind, rule.backend) for rule in build_table(request, samples, HERE, 1).rules]
    assert rules[:2] == [("all_to_all_v", "gloo"), ("all_to_all", "msccl:direct")]


def test_excluded_candidates_are_listed_once_per_reason() -> None:
    samples = [
        Sample(BenchCase("all_reduce", 8 << n), "a", False, None, f"{8 << n} B is too much") for n in range(4)
    ]
    samples += [Sample(BenchCase("all_reduce", 8), "a", True, None, "another reason")]
    assert _left_out(samples) == [
        ("all_reduce", "a", "8 B to 64 B", "8 B is too much"),
        ("all_reduce", "a", "8 B", "another reason"),
    ]


def test_an_unavailable_library_is_refused_before_ranks_start() -> None:
    if registry.BACKENDS["nccl"] and __import__("torch").cuda.is_available():
        pytest.skip("NCCL can be used here")
    answer = mcr_plus("tune", "-n", "2", "-o", "t.yaml", "--backends", "nccl")
    assert answer.returncode == 1
    assert "--backends: nccl cannot be used here: " in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.long
@needs_mpi
def test_measurements_of_another_machine_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "t.measurements.jsonl").write_text('{"version": 1, "fingerprint": {"cpu": ["Elbrus"]}}\n')
    answer = mcr_plus_process("tune", "-n", "2", "-o", str(tmp_path / "t.yaml"), "--kinds", "barrier")
    assert answer.returncode == 1
    assert "ConfigError" in answer.stderr
    assert "measured with Elbrus); name another file with --measurements, or use --fresh" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (tmp_path / "t.yaml").exists()


def cores_of_threads() -> tuple[list[int], list[list[int]]]:
    """Run on ranks; return the cores of the bound measuring thread, and the cores of all other threads."""
    job = TuningJob("bench", ("barrier",), 8, 8, backends=("gloo",))
    with mcr.init(backends=["gloo"]) as comm:
        _meter(comm, job, Effort())
        own = threading.get_native_id()
        others = []
        for name in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended
                others += [sorted(os.sched_getaffinity(int(name)))] if int(name) != own else []
        return sorted(os.sched_getaffinity(own)), others


@pytest.mark.skipif(cores() < 2, reason="needs two cores")
def test_only_the_measuring_thread_is_pinned() -> None:
    (first, others), (second, _) = (
        result.value for result in run_ranks(cores_of_threads, 2, via="torch", timeout=60)
    )
    assert len(first) == len(second) == 1
    assert first != second
    assert others
    assert all(each == sorted(os.sched_getaffinity(0)) for each in others)


def test_samples_round_trip_through_json() -> None:
    assert [Sample.from_document(json.loads(json.dumps(p.document()))) for p in SAMPLES] == SAMPLES
