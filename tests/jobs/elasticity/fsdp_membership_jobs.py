"""Sharded models whose job loses ranks, for tests/jobs/elasticity/test_fsdp_state.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import meet
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mcr_plus as mcr


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x)
    return (y - x[:, :3]).square().mean()


def trained_alone(steps: Sequence[Sequence[int]]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The oracle: one process that trains with the data of these ranks, by step."""
    model = built()
    optimizer = optimizer_of(model)
    for step, ranks in enumerate(steps):
        optimizer.zero_grad()
        sum(loss(model, data(rank, step)) / len(ranks) for rank in ranks).backward()  # type: ignore[union-attr]
        optimizer.step()
    return model, optimizer


def _sharded(model: nn.Module, mesh: Any) -> nn.Module:
    layers: list[Any] = [layer for layer in model.children() if isinstance(layer, nn.Linear)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    layers[0].set_modules_to_forward_prefetch(layers[1:])
    return mcr.fsdp(model)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Sequence[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, data(rank, step)).backward()
        optimizer.step()


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except mcr.McrError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _die(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _plain(state: dict[str, Any]) -> dict[str, list[float]]:
    """Tensors of the model, and of the optimizer's state, flat."""
    found = {name: value.double().flatten().tolist() for name, value in state["model"].items()}
    for name, entries in state["optimizer"]["state"].items():
        found |= {f"{name} {key}": value.double().flatten().tolist() for key, value in entries.items()}
    return found


def lost(victims: list[int], shape: list[int], where: str) -> dict[str, Any]:
    """Ranks die in step 3 (`where`: before it, or within the backward pass); the others go on if they can."""
    torch.set_num_threads(1)
    dist.init_process_group("mcr", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    names = ("replicas", "shards")[-len(shape) :]
    model = _sharded(built(), init_device_mesh("cpu", tuple(shape), mesh_dim_names=names))
    optimizer = optimizer_of(model)
    _train(model, optimizer, rank, range(3))
    meet("three steps", 4)
    if rank in victims:
        if where == "before":
            _die(None)
        middle = list(model.children())[1]
        middle.register_forward_hook(lambda *seen: seen[-1].register_hook(_die) and None)
    seen = _error(lambda: _train(model, optimizer, rank, [3])).partition(":")[0]
    mcr.shrink_group(victims)
    result: dict[str, Any] = {"seen": seen, "old": _error(lambda: model(data(rank, 3)))}
    state: dict[str, Any] | None = None
    try:
        state = mcr.fsdp_state(model, optimizer, step=3)
    except mcr.BackendError as error:
        result["error"] = str(error)
    if state is not None:
        result["state"], result["step"] = _plain(state), state["step"]
        if victims == [1]:  # what rank 2 has is on rank 0, too
            # Rank 2 alone claims to be one step ahead, so that nothing of its state can be used.
            result["ahead"] = mcr.fsdp_state(model, optimizer, step=4 if rank == 2 else 3)["step"]
            newcomer = mcr.fsdp_state(None if rank == 2 else model, None if rank == 2 else optimizer, step=3)
            result["newcomer"] = _plain(newcomer) == result["state"]
        result["wrong"] = _error(lambda: mcr.fsdp_state(model, optimizer, step=3 if dist.get_rank() else -1))
    model = _sharded(built(), init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optimizer_of(model)
    if state is not None:
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, state["model"], options=options)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    _train(model, optimizer, rank, [3, 4] if state is not None else [0])
    result["later"] = _plain(mcr.fsdp_state(model, optimizer))
    dist.destroy_process_group()
    return result


def check_like(
    found: dict[str, list[float]], model: nn.Module, optimizer: torch.optim.Optimizer, tolerances: list[float]
) -> None:
    """Assert that a state is the parameters and moments of a model of one process.

    `tolerances`: relative, absolute.
    """
    expected = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            expected[f"{name} {key}"] = torch.as_tensor(value).flatten().tolist()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, tolerances[0], tolerances[1]), name
