"""Many small all_reduces on two ranks: one by one, fused, in one call, and by torch.distributed's gloo.

    mcr-plus run -n 2 benchmarks/bench_fusion.py [--json FILE]

All ways take turns within one run; ratios are between medians of the turns.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_overhead import median, take_turns
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

import mcr_plus as mcr
from mcr_plus import runtime
from mcr_plus.c10d import PrefixStore

COUNT, NUMEL = 1000, 1024
PIPELINE: list[dict[str, dict[str, Any]]] = [{"fuse": {}}, {"select": {}}, {"dispatch": {}}]


def ways(comm: mcr.Communicator) -> dict[str, tuple[Callable[[], Any], int]]:
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


def measure(rounds: int) -> dict[str, float]:
    comm = mcr.init({"version": 1, "backends": ["mpi"], "pipeline": PIPELINE})
    store = runtime.current().world.store
    assert store is not None
    dist.init_process_group("gloo", store=PrefixStore("bench", store), rank=comm.rank, world_size=comm.size)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})  # this thread; gloo's own stay free
    results = {name: median(values) for name, values in take_turns(ways(comm), rounds).items()}
    dist.destroy_process_group()
    mcr.finalize()
    return results


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(options.rounds)
    if MPI.COMM_WORLD.rank != 0:
        return
    console = Console()
    table = Table(f"{COUNT:,} all_reduces of {4 * NUMEL:,} bytes", "median ms")
    for name, value in results.items():
        table.add_row(name, f"{value / 1e3:.2f}")
    console.print(table)
    table = Table("goal", "wanted", "measured")
    for row in goals(results):
        table.add_row(*row)
    console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
