"""Training on several hosts, with one rank that sleeps in its backward pass, another one in each recording.

    python late_on_hosts.py FOLDER MEMBERS    as a rank, with the variables of a launcher

`MEMBERS`: the ranks that train, as `0,2`. Every rank writes what it has found to FOLDER/found.RANK.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import mcr_plus as mcr

DELAY_S = 0.08
STEPS = 10


def main(folder: str, members: list[int]) -> None:
    """Runs on ranks."""
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    with mcr.init({"version": 1, "backends": ["gloo"]}) as comm:
        group = mcr.new_group(members)
        if comm.rank in members:
            found = [recorded(group, victim, comm.rank) for victim in (None, *members)]
        comm.barrier()
        Path(folder, f"found.{comm.rank}").write_text(json.dumps(found))


def recorded(group: mcr.Communicator, victim: int | None, rank: int) -> dict[str, Any]:
    """What `log.stragglers()` says of some steps in which `victim` is late; `rank` is this one."""
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model: Any = torch.nn.Sequential(*layers)
    seconds = 0.0
    layers[2].register_full_backward_hook(lambda *_: time.sleep(seconds))

    def step() -> None:
        model.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        gradients = torch.cat([each.grad.flatten() for each in model.parameters()])
        group.all_reduce(gradients, mcr.AVG, tag="gradients")

    step()
    seconds = DELAY_S if rank == victim else 0.0
    group.barrier()
    with mcr.record() as log:
        for _ in range(STEPS):
            step()
    stragglers = log.stragglers()
    return {
        "victim": victim,
        "named": [each.rank for each in stragglers],
        "mean": [each.sites[0].mean for each in stragglers],
        "tags": [each.sites[0].tag for each in stragglers],
        "sites": [each.sites[0].site for each in stragglers],
        "compared": stragglers.compared,
        "left_out": stragglers.left_out,
        "error": stragglers.error,
        "text": str(stragglers),
    }


if __name__ == "__main__":
    main(sys.argv[1], [int(rank) for rank in sys.argv[2].split(",")])
