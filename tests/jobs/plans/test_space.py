"""Volumes and images cut into slabs, and SplitBrain, beside one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from network import Network
from plan_exam import difference, profile_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional

import mcr_plus as mcr
from mcr_plus.errors import Unsupported
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.named import named
from mcr_plus.plans.run import parallelize

CLOSE = 1e-9


class Skip(nn.Module):
    """Two convolutions that keep the size, beside a skip: one block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 3, 5, padding="same", padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(functional.relu(self.first(x)))
        return x + y


class Images(nn.Module):
    """Windows that overlap, leave out a border, stride and widen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Conv2d(2, 3, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=1),
            nn.Conv2d(3, 3, 3, dilation=2), Skip(), nn.AvgPool2d(2), nn.LeakyReLU(),
        )  # fmt: skip
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.layers(x).mean((2, 3)))
        return output


def drawn(number: int, *shape: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [
        (torch.randn(number, *shape).double(), torch.randn(number, 1 if len(shape) > 3 else 2).double())
        for _ in range(3)
    ]


def network() -> nn.Module:
    torch.manual_seed(0)
    return Network(3, 2, None).double()


def slabs(profile: Profile, data: int, ranks: int) -> ModelPlan:
    """Slabs of images, and beside them shards of the batch."""
    plan = ModelPlan(profile, ranks, micro_batches=2)
    plan.cut(..., "batch", data)
    for index, block in enumerate(plan.blocks):
        if "space" in block.axes:
            plan.cut(index, "space", ranks // data)
        else:
            plan.replicate(index, ranks // data)
    plan.assign(..., list(range(ranks)))
    plan.recompute(range(2, 5))
    return plan


def trained() -> dict[str, float]:
    loss = functional.mse_loss
    found = {}
    with mcr.init() as comm:
        ranks = comm.size
        exam = partial(difference, network, drawn(4, 1, 14, 8, 8), loss=loss)
        for name in ("spatial", "splitbrain"):
            for micro in (1, 2):
                plan_of = partial(named, name, ranks=ranks, micro_batches=micro)
                found[f"{name} {micro}"] = exam(plan_of)
        exam = partial(difference, lambda: Images().double(), drawn(7, 2, 41, 23), loss=loss)
        found["images"] = exam(partial(slabs, data=1, ranks=ranks))
        if ranks == 4:
            found["images, data x slabs"] = exam(partial(slabs, data=2, ranks=ranks))
            found["data x slabs"] = exam(partial(named, "spatial", ranks=ranks, data=2))
    return found


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_slabs_train_as_one_process(ranks: int) -> None:
    (first, *others) = [result.value for result in run_ranks(trained, ranks)]
    for each in (first, *others):
        assert {key: value for key, value in each.items() if not value < CLOSE} == {}
    assert len(first) == 5 + 2 * (ranks == 4)


class Halves(nn.Module):
    """A block whose two windows change the size."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 1, 3)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.pool(self.convolution(x))
        return y + x.mean()


def refused() -> list[str]:
    said = []
    with mcr.init() as comm:
        cases: list[nn.Module] = [nn.Sequential(nn.Conv2d(1, 1, 1), Halves())]
        cases += [nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")]
        cases += [nn.Sequential(nn.Conv2d(1, 1, 1), nn.MaxPool2d(3, padding=1))]
        for case in cases:
            model: Any = nn.Sequential(case, nn.Flatten(), nn.LazyLinear(1))
            batch = torch.ones(2, 1, 8, 8), torch.ones(2, 1)
            model(batch[0])
            profile = profile_of(model, batch, functional.mse_loss)
            optimizer = torch.optim.SGD(model.parameters())
            try:
                plan = named("spatial", profile, comm.size)
                parallelize(model, optimizer, plan, loss=functional.mse_loss)
            except Unsupported as error:
                said.append(str(error))
    return said


def test_other_windows_are_refused() -> None:
    for result in run_ranks(refused, 2):
        halves, reflect, padded = result.value
        assert halves.startswith("0.1.convolution: it makes [6, 6] of [8, 8], and its block [3, 3]; expected")
        assert "padding_mode" in reflect
        assert padded.startswith("0.1: padding")
