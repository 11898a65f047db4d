"""Effects of variables that other launchers have left in a process's environment."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from mcr_plus.backends.mpi.backend import MpiBackend
from mcr_plus.core.c10d import HashStore
from mcr_plus.core.environment import (
    LaunchEnvironment,
    launch_environment,
    on_one_host,
    rank_by_mpi,
    started_by_mpi,
)
from mcr_plus.errors import LaunchError
from mcr_plus.rendezvous import store as store_module
from mcr_plus.rendezvous.store import open_plain_store
from mcr_plus.rendezvous.world import World

# srun's variables in the only task of a step, such as `ray start` on each node, with and without PMIx.
STEP = {
    "SLURM_JOB_ID": "42", "SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node7",
    "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip
PMIX = STEP | {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.42.1"}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "x",
}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_RANK": "3"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (STEP, None),
        (PMIX, (0, 1)),
        (TORCHRUN | PMIX, (0, 1)),
        ({"PMIX_RANK": "2"}, (2, None)),
        (OPENMPI, (3, 8)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        (STEP | {"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({"PMIX_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
    ],
)
def test_the_rank_that_an_mpi_launcher_gave(
    environ: dict[str, str], expected: tuple[int, int | None] | None
) -> None:
    assert rank_by_mpi(environ) == expected


def test_a_malformed_rank_of_an_mpi_launcher() -> None:
    with pytest.raises(LaunchError, match="PMIX_RANK='x': expected a whole number"):
        rank_by_mpi(PMIX | {"PMIX_RANK": "x"})


def test_workers_of_ray_do_not_read_how_ray_was_started() -> None:
    worker = PMIX | OPENMPI | {"RAY_RAYLET_PID": str(os.getppid())}
    assert launch_environment(worker) == LaunchEnvironment()
    assert rank_by_mpi(worker) is None
    assert not started_by_mpi(worker)
    assert not on_one_host(worker)
    by_torch = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert launch_environment(worker | by_torch).launcher == "env"
    assert on_one_host(worker | by_torch)


def test_a_program_that_a_worker_of_ray_starts_reads_its_own_launcher() -> None:
    inside = OPENMPI | {"RAY_RAYLET_PID": str(os.getpid())}  # no parent of this process
    assert launch_environment(inside).launcher == "openmpi"


def test_a_launcher_of_fewer_ranks_does_not_place_a_group() -> None:
    """Two hosts have steps of one task, and these tasks have started the ranks of one job."""
    assert on_one_host(STEP)
    assert not on_one_host(STEP, ranks=2)
    two = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert on_one_host(two, ranks=2)
    assert on_one_host(two, ranks=1)  # a group of some of them


@pytest.mark.parametrize(
    ("environ", "rank", "refusal"),
    [
        (PMIX, 1, "started rank 0 of 1 here, where the job has rank 1 of 2"),
        (PMIX, 0, "started rank 0 of 1 here, where the job has rank 0 of 2"),
        ({"PMIX_RANK": "1"}, 0, "started rank 1 here, where the job has rank 0 of 2"),
        ({"PMIX_RANK": "one"}, 0, "PMIX_RANK='one'"),
        (STEP, 0, "no MPI launcher started this job"),
        ({"PMIX_RANK": "1"}, 1, ""),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1, ""),
    ],
)
def test_mpi_is_not_initialised_as_another_rank(
    environ: dict[str, str], rank: int, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI_", "SLURM_", "MPI_")):
            monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    found = MpiBackend._not_started(World(rank, 2, ("a", "a"), 1.0))
    assert refusal in found
    assert bool(found) == bool(refusal)


def test_steps_at_the_same_port_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port follows from the numbers of job and step, and other numbers may give the same one."""
    shared = HashStore()
    monkeypatch.setattr(store_module, "_through_address", lambda *_: shared)
    place = LaunchEnvironment(launcher="slurm", master_addr="127.0.0.1", master_port=20_000)
    parts = []
    for job, step in (("1", "31"), ("2", "0"), ("1", "31")):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_STEP_ID", step)
        parts.append(store_module._connect(place, 1.0)[0])
    parts[0].set("key", "of the first")
    assert [part.check(["key"]) for part in parts] == [True, False, True]


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        place = LaunchEnvironment(0, 2, 0, 2, "slurm", "127.0.0.1", port)
        with pytest.raises(
            LaunchError, match=f"rank 0 cannot listen on 127.0.0.1:{port}, which another program"
        ):
            open_plain_store(place, 1.0)
