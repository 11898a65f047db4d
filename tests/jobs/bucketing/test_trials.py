"""Trials of plans in jobs with several models: on the ranks of a group, only one runs at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

import mcr_plus as mcr
from mcr_plus.training import wrap as wrapping

STAGES: list[dict[str, Any]] = [{"fuse": {"plan": "auto"}}, {"select": {}}, {"dispatch": {}}]
WHOLE_TRIAL = 22
"""Passes of a trial, as in `auto_plan`."""


def wrapped(group: mcr.Communicator | None = None) -> Any:
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    return mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)[0]


def trained(models: dict[str, Any], rounds: int) -> dict[str, list[int]]:
    """Train models in turns; return, by model, the rounds after which its trial was running."""
    running: dict[str, list[int]] = {name: [] for name in models}
    for number in range(rounds):
        for name, model in models.items():
            model(torch.randn(4, 16)).square().mean().backward()
            auto = wrapping._wrapped[model].reducer._auto
            if auto is not None and auto._passes:
                running[name].append(number)
    return running


def of_all_ranks() -> dict[str, list[int]]:
    """Run on ranks: two models of all ranks."""
    torch.set_num_threads(1)
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": STAGES}):
        return trained({name: wrapped() for name in ("one", "other")}, 60)


def check_trial(rounds: list[int]) -> None:
    assert rounds == list(range(rounds[0], rounds[0] + WHOLE_TRIAL - 1))


def test_models_that_are_trained_in_turns_try_plans_one_after_the_other() -> None:
    first, other = [each.value for each in run_ranks(of_all_ranks, 2, via="torch", timeout=120)]
    assert first == other
    check_trial(first["one"])
    check_trial(first["other"])
    assert first["one"][-1] < first["other"][0]


def of_overlapping_groups() -> dict[str, list[int]]:
    """Run on three ranks: a model of ranks 0 and 1, one of ranks 1 and 2, and one of all ranks."""
    torch.set_num_threads(1)
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": STAGES}) as comm:
        models: dict[str, Any] = {}
        for name, ranks in (("left", (0, 1)), ("right", (1, 2))):
            group = comm.split(0 if comm.rank in ranks else None)
            if group is not None:
                models[name] = wrapped(group)
        models["all"] = wrapped()
        return trained(models, 100)


@pytest.mark.long
def test_groups_that_share_ranks_agree_on_whose_trial_runs() -> None:
    """Rank 2 takes no part in the trial of ranks 0 and 1, but its own trial must wait for theirs."""
    results = [each.value for each in run_ranks(of_overlapping_groups, 3, via="torch", timeout=180)]
    by_model: dict[str, list[list[int]]] = {}
    for found in results:
        for name, rounds in found.items():
            by_model.setdefault(name, []).append(rounds)
    assert {name: len(of_ranks) for name, of_ranks in by_model.items()} == {"left": 2, "right": 2, "all": 3}
    for of_ranks in by_model.values():
        assert of_ranks == [of_ranks[0]] * len(of_ranks)
        check_trial(of_ranks[0])
    assert len({number for (rounds, *_) in by_model.values() for number in rounds}) == 3 * (WHOLE_TRIAL - 1)


def of_an_unused_model() -> int | None:
    """Run on ranks: stop training a model during its trial; return the round when another trial begins."""
    torch.set_num_threads(1)
    with mcr.init({"version": 1, "backends": ["gloo"], "pipeline": STAGES}):
        unused = wrapped()
        assert trained({"unused": unused}, 6)["unused"]
        return next(iter(trained({"other": wrapped()}, 80)["other"]), None)


@pytest.mark.long
def test_a_model_that_is_not_trained_any_more_delays_others_only_for_a_time() -> None:
    first, other = [each.value for each in run_ranks(of_an_unused_model, 2, via="torch", timeout=120)]
    assert first == other == 50
