"""Clocks of hosts by operations with known times, merged traces, and their HolisticTraceAnalysis."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcr_plus.errors import ConfigError
from mcr_plus.observe.clocks import Key, Span, align, spans
from mcr_plus.observe.traces import files_of, merge_traces

Offsets = dict[str, float]


def operations(
    chance: random.Random, offsets: Offsets, group: str, count: int, least: float
) -> dict[str, dict[Key, Span]]:
    """Return operations: each takes `least` or more from the last rank's issue; ranks notice its end late.

    `offsets`: each host's clock at true time 0. Times in microseconds.
    """
    found: dict[str, list[tuple[Key, Span]]] = {host: [] for host in offsets}
    at = 0.0
    for number in range(count):
        ranks = [(host, at + chance.uniform(0, 500)) for host in offsets for _ in range(2)]
        done = max(issued for _, issued in ranks) + least
        for host, issued in ranks:
            noticed = done + chance.uniform(0, 300)
            span = Span(issued + offsets[host], noticed + offsets[host])
            found[host].append(((group, number, "all_reduce", 8), span))
        at = done + chance.uniform(0, 5000)
    return {host: spans(each) for host, each in found.items()}


@pytest.mark.parametrize("seed", range(20))
def test_the_true_difference_is_within_the_error(seed: int) -> None:
    chance = random.Random(seed)
    offsets = {host: chance.uniform(-1e9, 1e9) for host in "abc"}
    found = operations(chance, offsets, "world", 400, least=30.0)
    clocks = align(found, dict.fromkeys(offsets, 0.0))
    assert clocks["a"].shift_us == clocks["a"].error_us == 0
    for host in "bc":
        error = clocks[host].error_us
        assert error is not None
        truth = offsets["a"] - offsets[host]
        assert abs(clocks[host].shift_us - truth) <= error + 1e-3
        assert 30 <= error < 200  # no more exact than the operation itself takes, and not by much
        assert clocks[host].by == "400 operations"


def test_a_host_is_placed_through_another_one_and_errors_add_up() -> None:
    chance = random.Random(1)
    offsets = {"a": 0.0, "b": 1e6, "c": -5e6, "d": 7.0}
    left = operations(chance, {host: offsets[host] for host in "ab"}, "left", 50, 20.0)
    right = operations(chance, {host: offsets[host] for host in "bc"}, "right", 50, 20.0)
    found = {"a": left["a"], "b": left["b"] | right["b"], "c": right["c"], "d": {}}
    clocks = align(found, {"a": 100.0, "b": 0.0, "c": 0.0, "d": 350.0})
    assert clocks["c"].error_us is not None
    assert clocks["b"].error_us is not None
    assert clocks["c"].error_us > clocks["b"].error_us
    assert abs(clocks["c"].shift_us - 5e6) <= clocks["c"].error_us
    assert (clocks["d"].shift_us, clocks["d"].error_us, clocks["d"].by) == (250.0, None, "time of day")


def test_clocks_of_unlike_speed_contradict_themselves() -> None:
    chance = random.Random(2)
    found = operations(chance, {"a": 0.0, "b": 0.0}, "world", 200, 1.0)
    fast = {
        key: Span(span.issued * 1.01, span.done * 1.01) for key, span in found["b"].items()
    }  # 1 % within a second: 10 ms
    clock = align({"a": found["a"], "b": fast}, {"a": 0.0, "b": 0.0})["b"]
    assert "unlike speed" in clock.by
    assert clock.error_us is not None
    assert clock.error_us > 1000


def record(kind: str, number: int, issued: float, done: float, **others: Any) -> dict[str, Any]:
    """Return an event in the form of `Log.save`; times in seconds."""
    args = {
        "kind": kind, "sequence": number, "group": "world", "bytes": 4000, "ranks": 2, "error": None,
        "t_issue": issued, "t_done": done, **others,
    }  # fmt: skip
    return {
        "ph": "b",
        "name": kind,
        "ts": issued * 1e6,
        "args": args,
        "id": f"{number}",
        "cat": "communication",
    }


def log(rank: int, host: str, epoch: float, events: list[dict[str, Any]], **about: Any) -> dict[str, Any]:
    known = {"format": 1, "rank": rank, "size": 2, "host": host, "epoch_us": epoch, **about}
    return {"traceEvents": [{**event, "pid": rank} for event in events], "otherData": known}


def profile(rank: int, base_us: float, events: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "traceEvents": events, "baseTimeNanoseconds": base_us * 1e3, "host_name": f"h{rank}",
        "distributedInfo": {"rank": rank, "world_size": 2},
    }  # fmt: skip


def operator(name: str, begin: float, end: float, pid: int) -> dict[str, Any]:
    span = {"ts": begin, "dur": end - begin}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": pid, "tid": 5, **span, "args": {}}


def two_hosts(folder: Path) -> None:
    """Return logs and profiles of two hosts; their clocks differ by 10 s, their times of day by 3 ms.

    In microseconds of the first clock: rank 0 computes in 0–100 and 200–300, rank 1 in 0–300; an all_reduce
    takes from 50 to 250 on both.
    """
    for rank, ahead, late in ((0, 0.0, 0.0), (1, 10e6, 3000.0)):
        epoch = 1.7e15 - ahead + late
        issued, done = (50.0 + ahead) / 1e6, (250.0 + ahead) / 1e6
        events = [record("all_reduce", 1, issued, done), record("send", 0, issued, issued)]
        (folder / f"log{rank}.json").write_text(json.dumps(log(rank, f"h{rank}", epoch, events)))
        spans_ = [(0, 100), (200, 300)] if rank == 0 else [(0, 300)]
        base = 1.6e15
        of_day = [(begin + 1.7e15 + late - base, end + 1.7e15 + late - base) for begin, end in spans_]
        computing = [operator("aten::mm", begin, end, 77) for begin, end in of_day]
        inner = [operator("aten::inner", begin + 10, end - 10, 77) for begin, end in of_day]
        arrows = [{"ph": "s", "id": 1, "ts": of_day[0][0], "pid": 77, "name": "flow"}]
        document = profile(rank, base, [*inner, *computing, *arrows])
        with gzip.open(folder / f"profile{rank}.json.gz", "wt") as file:
            json.dump(document, file)


def test_logs_and_profiles_of_two_hosts_are_on_one_clock(tmp_path: Path) -> None:
    two_hosts(tmp_path)
    output = tmp_path / "all.json"
    merge_traces([tmp_path], output)
    merged = merge_traces([tmp_path], output)  # in the same folder, the file of before is not read
    assert (merged.ranks, merged.missing) == ((0, 1), ())
    clock = merged.clocks["h1"]
    assert clock.error_us == pytest.approx(200, abs=1)  # the operation takes as long
    assert abs(clock.shift_us + 10e6) <= 200
    document = json.loads(output.read_text())
    assert document["otherData"]["clocks"]["h1"]["by"] == "1 operations"
    events = document["traceEvents"]
    times = {(event["pid"], event["name"]): event["ts"] for event in events if event["name"] != "aten::inner"}
    assert times[0, "all_reduce"] == pytest.approx(50)
    assert times[1, "all_reduce"] == pytest.approx(50, abs=200)
    assert times["rank 0: 77", "aten::mm"] == pytest.approx(200, abs=1)  # the second one
    # The rank's profile moves with its log; the time of day would place the log 3 ms off.
    assert times["rank 1: 77", "aten::mm"] == pytest.approx(times[1, "all_reduce"] - 50, abs=1)
    assert {event["id"] for event in events if event["ph"] == "s"} == {"0/1", "1/1"}


def test_what_is_refused(tmp_path: Path) -> None:
    good = json.dumps(log(0, "a", 1.0, []))
    files = {
        "newer.json": (json.dumps(log(0, "a", 1.0, [], format=9)), "otherData.format: of another version"),
        "half.json": (good[: len(good) // 2], "not JSON, or truncated"),
        "size.json": (json.dumps(log(0, "a", 1.0, [], size="2")), "otherData.size"),
        "rank.json": (json.dumps({"traceEvents": [], "distributedInfo": {}}), "distributedInfo.rank"),
        "alone.json": (
            json.dumps({"schemaVersion": 1, "traceEvents": []}), "distributedInfo: missing.*add_metadata_json"
        ),
        "base.json": (
            json.dumps({**profile(0, 1.0, []), "baseTimeNanoseconds": "x"}), "baseTimeNanoseconds: malformed"
        ),
    }  # fmt: skip
    for name, (text, what) in files.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=what) as caught:
            merge_traces([tmp_path / name], tmp_path / "all.json")
        assert str(caught.value).startswith(str(tmp_path / name))
    packed = gzip.compress(good.encode())
    for content in (packed[:-5], packed[:20], b"plain"):
        (tmp_path / "packed.json.gz").write_bytes(content)
        with pytest.raises(ConfigError, match="truncated, or no gzip file"):
            merge_traces([tmp_path / "packed.json.gz"], tmp_path / "all.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no trace in this folder"):
        files_of([tmp_path / "empty"])


def test_a_missing_rank_is_noted(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text(json.dumps(log(1, "a", 1.0, [], size=4)))
    assert merge_traces([tmp_path], tmp_path / "all.json").missing == (0, 2, 3)


def test_operations_that_overlap_are_kernels_of_different_streams(tmp_path: Path) -> None:
    spans_ = [(10.4, 30.6), (20.0, 25.0), (25.5, 40.0), (31.0, 31.2), (45.0, 50.0)]
    events = [
        record("all_reduce", number, begin / 1e6, end / 1e6) for number, (begin, end) in enumerate(spans_, 1)
    ]
    (tmp_path / "log.json").write_text(json.dumps(log(0, "a", 1.0, events, size=1)))
    merge_traces([tmp_path], tmp_path / "all.json", hta=tmp_path / "hta")
    kernels = json.loads((tmp_path / "hta" / "rank0.json").read_text())["traceEvents"]
    found = [(each["tid"], each["ts"], each["dur"]) for each in kernels if each.get("cat") == "kernel"]
    assert found == [(1000, 10, 21), (1001, 20, 5), (1001, 26, 14), (1000, 31, 0), (1000, 45, 5)]
    assert all(each["args"]["stream"] == each["tid"] for each in kernels if each.get("cat") == "kernel")


ANALYSIS = """
import json, sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={rank: f"{sys.argv[1]}/rank{rank}.json" for rank in (0, 1)})
overlap = analysis.get_comm_comp_overlap(visualize=False)
kinds, kernels = analysis.get_gpu_kernel_breakdown(visualize=False)
print(json.dumps({
    "overlap": overlap["comp_comm_overlap_pctg"].tolist(),
    "kernels": [[int(r), name, total] for r, name, total in zip(
        kernels["rank"], kernels["name"], kernels["sum (us)"])],
    "kinds": kinds["kernel_type"].tolist(),
}, default=float))
"""


@pytest.mark.skipif(importlib.util.find_spec("hta") is None, reason="HolisticTraceAnalysis is not installed")
def test_holistic_trace_analysis_counts_operations_and_overlap(tmp_path: Path) -> None:
    two_hosts(tmp_path)
    merge_traces([tmp_path], tmp_path / "all.json", hta=tmp_path / "hta")
    command = [sys.executable, "-W", "ignore", "-c", ANALYSIS, str(tmp_path / "hta")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout.splitlines()[-1])
    # Rank 0 computes in half of 50–250, rank 1 in all of it; ends are rounded to whole microseconds.
    assert found["overlap"] == pytest.approx([50, 100], abs=2)
    sums = {(rank, name): total for rank, name, total in found["kernels"]}
    for rank, computing in ((0, 200), (1, 300)):
        assert sums[rank, "ncclDevKernel_all_reduce"] == pytest.approx(200, abs=2)
        assert sums[rank, "aten::mm"] == pytest.approx(computing, abs=4)
        assert (rank, "aten::inner") not in sums
