"""Worlds of processes that the program names by their handles: `mcr.reconfigure` on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs.elasticity import reconfigure_jobs as jobs
from ranks import run_ranks


def values(
    target: Any, ranks: int = 3, *, lost: tuple[int, ...] = (), **options: Any
) -> list[dict[str, Any]]:
    """What the ranks that were not killed have returned."""
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if options.pop("agent", True) else {}
    results = run_ranks(target, ranks, via="torch", check=False, env=env, **options)
    said = "\n".join(each.stderr for each in results)
    assert [each.rank for each in results if each.returncode == -9] == list(lost), said
    found = [each.value for each in results if each.rank not in lost]
    assert None not in found, said
    return found


@pytest.mark.short("store of an agent")
@pytest.mark.parametrize("agent", [True, False], ids=["store of an agent", "store of rank 0"])
def test_ranks_are_in_the_order_of_the_handles(tmp_path: Path, agent: bool) -> None:
    for value in values(jobs.in_reversed_order, args=[str(tmp_path)], agent=agent):
        rank = 2 - value["before"]
        assert (value["rank"], value["is_world"], value["sum"]) == (rank, True, 111.0)
        assert value["signed"]
        assert value["ring"] == [(rank - 1) % 3] * 2
        assert value["root"] == [0.0, 0.0]
        assert value["gradient"] == [[2.0, 2.0]]
        assert value["errors"] == ["Revoked", "Revoked"]


@pytest.mark.long
@pytest.mark.parametrize("how", ["mcr", "torch"])
def test_codecs_keep_what_they_have_not_sent(tmp_path: Path, how: str) -> None:
    found = values(jobs.with_residuals, args=[str(tmp_path), how])
    own = np.array([value["own"] for value in found])
    assert own.shape == (3, 1, 500)
    assert np.abs(own).sum() > 1
    for value in found:  # a saved state has their mean
        np.testing.assert_allclose(value["kept"], own.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.short("0")
@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_process_that_is_left_out_is_told_and_may_come_back(tmp_path: Path, left_out: int) -> None:
    stay = [each for each in range(3) if each != left_out]
    for value in values(jobs.without_one, args=[str(tmp_path), left_out]):
        if value["before"] == left_out:
            assert value["error"].startswith("BackendError: ")
            assert "reconfigure" in value["error"]
        else:
            assert value["rank"] == stay.index(value["before"])
            assert (value["size"], value["sum"]) == (2, sum(10.0**each for each in stay))
        assert value["again"] == [value["before"], 3, 3.0]


def test_worlds_are_split_and_merged(tmp_path: Path) -> None:
    found = values(jobs.split_and_merged, args=[str(tmp_path)])
    for number, value in enumerate(found):
        assert value["alone"] == [0, 1, 10.0**number]
        assert value["part"] == ([0, 1, 1.0] if number == 0 else [number - 1, 2, 110.0])
        for what in ("all", "identity", "merged", "joined"):
            assert value[what] == [number, 3, 111.0], what
        assert value["set"][1:] == [3, 111.0]
    assert found[0]["late"] == [0, 1, 1.0]
    assert {value["set"][0] for value in found} == {0, 1, 2}


def test_a_newcomer_with_a_store_of_its_own_becomes_rank_0(tmp_path: Path) -> None:
    found = values(jobs.with_a_newcomer, args=[str(tmp_path)])
    assert [value["before"] for value in found] == [2, 2, 1]
    assert [value["rank"] for value in found] == [1, 2, 0]
    for value in found:
        assert (value["values"], value["sum"]) == ([2, 0, 1], 3.0)


@pytest.mark.long
def test_attempts_that_are_refused_change_nothing(tmp_path: Path) -> None:
    found = values(jobs.refused, args=[str(tmp_path)])
    for rank, value in enumerate(found):
        texts = value["texts"]
        if rank != 1:
            expected = "CommTimeout: reconfigure: rank 1 of those in handles: did not arrive within 1 s"
            assert texts["absent"] == expected
            assert 0.9 < value["texts"]["waited"] < 15
        assert (
            texts["differ"]
            == "InvalidArgument: reconfigure: handles: processes have passed different ones with this uuid"
        )
        assert texts["twice"] == "InvalidArgument: handles: a process occurs twice"
        assert (
            texts["own"] == texts["none"] == "InvalidArgument: handles: the handle of this process is missing"
        )
        for what, given in (("handle", "'mcr1:abc'"), ("number", "3")):
            assert texts[what].startswith(
                "InvalidArgument: handles[3]: expected what mcr.reconfigure_handle()"
            )
            assert texts[what].endswith(f"got {given}")
        assert texts["uuid"].startswith("InvalidArgument: uuid: expected a text")
        assert texts["timeout"].startswith("InvalidArgument: timeout: expected a duration")
        assert texts["stale"] == (
            "InvalidArgument: reconfigure: handles[1] is stale: its process has another world now"
        )
        assert (
            texts["used"] == "InvalidArgument: reconfigure: uuid: already used; each attempt needs a new one"
        )
        if rank != 1:
            assert texts["used by others"] == texts["used"]
        assert value["sums"] == [3.0] * 5
        assert value["size"] == 3


def test_a_newcomer_that_differs_is_refused_and_the_old_worlds_go_on(tmp_path: Path) -> None:
    found = values(jobs.that_differ, args=[str(tmp_path)])
    (text,) = {value["text"] for value in found}
    assert text.startswith("ConfigError: reconfigure: the configuration's digest is ")
    assert " on rank 2 and " in text
    assert [value["sum"] for value in found] == [2.0, 2.0, 1.0]


@pytest.mark.short("before")
@pytest.mark.parametrize("when", ["before", "come", "made"])
def test_a_process_that_dies(tmp_path: Path, when: str) -> None:
    found = values(jobs.with_a_death, lost=(1,), args=[str(tmp_path), when])
    assert [value["rank"] for value in found] == [0, 1]
    for value in found:
        if when == "before":
            assert value["text"] == "BackendError: reconfigure: rank 1 of those in handles: dead"
            assert value["old"] == "PeerLost"
        else:
            assert value["text"].startswith("PeerLost: ")
            assert value["old"] == "Revoked"
        assert value["seconds"] < 15, "before the deadline of 20 s"
        assert value["sum"] == 1.0 + 3.0


def test_without_a_world_it_says_so() -> None:
    (value,) = values(jobs.before_init, 1)
    assert value["texts"] == ["NotInitialized: mcr.init has not been called in this process"] * 2


@pytest.mark.long
def test_nothing_is_left_of_many_reconfigurations(tmp_path: Path) -> None:
    for value in values(jobs.many_times, args=[str(tmp_path), 50], timeout=120):
        for counts in zip(*value["seen"], strict=True):
            assert max(counts[30:]) <= max(counts[10:30]) + 6, counts
