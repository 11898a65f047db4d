"""Trains the transformer on ranks that may be lost and come back, on the same text in any case."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from corpus import Corpus
from transformer import LanguageModel, Shape

import mcr_plus as mcr

_EVERY = 10  # steps between two lines of progress
_BATCHES = 8  # of the held-out text


def train(
    shape: Shape,
    corpus: Corpus,
    config: Path,
    batch: int,
    steps: int,
    lr: float,
    seed: int,
    micro_batches: int | None = None,
) -> float:
    """Train data parallel in an elastic loop; returns the loss on held-out text.

    The text of a step is cut into as many streams as the job was started with ranks, each of `batch` windows.
    The ranks that there are share them, so that losses do not depend on the number of ranks. With
    `micro_batches` there are so many streams, each a backward pass of its own, and gradients are added up
    exactly: then nothing at all depends on the ranks.
    """
    mcr.init(str(config))
    streams = micro_batches or int(os.environ.get("WORLD_SIZE", "1"))
    if streams < mcr.get_world_size():
        raise mcr.InvalidArgument(
            f"--micro-batches: expected at least one for each of {mcr.get_world_size()} ranks, got {streams}"
        )
    if micro_batches:
        torch.set_num_threads(1)  # the same additions in every product of matrices
    model = LanguageModel(shape, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    mcr.wrap(model, optimizer, accumulate="exact" if micro_batches else "fast")
    began = time.perf_counter()
    for step in mcr.elastic(model, optimizer, steps=steps):
        with step:
            rank, ranks = mcr.get_rank(), mcr.get_world_size()
            own = range(rank, streams, ranks)
            windows = [corpus.windows(step.number, stream, batch) for stream in own]
            total = torch.zeros(1, dtype=torch.float64)  # of the losses of these streams
            optimizer.zero_grad()
            if micro_batches:
                for each in windows:
                    with nullcontext() if each is windows[-1] else mcr.no_sync(model):
                        loss = model(each).text
                        loss.backward()
                    total += loss.item()
            else:
                loss = model(torch.cat(windows)).text
                total += loss.item() * len(own)
                # The mean over ranks of these is the mean over streams, however many each rank has.
                (loss * (len(own) * ranks / streams)).backward()
            optimizer.step()
            if step.number % _EVERY == _EVERY - 1:
                mcr.all_reduce(total, sums="exact")
                if rank == 0:
                    print(
                        f"step {step.number + 1:4}  {ranks} ranks  loss {total.item() / streams:.4f}  "
                        f"{time.perf_counter() - began:6.1f} s",
                        file=sys.stderr,
                        flush=True,
                    )
    loss = torch.zeros(1, dtype=torch.float64)
    with torch.no_grad():
        for stream in range(mcr.get_rank(), streams, mcr.get_world_size()):
            losses = [model(windows).text for windows in corpus.held_out(stream, streams, batch, _BATCHES)]
            loss += sum(each.item() for each in losses) / (len(losses) * streams)
    mcr.all_reduce(loss)
    if mcr.get_rank() == 0:
        print(f"held-out loss {loss.item():.4f} nats per byte", flush=True)
        bits = hashlib.sha256()
        for param in model.parameters():
            bits.update(param.detach().numpy().data)
        print(f"sha256 of the parameters {bits.hexdigest()[:16]}", flush=True)
    mcr.finalize()
    return loss.item()
