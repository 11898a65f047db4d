"""The supervisor's verdicts on ranks that fail before any has come to `mcr.elastic`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcr_plus.core.c10d import PrefixStore
from mcr_plus.launch.supervisor import Supervisor
from mcr_plus.membership.epoch_log import TAKES_IN, TRAINING
from mcr_plus.rendezvous.arrivals import NAME_OF_JOB, PREFIX


class Job(Supervisor):
    """Ranks of which the test says what they do."""

    def start(self) -> None:
        """Start all that wait for it."""
        for rank in self._ranks:
            rank.due = 0.0
            self._look_after(rank)

    def meet(self) -> None:
        """Do what rank 0 does once all ranks have found each other."""
        PrefixStore(PREFIX, self._store).set(NAME_OF_JOB, "part")

    def shrink(self) -> None:
        """Do what a rank does in `mcr.shrink`."""
        PrefixStore("part", PrefixStore(PREFIX, self._store)).set(TRAINING, "")

    def train(self) -> None:
        """Do what a rank does in `mcr.elastic`."""
        self.shrink()
        PrefixStore("part", PrefixStore(PREFIX, self._store)).set(TAKES_IN, "")

    def kill(self, number: int) -> None:
        """A rank dies, and the supervisor finds out."""
        rank = self._ranks[number]
        assert rank.process is not None
        rank.process.kill()
        rank.process.wait()
        self._look_after(rank)

    def finish(self, number: int) -> None:
        """A rank ends with 0, and the supervisor finds out."""
        rank = self._ranks[number]
        assert rank.process is not None
        self._stop([rank.process])
        rank.process.wait()
        rank.process = subprocess.Popen(["true"])
        rank.process.wait()
        self._look_after(rank)

    @property
    def restarts(self) -> list[int]:
        """How often each rank has been started again."""
        return [rank.restarts for rank in self._ranks]

    @property
    def port(self) -> int:
        """That of the store, which is another one for ranks that begin anew."""
        return int(self._store.port)

    def reports(self) -> list[str]:
        """The verdicts so far."""
        with open(f"/proc/self/fd/{self._status}") as file:
            return [json.loads(line)["verdict"] for line in file]

    def end(self) -> None:
        """End all ranks."""
        self._end()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "status").touch()
    job = Job(2, 1, 9, str(tmp_path), ["sleep", "100"])
    job.start()
    yield job
    job.end()


def test_all_begin_anew_once_none_of_those_that_met_is_left(job: Job) -> None:
    job.meet()
    port = job.port
    job.kill(1)
    job.start()
    assert (job.restarts, job.port) == ([0, 1], port)
    job.kill(0)
    assert job.restarts == [1, 2]
    assert job.port != port
    job.start()
    job.kill(0)  # the ranks have not met again
    assert job.restarts == [2, 2]


def test_a_rank_that_was_started_again_before_the_ranks_met_is_one_of_those_that_met(job: Job) -> None:
    job.kill(1)
    job.start()
    job.meet()
    job.kill(0)
    job.start()
    assert job.restarts == [1, 1]  # rank 1 may go on, and take the new rank 0 in
    job.kill(1)
    assert job.restarts == [2, 2]


def test_ranks_that_train_go_on_after_each_has_been_replaced(job: Job) -> None:
    job.meet()
    job.train()
    port = job.port
    for number in (0, 1, 0, 1):
        job.kill(number)
        job.start()
    assert (job.restarts, job.port) == ([2, 2], port)


def test_a_rank_that_was_started_again_does_not_make_a_job_of_its_own(job: Job) -> None:
    job._limit = 1
    job.meet()
    job.kill(1)
    job.start()
    assert job._left() == 2  # rank 0 may come to mcr.elastic yet
    job.kill(0)
    assert job._left() == 0
    assert job.reports()[-1].startswith("the job ends: nobody is left to take in ranks")
    job._ranks[1].code = 0  # the program does not know that it is alone
    assert job._left() == 0
    assert job._watch() == 1


@pytest.mark.parametrize("shrinks", [False, True])
@pytest.mark.parametrize("first", ["fails", "ends"])
@pytest.mark.parametrize("min_ranks", [1, 2])
def test_a_job_ends_as_failed_when_others_ended_well_and_nobody_takes_the_failed_rank_in(
    job: Job, first: str, min_ranks: int, shrinks: bool
) -> None:
    job._min_ranks = min_ranks
    job.meet()
    if shrinks:
        job.shrink()
    if first == "fails":  # and waits for its next start
        job.kill(1)
        assert job._left() == 2
        job.finish(0)
    else:
        job.finish(0)
        job.kill(1)
    assert job._left() == 0
    assert (job._watch(), job.restarts[1] and job._ranks[1].process) == (1, None)
    assert job.reports()[-1].startswith("the job ends: nobody is left to take in ranks")


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_rank_that_runs_alone_once_the_others_have_ended_well_fails_the_job(
    job: Job, shrinks: bool
) -> None:
    job.meet()
    job.kill(1)
    if shrinks:
        job.shrink()
    job.start()
    job._ranks[1].code = 0  # before the others have ended
    assert job._left() == 2
    job.finish(0)
    assert job._left() == 0
    assert job._watch() == 1
    assert job.reports()[-1].startswith("the job ends: nobody is left to take in ranks")


def test_ranks_that_go_on_by_shrink_make_no_job_beside_the_one_that_was_started_again(job: Job) -> None:
    job.meet()
    job.kill(1)
    job.shrink()
    job.start()
    port = job.port
    job.kill(0)  # which would be alone, too, with what it had computed lost
    assert (job.restarts[1], job.port, job._left()) == (1, port, 0)
    assert job.reports()[-1].startswith("the job ends: nobody is left to take in ranks")


def test_a_job_goes_on_by_shrink_once_restarts_are_used_up(job: Job) -> None:
    job._limit = 2
    job.meet()
    for _ in range(2):
        job.kill(1)
        job.shrink()
        job.start()
    job.kill(1)
    assert job.reports()[-1] == "the job goes on with 1 rank, no restarts are left"
    job.finish(0)
    assert job._watch() == 0


def test_a_rank_is_started_again_after_the_others_have_trained_to_their_end(job: Job) -> None:
    job.meet()
    job.train()
    job.finish(0)
    job.kill(1)
    assert job.reports() == ["started again (1 of 9)"]
    job.start()
    assert job._left() == 2
    job.finish(1)
    assert job._watch() == 0


def test_a_rank_that_was_started_again_counts_once_ranks_train(job: Job) -> None:
    job._limit = 1
    job.meet()
    job.train()
    job.kill(1)
    job.start()
    job.kill(0)
    assert job._left() == 1
    assert job.reports()[-1] == "the job goes on with 1 rank, no restarts are left"
