"""What a world takes over from the one before it: groups, models, persistent operations, residuals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs.elasticity import inheritance_jobs as jobs
from ranks import run_ranks


def values(target: Any, ranks: int, lost: list[int], *args: Any) -> list[Any]:
    """By rank, what those that were not killed have returned."""
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    results = run_ranks(target, ranks, via="torch", check=False, args=list(args), env=env)
    said = "\n".join(each.stderr for each in results)
    assert [each.rank for each in results if each.returncode == -9] == lost, said
    assert all(each.value is not None for each in results if each.rank not in lost), said
    return [each.value for each in results]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["gloo", "msccl"])
def test_persistent_operations_are_bound_again(backend: str) -> None:
    found = values(jobs.persistent_operations, 4, [1], backend)
    for rank in (0, 2, 3):
        value = found[rank]
        errors = value["errors"]
        assert set(errors) == {"from 1", "gather", "scatter"}
        assert errors["from 1"].startswith("InvalidArgument: persistent broadcast: its root, rank 1 of an")
        for name in ("gather", "scatter"):
            assert "its tensors were made for 4 ranks and do not fit the 3 that are left (" in errors[name]
        assert value["in flight"] == "PeerLost"  # it has failed before the world ended
        for turn in (1.0, 2.0):
            total = turn * (1 + 3 + 4)
            assert value[str(turn)]["sum"] == [total] * 6
            assert value[str(turn)]["from 2"] == [turn * 3] * 6
            assert value[str(turn)]["to 3"] == [total if rank == 3 else turn * (1 + rank)] * 6
            assert value[str(turn)]["group"] == [turn * (1 + 4) if rank in (0, 3) else turn * (1 + rank)] * 6
            mine = [0, 2, 3].index(rank)
            expected = [100.0 * other + 4 * mine + each for other in (0, 2, 3) for each in range(4)]
            assert value[str(turn)]["exchange"] == expected
        assert value["again"] == [3.0] * 6


def test_groups_have_successors() -> None:
    found = values(jobs.groups, 5, [1, 4])
    # Ranks 0, 2, 3, 4 of before are 0, 1, 2, 3 after the first loss.
    for rank in (0, 2, 3):
        value = found[rank]
        first, second = value["first"], value["second"]
        assert value["world"]
        assert value["is the latest"]
        inside = rank in (0, 3)
        assert first["some"] == [[3, 2, 0], 11001 if inside else 10**rank, "group1"]
        assert second["some"] == [[2, 0], 1001 if inside else 10**rank, "group1"]
        assert first["lost"].endswith("none of its ranks is left")
        assert first["closed"].startswith("NotInitialized" if rank in (0, 2) else "Revoked")
        if rank != 3:
            assert first["dropped"].startswith("Revoked: ")
            assert first["dropped"].endswith("rank 2 had closed or dropped it")
        assert first["parity"][:2] == ([[3, 1, 0], 10101] if rank % 2 == 0 else [[2], 1000])
        assert first["branch"] == [[0, 1, 2, 3], 11101, "world/2"]
        assert second["branch"] == [[0, 1, 2], 1101, "world/2"]
        assert value["fresh"] == "group5"
        assert second["fresh"] == [[0, 1, 2], 1101, "group5"]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["gloo", "msccl"])
def test_models_follow_their_groups_and_one_that_is_dropped_somewhere_holds_nobody_up(backend: str) -> None:
    found = values(jobs.models, 4, [1], backend)
    for rank in (0, 2, 3):
        value = found[rank]
        assert value["all"] == pytest.approx([(1 + 100 + 1000) / 3])
        assert value["optimizer"] == pytest.approx([(1 + 100 + 1000) / 3])
        assert value.get("pair") == (None if rank == 2 else pytest.approx([(1 + 1000) / 2]))
        assert value.get("others") == ([100.0] if rank == 2 else None)
        assert value.get("dropped") == (None if rank == 3 else "Revoked")


@pytest.mark.long
def test_residuals_of_a_group_are_kept() -> None:
    found = values(jobs.residuals_of_groups, 4, [1])
    assert all(np.abs(found[rank]["own"]).sum() > 1 for rank in (0, 3))
    # What the operation has not sent, it has kept: with what was kept before, nothing is lost.
    given = sum(np.array(found[rank]["given"]) + np.array(found[rank]["own"]) for rank in (0, 3))
    kept = sum(np.array(found[rank]["kept"]) for rank in (0, 3))
    np.testing.assert_allclose(np.array(found[0]["sent"]) + kept, given, rtol=1e-4, atol=1e-4)


@pytest.mark.short("asked")
@pytest.mark.parametrize("when", ["asked", "taken"])
def test_a_loss_during_a_take_over(when: str) -> None:
    found = values(jobs.a_loss_meanwhile, 4, [1, 3], when)
    for rank in (0, 2):
        assert found[rank]["attempts"] == 2
        assert (found[rank]["x"], found[rank]["y"]) == ([4.0] * 2, [4.0])
        assert (found[rank]["gradient"], found[rank]["size"]) == (pytest.approx([(1 + 100) / 2]), 2)


@pytest.mark.long
def test_groups_and_models_of_worlds_that_are_merged(tmp_path: Path) -> None:
    found = values(jobs.merged_worlds, 4, [], str(tmp_path))
    # The new ranks 0, 1, 2, 3 are those that had 3, 0, 2, 1 in the first world.
    names = [value["name"] for value in found]
    assert names[0] == names[1] != names[2] == names[3]
    assert [value["ranks"] for value in found] == [[3, 1], [3, 1], [0, 2], [0, 2]]
    assert [value["x"] for value in found] == [1.0, 1.0, 3.0, 3.0]
    assert all(value["gradient"] == pytest.approx([1111 / 4]) for value in found)
    assert {value["later"] for value in found} == {"group2"}


def test_elastic_leaves_no_hook_on_the_optimizer() -> None:
    for value in values(jobs.left_hooks, 2, []):
        assert len(set(value["counts"])) == 1


@pytest.mark.parametrize("where", ["rule", "nodes"])
@pytest.mark.parametrize(("codec", "used"), [("exp_window", "exp_window"), ("int8_block", None)])
def test_a_state_is_sent_without_loss_whatever_the_pipeline_does(
    codec: str, used: str | None, where: str
) -> None:
    found = values(jobs.transfer, 4, [], codec, where)
    for value in found:
        assert value["equal"]
        assert value["right"]
    assert {each for value in found for each in value["codecs"] if each} == ({used} if used else set())


@pytest.mark.long
def test_a_state_is_not_encoded_with_loss_between_nodes_because_a_rule_is_without() -> None:
    for value in values(jobs.transfer, 4, [], "int8_block", "both"):
        assert value["equal"]
        assert value["right"]
        assert not any(value["codecs"])
