"""Every survivor raises `PeerLost` soon after a death, a stop or a partition, however it is occupied.

Hosts are network namespaces here, each with a host name of its own.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import losing
import pytest
from losing import WAYS, Job, job_here
from racks import Racks
from ranks import nursery
from two_hosts import TwoHosts, why_not

from mcr_plus.rendezvous.mpi_launcher import mpi_flavour, mpi_usable

LIMIT_S = 30.0  # half of the deadline of operations; benchmarks/bench_failures.py measures
SILENT = "2s"
REASON = why_not(mpi=False)
several_hosts = pytest.mark.skipif(REASON is not None, reason=f"hosts: {REASON}")


def _has_fault_tolerance() -> bool:
    launcher = mpi_flavour() if mpi_usable() else None
    return launcher is not None and launcher.flavour == "openmpi" and launcher.major >= 5


def job_on(*args: Any, **options: Any) -> AbstractContextManager[Job]:
    return losing.job_on(*args, python=nursery().python, **options)


mpi = pytest.param(
    "mpi", marks=pytest.mark.skipif(not _has_fault_tolerance(), reason="needs Open MPI 5 or later")
)
SEEN = {"kill": "process has died", "stop": "stopped"}


def check(job: Job, survivors: list[int], lost: list[int], since: float, seen: str) -> None:
    """All of `survivors` have raised `PeerLost` with the ranks `lost` in time."""
    for rank, told in job.told(survivors).items():
        assert told["error"] == "PeerLost", (rank, told)
        assert told["ranks"] == lost, (rank, told)
        assert seen in told["seen"] or told["seen"].startswith("reported by"), (rank, told)
        assert told["operation"], (rank, told)
        assert told["group"].startswith("world"), (rank, told)
        assert told["at"] - since < LIMIT_S, (rank, told, since)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", SEEN)
@pytest.mark.parametrize("library", ["gloo", "msccl", mpi])
def test_one_host(tmp_path: Path, library: str, how: str, way: str) -> None:
    with job_here(tmp_path, 3, library, way, python=nursery().python) as job:
        since = job.lose(how, 2)
        check(job, [0, 1], [2], since, SEEN[how])


@pytest.mark.long
@several_hosts
@pytest.mark.parametrize("victim", [0, 1])  # rank 0 has the job's store
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_two_hosts(tmp_path: Path, how: str, way: str, victim: int) -> None:
    with TwoHosts(None) as hosts, job_on(hosts, tmp_path, "gloo", way) as job:
        since = job.lose(how, victim)
        check(job, [1 - victim], [victim], since, SEEN[how])


@pytest.mark.short("wait")
@several_hosts
@pytest.mark.parametrize("way", WAYS)
def test_two_hosts_cut_off_from_each_other(tmp_path: Path, way: str) -> None:
    with TwoHosts(None) as hosts, job_on(hosts, tmp_path, "gloo", way, heartbeat=SILENT) as job:
        hosts.cut(1)
        since = time.monotonic()
        check(job, [0], [1], since, "no heartbeat")
        check(job, [1], [0], since, "no heartbeat")


@pytest.mark.long
@several_hosts
def test_a_cut_link_is_found_by_connections_that_acknowledge_nothing(tmp_path: Path) -> None:
    with TwoHosts(None) as hosts, job_on(hosts, tmp_path, "gloo", "wait", heartbeat="auto") as job:
        hosts.cut(1)
        since = time.monotonic()
        check(job, [0], [1], since, "no heartbeat")
        check(job, [1], [0], since, "no heartbeat")


@pytest.mark.long
@several_hosts
@pytest.mark.parametrize("cut", [0, 2])
def test_three_hosts_of_which_one_is_cut_off(tmp_path: Path, cut: int) -> None:
    with Racks(1, 3) as hosts, job_on(hosts, tmp_path, "gloo", "wait", 2, SILENT) as job:
        hosts.cut(cut)
        since = time.monotonic()
        beyond = [2 * cut, 2 * cut + 1]
        rest = [rank for rank in range(6) if rank not in beyond]
        check(job, rest, beyond, since, "no heartbeat")
        check(job, beyond, rest, since, "no heartbeat")


@pytest.mark.long
@several_hosts
def test_three_hosts_a_death_names_one_rank_everywhere(tmp_path: Path) -> None:
    with Racks(1, 3) as hosts, job_on(hosts, tmp_path, "gloo", "wait", per_host=2) as job:
        since = job.lose("kill", 3)
        check(job, [0, 1, 2, 4, 5], [3], since, "process has died")


def working_agents(job: Job) -> dict[int, int]:
    """Of each host's agent the working process, and the one that supervises it."""
    found = job.agents()
    return {pid: parent for pid, parent in found.items() if parent in found}


def wait_for_agents(job: Job, before: dict[int, int]) -> dict[int, int]:
    """Wait until both hosts have a pair of agents that was not there before."""
    ends = time.monotonic() + LIMIT_S
    while len(pairs := working_agents(job)) != 2 or set(before.items()) & set(pairs.items()):
        assert time.monotonic() < ends, (before, pairs)
        time.sleep(0.05)
    return pairs


@pytest.mark.long
@several_hosts
@pytest.mark.parametrize("which", ["working", "supervising", "stopped"])
def test_an_agent_that_is_lost_is_replaced_and_no_rank_with_it(tmp_path: Path, which: str) -> None:
    with TwoHosts(None) as hosts, job_on(hosts, tmp_path, "gloo", "wait") as job:
        pairs = wait_for_agents(job, {})
        for working, supervising in pairs.items():
            number = signal.SIGSTOP if which == "stopped" else signal.SIGKILL
            os.kill(supervising if which == "supervising" else working, number)
        wait_for_agents(job, pairs)
        assert not list(tmp_path.glob("told.*"))
        since = job.lose("kill", 1)
        check(job, [0], [1], since, "process has died")


@pytest.mark.long
@several_hosts
def test_a_rank_that_computes_for_long_is_not_lost(tmp_path: Path) -> None:
    """Neither is one that holds the interpreter's lock all the time."""
    with TwoHosts(None) as hosts, job_on(hosts, tmp_path, "gloo", "busy") as job:
        time.sleep(5.0)
        assert not list(tmp_path.glob("told.*"))
        since = job.lose("kill", 1)
        check(job, [0], [1], since, "process has died")


@pytest.mark.long
@pytest.mark.parametrize("stopped", ["wait", "30s"])
def test_stopped_ranks_are_waited_for_if_the_configuration_says_so(tmp_path: Path, stopped: str) -> None:
    with job_here(tmp_path, 2, "gloo", "wait", stopped=stopped, python=nursery().python) as job:
        job.lose("stop", 1)
        time.sleep(1.5)
        assert not list(tmp_path.glob("told.*"))
        os.kill(job.pids[1], signal.SIGCONT)
        time.sleep(0.5)
        assert not list(tmp_path.glob("told.*"))
        since = job.lose("kill", 1)
        check(job, [0], [1], since, "process has died")
