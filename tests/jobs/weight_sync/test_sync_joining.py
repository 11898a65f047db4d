"""Receivers of weights outside the job: they come, are killed and come back alone, and nobody notices."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jobs.weight_sync import join_jobs as jobs
from ranks import RankResult, nursery, outsider, run_ranks

SMALL = 20_011


@contextmanager
def running(target: Any, ranks: int, *args: Any) -> Iterator[Future[list[RankResult]]]:
    """A job beside this thread."""
    nursery()  # made by this thread
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run_ranks, target, ranks, args=args, via="torch")


def test_servers_outside_a_job_of_trainers(tmp_path: Path) -> None:
    """No receiver is in the job. Both are there from the start, and go without being missed."""
    folder = str(tmp_path)
    with (
        running(jobs.trains, 1, folder, SMALL, ["one", "other"]) as job,
        outsider(jobs.serves, folder, SMALL, 12, "one") as one,
        outsider(jobs.serves, folder, SMALL, 7, "other") as other,
    ):
        for value in (one.result().value, other.result().value):
            assert value["wrong"] == 0
            assert value["pulled"] == sorted(set(value["pulled"]))
            assert value["stats"]["anchors"] <= 1
        (source,) = (each.value for each in job.result())
    assert source["mode"] == 0o600
    assert source["stats"]["lost"] == []
    assert source["most"] >= 1


@pytest.mark.long
def test_a_server_is_killed_in_the_middle_of_a_transfer_and_comes_back_alone(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with running(jobs.trains, 2, folder, jobs.LARGE, ["back"]) as job:
        for pulls in (0, 1):
            with outsider(jobs.dies, folder, jobs.LARGE, pulls) as killed:
                assert killed.result().returncode == -9
        with outsider(jobs.serves, folder, jobs.LARGE, 3, "back") as back:
            value = back.result().value
        trainer, receiver = job.result()
    assert value["wrong"] == 0
    assert value["stats"]["anchors"] == 1, "all weights once, after which changes are enough"
    assert receiver.value["wrong"] == 0
    assert (receiver.value["stats"]["anchors"], receiver.value["stats"]["refused"]) == (0, 0)
    assert trainer.value["stats"]["lost"] == []
    assert 2 <= trainer.stderr.count("from outside the job no longer receives weights") <= 3
    assert "does not receive" not in receiver.stderr


@pytest.mark.long
def test_damage_affects_only_the_outside_receiver(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with (
        running(jobs.trains, 2, folder, SMALL, ["done", "other"]) as job,
        outsider(jobs.receives_damage, folder, SMALL, 20, "done") as damaged,
        outsider(jobs.serves, folder, SMALL, 20, "other") as other,
    ):
        value = damaged.result().value
        assert value["wrong"] == 0
        assert value["stats"]["refused"] > 4
        clean = other.result().value
        assert (clean["wrong"], clean["stats"]["refused"]) == (0, 0)
        assert clean["stats"]["anchors"] <= 1
        _, receiver = (each.value for each in job.result())
    assert receiver["wrong"] == 0
    assert (receiver["stats"]["anchors"], receiver["stats"]["refused"]) == (0, 0)


@pytest.mark.long
def test_sharded_sources_with_a_whole_and_a_tensor_parallel_receiver(tmp_path: Path) -> None:
    folder = str(tmp_path)
    names = ["whole", "third", "fourth"]
    with (
        running(jobs.shards, 5, folder, names) as job,
        outsider(jobs.serves_shards, folder, None, 5, names[0]) as whole,
        outsider(jobs.serves_shards, folder, 3, 5, names[1]) as third,
        outsider(jobs.serves_shards, folder, 4, 5, names[2]) as fourth,
    ):
        found = [each.result().value for each in (whole, third, fourth)]
        ranks = [each.value for each in job.result()]
    assert [value["wrong"] for value in (*found, *ranks)] == [0] * 8
    assert [each["stats"]["anchors"] for each in ranks[3:]] == [0, 0]
    dense = [each["stats"]["dense_bytes"] for each in found]
    assert dense[1:] == [each["stats"]["dense_bytes"] for each in ranks[3:]], "their elements, no others"
    assert dense[0] > max(dense[1:])
    assert sum(each["stats"]["dense_bytes"] for each in ranks[:3]) == dense[0], "each element is encoded once"


def test_servers_in_layouts_that_no_rank_of_the_job_has(tmp_path: Path) -> None:
    folder = str(tmp_path)
    names = ["first", "second", "all"]
    with (
        running(jobs.splits, 3, folder, names) as job,
        outsider(jobs.serves_splits, folder, 0, 5, names[0]) as first,
        outsider(jobs.serves_splits, folder, 1, 5, names[1]) as second,
        outsider(jobs.serves_splits, folder, None, 5, names[2]) as whole,
    ):
        found = [each.result().value for each in (first, second, whole)]
        ranks = [each.value for each in job.result()]
    assert [value["wrong"] for value in found] == [0, 0, 0]
    elements = [13 * 6 + 2 * 3 + 7, 13 * 4 + 2 * 9 + 7 + 5, 13 * 10 + 2 * 12 + 7 + 5]
    assert [value["stats"]["dense_bytes"] for value in found] == [4 * each for each in elements]
    assert sum(value["stats"]["dense_bytes"] for value in ranks) == 4 * elements[2], "each is encoded once"
    choices = "all of all tensors; rank 0 of 'again'; rank 1 of 'again'"
    for rank, value in enumerate(found[:2]):
        assert value["refused"].startswith(f"join_sync: rank {rank} of 'again': there is 'w' of shape ")
        assert value["refused"].endswith(f"what may be held: {choices}")


@pytest.mark.long
def test_receivers_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    (value,) = (each.value for each in run_ranks(jobs.churn, 1, args=[str(tmp_path), 20], via="torch"))
    first, last = value["left"]
    assert last == first
    assert (last["links"], last["joined"], last["lost"]) == (0, 0, 0)
    assert (value["stats"]["receivers"], value["stats"]["joined"], value["stats"]["lost"]) == (0, 0, [])


@pytest.mark.long
def test_tensors_made_in_inference_mode_and_calls_in_it(tmp_path: Path) -> None:
    (result,) = run_ranks(jobs.in_inference_mode, 1, args=[str(tmp_path)], via="torch")
    assert result.value == [0] * 12


@pytest.mark.long
def test_a_source_that_begins_again_is_joined_by_its_new_invitation(tmp_path: Path) -> None:
    (value,) = (each.value for each in run_ranks(jobs.ends_and_begins_again, 1, args=[str(tmp_path)]))
    assert value["found"] == [1, [1.0] * 5, 1, [2.0] * 5]
    assert "rank 0 has closed it" in value["text"]
    assert "'second': the weight sync is closed" in value["text"]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = str(tmp_path_factory.mktemp("refusals"))
    return [each.value for each in run_ranks(jobs.refusals, 2, args=[folder])]


def test_an_unwritable_file_is_refused_on_all_ranks(refusals: list[dict[str, str]]) -> None:
    for texts in refusals:
        assert "rank 0 has src, tag and invite ((0,), 'policy', '" in texts["other names"]
        assert "has src, tag and invite ((0,), 'policy', '')" in texts["on one rank"]
        for name, reason in {"no folder": "No such file or directory", "a folder": "Is a directory"}.items():
            assert texts[name].startswith("InvalidArgument: rank 0: sync: invite: '")
            assert texts[name].endswith(f"cannot be written: {reason}")
        assert "invite=5; expected the name of a file, or None" in texts["not a name"]
        assert "invite: src=[0, 1] do not hold all of each tensor together" in texts["no offer"]
        for name, text in {
            "without a file": "offers are for receivers outside the job, which need invite=",
            "of no layouts": "offers['x']: expected a name, and a mapping of names of tensors to mcr.Layout",
            "of a layout": "offers['a']: expected a name, and a mapping of names of tensors to mcr.Layout",
            "of addends": "offers['x']['a']: expected the name of a tensor, and an mcr.Layout of values",
            "of no tensor": "offers['x']: there is no tensor 'z'; tensors: ['a', 'b']",
            "of another shape": "offers['x']['b']: its layout, S0 @2 [3], is not of the tensor's shape [2, ",
            "without the last dimension": "offers['x']['b']: its layout, S0 @2 [2], is not of the tensor's",
            "on one rank": "rank 0 and rank 1 have different offers",
        }.items():
            assert f"sync: {text}" in texts[f"offers {name}"]


def test_invitations_that_cannot_be_used_are_refused(refusals: list[dict[str, str]]) -> None:
    texts = refusals[0]
    assert texts["accepted"] == "accepted"
    choices = "; what may be held: all of all tensors"
    expected = {
        "a shape": "there is 'b' of shape [2, 2], float32, here is 'b' of shape [2, 3], float32",
        "a dtype": "there is 'a' of shape [3], float32, here is 'a' of shape [3], float16",
        "less": "there is 'b' of shape [2, 2], float32, here is no 'b'",
        "more": "there is no 'c', here is 'c' of shape [1], float32",
    }
    for name, text in expected.items():
        assert texts[name] == f"InvalidArgument: join_sync: all of all tensors: {text}{choices}"
    for name, text in {
        "timeout": "timeout=-1; expected seconds, at least 0",
        "rank": "rank=-1; expected a rank of the layouts",
        "mode": "has mode 0640, so that others may use or change it; expected 0600",
        "truncated": "is not a whole invitation: ",
        "empty": "is not a whole invitation: ",
        "format": "is not an invitation of format 1, which this version of mcr_plus reads: format 2",
        "a list": "is not an invitation of format 1",
        "a key more": "is not a whole invitation: more: ",
        "no port": "is not a whole invitation: sources.0.",
        "corners": "its parts lack 1 elements of 'a'",
        "other tensors": "a part of 'z' from rank 0",
    }.items():
        assert texts[name].startswith("InvalidArgument: join_sync: "), texts[name]
        assert text in texts[name]
    assert texts["no file"].startswith("CommTimeout: join_sync: there is no file '")
    for name in ("key", "stale"):
        assert texts[name].startswith("PeerLost: join_sync: rank 0, a source of weights, does not answer")
        assert "was written " in texts[name]
        assert " s ago: have the trainers ended, or started again?" in texts[name]
