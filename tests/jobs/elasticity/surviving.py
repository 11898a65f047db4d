"""Jobs on several hosts that go on without ranks and hosts that are lost, and what starts and ends them.

    python surviving.py FOLDER OPTIONS    as a rank; with the variables of a launcher

`OPTIONS`, in JSON: `heartbeat` of `dispatch`, `library`, `min_ranks` and `timeout` of `mcr.shrink`, and
`waits`: the ranks that stand still, for good, where they would make the next world; `resets`: whether ranks
call `mcr.reset` first, in vain. A rank issues all_reduces; at a loss it calls `mcr.shrink` and writes what it
has then, until a file says that it is enough.
Times are those of the monotonic clock, which all processes of a machine share. Used by tests and by
`benchmarks/bench_survive.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

import mcr_plus as mcr
from mcr_plus.job import init
from mcr_plus.rendezvous.mpi_launcher import mpi_flavour

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("", "support"))  # of a program

from losing import _MARK, SETTLES, ended, errors_in, read, written

_LIMIT: Final = 150.0


def rank(folder: str, text: str) -> None:
    """Runs on ranks."""
    options: dict[str, Any] = json.loads(text)
    torch.set_num_threads(1)
    os.environ[_MARK] = folder  # by which `agents` knows them
    dispatch = {"timeout": "30s", "heartbeat": options["heartbeat"]}
    config = {"version": 1, "pipeline": [{"select": {}}, {"dispatch": dispatch}]}
    comm = mcr.init(config, backends=options["library"].split())
    slot = comm.rank
    if slot in options["waits"]:
        init.begin = lambda *_, **__: _stand_still(Path(folder, f"building.{slot}"))  # type: ignore[assignment]
    for _ in range(3):
        comm.all_reduce(torch.ones(1000))
        comm.all_reduce(torch.ones(1), "MAX")
    written(Path(folder, f"up.{slot}"), {"pid": os.getpid()})
    ends, epoch = time.monotonic() + _LIMIT, 0
    lost: list[int] = []
    told: dict[str, Any] = {"error": None, "text": ""}
    try:
        while time.monotonic() < ends:
            stop = torch.tensor([float(Path(folder, "stop").exists())])
            try:
                comm.all_reduce(stop, "MAX")
                x = torch.full((1000,), 1.0 + slot)
                comm.all_reduce(x)
            except mcr.PeerLost as error:
                raised, lost = time.monotonic(), [*lost, *error.ranks]
                reset = _reset() if options["resets"] else {}
                comm = mcr.shrink(min_ranks=options["min_ranks"], timeout=options["timeout"])
                shrunk, epoch = time.monotonic(), epoch + 1
                x = torch.full((1000,), 1.0 + slot)
                comm.all_reduce(x)
                # Later operations make no communicator of MPI: Open MPI may crash if a rank is lost then.
                for _ in range(3):
                    comm.all_reduce(stop, "MAX")
                    comm.all_reduce(torch.ones(1000))
                comm.barrier()
                said = {
                    "raised": raised,
                    "shrunk": shrunk,
                    "at": time.monotonic(),
                    "seen": error.seen,
                    "lost": lost,
                }
                said |= {"reset": reset, "rank": comm.rank, "sum": x.unique().tolist(), "size": comm.size}
                written(Path(folder, f"epoch{epoch}.{slot}"), said)
                continue
            if stop.item():
                break
            time.sleep(0.001)
        mcr.finalize()
    except Exception as error:
        told = {"error": type(error).__name__, "text": str(error)}
    written(Path(folder, f"told.{slot}"), {"at": time.monotonic(), **told})


def _reset() -> dict[str, Any]:
    """What `mcr.reset` raises beside lost ranks, and how long it takes to."""
    began = time.monotonic()
    try:
        mcr.reset()
    except mcr.PeerLost as error:
        return {"ranks": list(error.ranks), "text": str(error), "seconds": time.monotonic() - began}
    return {}


def _stand_still(note: Path) -> None:
    written(note, {})
    time.sleep(_LIMIT)


class Job:
    """A running job; ranks are named by the numbers that they have at its beginning."""

    def __init__(self, folder: Path, size: int, per_host: int) -> None:
        self.folder, self.size, self.per_host = folder, size, per_host
        self.pids = {each: said["pid"] for each, said in read(folder, "up", range(size), 120).items()}
        time.sleep(SETTLES)

    def on(self, host: int) -> list[int]:
        """The ranks of a host."""
        return list(range(host * self.per_host, (host + 1) * self.per_host))

    def lose(self, how: str, victims: Sequence[int]) -> float:
        """`kill` ranks or `stop` them; returns when."""
        for each in victims:
            os.kill(self.pids[each], {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
        return time.monotonic()

    def lose_host(self, hosts: Any, number: int) -> float:
        """Kill all processes of a host at once: its ranks, and what runs beside them; returns when."""
        for cause in (signal.SIGSTOP, signal.SIGKILL):  # or an agent might tell of ranks killed before it
            for pid in hosts.processes(number):
                os.kill(pid, cause)
        return time.monotonic()

    def gone_on(
        self, ranks: Sequence[int], epoch: int = 1, within: float = 60.0
    ) -> dict[int, dict[str, Any]]:
        """What ranks have after their n-th shrink; checks that the sum is of all of them."""
        found = read(self.folder, f"epoch{epoch}", ranks, within)
        for number, (each, said) in enumerate(sorted(found.items())):
            assert (said["rank"], said["size"]) == (number, len(ranks)), (each, said)
            assert said["sum"] == [sum(1.0 + other for other in ranks)], (each, said)
        return found

    def told(self, ranks: Sequence[int], within: float = 60.0) -> dict[int, dict[str, Any]]:
        """How these ranks have ended."""
        return read(self.folder, "told", ranks, within)

    def end(self, ranks: Sequence[int]) -> None:
        """End the job in good order, and check that these ranks do."""
        (self.folder / "stop").touch()
        for each, said in self.told(ranks).items():
            assert said["error"] is None, (each, said)


def _words(folder: Path, options: Mapping[str, Any], python: str = sys.executable) -> list[str]:
    defaults: dict[str, Any] = {
        "heartbeat": "2s",
        "library": "gloo",
        "min_ranks": None,
        "timeout": 10,
        "waits": [],
        "resets": False,
    }
    return [python, __file__, str(folder), json.dumps({**defaults, **options})]


@contextmanager
def job_on(
    hosts: Any, folder: Path, per_host: int = 1, *, python: str = sys.executable, **options: Any
) -> Iterator[Job]:
    """A job on all of these `Hosts`."""
    with errors_in(folder) as output:
        started = list(hosts.start(_words(folder, options, python), per_host=per_host, **output))
    with ended(started, folder):
        yield Job(folder, len(hosts.names) * per_host, per_host)


@contextmanager
def job_by_mpirun(folder: Path, size: int, *, python: str = sys.executable, **options: Any) -> Iterator[Job]:
    """A job on this host, started by Open MPI with its fault tolerance."""
    launcher = mpi_flavour()
    assert launcher is not None
    words = [launcher.path, "--with-ft", "ulfm", "--allow-run-as-root", "--oversubscribe"]
    words += ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "-n", str(size)]
    with errors_in(folder) as output:
        started = [subprocess.Popen([*words, *_words(folder, options, python)], **output)]
    if _launcher_failed(started[0], folder):
        with errors_in(folder) as output:
            started = [subprocess.Popen([*words, *_words(folder, options, python)], **output)]
    with ended(started, folder):
        yield Job(folder, size, size)


def _launcher_failed(launcher: subprocess.Popen[Any], folder: Path) -> bool:
    """Whether Open MPI's launcher ends before it has started a rank: once in about a thousand starts."""
    while launcher.poll() is None:
        if Path(folder, "up.0").exists():
            return False
        time.sleep(0.01)
    return "PMIx server's listener thread failed to start" in Path(folder, "errors").read_text()


if __name__ == "__main__":
    rank(*sys.argv[1:])
