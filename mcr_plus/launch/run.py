"""`mcr-plus run`: start ranks, print their output, and summarize their failures at the end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

from mcr_plus.core.environment import whole_tracebacks
from mcr_plus.errors import LaunchError
from mcr_plus.launch.channels import RankState, Stream, signal_name
from mcr_plus.launch.commands import Supervised
from mcr_plus.launch.job import JobOutcome, Via, run_job

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

    Returns 0 if every rank ended with 0, 128 + the signal number after Ctrl-C or SIGTERM, 141 if its output
    was closed (`mcr-plus run … | head`), and otherwise 1. If ranks failed, their errors are printed at the
    end of stderr, beginning with the rank that failed first. An exception that several ranks raised is
    printed once; with MCR_TRACEBACK=1, each rank prints its own full traceback. With `via=Supervised(…)`, 0
    means that enough ranks ended with 0, and each failure gets a line when it happens.
    """
    if ranks < 1:
        raise LaunchError(f"ranks: expected at least 1, got {ranks}")
    printer = _Printer(sys.stdout.buffer, sys.stderr.buffer, tag_output)
    terminal = None if tag_output else _terminal()
    merge = not whole_tracebacks()
    outcome = run_job(
        command, ranks, via=via, sink=printer, config=config, terminal=terminal, env=env, merge_errors=merge
    )
    if printer.broken:
        _print_error("mcr-plus: its output was closed; all ranks ended")
        return 128 + signal.SIGPIPE
    if outcome.worked:
        return 0
    for line in explanation(outcome, via):
        _print_error(line)
    return _FAILED if outcome.interrupted is None else 128 + outcome.interrupted


def _print_error(line: str) -> None:
    """Print a line on stderr unless stderr is closed; on a terminal, `mcr-plus:` is coloured."""
    if sys.stderr.isatty():
        from rich.console import Console  # lazy: only failed jobs need it
        from rich.text import Text

        text = Text(line)
        text.highlight_regex("^mcr-plus:", "bold red")
        Console(stderr=True).print(text, soft_wrap=True)
    else:
        try:
            print(line, file=sys.stderr, flush=True)
        except BrokenPipeError:  # `mcr-plus run … 2>&1 | head`
            _discard(sys.stderr)


def _discard(stream: IO[Any]) -> None:
    """Redirect a closed stream to /dev/null; otherwise Python fails when it flushes the stream at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _Printer:
    """Writes whole lines, so that lines of different ranks are never mixed."""

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
            _discard(target)
            self._stop()

    def _stop(self) -> None:
        if not self.broken:
            self.broken = True
            os.kill(os.getpid(), signal.SIGTERM)


def _terminal() -> str | None:
    """Return the terminal on stdout, if any; rank 0 inherits it so that its progress bars work."""
    try:
        return os.ttyname(sys.stdout.fileno())
    except (OSError, ValueError):
        return None


def explanation(outcome: JobOutcome, via: Via) -> list[str]:
    """Return the lines of the message about a failed job, beginning with the rank that failed first."""
    if outcome.interrupted is not None:
        return [f"mcr-plus: stopped by {signal_name(outcome.interrupted)}; all ranks ended"]
    # Ranks that ended with a killed supervisor have not failed. A supervisor that has reported its verdict
    # ends the running ranks.
    failed = [state for state in outcome.states if state.failed]
    ended = all(state.end == -signal.SIGTERM and state.report is None for state in failed)
    if outcome.culprit is not None and not (outcome.supervised and (outcome.status < 0 or ended)):
        first, *others = _failures(outcome, outcome.culprit)
        return [
            *_message(first, outcome),
            *(line for alike in others for line in _message(alike, outcome, then=True)),
        ]
    silent = ", ".join(str(state.rank) for state in outcome.states if state.code is None)
    if isinstance(via, Supervised):
        if outcome.status == 1 and not outcome.log:
            return []  # the verdict has been printed
        program = "the supervisor"
    else:
        program = "mpiexec" if via == "mpi" else "the elastic agent"
    head = f"mcr-plus: {program} ended with status {outcome.status} before rank {silent} did"
    if via == "mpi" and (done := [state for state in outcome.states if state.code == 0]):
        last = max(done, key=lambda state: state.ended)  # when a rank fails, hydra kills the others silently
        head += f", after rank {last.rank} had exited with status 0, perhaps without MPI_Finalize"
    return [f"{head}; its last lines:", *(f"  {line}" for line in outcome.log)]


def _failures(outcome: JobOutcome, culprit: RankState) -> list[list[RankState]]:
    """Return the failed ranks, grouped by failure; the culprit's group comes first.

    Other ranks without a report are omitted: they have nothing but their output on stderr.
    """
    alike: dict[object, list[RankState]] = {culprit.kind_of_failure(): [culprit]}
    for state in outcome.states:
        if state is not culprit and state.report is not None:
            alike.setdefault(state.kind_of_failure(), []).append(state)
    return list(alike.values())


def _message(alike: Sequence[RankState], outcome: JobOutcome, *, then: bool = False) -> list[str]:
    """Return the message about ranks with the same failure, with the first rank's exception.

    `then`: these ranks failed after others, so the message omits the signal and the traceback's frames.
    """
    example, several = alike[0], len(alike) > 1
    ranks = _ranks(state.rank for state in alike)
    head = f"mcr-plus: {ranks} of {len(outcome.states)} {'then ' * then}failed"
    if not then and not several:
        head += f": it {example.ending()}"
    words = [f"  {line}" for line in (example.exception() if then else example.last_words())]
    if not words:
        return [f"{head}, without a word"]
    places: dict[tuple[str, str], list[int]] = {}
    for state in alike:
        if (place := state.place()) is not None:
            places.setdefault(place, []).append(state.rank)
    lines = []
    for (location, source), at in places.items():
        lines += [f"  {location}{f' ({_ranks(at)})' if len(places) > 1 else ''}:", f"      {source}"]
    more = lines or (then and len(words) < len(example.traceback()))
    return [f"{head} (MCR_TRACEBACK=1 shows more):" if more else f"{head}:", *lines, *words]


def _ranks(numbers: Iterable[int]) -> str:
    """Format ranks: `rank 3`, `ranks 0 and 1`, `ranks 0 to 7`."""
    ranks = sorted(numbers)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
