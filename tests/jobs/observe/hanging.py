"""Jobs that hang in one way after another until a test has seen it; `far_apart` is a program too."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import mcr_plus as mcr

HERE = str(Path(__file__))
VICTIM = 1


def libraries(via: str) -> list[str]:
    return ["gloo", "msccl"] if via == "torch" else ["mpi", "gloo", "msccl"]


def idles(folder: str, name: str) -> None:
    """Be outside mcr_plus until the test says go."""
    while not Path(folder, name).exists():
        time.sleep(0.01)


def waits_here(run: Callable[[], object]) -> None:
    run()


def hangs(folder: str, via: str) -> bool:
    """Runs on three ranks: hang in one way after another, until the test has seen it."""
    torch.set_num_threads(1)
    dispatch = {"dispatch": {"timeout": "120s", "stopped": "wait"}}
    mcr.init({"version": 1, "pipeline": [{"select": {}}, dispatch]}, backends=libraries(via))
    rank = mcr.get_rank()
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    pair = mcr.new_group([2, 0])
    for library in libraries(via):
        mcr.all_reduce(torch.ones(1000), backend=library)
        if rank == VICTIM:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(0.05)
        waits_here(lambda: mcr.all_reduce(torch.ones(1000), tag=f"stop.{library}", backend=library))  # noqa: B023
    if rank == VICTIM:
        idles(folder, "never")
    waits_here(lambda: mcr.barrier(tag="never"))
    if rank == 0:
        idles(folder, "part")
    if rank != VICTIM:
        waits_here(lambda: pair.all_reduce(torch.ones(7), tag="part"))
    if rank == VICTIM:
        idles(folder, "message")
        mcr.send(torch.ones(5), 2)
    if rank == 2:
        waits_here(lambda: mcr.recv(torch.ones(5), VICTIM, label="message"))
    mcr.barrier()
    while True:  # until rank 0 has seen the file: with looks of their own some would leave before others
        mcr.all_reduce(torch.ones(1000), tag="healthy", async_op=True).wait()  # type: ignore[union-attr]
        mcr.all_reduce(torch.ones(1000), tag="healthy")
        done = torch.tensor([float(Path(folder, "healthy").exists())])
        mcr.broadcast(done, 0)
        if done[0]:
            break
        time.sleep(0.001)
    mcr.finalize()
    idles(folder, "ended")
    return True


def far_apart(folder: str) -> bool:
    """Runs on two ranks: one never comes, the other waits for it."""
    dispatch = {"dispatch": {"timeout": "120s", "stopped": "wait"}}
    mcr.init({"version": 1, "backends": ["gloo"], "pipeline": [{"select": {}}, dispatch]})
    rank = mcr.get_rank()
    mcr.all_reduce(torch.ones(10))
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    if rank == 1:
        idles(folder, "go")
    waits_here(lambda: mcr.all_reduce(torch.ones(11), tag="far"))
    mcr.finalize()
    return True


if __name__ == "__main__":
    far_apart(sys.argv[1])
