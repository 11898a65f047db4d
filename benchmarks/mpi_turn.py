"""One turn of `bench_mpis.py`: collectives over an MPI (`mpi`), mcr_plus (`mcr`) or torch's gloo (`gloo`).

    mpiexec -n 2 python benchmarks/mpi_turn.py mpi '{"sizes": [8], ...}' answer.json

Needs only mpi4py and NumPy for `mpi`, so that an environment is one MPI and nothing else. A figure is the
median of `REPEATS` blocks of calls, each block the time of its slowest rank.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Calls = dict[str, Callable[[], Any]]
REPEATS = 7
WARM_S = 0.012
BLOCK_S = 0.004  # of one block; at least one call
MOST = 400
WIDTHS = {"float32": 4, "bfloat16": 2}


def over_mpi(nbytes: int, dtype: str, way: str) -> Calls:
    """Calls on prepared buffers; bfloat16 moves as 16-bit integers, since no MPI here adds it."""
    from mpi4py import MPI

    comm, size, rank = MPI.COMM_WORLD, MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    kind, mpi = (np.float32, MPI.FLOAT) if dtype == "float32" else (np.uint16, MPI.UINT16_T)
    whole = numel(nbytes, dtype, size)
    part = whole // size

    def room(count: int) -> Any:
        return [np.ones(count, kind), count, mpi]

    data, other, gathered, block = room(whole), room(whole), room(whole * size), room(part)
    parts, blocks = [data[0], part, mpi], [other[0], part, mpi]
    mine, here = [gathered[0], whole, mpi], MPI.IN_PLACE
    peer = 1 - rank if rank < 2 else MPI.PROC_NULL
    adds = dtype == "float32"
    if way == "async":
        calls: Calls = {
            "all_reduce": lambda: comm.Iallreduce(here, data).Wait(),
            "broadcast": lambda: comm.Ibcast(data, 0).Wait(),
            "all_gather": lambda: comm.Iallgather(data, mine).Wait(),
            "reduce_scatter": lambda: comm.Ireduce_scatter_block(parts, block).Wait(),
            "all_to_all": lambda: comm.Ialltoall(parts, blocks).Wait(),
        }
    elif way == "in place":
        own = [block[0], part, mpi] if rank else here
        calls = {
            "all_gather": lambda: comm.Allgather(here, mine),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(here, parts),
            "all_to_all": lambda: comm.Alltoall(here, parts),
            "scatter": lambda: comm.Scatter(parts, own, 0),
        }
    else:
        calls = {
            "all_reduce": lambda: comm.Allreduce(here, data),
            "broadcast": lambda: comm.Bcast(data, 0),
            "all_gather": lambda: comm.Allgather(data, mine),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(parts, block),
            "all_to_all": lambda: comm.Alltoall(parts, blocks),
            "reduce": lambda: comm.Reduce(data if rank else here, None if rank else data, root=0),
            "gather": lambda: comm.Gather(data, mine if rank == 0 else None, 0),
            "scatter": lambda: comm.Scatter(parts if rank == 0 else None, block, 0),
            "send_recv": lambda: to_and_fro(
                rank, lambda: comm.Send(data, peer), lambda: comm.Recv(data, peer)
            ),
            "barrier": comm.Barrier,
        }
    if way == "fresh":
        calls = refilled(data[0], calls)
    return {name: call for name, call in calls.items() if adds or "reduce" not in name}


def over_mcr(nbytes: int, dtype: str, way: str) -> Calls:
    """The same calls on tensors."""
    import torch

    import mcr_plus as mcr

    size, rank, asynchronous = mcr.get_world_size(), mcr.get_rank(), way == "async"
    whole, torch_dtype = numel(nbytes, dtype, size), getattr(torch, dtype)

    def room(count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch_dtype)

    part = whole // size
    data, other, gathered, block = room(whole), room(whole), room(whole * size), room(part)
    own, piece = gathered[rank * whole : (rank + 1) * whole], data[rank * part : (rank + 1) * part]
    lists = list(gathered.chunk(size)), list(data.chunk(size))
    peer = 1 - rank

    def wait(work: Any) -> None:
        if work is not None:
            work.wait()

    if asynchronous:
        return {
            "all_reduce": lambda: wait(mcr.all_reduce(data, async_op=True)),
            "broadcast": lambda: wait(mcr.broadcast(data, 0, async_op=True)),
            "all_gather": lambda: wait(mcr.all_gather_into_tensor(gathered, data, async_op=True)),
            "reduce_scatter": lambda: wait(mcr.reduce_scatter_tensor(block, data, async_op=True)),
            "all_to_all": lambda: wait(mcr.all_to_all_single(other, data, async_op=True)),
        }
    if way == "in place":
        return {
            "all_gather": lambda: mcr.all_gather_into_tensor(gathered, own),
            "reduce_scatter": lambda: mcr.reduce_scatter_tensor(piece, data),
            "all_to_all": lambda: mcr.all_to_all_single(data, data),
            "scatter": lambda: mcr.scatter(piece, lists[1] if rank == 0 else None, 0),
        }
    calls: Calls = {
        "all_reduce": lambda: mcr.all_reduce(data),
        "broadcast": lambda: mcr.broadcast(data, 0),
        "all_gather": lambda: mcr.all_gather_into_tensor(gathered, data),
        "reduce_scatter": lambda: mcr.reduce_scatter_tensor(block, data),
        "all_to_all": lambda: mcr.all_to_all_single(other, data),
        "reduce": lambda: mcr.reduce(data, 0),
        "gather": lambda: mcr.gather(data, lists[0] if rank == 0 else None, 0),
        "scatter": lambda: mcr.scatter(block, lists[1] if rank == 0 else None, 0),
        "send_recv": lambda: to_and_fro(rank, lambda: mcr.send(data, peer), lambda: mcr.recv(data, peer)),
        "barrier": mcr.barrier,
    }
    return refilled(data.view(torch.uint8).numpy(), calls) if way == "fresh" else calls


def over_gloo(nbytes: int, dtype: str, way: str) -> Calls:
    """The synchronous calls that torch.distributed's gloo has."""
    import torch
    import torch.distributed as dist

    whole, kind = numel(nbytes, dtype, dist.get_world_size()), getattr(torch, dtype)
    size = dist.get_world_size()
    data, other = torch.ones(whole, dtype=kind), torch.ones(whole, dtype=kind)
    gathered, block = torch.ones(whole * size, dtype=kind), torch.ones(whole // size, dtype=kind)
    if way not in ("sync", "fresh"):
        return {}
    calls: Calls = {
        "all_reduce": lambda: dist.all_reduce(data),
        "broadcast": lambda: dist.broadcast(data, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(gathered, data),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(block, data),
        "all_to_all": lambda: dist.all_to_all_single(other, data),
    }
    return refilled(data.view(torch.uint8).numpy(), calls) if way == "fresh" else calls


def refilled(data: Any, calls: Calls) -> Calls:
    """Let every call first write its input, as programs do: what a peer has read leaves the peer's cache."""

    def refill_and(call: Callable[[], Any]) -> Callable[[], None]:
        def both() -> None:
            data.fill(0)
            call()

        return both

    return {name: refill_and(call) for name, call in calls.items() if name != "barrier"}


def to_and_fro(rank: int, send: Callable[[], object], receive: Callable[[], object]) -> None:
    """Send a message from rank 0 to rank 1 and back; other ranks do nothing."""
    if rank == 0:
        send()
        receive()
    elif rank == 1:
        receive()
        send()


def numel(nbytes: int, dtype: str, ranks: int) -> int:
    """Return the elements of a buffer of about `nbytes`, a multiple of the number of ranks."""
    return max(nbytes // WIDTHS[dtype] // ranks, 1) * ranks


def largest(value: float) -> float:
    """Return the maximum over the ranks."""
    from mpi4py import MPI

    return float(MPI.COMM_WORLD.allreduce(value, op=MPI.MAX))


def largest_of(maximum: Callable[[Any], object]) -> Callable[[float], float]:
    """Return the same without MPI, whose waits never sleep, and use up the ranks' time beside other work."""
    import torch

    def most(value: float) -> float:
        result = torch.tensor([value], dtype=torch.float64)
        maximum(result)
        return result.item()

    return most


def block_seconds(call: Callable[[], Any], calls: int, most: Callable[[float], float]) -> float:
    """Return the time of a call on the slowest rank."""
    most(0.0)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return most((time.perf_counter() - began) / calls)


def median_us(call: Callable[[], Any], most: Callable[[float], float]) -> float:
    """Return the median of the blocks in microseconds."""
    call()
    # The first hundreds of calls find memory that no rank has touched, caches cold, and methods untried.
    block_seconds(call, max(1, min(2 * MOST, int(WARM_S / block_seconds(call, 2, most)))), most)
    calls = max(1, min(MOST, int(BLOCK_S / block_seconds(call, 2, most))))
    blocks = sorted(block_seconds(call, calls, most) for _ in range(REPEATS))
    return 1e6 * blocks[REPEATS // 2]


def main(library: str, wanted: str, answer: str) -> None:
    """Measure all cells, and write {"kind bytes dtype way": microseconds}."""
    cells: dict[str, list[Any]] = json.loads(wanted)
    if library == "mpi":
        found, rank = times(over_mpi, cells, largest), own_rank()
    else:
        import torch

        torch.set_num_threads(1)
        if library == "mcr":
            import mcr_plus as mcr

            with mcr.init() as comm:
                found, rank = (
                    times(over_mcr, cells, largest_of(lambda x: mcr.all_reduce(x, mcr.MAX))),
                    comm.rank,
                )
        else:
            import torch.distributed as dist

            dist.init_process_group("gloo")
            rank = dist.get_rank()
            found = times(over_gloo, cells, largest_of(lambda x: dist.all_reduce(x, dist.ReduceOp.MAX)))
            dist.destroy_process_group()
    if rank == 0:
        Path(answer).write_text(json.dumps(found))


def own_rank() -> int:
    """Return the rank of this process in MPI."""
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.rank)


def times(
    calls_of: Callable[[int, str, str], Calls], cells: dict[str, list[Any]], most: Callable[[float], float]
) -> dict[str, float]:
    """Return microseconds by cell."""
    found: dict[str, float] = {}
    for dtype in cells["dtypes"]:
        for way in cells["ways"]:
            for nbytes in cells["sizes"]:
                for kind, call in calls_of(nbytes, dtype, way).items():
                    if kind in cells["kinds"] and (kind != "barrier" or nbytes == cells["sizes"][0]):
                        found[f"{kind} {nbytes} {dtype} {way}"] = median_us(call, most)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
