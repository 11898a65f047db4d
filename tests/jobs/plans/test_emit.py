"""Programs of torch alone by emitted plans, beside one process; what torch has no engine for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs.plans.plan_training import Layer
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional

import mcr_plus as mcr
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.emit import TorchPlan, emit
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.named import hybrid, named

ITEMS, STEPS = 8, 3
OPTIONS: Any = {"lr": 0.01}


def chain(tied: bool = False) -> nn.Module:
    torch.manual_seed(7)
    layers = [Layer(16, 4, 2) for _ in range(3)]
    embedding, head = nn.Embedding(20, 16), nn.Linear(16, 20)
    if tied:
        head.weight = embedding.weight
        head.weight.mcr_shared = True  # type: ignore[attr-defined]
    return nn.Sequential(embedding, *layers, head).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return (
        torch.randint(20, (ITEMS, 6), generator=random),
        torch.randn(ITEMS, 6, 20, dtype=torch.float64, generator=random),
    )


def profile_of(model: nn.Module) -> Profile:
    """Return the profile with times that do not depend on the run."""
    found = mcr.profile(model, batch(0), loss=functional.mse_loss, repeats=1)
    blocks = [block.model_copy(update={"forward": 1.0, "backward": 2.0}) for block in found.blocks]
    return found.model_copy(update={"blocks": tuple(blocks)})


def one_process(tied: bool) -> list[float]:
    model = chain(tied)
    optimizer = torch.optim.Adam(model.parameters(), **OPTIONS)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def by_torch(paths: list[str], tied: list[bool]) -> list[list[float]]:
    """Train by the program of each plan; return the losses that this rank has."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for path, is_tied in zip(paths, tied, strict=True):
        plan = TorchPlan.load(path)
        scope: dict[str, Any] = {
            "model": chain(is_tied), "loss": functional.mse_loss, "device": "cpu",
            "Optimizer": torch.optim.Adam, "options": OPTIONS,
        }  # fmt: skip
        exec(str(plan), scope)
        rows, at = ITEMS // plan.mesh["data"], scope["mesh"].get_local_rank("data")
        losses = []
        for step in range(STEPS):
            x, y = (each[at * rows : (at + 1) * rows] for each in batch(step))
            own = scope["step"](x, y)
            losses.append(float(sum(each.detach() for each in own) / len(own)) if own else 0.0)
        found.append(losses)
    dist.destroy_process_group()
    return found


PLANS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"name": "data_parallel", "micro_batches": 2},
        {"name": "zero1"},
        {"name": "zero3", "micro_batches": 2},
        {"name": "tensor_parallel"},
        {"name": "gpipe", "micro_batches": 4},
        {"name": "one_f_one_b", "micro_batches": 4},
        {"name": "interleaved", "micro_batches": 4},
        {"name": "zero_bubble", "micro_batches": 4},
        {"name": "zero3", "tied": True},
    ],
    4: [
        {"data": 2, "tensor": 2, "held": "parameters", "recompute": [1, 2]},
        {"data": 2, "tensor": 2},
        {"data": 2, "tensor": 2, "held": "optimizer"},
        {"stages": 2, "data": 2, "micro_batches": 2},
        {"stages": 2, "data": 2, "micro_batches": 2, "held": "parameters"},
        {"stages": 2, "data": 2, "micro_batches": 2, "held": "optimizer"},
        {"stages": 2, "tensor": 2, "micro_batches": 2, "schedule": "zero-bubble"},
    ],
}


def plan_of(profile: Profile, ranks: int, spec: dict[str, Any]) -> ModelPlan:
    options = {key: value for key, value in spec.items() if key != "tied"}
    return (named if "name" in spec else hybrid)(profile=profile, ranks=ranks, **options)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_programs_of_torch_have_the_losses_of_one_process(ranks: int, tmp_path: Path) -> None:
    paths, tied = [], ["tied" in spec for spec in PLANS[ranks]]
    models = {is_tied: chain(is_tied) for is_tied in set(tied)}
    profiles = {is_tied: profile_of(model) for is_tied, model in models.items()}
    expected = {is_tied: one_process(is_tied) for is_tied in models}
    for number, (spec, is_tied) in enumerate(zip(PLANS[ranks], tied, strict=True)):
        plan = emit(plan_of(profiles[is_tied], ranks, spec), models[is_tied])
        assert plan.units in ((), ("1", "2", "3") if is_tied else ("0", "1", "2", "3", "4"))
        assert plan.layouts.get("0") == ("rows" if plan.mesh["tensor"] > 1 else None)
        paths.append(str(tmp_path / f"{number}.json"))
        plan.save(paths[-1])
    results = run_ranks(by_torch, ranks, args=[paths, tied], via="torch")
    for number, spec in enumerate(PLANS[ranks]):
        mesh = TorchPlan.load(paths[number]).mesh
        last = range(ranks - mesh["data"] * mesh["tensor"], ranks)
        for step, loss in enumerate(expected[tied[number]]):
            found = sum(results[rank].value[number][step] for rank in last) / len(last)
            assert abs(found - loss) < 1e-9 * loss, (spec, step)
