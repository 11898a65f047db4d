"""Functions that the client programs share: `torchrun --nproc-per-node 2 ddp.py BACKEND [CLIENT…]`.

A client trains something small, every rank with data of its own, and returns its losses. Each rank prints
one line of JSON per client: its losses, how many operations of each kind the pipeline saw, and when its
optimizers made their steps, in seconds. The folder above must be in PYTHONPATH.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

import mcr_plus as mcr

Client = Callable[[], "list[float]"]
WIDTH: Final = 16
STEPS: Final = int(os.environ.get("CLIENT_STEPS", "4"))
START_S: Final = 150.0  # DeepSpeed compiles something the first time
LIMIT_S: Final = 30.0  # a client that takes longer has hung: it prints its stacks and ends


def run(program: str, *words: str) -> None:
    """Be one rank of a program, as `python PROGRAM.py WORDS…` would be."""
    sys.argv[1:] = words
    runpy.run_module(f"clients.{program}", run_name="__main__")


def main(clients: Mapping[str, Client], start: Callable[[str], object] = dist.init_process_group) -> None:
    """Run the clients that the command line names, or all of them. `start` joins the ranks."""
    backend, *names = sys.argv[1:]
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(START_S, exit=True)
    start(backend)
    for name in names or clients:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        torch.manual_seed(0)
        with operations() as seen, steps() as ended:
            losses = clients[name]()
        line = {
            "client": name, "rank": dist.get_rank(), "losses": losses, "operations": seen, "ended": ended
        }  # fmt: skip
        sys.stdout.write(json.dumps(line) + "\n")  # in one piece: ranks share the stream
        sys.stdout.flush()
    faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def operations() -> Iterator[Counter[str]]:
    """Operations of each kind that the pipeline sees; none where it is not in use."""
    seen = Counter[str]()
    if not mcr.is_initialized():
        yield seen
        return
    with mcr.record() as log:
        yield seen
    seen.update(record.kind for record in log.records)


@contextmanager
def steps() -> Iterator[list[float]]:
    """Times at which optimizers of torch have made a step."""
    ended: list[float] = []
    hook = register_optimizer_step_post_hook(lambda *_: ended.append(time.monotonic()))
    try:
        yield ended
    finally:
        hook.remove()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets that are unique to a rank and a step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def network() -> nn.Sequential:
    """Return two layers with the same weights on every rank."""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def loss_of(model: Callable[..., Tensor], step: int) -> Tensor:
    """Return the mean squared error on this rank's batch."""
    inputs, targets = batch(step)
    return functional.mse_loss(model(inputs).float(), targets)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = STEPS
) -> list[float]:
    """Train in the usual way."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
