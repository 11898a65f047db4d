"""Ranks go on without ranks and hosts that are lost, also the ones that the job's store was on.

Hosts are network namespaces here. No launcher has a store: the first one is in the process of rank 0.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from jobs.elasticity import surviving
from jobs.elasticity.test_elastic import PROGRAM, check
from losing import errors_in
from racks import Racks
from ranks import nursery
from two_hosts import TwoHosts, why_not

from mcr_plus.rendezvous.mpi_launcher import mpi_flavour, mpi_usable

# From a loss to the new world, on two busy cores; benchmarks/bench_survive.py measures. Shorter than the
# deadline of operations and the usual silence of a host, by which ranks would find the loss at last.
LIMIT_S = 20.0
REASON = why_not(mpi=False)
several_hosts = pytest.mark.skipif(REASON is not None, reason=f"hosts: {REASON}")

long = pytest.mark.long


def _has_fault_tolerance() -> bool:
    launcher = mpi_flavour() if mpi_usable() else None
    return launcher is not None and launcher.flavour == "openmpi" and launcher.major >= 5


def job_on(*args: Any, **options: Any) -> AbstractContextManager[surviving.Job]:
    return surviving.job_on(*args, python=nursery().python, **options)


def job_by_mpirun(*args: Any, **options: Any) -> AbstractContextManager[surviving.Job]:
    return surviving.job_by_mpirun(*args, python=nursery().python, **options)


needs_ulfm = pytest.mark.skipif(not _has_fault_tolerance(), reason="needs Open MPI 5 or later")


@long
@several_hosts
@pytest.mark.parametrize(
    ("how", "victim"),
    [("kill", 0), ("stop", 3), pytest.param("kill", 3, marks=long), pytest.param("stop", 0, marks=long)],
)
def test_a_rank_of_two_hosts(tmp_path: Path, how: str, victim: int) -> None:
    with TwoHosts(None) as hosts, job_on(hosts, tmp_path, per_host=2) as job:
        left = [rank for rank in range(4) if rank != victim]
        since = job.lose(how, [victim])
        for said in job.gone_on(left).values():
            assert said["lost"] == [victim]
            assert said["at"] - since < LIMIT_S
        if how == "stop":
            os.kill(job.pids[victim], signal.SIGCONT)
            alone = job.told([victim])[victim]
            assert alone["error"] == "Revoked"
            assert "the other ranks have continued without this one" in alone["text"]
        job.end(left)


@pytest.mark.short("kill-0")
@several_hosts
@pytest.mark.parametrize(
    ("how", "host"),
    [("kill", 0), ("cut", 2), pytest.param("kill", 2, marks=long), pytest.param("cut", 0, marks=long)],
)
def test_a_whole_host_of_three(tmp_path: Path, how: str, host: int) -> None:
    """Two hosts of three are a majority; on the one that was cut off, the rank raises."""
    with Racks(1, 3) as hosts, job_on(hosts, tmp_path, timeout=3) as job:
        left = [rank for rank in range(3) if rank != host]
        if how == "cut":
            hosts.cut(host)
        since = time.monotonic() if how == "cut" else job.lose_host(hosts, host)
        for said in job.gone_on(left).values():
            assert said["lost"] == [host]
            assert said["at"] - since < LIMIT_S
        if how == "cut":
            alone = job.told([host])[host]
            assert alone["error"] == "BackendError"
            assert "1 of 3 ranks that may be running are within reach, no majority" in alone["text"]
        job.end(left)


@long
@several_hosts
def test_a_host_that_tears_connections_is_not_waited_for_until_the_usual_limit(tmp_path: Path) -> None:
    with Racks(1, 3) as hosts, job_on(hosts, tmp_path, heartbeat="auto") as job:
        since = job.lose_host(hosts, 0)
        for said in job.gone_on([1, 2]).values():
            assert said["lost"] == [0]
            assert said["at"] - since < LIMIT_S
        job.end([1, 2])


@long
@several_hosts
@pytest.mark.parametrize(
    ("how", "host"),
    [("kill", 0), ("cut", 0), pytest.param("kill", 2, marks=long), pytest.param("cut", 2, marks=long)],
)
def test_a_reset_beside_a_host_that_is_lost_names_it(tmp_path: Path, how: str, host: int) -> None:
    """The first host has the store of the world. Nothing is closed, so that a shrink follows."""
    with Racks(1, 3) as hosts, job_on(hosts, tmp_path, resets=True) as job:
        if how == "cut":
            hosts.cut(host)
        else:
            job.lose("kill", [host])
        left = [rank for rank in range(3) if rank != host]
        for said in job.gone_on(left).values():
            assert said["reset"]["ranks"] == said["lost"] == [host]
            assert "the remaining ranks can continue with mcr.shrink()" in said["reset"]["text"]
            assert said["reset"]["seconds"] < LIMIT_S
        job.end(left)


@long
@several_hosts
def test_one_host_after_another(tmp_path: Path) -> None:
    """Each time the one that has the store of the world, and the first of the keepers."""
    with Racks(1, 4) as hosts, job_on(hosts, tmp_path, min_ranks=1) as job:
        for host in range(3):
            since = job.lose_host(hosts, host)
            for said in job.gone_on(list(range(host + 1, 4)), epoch=host + 1).values():
                assert said["at"] - since < LIMIT_S
            time.sleep(0.5)  # the agents of the new world have heard of each other
        job.end([3])


@long
@several_hosts
@pytest.mark.parametrize("least", [None, 2])
def test_half_of_the_hosts(tmp_path: Path, least: int | None) -> None:
    """Half of the ranks are no majority: they go on only if `min_ranks` says so."""
    with TwoHosts(None) as hosts, job_on(hosts, tmp_path, per_host=2, min_ranks=least, timeout=3) as job:
        job.lose_host(hosts, 0)
        if least is None:
            for said in job.told([2, 3]).values():
                assert said["error"] == "BackendError"
                assert "2 of 4 ranks that may be running are within reach, no majority" in said["text"]
        else:
            job.gone_on([2, 3])
            job.end([2, 3])


@long
@several_hosts
def test_two_separated_hosts_both_stop(tmp_path: Path) -> None:
    """Not for a moment: there is no majority."""
    with TwoHosts(None) as hosts, job_on(hosts, tmp_path, per_host=2, timeout=1) as job:
        hosts.cut(1)
        for said in job.told(range(4)).values():
            assert said["error"] == "BackendError"
            assert "2 of 4 ranks that may be running are within reach, no majority" in said["text"]
        assert not list(tmp_path.glob("epoch*"))


@needs_ulfm
@long
def test_mpi_is_dropped_if_a_lost_rank_is_alive(tmp_path: Path) -> None:
    with job_by_mpirun(tmp_path, 3, library="mpi gloo") as job:
        job.lose("stop", [1])
        job.gone_on([0, 2])
        job.end([0, 2])
        assert (
            "epoch 1 continues without mpi: MPI can serve the remaining"
            in Path(tmp_path, "errors").read_text()
        )
        ends = time.monotonic() + 20
        while any(Path(f"/proc/{job.pids[rank]}").exists() for rank in (0, 2)):
            assert time.monotonic() < ends, "they wait for the stopped rank at their end"
            time.sleep(0.05)


@long
@several_hosts
@pytest.mark.parametrize("host", [0, pytest.param(2, marks=long)])
def test_a_host_that_is_cut_off_while_the_others_make_the_next_world(tmp_path: Path, host: int) -> None:
    with Racks(1, 4) as hosts, job_on(hosts, tmp_path, waits=[host], timeout=30) as job:
        job.lose("kill", [3])
        while not (tmp_path / f"building.{host}").exists():
            time.sleep(0.01)
        hosts.cut(host)
        since = time.monotonic()
        for said in job.gone_on([rank for rank in range(3) if rank != host]).values():
            assert said["at"] - since < LIMIT_S, "the build has not waited for its deadline"
        job.end([rank for rank in range(3) if rank != host])


@long
@several_hosts
@pytest.mark.parametrize("family", [4, 6])
def test_a_training_loop_on_two_hosts_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: int
) -> None:
    """Rank 0 dies in a backward pass, and a rank of the other host later; the oracle is one process."""
    monkeypatch.setenv("MCR_RESTARTS", "0")
    plan = {"steps": 30, "deaths": [[0, 5, 0, "backward"], [3, 15, 0, "forward"]], "nap": 0.05}
    words = [nursery().python, PROGRAM, str(tmp_path), json.dumps(plan)]
    with TwoHosts(None, (family,)) as hosts, errors_in(tmp_path) as output:
        started = list(hosts.start(words, per_host=2, **output))
        statuses = [process.wait(60) for process in started]
    text = (tmp_path / "errors").read_text()
    assert statuses == [-9, 0, 0, -9], text
    ends = {each: json.loads((tmp_path / f"end.{each}").read_text()) for each in (1, 2)}
    check(ends, 30)
    assert [ends[each]["rank"] for each in (1, 2)] == [0, 1]
    assert re.search(r"elastic: rank 0 was lost \(dead\); 3 ranks go on with step [56] after", text), text


@long
@needs_ulfm
@pytest.mark.parametrize("library", ["gloo", "mpi", pytest.param("msccl", marks=long)])
def test_under_mpirun_rank_0_is_no_other_rank(tmp_path: Path, library: str) -> None:
    with job_by_mpirun(tmp_path, 4, library=library) as job:
        for victim in (0, 1):
            since = job.lose("kill", [victim])
            for said in job.gone_on(list(range(victim + 1, 4)), epoch=victim + 1).values():
                assert said["at"] - since < LIMIT_S
        job.end([2, 3])
