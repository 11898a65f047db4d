"""A library fails and another one takes over: real libraries on real ranks."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from jobs.reliability import failover_jobs as jobs
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.config.reader import load
from mcr_plus.reliability.failover import notices

PAIRS = [["gloo", "mpi"], ["msccl", "gloo"], ["mpi", "msccl"], ["gloo", "msccl"]]


def values(target: Any, ranks: int, *args: Any, **options: Any) -> list[dict[str, Any]]:
    results = run_ranks(target, ranks, via="mpi" if "mpi" in args[0] else "torch", args=list(args), **options)
    return [each.value for each in results]


@pytest.mark.short("2-gloo->msccl")
@pytest.mark.parametrize("backends", PAIRS, ids="->".join)
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_results_are_right_whenever_a_library_breaks(backends: list[str], ranks: int) -> None:
    found = values(jobs.random_operations, ranks, backends, 17 + ranks, 120, 0.05)
    for each in found:
        assert each["wrong"] == []
        assert set(each["libraries"]) <= set(backends)
    # All groups of a process share MPI, which does not come back.
    assert found[0]["moves"] == 1 if backends[0] == "mpi" else found[0]["moves"] > 1


def test_a_failover_is_reported() -> None:
    for rank, each in enumerate(values(jobs.that_says_what_it_did, 2, ["gloo", "mpi"])):
        assert each["infos"] == [["gloo", "", 1], ["mpi", "gloo", 3]]
        assert each["sum"] == [3.0] * 4
        (off,) = each["off"]
        assert (off["library"], off["takes_over"], off["rank"]) == ("gloo", "mpi", rank)
        assert "off in running jobs, after a failure" in each["table"]
        assert each["left"] == 0


@pytest.mark.parametrize("backends", [["gloo", "msccl"], ["msccl", "gloo"]], ids="->".join)
def test_messages_go_over_a_library_that_has_come_back(backends: list[str]) -> None:
    assert values(jobs.messages_after_its_return, 2, backends) == [{"received": [0.0, 10.0]}] * 2


def test_a_persistent_operation_runs_again_and_again() -> None:
    assert values(jobs.persistent, 2, ["msccl", "gloo"]) == [{"sums": [2.0, 4.0, 8.0]}] * 2


def test_notices_of_processes_that_are_gone_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = tmp_path / f"mcr-off-{os.getuid()}-1"
    dead = {"pid": 1, "started": "never", "off": []}
    gone.write_text(json.dumps({**dead, "place": notices._place()}))
    elsewhere = tmp_path / f"mcr-off-{os.getuid()}-3"
    elsewhere.write_text(json.dumps({**dead, "place": "another host"}))
    (tmp_path / f"mcr-off-{os.getuid()}-2").write_text("no JSON")
    owner = object()
    notices.put(owner, 3, "world", "gloo", "mpi", "a torn connection")
    (found,) = notices.running()
    assert (found.rank, found.reason) == (3, "a torn connection")
    assert not gone.exists()
    assert elsewhere.exists()
    notices.remove(owner)
    assert notices.running() == []


def test_explain_names_the_library_that_takes_over() -> None:
    told = mcr.explain("all_reduce", "1MiB", config=jobs.config("gloo", "mpi"))
    assert "mpi takes over if gloo fails" in str(told["steps"])


@pytest.mark.parametrize("backends", [["msccl", "gloo"], ["gloo", "msccl"]], ids="->".join)
def test_operations_that_cannot_run_again_fail_on_all_ranks(backends: list[str]) -> None:
    """Under gloo, an operation left in a torn connection does not wait for its timeout."""
    text = "completed an operation that others have not, and its tensors have changed since"
    for each in values(jobs.with_changed_inputs, 2, backends):
        assert "rank 0 completed" in each["error"]
        assert text in each["error"]


@pytest.mark.parametrize("changes", ["broadcast", "data"])
def test_a_tensor_that_is_used_again_is_no_result(changes: str) -> None:
    first, second = values(jobs.with_one_tensor, 2, ["msccl", "gloo"], changes)
    assert first["found"] == ([777.0] * 2 if changes == "broadcast" else [300.0] * 2)
    assert second["found"] == [3.0] * 2
    assert first["last"] == second["last"] == [2.0] * 3


@pytest.mark.long
@pytest.mark.parametrize("codec", [None, "int8_block"])
def test_a_training_step_does_not_notice(codec: str | None) -> None:
    for each in values(jobs.through_the_pipeline, 2, ["msccl", "gloo"], codec):
        assert each["moves"] >= 2
        assert each["disturbed"] == each["undisturbed"]


@pytest.mark.parametrize(
    ("backends", "way"),
    [
        (["msccl", "gloo"], "wrap"),
        (["gloo", "msccl"], "wrap, gradients zeroed"),
        (["msccl", "gloo"], "DDP"),
        (["gloo", "msccl"], "DDP, gradients as views"),
    ],
)
def test_gradients_outlive_their_reduction_without_a_copy(backends: list[str], way: str) -> None:
    for each in values(jobs.ahead_by_a_pass, 2, backends, way):
        assert each == {"wrong": [], "moves": 1, "copied": 0}


@pytest.mark.parametrize("backends", [["gloo", "msccl"], ["msccl", "gloo"]], ids="->".join)
def test_a_dead_rank_is_told_as_ever(backends: list[str]) -> None:
    results = run_ranks(
        jobs.after_a_death, 3, via="torch", args=[backends, 1], check=False,
        env={"TORCHELASTIC_USE_AGENT_STORE": "True"},
    )  # fmt: skip
    for rank in (0, 2):
        assert results[rank].value["lost"] == [1]
        assert results[rank].value["seconds"] < 45  # half of the deadline


def test_one_library_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "version: 1\nbackends: [gloo]\npipeline:\n  - select: {}\n  - dispatch: {failover: true}\n"
    )
    with pytest.raises(
        mcr.ConfigError, match=r"run.yaml:5.*failover.*names only gloo; expected a second one"
    ):
        load(path)
