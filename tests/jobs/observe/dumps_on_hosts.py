"""A job on several hosts that dumps: rank 0 waits for the others, which are busy until a test says go.

    python dumps_on_hosts.py FOLDER            as a rank; with the variables of a launcher
    python dumps_on_hosts.py FOLDER demand PID as `mcr-plus top PID --dump`, on the host of rank 0

Each host has a folder of its own for dumps, as without a shared file system.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

import mcr_plus as mcr
from mcr_plus.hosts.page_exchange import HOSTS
from mcr_plus.observe import job_status
from mcr_plus.observe.remote_dump import demand_dumps

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("", "support"))  # of a program

from jobs.observe.hanging import idles
from losing import written

DEADLINE = 2.0
"""Seconds of the operation that fails."""


def rank(folder: str) -> None:
    """Runs on ranks."""
    own = os.environ["RANK"]
    os.environ["MCR_DUMP"] = f"{folder}/host{own}"
    begin(120)
    mcr.barrier()
    Path(folder, f"pid{own}").write_text(str(os.getpid()))
    if own != "0":
        idles(folder, "go")
    mcr.all_reduce(torch.ones(11), tag="far")
    mcr.finalize()
    begin(DEADLINE)
    if own != "0":
        Path(folder, "idle").touch()
        idles(folder, "ended")
        return
    idles(folder, "idle")
    try:
        mcr.all_reduce(torch.ones(12))
    except mcr.CommTimeout as error:
        Path(folder, "failed").write_text(str(error))
    idles(folder, "ended")


def begin(timeout: float) -> None:
    """Begin a job, whose operations have this deadline in seconds."""
    dispatch = {"dispatch": {"timeout": f"{timeout}s", "stopped": "wait"}}
    mcr.init({"version": 1, "backends": ["gloo"], "pipeline": [{"select": {}}, dispatch]})


def demand(folder: str, here: int) -> None:
    """As on two machines: of the pages of ranks, those of the first host alone can be seen."""
    everything = job_status._descriptors

    def seen() -> Iterator[tuple[int, str, str]]:
        for pid, path, name in everything():
            if pid == here or (name == HOSTS and of_host(pid, here)):
                yield pid, path, name

    job_status._descriptors = seen
    answers = [asdict(each) for each in demand_dumps(here, 60.0)]
    written(
        Path(folder, "answers"),
        {"answers": answers, "state": job_status.survey(here).jobs[0].member(1).state},
    )


def of_host(pid: int, rank: int) -> bool:
    """Whether the agent `pid` shares the network namespace of a rank."""
    return os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{rank}/ns/net")


if __name__ == "__main__":
    demand(sys.argv[1], int(sys.argv[3])) if len(sys.argv) > 2 else rank(sys.argv[1])
