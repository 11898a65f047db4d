"""Ranks that die before or in `mcr.init` and `mcr.reset`: the others are told, long before any deadline."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from jobs.elasticity.arriving import RUN, STEPS, die, told_by
from jobs.launch.test_launch import Start, folder, start
from ranks import has_come, meet, nursery, own_rank, run_ranks, stop_until, wait_for_ranks

import mcr_plus as mcr
from mcr_plus.job import init
from mcr_plus.job.runtime import Runtime
from mcr_plus.rendezvous import init_connections
from mcr_plus.rendezvous.init_connections import InitConnections

PROGRAMS = str(Path(__file__).parents[1] / "launch" / "restarting.py")
__all__ = ["folder", "start"]  # fixtures


def dying_in_init(step: str, victim: int) -> dict[str, Any]:
    """Runs on ranks: one dies on its way through `init`."""
    if own_rank() == victim:
        module, name = STEPS[step]
        setattr(module, name, die)
    told = told_by(lambda: mcr.init(RUN))
    meet("told", 2)  # a rank that ends would be lost, too
    return told


@pytest.mark.parametrize(
    ("step", "victim"),
    [("before the secret", 1), ("before the secret", 0), ("before the hosts", 0), ("before the hosts", 2),
     ("before the checks", 1), ("in the world", 1)],
)  # fmt: skip
def test_a_rank_that_dies_in_init_is_named(step: str, victim: int) -> None:
    for result in run_ranks(dying_in_init, 3, args=[step, victim], via="torch", check=False):
        if result.rank != victim:
            assert result.value is not None, result.stderr
            assert (result.value["error"], result.value["ranks"]) == ("PeerLost", [victim]), result.value
            assert "process has died" in result.value["text"]
            assert result.value["soon"]


def refusing() -> int:
    """Runs on ranks, which count as ranks of two hosts: their configurations differ, and the program goes on.

    Returns how many presences this rank has begun, or -1 if one is open still.
    """
    begun, usual = list[InitConnections](), InitConnections._enter

    def enter(self: InitConnections, name: str) -> None:
        begun.append(self)
        usual(self, name)

    with (
        mock.patch.object(init_connections, "on_one_host", return_value=False),
        mock.patch.object(init_connections, "server_of", return_value=("192.0.2.1", 1)),
        mock.patch.object(init_connections, "meeting_address", return_value="127.0.0.1"),
        mock.patch.object(InitConnections, "_enter", enter),
    ):
        told = told_by(lambda: mcr.init(RUN if own_rank() else {**RUN, "backends": ["gloo", "local"]}))
    assert told["error"] == "ConfigError", told
    return -1 if init_connections._open else len(begun)


def test_a_job_that_all_ranks_refuse_leaves_no_process_beside_them() -> None:
    results = run_ranks(refusing, 2, via="torch")
    assert [result.value for result in results] == [1, 0]


def stopping_in_init(step: str, victim: int) -> dict[str, Any]:
    """Runs on ranks: one is stopped on its way through `init`, and goes on once the others have been told."""
    if own_rank() == victim:
        module, name = STEPS[step]
        usual = getattr(module, name)

        def stop(*arguments: Any, **options: Any) -> Any:
            stop_until("told", 2, "CONT")
            return usual(*arguments, **options)

        setattr(module, name, stop)
    told = told_by(lambda: mcr.init(RUN))
    has_come("told")
    if own_rank() != victim:
        wait_for_ranks("told", 2)  # a rank that ends would be lost, too
    return told


@pytest.mark.parametrize(("step", "victim"), [("before the hosts", 1), ("before the checks", 0)])
def test_a_rank_that_is_stopped_in_init_is_named(step: str, victim: int) -> None:
    for result in run_ranks(stopping_in_init, 3, args=[step, victim], via="torch", check=False):
        if result.rank != victim:
            assert result.value is not None, result.stderr
            assert (result.value["error"], result.value["ranks"]) == ("PeerLost", [victim]), result.value
            assert "stopped" in result.value["text"]


def dying_in_reset(step: str, victim: int) -> dict[str, Any]:
    """Runs on ranks: one dies before it calls `reset`, or in it; the others go on if they can."""
    comm = mcr.init(RUN)
    comm.all_reduce(torch.ones(3))
    meet("before reset", comm.size)
    if comm.rank == victim:
        if step == "before":
            die()
        if step == "before the old world is closed":
            setattr(Runtime, "prepare_reset", die)  # noqa: B010 - a method
        else:
            setattr(init, "begin", die)  # noqa: B010 - a function
    told = told_by(mcr.reset)
    meet("told", comm.size - 1)  # a rank that ends would be lost, too
    if step == "before":
        comm = mcr.shrink()
        x = torch.full((3,), 1.0 + comm.rank)
        comm.all_reduce(x)
        told["after"] = x.tolist()
        told["again"] = told_by(mcr.reset)["error"]
        mcr.finalize()
    return told


@pytest.mark.parametrize(
    ("step", "victim"),
    [("before", 1), ("before", 0), ("before the old world is closed", 2), ("before the new one", 0)],
)
def test_a_rank_that_dies_before_or_in_reset_is_named(step: str, victim: int) -> None:
    for result in run_ranks(dying_in_reset, 3, args=[step, victim], via="torch", check=False):
        if result.rank != victim:
            told = result.value
            assert told is not None, result.stderr
            assert (told["error"], told["ranks"]) == ("PeerLost", [victim]), told
            assert "reset: " in told["text"]
            assert told["soon"]
            if step == "before":  # nothing has been closed
                assert told["text"].endswith("the remaining ranks can continue with mcr.shrink()")
                assert (told["after"], told["again"]) == ([3.0] * 3, "")
            else:
                assert told["text"].endswith("The old world is closed")


@pytest.mark.long
def test_the_supervisor_says_that_a_rank_does_not_come(start: Start) -> None:
    run = start("-n", "3", "--min-ranks", "2", nursery().python, PROGRAMS, "init_without", "3")
    assert run.wait() == 0, run.text()
    found = re.findall(r"(\d) told (\w+) (\[.*\]) (.*)\n", run.text())
    told = ("PeerLost", "[1]", "rank 1 of the job: exited with status 3")
    assert sorted(found) == [("0", *told), ("2", *told)]


@pytest.mark.long
def test_a_rank_that_is_started_again_before_init_is_waited_for(start: Start, tmp_path: Path) -> None:
    words = ["-n", "3", "--min-ranks", "2", "--restart-failed", "1"]
    run = start(*words, PROGRAMS, "init_after_all", str(tmp_path))
    assert run.wait() == 0, run.text()
    assert sorted(re.findall(r"(\d) sum (.*)\n", run.text())) == [(str(rank), "6.0") for rank in range(3)]
