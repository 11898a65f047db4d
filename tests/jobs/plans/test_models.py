"""All named plans that apply to a mixture of experts, DLRM and a 3-D CNN, beside one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from experts import ExpertShape
from model import ModelConfig
from network import Network
from plan_exam import Loss, difference
from plan_models import ExpertChain, TablesChain
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional

import mcr_plus as mcr
from mcr_plus.plans.named import NAMED, named

CLOSE = 1e-9
ITEMS = 9


class Model(NamedTuple):
    """A model, its batch and its loss, and the named plans that are refused for it."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Loss
    refused: set[str]


def network() -> nn.Module:
    torch.manual_seed(0)
    return Network(3, 2, None)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


SHAPE = ExpertShape(layers=6, hidden=12, heads=4, sequence=8, experts=12, top_k=2, balance=0.3)
CONFIG = ModelConfig(embedding_dim=4, table_rows=11, bottom=(8, 6), top=(9,))
MODELS = {
    "experts": Model(
        lambda: ExpertChain(SHAPE, 0), lambda: torch.randint(256, (ITEMS, 9)), None,
        {"tables_parallel", "terapipe", "interlaced"},
    ),
    "tables": Model(
        lambda: TablesChain(CONFIG),
        lambda: ((random(ITEMS, 13), torch.randint(11, (ITEMS, 26))), random(ITEMS).sigmoid()),
        functional.binary_cross_entropy_with_logits,
        {"expert_parallel", "terapipe", "interlaced"},
    ),
    "volumes": Model(
        network, lambda: (random(ITEMS, 1, 14, 8, 8), random(ITEMS, 1)),
        functional.mse_loss,
        {"expert_parallel", "tables_parallel", "terapipe", "interlaced"},
    ),
}  # fmt: skip


def trained(which: str) -> dict[str, float]:
    model = MODELS[which]
    torch.manual_seed(6)
    batches = [model.batch() for _ in range(2)]
    with mcr.init() as comm:
        exam = partial(difference, lambda: model.make().double(), batches, loss=model.loss)
        return {
            name: exam(partial(named, name, ranks=comm.size)) for name in NAMED if name not in model.refused
        }


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("which", MODELS)
def test_named_plans_train_as_one_process(which: str, ranks: int) -> None:
    for result in run_ranks(trained, ranks, args=[which]):
        assert {key: value for key, value in result.value.items() if not value < CLOSE} == {}
        assert len(result.value) == len(NAMED) - len(MODELS[which].refused)
