"""A rank of a job between hosts: `python ipv6_program.py FOLDER WAY` writes what it saw to FOLDER/RANK.json.

Ways: `plain` reduces by mcr_plus, and rank 0's weights go to rank 1 and to a server outside the job; `torch`
reduces by a process group; `other` has rank 0 on the interface that only has an IPv4 address.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mcr_plus as mcr


def peers() -> list[str]:
    """Return the hosts of this process's connections, but for loopback."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        # Closed meanwhile, no socket, or none with a peer or a host.
        with suppress(OSError, AttributeError, IndexError), socket.socket(fileno=os.dup(int(name))) as copy:
            found.add(copy.getpeername()[0].removeprefix("::ffff:"))
    return sorted(each for each in found if each and each not in ("::1", "127.0.0.1"))


def plain(folder: Path) -> dict[str, Any]:
    """Reduce, and hand weights over; returns values and connections."""
    with mcr.init({"version": 1, "backends": ["gloo"]}, timeout=60) as comm:
        value = torch.arange(5.0) * (comm.rank + 1)
        comm.all_reduce(value)
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.fill_(comm.rank + 1.5)
        file = folder / "weights.sync"
        weights = mcr.sync(model, src=0, invite=str(file))
        weights.push() if comm.rank == 0 else weights.pull()
        joined = None
        if comm.rank == 1:
            server = torch.nn.Linear(3, 2)
            with mcr.join_sync(str(file), server, timeout=60) as receiver:
                receiver.pull()
                joined = server.weight[1, 2].item()
        seen = {
            "sum": value.tolist(),
            "pulled": model.weight[0, 0].item(),
            "joined": joined,
            "peers": peers(),
        }
        comm.barrier()
    return seen


def by_torch() -> dict[str, Any]:
    """Reduce by a process group, with the program's own `env://`."""
    dist.init_process_group("mcr")
    value = torch.arange(5.0) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    seen = {"sum": value.tolist(), "peers": peers()}
    dist.destroy_process_group()
    return seen


def main(folder: Path, way: str) -> None:
    """Run one way; an error of mcr_plus is a result."""
    rank = os.environ["RANK"]
    if way == "other" and rank == "0":
        os.environ["GLOO_SOCKET_IFNAME"] = "only4"
    try:
        seen = by_torch() if way == "torch" else plain(folder)
    except mcr.McrError as error:
        seen = {"error": [type(error).__name__, str(error)]}
    (folder / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
