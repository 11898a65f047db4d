"""The elastic GPT example with ranks that are killed and come back, beside the undisturbed run.

    python benchmarks/bench_elastic.py --kills 3 --options '--steps 300'

Both runs are `mcr-plus run -n 3 --min-ranks 2 --restart-failed KILLS examples/gpt/train.py --elastic`. In one
of them a rank is killed (SIGKILL) from outside, at a random moment after a line of progress and with three
ranks in the job, rank 0 first. What a death costs the others is the time from the kill until they go on
without the rank, what they repeat included, and the pause in which they take it in again. The losses are on
held-out text, after the same tokens. The report goes to benchmarks/results/elastic_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final
from uuid import uuid4

import harness
import typer
from harness import HARDWARE, ROOT, Dated, Hardware

RANKS: Final = 3
_EXAMPLE: Final = str(ROOT / "examples" / "gpt" / "train.py")
_MARK: Final = "MCR_BENCH_ELASTIC"  # in the environment of the ranks
_HELD_OUT: Final = re.compile(r"held-out loss (\d+\.\d+)")
_WITHOUT: Final = re.compile(r"elastic: .* was lost .*; (\d) ranks go on with step (\d+)")
_JOINED: Final = re.compile(r"elastic: .*joined; 3 ranks go on with step (\d+) after (\d+\.\d+) s")
_PROGRESS: Final = re.compile(r"step +(\d+) +(\d) ranks .* (\d+\.\d+) s$")


@dataclass
class Death:
    """What a death has cost the ranks that were left, in seconds."""

    rank: int
    at: float  # of the monotonic clock
    step: int = 0
    without: float | None = None  # from the kill until they went on
    joined: float | None = None  # the pause in which it was taken in


@dataclass
class Course:
    """What came of a run."""

    loss: float
    step: float  # seconds, the mean between the first and the last line of progress
    deaths: list[Death]
    lines: list[str]


def process_of(mark: str, rank: int) -> int:
    """The process of a rank of the job with this mark."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().split(b"\0")
            around = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        is_rank = len(line) > 1 and line[1].decode(errors="replace") == _EXAMPLE
        if is_rank and {f"{_MARK}={mark}".encode(), f"RANK={rank}".encode()} <= set(around):
            return int(folder.name)
    raise SystemExit(f"rank {rank} has no process")


def train(words: list[str], victims: Iterator[int], restarts: int, chance: random.Random) -> Course:
    """Run the example, and kill one of `victims` whenever all ranks train."""
    mark = uuid4().hex
    options = ["-n", str(RANKS), "--min-ranks", "2", "--restart-failed", str(restarts)]
    command = [sys.executable, "-m", "mcr_plus.cli.main", "run", *options, _EXAMPLE, "--elastic", *words]
    deaths: list[Death] = []
    progress: list[tuple[int, float]] = []
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, _MARK: mark},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        for line in job.stdout:
            now = time.monotonic()
            lines.append(line.rstrip())
            if (lost := _WITHOUT.search(line)) and deaths:
                deaths[-1].without, deaths[-1].step = now - deaths[-1].at, int(lost[2])
            if (joined := _JOINED.search(line)) and deaths:
                deaths[-1].joined = float(joined[2])
            told = _PROGRESS.search(line)
            if told is None:
                continue
            progress.append((int(told[1]), float(told[3])))
            whole = int(told[2]) == RANKS and all(each.joined is not None for each in deaths)
            victim = next(victims, None) if whole else None
            if victim is not None:
                time.sleep(chance.uniform(0, 0.5))
                os.kill(process_of(mark, victim), signal.SIGKILL)
                deaths.append(Death(victim, time.monotonic()))
    found = [match for line in lines if (match := _HELD_OUT.search(line))]
    if job.returncode != 0 or not found:
        raise SystemExit("\n".join([*lines, f"status {job.returncode}"]))
    (first, began), (last, ended) = progress[0], progress[-1]
    return Course(float(found[0][1]), (ended - began) / (last - first), deaths, lines)


def main(
    kills: Annotated[int, typer.Option(min=0, help="Ranks to kill, one after another.")] = 3,
    options: Annotated[str, typer.Option(help="More options of the example.")] = "",
    seed: int = 0,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    """Measure and write the report."""
    words = [*shlex.split(options), "--seed", str(seed)]
    chance, load = random.Random(seed), os.getloadavg()[1]
    whole = train(words, iter(()), 0, chance)
    killed = train(words, iter([rank % RANKS for rank in range(kills)]), kills, chance)
    head = ["what", "undisturbed", f"deaths: {len(killed.deaths)}", "ratio"]
    rows = [
        ["held-out loss", f"{whole.loss:.4f}", f"{killed.loss:.4f}", f"{killed.loss / whole.loss:.4f}"],
        ["step, s", f"{whole.step:.2f}", f"{killed.step:.2f}", f"{killed.step / whole.step:.2f}"],
    ]
    harness.show(head, rows)
    tables = [harness.markdown(head, rows)]
    head = ["killed", "went on with step", "until the others went on, s", "pause for its return, s"]
    rows = [
        [f"rank {each.rank}", str(each.step), *(
            "never" if value is None else f"{value:.2f}" for value in (each.without, each.joined)
        )]
        for each in killed.deaths
    ]  # fmt: skip
    harness.show(head, rows)
    tables.append(harness.markdown(head, rows))
    said = [f"    {line}" for line in killed.lines if line.startswith(("elastic:", "mcr-plus:"))]
    note = f"the load of the machine was {load:.1f} at first; steps are means, with what losses have cost"
    parts = [*tables, "What was said:", "\n".join(said)]
    text = harness.page("The elastic GPT example and lost ranks", harness.command(), note, *parts)
    harness.write(text, output, f"elastic_{hardware}")


run = harness.program(main)

if __name__ == "__main__":
    run()
