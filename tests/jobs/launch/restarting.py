"""Programs that tests start on ranks under a supervisor: `python restarting.py NAME ARGS…`.

Each process says `up` with its rank, and how often that has been started again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

_PATIENCE_S = 60.0
RANK, STARTED_AGAIN = int(os.environ["RANK"]), int(os.environ["MCR_RESTARTS"])


def _began() -> float:
    """Return the start of this process, in seconds since the machine's boot, to a hundredth."""
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _up() -> None:
    print(f"start {RANK}.{STARTED_AGAIN} at={_began()}\n", end="", flush=True)
    # This comes last, because tests kill ranks once all are up. One write keeps lines whole.
    print(f"up rank={RANK} pid={os.getpid()}\n", end="", flush=True)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody wrote {path}"
        time.sleep(0.02)


def wait(folder: str) -> None:
    """End with 0 when there is a file `go`."""
    _up()
    _wait_for(Path(folder, "go"))


def store() -> None:
    """Read from the job's store what ranks wrote before one of them died, and wait for that rank's answer."""
    from mcr_plus.core.c10d import TCPStore

    limit = timedelta(seconds=_PATIENCE_S)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    found = TCPStore(address, port, int(os.environ["WORLD_SIZE"]), False, limit, wait_for_workers=False)
    if STARTED_AGAIN:
        texts = [found.get(f"of/{rank}").decode() for rank in range(int(os.environ["WORLD_SIZE"]))]
        print(f"read {texts}\n", end="", flush=True)
        found.set("again", str(STARTED_AGAIN))
    else:
        found.set(f"of/{RANK}", f"{RANK} was here")
        _up()
    found.wait(["again"], limit)
    assert found.get("again") == b"1"


def fail(*numbers: str) -> None:
    """Rank 1 exits with the next of these numbers at each of its starts; the others end with 0, later."""
    _up()
    if RANK == 1:
        sys.exit(int(numbers[STARTED_AGAIN]))
    time.sleep(0.3)


def fail_and_wait(number: str, folder: str) -> None:
    """Rank 1 exits with a number; the others wait like `wait`."""
    _up()
    if RANK == 1:
        sys.exit(int(number))
    _wait_for(Path(folder, "go"))


def leave(folder: str) -> None:
    """Rank 0 ends with 0 at once; the others wait like `wait`."""
    _up()
    if RANK != 0:
        _wait_for(Path(folder, "go"))


def stubborn(folder: str) -> None:
    """Wait like `wait`, but ignore requests to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait(folder)


def raises() -> None:
    """Rank 1 raises after an incomplete line; once it is started again it says so and ends with 0."""
    import mcr_plus  # noqa: F401 - it reports uncaught exceptions

    if RANK == 1:
        print(f"half a line {STARTED_AGAIN}", end="", flush=True)
        if not STARTED_AGAIN:
            raise ValueError("the reason it failed\nand what follows")


def raises_always() -> None:
    """Rank 1 raises at every start, the others wait."""
    import mcr_plus  # noqa: F401 - it reports uncaught exceptions

    if RANK == 1:
        raise ValueError(f"the reason of start {STARTED_AGAIN}")
    time.sleep(_PATIENCE_S)


def environment(folder: str, *names: str) -> None:
    """Print variables and wait as `wait` does; rank 1 fails at its first start."""
    for name in names:
        print(f"{RANK}.{STARTED_AGAIN} {name}={os.environ[name]}\n", end="", flush=True)
    _wait_for(Path(folder, "go"))
    sys.exit(RANK == 1 and not STARTED_AGAIN)


def init_without(number: str) -> None:
    """Rank 1 exits with a number before `init`; the others print the error of `init`, and end with 0."""
    import mcr_plus as mcr

    if RANK == 1:
        time.sleep(0.5)
        sys.exit(int(number))
    try:
        mcr.init(backends=["gloo"], timeout=_PATIENCE_S)
    except mcr.PeerLost as error:
        print(f"{RANK} told PeerLost {list(error.ranks)} {error}\n", end="", flush=True)
    time.sleep(2)  # a rank that ends would be lost, too


def init_after_all(folder: str) -> None:
    """Rank 1 dies in `init`, after the others have seen that it has come, and before all have.

    Rank 2 comes once rank 1 is back.
    """
    import torch

    import mcr_plus as mcr
    from mcr_plus.core.job_store import JobStore

    if RANK == 1 and not STARTED_AGAIN:
        usual = JobStore.get

        def killed(store: JobStore, key: str) -> bytes:
            if key == "here":
                os.kill(os.getpid(), signal.SIGKILL)
            return usual(store, key)

        JobStore.get = killed  # type: ignore[method-assign, assignment]
    elif RANK == 1:
        Path(folder, "again").touch()
    elif RANK == 2:
        _wait_for(Path(folder, "again"))
        time.sleep(1.0)
    comm = mcr.init(backends=["gloo"], timeout=_PATIENCE_S)
    x = torch.full((1,), 1.0 + RANK)
    comm.all_reduce(x)
    print(f"{RANK} sum {x.item()}\n", end="", flush=True)
    mcr.finalize()


def shrinks(then: str, folder: str) -> None:
    """Rank 1 dies once, and rank 0 continues with `mcr.shrink`.

    `then`: how rank 0 takes the new rank 1 in. With `nothing`, rank 0 ends once the new rank has come.
    """
    import torch

    import mcr_plus as mcr

    comm = mcr.init(backends=["gloo"], timeout=_PATIENCE_S)
    if not STARTED_AGAIN:
        comm.barrier()
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                mcr.all_reduce(torch.ones(2))
        except mcr.PeerLost:
            mcr.shrink()
    if then == "elastic":
        model = torch.nn.Linear(2, 1)
        model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in mcr.elastic(model, optimizer, min_ranks=1):
            with step:
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            if mcr.get_world_size() == 2:
                break
            time.sleep(0.1)
    elif then == "reconfigure":
        Path(folder, f"handle.{RANK}.new").write_text(mcr.reconfigure_handle())
        Path(folder, f"handle.{RANK}.new").rename(Path(folder, f"handle.{RANK}"))
        paths = [Path(folder, f"handle.{rank}") for rank in range(2)]
        for path in paths:
            _wait_for(path)
        mcr.reconfigure("both", [path.read_text() for path in paths])
    elif STARTED_AGAIN:
        Path(folder, "again").touch()
        time.sleep(_PATIENCE_S)
    else:
        _wait_for(Path(folder, "again"))
    print(f"{RANK} of {mcr.get_world_size()}\n", end="", flush=True)
    mcr.finalize()


_PROGRAMS: dict[str, Callable[..., None]] = {
    "wait": wait, "store": store, "fail": fail, "fail_and_wait": fail_and_wait, "leave": leave,
    "stubborn": stubborn, "raises": raises, "raises_always": raises_always, "environment": environment,
    "init_without": init_without, "init_after_all": init_after_all, "shrinks": shrinks,
}  # fmt: skip

if __name__ == "__main__":
    _PROGRAMS[sys.argv[1]](*sys.argv[2:])
