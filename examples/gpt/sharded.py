"""Trains the transformer with FSDP2: its matrices by Muon, whole on one rank each, or all of it by AdamW."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from corpus import Corpus
from torch.distributed.fsdp import fully_shard
from transformer import LanguageModel, Shape

import mcr_plus as mcr

_EVERY = 10  # steps between two lines of progress
_BATCHES = 8  # of the held-out text
_TIMES_LR = 10  # rate of Muon over that of AdamW: its updates are orthogonal matrices


def train(
    shape: Shape, corpus: Corpus, config: Path, batch: int, steps: int, lr: float, seed: int, muon: bool
) -> float:
    """Train the model, sharded over all ranks; returns the loss on held-out text."""
    torch.set_num_threads(1)
    dist.init_process_group("mcr", pg_options=str(config))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = LanguageModel(shape, seed)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizers: list[torch.optim.Optimizer] = []
    rest: Any = model.parameters()
    owned = None
    if muon:
        owned = mcr.owned(model)
        optimizers.append(owned.optimizer(torch.optim.Muon, lr=_TIMES_LR * lr))
        rest = owned.others
        if rank == 0:
            print(owned, file=sys.stderr)
    optimizers.append(torch.optim.AdamW(rest, lr=lr, fused=True))
    mcr.fsdp(model, owned=owned)
    began = time.perf_counter()
    for step in range(steps):
        loss = model(corpus.windows(step, rank, batch)).text
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % _EVERY == _EVERY - 1:
            mean = loss.detach()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if rank == 0:
                print(
                    f"step {step + 1:4}  loss {mean.item():.4f}  {time.perf_counter() - began:6.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
    with torch.no_grad():
        losses = [model(windows).text for windows in corpus.held_out(rank, ranks, batch, _BATCHES)]
    held_out = torch.stack(losses).mean()
    dist.all_reduce(held_out, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"held-out loss {held_out.item():.4f} nats per byte", flush=True)
    dist.destroy_process_group()
    return held_out.item()
