"""The state of FSDP2 models after ranks were lost: from replicas, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch_features
from jobs.elasticity import fsdp_membership_jobs as jobs
from ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch_features.FSDP_HOOKS, reason="this torch has no hooks for FSDP2")


def survivors(victims: list[int], shape: list[int], where: str) -> list[dict[str, Any]]:
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    results = run_ranks(jobs.lost, 4, via="torch", check=False, env=env, args=[victims, shape, where])
    said = "\n".join(each.stderr for each in results)
    assert [each.rank for each in results if each.returncode == -9] == victims, said
    values = [each.value for each in results if each.rank not in victims]
    assert None not in values, said
    return values


def check(found: dict[str, list[float]], steps: list[list[int]]) -> None:
    """Whether parameters and moments are those of one process that has trained with these ranks' data."""
    model, optimizer = jobs.trained_alone(steps)
    jobs.check_like(found, model, optimizer, [1e-3, 1e-5])


@pytest.mark.short("victims0")
@pytest.mark.parametrize(("victims", "where"), [([1], "before"), ([2], "backward"), ([0, 3], "before")])
def test_shards_of_lost_ranks_come_from_their_replicas(victims: list[int], where: str) -> None:
    left = [rank for rank in range(4) if rank not in victims]
    for value in survivors(victims, [2, 2], where):
        assert value["seen"] == "PeerLost"
        assert "mcr.fsdp_state rebuilds the state" in value["old"]
        assert value["step"] == 3
        check(value["state"], [[0, 1, 2, 3]] * 3)
        assert (value.get("ahead"), value.get("newcomer")) == ((3, True) if victims == [1] else (None, None))
        assert value["wrong"] == "InvalidArgument: fsdp_state: rank 0: step: expected a number, got -1"
        check(value["later"], [[0, 1, 2, 3]] * 3 + [left] * 2)


@pytest.mark.long
@pytest.mark.parametrize("where", ["before", "backward"])
def test_shards_without_replicas_are_lost_and_a_model_can_be_sharded_again(where: str) -> None:
    for value in survivors([2], [4], where):
        assert value["seen"] == "PeerLost"
        assert "mcr.fsdp_state rebuilds the state" in value["old"]
        assert value["error"].startswith("fsdp_state: of step 3, shards of ")
        assert "load a checkpoint into it" in value["error"]
        check(value["later"], [[0, 1, 3]])
