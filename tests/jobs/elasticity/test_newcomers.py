"""Newcomers of an elastic loop that get the state while the others train on.

The oracle is one process of plain torch that trains on the same data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.elasticity.test_elastic import check, run
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.communicator.transfer import Has, broadcast_differences

long = pytest.mark.long


@long
def test_state_a_newcomer_has_is_not_sent_during_the_wait(tmp_path: Path) -> None:
    plan = {"steps": 60, "deaths": [[1, 5, 0, "forward"]], "nap": 0.3, "full": 3, "precopy": True}
    status, text, ends = run(tmp_path, 3, plan)
    assert status == 0, text
    assert sorted(ends) == [0, 1, 2]
    check(ends, 60)
    assert "elastic: rank 1 joined; 3 ranks go on with step" in text
    # The counter of the sampler is a tensor, and is not sent beforehand.
    assert ends[1]["sent"] == ends[0]["sent"][-1:] == [8]


@long
@pytest.mark.parametrize(
    "deaths",
    [
        [[0, 0, 0, "giving"]],
        pytest.param([[1, 0, 1, "receiving"]], marks=long),
        pytest.param([[2, 0, 0, "forward while giving"]], marks=long),
        pytest.param([[0, 0, 0, "step while giving"]], marks=long),
        pytest.param([[0, 0, 0, "giving"], [1, 0, 1, "receiving"]], marks=long),
    ],
)
def test_deaths_while_a_newcomer_gets_the_state(tmp_path: Path, deaths: list[list[Any]]) -> None:
    plan = {
        "steps": 150,
        "deaths": [[1, 5, 0, "forward"], *deaths],
        "nap": 0.3,
        "full": 4,
        "holds": 1.0,
        "precopy": True,
    }
    status, text, ends = run(tmp_path, 4, plan)
    assert status == 0, text
    assert sorted(ends) == [0, 1, 2, 3]
    check(ends, 150)
    assert f"({1 + len(deaths)} of 4)" in text


@long
def test_too_few_ranks_do_not_wait_for_the_state_beforehand(tmp_path: Path) -> None:
    plan = {
        "steps": 40,
        "deaths": [[1, 5, 0, "forward"], [2, 0, 0, "forward while giving"]],
        "nap": 0.1,
        "holds": 600.0,
        "precopy": True,
    }
    status, text, ends = run(tmp_path, 3, plan)
    assert status == 0, text
    check(ends, 40)


def _differences() -> dict[str, Any]:
    """On ranks: rank 1 has the state, rank 0 has parts of it, rank 2 has nothing, rank 3 has all."""
    comm = mcr.init(backends=["gloo"])
    values = torch.arange(3 << 18, dtype=torch.float32)  # three pieces
    tensors = [
        values,
        torch.tensor(7),
        torch.ones(4, 3)[:, :2],
        torch.zeros(0),
        torch.ones(3, dtype=torch.bool),
    ]
    found: dict[str, Any] = {}
    for case, changed in enumerate(([], [1 << 18], [0, (3 << 18) - 1])):
        own = [each.clone() for each in tensors]
        own[2] = torch.ones(4, 3)[:, :2]
        has: list[Has] = ["parts", "all", "nothing" if case == 2 else "parts", "all"]
        if comm.rank in (0, 2):
            own[0][changed] = -1.0
            own[2] += len(changed)
        found[f"bytes {case}"] = broadcast_differences(own, comm, 1, has[: comm.size])
        found[f"right {case}"] = all(map(torch.equal, own, tensors))
    mcr.finalize()
    return found


def test_pieces_that_differ_are_sent_alone() -> None:
    whole = 3 * (1 << 20) + 8 + 32 + 3
    for result in run_ranks(_differences, 4, via="torch"):
        assert result.value == {
            "bytes 0": 0,
            "right 0": True,
            "bytes 1": (1 << 20) + 32,
            "right 1": True,
            "bytes 2": whole,
            "right 2": True,
        }
