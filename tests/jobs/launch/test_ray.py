"""Ray Train starts ranks: `TorchConfig(backend="mcr")`, in a Ray of the test's own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from jobs.launch import ray_program
from jobs.launch.ray_program import DIES_AT, WORKERS, expected
from leftovers import lasting

LIMIT_S: Final = 900.0
# srun or mpirun may have started Ray, whose workers inherit their variables.
INHERITED: Final = {
    "SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node7",
    "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "PMIX_RANK": "0",
    "PMIX_NAMESPACE": "slurm.pmix.42.0",
}  # fmt: skip
MARK: Final = "MCR_TEST_OF_RAY"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (make test-launchers installs it)"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the observations of the jobs of `ray_program`."""
    folder = tmp_path_factory.mktemp("ray")
    paths = [str(Path(ray_program.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", MARK: str(folder), **INHERITED}
    with open(folder / "output", "w") as output:
        done = subprocess.run(
            [sys.executable, ray_program.__file__, str(folder)],
            env={**os.environ, **settings}, stdout=output, stderr=output, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, (folder / "output").read_text()[-6000:]
    return folder


def seen(folder: Path, job: str, attempt: int = 0) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{job}-{rank}-{attempt}.json").read_text()) for rank in range(WORKERS)]


def error_of(folder: Path, job: str) -> list[str] | None:
    errors: dict[str, list[str]] = json.loads((folder / "errors.json").read_text())
    return errors.get(job)


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "attempt", "libraries", "tolerance"),
    [("trained", 0, {"msccl", "gloo"}, 1e-5), ("restarted", 1, {"msccl", "gloo"}, 2e-2)],
)
def test_workers_train_as_one_process(
    folder: Path, job: str, attempt: int, libraries: set[str], tolerance: float
) -> None:
    """Train by DDP and by `mcr.wrap`, without MPI, though the variables of an MPI launcher are set."""
    assert error_of(folder, job) is None
    losses, weight = expected()
    for rank, worker in enumerate(seen(folder, job, attempt)):
        assert (worker["backend"], worker["size"], worker["sum"]) == ("mcr", WORKERS, 3.0)
        assert set(worker["libraries"]) == libraries
        assert len(worker["trained"]) == len(ray_program.JOBS[job]["ways"])
        for trained in worker["trained"]:
            np.testing.assert_allclose(trained["losses"], losses[rank], rtol=tolerance)
            np.testing.assert_allclose(trained["weight"], weight, rtol=tolerance, atol=tolerance)
        assert "error" not in worker


@pytest.mark.long
def test_workers_have_the_configuration_of_their_environment(folder: Path) -> None:
    for worker in seen(folder, "restarted", 1):
        assert {codec for kind, codec in worker["operations"] if kind == "all_reduce"} == {"bf16"}
    for worker in seen(folder, "trained"):
        assert {codec for _, codec in worker["operations"]} == {None}


@pytest.mark.long
def test_a_worker_that_dies_is_named(folder: Path) -> None:
    first, last = seen(folder, "failed")
    assert "error" not in last  # it was killed
    assert len(first["trained"][0]["losses"]) == DIES_AT
    kind, text = first["error"]
    assert kind == "PeerLost"
    assert f"rank {WORKERS - 1}" in text
    error = error_of(folder, "failed")
    assert error is not None
    assert error[0] == "WorkerGroupError"


@pytest.mark.long
def test_ray_starts_all_workers_again(folder: Path) -> None:
    """The new processes find nothing of the failed attempt."""
    before, after = seen(folder, "restarted", 0), seen(folder, "restarted", 1)
    assert not {worker["pid"] for worker in before} & {worker["pid"] for worker in after}
    assert before[0]["error"][0] == "PeerLost"


@pytest.mark.long
def test_nothing_is_left(folder: Path) -> None:
    mark = f"{MARK}={folder}".encode()

    def running() -> list[str]:
        return [each.name for each in Path("/proc").glob("[0-9]*") if mark in variables(each)]

    assert lasting(running) == []


def variables(process: Path) -> list[bytes]:
    """Return the variables with which a process was started."""
    with suppress(OSError):  # it has ended
        return (process / "environ").read_bytes().split(b"\0")
    return []
