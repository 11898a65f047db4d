"""The pipes between `mcr-plus run` and its ranks: output by rank, and how each rank ended."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Stream = Literal["out", "err"]
Sink = Callable[[int, Stream, bytes], None]

_CHUNK = 65536
_REMEMBERED_LINES = 60
_SHOWN_LINES = 20
_TRACEBACK = "Traceback (most recent call last)"
_TORCH_TAG = re.compile(r"^\[rank\d+\]: ")  # torch.distributed puts it before each line of a traceback
_ABORT = re.compile(r"Abort\((-?\d+)\) on node \d+ ")
_RUNNER_FRAMES = re.compile(r'  File "(?:<frozen runpy>|.*[/\\](?:runpy|mpi4py[/\\]\w+)\.py)", line \d+')


@dataclass(slots=True)
class RankState:
    """What is known of one rank."""

    rank: int
    pid: int | None = None
    code: int | None = None  # exit status, or minus the signal that killed it
    ended: float = 0.0
    raised: float | None = None  # when the last traceback began
    aborted: int | None = None  # what MPICH's MPI_Abort said: it kills before the rank can exit
    errors: deque[bytes] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_LINES))

    @property
    def end(self) -> int | None:
        """Exit status or minus a signal, None while the rank runs."""
        return self.code if self.aborted is None else self.aborted

    @property
    def failed(self) -> bool:
        """Ended, and not with 0."""
        return self.end not in (None, 0)

    @property
    def failure_time(self) -> float:
        """A rank that raises may take longer to leave than a peer that fell over it."""
        return self.ended if self.raised is None else self.raised

    def ending(self) -> str:
        """`exited with status 3` or `was killed by SIGKILL`."""
        if self.end is None:
            return "did not end"
        if self.end >= 0:
            return f"exited with status {self.end}"
        return f"was killed by {signal_name(-self.end)}"

    def last_words(self) -> list[str]:
        """The traceback the rank ended with, or else its last lines on stderr."""
        lines = [_TORCH_TAG.sub("", line.decode(errors="replace").rstrip("\n")) for line in self.errors]
        lines = [line for line in lines if not _ABORT.match(line)]
        starts = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
        return _without_runner(lines[starts[-1] :]) if starts else lines[-_SHOWN_LINES:]

    def note_error(self, line: bytes) -> None:
        """Remember a line of stderr and what it tells about the end of the rank."""
        self.errors.append(line)
        text = line.decode(errors="replace")
        if _TRACEBACK in text:
            self.raised = time.monotonic()
        elif (abort := _ABORT.match(text)) is not None:
            self.aborted, self.ended = int(abort[1]), time.monotonic()


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(slots=True)
class Channel:
    """One named pipe, read by line."""

    descriptor: int
    rank: int
    stream: Stream | None  # None: the channel on which ranks report how they ended
    partial: bytes = b""

    def lines(self) -> list[bytes]:
        """Complete lines that have come in since; empty if none has."""
        try:
            chunk = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return []
        *whole, self.partial = (self.partial + chunk).split(b"\n")
        return [line + b"\n" for line in whole]


class Channels:
    """All pipes of a job. Not thread-safe."""

    def __init__(self, folder: Path, ranks: int, sink: Sink) -> None:
        """Make the pipes of `ranks` ranks in `folder`; lines go to `sink`."""
        self.states = [RankState(rank) for rank in range(ranks)]
        self._sink = sink
        self._selector = selectors.DefaultSelector()
        self._open(folder / "status", 0, None)
        for rank in range(ranks):
            self._open(folder / f"out.{rank}", rank, "out")
            self._open(folder / f"err.{rank}", rank, "err")

    def pump(self, timeout: float) -> bool:
        """Pass on what has come in; wait up to `timeout` seconds for something. False if nothing came."""
        ready = self._selector.select(timeout)
        for key, _ in ready:
            self._pass_on(key.data)
        return bool(ready)

    def drain(self) -> None:
        """Pass on all there is, with what stands behind the last line end."""
        while self.pump(0):
            pass
        for key in list(self._selector.get_map().values()):
            channel: Channel = key.data
            if channel.partial and channel.stream is not None:
                self._line(channel.rank, channel.stream, channel.partial + b"\n")
                channel.partial = b""

    def close(self) -> None:
        """Close the pipes; their files go with the job's folder."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _open(self, path: Path, rank: int, stream: Stream | None) -> None:
        os.mkfifo(path, 0o600)
        # read and write: a pipe whose only writer has gone would be readable for ever
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(descriptor, selectors.EVENT_READ, Channel(descriptor, rank, stream))

    def _pass_on(self, channel: Channel) -> None:
        for line in channel.lines():
            if channel.stream is None:
                self._status(line)
            else:
                self._line(channel.rank, channel.stream, line)

    def _line(self, rank: int, stream: Stream, line: bytes) -> None:
        if stream == "err":
            self.states[rank].note_error(line)
        self._sink(rank, stream, line)

    def _status(self, line: bytes) -> None:
        report = json.loads(line)
        state = self.states[report["rank"]]
        state.pid, state.code = report["pid"], report["code"]
        if state.code is not None:
            state.ended = report["time"]


def _without_runner(lines: list[str]) -> list[str]:
    """A traceback without the frames of `python -m mpi4py`, which are none of the user's."""
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
