"""What comes out of any example's job: losses, its speed, and where the time went.

What is called the training loss is a mean over ranks and over `WINDOW` steps, the first or the last ones.
"""

from __future__ import annotations

import json
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mcr_plus.observe.record import Log
from mcr_plus.observe.record_table import CommunicationRow, table_text

STYLE: Any = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "title_justify": "left"}
WINDOW = 10  # steps at the start and at the end whose mean loss is reported
RECORDED = 2000  # steps whose communication is noted, so that a long run does not fill the memory
Observer = Callable[[float, int, float, float], None]  # fraction done, step, loss, things/s


# --- one run ----------------------------------------------------------------------------------------


def ends(series: NDArray[np.float64]) -> tuple[float, float]:
    """The means over the first steps and over the last ones."""
    steps = window(len(series))
    return float(series[:steps].mean()), float(series[-steps:].mean())


def window(steps: int) -> int:
    """How many of a run's first and last steps a mean is taken over."""
    return max(1, min(WINDOW, steps // 2))


@dataclass(frozen=True)
class Outcome:
    """What came out of training, the same on every rank but for the times and the log."""

    ranks: int
    losses: NDArray[np.float64]  # of the global batch, by step
    things: float  # samples or tokens of the median step, on all ranks together
    seconds: float  # spent training
    step_seconds: float  # of this rank's median step
    communication: list[CommunicationRow]
    log: Log | None

    @property
    def first(self) -> float:
        return ends(self.losses)[0]

    @property
    def last(self) -> float:
        return ends(self.losses)[1]

    @property
    def speed(self) -> float:
        """Samples or tokens per second of the median step."""
        return self.things / self.step_seconds

    def document(self, title: str) -> dict[str, Any]:
        """The report for programs."""
        return {
            "transport": title,
            "ranks": self.ranks,
            "steps": len(self.losses),
            "seconds": self.seconds,
            "step_seconds": self.step_seconds,
            "train_loss": {"first": self.first, "last": self.last, "steps": self.losses.tolist()},
            "communication": [vars(row) for row in self.communication],
        }


def report_outcome(outcome: Outcome, facts: Sequence[tuple[str, str]], unit: str, console: Console) -> None:
    """Print how well it learned, further `facts` with their names, the speed, and where time went."""
    steps = len(outcome.losses)
    about = f"means of the first and the last {window(steps)} of {steps} steps"
    trained = f"{outcome.first:.4f} → {outcome.last:.4f}, {about}"
    ranks = f"{outcome.ranks} rank{'' if outcome.ranks == 1 else 's together'}"
    timed = f"{outcome.speed:,.0f} {unit}/s on {ranks}, in the median of {steps} steps"
    console.print()
    for name, text in (("train loss", trained), *facts, ("speed", timed)):
        console.print(f"{name:14}{text}")
    console.print()
    if outcome.communication:
        table = table_text("Communication of rank 0 while training", outcome.communication)
        console.print(table, markup=False, highlight=False, soft_wrap=True)


def known(value: float) -> float | None:
    """A number that JSON can hold, None for nan."""
    return None if math.isnan(value) else value


def write_json(content: dict[str, Any], path: Path) -> None:
    text = json.dumps(content, indent=1) + "\n"
    if path == Path("-"):
        sys.stdout.write(text)
    else:
        path.write_text(text)


# --- while it runs ----------------------------------------------------------------------------------


class Monitor:
    """A progress bar on a terminal, and elsewhere a line at every tenth; `unit` is what is counted per s.

    The loss shown is that of rank 0's part of the last steps, as many as the training loss is a mean of.
    """

    def __init__(self, console: Console, title: str, unit: str) -> None:
        self.console = console
        self.title = title
        self.unit = unit
        self.tenth = 0
        self.recent: deque[float] = deque(maxlen=WINDOW)
        status = TextColumn(
            f"step {{task.fields[step]}} at {{task.fields[rate]}} {unit}/s  "
            "rank 0's loss {task.fields[loss]}"
        )
        columns = (TextColumn(title), BarColumn(), status, TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task(title, total=1.0, step=0, loss="-", rate="-")

    def __enter__(self) -> Observer:
        self.bar.start()
        return self.update

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, fraction: float, step: int, value: float, rate: float) -> None:
        self.recent.append(value)
        loss_text, rate_text = f"{mean(self.recent):.4f}", f"{rate:,.0f}"
        self.bar.update(self.task, completed=fraction, step=step, loss=loss_text, rate=rate_text)
        if not self.console.is_terminal and int(10 * fraction) > self.tenth:
            self.tenth = int(10 * fraction)
            place = f"{self.title}  {fraction:4.0%}  step {step} at {rate_text} {self.unit}/s"
            self.console.print(f"{place}  rank 0's loss {loss_text}")
