"""DistributedDataParallel as programs use it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from clients.job import STEPS, WIDTH, Client, loss_of, main, network, train
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


class Experts(nn.Module):
    """Each rank uses another one of three branches; no rank uses the last."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        branch: Tensor = self.branches[dist.get_rank()](inputs)
        return branch


class Twice(nn.Module):
    """One layer is used twice, one is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(self.layer(inputs).relu())
        return outputs


def wrapped(make: Callable[[], nn.Module] = network, **options: Any) -> list[float]:
    return train(DistributedDataParallel(make(), **options))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def hooked(hook: Callable[..., Any], state: Callable[[], object] = lambda: None) -> list[float]:
    """Train with one bucket: with several, PowerSGD over gloo reduces in different orders and hangs."""
    model = DistributedDataParallel(network())
    model.register_comm_hook(state(), hook)
    return train(model)


def power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )


def accumulated() -> list[float]:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2 * STEPS):
        ends = step % 2 == 1
        with nullcontext() if ends else model.no_sync():
            loss = loss_of(model, step)
            loss.backward()
        if ends:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def uneven(**options: bool) -> list[float]:
    """Rank 1 has fewer batches than rank 0, which continues alone."""
    model = DistributedDataParallel(network())
    with model.join(**options):
        losses = train(model, steps=STEPS - 2 * dist.get_rank())
    return [*losses, *(parameter.sum().item() for parameter in model.parameters())]


def zero() -> list[float]:
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    losses = train(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        states = optimizer.state_dict()["state"]
        losses += [states[name]["exp_avg"].sum().item() for name in sorted(states)]
    return losses


CLIENTS: Final[dict[str, Client]] = {
    "plain": wrapped,
    "unused": partial(wrapped, Experts, find_unused_parameters=True),
    "static": partial(wrapped, Twice, static_graph=True),
    "buffers": partial(wrapped, normed),
    "views": partial(wrapped, gradient_as_bucket_view=True, bucket_cap_mb=0.001),
    "allreduce_hook": partial(hooked, default_hooks.allreduce_hook),
    "fp16_hook": partial(hooked, default_hooks.fp16_compress_hook),
    "fp16_wrapper": partial(
        hooked, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), power_sgd
    ),
    "powersgd_hook": partial(hooked, powerSGD_hook.powerSGD_hook, power_sgd),
    "no_sync": accumulated,
    "join": uneven,
    "join_counted": partial(uneven, divide_by_initial_world_size=False),
    "zero": zero,
}

if __name__ == "__main__":
    main(CLIENTS)
