"""The examples of plans train by a plan that is searched, named or read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_runs import launch

TINY = (
    *("--layers", 2, "--hidden", 16, "--heads", 2, "--sequence", 16),
    *("--batch", 4, "--steps", 3, "--lr", 0.01),
)


OTHERS: dict[str, tuple[object, ...]] = {
    "moe expert_parallel": (*TINY, "--experts", 4),
    "dlrm tables_parallel": ("--batch", 64, "--steps", 3, "--table-rows", 100, "--embedding-dim", 4),
    "cosmo spatial": ("--size", 8, "--channels", 2, "--levels", 2, "--batch", 4, "--steps", 3),
}
"""Programs, their own plans, and options of small models."""


def gpt(folder: Path, *words: object) -> dict[str, Any]:
    return train(folder, "gpt", *TINY, *words)


def train(folder: Path, program: str, *words: object) -> dict[str, Any]:
    """Train on two ranks; return the results."""
    results = folder / "results.json"
    answer = launch("plans", *words, "--json", results, program=f"{program}.py")
    assert answer.returncode == 0, answer.stderr
    assert "foretold" in answer.stdout
    found: dict[str, Any] = json.loads(results.read_text())
    assert found["foretold_ms"] > 0
    assert found["measured_ms"] > 0
    assert found["peak_bytes"] > 0
    return found


@pytest.mark.long
def test_every_way_to_a_plan_has_the_same_losses(tmp_path: Path) -> None:
    """The plan that is read is the one that was written."""
    page, file = tmp_path / "plan.html", tmp_path / "plan.json"
    named = gpt(tmp_path, "--plan", "one_f_one_b", "--report", page, "-o", file)
    assert named["plan"] == "one_f_one_b"
    assert page.read_text().startswith("<!doctype html>")
    read = gpt(tmp_path, "--plan", file)
    assert (read["plan"], read["losses"]) == (named["plan"], named["losses"])
    auto = gpt(tmp_path, "--plan", "auto")
    assert auto["plan"] == "auto"
    assert auto["losses"] == pytest.approx(named["losses"], rel=1e-4)
    assert len(auto["losses"]) == 3


@pytest.mark.long
@pytest.mark.parametrize("program", OTHERS)
def test_other_models_have_the_same_losses_by_their_own_plans(program: str, tmp_path: Path) -> None:
    name, own = program.split()
    found = [train(tmp_path, name, *OTHERS[program], "--plan", plan) for plan in ("auto", own, "gpipe")]
    assert [each["plan"] for each in found] == ["auto", own, "gpipe"]
    for each in found[1:]:
        assert each["losses"] == pytest.approx(found[0]["losses"], rel=1e-4)


@pytest.mark.long
def test_data_that_are_too_few(tmp_path: Path) -> None:
    answer = launch("plans", "--batch", 1 << 20, program="dlrm.py")
    assert answer.returncode != 0
    assert "1048576" in answer.stderr  # in a frame, with broken lines
    assert "Traceback" not in answer.stderr


@pytest.mark.long
def test_plans_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"version": 1}')
    for words, text in (
        (("--plan", "one_f_two_b"), "one_f_one_b"),
        (("--plan", tmp_path / "none.json"), "none.json"),
        (("--plan", tmp_path / "plan.json"), "plan.json"),
        (("--plan", "auto", "--memory", "1KiB"), "MiB more"),
        (("--plan", "data_parallel", "--memory", "1KiB"), "memory: rank"),
        (("--plan", "data_parallel", "--memory", "much"), "'--memory'"),
    ):
        answer = launch("plans", *TINY, *words, program="gpt.py")
        assert answer.returncode != 0
        assert text in answer.stderr
        assert "Traceback" not in answer.stderr
