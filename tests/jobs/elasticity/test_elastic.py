"""Training that goes on when ranks are lost and takes restarted ones in, under `mcr-plus run --min-ranks`.

The oracle is one process of plain torch that trains on the same data.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.elasticity import elastic_program as program
from ranks import nursery, run_ranks

import mcr_plus as mcr

PROGRAM = str(Path(program.__file__))


def run(
    folder: Path,
    ranks: int,
    plan: dict[str, Any],
    *,
    least: int = 2,
    restarts: int = 4,
    limit: float = 240,
    forked: bool = True,
) -> tuple[int, str, dict[int, dict[str, Any]]]:
    """Status and output of the launcher, and what each of its ranks had at the end.

    Ranks that are `forked` do not report their exceptions to the launcher.
    """
    python = nursery().python if forked else sys.executable
    options = ["-n", str(ranks), "--min-ranks", str(least), "--restart-failed", str(restarts)]
    program = [python, PROGRAM, str(folder), json.dumps(plan)]
    command = [nursery().python, "-m", "mcr_plus.cli.main", "run", *options, *program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit, check=False, env=nursery().environ
    )
    ends = {
        int(path.name.removeprefix("end.")): json.loads(path.read_text()) for path in folder.glob("end.*")
    }
    return done.returncode, done.stdout + done.stderr, ends


def undisturbed(steps: int, exact: bool = False) -> tuple[torch.Tensor, list[float]]:
    """The parameters and the optimizer's moments after training in one process."""
    model, optimizer = program.model_and_optimizer()
    for step in range(steps):
        x, y = program.data(step)
        optimizer.zero_grad()
        if exact:
            set_exact_means(model.float(), x, y)
        else:
            (model(x) - y).square().mean().backward()
        optimizer.step()
    values = torch.cat([each.detach().flatten() for each in model.parameters()])
    return values, [optimizer.state[each]["exp_avg_sq"].sum().item() for each in model.parameters()]


def set_exact_means(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Set the gradients to means over windows that are rounded once as sums and once as means."""
    params = list(model.parameters())
    windows = [torch.autograd.grad(program.window_loss(model, x, y, each), params) for each in range(len(x))]
    for param, *given in zip(params, *windows, strict=True):
        columns = torch.stack([each.flatten() for each in given]).T.tolist()
        means = [math.fsum(column) / len(x) for column in columns]
        param.grad = torch.tensor(means, dtype=torch.float64).float().view_as(param)


def check(ends: dict[int, dict[str, Any]], steps: int, exact: bool = False) -> None:
    """All ranks have what one process has that was not disturbed, to the last bit if sums are `exact`."""
    values, moments = undisturbed(steps, exact)
    for slot, end in ends.items():
        if exact:
            assert end["values"] == values.tolist(), slot
        else:
            found = torch.tensor(end["values"], dtype=torch.float64)
            torch.testing.assert_close(found, values, msg=str(slot))
        assert end["moments"] == pytest.approx(moments), slot
        assert end["sampler"] == steps, slot


long = pytest.mark.long


@pytest.mark.parametrize(
    ("victim", "where", "exact"),
    [
        (0, "step", True),
        pytest.param(0, "step", False, marks=long),
        pytest.param(0, "forward", False, marks=long),
        pytest.param(0, "backward", False, marks=long),
        pytest.param(2, "forward", False, marks=long),
        pytest.param(2, "backward", False, marks=long),
        pytest.param(2, "step", False, marks=long),
        pytest.param(2, "between", True, marks=long),
        pytest.param(2, "backward", True, marks=long),
    ],
)
def test_ranks_that_die_in_a_step_come_back(tmp_path: Path, victim: int, where: str, exact: bool) -> None:
    # While the rank is away a step takes long, so that it is back before the last one.
    pace = {"full": 3, "nap": 0.2, "last_nap": 6.0, "late": 1.5}
    plan = {"steps": 50, "deaths": [[victim, 8, 0, where]], "exact": exact, **pace}
    status, text, ends = run(tmp_path, 3, plan)
    assert status == 0, text
    assert sorted(ends) == [0, 1, 2]
    assert [end["rank"] for _, end in sorted(ends.items())] == [0, 1, 2], (
        "a newcomer has its predecessor's rank"
    )
    check(ends, 50, exact)
    assert f"rank {victim} was killed by SIGKILL; started again (1 of 4)" in text
    assert f"elastic: rank {victim} was lost (dead); 2 ranks go on with step" in text
    assert f"elastic: rank {victim} joined; 3 ranks go on with step" in text
    sizes = [size for _, size in ends[1]["seen"]]
    assert sorted(set(sizes)) == [2, 3]
    numbers = [number for number, _ in ends[1]["seen"]]
    assert numbers == list(range(50)), "each step once"


@long
def test_a_step_that_the_optimizer_has_made_is_not_repeated(tmp_path: Path) -> None:
    plan = {"steps": 20, "deaths": [[1, 5, 0, "step"]], "logs": True}
    status, text, ends = run(tmp_path, 3, plan, restarts=0)
    assert status == 0, text
    assert "go on with step 6" in text, "the others lose rank 1 after their own optimizer's step"
    check(ends, 20)


@long
def test_a_rank_that_dies_before_the_loop_begins_makes_all_begin_anew(tmp_path: Path) -> None:
    status, text, ends = run(tmp_path, 3, {"steps": 20, "deaths": [[2, -1, 0, "setup"]]})
    assert status == 0, text
    assert "started again (3 of 4), and all others with it: none had come to mcr.elastic" in text
    assert [end["rank"] for _, end in sorted(ends.items())] == [0, 1, 2]
    assert {size for _, size in ends[1]["seen"]} == {3}
    check(ends, 20)


@long
def test_an_exception_of_one_rank_ends_no_other(tmp_path: Path) -> None:
    plan = {"steps": 50, "deaths": [[1, 5, 0, "raise"]], "logs": True, "full": 3, "nap": 0.2, "last_nap": 6.0}
    status, text, ends = run(tmp_path, 3, plan, restarts=1, forked=False)
    assert status == 0, text
    assert "rank 1 ended with ValueError: a bug of one rank" in text
    assert sorted(ends) == [0, 1, 2]
    check(ends, 50)


@long
def test_two_deaths_at_once_leave_too_few_until_one_comes_back(tmp_path: Path) -> None:
    plan = {
        "steps": 25,
        "deaths": [[0, 5, 0, "forward"], [1, 5, 0, "backward"], [2, 15, 0, "step"]],
        "nap": 0.1,
    }
    status, text, ends = run(tmp_path, 3, plan)
    assert status == 0, text
    check({slot: end for slot, end in ends.items() if end["seen"]}, 25)
    assert "started again (3 of 4)" in text


@long
def test_the_job_goes_on_with_fewer_ranks_when_no_restarts_are_left(tmp_path: Path) -> None:
    plan = {"steps": 20, "deaths": [[1, 5, 0, "forward"]]}
    status, text, ends = run(tmp_path, 3, plan, restarts=0)
    assert status == 0, text
    assert sorted(ends) == [0, 2]
    check(ends, 20)
    assert ends[2]["rank"] == 1


@long
@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("other_model", "the model is"),
        ("config", "the configuration is"),
    ],
)
def test_a_newcomer_that_differs_is_refused_and_disturbs_nobody(
    tmp_path: Path, what: str, difference: str
) -> None:
    plan: dict[str, Any] = {"steps": 60, "deaths": [[1, 5, 0, "forward"]], "nap": 0.3}
    plan[what] = True
    if what == "config":
        fused = {"version": 1, "pipeline": [{"fuse": {"bucket": "1MiB"}}, {"select": {}}, {"dispatch": {}}]}
        plan["config"] = {"1": fused}
    status, text, ends = run(tmp_path, 3, plan, restarts=1)
    assert status == 0, text
    assert f"LaunchError: the job has not taken this process in: {difference}" in text
    check({slot: ends[slot] for slot in (0, 2)}, 60)
    assert {size for _, size in ends[0]["seen"][10:]} == {2}


@long
def test_a_bug_that_ends_all_ranks_ends_the_job(tmp_path: Path) -> None:
    deaths = [[rank, 5, 0, "forward"] for rank in range(2)]
    status, text, _ = run(tmp_path, 2, {"steps": 20, "deaths": deaths}, least=1, restarts=1)
    assert status == 1
    assert "all ranks of the job have died" in text


def _wrong_uses() -> dict[str, str]:
    """On ranks: the errors of calls that make no sense."""
    mcr.init(backends=["gloo"])
    model, optimizer = program.model_and_optimizer()
    mcr.wrap(model, optimizer)
    skipped = torch.nn.Linear(2, 2)
    skipped.weight.mcr_skip = True  # type: ignore[attr-defined]
    errors: dict[str, str] = {}

    def note(name: str, *arguments: Any, **options: Any) -> None:
        try:
            for _ in mcr.elastic(*arguments, **options):
                pass
        except mcr.McrError as error:
            errors[name] = f"{type(error).__name__}: {error}"

    note("least", model, optimizer, min_ranks=3)
    note("model", "model", optimizer)
    note("optimizer", model, model)
    note("state", model, optimizer, 3)
    note("steps", model, optimizer, steps=-1)
    note("skip", skipped, optimizer)
    note("with", model, optimizer, steps=1)
    note("timeout", model, optimizer, steps=1, timeout="never")
    mcr.finalize()
    return errors


def test_invalid_calls_are_refused() -> None:
    for result in run_ranks(_wrong_uses, 2, via="torch"):
        assert result.value == {
            "least": "InvalidArgument: min_ranks: expected a number of ranks from 1 to 2, got 3",
            "model": "InvalidArgument: model: expected a torch.nn.Module, got str",
            "optimizer": "InvalidArgument: optimizer: expected a torch.optim.Optimizer, got Sequential",
            "state": "InvalidArgument: state 0: expected an object with state_dict and load_state_dict, "
            "got int",
            "steps": "InvalidArgument: steps: expected a number of steps or None, got -1",
            "skip": "InvalidArgument: model: 'weight' is not replicated, so it is lost with a rank; elastic "
            "needs replicas",
            "with": "NotInitialized: elastic: use each step in a `with` block, so that losses are caught",
            "timeout": "InvalidArgument: timeout: expected a duration such as 300s or a number of seconds, "
            "got 'never'",
        }
