"""DDP with ranks that differ: the backward pass raises, and the process lives."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from clients.job import loss_of, main, network
from torch.nn.parallel import DistributedDataParallel

import mcr_plus as mcr


def mismatched(static_graph: bool) -> list[float]:
    """Rank 1 reduces a different tensor. Returns whether this rank got the error."""
    group = dist.new_group()
    model = DistributedDataParallel(network(), process_group=group, static_graph=static_graph)
    loss = loss_of(model, 0)
    try:
        if dist.get_rank() == 0:
            loss.backward()
        else:
            dist.all_reduce(torch.ones(7), group=group)
    except mcr.McrError:
        return [1.0]
    return [0.0]


if __name__ == "__main__":
    main({"dynamic": partial(mismatched, False), "static": partial(mismatched, True)})
