"""Train a transformer on rank 0, and write text with it on the others, which get what changed.

    mcr-plus run -n 2 examples/serve/sync.py
    mcr-plus run -n 3 examples/serve/sync.py --tune-lr 1e-5
    mcr-plus run -n 1 examples/serve/sync.py --invite policy.sync    for server.py, outside the job

Rank 0 trains in float32, and pushes a bfloat16 copy after each step. The first steps are ordinary training;
then the learning rate is that of fine tuning, and few values of the copy change.
"""

from __future__ import annotations

import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parent.parent / "common"))  # what the examples share

import command_line
import torch
import typer
from corpus import read_corpus
from serving import TEMPERATURE
from torch import nn
from transformer import LanguageModel, Shape

import mcr_plus as mcr

PROMPT = b"The value of "
Hidden = Annotated[int, typer.Option(min=8)]
Length = Annotated[int, typer.Option(min=1, help="bytes to write with each version")]
Seed = Annotated[int, typer.Option(min=0)]


def copy_of(model: nn.Module, policy: nn.Module) -> None:
    """Round the weights to the dtype of the policy."""
    with torch.no_grad():
        for target, source in zip(policy.parameters(), model.parameters(), strict=True):
            target.copy_(source)


@torch.no_grad()
def write(policy: LanguageModel, sequence: int, length: int, random: torch.Generator) -> str:
    """Continue the prompt."""
    text = list(PROMPT)
    for _ in range(length):
        logits = policy.predict(torch.tensor([text[-sequence:]]))[0, -1]
        chances = torch.softmax(logits.double() / TEMPERATURE, 0)
        text.append(int(torch.multinomial(chances, 1, generator=random)))
    return bytes(text).decode(errors="replace")


def report(who: str, version: int, waited: float, stats: dict[str, Any], text: str) -> None:
    """Print a version that a server has pulled, and what it has written with it."""
    print(
        f"{who}  version {version:3}  changed {stats['density']:7.2%}",
        f"{stats['bytes']:>10,} of {stats['dense_bytes']:,} bytes",
        f"waited {1e3 * waited:6.1f} ms, of which paused {1e3 * stats['pause_seconds']:.1f} ms",
        repr(text),
        sep="  ",
        flush=True,
    )


def main(
    steps: Annotated[int, typer.Option(min=1, help="of training, before those of tuning")] = 30,
    tune: Annotated[int, typer.Option(min=1, help="steps of tuning")] = 10,
    lr: Annotated[float, typer.Option(min=0.0)] = 5e-4,
    tune_lr: Annotated[float, typer.Option(min=0.0)] = 3e-6,
    hidden: Hidden = 256,
    length: Length = 40,
    seed: Seed = 0,
    invite: Annotated[Path | None, typer.Option(help="file for servers outside the job")] = None,
) -> None:
    """Train, serve, and print what travelled."""
    torch.set_num_threads(1)
    shape = Shape(hidden=hidden)
    with mcr.init() as comm:
        model = LanguageModel(shape, seed)
        policy = deepcopy(model).bfloat16()
        weights = mcr.sync(policy, src=0, tag="policy", invite=invite)
        if comm.rank == 0:
            corpus = read_corpus(None, shape.sequence, seed)
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
            for step in range(steps + tune):
                if step >= steps:
                    optimizer.param_groups[0]["lr"] = tune_lr
                optimizer.zero_grad()
                loss = model(corpus.windows(step, 0, 4)).text
                loss.backward()
                optimizer.step()
                copy_of(model, policy)
                weights.push(step + 1)
        else:
            random = torch.Generator().manual_seed(seed)
            version = 0
            while version < steps + tune:
                begin = time.perf_counter()
                version = weights.pull() or version
                waited, stats = time.perf_counter() - begin, weights.stats()
                text = write(policy, shape.sequence, length, random)
                report(f"rank {comm.rank}", version, waited, stats, text)
        weights.close()


if __name__ == "__main__":
    command_line.run(main)
