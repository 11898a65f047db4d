"""Slices of sequences in a pipeline, beside one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from plan_exam import difference, profile_of
from ranks import run_ranks
from torch import Tensor, nn
from transformer import LanguageModel, Losses, Shape

import mcr_plus as mcr
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.named import mesh, named
from mcr_plus.plans.run import parallelize

CLOSE = 1e-9
LENGTH = 13


def text(losses: Losses) -> Tensor:
    return losses.text


def language_model() -> nn.Module:
    model = LanguageModel(Shape(layers=3, hidden=16, heads=4, sequence=LENGTH), 0)
    model.bytes.weight.mcr_shared = True  # type: ignore[attr-defined]
    return model.double()


def windows() -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randint(256, (5, LENGTH + 1)) for _ in range(2)]


def with_more(profile: Profile, ranks: int) -> ModelPlan:
    """Slices of a model whose heads are cut, on stages with recomputation if there are several."""
    plan, _, at = mesh(
        profile, ranks, tensor=2, stages=ranks // 2, micro_batches=2, slices=[6, 4, 3], name="mesh"
    )
    plan.recompute(range(1, 3))
    assert at.size == ranks
    return plan


def trained() -> dict[str, float]:
    found = {}
    with mcr.init() as comm:
        ranks = comm.size
        exam = partial(difference, language_model, windows(), loss=text, whole_loss=lambda m, b: text(m(b)))
        for slices in (3, [7, 4, 2]):
            found[f"terapipe {slices}"] = exam(partial(named, "terapipe", ranks=ranks, slices=slices))
        found["micro-batches"] = exam(partial(named, "terapipe", ranks=ranks, slices=2, micro_batches=3))
        if ranks != 3:
            found["heads, recomputed"] = exam(partial(with_more, ranks=ranks))
    return found


@pytest.mark.long  # two ranks: test_parallelize.py has terapipe, too
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_slices_train_as_one_process(ranks: int) -> None:
    for result in run_ranks(trained, ranks):
        assert {key: value for key, value in result.value.items() if not value < CLOSE} == {}
        assert len(result.value) == 4 - (ranks == 3)


def refused() -> list[str]:
    said = []
    with mcr.init() as comm:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 1))
        loss: Any = nn.MSELoss()
        loss.mcr_axes = {"batch": "split", "sequence": "split"}
        profile = profile_of(model, (torch.ones(4, 6, 4), torch.zeros(4, 6, 1)), loss)
        for lengths in ([3, 2], [6, 0]):
            with pytest.raises(InvalidArgument) as wrong:
                ModelPlan(profile, comm.size, slices=lengths)
            said.append(str(wrong.value))
        plan = named("terapipe", profile, comm.size, slices=3)
        for _ in range(2):
            with pytest.raises(Unsupported) as error:
                parallelize(model, torch.optim.SGD(model.parameters()), plan, loss=loss)
            said.append(str(error.value).partition(";")[0])
            model.mcr_slice = lambda batch, begin, end: batch[:, begin:end]  # type: ignore[assignment]
    return said


def test_models_without_slices_are_refused() -> None:
    first, *_ = run_ranks(refused, 2)
    assert first.value[:3] == [
        "slices: [3, 2]; expected lengths that add up to 6",
        "slices: 0; expected a number from 1",
        "model: slices need its method mcr_slice(batch, begin, end), a slice of a batch",
    ]
    assert first.value[3].startswith("1: slices of its sequence need a module with forward_slice(x, past)")
