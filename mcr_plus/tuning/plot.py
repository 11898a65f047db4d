"""Plot measurements: time over size, one panel per operation, with the table's choice above."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path
from typing import Any, Final

from mcr_plus.core.units import size_words
from mcr_plus.errors import BackendUnavailable, ConfigError
from mcr_plus.observe.record_plot import COLOURS, ENDINGS
from mcr_plus.tables.table import BUILT_IN, Query, Table
from mcr_plus.tuning.measurements import Sample, median_of_repeats
from mcr_plus.tuning.operations import TORCH, TUNED

# Colour, marker and width differ, so that overlapping curves can be distinguished.
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
_WIDTHS: Final = (3.2, 2.4, 1.7, 1.2)
_NARROW: Final = 0.17  # share of a panel's width; a narrower range has no room for the name of the choice
_STRIP: Final = 0.07  # share of a panel's height
_MANNERS: Final = ((False, False, "sync"), (True, False, "async"), (True, True, "async, exposed time"))

Figures = tuple[float, float, float]
"""(low, median, high) microseconds."""
Curves = Mapping[str, Mapping[int, Figures]]
"""Figures by candidate and size."""


@dataclass(frozen=True)
class _Panel:
    """A panel of a plot; `chosen`: choices of the table as (first size, candidate), by size."""

    title: str
    curves: Curves
    chosen: Sequence[tuple[int, str]] = ()

    @property
    def sizes(self) -> list[int]:
        return sorted({size for curve in self.curves.values() for size in curve})


def check_available(path: Path) -> None:
    """Raise `ConfigError` or `BackendUnavailable` if `path` cannot be drawn; called before measuring."""
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(f"--plot: {path}: unknown ending {path.suffix!r}; known: {', '.join(ENDINGS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot: {path}: no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("--plot needs matplotlib; pip install 'mcr_plus[plot]' brings it")


def plot_tuning(table: Table, samples: Sequence[Sample], path: Path) -> int:
    """Draw the curves of every operation with 95 % intervals, and the choices of the table.

    Returns the number of panels.
    """
    ranks = next((int(v) for v in table.fingerprint.get("ranks", ()) if v.isdigit()), 2)
    nodes = next((int(v) for v in table.fingerprint.get("nodes", ()) if v.isdigit()), 1)
    operations = dict.fromkeys((sample.case.kind, sample.case.dtype) for sample in samples)
    several = len({dtype for kind, dtype in operations if kind != "barrier"}) > 1
    exposed = any(sample.overlap for sample in samples)
    rows: list[list[_Panel]] = []
    for kind, dtype in operations:
        row: list[_Panel] = []
        for async_op, overlap, manner in _MANNERS:
            if async_op != overlap and exposed:
                continue  # the choice follows exposed times, which whole times would contradict
            curves = _curves(samples, kind, dtype, async_op, overlap)
            if not curves:
                continue
            title = f"{kind}{f' {dtype}' if several else ''}{'' if kind == 'send' else f', {manner}'}"
            name = "none" if kind == "barrier" else dtype
            query = Query(kind, 0, name, ranks, nodes, ranks // nodes, async_op=async_op)
            row.append(_Panel(title, curves, _chosen(table, query)))
        if row:
            rows.append(row)
    where = f"{ranks} ranks on {nodes} host{'s' if nodes > 1 else ''}"
    return _draw(rows, path, f"{where}: medians, 95 % intervals, and above them the choices of the table")


def plot_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> int:
    """Draw the rows of `mcr-plus bench` with 20th and 80th percentiles; return the number of panels."""
    curves: dict[str, dict[str, dict[int, Figures]]] = {}
    for row in rows:
        if row["verified"]:
            figures = (row["p20_us"], row["p50_us"], row["p80_us"])
            curves.setdefault(row["kind"], {}).setdefault(row["backend"], {})[row["bytes"]] = figures
    panels = [[_Panel(kind, found)] for kind, found in curves.items()]
    where = f"{rows[0]['ranks']} ranks, {rows[0]['dtype']}" if rows else ""
    return _draw(panels, path, f"{where}: p50, and p20 to p80")


def _curves(samples: Sequence[Sample], kind: str, dtype: str, async_op: bool, overlap: bool) -> Curves:
    curves: dict[str, dict[int, Figures]] = {}
    for sample in median_of_repeats(samples):
        case = sample.case
        alike = (case.kind, case.dtype, case.async_op, sample.overlap) == (kind, dtype, async_op, overlap)
        if alike and sample.timing is not None:
            timing = sample.timing
            curves.setdefault(sample.candidate, {})[sample.case.nbytes] = (
                timing.low,
                timing.p50,
                timing.high,
            )
    return curves


def _chosen(table: Table, query: Query) -> list[tuple[int, str]]:
    """Return the sizes at which the table's choice changes; they lie between measured sizes."""
    ends = {end for rule in table.rules if rule.key.kind == query.kind for end in (rule.lo, rule.hi or 0)} | {
        0
    }
    choices: list[tuple[int, str]] = []
    for size in sorted(ends):
        rule = table.lookup(query._replace(nbytes=size))
        candidate = BUILT_IN if rule is None else rule.backend
        if not choices or choices[-1][1] != candidate:
            choices.append((size, candidate))
    return choices


def _draw(rows: Sequence[Sequence[_Panel]], path: Path, subtitle: str) -> int:
    """Draw panels to `path`. A row of `rows` has the panels of one operation, side by side."""
    if not rows:
        raise ConfigError(f"--plot: {path}: nothing to draw; no operation was measured with a correct result")
    from matplotlib.figure import Figure

    wide = max(len(row) for row in rows)
    beside = min(len(rows), max(1, 3 // wide) if len(rows) * wide <= 6 else 4 // wide)  # operations
    columns, lines = beside * wide, ceil(len(rows) / beside)
    figure = Figure(figsize=(max(6.0, 4.4 * columns), 3.3 * lines + 1.0), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    candidates = list(dict.fromkeys(candidate for row in rows for panel in row for candidate in panel.curves))
    styles = {candidate: _style(candidate, index) for index, candidate in enumerate(candidates)}
    handles: dict[str, Any] = {}
    for index in range(lines * beside):
        row = rows[index] if index < len(rows) else ()
        for place in range(wide):
            axis = axes[index // beside][index % beside * wide + place]
            if place < len(row):
                handles = _panel(axis, row[place], styles) | handles
            else:
                axis.set_visible(False)
    if any(
        len(panel.sizes) > 1 for row in rows for panel in row
    ):  # panels of one size name the candidates on their axis
        figure.legend(
            [handles[candidate] for candidate in candidates], candidates, loc="outside lower center",
            ncols=min(len(candidates), 2 * columns + 1), frameon=False, handlelength=4,
        )  # fmt: skip
    figure.suptitle(f"Time by message size, {subtitle}", fontsize=11)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    return sum(len(row) for row in rows)


def _style(candidate: str, index: int) -> dict[str, Any]:
    style = {
        "color": "#000000" if candidate == TUNED else COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "lw": _WIDTHS[min(index, len(_WIDTHS) - 1)],
        "linestyle": {TUNED: "--", TORCH: ":"}.get(candidate, "-"),
        "ms": 5,
    }
    return {**style, "mfc": "white"} if candidate in (TUNED, TORCH) else style


def _panel(axis: Any, panel: _Panel, styles: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Draw one operation; return the handles of the legend by candidate."""
    sizes = panel.sizes
    axis.set_ylabel("µs")
    axis.set_yscale("log")
    axis.grid(alpha=0.25, lw=0.5)
    handles = (_dots if len(sizes) == 1 else _lines)(axis, panel, styles)
    low, high = axis.get_ylim()
    few = high / low < 100
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(labelsize=8)
    at = f", {size_words(sizes[0])}" if len(sizes) == 1 and sizes[0] else ""
    axis.set_title(f"{panel.title}{at}", fontsize=10)
    return handles


def _lines(axis: Any, panel: _Panel, styles: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Draw times over sizes, and the table's choices in a strip above."""
    handles: dict[str, Any] = {}
    for candidate, curve in panel.curves.items():
        own = sorted(curve)
        low, middle, high = zip(*(curve[size] for size in own), strict=True)
        handles[candidate] = axis.plot(own, middle, **styles[candidate])[0]
        axis.fill_between(own, low, high, color=styles[candidate]["color"], alpha=0.13, lw=0)
    sizes = panel.sizes
    axis.set_xscale("log", base=2)
    axis.set_xlabel("size", fontsize=8)
    powers = range(sizes[0].bit_length() - 1, sizes[-1].bit_length())
    shown = [1 << exponent for exponent in powers[:: max(1, ceil(len(powers) / 6))]]
    axis.set_xticks(shown, [size_words(size) for size in shown])
    axis.minorticks_off()
    _strip(axis, panel.chosen, styles)
    return handles


def _strip(axis: Any, chosen: Sequence[tuple[int, str]], styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the choices over sizes, with the limits of the rules."""
    if not chosen:
        return
    from matplotlib.patches import Rectangle

    low, high = axis.get_xlim()
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top * (top / bottom) ** (1.3 * _STRIP))
    for index, (start, candidate) in enumerate(chosen):
        end = chosen[index + 1][0] if index + 1 < len(chosen) else high
        left, right = max(start, low), min(end, high)
        if candidate not in styles or left >= right:
            continue
        place, length = (log2(each / low) / log2(high / low) for each in (left, low * right / left))
        box = Rectangle(
            (place, 1 - _STRIP),
            length,
            _STRIP,
            transform=axis.transAxes,
            color=styles[candidate]["color"],
            lw=0,
        )
        axis.add_patch(box)
        if length >= _NARROW:
            axis.text(
                place + length / 2, 1 - _STRIP / 2, candidate, transform=axis.transAxes, fontsize=7,
                ha="center", va="center", color="white", fontweight="bold",
            )  # fmt: skip
        if start > low:
            axis.axvline(start, color="black", lw=0.6, alpha=0.5)
            axis.annotate(
                size_words(start), (start, 1 - 1.2 * _STRIP), xycoords=("data", "axes fraction"),
                fontsize=7, rotation=90, va="top", ha="right",
            )  # fmt: skip


def _dots(axis: Any, panel: _Panel, styles: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Draw a single size, or an operation without data: candidates side by side, the choice labelled."""
    handles: dict[str, Any] = {}
    (size,) = panel.sizes
    choice = next((candidate for start, candidate in reversed(panel.chosen) if start <= size), None)
    for place, (candidate, curve) in enumerate(panel.curves.items()):
        low, middle, high = curve[size]
        error = [[middle - low], [high - middle]]
        handles[candidate] = axis.errorbar(
            place, middle, error, **{**styles[candidate], "ms": 8, "capsize": 4}
        )
    names = [f"{candidate}\n(chosen)" if candidate == choice else candidate for candidate in panel.curves]
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.6, len(names) - 0.4)
    return handles
