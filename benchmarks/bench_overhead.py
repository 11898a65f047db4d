"""What the pipeline adds to a library call: a tiny all_reduce on two ranks.

    mcr-plus run -n 2 benchmarks/bench_overhead.py [--json FILE]

All candidates take turns within one run, so that noise meets them alike; ratios are between medians of the
turns. Candidates: raw mpi4py with prepared buffers, `mcr.persistent`, `mcr.all_reduce`, and
torch.distributed's gloo; then the same plain call beside four thousand known signatures and beside ten
thousand operations in flight, while recording and afterwards, the cost of a signature seen for the first
time, and `check: every`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

import mcr_plus as mcr
from mcr_plus.c10d import TCPStore

Turns = Mapping[str, list[float]]

ROUNDS = 25
CALLS = 2000
SLOW_CALLS = 50
MANY = 10_000
SIGNATURES = 4_000  # a group forgets those it knows after 4,096


def take_turns(
    candidates: Mapping[str, tuple[Callable[[], Any], int]], rounds: int
) -> dict[str, list[float]]:
    """Microseconds per call of each candidate, one entry per round; ranks start each turn together.

    Every round has another order, since who follows whom matters.
    """
    turns: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name in Random(number).sample(sorted(candidates), len(candidates)):
            call, calls = candidates[name]
            for _ in range(max(3, calls // 50)):
                call()
            MPI.COMM_WORLD.Barrier()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            turns[name].append((time.perf_counter() - began) / calls * 1e6)
    return turns


def median(values: list[float]) -> float:
    return float(np.median(values))


def candidates(comm: mcr.Communicator) -> dict[str, tuple[Callable[[], Any], int]]:
    """An 8-byte all_reduce, in place, by each way; MAX keeps the values as they are."""
    array = np.ones(2, np.float32)
    prepared = [array, 2, MPI.FLOAT]
    raw = MPI.COMM_WORLD.Dup()
    tensor = torch.ones(2)
    theirs = torch.ones(2)
    persistent = mcr.persistent("all_reduce", torch.ones(2), op=mcr.MAX)
    return {
        "raw mpi4py": (lambda: raw.Allreduce(MPI.IN_PLACE, prepared, MPI.MAX), CALLS),
        "mcr.persistent": (persistent, CALLS),
        "mcr.all_reduce": (lambda: mcr.all_reduce(tensor, mcr.MAX), CALLS),
        "comm.all_reduce": (lambda: comm.all_reduce(tensor, mcr.MAX), CALLS),
        "torch gloo": (lambda: dist.all_reduce(theirs, dist.ReduceOp.MAX), SLOW_CALLS),
    }


def first_calls(comm: mcr.Communicator, count: int) -> float:
    """Microseconds per call whose signature is new: binding, and comparing it with the other ranks."""
    tensor = torch.ones(2)
    MPI.COMM_WORLD.Barrier()
    began = time.perf_counter()
    for index in range(count):
        comm.all_reduce(tensor, mcr.MAX, tag=f"new{index}")
    return (time.perf_counter() - began) / count * 1e6


def beside_in_flight(comm: mcr.Communicator, count: int, rounds: int) -> dict[str, list[float]]:
    """The plain call, alone and while `count` operations of another group are in flight, in turns."""
    other = mcr.new_group(list(range(comm.size)))
    tensor, many = torch.ones(2), torch.ones(count, 2)
    call = {"alone": (lambda: comm.all_reduce(tensor, mcr.MAX), CALLS)}
    turns: dict[str, list[float]] = {"alone": [], "in flight": []}
    for _ in range(rounds):
        turns["alone"] += take_turns(call, 1)["alone"]
        works = [other.all_reduce(row, mcr.MAX, async_op=True) for row in many]
        turns["in flight"] += take_turns(call, 1)["alone"]
        for work in works:
            assert work is not None
            work.wait()
    return turns


def beside_recording(comm: mcr.Communicator, rounds: int) -> dict[str, list[float]]:
    """The plain call before, while and after its operations are recorded, in turns."""
    tensor = torch.ones(2)
    call = {"call": (lambda: comm.all_reduce(tensor, mcr.MAX), CALLS)}
    turns: dict[str, list[float]] = {"before": [], "while": [], "after": []}
    for _ in range(rounds):
        turns["before"] += take_turns(call, 1)["call"]
        with mcr.record():
            turns["while"] += take_turns(call, 1)["call"]
        turns["after"] += take_turns(call, 1)["call"]
    return turns


def measure(rounds: int) -> dict[str, float]:
    comm = mcr.init(
        {"version": 1, "backends": ["mpi", "gloo"], "pipeline": [{"select": {}}, {"dispatch": {}}]}
    )
    store = TCPStore("127.0.0.1", _free_port(comm), comm.size, comm.rank == 0)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    turns = take_turns(candidates(comm), rounds)
    results = {name: median(values) for name, values in turns.items()}
    for when, values in beside_recording(comm, rounds).items():
        results[f"{when} recording"] = median(values)
    before = median(take_turns({"plain": (candidates(comm)["comm.all_reduce"])}, rounds)["plain"])
    results["first call of a signature"] = first_calls(comm, SIGNATURES)
    results[f"beside {SIGNATURES} signatures, before"] = before
    after = take_turns({"plain": (candidates(comm)["comm.all_reduce"])}, rounds)["plain"]
    results[f"beside {SIGNATURES} signatures, after"] = median(after)
    flight = beside_in_flight(comm, MANY, 5)
    results[f"beside {MANY} in flight, alone"] = median(flight["alone"])
    results[f"beside {MANY} in flight, beside"] = median(flight["in flight"])
    dist.destroy_process_group()
    mcr.finalize()
    checked = mcr.init(
        {"version": 1, "backends": ["mpi"], "pipeline": [{"select": {}}, {"dispatch": {"check": "every"}}]}
    )
    tensor = torch.ones(2)
    every = take_turns({"every": (lambda: checked.all_reduce(tensor, mcr.MAX), CALLS)}, rounds)["every"]
    results["mcr.all_reduce, check: every"] = median(every)
    mcr.finalize()
    return results


def _free_port(comm: mcr.Communicator) -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    return int(comm.broadcast_object(port, 0))


def goals(results: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(what, goal, measured)."""
    raw = results["raw mpi4py"]
    gloo = results["torch gloo"]
    every = results["mcr.all_reduce, check: every"]
    return [
        ("persistent / raw", "≤ 1.2", f"{results['mcr.persistent'] / raw:.2f}"),
        ("plain − raw", "≤ 2 µs", f"{results['mcr.all_reduce'] - raw:.2f} µs"),
        ("torch gloo / plain", "≥ 50", f"{gloo / results['mcr.all_reduce']:.0f}"),
        ("check: every − plain", "≤ 30 µs", f"{every - results['mcr.all_reduce']:.1f} µs"),
    ]


def show(results: Mapping[str, float]) -> None:
    console = Console()
    table = Table("8-byte all_reduce, 2 ranks", "median µs")
    for name, value in results.items():
        table.add_row(name, f"{value:.2f}")
    console.print(table)
    table = Table("goal", "wanted", "measured")
    for row in goals(results):
        table.add_row(*row)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(options.rounds)
    if MPI.COMM_WORLD.rank == 0:
        show(results)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
