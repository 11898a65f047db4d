"""Runs of a function on several ranks, each in its own process, and their results.

    def double(x: int) -> int: ...            # at the top level of a test module
    results = run_ranks(double, 2, args=[21])
    assert [result.value for result in results] == [42, 42]

Arguments and return values travel as JSON. Ranks are forked from processes that have imported torch
(`warm.py`), which saves seconds; a launch still costs some tenths of a second, so make many checks in one.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from warm import Nursery, end_without_teardown

Via = Literal["mpi", "ulfm", "torch"]

_POLL_S = 0.02
_GRACE_S = 60.0  # seconds that ranks may continue after one has failed; spent in full only if a test fails
_OTHERS_S = 10.0  # seconds to wait for values of other ranks, some of which may have failed
_FOLDER = "MCR_TEST_RANKS"  # folder of the files by which the ranks of a launch meet
_BY_MPICH = "PMI_RANK" in os.environ  # its launcher ends all ranks once one has left without MPI_Finalize


@dataclass(frozen=True)
class RankResult:
    """Result of one rank."""

    rank: int
    returncode: int | None  # minus the signal that killed it; None: it had not ended in time
    stdout: str
    stderr: str
    value: Any  # the function's return value; None if it did not return


class RanksFailed(AssertionError):
    """A rank failed or did not end; the message has the end of every rank's stderr."""

    def __init__(self, what: str, results: list[RankResult]) -> None:
        said = [result.stderr.partition("nanobind: leaked")[0][-3000:] for result in results]
        endings = [
            f"--- rank {result.rank}: returncode {result.returncode}\n{text}"
            for result, text in zip(results, said, strict=True)
        ]
        super().__init__("\n".join([what, *endings]))
        self.results = results


def run_ranks(
    target: str | Callable[..., Any],
    ranks: int,
    *,
    args: Sequence[Any] = (),
    via: Via = "mpi",
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    check: bool = True,
    restarts: int = 0,
    teardown: bool = False,
) -> list[RankResult]:
    """Call `target` (a top-level function, or "module:name") on each rank; one result per rank, in order.

    `via="mpi"` starts ranks as `mcr-plus run` does: when one dies, the rest are ended. `via="torch"`
    gives them torchrun's environment and a store on loopback, but no agent: when one dies, the others
    continue until they end, `timeout` passes, or a minute after the last failure. `via="ulfm"` does the same
    under Open MPI, with its fault tolerance. `env` adds to the environment. `restarts`, with `via="torch"`:
    number of times that all ranks are ended and restarted after a failure, with the same store, as torchrun's
    agent does. With `check`, a rank that fails raises `RanksFailed`; a timeout always raises it. A rank that
    has returned runs its exit handlers, ends MPI and exits at once; with `teardown` the interpreter ends as
    in any program, which takes up to a second of each core for the modules of torch and numba. No process of
    the job is left when this returns or raises.
    """
    folder = Path(tempfile.mkdtemp(prefix="mcr-test-"))
    try:
        words = _prepare(folder, target, args, teardown)
        if via == "mpi":
            words = ["-m", "mpi4py", *words]  # as `mcr-plus run` starts programs: one that raises ends all
        command = nursery().command(words)
        by_torch = partial(_run_torch, restarts=restarts)
        starts: dict[str, Callable[..., tuple[Codes, bool]]]
        starts = {"mpi": _run_mpi, "ulfm": _run_ulfm, "torch": by_torch}
        codes, late = starts[via](command, ranks, folder, {**os.environ, **(env or {})}, timeout)
        results = [_result(folder, rank, codes[rank]) for rank in range(ranks)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if late:
        raise RanksFailed(f"not done within {timeout} s", results)
    if check and any(result.returncode != 0 for result in results):
        raise RanksFailed("a rank failed", results)
    return results


@cache
def nursery() -> Nursery:
    """Return the processes from which ranks are forked; create them unless pytest's controller has."""
    return Nursery(_controllers_nursery)


_controllers_nursery: str | None = None


def share_nursery(folder: str | None) -> None:
    """Fork ranks from the processes in this folder, as other workers of pytest do."""
    global _controllers_nursery
    _controllers_nursery = folder


def _prepare(
    folder: Path, target: str | Callable[..., Any], args: Sequence[Any], teardown: bool
) -> list[str]:
    """Write the call to files; return the words after `python` that make it."""
    if not isinstance(target, str):
        target = f"{target.__module__}:{target.__qualname__}"
    (folder / "call.json").write_text(
        json.dumps({"target": target, "args": list(args), "teardown": teardown})
    )
    return [__file__, str(folder)]


def _result(folder: Path, rank: int, code: int | None) -> RankResult:
    value = folder / f"value.{rank}"
    return RankResult(
        rank,
        code,
        _text(folder / f"out.{rank}"),
        _text(folder / f"err.{rank}"),
        json.loads(value.read_text()) if value.exists() else None,
    )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


Codes = list["int | None"]


def _run_mpi(
    command: list[str], ranks: int, folder: Path, env: dict[str, str], timeout: float
) -> tuple[Codes, bool]:
    from mcr_plus.launch.job import run_job

    def keep(rank: int, stream: str, line: bytes) -> None:
        with (folder / f"{stream}.{rank}").open("ab") as file:
            file.write(line)

    outcome = run_job(command, ranks, via="mpi", sink=keep, env=env, timeout=timeout)
    for line in outcome.log if not outcome.worked else ():
        keep(0, "err", f"mpiexec: {line}\n".encode())
    # The launcher ends all ranks once one has left without MPI_Finalize, as ranks do that no longer call MPI:
    # it also ends ranks that have returned and are about to leave (MPICH always, Open MPI if one is late).
    returned = [(folder / f"value.{rank}").exists() for rank in range(ranks)]
    codes = [
        0 if code is None and done else code
        for code, done in zip([state.end for state in outcome.states], returned, strict=True)
    ]
    return codes, outcome.timed_out


def _run_ulfm(
    command: list[str], ranks: int, folder: Path, env: dict[str, str], timeout: float
) -> tuple[Codes, bool]:
    from mcr_plus.launch import commands, scratch
    from mcr_plus.launch.channels import Channels
    from mcr_plus.rendezvous.mpi_launcher import mpi_flavour

    def keep(rank: int, stream: str, line: bytes) -> None:
        with (folder / f"{stream}.{rank}").open("ab") as file:
            file.write(line)

    launcher = mpi_flavour()
    assert launcher is not None
    with scratch.create() as folders:
        # env: hides the program from mpi4py's runner, which would end all ranks when one raises
        words = commands.mpi_command(launcher, ["/usr/bin/env", *command], ranks)
        words[1:1] = ["--with-ft", "ulfm", "--rtos", "error-nonzero-status=0"]
        settings = commands.environment(env, folders, ranks, config=None, terminal=None)
        channels = Channels(folders.root, ranks, keep)
        with (folder / "err.0").open("ab") as log:
            launched = subprocess.Popen(
                words, env=settings, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            late = _wait(lambda: [state.end for state in channels.states], channels.pump, timeout)
            channels.drain()
            return [state.end for state in channels.states], late
        finally:
            _kill_group(launched)
            channels.close()


def _run_torch(
    command: list[str], ranks: int, folder: Path, env: dict[str, str], timeout: float, restarts: int
) -> tuple[Codes, bool]:
    from mcr_plus.rendezvous.store_connections import served

    store = served()
    found: Codes = []
    late = False
    for attempt in range(restarts + 1):
        settings = env | _torch_settings(ranks, store.port, attempt)
        processes = [_start_rank(command, rank, folder, settings) for rank in range(ranks)]

        def codes(processes: list[subprocess.Popen[bytes]] = processes) -> Codes:
            return [process.poll() for process in processes]

        try:
            late = _wait(codes, time.sleep, timeout, 0.0 if attempt < restarts else _GRACE_S)
            found = codes()
            if attempt == restarts or not any(found):
                break
        finally:
            for process in processes:
                _kill_group(process)
    return found, late


def _torch_settings(ranks: int, port: int, attempt: int) -> dict[str, str]:
    return {
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _start_rank(
    command: list[str], rank: int, folder: Path, settings: dict[str, str]
) -> subprocess.Popen[bytes]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    with (folder / f"out.{rank}").open("wb") as out, (folder / f"err.{rank}").open("wb") as err:
        return subprocess.Popen(
            command,
            env=settings | own,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


class Outsider:
    """A function that runs in a process beside the ranks of a job; see `outsider`."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self._folder, self._process = folder, process

    def result(self, timeout: float = 120) -> RankResult:
        """Wait for the function's end; raise `RanksFailed` if it raised, or has not ended in time."""
        late = _wait(lambda: [self._process.poll()], time.sleep, timeout)
        result = _result(self._folder, 0, self._process.poll())
        if late or (result.returncode or 0) > 0:
            raise RanksFailed("a process beside the job failed, or has not ended", [result])
        return result


@contextmanager
def outsider(target: str | Callable[..., Any], *args: Any) -> Iterator[Outsider]:
    """Run a top-level function in a process outside the job; kill the process at the end if it still runs."""
    folder = Path(tempfile.mkdtemp(prefix="mcr-test-"))
    command = nursery().command(_prepare(folder, target, args, teardown=False))
    process = _start_rank(command, 0, folder, nursery().environ)
    try:
        yield Outsider(folder, process)
    finally:
        _kill_group(process)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(
    codes: Callable[[], Codes], pause: Callable[[float], object], timeout: float, grace: float = _GRACE_S
) -> bool:
    """Wait for all; return True if time ran out. After a failure the others have `grace` seconds, no more."""
    deadline = time.monotonic() + timeout
    failed = 0
    while None in (now := codes()):
        if time.monotonic() > deadline:
            return True
        failures = sum(code not in (None, 0) for code in now)
        if failures > failed:
            failed, deadline = failures, min(deadline, time.monotonic() + grace)
        pause(_POLL_S)
    return False


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def own_rank() -> int:
    """Return the rank of this process by its launcher, before `init`."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
    return next(int(os.environ[name]) for name in names if name in os.environ)


def _main(folder: Path) -> None:
    """Be one rank: make the call, and save its value."""
    call = json.loads((folder / "call.json").read_text())
    os.environ[_FOLDER] = str(folder)
    sys.path += [str(Path(__file__).parents[1] / name) for name in ("", "support", "examples")]
    sys.path += [str(path) for path in sorted(Path(__file__).parents[2].glob("examples/*/"))]
    module, _, name = call["target"].partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(*call["args"])
    except Exception as error:
        # Under `mpi4py.run`, whose hook ends the other ranks, the rank ends as in any program.
        if call["teardown"] or "mpi4py.run" in sys.modules:
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        end_without_teardown(1)
        raise  # MPI still has to be ended
    written = folder / f".value.{own_rank()}"
    written.write_text(json.dumps(value))
    written.rename(folder / f"value.{own_rank()}")
    if _BY_MPICH:
        _wait_for_values(folder, int(os.environ["PMI_SIZE"]))
    elif not call["teardown"]:
        end_without_teardown()


def _wait_for_values(folder: Path, ranks: int) -> None:
    """Wait for a limited time until all ranks have returned: some may have failed."""
    wait_for_files(*(folder / f"value.{rank}" for rank in range(ranks)), patience=_OTHERS_S)


def has_come(name: str) -> None:
    """Note that this rank has reached the place `name`; see `wait_for_ranks`."""
    Path(os.environ[_FOLDER], f"come.{name}.{own_rank()}").touch()


def wait_for_ranks(name: str, count: int) -> None:
    """Wait until `count` ranks of the launch have reached the place `name`, without any library.

    After a library's barrier this rank is through, but others may still be inside: they would fail in it if
    this rank died then.
    """
    deadline = time.monotonic() + _GRACE_S
    while (found := len(list(Path(os.environ[_FOLDER]).glob(f"come.{name}.*")))) < count:
        assert time.monotonic() < deadline, f"{found} of {count} ranks have come to {name!r}"
        time.sleep(_POLL_S / 4)


def meet(name: str, count: int) -> None:
    """Wait until `count` ranks of the launch, including this one, have called this with the name."""
    has_come(name)
    wait_for_ranks(name, count)


def stop_until(name: str, count: int, signal_name: str) -> None:
    """Stop this process by SIGSTOP until `count` ranks have reached a place; then send KILL or CONT.

    A helper process sends the signal; it ends with this process, and in any case after a minute and a half.
    """
    wait = """
    n=0
    while [ $(ls -d "$1"* 2>/dev/null | wc -l) -lt $2 ] && [ $n -lt 900 ] && kill -0 $4 2>/dev/null
    do n=$((n+1)); sleep 0.1; done
    kill -$3 $4"""
    words = [f"{os.environ[_FOLDER]}/come.{name}.", str(count), signal_name, str(os.getpid())]
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with subprocess.Popen(["sh", "-c", wait, "sh", *words], start_new_session=True, **quiet):
        os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_files(*paths: Path, patience: float = _GRACE_S) -> None:
    """Wait until other ranks have written all these files, at most `patience` seconds; then continue."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and not all(path.exists() for path in paths):
        time.sleep(_POLL_S)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
