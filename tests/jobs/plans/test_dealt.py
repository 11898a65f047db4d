"""Experts and tables dealt to ranks, beside one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from criteo import DENSE, SPARSE
from experts import ExpertShape
from model import ModelConfig
from plan_exam import difference, profile_of
from plan_models import ExpertChain, TablesChain
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional

import mcr_plus as mcr
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.named import hybrid, named
from mcr_plus.plans.run import parallelize

CLOSE = 1e-9
SHAPE = ExpertShape(layers=3, hidden=12, heads=4, sequence=9, experts=12, top_k=2, balance=0.3)
CONFIG = ModelConfig(embedding_dim=4, table_rows=11, bottom=(8, 6), top=(9,))


def chain() -> nn.Module:
    return ExpertChain(SHAPE, 0).double()


def windows(number: int) -> list[Tensor]:
    torch.manual_seed(4)
    return [torch.randint(256, (number, SHAPE.sequence + 1)) for _ in range(2)]


def recommender() -> nn.Module:
    return TablesChain(CONFIG).double()


def clicks(number: int) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    torch.manual_seed(5)
    return [
        (
            (torch.randn(number, DENSE).double(), torch.randint(CONFIG.table_rows, (number, SPARSE))),
            torch.randint(2, (number,)).double(),
        )
        for _ in range(3)
    ]


def recomputed(profile: Profile, ranks: int) -> ModelPlan:
    plan = named("expert_parallel", profile, ranks)
    plan.recompute(range(1, 3))
    return plan


def trained() -> dict[str, float]:
    found = {}
    with mcr.init() as comm:
        ranks = comm.size
        exam = partial(difference, chain, windows(7))
        found["experts"] = exam(partial(named, "expert_parallel", ranks=ranks))
        found["experts, recomputed"] = exam(partial(recomputed, ranks=ranks))
        if ranks != 3:
            found["experts and heads"] = exam(partial(named, "tensor_parallel", ranks=ranks))
        if ranks == 4:
            found["experts, stages"] = exam(partial(hybrid, ranks=ranks, tensor=2, stages=2))
        loss = functional.binary_cross_entropy_with_logits
        exam = partial(difference, recommender, clicks(9), loss=loss)
        found["tables"] = exam(partial(named, "tables_parallel", ranks=ranks))
        if ranks == 4:
            found["tables x data"] = exam(partial(named, "tables_parallel", ranks=ranks, data=2))
        found["tables, micro-batches"] = exam(partial(named, "tables_parallel", ranks=ranks, micro_batches=2))
    return found


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_dealt_parts_train_as_one_process(ranks: int) -> None:
    for result in run_ranks(trained, ranks):
        assert {key: value for key, value in result.value.items() if not value < CLOSE} == {}
        assert len(result.value) == {2: 5, 3: 4, 4: 7}[ranks]


class Untold(nn.Module):
    """Experts that cannot be dealt."""

    def __init__(self) -> None:
        super().__init__()
        self.mcr_axes = {"batch": "split", "experts": (2, "exchange")}
        self.gate, self.own = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        answers: Tensor = torch.stack([one(x) for one in self.own], dim=-1) @ weights.unsqueeze(-1)
        return answers


def refused() -> list[str]:
    said = []
    with mcr.init() as comm:
        model = nn.Sequential(nn.Linear(4, 4), Untold())
        batch = torch.ones(4, 4), torch.ones(4, 4, 1)
        loss = functional.mse_loss
        profile = profile_of(model, batch, loss)
        plan = ModelPlan(profile, comm.size)
        plan.cut(1, "experts", 2)
        plan.replicate([0, 2], 2)
        plan.assign(..., [0, 1])
        for each in (plan, named("expert_parallel", profile, comm.size)):
            with pytest.raises(Unsupported) as error:
                parallelize(model, torch.optim.SGD(model.parameters()), each, loss=loss)
            said.append(str(error.value))
        with pytest.raises(InvalidArgument) as wrong:
            named("tables_parallel", profile, comm.size)
        said.append(str(wrong.value))
        model = nn.Sequential(nn.Linear(4, 4), Untold())
        del model[1].mcr_axes  # then the profile does not say what no plan can run
        assert "experts" not in profile_of(model, batch, loss).blocks[1].axes
    return said


def test_what_cannot_be_dealt_is_refused() -> None:
    for result in run_ranks(refused, 2):
        assert result.value == [
            "1: cut along experts; expected it with data `outside`",
            "1: Untold has no method mcr_cut, which would deal its experts",
            "tables_parallel: no block has tables",
        ]
