"""Pipes from the ranks to `mcr-plus run`: the output and the exit status of each rank."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Stream = Literal["out", "err"]
Purpose = Literal["out", "err", "status", "error"]
Sink = Callable[[int, Stream, bytes], None]

_CHUNK = 65536
_REMEMBERED_LINES = 500  # enough for a dump of faulthandler with several threads
_SHOWN_LINES = 20
_PATIENCE_S = 10.0  # an exception is shown once its rank has failed to exit for this long
_TRACEBACK = "Traceback (most recent call last)"
_DUMP = "Fatal Python error: "  # printed by faulthandler after a fatal signal
_TORCH_TAG = re.compile(r"^\[rank\d+\]: ")  # prefix of torch.distributed on each line of a traceback
_ABORT = re.compile(r"Abort\((-?\d+)\) on node \d+ ")
# Messages of Open MPI 5.0: with the rank if the communicator was the world, always with the process.
_ABORTS = re.compile(
    r"MPI_ABORT was invoked on rank (?:(\d+) in communicator MPI_COMM_WORLD|\d+ in communicator .*)\s+"
    r"(?:Proc: \[\[\d+,\d+\],(\d+)\]\s+Errorcode:|with errorcode) (-?\d+)"
)
_LEFT_MPI = re.compile(r"due to process rank (\d+)[^.]*?\bexiting\s+improperly")
_RUNNERS = r"runpy|mpi4py[/\\]\w+|mcr_plus[/\\]launch[/\\]uncaught"
_RUNNER_FRAMES = re.compile(rf'  File "(?:<frozen runpy>|.*[/\\](?:{_RUNNERS})\.py)", line \d+')


@dataclass(slots=True)
class RankState:
    """State of one process of a rank, as reported through its pipes."""

    rank: int
    pid: int | None = None
    code: int | None = None  # exit status, or minus the signal that killed it
    ended: float = 0.0
    raised: float | None = None  # time when the last traceback began
    report: Mapping[str, Any] | None = None  # an uncaught exception, see `mcr_plus.launch.uncaught`
    shown: bool = False  # the report has been printed
    # Argument of MPI_Abort. Stored because MPICH kills the rank before it exits, and an exit status has only
    # 8 bits.
    aborted: int | None = None
    left_mpi: bool = False  # the rank ended without MPI_Finalize, so Open MPI's launcher ends the other ranks
    errors: deque[bytes] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_LINES))

    @property
    def end(self) -> int | None:
        """Exit status, or minus a signal; None while the rank runs."""
        return self.code if self.aborted is None else self.aborted

    @property
    def failed(self) -> bool:
        """True if the rank has ended with a status other than 0, or has aborted with any status."""
        return self.aborted is not None or self.end not in (None, 0)

    @property
    def failure_time(self) -> float:
        """Time of the traceback, or of the exit, which may come after exits of peers that failed later."""
        return self.ended if self.raised is None else self.raised

    def ending(self) -> str:
        """End of the rank: `exited with status 3`, `was killed by SIGKILL` or `ended with an exception`."""
        if self.end is None:
            return "did not end"
        if self.report is not None and self.end in (-signal.SIGTERM, -signal.SIGINT):
            # The launcher terminated this rank while it was exiting, because another rank had failed, or the
            # exception is a KeyboardInterrupt.
            return "ended with an exception"
        if self.aborted is not None and self.aborted % 256 == 0:
            return f"called MPI_Abort with {self.aborted}, of which an exit status keeps 0"
        if self.end >= 0:
            return f"exited with status {self.end}{' without MPI_Finalize' * self.left_mpi}"
        return f"was killed by {signal_name(-self.end)}"

    def headline(self) -> str:
        """Failure in one line: a reported exception with its place, otherwise the `ending`."""
        if self.report is None:
            return self.ending()
        place = self.report["place"]
        return f"ended with {self.report['error']}{'' if place is None else f' ({place})'}"

    def last_words(self) -> list[str]:
        """Return the exception or traceback that ended the rank; without one, its last lines on stderr.

        A dump of faulthandler, already complete on stderr, is reduced to the error and its innermost frame.
        """
        if self.report is not None:
            return self._reported()
        lines = [_TORCH_TAG.sub("", line.decode(errors="replace").rstrip("\n")) for line in self.errors]
        lines = [line for line in lines if not _ABORT.match(line)]
        starts = [index for index, line in enumerate(lines) if line.startswith((_TRACEBACK, _DUMP))]
        if not starts:
            return lines[-_SHOWN_LINES:]
        words = lines[starts[-1] :]
        return _summary(words) if words[0].startswith(_DUMP) else _without_runner(words)

    def exception(self) -> list[str]:
        """Return `last_words` without the frames of a traceback."""
        words = self.last_words()
        if not words or not words[0].startswith(_TRACEBACK):
            return words
        frames = [index for index, line in enumerate(words) if line.startswith("  ")]
        return words[frames[-1] + 1 :] or words if frames else words

    def kind_of_failure(self) -> object:
        """Return a key that is equal for ranks with the same failure.

        The words of an OrderMismatch are sorted, because ranks name the two operations in either order.
        """
        if self.report is None:
            return self.rank
        text = self.report["text"]
        if text is None:
            return tuple(self.traceback())
        return tuple(sorted(re.findall(r"\w+", text))) if text.startswith("OrderMismatch") else text

    def place(self) -> tuple[str, str] | None:
        """Return the user's file and line that raised an error of ours, and the text of that line."""
        if self.report is None or self.report["text"] is None or self.report["place"] is None:
            return None
        return self.report["place"], self.report["source"] or ""

    def _reported(self) -> list[str]:
        assert self.report is not None
        if self.report["text"] is not None:
            return str(self.report["text"]).splitlines()
        if self.shown:
            place = self.report["place"]
            return [f"{self.report['error']}{'' if place is None else f' ({place})'}; its traceback is above"]
        return self.traceback()

    def traceback(self) -> list[str]:
        """Return the lines of a reported traceback, without frames of the program's runner."""
        return [] if self.report is None else _without_runner(self.report["traceback"])

    def note_report(self, report: Mapping[str, Any]) -> None:
        """Store the uncaught exception that the rank has reported."""
        self.report, self.raised = report, report["time"]
        self.shown = report.get("shown", False)

    def is_slow_to_end(self) -> bool:
        """Return whether the rank still runs long after its exception, e.g. because of another thread."""
        if self.report is None or self.shown or self.end is not None or self.raised is None:
            return False
        return time.monotonic() - self.raised > _PATIENCE_S

    def note_error(self, line: bytes) -> None:
        """Store a line of stderr, and the start of a traceback or an abort that it announces."""
        self.errors.append(line)
        text = line.decode(errors="replace")
        if _TRACEBACK in text:
            self.raised = time.monotonic()
        elif (abort := _ABORT.match(text)) is not None:
            self.aborted, self.ended = int(abort[1]), time.monotonic()


def signal_name(number: int) -> str:
    """Return the name of a signal: `SIGKILL` for 9, `signal 40` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(slots=True)
class NamedPipe:
    """One named pipe, read line by line."""

    descriptor: int
    rank: int
    purpose: Purpose  # "status": exit statuses of ranks; "error": an uncaught exception
    partial: bytes = b""

    def lines(self) -> list[bytes]:
        """Return the complete lines that have arrived; empty without any."""
        try:
            chunk = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return []
        *whole, self.partial = (self.partial + chunk).split(b"\n")
        return [line + b"\n" for line in whole]


class Channels:
    """All pipes of a job. Not thread-safe."""

    def __init__(self, folder: Path, ranks: int, sink: Sink, *, merge_errors: bool = False) -> None:
        """Create the pipes of `ranks` ranks in `folder`; lines go to `sink`.

        `merge_errors`: also create a pipe per rank for uncaught exceptions.
        """
        self.states = [RankState(rank) for rank in range(ranks)]
        self._sink = sink
        self._early: dict[int, Mapping[str, Any]] = {}  # reports of processes whose start is still unread
        self._selector = selectors.DefaultSelector()
        self._open(folder / "status", 0, "status")
        for rank in range(ranks):
            self._open(folder / f"out.{rank}", rank, "out")
            self._open(folder / f"err.{rank}", rank, "err")
            if merge_errors:
                self._open(folder / f"error.{rank}", rank, "error")

    def pump(self, timeout: float) -> bool:
        """Forward the lines that arrive within `timeout` seconds; return False if there were none."""
        ready = self._selector.select(timeout)
        for key, _ in ready:
            self._pass_on(key.data)
        for state in self.states:
            if state.is_slow_to_end():
                self._show(state)
        return bool(ready)

    def note_ends(self, text: str) -> None:
        """Store the rank that Open MPI's launcher blames for ending the others."""
        for where, process, status in _ABORTS.findall(text):
            rank = int(process or where or len(self.states))
            if rank < len(self.states) and self.states[rank].aborted is None:
                self.states[rank].aborted = int(status)
        for rank in map(int, _LEFT_MPI.findall(text)):
            if rank < len(self.states):
                self.states[rank].left_mpi = True

    def drain(self) -> None:
        """Forward all remaining lines, including incomplete last ones."""
        while self.pump(0):
            pass
        for channel in self._channels():
            self._complete(channel)

    def close(self) -> None:
        """Close the pipes; their files are removed with the job's folder."""
        for channel in self._channels():
            os.close(channel.descriptor)
        self._selector.close()

    def _channels(self) -> list[NamedPipe]:
        return [key.data for key in self._selector.get_map().values()]

    def _open(self, path: Path, rank: int, purpose: Purpose) -> None:
        os.mkfifo(path, 0o600)
        # Also opened for writing: without any writer, the pipe would always be readable (at its end).
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(descriptor, selectors.EVENT_READ, NamedPipe(descriptor, rank, purpose))

    def _pass_on(self, channel: NamedPipe) -> None:
        for line in channel.lines():
            if channel.purpose == "status":
                self._status(line)
            elif channel.purpose == "error":
                self._report(channel.rank, line)
            else:
                self._line(channel.rank, channel.purpose, line)

    def _complete(self, channel: NamedPipe) -> None:
        """Forward an incomplete last line; an incomplete report is dropped."""
        if channel.partial and channel.purpose in ("out", "err"):
            self._line(channel.rank, channel.purpose, channel.partial + b"\n")
        channel.partial = b""

    def _report(self, rank: int, line: bytes) -> None:
        """Store the report of an uncaught exception with the process that raised it."""
        try:
            report: dict[str, Any] = json.loads(line)
        except ValueError:
            return  # the process was killed while it wrote
        state = self.states[rank]
        if report["pid"] == state.pid:
            state.note_report(report)
        else:
            self._early[report["pid"]] = report

    def _show(self, state: RankState) -> None:
        """Print the exception of a rank that does not end, once for all ranks with the same failure."""
        state.shown = True
        kind, trace = state.kind_of_failure(), state.traceback()
        if not trace or any(
            each.shown and each.kind_of_failure() == kind for each in self.states if each is not state
        ):
            return
        head = f"mcr-plus: rank {state.rank} has raised this and has not ended for {_PATIENCE_S:g} s:"
        for line in [head, *(f"  {line}" for line in trace)]:
            self._sink(state.rank, "err", f"{line}\n".encode(errors="backslashreplace"))

    def _line(self, rank: int, stream: Stream, line: bytes) -> None:
        if stream == "err":
            self.states[rank].note_error(line)
        self._sink(rank, stream, line)

    def _status(self, line: bytes) -> None:
        report = json.loads(line)
        state = self.states[report["rank"]]
        if "verdict" in report:
            self._note_verdict(state, report)
        elif report["code"] is None:
            state.pid = report["pid"]
            if (early := self._early.pop(report["pid"], None)) is not None:
                state.note_report(early)
        else:
            state.code, state.ended = report["code"], report["time"]

    def _note_verdict(self, state: RankState, verdict: Mapping[str, Any]) -> None:
        """Show the supervisor's decision about a failed rank; a restarted rank gets a new state."""
        for channel in self._channels():
            if channel.rank == state.rank and channel.purpose != "status":
                # Forward the output that is left: a single read drains the pipe.
                self._pass_on(channel)
                self._complete(channel)
        if state.code is None:  # the wrapper was killed together with the rank
            state.code, state.ended = verdict["code"], verdict["time"]
        line = f"mcr-plus: rank {state.rank} {state.headline()}; {verdict['verdict']}\n"
        self._sink(state.rank, "err", line.encode(errors="backslashreplace"))
        if verdict["again"]:
            self.states[state.rank] = RankState(state.rank)


def _summary(dump: Sequence[str]) -> list[str]:
    """Return the error in a dump of faulthandler, and the innermost frame of the thread that caused it."""
    current = (index for index, line in enumerate(dump) if line.startswith("Current thread"))
    at = next(current, len(dump)) + 1
    return [f"{dump[0]} (its dump is above)", *(line for line in dump[at : at + 1] if line.startswith("  "))]


def _without_runner(lines: list[str]) -> list[str]:
    """Return a traceback without frames of the program's runner, such as `python -m mpi4py`."""
    kept: list[str] = []
    in_runner = False
    for line in lines:
        if line.startswith('  File "'):
            in_runner = _RUNNER_FRAMES.match(line) is not None
        elif not line.startswith("    "):
            in_runner = False
        if not in_runner:
            kept.append(line)
    return kept
