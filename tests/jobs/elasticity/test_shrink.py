"""Ranks that go on without others that were lost: `mcr.shrink` on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs.elasticity import shrink_jobs as jobs
from ranks import run_ranks

from mcr_plus.rendezvous.mpi_launcher import mpi_flavour, mpi_usable


def survivors(target: Any, ranks: int, lost: list[int], **options: Any) -> list[dict[str, Any]]:
    """What the ranks that were not killed have returned."""
    results = run_ranks(
        target, ranks, via="torch", check=False, env={"TORCHELASTIC_USE_AGENT_STORE": "True"}, **options
    )
    assert [each.rank for each in results if each.returncode == -9] == lost, [each.stderr for each in results]
    values = [each.value for each in results if each.rank not in lost]
    assert None not in values, [each.stderr for each in results]
    return values


@pytest.mark.short("shared memory-1")
@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("backends", [["gloo"], ["msccl", "gloo"]], ids=["gloo", "shared memory"])
def test_survivors_go_on(backends: list[str], victim: int) -> None:
    values = survivors(jobs.after_a_death, 4, [victim], args=[backends, victim])
    left = [rank for rank in range(4) if rank != victim]
    assert [each["old"] for each in values] == left
    for rank, value in enumerate(values):
        assert value["lost"] == [victim]
        assert (value["rank"], value["size"], value["is_world"]) == (rank, 3, True)
        assert value["sum"] == [sum(1.0 + 10 * each for each in left)] * 5
        assert value["gradient"] == pytest.approx([sum(1.0 + each for each in left) / 3])
        assert value["unchanged"]
        assert value["errors"] == {"world": "Revoked", "group": "Revoked"}


def test_survivors_of_a_group_keep_its_order() -> None:
    values = survivors(jobs.of_a_group, 4, [1])
    # Ranks 0, 2, 3 of before are 0, 1, 2 now; the group had 3, 1, 0.
    assert [value["ranks"] for value in values] == [[2, 0]] * 3
    assert [value["rank"] for value in values] == [1, -1, 0]
    assert [value["value"] for value in values] == [3.0, 2.0, 3.0]
    assert [value["world"] for value in values] == [3, 3, 3]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["gloo", "msccl"])
def test_an_arrived_message_is_received_even_if_never_polled(tmp_path: Path, backend: str) -> None:
    args = [backend, str(tmp_path)]
    sender, receiver, _ = run_ranks(jobs.messages_in_flight, 3, via="torch", args=args, check=False)
    assert receiver.value is not None, receiver.stderr
    assert receiver.value == {"told": [""], "received": 2, "values": [10.0, 11.0, 12.0]}
    assert sender.value is not None, sender.stderr
    assert sender.value["told"][0] == ""
    assert set(sender.value["told"]) <= {"", "Revoked"}  # a send says nothing about the receiver


def test_ranks_that_do_not_call_it_are_named_and_all_may_try_again(tmp_path: Path) -> None:
    values = survivors(jobs.on_some_ranks_only, 4, [2], args=[str(tmp_path)])
    assert len({value["first"] for value in values}) == 1
    assert values[0]["first"] == "shrink: rank 0 lives and has not called it"
    assert values[0]["waited"] < 30, "the decision was there already"
    assert [value["rank"] for value in values] == [0, 1, 2]
    assert [value["sum"] for value in values] == [[3.0] * 3] * 3


def test_wrong_arguments_are_refused_on_all_ranks_and_change_nothing() -> None:
    for value in survivors(jobs.with_wrong_arguments, 3, []):
        assert value["texts"] == [
            "InvalidArgument: shrink: rank 0: dead: rank 1 is running",
            "InvalidArgument: shrink: rank 2: dead: 2 is this rank itself",
            "InvalidArgument: shrink: rank 1: dead: expected ranks from 0 to 2, got 7",
            "InvalidArgument: shrink: rank 0: dead: expected ranks from 0 to 2, got 1",
            "InvalidArgument: shrink: rank 1: min_ranks: expected a number of ranks from 1 to 3, got 4",
            "InvalidArgument: shrink: rank 0: min_ranks: expected a number of ranks from 1 to 3, got 0",
            "InvalidArgument: timeout: expected a duration such as 300s or a number of seconds, got 'soon'",
        ]
        assert value["before"] == [3.0, 3.0]
        assert (value["after"], value["size"]) == ([3.0, 3.0], 3)


@pytest.mark.long
def test_a_refused_attempt_does_not_end_a_build_that_others_have_not_seen_complete(tmp_path: Path) -> None:
    first, second = survivors(jobs.refused_during_a_build, 3, [2], args=[str(tmp_path)])
    assert first["refused"] == second["refused"] == "CommTimeout: shrink: rank 1 lives and has not called it"
    assert second["seen"] == ["a rank of epoch 1 has seen the loss of another one"]
    for value in (first, second):
        assert value["sums"] == [[2.0] * 3] * 3


def test_a_rank_that_was_declared_lost_finds_out_when_it_runs_again(tmp_path: Path) -> None:
    first, stopped, last = survivors(jobs.with_a_stopped_rank, 3, [], args=[str(tmp_path)])
    assert stopped["error"] == "Revoked"
    assert "have continued without this one (epoch 1), which was stopped" in stopped["text"]
    for value in (first, last):
        assert value["error"] is None
        assert (value["lost"], value["seen"], value["size"]) == ([1], "stopped", 2)
        assert value["sum"] == [1.0 + 3.0] * 2


@pytest.mark.short("proposed")
@pytest.mark.parametrize("when", ["proposed", "decided"])
def test_a_second_death_during_the_first_is_handled(when: str) -> None:
    values = survivors(jobs.with_a_death_meanwhile, 4, [1, 3], args=[when])
    assert [value["rank"] for value in values] == [0, 1]
    assert [value["sum"] for value in values] == [[1.0 + 3.0] * 2] * 2
    assert max(value["seconds"] for value in values) < 20, "before the deadline of 30 s"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
@pytest.mark.parametrize("backend", ["gloo", "msccl"])
def test_all_survivors_have_the_same_verdict(tmp_path: Path, backend: str, seed: int) -> None:
    results = run_ranks(
        jobs.verdict, 3, via="torch", check=False, args=[str(tmp_path), backend, seed],
        env={"TORCHELASTIC_USE_AGENT_STORE": "True"},
    )  # fmt: skip
    values = [each.value for each in results if each.returncode == 0]
    assert len(values) == 2, [each.stderr for each in results]
    (done,) = {value["done"] for value in values}
    assert done is not None
    for value in values:
        for number, sequence in value["numbers"].items():
            if sequence <= done:
                expected = 3.0 * int(number) + 0 + 1 + 2
                assert value["results"][number] == [expected], (number, sequence, done)


@pytest.mark.long
def test_residuals_of_codecs_are_kept() -> None:
    values = survivors(jobs.with_residuals, 3, [1])
    first, second = (np.array(value["own"]) for value in values)
    assert np.abs(first).sum() > 1
    assert not np.array_equal(first, second)
    for value in values:
        np.testing.assert_allclose(value["merged"], (first + second) / 2, rtol=1e-5, atol=1e-6)
    # What the next operation has not sent, it has kept: nothing is lost.
    inputs = []
    for rank in (0, 2):
        generator = torch.Generator().manual_seed(rank)
        inputs.append([torch.randn(5000, generator=generator) for _ in range(4)][-1].double().numpy())
    mean = (inputs[0] + inputs[1] + first + second) / 2
    kept = sum(np.array(value["kept"]) for value in values) / 2
    np.testing.assert_allclose(np.array(values[0]["sent"]) + kept, mean, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_nothing_is_left_of_many_epochs() -> None:
    values = survivors(jobs.many_times, 3, [], args=[100], timeout=120)
    for value in values:
        for counts in zip(*value["seen"], strict=True):
            assert max(counts[50:]) <= max(counts[10:50]) + 6, counts


ulfm = pytest.mark.skipif(
    not (mpi_usable() and (launcher := mpi_flavour()) is not None and launcher.flavour == "openmpi"),
    reason="needs Open MPI",
)


@pytest.mark.long
@ulfm
def test_one_keeper_serves_all_worlds_of_a_job_and_ends_with_it() -> None:
    results = run_ranks(jobs.after_a_reset, 3, via="ulfm", check=False)
    values = [each.value for each in results if each.rank != 0]
    assert None not in values, [each.stderr for each in results]
    for rank, value in enumerate(values):
        assert (value["rank"], value["sum"]) == (rank, [2.0 + 3.0] * 2)
        assert len(value["before"]) == 1
        assert value["after"] == value["before"], "by the same keeper after a reset, a shrink and a death"
    assert values[1]["left"] == []


@ulfm
@pytest.mark.long
def test_nothing_is_left_of_many_epochs_with_a_keeper() -> None:
    for each in run_ranks(jobs.many_times, 3, via="ulfm", args=[100], timeout=120):
        for counts in zip(*each.value["seen"], strict=True):
            assert max(counts[50:]) <= max(counts[10:50]) + 6, counts


@pytest.mark.parametrize("call", ["shrink", "reconfigure"])
def test_ranks_that_go_on_by_themselves_do_not_begin_anew(call: str) -> None:
    """A supervisor makes ranks begin anew only if none has trained."""
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MCR_MIN_RANKS": "1"}
    results = run_ranks(jobs.told_to_a_supervisor, 2, args=[call], via="torch", check=False, env=env)
    for each in results[: 1 if call == "shrink" else 2]:
        assert each.value == [False, True], each.stderr[-2000:]
