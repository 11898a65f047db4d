"""The same job on every library, in turns: speeds with their spread, and whether losses are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
from libraries import TITLES, JobError, TransportName
from numpy.typing import NDArray
from reporting import STYLE, Outcome, write_json
from rich.console import Console
from rich.table import Table

from mcr_plus.errors import BackendUnavailable

ROUNDS = 3
# Two ranks add the same two numbers, so all libraries must give the same bits. More ranks may be added in
# any order; the difference, 1e-7 or so, grows by a thousand once it turns a ReLU on or off.
TOLERANCE = 1e-5
DISAGREE = (
    f"losses differ by more than {TOLERANCE:g}. On two ranks some library computed something wrong; on more "
    "it may be rounding, as they add in different orders: --double tells which."
)
Columns = Sequence[tuple[str, str, str]]  # heading, name of the figure, format
Figures = Mapping[str, float | None]  # what an example knows of a run besides its speed and its losses
ResultT = TypeVar("ResultT", bound=Outcome)


@dataclass(frozen=True)
class Comparison:
    """A library's runs. What is None is not known; all but `transport` and `missing` if it did not run."""

    transport: str
    ranks: int | None = None
    rounds: int | None = None
    speed: float | None = None  # samples or tokens per second, the median of the rounds
    speed_range: tuple[float, float] | None = None  # of the slowest round and of the fastest
    speedup: float | None = None  # of the median over the first library's
    differs: bool | None = None  # the two ranges do not overlap; None for the first, and with one round
    final_loss: float | None = None  # in training, the mean over ranks and the last steps
    max_difference: float | None = None  # of a step's loss from the first library's
    figures: Figures = field(default_factory=dict)  # of the first round
    missing: str | None = None  # why the library did not run

    def document(self, unit: str) -> dict[str, Any]:
        """The report for programs; `unit` names what `speed` counts."""
        content = {f"{unit}_per_second": self.speed, **vars(self), **self.figures}
        del content["speed"], content["figures"]
        return content


def take_turns(
    run: Callable[[TransportName], ResultT], rounds: int, names: Sequence[TransportName] = tuple(TITLES)
) -> tuple[dict[TransportName, list[ResultT]], dict[TransportName, str]]:
    """The results of every library, and why those without a result did not run.

    Each round goes in the opposite order of the one before, so that a drift of the machine's speed is shared.
    """
    results: dict[TransportName, list[ResultT]] = {name: [] for name in names}
    missing: dict[TransportName, str] = {}
    turns = list(names)
    for _ in range(rounds):
        for name in turns:
            if name in missing:
                continue
            try:
                results[name].append(run(name))
            except BackendUnavailable as error:
                missing[name] = str(error)
        turns.reverse()
    if not any(results.values()):
        raise JobError("; ".join(f"{TITLES[name]} did not run: {why}" for name, why in missing.items()))
    return results, missing


def comparisons(
    results: Mapping[TransportName, Sequence[ResultT]],
    missing: Mapping[TransportName, str],
    figures: Callable[[ResultT], Figures],
) -> list[Comparison]:
    """One row for every library; they are compared with the first that ran."""
    reference = next(runs for runs in results.values() if runs)
    return [
        _compared(TITLES[name], runs, reference, figures(runs[0]))
        if runs
        else Comparison(TITLES[name], missing=missing[name])
        for name, runs in results.items()
    ]


def _compared(
    title: str, runs: Sequence[Outcome], reference: Sequence[Outcome], figures: Figures
) -> Comparison:
    speed, slowest, fastest = _spread(runs)
    usual, lowest, highest = _spread(reference)
    told = runs is not reference and min(len(runs), len(reference)) > 1
    return Comparison(
        title,
        ranks=runs[0].ranks,
        rounds=len(runs),
        speed=speed,
        speed_range=(slowest, fastest),
        speedup=speed / usual,
        differs=(slowest > highest or fastest < lowest) if told else None,
        final_loss=runs[0].last,
        max_difference=max(difference(run.losses, reference[0].losses) for run in runs),
        figures=figures,
    )


def _spread(runs: Sequence[Outcome]) -> tuple[float, float, float]:
    speeds = [run.speed for run in runs]
    return median(speeds), min(speeds), max(speeds)


def difference(losses: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Largest |a - b| of two series of losses, divided by |b| where that is above 1."""
    return float(np.max(np.abs(losses - reference) / np.maximum(1, np.abs(reference))))


def report_comparison(
    rows: Sequence[Comparison], unit: str, columns: Columns, console: Console, json_path: Path | None
) -> int:
    """Print the table and write it for programs; the exit status: 1 if losses differ."""
    worst = max(row.max_difference for row in rows if row.max_difference is not None)
    same = worst <= TOLERANCE  # up to the order of summation
    if not same:
        columns = (*columns, ("max loss diff", "max_difference", ".1e"))
    console.print()
    console.print(comparison_table(rows, unit, columns))
    for row in rows:
        if row.missing is not None:
            console.print(f"{row.transport} did not run: {row.missing}", markup=False, soft_wrap=True)
    agreed = f"losses agree to {TOLERANCE:g} in every step; the largest difference is {worst:.1e}"
    console.print(agreed if same else DISAGREE)
    if json_path and not console.quiet:
        content = {"tolerance": TOLERANCE, "same": same, "runs": [row.document(unit) for row in rows]}
        write_json(content, json_path)
    return 0 if same else 1


def comparison_table(rows: Sequence[Comparison], unit: str, columns: Columns) -> Table:
    first = next(row for row in rows if row.missing is None)
    caption = (
        f"{unit}/s: the median of {first.rounds} rounds, and the slowest to the fastest of them\n"
        f"speed-up: over {first.transport}; no difference: the two ranges overlap"
        if first.rounds and first.rounds > 1
        else "one round tells nothing about the spread, and so nothing about speed-ups: --rounds 3"
    )
    table = Table(title="The same job on each library", caption=caption, caption_justify="left", **STYLE)
    table.add_column("library", no_wrap=True)
    for heading in (f"{unit}/s", "of rounds", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        if row.speed is None or row.speed_range is None:
            table.add_row(row.transport, *["-"] * (len(columns) + 3))
            continue
        known = ((row.document(unit)[key], style) for _, key, style in columns)
        table.add_row(
            row.transport,
            f"{row.speed:,.0f}",
            "{:,.0f}–{:,.0f}".format(*row.speed_range),
            speedup(row),
            *("-" if value is None else format(value, style) for value, style in known),
        )
    return table


def speedup(row: Comparison) -> str:
    """How many times as fast as the first library; "no difference" within the spread, "-" without one."""
    if row.differs is None:
        return "-"
    return f"{row.speedup:.2f}" if row.differs else "no difference"
