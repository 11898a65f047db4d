"""Process groups that go on with other ranks: c10d's `shrink` and `reconfigure` on the backend `mcr`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from jobs.torch_backend import torch_membership_jobs as jobs
from ranks import run_ranks

HOW = ["mcr", pytest.param("dist", marks=pytest.mark.skipif(
    not hasattr(dist, "shrink_group"), reason="this torch has no shrink_group"))]  # fmt: skip


def values(target: Any, *args: Any, lost: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """What the ranks that were not killed have returned."""
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    results = run_ranks(target, 3, via="torch", check=False, env=env, args=list(args), timeout=90)
    said = "\n".join(each.stderr for each in results)
    assert [each.rank for each in results if each.returncode == -9] == list(lost), said
    found = [each.value for each in results if each.rank not in lost]
    assert None not in found, said
    return found


def check_shrunk(found: list[dict[str, Any]], backend: str) -> None:
    for rank, value in enumerate(found):
        assert (value["rank"], value["size"], value["world"], value["backend"]) == (rank, 2, 2, backend)
        assert (value["sum"], value["pair"]) == (1.0 + 3.0, 2.0)
        assert (value["gradient"], value["wrapped"]) == (2.0, 2.0)
        assert value["error"].endswith("REMOTE_ERROR")
        assert all("has been destroyed" in text for text in value["old"])
        assert value["ended"]


@pytest.mark.parametrize("how", HOW)
def test_the_default_group_without_a_rank_that_has_died(tmp_path: Path, how: str) -> None:
    found = values(jobs.shrunk, str(tmp_path), how, True, lost=(1,))
    assert [value["seen"] for value in found] == ["PeerLost"] * 2
    check_shrunk(found, "mcr")


@pytest.mark.long
def test_under_the_name_of_gloo(tmp_path: Path) -> None:
    found = values(jobs.shrunk, str(tmp_path), "mcr", True, "gloo", lost=(1,))
    check_shrunk(found, "gloo")


@pytest.mark.long
@pytest.mark.parametrize("how", ["mcr", "abort"])
def test_the_default_group_without_a_rank_that_lives(tmp_path: Path, how: str) -> None:
    first, excluded, last = values(jobs.shrunk, str(tmp_path), how, False)
    assert "BackendError" in excluded["excluded"]
    assert "shrink" in excluded["excluded"]
    check_shrunk([first, last], "mcr")


@pytest.mark.parametrize("how", HOW)
def test_a_group_inside_the_job(how: str) -> None:
    found = values(jobs.shrunk_part, how)
    for rank, value in enumerate(found):
        assert (value["before"], value["all"]) == (3.0, 3.0)
        if rank != 1:
            expected = (rank // 2, 2, 1.0 + 3.0, [0, 2])
            assert (value["rank"], value["size"], value["sum"], value["ranks"]) == expected


def test_the_default_group_is_reconfigured_in_place(tmp_path: Path) -> None:
    for number, value in enumerate(values(jobs.reconfigured, str(tmp_path))):
        assert value["completed"] == [True, True]
        assert value["turned"] == [2 - number, 3, 6.0]
        assert value["inner"][0].startswith("Revoked: ")
        assert value["inner"][1].startswith("Unsupported: ")
        assert value["gradient"] == 2.0
        if number == 1:
            assert value["left out"][0].startswith("BackendError: ")
            assert value["left out"][1].endswith("_ERROR")
        else:
            assert value["fewer"] == [number // 2, 2, 2.0, 2.0]
        assert value["all"] == [number, 3, 3.0]
        if number == 0:
            assert value["absent"].startswith("CommTimeout: reconfigure: ranks 1, 2 of those in handles")
        assert value["as before"] == 3.0
        assert "has been destroyed" in value["aborted"][0]
        assert value["aborted"][1].endswith("SUCCESS")
        assert value["after abort"][0] == 3.0
        assert value["after abort"][1].endswith("SUCCESS")
        assert value["group"] == 2.0
        assert value["ended"]


def test_wrong_arguments_change_nothing() -> None:
    for value in values(jobs.wrong_arguments):
        texts = value["texts"]
        kinds = {name: text.partition(":")[0] for name, text in texts.items()}
        assert kinds == {
            "none": "InvalidArgument", "type": "TypeError", "text": "TypeError", "outside": "InvalidArgument",
            "twice": "InvalidArgument", "all": "InvalidArgument", "own": "InvalidArgument",
            "flags": "InvalidArgument", "options": "Unsupported", "part": "Unsupported",
            "shrink": "NotInitialized", "reconfigure": "NotInitialized", "ended": "NotInitialized",
        }  # fmt: skip
        assert value["supports"] == [True, True]
        assert value["sum"] == 3.0
