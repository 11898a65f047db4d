"""Recording: what was recorded, its sums, and the trace, from real ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.observe.record import bus_factor, size_class


def record_some(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
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
            time.sleep(0.2)
        began = time.perf_counter()
        mcr.barrier()
        waited = time.perf_counter() - began
    mcr.all_reduce(torch.ones(8), tag="after")
    log.save(Path(folder) / f"trace{comm.rank}.json")
    rows = [
        [r.kind, r.backend, r.size_class, r.count, r.bytes, r.p50_us <= r.p95_us, r.algbw_GBps >= 0]
        for r in log.summary()
    ]
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
        "barrier": [log.records[-1].t_done - log.records[-1].t_issue, waited],
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
        recorded, waited = value["barrier"]
        assert recorded == pytest.approx(waited, abs=0.02)
        assert value["waited"][0] == pytest.approx(waited, abs=0.02)
        assert value["waited"][1] >= 0
        trace = json.loads((tmp_path / f"trace{rank}.json").read_text())["traceEvents"]
        begun = [event for event in trace if event["ph"] == "b"]
        ended = {event["id"]: event["ts"] for event in trace if event["ph"] == "e"}
        assert len(begun) == len(ended) == 6
        assert all(ended[event["id"]] >= event["ts"] for event in begun)
    assert results[1]["barrier"][0] > 0.15  # rank 1 waited for rank 0


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_size_class(nbytes: int, expected: int) -> None:
    assert size_class(nbytes) == expected


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [("all_reduce", 4, 1.5), ("all_gather", 4, 0.75), ("all_to_all_v", 2, 0.5), ("broadcast", 8, 1.0)],
)
def test_bus_factor_is_that_of_nccl_tests(kind: str, ranks: int, expected: float) -> None:
    assert bus_factor(kind, ranks) == expected
