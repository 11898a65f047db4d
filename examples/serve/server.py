"""Write text with the weights of a training job, in a process of its own that comes and goes.

    mcr-plus run -n 1 examples/serve/sync.py --invite policy.sync
    python examples/serve/server.py policy.sync

It may start before the trainers, be killed, and start again; it ends when they do.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).parent.parent / "common"))  # what the examples share

import command_line
import torch
import typer
from sync import Hidden, Length, Seed, report, write
from transformer import LanguageModel, Shape

import mcr_plus as mcr


def main(
    invitation: Annotated[Path, typer.Argument(help="as sync.py --invite")],
    hidden: Hidden = 256,
    length: Length = 40,
    seed: Seed = 0,
    patience: Annotated[float, typer.Option(min=0.0, help="seconds to wait for the trainers")] = 600.0,
) -> None:
    """Serve until the trainers end."""
    torch.set_num_threads(1)
    shape, random = Shape(hidden=hidden), torch.Generator().manual_seed(seed)
    policy = LanguageModel(shape, seed).bfloat16()
    try:
        with mcr.join_sync(invitation, policy, timeout=patience) as weights:
            while True:
                begin = time.perf_counter()
                version = weights.pull() or 0
                waited = time.perf_counter() - begin
                text = write(policy, shape.sequence, length, random)
                report("server", version, waited, weights.stats(), text)
    except (mcr.SyncClosed, mcr.PeerLost) as error:  # the trainers have closed it, or died
        print(f"server  ends: {error}")
    except mcr.McrError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    command_line.run(main)
