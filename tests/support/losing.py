"""Jobs that lose a rank: the ranks' program, start and end of the job, and the errors of the others.

    python losing.py FOLDER LIBRARY WAY STOPPED HEARTBEAT    as a rank; with the variables of a launcher

`WAY`: the activity of ranks when one is lost, see `WAYS`. `STOPPED`, `HEARTBEAT`: options of `dispatch`.
Times are on the monotonic clock, which all processes of a machine share. Used by tests and by
`benchmarks/bench_failures.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch

import mcr_plus as mcr
from mcr_plus.rendezvous.mpi_launcher import mpi_flavour

_MARK: Final = "MCR_TEST_FOLDER"
SETTLES: Final = 0.4
"""Seconds before a job loses a rank: agents have heard of each other by then."""


def _wait(comm: mcr.Communicator, library: str) -> None:
    comm.all_reduce(torch.ones(1000), backend=library)


def _poll(comm: mcr.Communicator, library: str) -> None:
    work = comm.all_reduce(torch.ones(1000), backend=library, async_op=True)
    assert work is not None
    while not work.is_completed():
        time.sleep(1e-3)
    work.wait()


def _blocking(comm: mcr.Communicator, library: str) -> None:
    """Calls that block in other libraries: a large message, objects, a barrier."""
    peer = comm.rank ^ 1
    if peer < comm.size:
        value = torch.ones(1 << 20)
        if comm.rank < peer:
            comm.send(value, peer, backend=library)
        else:
            comm.recv(value, peer, backend=library)
    comm.all_gather_object({"rank": comm.rank})
    comm.barrier(backend=library)


def _backward(comm: mcr.Communicator, library: str) -> None:
    _model()(torch.ones(4, 256)).sum().backward()


_models: list[torch.nn.Module] = []


def _model() -> torch.nn.Module:
    if not _models:
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        _models.append(mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))[0])
    return _models[0]


def _busy(comm: mcr.Communicator, library: str) -> None:
    """Rank 1 computes, holding the interpreter's lock."""
    if comm.rank == 1 and _computes:
        ctypes.PyDLL(None).usleep(3_000_000)
    _computes.append(True)
    comm.all_reduce(torch.ones(4), backend=library)


_computes: list[bool] = []
WAYS: Final[dict[str, Callable[[mcr.Communicator, str], None]]] = {
    "wait": _wait,
    "poll": _poll,
    "backward": _backward,
    "blocking": _blocking,
}
"""Ways of waiting for a rank."""


def rank(folder: str, library: str, name: str, stopped: str, heartbeat: str) -> None:
    """Run on a rank: work until an error, and write it."""
    torch.set_num_threads(1)
    os.environ[_MARK] = folder  # `agents` recognises them by this
    dispatch = {"timeout": "60s", "stopped": stopped, "heartbeat": heartbeat}
    comm = mcr.init({"version": 1, "pipeline": [{"select": {}}, {"dispatch": dispatch}]}, backends=[library])
    way = WAYS.get(name, _busy)
    for _ in range(1 if name == "busy" else 3):
        way(comm, library)
    written(Path(folder, f"up.{comm.rank}"), {"pid": os.getpid()})
    ends = time.monotonic() + 60
    told: dict[str, Any] = {"error": None, "text": ""}
    try:
        while time.monotonic() < ends:
            way(comm, library)
            time.sleep(0.001)
    except Exception as error:
        told = {
            "error": type(error).__name__,
            "text": str(error),
            **{name: getattr(error, name, None) for name in ("ranks", "operation", "group", "seen")},
        }
    written(Path(folder, f"told.{comm.rank}"), {"at": time.monotonic(), **told})
    time.sleep(60)  # until it is ended: other ranks that have not raised yet would also name it


def written(path: Path, content: dict[str, Any]) -> None:
    """Write a file atomically: readers never see a part."""
    half = path.with_name(f".{path.name}")
    half.write_text(json.dumps(content))
    half.rename(path)


def read(folder: Path, what: str, ranks: Sequence[int], within: float) -> dict[int, dict[str, Any]]:
    """Return the files that ranks have written, once all exist. Raises `TimeoutError` with missing ranks."""
    ends = time.monotonic() + within
    while missing := [each for each in ranks if not Path(folder, f"{what}.{each}").exists()]:
        if time.monotonic() > ends:
            errors = Path(folder, "errors").read_text(errors="replace")[-3000:]
            raise TimeoutError(f"ranks {missing} have not said '{what}' within {within:g} s\n{errors}")
        time.sleep(0.005)
    return {each: json.loads(Path(folder, f"{what}.{each}").read_text()) for each in ranks}


class Job:
    """A running job of `size` ranks that write to `folder`."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.pids = {each: said["pid"] for each, said in read(folder, "up", range(size), 90).items()}
        time.sleep(SETTLES)

    def lose(self, how: str, victim: int) -> float:
        """`kill` or `stop` a rank; return the time."""
        os.kill(self.pids[victim], {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
        return time.monotonic()

    def agents(self) -> dict[int, int]:
        """Return the processes of the job's agents, and their parents."""
        return agents(self.folder)

    def told(self, ranks: Sequence[int], within: float = 70.0) -> dict[int, dict[str, Any]]:
        """Return the errors of these ranks, with their times (`at`)."""
        return read(self.folder, "told", ranks, within)


@contextmanager
def job_here(
    folder: Path, size: int, library: str, way: str, *, stopped: str = "0.5s", python: str = sys.executable
) -> Iterator[Job]:
    """Run a job on this host; ranks on MPI are started by Open MPI with its fault tolerance."""
    words = [python, __file__, str(folder), library, way, stopped, "auto"]
    if library == "mpi":
        launcher = mpi_flavour()
        assert launcher is not None
        options = ["--with-ft", "ulfm", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        lines = [([launcher.path, *options, "-n", str(size), *words], dict[str, str]())]
    else:
        port = str(_free_port())
        lines = [(words, _variables(each, size, port)) for each in range(size)]
    with errors_in(folder) as output:
        started = [
            subprocess.Popen(line, env={**os.environ, **variables}, **output) for line, variables in lines
        ]
    with ended(started, folder):
        yield Job(folder, size)


@contextmanager
def errors_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield options of `Popen` with which a process writes its errors to a file in `folder`."""
    with (folder / "errors").open("wb") as file:
        yield {"stdout": subprocess.DEVNULL, "stderr": file}


@contextmanager
def job_on(
    hosts: Any,
    folder: Path,
    library: str,
    way: str,
    per_host: int = 1,
    heartbeat: str = "auto",
    *,
    python: str = sys.executable,
) -> Iterator[Job]:
    """Run a job on all of these `Hosts`."""
    words = [python, __file__, str(folder), library, way, "0.5s", heartbeat]
    with errors_in(folder) as output:
        started = list(hosts.start(words, per_host=per_host, **output))
    with ended(started, folder):
        yield Job(folder, len(hosts.names) * per_host)


@contextmanager
def ended(started: Sequence[subprocess.Popen[Any]], folder: Path) -> Iterator[None]:
    """End the ranks of a job and their launchers. Raises `TimeoutError` if an agent stays."""
    try:
        yield
    finally:
        for path in folder.glob("up.*"):
            _kill(json.loads(path.read_text())["pid"])
        for process in started:
            process.kill()
            process.wait()
    ends = time.monotonic() + 30
    while agents(folder):
        if time.monotonic() > ends:
            raise TimeoutError(f"agents are left: {agents(folder)}")
        time.sleep(0.02)


def agents(folder: Path) -> dict[int, int]:
    """Return the agents of the job that writes to `folder`: their processes, and the parents of these."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # the process has ended
            words = (place / "cmdline").read_text().split("\0")
            variables = (place / "environ").read_text().split("\0")
            if "-S" in words[:4] and f"{_MARK}={folder}" in variables:
                stat = (place / "stat").read_text().rpartition(")")[2].split()
                found[int(place.name)] = int(stat[1])
    return found


def _kill(pid: int) -> None:
    with suppress(OSError):  # the process has ended
        line = Path(f"/proc/{pid}/cmdline").read_text()
        if any(name in line for name in ("losing.py", "surviving.py", "warm.py")):  # forked by `warm.py`
            os.kill(pid, signal.SIGKILL)


def _variables(each: int, size: int, port: str) -> dict[str, str]:
    return {
        "RANK": str(each),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(each),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    rank(*sys.argv[1:])
