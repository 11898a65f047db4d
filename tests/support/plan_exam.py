"""Training under a plan beside one process that has the whole model: losses and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mcr_plus as mcr
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.checkpoint import state_dict
from mcr_plus.plans.language import ModelPlan
from mcr_plus.plans.run import ParallelModel, parallelize

Loss = Callable[..., Tensor] | None


def profile_of(
    model: nn.Module, batch: Any, loss: Loss, optimizer: torch.optim.Optimizer | None = None
) -> Profile:
    """Return the profile that rank 0 has measured."""
    found = mcr.profile(model, batch, optimizer=optimizer, loss=loss, repeats=1)
    return Profile.model_validate_json(mcr.broadcast_object(found.model_dump_json(), 0))


def difference(
    make: Callable[[], nn.Module], batches: Sequence[Any], plan_of: Callable[[Profile], ModelPlan],
    loss: Loss = None, whole_loss: Callable[[nn.Module, Any], Tensor] | None = None,
) -> float:  # fmt: skip
    """Return the largest difference of losses, gradients and norms, relative to the largest, and of the rest.

    Parameters and the optimizer's state are those of the plan's checkpoint.
    """
    torch.set_num_threads(1)
    alone, model = make(), make()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.5) for each in (alone, model)]
    plan = plan_of(profile_of(alone, batches[0], loss))
    parallel = parallelize(model, optimizers[1], plan, loss=loss)
    worst = 0.0
    for batch in batches:
        optimizers[0].zero_grad()
        expected = whole_loss(alone, batch) if whole_loss else _loss(alone, batch, loss)
        expected.backward()
        worst = max(worst, abs(parallel.step(batch).item() - expected.item()) / abs(expected.item()))
        worst = max(worst, *_of_gradients(alone, parallel))
        norm = nn.utils.clip_grad_norm_(alone.parameters(), torch.inf).item()
        worst = max(worst, abs(parallel.clip_grad_norm_(torch.inf).item() - norm) / norm)
        for optimizer in optimizers:
            optimizer.step()
    state = parallel.optimizer_state_dict()
    for name, own in state.get("state", {}).items():
        expected = optimizers[0].state[alone.get_parameter(name)]["momentum_buffer"]
        worst = max(worst, float((own["momentum_buffer"] - expected).abs().max()))
    assert len(state.get("state", ())) == (len(optimizers[0].state) if parallel.rank == 0 else 0)
    whole, found = alone.state_dict(), state_dict(parallel)
    assert found.keys() == (whole.keys() if parallel.rank == 0 else set())
    return max(worst, *(float((found[name] - whole[name]).abs().max()) for name in found), 0.0)


def _loss(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    given, *target = batch if isinstance(batch, tuple | list) and loss is not None else (batch,)
    inputs = given if isinstance(given, tuple | list) else (given,)
    output: Tensor = model(*inputs)
    return output if loss is None else loss(output, *target)


def _of_gradients(alone: nn.Module, parallel: ParallelModel) -> list[float]:
    """Return the relative difference of each gradient of this rank."""
    whole = dict(alone.named_parameters())
    found = []
    sharded = {id(param) for each in parallel.buckets if each.held != "whole" for param in each.params}
    for name, param in parallel.module.named_parameters():
        if param.is_meta or id(param) in sharded:
            continue
        expected = whole[name.replace(".inner", "")].grad if name.replace(".inner", "") in whole else None
        if expected is None:  # the bias that is added to a sum
            continue
        if cut := getattr(param, "mcr_cut", None):
            _, how, own, count = cut
            expected = expected if how is None else how.take(expected, own, count)
        assert param.grad is not None, name
        found.append(float((param.grad - expected).abs().max() / max(expected.abs().max(), 1e-6)))
    return found or [0.0]  # a rank may have the loss alone
