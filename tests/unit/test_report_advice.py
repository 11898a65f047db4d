"""Findings of the report, on recordings of jobs whose fault is known, with gains in closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from recordings import SECONDS, collective, expected, job_of, operation, save, titles

from mcr_plus.config.reader import loads
from mcr_plus.observe.explain import explained
from mcr_plus.observe.record import Record
from mcr_plus.observe.report.advice import ReportAdvice
from mcr_plus.observe.report.analysis import groups
from mcr_plus.observe.report.job import load_job

HOSTS: dict[str, Any] = {"hosts": ["node0", "node1"]}


def by_rank(collectives: list[list[Record]]) -> tuple[list[Record], ...]:
    return tuple(map(list, zip(*collectives, strict=True)))


def one(found: dict[str, ReportAdvice], *words: str) -> ReportAdvice:
    """The only finding with all of these words, whose snippet can be pasted into a configuration."""
    (chosen,) = [each for each in found.values() if all(word in each.title + each.text for word in words)]
    loads("version: 1\n" + chosen.snippet.replace("{table: table.yaml}", "{}"))
    return chosen


# -- waits --------------------------------------------------------------------------------------------------


def test_a_slow_library_is_named_with_the_rule_for_a_faster_one(tmp_path: Path) -> None:
    """4,273 operations of 1.1 ms are 47 % of ten seconds; with 0.3 ms each, 34.2 % would be saved."""
    count, of = round(0.47 * SECONDS / 1.1e-3), {"kind": "all_to_all", "tag": "moe"}
    ranks = by_rank([collective(n, [2e-3 * n] * 2, 1.1e-3, **of) for n in range(1, count + 1)])
    row = expected("all_to_all", "gloo", {"gloo": 1100.0}, {"gloo": 1100.0, "msccl": 300.0}, tag="moe")
    found = one(titles(job_of(tmp_path, *ranks, choices=[row])), "waits for all_to_all")
    assert found.title == "47% of the time waits for all_to_all (moe) on gloo"
    assert "msccl would take 0.3 ms instead of 1.1 ms for 4 KiB" in found.text
    assert f"by the table: {count * 0.8e-3 / SECONDS:.1%} of the time." in found.text
    assert found.snippet == 'rules:\n  - match: {kind: all_to_all, tag: "moe"}\n    backend: msccl'
    config = {"version": 1, **yaml.safe_load(found.snippet)}
    for tag, is_used in (("moe", True), ("other", False)):
        steps = explained("all_to_all", 8 << 20, tag=tag, config=config).document["steps"]
        assert any(step["rule"] for step in steps) is is_used


def test_all_sizes_of_an_operation_count(tmp_path: Path) -> None:
    """Of the small ones gloo is the faster library, and its time is not that of the large ones."""
    small = expected("all_reduce", "gloo", {"gloo": 10.0, "mpi": 40.0}, {}, bytes=112, count=900)
    large = expected("all_reduce", "gloo", {"gloo": 2e4, "mpi": 1.8e4}, {}, bytes=1 << 20, count=100)
    ranks = by_rank([collective(n, [0.1 * n] * 2, 0.05) for n in range(1, 99)])
    found = one(titles(job_of(tmp_path, *ranks, choices=[small, large])), "waits")
    assert "the table expects at most 20 ms, for 1 MiB" in found.text
    assert "backend" not in found.snippet
    large["job"]["alternatives"]["mpi"] = 8e3
    found = one(titles(job_of(tmp_path, *ranks, choices=[small, large])), "waits")
    assert "mpi would take 8 ms instead of 20 ms for 1 MiB" in found.text
    assert f"by the table: {98 * (0.1 * 12e-3 - 0.9 * 30e-6) / SECONDS:.1%} of the time." in found.text


@pytest.mark.parametrize(
    ("us", "changes", "about", "severity", "what"),
    [
        (1e3, {}, {}, "problem", "is 50 ms, and the table expects at most 1 ms, for 4 KiB"),
        (1e3, {}, {}, "problem", "`mcr-plus tune -n 2 -o table.yaml`"),
        (4e4, {}, {}, "gain", "It is synchronous"),
        (None, {}, {}, "gain", "It is synchronous"),
        (4e4, {"is_async": True}, HOSTS, "gain", "bf16 halves the bytes of float32"),
        (4e4, {"is_async": True}, {}, "note", "The table compares no libraries"),  # on one host, a copy
        (4e4, {"is_async": True, "dtype": "int64"}, HOSTS, "note", "The table compares no libraries"),
        (4e4, {"is_async": True, "bytes": 4096}, HOSTS, "note", "The table compares no libraries"),
    ],
)
def test_waits_without_a_faster_library(
    tmp_path: Path, us: float | None, changes: dict[str, Any], about: dict[str, Any], severity: str, what: str
) -> None:
    of = {"bytes": 4 << 20, **changes}
    ranks = by_rank([collective(n, [0.1 * n] * 2, 0.05, **of) for n in range(1, 99)])
    choices = [] if us is None else [expected("all_reduce", "gloo", {"gloo": us}, {})]
    found = one(titles(job_of(tmp_path, *ranks, choices=choices, **about)), "49% of the time waits", what)
    assert found.severity == severity


def test_no_library_in_the_table_is_faster(tmp_path: Path) -> None:
    ranks = by_rank([collective(n, [0.1 * n] * 2, 0.05, is_async=True) for n in range(1, 99)])
    row = expected("all_reduce", "gloo", {"gloo": 4e4, "mpi": 3.9e4}, {})
    assert one(titles(job_of(tmp_path, *ranks, choices=[row])), "No library in the table is clearly faster")


# -- late ranks ---------------------------------------------------------------------------------------------

LATE_S, SERVED_S, STEPS = 0.03, 0.001, 98


def steps_with(late: int, *, varies: bool = False) -> tuple[list[Record], ...]:
    """Steps of 0.1 s, with one operation to which `late` comes last, and four for which both are there.

    `varies`: the other rank comes last in every second step.
    """
    collectives = []
    for step in range(STEPS):
        who = 1 - late if varies and step % 2 else late
        at = 0.1 * (step + 1)
        arrivals = [at + (LATE_S if rank == who else 0.0) for rank in range(2)]
        collectives.append(collective(5 * step + 1, arrivals, SERVED_S, tag="first"))
        for number in range(1, 5):  # rank 0 comes a microsecond after the other one
            at = 0.1 * (step + 1) + LATE_S + 0.005 * number
            collectives.append(collective(5 * step + 1 + number, [at + 1e-6, at], SERVED_S, tag="later"))
    return by_rank(collectives)


def test_the_wait_for_a_late_rank_is_not_the_library_s(tmp_path: Path) -> None:
    """Rank 1 delays one of five operations by 30 ms; rank 0 is last at the others, which is most of them."""
    row = expected("all_reduce", "gloo", {"gloo": 1e3, "msccl": 100.0}, {}, tag="first")
    job = job_of(tmp_path, *steps_with(1), choices=[row])
    found = titles(job)
    of_rank = one(found, "for rank 1 for")
    assert of_rank.severity == "problem"
    assert of_rank.title == f"The others wait for rank 1 for {STEPS * LATE_S / SECONDS:.0%} of the time"
    assert f"last to 100% of {STEPS} calls of all_reduce (first), by 30 ms at the median" in of_rank.text
    wait = one(found, "waits for all_reduce (first)")
    share = STEPS * LATE_S / 2 / SECONDS  # one of two ranks waits
    assert wait.text.startswith(f"{share:.0%} of the time passes before the last rank has issued it")
    assert "mostly rank 1, by 30 ms" in wait.text
    assert "msccl" not in wait.text  # which would save 0.9 ms of 0.1 s
    assert not wait.snippet
    (group,) = [each for each in groups(job) if each.tag == "first"]
    assert group.waited == pytest.approx(STEPS * (LATE_S / 2 + SERVED_S) / SECONDS)
    assert group.late == pytest.approx(share)
    assert group.served_us == pytest.approx(SERVED_S * 1e6)


@pytest.mark.parametrize(("waited", "title"), [(0.001, None), (0.02, "for rank 1 for 20% of the time")])
def test_a_late_arrival_costs_what_others_wait_for_it(
    tmp_path: Path, waited: float, title: str | None
) -> None:
    """Rank 1 issues by 30 ms later; rank 0 computes meanwhile, and waits for `waited` seconds of them."""
    ranks: tuple[list[Record], list[Record]] = ([], [])
    for number in range(1, 99):
        for rank, by in enumerate((0.0, 0.03)):
            own = waited * (not rank)
            ranks[rank].append(operation(number, 0.1 * number + by, 0.03 - by, own, is_async=True, ranks=2))
    found = titles(job_of(tmp_path, *ranks))
    named = [each.title for each in found.values() if "for rank" in each.title]
    assert named == ([] if title is None else [f"The others wait {title}"])


def test_ranks_that_are_late_in_turns_are_not_named(tmp_path: Path) -> None:
    found = titles(job_of(tmp_path, *steps_with(1, varies=True)))
    assert all("for rank" not in each.title for each in found.values())
    assert "now one rank, now another comes later" in one(found, "waits for all_reduce (first)").text


def test_a_late_rank_and_a_slow_library(tmp_path: Path) -> None:
    """What another library would save is of what the library takes once all have come."""
    served = 0.04
    ranks = by_rank([collective(n, [0.1 * n, 0.1 * n + 0.03], served) for n in range(1, 99)])
    row = expected("all_reduce", "gloo", {"gloo": 1e5, "msccl": 1e4}, {})
    found = titles(job_of(tmp_path, *ranks, choices=[row]))
    assert one(found, "The others wait for rank 1 for 29% of the time")
    wait = one(found, "waits for all_reduce on gloo")
    assert "mostly rank 1, by 30 ms at the median. msccl would take 10 ms" in wait.text
    assert f"by the table: {98 * served / SECONDS:.1%} of the time." in wait.text
    assert wait.snippet.endswith("backend: msccl")


def test_one_long_delay_is_told_from_many(tmp_path: Path) -> None:
    records = [collective(n, [0.05 * n, 0.05 * n + 1e-4], 1e-3) for n in range(1, 100)]
    records.append(collective(100, [5.0, 8.0], 1e-3))
    found = one(titles(job_of(tmp_path, *by_rank(records))), "for rank 1 for 30% of the time")
    assert "is one delay, such as a checkpoint" in found.text
    assert "3 s at worst" in found.text


def test_lateness_within_the_error_of_clocks_is_no_finding(tmp_path: Path) -> None:
    """All end 60 ms after they begin, so the clocks of two hosts are known to no better than that."""
    records = [collective(n, [0.1 * n, 0.1 * n + 0.02], 0.06) for n in range(1, 99)]
    ranks = by_rank(records)
    assert one(titles(job_of(tmp_path, *ranks)), "for rank 1 for 20%")
    for rank, own in enumerate(ranks):
        save(tmp_path, rank, own, host=f"node{rank}", **HOSTS)
    assert all("for rank" not in title for title in titles(load_job(tmp_path)))


# -- small operations, codecs, failures ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"is_async": True}, "Fused, they travel as few."),
        ({}, "Issue them with `async_op=True`"),
        ({"fused": 4}, None),
        ({"bytes": 1 << 20}, None),
        ({"kind": "send"}, None),
    ],
)
def test_small_operations_are_to_be_fused(tmp_path: Path, changes: dict[str, Any], said: str | None) -> None:
    """100 in each step of 0.4 s."""
    ends = tuple(0.4 * n for n in range(25))
    records = [operation(n, 0.004 * n, 0.003, 0.0, **changes) for n in range(1, 2400)]
    found = titles(job_of(tmp_path, records, records, ends=ends))
    small = {title: each for title, each in found.items() if "small operations per step" in title}
    assert bool(small) is (said is not None)
    if said is not None:
        chosen = one(small, "100 small operations per step: all_reduce", said)
        assert "fuse: {bucket: 25MiB, kinds: [all_reduce]}" in chosen.snippet


@pytest.mark.parametrize(("wire", "is_useless"), [(4096, True), (4000, True), (2048, False)])
def test_codecs_that_save_nothing(tmp_path: Path, wire: int, is_useless: bool) -> None:
    of = {"codec": "exp_window", "wire_bytes": wire, "bytes": 4096}
    records = [operation(n, 0.1 * n, 0.05, 0.045, **of) for n in range(1, 100)]
    found = titles(job_of(tmp_path, records, records))
    waits = found.pop("45% of the time waits for communication")
    assert "is for all_reduce on gloo, encoded by exp_window." in waits.text
    assert bool(found) is is_useless
    if is_useless:
        chosen = one(found, f"Codec exp_window saves {1 - wire / 4096:.0%} of all_reduce")
        assert chosen.snippet.endswith("compress: {codec: none}")


def test_failed_operations_are_told(tmp_path: Path) -> None:
    records = [operation(n, 0.1 * n, 0.05, 0.045, error="lost") for n in range(1, 100)]
    found = one(titles(job_of(tmp_path, records, records)), "Operations have failed")
    assert "198 of all_reduce on gloo" in found.text
