"""The backend `mcr` of torch.distributed: what torch's own tests (tests/torch_suite) do not look at."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from jobs.torch_backend import torch_jobs as jobs
from ranks import run_ranks
from torch_features import FSDP2_ON_CPU

from mcr_plus.torch_backend.work import joint


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    return [
        result.value for result in run_ranks(jobs.every_section, 2, via="torch", timeout=240, teardown=True)
    ]


@pytest.mark.short
@pytest.mark.parametrize("section", list(jobs.SECTIONS))
def test_two_ranks(told: list[dict[str, str]], section: str) -> None:
    problems = {rank: found[section] for rank, found in enumerate(told) if found[section]}
    assert not problems, "\n".join(f"rank {rank}: {text}" for rank, text in problems.items())


def test_configurations_that_differ_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for rank, timeout in enumerate(("30s", "31s")):
        text = f"version: 1\npipeline:\n  - select: {{}}\n  - dispatch: {{timeout: {timeout}}}\n"
        (tmp_path / f"{rank}.yaml").write_text(text)
    for result in run_ranks(jobs.with_other_files, 2, args=[str(tmp_path)], via="torch"):
        assert "differs between ranks: rank 0 and ranks [1]" in result.value
        assert "1.yaml" in result.value
        assert "in pipeline[1].dispatch.timeout: '30s' and '31s'; all ranks" in result.value


def test_a_backend_whose_launcher_is_missing_is_refused() -> None:
    for result in run_ranks(jobs.with_mpi_only, 2, via="torch"):
        assert "backend mpi was asked for, but no MPI launcher started this job" in result.value


@pytest.mark.skipif(not FSDP2_ON_CPU, reason="this torch runs FSDP2 on GPUs only")
def test_a_rank_that_dies_in_fsdp() -> None:
    survivor, killed = run_ranks(jobs.killed_in_fsdp, 2, via="torch", check=False)
    assert killed.returncode == -9
    text, seconds = survivor.value
    assert "rank 1 has died" in text
    assert seconds < 20, "before the deadline of 30 s"


def test_parts_one_after_the_other() -> None:
    run_ranks(
        jobs.parts_one_after_the_other, 2, via="torch"
    )  # alone: gloo cannot be started twice on a store


def test_started_by_mpi() -> None:
    for result in run_ranks(jobs.started_by_mpi, 2, via="mpi", teardown=True):
        assert result.value == [[1.0] * 3, ["msccl", "mpi", "gloo"]] * 2


@pytest.mark.long
def test_ranks_that_are_restarted_read_nothing_of_earlier_attempts() -> None:
    """torchrun's agent keeps the store from one attempt to the next."""
    for result in run_ranks(jobs.restarted, 2, via="torch", restarts=2):
        assert result.value == [[3.0] * 3] * 4  # over two libraries, and in two groups


UNDER_TORCHRUN = """
import os, sys
import torch, torch.distributed as dist
import mcr_plus as mcr
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
native = sys.argv[1] == "native"
if native:
    reduce = mcr.init(timeout=60.0).all_reduce
else:
    dist.init_process_group("mcr")
    reduce = dist.all_reduce
reduce(x := torch.full((3,), rank + 1.0))
if attempt == 0 and rank == 1:
    os._exit(17)
reduce(x)
os.write(1, f"{attempt} {x.tolist()}\\n".encode())
mcr.finalize() if native else dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("native", ["native", "torch"])
def test_a_job_that_torchrun_restarts(tmp_path: Path, native: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(UNDER_TORCHRUN)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(program), native],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 [6.0, 6.0, 6.0]"] * 2


@pytest.mark.long
def test_under_the_name_of_gloo() -> None:
    results = run_ranks(jobs.under_the_name_of_gloo, 2, via="torch", env={"MCR_MASQUERADE": "gloo"})
    names = [result.value for result in results]
    assert names == [["gloo", "_AsGloo", "_AsGloo"], ["gloo", "_AsGloo", "int"]]


def test_several_handles_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    now = 100.0
    monkeypatch.setattr("mcr_plus.core.deadline.monotonic", lambda: now)

    class Handle(dist.Work):
        def wait(self, timeout: timedelta = timedelta(0)) -> bool:
            nonlocal now
            asked.append(timeout.total_seconds())
            now += 0.05
            return True

    handle = joint([Handle(), Handle(), Handle()], [])
    handle.synchronize()
    assert asked == [0.0] * 3  # torch's way to say that nothing bounds it
    asked.clear()
    handle.wait(timedelta(seconds=0.08))
    first, second, third = asked
    assert (first, second) == pytest.approx((0.08, 0.03))
    assert 0 < third < 0.001  # it has expired, which zero would not say


def python(program: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MCR_", "TORCH_"))}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=300)
    return run.stdout.strip() or run.stderr


KNOWN = (
    "print('mcr' in torch.distributed.Backend.backend_list, "
    "'mcr_plus.communicator.communicator' in sys.modules)"
)


@pytest.mark.long
@pytest.mark.parametrize("autoload", [True, False])
def test_the_backend_is_registered_with_torch(autoload: bool) -> None:
    environment = {} if autoload else {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    torch_first = f"import sys, torch, torch.distributed; {KNOWN}; import mcr_plus; {KNOWN}"
    assert python(torch_first, **environment) == f"{autoload} False\nTrue False"
    torch_last = f"import sys, mcr_plus, torch, torch.distributed; {KNOWN}"
    assert python(torch_last, **environment) == "True False"


@pytest.mark.long
def test_a_wrong_masquerade_is_refused() -> None:
    assert "MCR_MASQUERADE='nccl': expected gloo" in python("import torch", MCR_MASQUERADE="nccl")


@pytest.mark.long
def test_autoload_does_not_change_programs_on_other_backends() -> None:
    """That there is one more backend changes nothing for a program that names others."""
    program = (
        "import torch, torch.distributed as dist; "
        "dist.init_process_group('cpu:gloo', init_method='tcp://127.0.0.1:29791', rank=0, world_size=1); "
        "x = torch.ones(2); dist.all_reduce(x); dist.barrier(); print(x.tolist(), dist.get_backend())"
    )
    assert python(program) == python(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
