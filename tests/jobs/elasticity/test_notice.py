"""Ranks that leave an elastic loop on notice: no step is lost or repeated.

The oracle is one process of plain torch that trains on the same data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.elasticity import elastic_program as program
from jobs.elasticity.test_elastic import check, run

import mcr_plus as mcr

long = pytest.mark.long


def train(
    folder: Path, notices: list[list[Any]], *, least: int = 1, ranks: int = 3, **more: Any
) -> tuple[int, str, dict[int, dict[str, Any]]]:
    told = {"sigterm": True, "file": f"{folder}/leave.{{rank}}"}
    config = {"0": {"version": 1, "elastic": {"notice": told}}}
    plan = {"steps": 12, "deaths": [], "notices": notices, "config": config, **more}
    return run(folder, ranks, plan, least=least, restarts=0)


def sizes(end: dict[str, Any]) -> list[int]:
    assert [number for number, _ in end["seen"]] == list(range(len(end["seen"]))), "each step once"
    return [size for _, size in end["seen"]]


@pytest.mark.parametrize(
    ("notice", "exact"),
    [
        ((1, 5, "sigterm"), True),
        pytest.param((0, 5, "sigterm"), False, marks=long),
        pytest.param((0, 5, "file"), True, marks=long),
        pytest.param((2, 5, "twice"), False, marks=long),
        pytest.param((2, 0, "file"), False, marks=long),
        pytest.param((1, -1, "sigterm"), False, marks=long),
    ],
)
def test_a_rank_with_notice_completes_its_step_and_leaves(
    tmp_path: Path, notice: tuple[int, int, str], exact: bool
) -> None:
    slot, step, _ = notice
    status, text, ends = train(tmp_path, [list(notice)], exact=exact)
    assert status == 0, text
    assert sorted(ends) == [rank for rank in range(3) if rank != slot]
    assert (tmp_path / f"over.{slot}").exists(), "it ends in order"
    assert f"elastic: rank {slot} left on notice; 2 ranks go on with step {step + 1} after" in text
    assert "lost" not in text
    check(ends, 12, exact)
    for end in ends.values():
        assert sizes(end) == [3] * (step + 1) + [2] * (11 - step)


@long
def test_ranks_leave_one_after_another_and_together(tmp_path: Path) -> None:
    notices = [[0, 2, "sigterm"], [3, 2, "file"], [1, 6, "sigterm"]]
    status, text, ends = train(tmp_path, notices, ranks=4)
    assert status == 0, text
    assert sorted(ends) == [2]
    check(ends, 12)
    assert sizes(ends[2]) == [4] * 3 + [2] * 4 + [1] * 5


@long
@pytest.mark.parametrize(("told", "least"), [([0, 1, 2], 1), ([0, 2], 2)])
def test_the_loop_ends_on_all_if_too_few_would_be_left(tmp_path: Path, told: list[int], least: int) -> None:
    status, text, ends = train(tmp_path, [[slot, 5, "sigterm"] for slot in told], least=least)
    assert status == 0, text
    assert "so the loop ends on all ranks after 6 steps" in text
    assert sorted(ends) == [0, 1, 2], "the program's code after the loop has run"
    check(ends, 6)


@long
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_rank_is_told_while_another_is_killed(tmp_path: Path, where: str) -> None:
    status, text, ends = train(tmp_path, [[1, 5, "sigterm"]], deaths=[[2, 5, 0, where]])
    assert status == 0, text
    assert sorted(ends) == [0]
    check(ends, 12)
    assert "rank 2 was lost (dead); 2 ranks go on" in text
    assert "rank 1 left on notice; 1 rank goes on" in text


@long
def test_a_rank_told_in_the_last_step_ends_like_the_others(tmp_path: Path) -> None:
    status, text, ends = train(tmp_path, [[1, 11, "sigterm"]])
    assert status == 0, text
    assert sorted(ends) == [0, 1, 2]
    assert "notice" not in text
    check(ends, 12)


@long
def test_a_file_that_exists_before_the_job_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "leave.2").touch()
    status, text, ends = train(tmp_path, [])
    assert status != 0
    assert not ends
    assert f"elastic.notice.file: '{tmp_path}/leave.2' exists before the job has begun, so rank 2" in text


def test_one_process_ends_its_loop(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    config = {"version": 1, "elastic": {"notice": {"file": str(path)}}}
    with mcr.init(config):
        model, optimizer = mcr.wrap(*program.model_and_optimizer())
        seen = []
        for step in mcr.elastic(model, optimizer, steps=5):
            with step:
                seen.append(step.number)
                if step.number == 2:
                    path.touch()
        assert seen == [0, 1, 2]
        assert list(mcr.elastic(model, optimizer, steps=5)) == [], "the file still exists"
    assert torch.isfinite(next(iter(model.parameters()))).all()
