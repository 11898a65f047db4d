"""What comes out of any example's job: losses, where the time went, and the same job on every library."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from libraries import Log, Record
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mcr_plus.observe.record import bus_factor

STYLE: Any = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "title_justify": "left"}
WINDOW = 10  # steps at the start and at the end whose mean loss is reported
RECORDED = 2000  # steps whose communication is noted, so that a long run does not fill the memory
Observer = Callable[[float, int, float, float], None]  # fraction done, step, loss, things/s


# --- one run ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommunicationRow:
    """All operations of one kind, tag and backend in the training steps of rank 0."""

    kind: str
    tag: str
    backend: str
    count: int
    bytes: int
    wire: int  # bytes that each rank sends over a wire, by the formulas of nccl-tests; about, if sizes differ
    p50_us: float
    share: float  # of the step time; what overlaps with computing or other operations counts in full
    waited: float  # share of the step time in which the program waited for it


def communication(log: Log, seconds: float) -> list[CommunicationRow]:
    """Sum up by kind, tag and backend what was recorded in `seconds` of training, the longest first."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in log.records:
        groups.setdefault((record.kind, record.tag or "", record.backend), []).append(record)
    rows = []
    for key, group in groups.items():
        times = [record.t_done - record.t_issue for record in group]
        total = sum(record.bytes for record in group)
        wire = round(sum(record.wire_bytes * bus_factor(record.kind, record.ranks) for record in group))
        waited = sum(record.waited for record in group) / seconds
        p50_us, share = median(times) * 1e6, sum(times) / seconds
        rows.append(CommunicationRow(*key, len(group), total, wire, p50_us, share, waited))
    return sorted(rows, key=lambda row: -row.waited)


def ends(series: NDArray[np.float64]) -> tuple[float, float]:
    """The means over the first steps and over the last ones."""
    window = max(1, min(WINDOW, len(series) // 2))
    return float(series[:window].mean()), float(series[-window:].mean())


@dataclass(frozen=True)
class Outcome:
    """What came out of training, the same on every rank but for the times and the log."""

    ranks: int
    losses: NDArray[np.float64]  # of the global batch, by step
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


def report_outcome(outcome: Outcome, facts: Sequence[tuple[str, str]], speed: str, console: Console) -> None:
    """Print how well it learned, further `facts` with their names, how fast it was, and where time went."""
    trained = f"{outcome.first:.4f} → {outcome.last:.4f} over {len(outcome.losses)} steps"
    timed = f"{speed} over {outcome.ranks} rank(s), median step"
    console.print()
    for name, text in (("train loss", trained), *facts, ("speed", timed)):
        console.print(f"{name:14}{text}")
    console.print()
    if outcome.communication:
        console.print(communication_table(outcome.communication))


def communication_table(rows: Sequence[CommunicationRow]) -> Table:
    waited = sum(row.waited for row in rows)
    caption = (
        "in flight: from issue to the moment its end was noticed, overlapped work included\n"
        f"waited: what communication really cost, {waited:.1%} of the step in all; the rest is computing"
    )
    table = Table(title="Communication of rank 0 while training", caption=caption, **STYLE)
    for name in ("op", "tag", "backend"):
        table.add_column(name, no_wrap=True)
    for name in ("count", "MiB", "p50 µs", "in flight", "waited"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (f"{row.count:,}", f"{row.bytes / 2**20:,.1f}", f"{row.p50_us:,.0f}")
        table.add_row(row.kind, row.tag, row.backend, *numbers, f"{row.share:.1%}", f"{row.waited:.1%}")
    return table


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
    """A progress bar on a terminal, and elsewhere a line at every tenth; `unit` is what is counted per s."""

    def __init__(self, console: Console, title: str, unit: str) -> None:
        self.console = console
        self.title = title
        self.unit = unit
        self.tenth = 0
        self.smooth: float | None = None
        status = TextColumn(
            f"step {{task.fields[step]}}  loss {{task.fields[loss]}}  {{task.fields[rate]}} {unit}/s"
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
        self.smooth = value if self.smooth is None else 0.9 * self.smooth + 0.1 * value
        loss_text, rate_text = f"{self.smooth:.4f}", f"{rate:,.0f}"
        self.bar.update(self.task, completed=fraction, step=step, loss=loss_text, rate=rate_text)
        if not self.console.is_terminal and int(10 * fraction) > self.tenth:
            self.tenth = int(10 * fraction)
            place = f"{self.title}  {fraction:4.0%}  step {step}"
            self.console.print(f"{place}  loss {loss_text}  {rate_text} {self.unit}/s")


# --- the same job on every library ------------------------------------------------------------------

# Two ranks add the same two numbers, so all libraries must give the same bits. More ranks may be added in
# any order; the difference, 1e-7 or so, grows by a thousand once it turns a ReLU on or off.
TOLERANCE = 1e-5
DISAGREE = (
    f"losses differ by more than {TOLERANCE:g}. On two ranks some library computed something wrong; on more "
    "it may be rounding, as they add in different orders: --double tells which."
)
Columns = Sequence[tuple[str, str, str]]  # heading, attribute of the row, format


@dataclass(frozen=True)
class Comparison:
    """One row of `--compare`."""

    transport: str
    ranks: int | None = None
    speedup: float | None = None
    final_loss: float | None = None
    max_difference: float | None = None  # of a step's loss from the first row's
    missing: str | None = None  # why the library did not run


def difference(losses: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Largest |a - b| of two series of losses, divided by |b| where that is above 1."""
    return float(np.max(np.abs(losses - reference) / np.maximum(1, np.abs(reference))))


def agree(rows: Iterable[Comparison]) -> bool:
    """Whether every library that ran came to the same losses, up to the order of summation."""
    return all(row.max_difference is None or row.max_difference <= TOLERANCE for row in rows)


def report_comparison(
    rows: Sequence[Comparison], columns: Columns, console: Console, json_path: Path | None
) -> int:
    """Print the table and write it for programs; the exit status: 1 if losses differ."""
    same = agree(rows)
    console.print()
    console.print(comparison_table(rows, columns))
    for row in rows:
        if row.missing is not None:
            console.print(f"{row.transport} did not run: {row.missing}", markup=False, soft_wrap=True)
    console.print(f"losses agree to {TOLERANCE:g} in every step" if same else DISAGREE)
    if json_path and not console.quiet:
        content = {"tolerance": TOLERANCE, "same": same, "runs": [vars(row) for row in rows]}
        write_json(content, json_path)
    return 0 if same else 1


def comparison_table(rows: Iterable[Comparison], columns: Columns) -> Table:
    table = Table(title="The same job on each library", **STYLE)
    table.add_column("library", no_wrap=True)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        values = ((getattr(row, name), style) for _, name, style in columns)
        table.add_row(
            row.transport, *("-" if value is None else format(value, style) for value, style in values)
        )
    return table
