"""Program of mcr_plus, for `bench_simulate.py`: steps of a plan of two stages, a redistribution, and experts.

mcr-plus simulate -n 1024 --topology cluster.yaml --no-memory benchmarks/planned_steps.py
"""

from __future__ import annotations

import torch

import mcr_plus as mcr
from mcr_plus import expert
from mcr_plus.plans.named import hybrid


def main() -> None:
    comm = mcr.init()
    rank, size = comm.rank, comm.size
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
    optimizer = torch.optim.Adam(model.parameters())
    batch, loss = (torch.ones(size, 16), torch.zeros(size, 16)), torch.nn.functional.mse_loss
    profile = mcr.profile(model, batch, optimizer=optimizer, loss=loss, repeats=1)
    plan = hybrid(profile, size, data=size // 2, stages=2, micro_batches=2)
    parallel = mcr.parallelize(model, optimizer, plan, loss=loss)
    rows = mcr.Layout.sharded((size, 3), range(size), 0)
    whole = mcr.Layout.replicated((size, 3), range(size))
    for step in range(20):
        parallel.step(batch)
        mcr.redistribute(torch.ones(1, 3), rows, whole)
        random = torch.Generator().manual_seed(size * step + rank)
        routed = expert.dispatch(
            torch.ones(24, 4), torch.randint(2 * size, (24, 2), generator=random), experts=2 * size
        )
        expert.combine(routed.rows, routed)
        optimizer.step()


if __name__ == "__main__":
    main()
