"""What came out of a job: how well it learned, how fast it was, where the time went."""

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
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transports import Log, Record

STYLE: Any = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "title_justify": "left"}
WINDOW = 10  # steps at the start and at the end whose mean loss is reported
Observer = Callable[[float, int, float, float], None]  # fraction done, step, loss, samples/s

# --- metrics ----------------------------------------------------------------------------------------


def auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Chance that a random positive scores above a random negative, a tie counting half; nan if undefined."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]  # equal scores share their mean rank
    positives = int(np.sum(labels == 1))
    negatives = len(labels) - positives
    if not positives or not negatives:
        return math.nan
    rank_sum = float(ranks[labels == 1].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def log_loss(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Mean binary cross entropy of the logits `scores`; nan without rows."""
    return float(np.mean(np.logaddexp(0, scores) - labels * scores)) if len(labels) else math.nan


def accuracy(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Share of rows on the right side of one half; nan without rows."""
    return float(np.mean((scores > 0) == (labels == 1))) if len(labels) else math.nan


@dataclass(frozen=True)
class CommunicationRow:
    """All operations of one kind, tag and backend in the training steps of rank 0."""

    kind: str
    tag: str
    backend: str
    count: int
    bytes: int
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
        waited = sum(record.waited for record in group) / seconds
        p50_us, share = median(times) * 1e6, sum(times) / seconds
        rows.append(CommunicationRow(*key, len(group), total, p50_us, share, waited))
    return sorted(rows, key=lambda row: -row.waited)


@dataclass(frozen=True)
class Result:
    """What came out, the same on every rank but for the times and the log."""

    ranks: int
    losses: NDArray[np.float64]  # of the global batch, by step
    labels: NDArray[np.float32]  # of the held-out rows of all ranks
    scores: NDArray[np.float32]
    seconds: float  # spent training
    samples_per_second: float  # in the median step
    communication: list[CommunicationRow]
    log: Log | None

    @property
    def first(self) -> float:
        return float(self.losses[: self._window].mean())

    @property
    def last(self) -> float:
        return float(self.losses[-self._window :].mean())

    @property
    def _window(self) -> int:
        return max(1, min(WINDOW, len(self.losses) // 2))


# --- while it runs ----------------------------------------------------------------------------------


class Monitor:
    """A progress bar on a terminal, and elsewhere a line at every tenth."""

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self.title = title
        self.tenth = 0
        self.smooth: float | None = None
        status = TextColumn(
            "step {task.fields[step]}  loss {task.fields[loss]}  {task.fields[rate]} samples/s"
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
            self.console.print(f"{place}  loss {loss_text}  {rate_text} samples/s")


# --- one run ----------------------------------------------------------------------------------------


def report(result: Result, console: Console) -> None:
    """Print how well it learned, how fast it was, and where the time went."""
    console.print(f"\ntrain loss    {result.first:.4f} → {result.last:.4f} over {len(result.losses)} steps")
    if len(result.labels):
        known = (result.labels, result.scores)
        console.print(
            f"held out      {len(result.labels)} rows: loss {log_loss(*known):.4f}, "
            f"accuracy {accuracy(*known):.1%}, AUC {auc(*known):.4f}"
        )
    console.print(
        f"speed         {result.samples_per_second:,.0f} samples/s over {result.ranks} rank(s), median step\n"
    )
    if result.communication:
        console.print(communication_table(result.communication))


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


def document(result: Result, title: str) -> dict[str, Any]:
    """The report for programs."""
    return {
        "transport": title,
        "ranks": result.ranks,
        "steps": len(result.losses),
        "seconds": result.seconds,
        "samples_per_second": result.samples_per_second,
        "train_loss": {"first": result.first, "last": result.last, "steps": result.losses.tolist()},
        "held_out": {
            "rows": len(result.labels),
            "loss": _known(log_loss(result.labels, result.scores)),
            "accuracy": _known(accuracy(result.labels, result.scores)),
            "auc": _known(auc(result.labels, result.scores)),
        },
        "communication": [vars(row) for row in result.communication],
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def write_json(content: dict[str, Any], path: Path) -> None:
    text = json.dumps(content, indent=1) + "\n"
    if path == Path("-"):
        sys.stdout.write(text)
    else:
        path.write_text(text)


# --- the same job on every library ------------------------------------------------------------------

# Two ranks add the same two numbers, so all libraries must give the same bits. More ranks may be added in
# any order; the difference, 1e-7 or so, grows by a thousand once it turns a ReLU on or off.
TOLERANCE = 1e-5
DISAGREE = (
    f"losses differ by more than {TOLERANCE:g}. On two ranks some library computed something wrong; on more "
    "it may be rounding, as they add in different orders: --double tells which."
)


@dataclass(frozen=True)
class Comparison:
    """One row of `--compare`."""

    transport: str
    ranks: int | None = None
    samples_per_second: float | None = None
    speedup: float | None = None
    final_loss: float | None = None
    auc: float | None = None
    max_difference: float | None = None  # of a step's loss from the first row's
    missing: str | None = None  # why the library did not run


def difference(losses: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Largest |a - b| of two series of losses, divided by |b| where that is above 1."""
    return float(np.max(np.abs(losses - reference) / np.maximum(1, np.abs(reference))))


def compared(title: str, result: Result, reference: Result) -> Comparison:
    return Comparison(
        title,
        ranks=result.ranks,
        samples_per_second=result.samples_per_second,
        speedup=result.samples_per_second / reference.samples_per_second,
        final_loss=result.last,
        auc=_known(auc(result.labels, result.scores)),
        max_difference=difference(result.losses, reference.losses),
    )


def agree(rows: Iterable[Comparison]) -> bool:
    """Whether every library that ran came to the same losses, up to the order of summation."""
    return all(row.max_difference is None or row.max_difference <= TOLERANCE for row in rows)


def report_comparison(rows: Sequence[Comparison], console: Console) -> None:
    console.print()
    console.print(comparison_table(rows))
    for row in rows:
        if row.missing is not None:
            console.print(f"{row.transport} did not run: {row.missing}", markup=False, soft_wrap=True)
    console.print(f"losses agree to {TOLERANCE:g} in every step" if agree(rows) else DISAGREE)


def comparison_table(rows: Iterable[Comparison]) -> Table:
    table = Table(title="The same job on each library", **STYLE)
    table.add_column("library", no_wrap=True)
    for name in ("samples/s", "speed-up", "final loss", "AUC", "max loss diff"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = (
            _cell(row.samples_per_second, ",.0f"),
            _cell(row.speedup, ".2f"),
            _cell(row.final_loss, ".5f"),
            _cell(row.auc, ".4f"),
            _cell(row.max_difference, ".1e"),
        )
        table.add_row(row.transport, *cells)
    return table


def _cell(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)
