"""An all_reduce of CUDA tensors by each library, and by torch.distributed over NCCL.

    mcr-plus run -n 2 benchmarks/bench_gpu_calls.py [--sizes 8B --sizes 1MiB …]

*Issue*: microseconds of the program for a call that does not wait for the GPU (`async_op=True` and `wait()`
for NCCL; for other libraries, which move data by the host, this is all of it). *Done*: microseconds of a call
when each is followed by `torch.cuda.synchronize()`. Candidates take turns; medians over rounds of the slower
rank. On one GPU two ranks share its processors, so this measures the way of a call, not a link. Two ranks on
one GPU need NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from typing import Annotated, Final

import harness
import torch
import torch.distributed as dist
import typer
from harness import Dated

import mcr_plus as mcr
from mcr_plus.core.c10d import PrefixStore
from mcr_plus.core.units import format_size, parse_size
from mcr_plus.errors import McrError
from mcr_plus.job.init import current

LIBRARIES: Final = ("nccl", "msccl", "mpi", "gloo")
CALLS: Final = 30


def candidates(
    comm: mcr.Communicator, tensor: torch.Tensor, with_torch: bool
) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {}
    for name in mcr.get_backends():
        if name in LIBRARIES:
            found[name] = lambda name=name: comm.all_reduce(tensor, backend=name)  # type: ignore[misc]
    if with_torch:
        found["torch nccl"] = lambda: dist.all_reduce(tensor)
    return found


def torch_group(comm: mcr.Communicator) -> bool:
    """Make torch's own group over NCCL; False if it cannot be had."""
    store = current().world.store
    assert store is not None
    try:
        dist.init_process_group(
            "nccl", store=PrefixStore("bench", store), rank=comm.rank, world_size=comm.size
        )
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:
        if comm.rank == 0:
            print(f"without torch's NCCL: {error}")
        return False
    return True


@harness.program
def main(
    sizes: Annotated[
        list[str], typer.Option(default_factory=lambda: ["8B", "4KiB", "256KiB", "4MiB", "64MiB"])
    ],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    output: Dated = None,
) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench_gpu_calls: torch sees no CUDA device")
    torch.cuda.set_device(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")) % torch.cuda.device_count())
    rows = []
    with mcr.init() as comm:
        with_torch = "nccl" in mcr.get_backends() and torch_group(comm)
        for size in sizes:
            tensor = torch.zeros(max(1, parse_size(size) // 4), device="cuda")

            def largest(number: float) -> float:
                held = torch.tensor([number], dtype=torch.float64)
                comm.all_reduce(held, "MAX")
                return float(held)

            times: dict[str, list[tuple[float, float]]] = {}
            for turn in range(rounds + 1):
                for name, call in candidates(comm, tensor, with_torch).items():
                    try:
                        figures = measured(call, comm)
                    except McrError as error:
                        if comm.rank == 0:
                            print(f"{name} {size}: {error}")
                        continue
                    slowest = (largest(figures[0]), largest(figures[1]))
                    if turn:
                        times.setdefault(name, []).append(slowest)
            for name, each in times.items():
                issue, done = (1e6 * median(column) for column in zip(*each, strict=True))
                rows.append([name, format_size(tensor.nbytes), f"{issue:.1f}", f"{done:.1f}"])
                if comm.rank == 0:
                    print(" | ".join(rows[-1]), flush=True)
        if comm.rank == 0:
            card = torch.cuda.get_device_name()
            note = f"{card}, shared by {comm.size} ranks" if torch.cuda.device_count() == 1 else card
            head = ["library", "size", "issue µs", "done µs"]
            page = harness.page(
                "Calls on CUDA tensors", harness.command(comm.size), note, harness.markdown(head, rows)
            )
            harness.write(page, output, f"gpu-calls_{card.lower().replace(' ', '-')}")


def measured(call: Callable[[], object], comm: mcr.Communicator) -> tuple[float, float]:
    """Seconds of a call until the program goes on, and until the GPU has its result."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    comm.barrier(backend="gloo")
    issue = harness.seconds(call, CALLS)
    torch.cuda.synchronize()
    comm.barrier(backend="gloo")

    def done() -> None:
        call()
        torch.cuda.synchronize()

    return issue, harness.seconds(done, CALLS)


if __name__ == "__main__":
    main()
