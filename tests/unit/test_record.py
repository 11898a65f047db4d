"""Recording on real ranks: the records, their sums, and the trace."""

from __future__ import annotations

import gc
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks, wait_for_files

import mcr_plus as mcr
from mcr_plus.core.kinds import bus_factor
from mcr_plus.job.init import current
from mcr_plus.observe.record import Log, Record, size_class


def while_it_waits(file: Path) -> None:
    """Touch a file after the program has waited for 0.2 seconds."""
    while not current().engine.waits:
        time.sleep(0.005)
    time.sleep(0.2)
    file.touch()


def record_some(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    has_waited = Path(folder, "has_waited")
    comm = mcr.init({"version": 1, "backends": ["mpi", "gloo"]})
    mcr.all_reduce(torch.ones(8), async_op=True, tag="before")  # not recorded
    with mcr.record() as log:
        for numel in (10, 10, 1000):
            mcr.all_reduce(torch.ones(numel), tag="grad")
        with mcr.record() as inner:
            work = mcr.all_reduce(torch.ones(8), async_op=True, backend="gloo", compress="bf16")
            assert work is not None
            work.wait()
        received = [[1, 1], [2, 2]][comm.rank]
        out = torch.empty(sum(received))
        mcr.all_to_all_single(out, torch.ones(3), received, [1, 2], tag="tokens")
        if comm.rank == 0:
            wait_for_files(has_waited)
        else:
            threading.Thread(target=while_it_waits, args=(has_waited,)).start()
        began = time.perf_counter()
        mcr.barrier()
        ended = time.perf_counter()
    mcr.all_reduce(torch.ones(8), tag="after")
    log.save(Path(folder) / f"trace{comm.rank}.json")
    rows = [
        [r.kind, r.backend, r.size_class, r.count, r.bytes, r.p50_us <= r.p95_us, r.algbw_GBps >= 0]
        for r in log.summary()
    ]
    assert str(log).startswith(f"Communication of rank {comm.rank} in ")
    mcr.finalize()
    return {
        "records": [
            [
                r.kind,
                r.tag,
                r.group,
                r.backend,
                r.codec,
                r.bytes,
                r.wire_bytes,
                r.fused,
                r.t_done >= r.t_issue,
            ]
            for r in log.records
        ],
        "sequences": [r.sequence for r in log.records],
        "inner": len(inner.records),
        "waited": [
            log.records[-1].waited,
            log.records[0].t_done - log.records[0].t_issue - log.records[0].waited,
        ],
        "rows": rows,
        "barrier": log.records[-1].t_done - log.records[-1].t_issue,
        "is_within": began <= log.records[-1].t_issue and log.records[-1].t_done <= ended,
    }


def test_records_summary_and_trace(tmp_path: Path) -> None:
    results = [result.value for result in run_ranks(record_some, 2, args=[str(tmp_path)])]
    for rank, value in enumerate(results):
        tokens = 4 * max(3, [2, 4][rank])  # the larger of what the rank sends and receives
        assert value["records"] == [
            ["all_reduce", "grad", "world", "mpi", None, 40, 40, 1, True],
            ["all_reduce", "grad", "world", "mpi", None, 40, 40, 1, True],
            ["all_reduce", "grad", "world", "mpi", None, 4000, 4000, 1, True],
            ["all_reduce", None, "world", "gloo", "bf16", 32, 16, 1, True],
            ["all_to_all_v", "tokens", "world", "mpi", None, tokens, tokens, 1, True],
            ["barrier", None, "world", "mpi", None, 0, 0, 1, True],
        ]
        assert value["sequences"] == list(range(2, 8))
        assert value["inner"] == 1
        assert value["rows"] == [
            ["all_reduce", "gloo", 32, 1, 32, True, True],
            ["all_reduce", "mpi", 64, 2, 80, True, True],
            ["all_reduce", "mpi", 4096, 1, 4000, True, True],
            ["all_to_all_v", "mpi", [16, 16][rank], 1, tokens, True, True],
            ["barrier", "mpi", 0, 1, 0, True, True],
        ]
        assert value["is_within"]
        assert 0 <= value["waited"][0] <= value["barrier"]
        assert value["waited"][1] >= 0
        trace = json.loads((tmp_path / f"trace{rank}.json").read_text())["traceEvents"]
        document = json.loads((tmp_path / f"trace{rank}.json").read_text())
        assert document["otherData"]["rank"] == rank
        begun = [event for event in trace if event["ph"] == "b"]
        ended = {event["id"]: event["ts"] for event in trace if event["ph"] == "e"}
        assert len(begun) == len(ended) == 6
        assert all(ended[event["id"]] >= event["ts"] for event in begun)
    assert results[1]["waited"][0] > 0.2  # rank 1 waited for rank 0


def some_log() -> Log:
    """Return a log of three good operations and one that failed."""

    def record(kind: str, backend: str, begin: float, end: float, error: str | None = None) -> Record:
        return Record(1, kind, "a", "world", backend, None, 3 << 20, 3 << 20, 1, begin, end, 0.01, 2, error)

    log = Log(1)
    log.stop()
    log.records.extend(
        [
            record("all_reduce", "mpi", 5.0, 5.1),
            record("all_reduce", "mpi", 5.05, 5.2),
            record("barrier", "gloo", 5.2, 5.21),
            record("send", "gloo", 5.0, 5.1, "failed"),
        ]
    )
    return log


def test_threads_that_look_at_logs_leave_the_collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Log(0), Log(0)
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*_: object) -> Record:
        begun.set()
        assert goes_on.wait(10)
        return object.__new__(Record)

    monkeypatch.setattr(first, "_record", slow)
    monkeypatch.setattr(second, "_record", slow)
    for log in (first, second):
        log._noted.append(())
    assert gc.isenabled()
    threads = [threading.Thread(target=log._take_in) for log in (first, second, first)]
    try:
        threads[0].start()
        assert begun.wait(10)
        for thread in threads[1:]:
            thread.start()
        time.sleep(0.05)  # the others come to the lock
    finally:
        goes_on.set()
        for thread in threads:
            thread.join()
        was_enabled = gc.isenabled()
        gc.enable()
    assert was_enabled
    assert [len(first.records), len(second.records)] == [1, 1]


def test_a_log_prints_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "seconds", 2.0)
    title, _, head, first, second, _, *caption = str(some_log()).splitlines()
    assert title == "Communication of rank 1 in 2 s, without 1 operation that failed"
    assert head.split("  ")[0] == "op"
    assert first.split() == ["all_reduce", "a", "mpi", "2", "6", "MiB", "125,000", "12.5%", "1.0%"]
    assert second.split() == ["barrier", "a", "gloo", "1", "3", "MiB", "10,000", "0.5%", "0.5%"]
    assert "1.5% of the time" in caption[1]
    assert str(Log(0)).endswith("nothing was recorded")


def test_a_summary_prints_as_a_table() -> None:
    log = some_log()
    title, _, *lines = str(log.summary()).splitlines()
    assert title == "Operations of 2 ranks"
    head, first, second = (" ".join(line.split()) for line in lines[:3])
    assert head == "op backend size count data p50 µs p95 µs alg GB/s bus GB/s"
    assert first == "all_reduce mpi 4 MiB 2 6 MiB 125,000 147,500 0.0252 0.0252"
    assert second == "barrier gloo 4 MiB 1 3 MiB 10,000 10,000 0.315 0.315"
    log.records.append(replace(log.records[0], kind="all_to_all_v", codec="int8_block", wire_bytes=1 << 20))
    head, *rows = str(log.summary()).splitlines()[2:6]
    assert head.split()[:3] == ["op", "backend", "codec"]
    assert [row.split()[2] for row in rows] == ["-", "int8_block", "-"]
    assert "1 MiB" in rows[1]
    assert len({len(line) for line in (head, *rows)}) == 1  # columns are aligned
    assert max(map(len, str(log.summary()).splitlines())) <= 100
    log.records.append(replace(log.records[0], ranks=4))
    assert str(log.summary()).splitlines()[2].split()[3] == "ranks"
    log.records.pop()
    assert [row.kind for row in log.summary()] == ["all_reduce", "all_to_all_v", "barrier"]  # still a list
    assert str(Log(0).summary()) == "no operations were recorded, or all of them failed"


def test_a_log_can_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    log = some_log()
    log.plot(tmp_path / "log.svg")
    drawn = (tmp_path / "log.svg").read_text()
    assert drawn.startswith("<?xml")
    for word in ("all_reduce", "barrier", "mpi", "gloo"):
        assert word in drawn
    with pytest.raises(mcr.InvalidArgument, match=r"unknown ending '.txt'; known: .png, .svg, .pdf"):
        log.plot(tmp_path / "log.txt")
    with pytest.raises(mcr.InvalidArgument, match="no such folder"):
        log.plot(tmp_path / "none" / "log.png")
    with pytest.raises(mcr.InvalidArgument, match="nothing was recorded"):
        Log(0).plot(tmp_path / "empty.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(mcr.Unsupported, match=r"pip install 'mcr_plus\[plot\]'"):
        log.plot(tmp_path / "log.png")


def test_a_trace_makes_its_folder(tmp_path: Path) -> None:
    some_log().save(tmp_path / "traces" / "log1.json")
    assert len(json.loads((tmp_path / "traces" / "log1.json").read_text())["traceEvents"]) > 4


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_size_class(nbytes: int, expected: int) -> None:
    assert size_class(nbytes) == expected


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [("all_reduce", 4, 1.5), ("all_gather", 4, 0.75), ("all_to_all_v", 2, 0.5), ("broadcast", 8, 1.0)],
)
def test_bus_factor_is_that_of_nccl_tests(kind: str, ranks: int, expected: float) -> None:
    assert bus_factor(kind, ranks) == expected
