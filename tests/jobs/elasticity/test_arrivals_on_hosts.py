"""Ranks that die in `mcr.init`, and hosts that are cut off in it: ranks of other hosts are told.

Hosts are network namespaces here, each with a host name of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hosts import why_not
from losing import ended, errors_in, read
from racks import Racks
from ranks import nursery

ARRIVING = str(Path(__file__).with_name("arriving.py"))
REASON = why_not(mpi=False)
several_hosts = pytest.mark.skipif(REASON is not None, reason=f"hosts: {REASON}")
long = pytest.mark.long


@contextmanager
def job_on(hosts: Racks, folder: Path, *words: str) -> Iterator[None]:
    """A job on these hosts, one rank on each, of `arriving.py` with these arguments."""
    with errors_in(folder) as output:
        started = list(hosts.start([nursery().python, ARRIVING, str(folder), *words], **output))
    with ended(started, folder):
        yield


def check(said: dict[int, dict[str, Any]], victim: int, seen: str) -> None:
    """All of these ranks have raised `PeerLost` with that one in time."""
    for rank, told in said.items():
        assert (told["error"], told["ranks"]) == ("PeerLost", [victim]), (rank, told)
        assert seen in told["text"], (rank, told)
        assert told["soon"], (rank, told)


@several_hosts
@pytest.mark.parametrize(
    ("step", "victim"),
    [("before the secret", 1), ("before the hosts", 0), pytest.param("before the hosts", 2, marks=long),
     pytest.param("before the checks", 0, marks=long), ("in the world", 2)],
)  # fmt: skip
def test_a_rank_of_another_host_that_dies_in_init_is_named(tmp_path: Path, step: str, victim: int) -> None:
    with Racks(1, 3) as hosts, job_on(hosts, tmp_path, "dies", step, str(victim)):
        left = [rank for rank in range(3) if rank != victim]
        check(read(tmp_path, "told", left, 90), victim, "process has died")


@several_hosts
@pytest.mark.parametrize(
    ("step", "victim"),
    [("before the hosts", 0), pytest.param("before the secret", 1, marks=long), ("before the checks", 2)],
)
def test_a_rank_of_another_host_that_is_stopped_in_init_is_named(
    tmp_path: Path, step: str, victim: int
) -> None:
    with Racks(1, 3) as hosts, job_on(hosts, tmp_path, "stops", step, str(victim)):
        left = [rank for rank in range(3) if rank != victim]
        check(read(tmp_path, "told", left, 90), victim, "stopped")


@long
@several_hosts
def test_a_rank_that_holds_the_interpreters_lock_in_init_is_not_lost(tmp_path: Path) -> None:
    with Racks(1, 3) as hosts, job_on(hosts, tmp_path, "is busy", "before the checks", "0"):
        said = read(tmp_path, "told", [0, 1, 2], 90)
        assert {rank: told["error"] for rank, told in said.items()} == dict.fromkeys(range(3), ""), said


@long
@several_hosts
def test_a_host_that_is_cut_off_in_init_is_named_and_names_the_others(tmp_path: Path) -> None:
    """It waits for a rank that is late, inside requests to the store of rank 0."""
    with Racks(1, 3) as hosts, job_on(hosts, tmp_path, "stands still", "before the checks", "2"):
        read(tmp_path, "still", [2], 90)
        hosts.cut(1)
        said = read(tmp_path, "told", [0, 1], 90)
        (tmp_path / "go").touch()
        check({0: said[0], **read(tmp_path, "told", [2], 90)}, 1, "its host does not answer")
        check({1: said[1]}, 0, "its host does not answer")
