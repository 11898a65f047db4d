"""FSDP2 models in an elastic loop: ranks leave on notice, or are killed, and their shards go on.

The oracles are one process of plain torch, and a job of fewer ranks that begins with the state at the change.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch_features
from jobs.elasticity import fsdp_membership_jobs
from jobs.elasticity import sharded_program as program
from ranks import nursery

pytestmark = pytest.mark.skipif(not torch_features.FSDP_HOOKS, reason="this torch has no hooks for FSDP2")
long = pytest.mark.long
STEPS = 12


def train(
    folder: Path, ranks: int, events: list[list[Any]], *, copies: int = 0, least: int = 1, **more: Any
) -> tuple[int, str, dict[int, dict[str, Any]]]:
    """Status and output of the launcher, and what each of its ranks had at the end."""
    folder.mkdir(exist_ok=True)
    elastic = {"notice": "sigterm"} | ({"buddies": {"steps": copies}} if copies else {})
    plan = {"steps": STEPS, "elastic": elastic, "events": events, **more}
    words = [nursery().python, program.__file__, str(folder), json.dumps(plan)]
    options = ["-n", str(ranks), "--min-ranks", str(least)]
    done = subprocess.run(
        [nursery().python, "-m", "mcr_plus.cli.main", "run", *options, *words],
        capture_output=True, text=True, timeout=240, check=False, env=nursery().environ,
    )  # fmt: skip
    ends = {int(path.name[4:]): json.loads(path.read_text()) for path in folder.glob("end.*")}
    return done.returncode, done.stdout + done.stderr, ends


def check(found: dict[str, list[float]], steps: int) -> None:
    """Whether a state is that of one process after these steps."""
    model, optimizer = program.plain_model()
    for step in range(steps):
        optimizer.zero_grad()
        program.loss(model, step, 0, 1).backward()
        optimizer.step()
    fsdp_membership_jobs.check_like(found, model, optimizer, [1e-9, 1e-12])


def check_bits(end: dict[str, Any]) -> None:
    """Whether ranks that go back to an earlier step begin it with the same bits as before."""
    states: dict[int, Any] = {}
    last = -1
    for (number, _), state in zip(end["seen"], end["states"], strict=True):
        if number <= last:
            assert states[number] == state, number
        states[number], last = state, number


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=long), pytest.param(2, marks=long)])
def test_a_rank_with_notice_hands_its_shards_over(tmp_path: Path, victim: int) -> None:
    status, text, ends = train(tmp_path, 3, [[victim, 4, "notice"]])
    assert status == 0, text
    assert sorted(ends) == [rank for rank in range(3) if rank != victim]
    assert f"elastic: rank {victim} left on notice; 2 ranks go on with step 5 after" in text
    for end in ends.values():
        assert end["seen"] == [[step, 3 if step <= 4 else 2] for step in range(STEPS)], "each step once"
        check(end["states"][5], 5)
        check(end["end"], STEPS)


@long
def test_the_rest_is_a_run_of_fewer_ranks_to_the_last_bit(tmp_path: Path) -> None:
    status, text, ends = train(tmp_path / "first", 3, [[0, 4, "notice"]])
    assert status == 0, text
    begin = str(tmp_path / "first" / "state.1.5.2")
    status, text, again = train(tmp_path / "again", 2, [], first=5, begin=begin)
    assert status == 0, text
    assert [end["end"] for end in again.values()] == [end["end"] for end in ends.values()]


@pytest.mark.parametrize(
    ("copies", "victim", "where"),
    [
        pytest.param(4, 1, "before", marks=long),
        pytest.param(4, 2, "after", marks=long),
        pytest.param(1, 0, "before", marks=long),
        pytest.param(4, 0, "copying", marks=long),
        pytest.param(6, 1, "copying", marks=long),
        pytest.param(1, 2, "copying", marks=long),
    ],
)
def test_shards_of_a_killed_rank_come_from_its_buddy(
    tmp_path: Path, copies: int, victim: int, where: str
) -> None:
    status, text, ends = train(tmp_path, 3, [[victim, 6, where]], copies=copies)
    assert status == 0, text
    assert sorted(ends) == [rank for rank in range(3) if rank != victim]
    assert f"elastic: rank {victim} was lost (dead); 2 ranks go on with step" in text
    for end in ends.values():
        numbers = [number for number, _ in end["seen"]]
        back = next(n for n, (number, ranks) in enumerate(end["seen"]) if ranks == 2)
        done = numbers[back - 1] + (where == "after")  # completed steps before the death
        assert done - numbers[back] <= copies
        assert numbers == [*range(numbers[back - 1] + 1), *range(numbers[back], STEPS)]
        check_bits(end)
        check(end["end"], STEPS)


@long
def test_a_death_a_notice_and_another_death(tmp_path: Path) -> None:
    events = [[3, 3, "before"], [1, 6, "notice"], [0, 9, "after"]]
    status, text, ends = train(tmp_path, 4, events, copies=2)
    assert status == 0, text
    assert sorted(ends) == [2]
    check_bits(ends[2])
    check(ends[2]["end"], STEPS)


@long
def test_a_rank_is_told_while_another_is_killed(tmp_path: Path) -> None:
    status, text, ends = train(tmp_path, 4, [[1, 5, "notice"], [2, 5, "before"]], copies=4)
    assert status == 0, text
    assert sorted(ends) == [0, 3]
    assert "rank 1 left on notice" in text
    for end in ends.values():
        check_bits(end)
        check(end["end"], STEPS)


@long
def test_without_buddies_a_killed_rank_ends_the_loop(tmp_path: Path) -> None:
    status, text, ends = train(tmp_path, 3, [[1, 5, "before"]])
    assert status != 0
    assert not ends
    assert "were on lost ranks alone" in text
    assert "load a checkpoint into it" in text


@long
def test_an_optimizer_of_another_model_is_named(tmp_path: Path) -> None:
    status, text, _ = train(tmp_path, 2, [], copies=2, stranger=True)
    assert status != 0
    assert "build: optimizer: has parameters that the model does not have" in text


@long
def test_all_ranks_are_told(tmp_path: Path) -> None:
    status, text, ends = train(tmp_path, 3, [[rank, 4, "notice"] for rank in range(3)])
    assert status == 0, text
    assert "ranks 0, 1, 2 have notice to leave; nobody is left, so the loop ends on all ranks after 5" in text
    for end in ends.values():
        check(end["end"], 5)
