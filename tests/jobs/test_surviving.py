"""Ranks of several hosts go on without ranks and hosts that are lost; hosts are network namespaces here."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from racks import Racks
from surviving import job_on
from two_hosts import TwoHosts, why_not

LIMIT_S = 8.0  # from a loss to the new world, on two cores with other work; benchmarks/bench_survive.py measures
REASON = why_not(mpi=False)
several_hosts = pytest.mark.skipif(REASON is not None, reason=f"hosts: {REASON}")


@several_hosts
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_rank_of_another_host(tmp_path: Path, how: str) -> None:
    with TwoHosts(None) as hosts, job_on(hosts, tmp_path, per_host=2) as job:
        since = job.lose(how, [3])
        for said in job.gone_on([0, 1, 2]).values():
            assert said["lost"] == [3]
            assert said["at"] - since < LIMIT_S
        job.end([0, 1, 2])


@several_hosts
@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_whole_host(tmp_path: Path, how: str) -> None:
    """The other ones of three hosts are a majority; of a host that was cut off, ranks raise."""
    with Racks(1, 3) as hosts, job_on(hosts, tmp_path) as job:
        if how == "cut":
            hosts.cut(2)
        since = time.monotonic() if how == "cut" else job.lose_host(hosts, 2)
        for said in job.gone_on([0, 1]).values():
            assert said["lost"] == [2]
            assert said["at"] - since < LIMIT_S
        if how == "cut":
            assert job.told([2])[2]["error"] in ("BackendError", "LaunchError")
        job.end([0, 1])


@several_hosts
def test_a_host_that_is_cut_off_while_the_others_make_the_next_world(tmp_path: Path) -> None:
    with Racks(1, 4) as hosts, job_on(hosts, tmp_path, waits=[2]) as job:
        job.lose("kill", [3])
        while not (tmp_path / "building.2").exists():
            time.sleep(0.01)
        since = time.monotonic()
        hosts.cut(2)
        for said in job.gone_on([0, 1]).values():
            assert said["at"] - since < LIMIT_S, "the build has not waited for its deadline"
        job.end([0, 1])
