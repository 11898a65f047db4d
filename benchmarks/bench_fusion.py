"""Many small all_reduces on two ranks: one by one, fused, in one call, and by torch.distributed's gloo.

    mcr-plus run -n 2 benchmarks/bench_fusion.py [--json FILE]

All candidates take turns within one run; ratios are between medians of the turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Json, Rounds, join_gloo, program, show, take_turns, write_json

import mcr_plus as mcr

COUNT, NUMEL = 1000, 1024
PIPELINE: list[dict[str, dict[str, Any]]] = [{"fuse": {}}, {"select": {}}, {"dispatch": {}}]


def candidates(comm: mcr.Communicator) -> dict[str, tuple[Callable[[], Any], int]]:
    """MAX keeps the values as they are."""
    tensors = [torch.ones(NUMEL) for _ in range(COUNT)]
    flat = torch.ones(COUNT * NUMEL)

    def one_by_one() -> None:
        for tensor in tensors:
            comm.all_reduce(tensor, mcr.MAX)

    def fused() -> None:
        for work in [comm.all_reduce(tensor, mcr.MAX, async_op=True) for tensor in tensors]:
            assert work is not None
            work.wait()

    def torch_gloo() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)

    return {
        "mpi, one by one": (one_by_one, 1),
        "mpi, fused": (fused, 1),
        "mpi, all_reduce_coalesced": (lambda: comm.all_reduce_coalesced(tensors, mcr.MAX), 1),
        "mpi, one tensor of that size": (lambda: comm.all_reduce(flat, mcr.MAX), 1),
        "torch gloo, one by one": (torch_gloo, 1),
    }


def measure(rounds: int) -> dict[str, float] | None:
    """Median microseconds by candidate, on rank 0."""
    comm = mcr.init({"version": 1, "backends": ["mpi"], "pipeline": PIPELINE})
    join_gloo(comm)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})  # this thread; gloo's own stay free
    results = {name: median(values) for name, values in take_turns(candidates(comm), rounds).items()}
    first = comm.rank == 0
    dist.destroy_process_group()
    mcr.finalize()
    return results if first else None


def goals(results: dict[str, float]) -> list[tuple[str, str, str]]:
    """(what, goal, measured)."""
    gloo, single = results["torch gloo, one by one"], results["mpi, one by one"]
    return [
        (what, goal, f"{ours / results[name]:.1f}")
        for name in ("mpi, fused", "mpi, all_reduce_coalesced")
        for what, goal, ours in (
            (f"torch gloo / {name}", "≥ 20", gloo),
            (f"mpi, one by one / {name}", "≥ 3", single),
        )
    ]


@program
def main(rounds: Rounds = 25, figures: Json = None) -> None:
    torch.set_num_threads(1)
    if (results := measure(rounds)) is None:
        return
    rows = [[name, f"{value / 1e3:.2f}"] for name, value in results.items()]
    show(["way", "median ms"], rows, f"{COUNT:,} all_reduces of {4 * NUMEL:,} bytes")
    show(["goal", "wanted", "measured"], goals(results))
    write_json(results, figures)


if __name__ == "__main__":
    main()
