"""Programs that tests start on ranks: `python programs.py NAME ARGS…`. Each prints `up` once it runs."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Peers:
    """The other ranks: through mpi4py under an MPI launcher, else through torch.distributed's gloo."""

    def __init__(self) -> None:
        self._torch = "TORCHELASTIC_RUN_ID" in os.environ
        if self._torch:
            import torch.distributed as dist

            dist.init_process_group("gloo")
            self.rank = dist.get_rank()
        else:
            from mpi4py import MPI

            self.rank = MPI.COMM_WORLD.rank

    def barrier(self) -> None:
        """Wait for the others."""
        if self._torch:
            import torch.distributed as dist

            dist.barrier()
        else:
            from mpi4py import MPI

            MPI.COMM_WORLD.Barrier()


def end_together(first: int | None = None) -> None:
    """Keep ranks alive until all others are about to end, and collect exceptions; one may end `first`.

    Launchers end the others when one ends. Call this before anything else registers a call at the end of the
    process: calls run in reverse order.
    """
    folder, own = Path(os.environ["MCR_JOB_FOLDER"]), int(os.environ["RANK"])

    def may_end() -> bool:
        names = {path.name for path in folder.glob("ends.*")}
        if len(names) < int(os.environ["WORLD_SIZE"]):
            return False
        return first in (None, own) or _is_gone((folder / f"ends.{first}").read_text())

    def end() -> None:
        part = folder / f".ends.{own}"
        part.write_text(str(os.getpid()))
        part.rename(folder / f"ends.{own}")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not may_end():
            time.sleep(0.01)

    atexit.register(end)


def _is_gone(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _meet() -> Peers:
    peers = Peers()
    peers.barrier()
    print(f"up rank={peers.rank} pid={os.getpid()}", flush=True)
    return peers


def finish() -> None:
    """Work, and exit with 0."""
    _meet().barrier()


def sleep() -> None:
    """Run until killed. Once all are up, no rank talks to another: a test may kill one."""
    _meet()
    time.sleep(600)


def stubborn() -> None:
    """Run until killed, and ignore requests to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep()


def fail(how: str) -> None:
    """Make rank 1 fail in some way while the others wait for it."""
    peers = _meet()
    peers.barrier()
    if peers.rank == 1:
        _FAILURES[how]()
    peers.barrier()


def lines(count: str) -> None:
    """Print many numbered lines at once."""
    for number in range(int(count)):
        print(f"line {number} " + "x" * 200)
        print(f"error {number} " + "y" * 200, file=sys.stderr)


def environment(*names: str) -> None:
    """Print variables."""
    for name in names:
        print(f"{name}={os.environ.get(name, '')}", flush=True)


def arguments(*words: str) -> None:
    """Print the arguments."""
    print(words, flush=True)


def mistake() -> None:
    """Ask for an unknown reduction."""
    end_together()
    import torch

    import mcr_plus as mcr

    op: Any = "sum"
    with mcr.init(backends=["gloo"]):
        mcr.all_reduce(torch.ones(3), op)


def _raise() -> None:
    raise ValueError("the reason it failed")


_FAILURES: dict[str, Callable[[], Any]] = {
    "raise": _raise,
    "exit": lambda: sys.exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
}
_PROGRAMS: dict[str, Callable[..., None]] = {
    "finish": finish, "sleep": sleep, "stubborn": stubborn, "fail": fail, "lines": lines,
    "environment": environment, "arguments": arguments,
    "mistake": mistake,
}  # fmt: skip

if __name__ == "__main__":
    _PROGRAMS[sys.argv[1]](*sys.argv[2:])
