"""Schedules of torch.distributed.pipelining: stages of a model on ranks, and micro-batches between them."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from clients.job import STEPS, WIDTH, Client, main
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.nn import functional

MICRO_BATCHES: Final = 4


def block(number: int) -> nn.Module:
    """Return a stage of the model."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of all ranks: the first stage reads its inputs, the last stage its targets."""
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(4 * MICRO_BATCHES, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def pipelined(kind: type[Any], stages: list[tuple[int, ...]]) -> list[float]:
    """Return the losses of the last stage and the sums of parameters. `stages`: their numbers, by rank."""
    mine, total = stages[dist.get_rank()], sum(map(len, stages))
    parts = nn.ModuleList(block(number) for number in mine)
    device = torch.device("cpu")
    made = [
        pipelining.PipelineStage(part, number, total, device)
        for part, number in zip(parts, mine, strict=True)
    ]
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(made[0] if single else made, MICRO_BATCHES, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1, momentum=0.9)
    found: list[float] = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        losses: list[Tensor] = []
        last = total - 1 in mine
        schedule.step(
            *((inputs,) if 0 in mine else ()), **({"target": targets, "losses": losses} if last else {})
        )
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item() for loss in losses]
    return [*found, *(each.square().sum().item() for each in parts.parameters())]


def _over(kind: type[Any], each: int, *, v: bool = False) -> Client:
    """Return a schedule with `each` stages on each of two ranks, in turns or in the shape of a V."""
    turns = [list(range(2)) if number % 2 == 0 or not v else [1, 0] for number in range(each)]
    order = [rank for turn in turns for rank in turn]
    stages = [tuple(stage for stage, owner in enumerate(order) if owner == rank) for rank in range(2)]
    return partial(pipelined, kind, stages)


CLIENTS: Final[dict[str, Client]] = {
    "gpipe": _over(schedules.ScheduleGPipe, 1),
    "1f1b": _over(schedules.Schedule1F1B, 1),
    "interleaved": _over(schedules.ScheduleInterleaved1F1B, 2),
    "looped_bfs": _over(schedules.ScheduleLoopedBFS, 2),
    "zero_bubble": _over(schedules.ScheduleInterleavedZeroBubble, 2),
    "zbv": _over(schedules.ScheduleZBVZeroBubble, 2, v=True),
}

if __name__ == "__main__":
    main(CLIENTS)
