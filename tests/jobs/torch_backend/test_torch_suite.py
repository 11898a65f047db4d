"""A part of torch's own tests of torch.distributed, on mcr; all of them beside gloo's: make torch-suite."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch.distributed as dist

SUITES: Final = Path(__file__).parents[2] / "torch_suite"
SUITE: Final = SUITES / "suite.py"
PART: Final = (
    "test_all_gather*", "test_all_reduce_sum*", "test_all_to_all*", "test_broadcast*", "test_gather*",
    "test_scatter*", "test_reduce_sum*", "test_send_recv*", "test_isend*", "test_barrier_timeout*",
    "test_DistributedDataParallel*", "test_ddp_logging*", "test_new_subgroups*", "test_static_graph*",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("gate", ["gloo", "mpi"])
def test_torchs_own(gate: str) -> None:
    command = [sys.executable, str(SUITE), "mcr", gate, "2", *PART]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    told = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"test"')]
    failed = [f"{each['test']}: {each['why'][-1500:]}" for each in told if each["outcome"] == "fail"]
    assert not failed, "\n".join(failed)
    assert sum(each["outcome"] == "pass" for each in told) > 20, run.stderr[-2000:]


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "reconfigure"), reason="torch before 2.14")
def test_c10ds_tests_of_fault_tolerance() -> None:
    command = [sys.executable, str(SUITES / "fault_tolerance_suite.py"), "mcr"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    told = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"test"')]
    if [each["test"] for each in told] == ["all"]:
        pytest.skip(told[0]["why"])
    assert run.returncode == 0, "\n".join(f"{each['test']}: {each['why'][-1500:]}" for each in told)
    assert sum(each["outcome"] == "pass" for each in told) > 10, run.stderr[-2000:]
