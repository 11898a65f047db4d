"""Slurm starts ranks: `srun python train.py`, in a Slurm of the test's own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from jobs.launch import slurm_program
from jobs.launch.slurm import Slurm, free_ports, why_no_slurm
from jobs.launch.slurm_program import LENGTH
from leftovers import lasting
from two_hosts import TwoHosts, why_not

from mcr_plus.rendezvous.mpi_launcher import mpi_flavour, mpi_usable

LIMIT_S: Final = 120.0
REASON: Final = why_no_slurm()
HOSTS: Final = why_not(mpi=False)

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"Slurm: {REASON}")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Slurm() as running:
        yield running


def task(name: str, folder: Path) -> list[str]:
    return [sys.executable, slurm_program.__file__, name, str(folder)]


def seen(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]


def check(done: subprocess.CompletedProcess[str], folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Check that all ranks have met and have the same sums by every library."""
    assert done.returncode == 0, done.stderr
    answers = seen(folder, ranks)
    for rank, answer in enumerate(answers):
        assert (answer["rank"], answer["size"]) == (rank, ranks)
        assert set(answer["sums"].values()) == {(LENGTH - 1) * ranks * (ranks + 1) / 2}
    return answers


@pytest.mark.short("meet")
@pytest.mark.parametrize("program", ["meet", "by_torch"])
def test_tasks_of_a_step_are_ranks(slurm: Slurm, tmp_path: Path, program: str) -> None:
    answers = check(slurm.srun(["-n", "2"], task(program, tmp_path)), tmp_path, 2)
    if program == "meet":
        for rank, answer in enumerate(answers):
            assert answer["launcher"] == "slurm"
            assert (answer["local_rank"], answer["local_size"]) == (rank, 2)
            assert answer["master_addr"] == "127.0.0.1"
            assert sorted(answer["sums"]) == ["gloo", "msccl"]


@pytest.mark.short("pmix")
@pytest.mark.parametrize("kind", ["pmi2", "pmix"])
def test_mpi_under_srun(slurm: Slurm, tmp_path: Path, kind: str) -> None:
    """MPI takes part if srun speaks its interface; Open MPI is left out with the other interface."""
    launcher = mpi_flavour() if mpi_usable() else None
    if launcher is None:
        pytest.skip("needs mpi4py and an MPI library")
    if (launcher.flavour, kind) == ("mpich", "pmix"):
        pytest.skip("MPICH's wheel ends the ranks under PMIx")
    tried = slurm.srun([f"--mpi={kind}"], ["true"])
    if tried.returncode:
        pytest.skip(f"srun --mpi={kind}: {tried.stderr.strip().splitlines()[0]}")
    speaks = {"openmpi": "pmix", "mpich": "pmi2"}
    for answer in check(slurm.srun(["-n", "2", f"--mpi={kind}"], task("meet", tmp_path)), tmp_path, 2):
        assert answer["launcher"] == "slurm"
        assert ("mpi" in answer["sums"]) == (speaks[launcher.flavour] == kind)


@pytest.mark.long
def test_torchruns_as_tasks(slurm: Slurm, tmp_path: Path) -> None:
    """One torchrun per node, as usual; the ranks inherit the variables of the two ranks of MPI's launcher."""
    kind = "none" if slurm.srun(["--mpi=pmix"], ["true"]).returncode else "pmix"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_ports(1)[0]}"]
    line = [*torchrun, *meeting, *task("meet", tmp_path)[1:]]
    for answer in check(slurm.srun(["-n", "2", f"--mpi={kind}"], line), tmp_path, 4):
        assert answer["launcher"] == "torchrun"
        assert sorted(answer["sums"]) == ["gloo", "msccl"]


@pytest.mark.long
def test_steps_of_a_batch_job_do_not_meet(slurm: Slurm, tmp_path: Path) -> None:
    """Two steps run at once, and the script itself is no rank."""
    folders = [tmp_path / name for name in ("a", "b", "script")]
    for folder in folders:
        folder.mkdir()
    steps = [" ".join(["srun", "--exact", "-n", "2", *task("meet", folder), "&"]) for folder in folders[:2]]
    alone, end = " ".join(task("meet", folders[2])), tmp_path / "end"
    script = tmp_path / "job.sh"
    script.write_text("\n".join(["#!/bin/bash", *steps, alone, "wait", f"echo ended > {end}", ""]))
    done = slurm.run("sbatch", "-n", "4", f"--output={tmp_path}/output", str(script))
    assert done.returncode == 0, done.stderr
    texts([end])  # sbatch --wait looks only every half a minute
    ports = [{answer["master_port"] for answer in seen(folder, 2)} for folder in folders[:2]]
    assert len(set.union(*ports)) == 2, (tmp_path / "output").read_text()
    assert seen(folders[2], 1)[0]["launcher"] == "single"


@pytest.mark.long
def test_a_task_that_dies_is_named(slurm: Slurm, tmp_path: Path) -> None:
    done = slurm.srun(["-n", "2"], task("dies", tmp_path))
    assert done.returncode != 0
    assert json.loads((tmp_path / "0").read_text()) == {"rank": 0, "lost": [1]}


def test_a_cancelled_job_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    mpi = ["--mpi=none"] if slurm.srun(["--mpi=pmix"], ["true"]).returncode else ["--mpi=pmix"]
    words = ["-n", "2", *mpi, "--job-name=cancelled"]
    job = slurm.start(words, task("idle", tmp_path))
    processes = [Path("/proc", text) for text in texts([tmp_path / "pid0", tmp_path / "pid1"])]
    memory = {Path(path) for process in processes for path in shared_files(process)}
    assert memory or mpi == ["--mpi=none"]  # mcr_plus's own has no names, MPI's has
    assert slurm.run("scancel", "--name=cancelled").returncode == 0
    assert job.wait(LIMIT_S) != 0
    assert lasting(lambda: [str(path) for path in (*processes, *memory) if path.exists()]) == []


def shared_files(process: Path) -> set[str]:
    """Return the files in shared memory that a process has mapped."""
    lines = (process / "maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line and "(deleted)" not in line}


def texts(files: Sequence[Path]) -> list[str]:
    """Wait for the files of programs; return their texts."""
    deadline = time.monotonic() + LIMIT_S
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [file.read_text() for file in files]


@pytest.mark.long
@pytest.mark.skipif(HOSTS is not None, reason=f"hosts: {HOSTS}")
def test_nodes_are_hosts(tmp_path: Path) -> None:
    """Two tasks run on the first node and one on the second, which has a network of its own."""
    with TwoHosts(None) as hosts, Slurm(hosts) as slurm:
        names = hosts.names
        line = ["-N", "2", "-n", "3", "--distribution=block"]
        done = slurm.srun(line, task("meet", tmp_path), {"MCR_SECRET": "a random text"})
        answers = check(done, tmp_path, 3)
    assert [answer["host"] for answer in answers] == [names[0], names[0], names[1]]
    assert {answer["master_addr"] for answer in answers} == {names[0]}
    assert {*answers[0]["sums"]} == {"gloo"}
    assert [(answer["local_rank"], answer["local_size"]) for answer in answers] == [(0, 2), (1, 2), (0, 1)]
