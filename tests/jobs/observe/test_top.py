"""`mcr-plus top` on real jobs: who is waited for, since when, and at which lines of the program."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command import mcr_plus_process
from jobs.observe.hanging import HERE, VICTIM, hangs, libraries
from ranks import RankResult, Via, nursery, run_ranks
from two_hosts import TwoHosts, why_not

import mcr_plus as mcr
from mcr_plus.hosts.page_exchange import HOSTS
from mcr_plus.observe import job_status as survey_module
from mcr_plus.observe.findings import findings
from mcr_plus.observe.job_status import Member, ObservedJob, survey
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

LIMIT_S = 60.0
RANKS_WAIT = re.compile(r"ranks 0, 2 have waited [\d.]+ s for rank 1 in ")


# -- in the test ----------------------------------------------------------------------------------


@contextmanager
def running(
    target: Callable[..., Any], ranks: int, via: Via, *args: Any
) -> Iterator[Future[list[RankResult]]]:
    nursery()  # here: it ends with the thread that makes it
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run_ranks, target, ranks, args=args, via=via, timeout=LIMIT_S + 60)


def pids(folder: Path, ranks: int, job: Future[Any]) -> list[int]:
    files = [folder / f"pid{rank}" for rank in range(ranks)]
    texts = awaited(lambda: [file.read_text() if file.exists() else "" for file in files], all, job)
    return [int(text) for text in texts]


def awaited(look: Callable[[], Any], is_it: Callable[[Any], bool], job: Future[Any]) -> Any:
    """What `look` returns once `is_it`; fails with what it returned last."""
    deadline = time.monotonic() + LIMIT_S
    found = look()
    while not is_it(found):
        assert time.monotonic() < deadline, found
        if job.done():
            raise AssertionError(f"the job has ended: {job.result()}; {found}")
        time.sleep(0.05)
        found = look()
    return found


def job_of(pid: int) -> ObservedJob:
    return survey(pid).jobs[0]


def waiting_in(job: ObservedJob, tag: str, rank: int) -> bool:
    member = job.member(rank)
    return member.state == "waiting" and tag in member.waits[0].operation and member.waits[0].seconds > 0.05


def idle(job: ObservedJob, rank: int) -> bool:
    """Whether the latest picture of a rank, drawn twice a second, shows it where it idles."""
    line = job.member(rank).line
    return job.member(rank).state == "outside" and line is not None and line.function == "idles"


def at(member: Member) -> tuple[str, str]:
    assert member.line is not None
    return member.line.file, member.line.function


@pytest.mark.long
@pytest.mark.parametrize(
    "via",
    [pytest.param("mpi", marks=pytest.mark.skipif(not mpi_usable(), reason="needs MPI")), "torch"],
)
def test_jobs_that_hang_and_one_that_does_not(tmp_path: Path, via: Via) -> None:
    with running(hangs, 3, via, str(tmp_path), via) as job:
        by_rank: list[int] = []
        try:
            by_rank = pids(tmp_path, 3, job)
            for library in libraries(via):
                check_stopped(by_rank, library, job)
                os.kill(by_rank[VICTIM], signal.SIGCONT)
            check_never(by_rank, job)
            (tmp_path / "never").touch()
            check_part(by_rank, job)
            (tmp_path / "part").touch()
            check_message(by_rank, job)
            (tmp_path / "message").touch()
            check_healthy(by_rank, job)
            (tmp_path / "healthy").touch()
            awaited(lambda: of_mine(by_rank), lambda found: not found, job)  # all have called finalize
            with pytest.raises(mcr.InvalidArgument, match="no rank of a running job"):
                survey(by_rank[0])
        finally:
            for name in ("never", "part", "message", "healthy", "ended"):
                (tmp_path / name).touch()
            if by_rank and not job.done():
                os.kill(by_rank[VICTIM], signal.SIGCONT)
        assert [result.value for result in job.result()] == [True] * 3


def of_mine(by_rank: list[int]) -> list[ObservedJob]:
    return [job for job in survey().jobs if any(member.pid in by_rank for member in job.members)]


def check_stopped(by_rank: list[int], library: str, running: Future[Any]) -> None:
    tag = f"tag=stop.{library}"
    job = awaited(
        lambda: job_of(by_rank[0]),
        lambda job: all(waiting_in(job, tag, rank) for rank in (0, 2)) and job.member(1).state == "stopped",
        running,
    )
    for rank in (0, 2):
        member = job.member(rank)
        assert member.pid == by_rank[rank]
        assert member.waits[0].waits_for == (VICTIM,)
        assert member.waits[0].library.startswith(library)
        assert member.waits[0].group == "world"
        assert at(member) == (HERE, "waits_here") or at(member)[1] == "<lambda>"
        assert any(line.function == "hangs" for line in member.frames)
    assert job.member(1).line is not None
    waits, stopped = findings(job)
    assert RANKS_WAIT.match(waits)
    assert tag in waits
    assert "hanging.py:" in waits
    assert f"rank {VICTIM} (process {by_rank[VICTIM]} on " in stopped
    assert "has been stopped for " in stopped
    assert ", by a signal, last seen at " in stopped
    assert stopped.endswith(f"; `kill -CONT {by_rank[VICTIM]}` resumes it")
    answer = mcr_plus_process("top", str(by_rank[0]), "--once", "--json")
    assert answer.returncode == 0, answer.stderr
    (document,) = json.loads(answer.stdout)["jobs"]
    assert document["members"][0]["waits"][0]["waits_for"] == [VICTIM]
    assert document["members"][1]["state"] == "stopped"
    later = document["findings"][1]  # the stop has lasted longer by then
    assert re.sub(r" for [^,]+,", "", later, count=1) == re.sub(r" for [^,]+,", "", stopped, count=1)


def check_never(by_rank: list[int], running: Future[Any]) -> None:
    job = awaited(
        lambda: job_of(by_rank[0]),
        lambda job: (
            idle(job, VICTIM)  # and the others no longer wait for the operation before
            and any(RANKS_WAIT.match(text) for text in findings(job))
        ),
        running,
    )
    member, wait = job.member(VICTIM), job.member(0).waits[0]
    assert wait.waits_for == (VICTIM,)
    assert wait.issued == {VICTIM: wait.number - 1}
    assert member.state == "outside"
    assert at(member) == (HERE, "idles")
    assert member.idle is not None
    assert member.idle > 0
    assert "rank 1 (" in findings(job)[1]
    assert "has been outside mcr_plus for" in findings(job)[1]
    assert f"its last operation in group 'world' is #{wait.number - 1}" in findings(job)[1]
    text = mcr_plus_process("top", str(by_rank[0]), "--once").stdout
    assert RANKS_WAIT.search(text)
    assert "idles" in text


def check_part(by_rank: list[int], running: Future[Any]) -> None:
    job = awaited(
        lambda: job_of(by_rank[0]), lambda job: waiting_in(job, "tag=part", 2) and idle(job, 0), running
    )
    (wait,) = job.member(2).waits
    assert wait.waits_for == (0,)
    group = next(group for group in job.member(2).groups if group.name == wait.group)
    assert group.ranks == (2, 0)
    assert at(job.member(0)) == (HERE, "idles")


def check_message(by_rank: list[int], running: Future[Any]) -> None:
    job = awaited(
        lambda: job_of(by_rank[0]), lambda job: waiting_in(job, "recv", 2) and idle(job, VICTIM), running
    )
    (wait,) = job.member(2).waits
    assert (wait.number, wait.waits_for) == (0, (VICTIM,))
    assert at(job.member(VICTIM)) == (HERE, "idles")


def check_healthy(by_rank: list[int], running: Future[Any]) -> None:
    def busy(job: ObservedJob) -> bool:
        groups = [next(group for group in member.groups if group.name == "world") for member in job.members]
        is_busy = all(group.operations_per_s > 10 and "healthy" in group.last for group in groups)
        # Where other work has the cores, a rank may wait for a second now and then, which is a finding.
        return is_busy and not findings(job)

    job = awaited(lambda: job_of(by_rank[0]), busy, running)
    for member in job.members:
        (world,) = [group for group in member.groups if group.name == "world"]
        # Of three operations in a round, two have 4,000 bytes and one has 4.
        assert world.bytes_per_s == pytest.approx(world.operations_per_s * 8004 / 3, rel=0.35)
        assert world.idle is not None
        assert member.error == ""


# -- hosts ----------------------------------------------------------------------------------------

REASON = why_not(mpi=False)


@pytest.mark.skipif(REASON is not None, reason=f"hosts: {REASON}")
@pytest.mark.parametrize("family", [4, pytest.param(6, marks=pytest.mark.long)])
def test_ranks_of_another_host_are_fetched_by_the_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: int
) -> None:
    """As on two machines: of the pages of ranks, those of the first host alone can be seen."""
    words = [nursery().python, HERE, str(tmp_path)]
    with TwoHosts(None, (family,)) as hosts, (tmp_path / "errors").open("wb") as errors:
        started = list(hosts.start(words, per_host=1, stdout=errors, stderr=errors))
        try:
            files = [tmp_path / f"pid{rank}" for rank in range(2)]
            deadline = time.monotonic() + LIMIT_S
            while not all(file.exists() for file in files):
                assert time.monotonic() < deadline, (tmp_path / "errors").read_text()
                time.sleep(0.05)
            here, there = (int(file.read_text()) for file in files)
            everything = survey_module._descriptors

            def seen() -> Iterator[tuple[int, str, str]]:
                for pid, path, name in everything():
                    if pid == here or (name == HOSTS and of_first_host(path, pid, here)):
                        yield pid, path, name

            monkeypatch.setattr(survey_module, "_descriptors", seen)
            while True:
                job = job_of(here)
                away = job.member(1)
                if waiting_in(job, "tag=far", 0) and away.state == "outside" and findings(job):
                    break
                assert time.monotonic() < deadline, job
                time.sleep(0.1)
            assert job.member(0).waits[0].waits_for == (1,)
            assert away.pid == there
            assert at(away) == (HERE, "idles")
            assert "idles" in findings(job)[1]
            os.kill(there, signal.SIGSTOP)
            while job_of(here).member(1).state != "stopped":
                assert time.monotonic() < deadline
                time.sleep(0.1)
            stopped = job_of(here).member(1)
            assert at(stopped) == (HERE, "idles")
            os.kill(there, signal.SIGCONT)
        finally:
            (tmp_path / "go").touch()
            for process in started:
                process.wait(timeout=30)


def of_first_host(path: str, pid: int, rank: int) -> bool:
    """Whether the agent `pid` shares the network namespace of a rank."""
    return os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{rank}/ns/net")
