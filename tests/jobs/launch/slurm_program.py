"""Tasks of Slurm: `srun python slurm_program.py NAME FOLDER`; each writes its observations to FOLDER/RANK."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import mcr_plus as mcr
from mcr_plus.core.environment import launch_environment

LENGTH: Final = 1001
LIMIT_S: Final = 60


def meet(_: Path) -> dict[str, Any]:
    """Find all ranks by `mcr.init`, and sum by each library."""
    place = launch_environment()
    with mcr.init(timeout=LIMIT_S) as comm:
        sums = {}
        for backend in mcr.get_backends():
            x = torch.arange(LENGTH, dtype=torch.float64) * (comm.rank + 1)
            with suppress(mcr.Unsupported):  # shared memory, between hosts
                comm.all_reduce(x, backend=backend)
                sums[backend] = x[-1].item()
        return {
            "rank": comm.rank,
            "size": comm.size,
            "sums": sums,
            "host": socket.gethostname(),
            **asdict(place),
        }


def by_torch(_: Path) -> dict[str, Any]:
    """Do the same by `torch.distributed`."""
    dist.init_process_group("mcr", init_method="mcr://")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(LENGTH, dtype=torch.float64) * (rank + 1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return {"rank": rank, "size": size, "sums": {"any": x[-1].item()}}


def idle(folder: Path) -> dict[str, Any]:
    """Run until the job is cancelled; a file says that a rank has all its memory."""
    comm = mcr.init(timeout=LIMIT_S)
    for backend in mcr.get_backends():
        comm.all_reduce(torch.ones(1 << 20), backend=backend)
    (folder / f"pid{comm.rank}").write_text(str(os.getpid()))
    time.sleep(10 * LIMIT_S)
    raise AssertionError("not cancelled")


def dies(_: Path) -> dict[str, Any]:
    """The last rank dies, and the others wait for it."""
    comm = mcr.init(timeout=LIMIT_S)
    comm.barrier()
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.barrier()
    except mcr.PeerLost as error:
        return {"rank": comm.rank, "lost": list(error.ranks)}
    raise AssertionError("nobody is lost")


PROGRAMS: Final[dict[str, Callable[[Path], dict[str, Any]]]] = {
    each.__name__: each for each in (meet, by_torch, idle, dies)
}

if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    seen = PROGRAMS[name](folder)
    (folder / f"{seen['rank']}").write_text(json.dumps(seen))
