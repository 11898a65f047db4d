"""What the pipeline adds to a library call: a tiny all_reduce on two ranks.

    mcr-plus run -n 2 benchmarks/bench_overhead.py [--json FILE]

All candidates take turns within one run, so that noise meets them alike; ratios are between medians of the
turns. Candidates: raw mpi4py with prepared buffers, `mcr.persistent`, `mcr.all_reduce`, and
torch.distributed's gloo; then other operations on 8 bytes per rank, each beside the same call of mpi4py; the
plain all_reduce beside four thousand known signatures and beside ten thousand operations in flight, while
recording and afterwards; what remembering operations for dumps costs; the cost of a signature seen for the
first time, and `check: every`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import Call, Json, Rounds, join_gloo, program, show, take_turns, write_json
from mpi4py import MPI

import mcr_plus as mcr

CALLS = 2000
SLOW_CALLS = 50
MANY = 10_000
SIGNATURES = 4_000  # a group forgets those it knows after 4,096


def candidates(comm: mcr.Communicator) -> dict[str, tuple[Call, int]]:
    """An 8-byte all_reduce, in place, by each candidate; MAX keeps the values as they are."""
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


def kinds(comm: mcr.Communicator) -> dict[str, tuple[Call, int]]:
    """Other operations, each by mpi4py with prepared buffers and by `mcr`."""
    raw, numel = MPI.COMM_WORLD.Dup(), 2 * comm.size
    one, other = np.ones(numel, np.float32), np.ones(numel, np.float32)
    part, whole, result = torch.ones(2), torch.ones(numel), torch.ones(numel)
    own, rest = [one[:2], 2, MPI.FLOAT], [other, 2, MPI.FLOAT]  # counts are of one rank's part
    calls: dict[str, Call] = {
        "broadcast, raw": lambda: raw.Bcast(own, 0),
        "broadcast": lambda: comm.broadcast(part, 0),
        "all_gather_into_tensor, raw": lambda: raw.Allgather(own, rest),
        "all_gather_into_tensor": lambda: comm.all_gather_into_tensor(whole, part),
        "reduce_scatter_tensor, raw": lambda: raw.Reduce_scatter_block(rest, own, MPI.MAX),
        "reduce_scatter_tensor": lambda: comm.reduce_scatter_tensor(part, whole, mcr.MAX),
        "all_to_all_single, raw": lambda: raw.Alltoall(rest, [one, 2, MPI.FLOAT]),
        "all_to_all_single": lambda: comm.all_to_all_single(result, whole),
        "barrier, raw": raw.Barrier,
        "barrier": comm.barrier,
    }
    return {name: (call, CALLS) for name, call in calls.items()}


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


def remembering(count: int) -> float:
    """Microseconds of what each operation does for dumps: the statement of `engine/operation.py`, alone."""
    remember, signature, clock = deque[object](maxlen=2000).append, ("all_reduce",), time.time_ns
    began = time.perf_counter()
    for sequence in range(count):
        remember((sequence, signature, clock()))
    spent = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(count):
        pass
    return (spent - (time.perf_counter() - began)) / count * 1e6


def by_default(rounds: int) -> dict[str, float]:
    """The same calls without a configuration, so over shared memory, and torch.distributed on `mcr`."""
    comm = mcr.init()
    dist.init_process_group("mcr")
    x = torch.ones(2)
    options: Any = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp.MAX, False
    group = dist.group.WORLD
    assert group is not None
    theirs = {
        "dist.all_reduce on mcr": (lambda: dist.all_reduce(x, dist.ReduceOp.MAX), CALLS),
        "the method of the group that it calls": (lambda: group.allreduce([x], options), CALLS),
    }
    ours = {name: call for name, call in candidates(comm).items() if name != "torch gloo"}
    turns = take_turns({**ours, **theirs, **kinds(comm)}, rounds)
    dist.destroy_process_group()
    mcr.finalize()
    with mcr.init({"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"check": "every"}}]}):
        checked = {"mcr.all_reduce, check: every": (lambda: mcr.all_reduce(x, mcr.MAX), CALLS)}
        turns |= take_turns(checked, rounds)
    return {f"default, {name}": median(values) for name, values in turns.items()}


def measure(rounds: int) -> dict[str, float]:
    comm = mcr.init(
        {"version": 1, "backends": ["mpi", "gloo"], "pipeline": [{"select": {}}, {"dispatch": {}}]}
    )
    join_gloo(comm)
    turns = take_turns(candidates(comm), rounds)
    results = {name: median(values) for name, values in turns.items()}
    results |= {name: median(values) for name, values in take_turns(kinds(comm), rounds).items()}
    results["remembering an operation"] = median(remembering(MANY) for _ in range(rounds))
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
    return results | by_default(rounds)


def goals(results: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(what, goal, measured)."""
    raw = results["raw mpi4py"]
    gloo = results["torch gloo"]
    every = results["mcr.all_reduce, check: every"]
    default = {
        name.removeprefix("default, "): value for name, value in results.items() if name.startswith("default")
    }
    plain = default["mcr.all_reduce"]
    by_kind = {
        name: value / default[f"{name}, raw"] for name, value in default.items() if f"{name}, raw" in default
    }
    added = {name: results[name] - results[f"{name}, raw"] for name in ("broadcast", "all_to_all_single")}
    return [
        ("default: plain / raw", "≤ 1.8", f"{plain / default['raw mpi4py']:.2f}"),
        ("default: persistent / raw", "≤ 1.15", f"{default['mcr.persistent'] / default['raw mpi4py']:.2f}"),
        *((f"default: {name} / raw", "≤ 2.5", f"{ratio:.2f}") for name, ratio in by_kind.items()),
        ("default: check: every / plain", "≤ 4", f"{default['mcr.all_reduce, check: every'] / plain:.2f}"),
        ("default: dist.all_reduce / plain", "≤ 1.3", f"{default['dist.all_reduce on mcr'] / plain:.2f}"),
        ("persistent / raw", "≤ 1.1", f"{results['mcr.persistent'] / raw:.2f}"),
        ("plain − raw", "≤ 1.5 µs", f"{results['mcr.all_reduce'] - raw:.2f} µs"),
        *((f"{name} − raw", "≤ 4 µs", f"{value:.2f} µs") for name, value in added.items()),
        ("torch gloo / plain", "≥ 50", f"{gloo / results['mcr.all_reduce']:.0f}"),
        ("remembering an operation", "≤ 1 µs", f"{results['remembering an operation']:.2f} µs"),
        ("check: every − plain", "≤ 30 µs", f"{every - results['mcr.all_reduce']:.1f} µs"),
    ]


@program
def main(rounds: Rounds = 25, figures: Json = None) -> None:
    torch.set_num_threads(1)
    results = measure(rounds)
    if MPI.COMM_WORLD.rank == 0:
        rows = [[name, f"{value:.2f}"] for name, value in results.items()]
        show(["what", "median µs"], rows, "8-byte all_reduce, 2 ranks")
        show(["goal", "wanted", "measured"], goals(results))
        write_json(results, figures)


if __name__ == "__main__":
    main()
