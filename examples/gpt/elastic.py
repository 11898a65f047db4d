"""Trains the transformer on ranks that may be lost and come back, on the same text in any case."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from corpus import Corpus
from transformer import LanguageModel, Shape

import mcr_plus as mcr

_EVERY = 10  # steps between two lines of progress
_BATCHES = 8  # of the held-out text


def train(shape: Shape, corpus: Corpus, config: Path, batch: int, steps: int, lr: float, seed: int) -> float:
    """Train data parallel in an elastic loop; returns the loss on held-out text.

    The text of a step is cut into as many streams as the job was started with ranks, each of `batch` windows.
    The ranks that there are share them, so that losses do not depend on the number of ranks.
    """
    mcr.init(str(config))
    streams = int(os.environ.get("WORLD_SIZE", "1"))
    model = LanguageModel(shape, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    mcr.wrap(model, optimizer)
    began = time.perf_counter()
    for step in mcr.elastic(model, optimizer, steps=steps):
        with step:
            rank, ranks = mcr.get_rank(), mcr.get_world_size()
            own = range(rank, streams, ranks)
            windows = torch.cat([corpus.windows(step.number, stream, batch) for stream in own])
            optimizer.zero_grad()
            loss = model(windows).text
            # The mean over ranks of these is the mean over streams, however many each rank has.
            (loss * (len(own) * ranks / streams)).backward()
            optimizer.step()
            if rank == 0 and step.number % _EVERY == _EVERY - 1:
                print(
                    f"step {step.number + 1:4}  {ranks} ranks  loss {loss.item():.4f}  "
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
    mcr.finalize()
    return loss.item()
