"""`mcr-plus run`: start ranks, show what they print, and say at the end what went wrong."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from mcr_plus.errors import LaunchError
from mcr_plus.launch.channels import Stream, signal_name
from mcr_plus.launch.job import Outcome, Via, run_job

_FAILED = 1


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    via: Via,
    config: Path | None = None,
    tag_output: bool = False,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run `ranks` ranks of `command` (a program and its arguments) on this host.

    Returns 0 if every rank ended with 0, 128 + the signal number after Ctrl-C or SIGTERM, and else 1,
    with the error of the rank that failed first as the last thing on stderr.
    """
    if ranks < 1:
        raise LaunchError(f"ranks: expected at least 1, got {ranks}")
    printer = _Printer(sys.stdout.buffer, sys.stderr.buffer, tag_output)
    terminal = None if tag_output else _terminal()
    outcome = run_job(command, ranks, via=via, sink=printer, config=config, terminal=terminal, env=env)
    if outcome.worked and not printer.broken:
        return 0
    print("\n".join(_explain(outcome, via)), file=sys.stderr, flush=True)
    return _FAILED if outcome.interrupted is None else 128 + outcome.interrupted


class _Printer:
    """Writes whole lines, so that lines of different ranks never run into each other."""

    def __init__(self, out: BinaryIO, err: BinaryIO, tagged: bool) -> None:
        self._streams: dict[Stream, BinaryIO] = {"out": out, "err": err}
        self._tagged = tagged
        self.broken = False

    def __call__(self, rank: int, stream: Stream, line: bytes) -> None:
        target = self._streams[stream]
        try:
            target.write(f"[{rank}] ".encode() + line if self._tagged else line)
            target.flush()
        except BrokenPipeError:  # `mcr-plus run … | head`
            self._stop()

    def _stop(self) -> None:
        if not self.broken:
            self.broken = True
            os.kill(os.getpid(), signal.SIGTERM)


def _terminal() -> str | None:
    """The terminal on stdout, if there is one: rank 0 gets it, so that its progress bars work."""
    try:
        return os.ttyname(sys.stdout.fileno())
    except (OSError, ValueError):
        return None


def _explain(outcome: Outcome, via: Via) -> list[str]:
    if outcome.interrupted is not None:
        return [f"mcr-plus: stopped by {signal_name(outcome.interrupted)}; all ranks ended"]
    if (culprit := outcome.culprit) is not None:
        head = f"mcr-plus: rank {culprit.rank} of {len(outcome.states)} {culprit.ending()}"
        words = culprit.last_words()
        return [f"{head}:", *(f"  {line}" for line in words)] if words else [f"{head}, without a word"]
    silent = ", ".join(str(state.rank) for state in outcome.states if state.code is None)
    program = "mpiexec" if via == "mpi" else "the elastic agent"
    head = f"mcr-plus: {program} ended with status {outcome.status} before rank {silent} did"
    return [f"{head}; its last lines:", *(f"  {line}" for line in outcome.log)]
