"""Bits of plans in float32: pipelines as micro-batches of one process; with `sums: exact`, parts of a batch.

Parts of gradients of a cut batch are added up exactly and rounded once, which `math.fsum` does here.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from jobs.plans.plan_training import mlp, optimizer_of, profile_of
from ranks import run_ranks
from torch import Tensor

import mcr_plus as mcr
from mcr_plus.plans.named import named

ITEMS, STEPS = 12, 3
Plan = tuple[str, dict[str, Any]]


def case_of(step: int) -> tuple[Tensor, Tensor]:
    """Return a batch of 12 items, which 2, 3 and 4 parts divide."""
    x, y = (torch.cat(each) for each in zip(*(mlp(1).batch(10 * step + n) for n in range(9)), strict=True))
    return x[:ITEMS].float(), y[:ITEMS]


def trained_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def one_process(parts: int, *, exact: bool) -> tuple[list[float], list[Tensor]]:
    """Return losses and parameters; gradients of parts are added in turn, or exactly."""
    case = mlp(1)
    model = case.model.float()
    optimizer = optimizer_of(model, "adamw")
    losses = []
    for step in range(STEPS):
        gradients: list[list[Tensor]] = []
        total = 0.0
        for x, y in zip(*(each.chunk(parts) for each in case_of(step)), strict=True):
            loss = case.loss(model(x), y)
            total += float(loss.detach().double()) * (1 / parts)
            share = torch.full_like(loss, 1 / parts)
            gradients.append(list(torch.autograd.grad(loss, trained_of(model), share)))
        for index, param in enumerate(trained_of(model)):
            each = [one[index] for one in gradients]
            param.grad = torch.zeros_like(param)
            if exact:
                flat = zip(*(one.flatten().tolist() for one in each), strict=True)
                param.grad += torch.tensor([math.fsum(values) for values in flat]).view_as(param)
            else:
                for one in each:
                    param.grad += one
        optimizer.step()
        losses.append(total)
    return losses, [param.detach() for param in model.parameters()]


def trained(plans: list[Plan], sums: str) -> list[str]:
    """Return what differs from one process."""
    torch.set_num_threads(1)
    wrong = []
    with mcr.init({"version": 1, "numerics": {"sums": sums}}) as comm:
        case = mlp(comm.size)._replace(batch=case_of)
        profile = profile_of(case._replace(model=case.model.float()))
        for name, options in plans:
            model = copy.deepcopy(case.model)
            optimizer = optimizer_of(model, "adamw")
            plan = named(name, profile, comm.size, **options)
            parallel = mcr.parallelize(model, optimizer, plan, loss=case.loss)
            losses = []
            for step in range(STEPS):
                losses.append(float(parallel.step(case_of(step))))
                optimizer.step()
            state = parallel.state_dict()
            parts = options.get("micro_batches", 1) * (comm.size if sums == "exact" else 1)
            expected, params = one_process(parts, exact=sums == "exact")
            if losses != pytest.approx(expected, rel=1e-15):
                wrong.append(f"{name}: losses {losses}, not {expected}")
            if comm.rank == 0:
                names = [name for name, _ in mlp(1).model.named_parameters()]
                for key, param in zip(names, params, strict=True):
                    if not torch.equal(state[key], param):
                        wrong.append(f"{name} {options}: {key}")
    return wrong


@pytest.mark.short("2]")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pipelines_have_the_bits_of_micro_batches(ranks: int) -> None:
    plans: list[Plan] = [
        ("one_f_one_b", {"micro_batches": 3}), ("gpipe", {"micro_batches": 4}),
        ("interleaved", {"micro_batches": 4}), ("eager_1f1b", {"micro_batches": 6}),
        ("zero_bubble", {"micro_batches": 4}), ("one_f_one_b", {"micro_batches": 1}),
    ]  # fmt: skip
    for result in run_ranks(trained, ranks, args=[plans, "fast"]):
        assert result.value == []


@pytest.mark.short("2]")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exact_sums_have_the_bits_of_one_process(ranks: int) -> None:
    plans: list[Plan] = [("data_parallel", {}), ("zero1", {}), ("zero3", {})]
    for result in run_ranks(trained, ranks, args=[plans, "exact"]):
        assert result.value == []
