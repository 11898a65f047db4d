"""Pictures of what was measured: time by size, one panel per operation, and the choice on top."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Final

from mcr_plus.errors import BackendUnavailable, ConfigError
from mcr_plus.selection.table import Query, Table
from mcr_plus.tuning.operations import TORCH, TUNED
from mcr_plus.tuning.points import Point, settled
from mcr_plus.units import format_size

_ENDINGS: Final = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_COLUMNS: Final = 3

Curves = Mapping[str, Mapping[int, tuple[float, float, float]]]
"""(low, median, high) microseconds by size, for each way."""


def check_available(path: Path) -> None:
    """Raise before anything is measured if no picture can be drawn to `path`."""
    if path.suffix.lower() not in _ENDINGS:
        raise ConfigError(f"--plot: {path}: unknown ending {path.suffix!r}; known: {', '.join(_ENDINGS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot: {path}: no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("--plot needs matplotlib; pip install 'mcr_plus[plot]' brings it")


def plot_tuning(table: Table, points: Sequence[Point], path: Path) -> None:
    """Draw every operation's curves with 95 % intervals, and the table's choice along the sizes."""
    panels: dict[str, Curves] = {}
    chosen: dict[str, dict[int, str]] = {}
    ranks = next((int(v) for v in table.fingerprint.get("ranks", ()) if v.isdigit()), 2)
    nodes = next((int(v) for v in table.fingerprint.get("nodes", ()) if v.isdigit()), 1)
    manners = ((False, False, ""), (True, False, ", async"), (True, True, ", async, exposed time"))
    operations = dict.fromkeys((point.cell.kind, point.cell.dtype) for point in points)
    several = len({dtype for kind, dtype in operations if kind != "barrier"}) > 1
    exposed = any(point.overlap for point in points)
    for kind, dtype in operations:
        for async_op, overlap, words in manners:
            if async_op != overlap and exposed:
                continue  # the choice follows the exposed time: two panels would say two things
            curves = _curves(points, kind, dtype, async_op, overlap)
            if not curves:
                continue
            title = f"{kind}{f' {dtype}' if several else ''}{words}"
            panels[title] = curves
            sizes = sorted({size for curve in curves.values() for size in curve})
            name = "none" if kind == "barrier" else dtype
            queries = {
                s: Query(kind, s, name, ranks, nodes, ranks // nodes, async_op=async_op) for s in sizes
            }
            rules = {size: table.lookup(query) for size, query in queries.items()}
            chosen[title] = {size: rule.backend for size, rule in rules.items() if rule is not None}
    _draw(panels, chosen, path, f"{ranks} ranks on {nodes} host{'s' if nodes > 1 else ''}")


def plot_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the rows of `mcr-plus bench`, with their 20th and 80th percentiles."""
    panels: dict[str, dict[str, dict[int, tuple[float, float, float]]]] = {}
    for row in rows:
        if row["verified"]:
            figures = (row["p20_us"], row["p50_us"], row["p80_us"])
            panels.setdefault(row["kind"], {}).setdefault(row["backend"], {})[row["bytes"]] = figures
    ranks = rows[0]["ranks"] if rows else 0
    _draw(panels, {}, path, f"{ranks} ranks, {rows[0]['dtype'] if rows else ''}")


def _curves(points: Sequence[Point], kind: str, dtype: str, async_op: bool, overlap: bool) -> Curves:
    curves: dict[str, dict[int, tuple[float, float, float]]] = {}
    for point in settled(points):
        cell = point.cell
        alike = (cell.kind, cell.dtype, cell.async_op, point.overlap) == (kind, dtype, async_op, overlap)
        if alike and point.timing is not None:
            timing = point.timing
            curves.setdefault(point.way, {})[point.cell.nbytes] = (timing.low, timing.p50, timing.high)
    return curves


def _draw(
    panels: Mapping[str, Curves], chosen: Mapping[str, Mapping[int, str]], path: Path, subtitle: str
) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    if not panels:
        raise ConfigError(f"--plot: {path}: nothing to draw; no operation was measured with a right result")
    columns = min(_COLUMNS, len(panels))
    rows = ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns, 3.5 * rows + 0.8), squeeze=False, layout="constrained"
    )
    ways = list(dict.fromkeys(way for curves in panels.values() for way in curves))
    colours = dict(zip(ways, _COLOURS * (len(ways) // len(_COLOURS) + 1), strict=False))
    colours |= {TUNED: "#000000"} if TUNED in colours else {}
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
        _panel(axis, title, curves, chosen.get(title, {}), colours)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)) | handles
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(f"Time by message size, {subtitle}", fontsize=12)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(
    axis: Any, title: str, curves: Curves, chosen: Mapping[int, str], colours: Mapping[str, str]
) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_ylabel("µs")
    axis.set_yscale("log")
    axis.grid(alpha=0.25, lw=0.5)
    sizes = sorted({size for curve in curves.values() for size in curve})
    if sizes == [0]:
        _bars(axis, curves, chosen, colours)
        return
    for way, curve in curves.items():
        own = sorted(curve)
        low, middle, high = zip(*(curve[size] for size in own), strict=True)
        style = {TUNED: "--", TORCH: ":"}.get(way, "-")
        axis.plot(own, middle, style, color=colours[way], label=way, lw=1.5, marker="o", ms=2.5)
        axis.fill_between(own, low, high, color=colours[way], alpha=0.18, lw=0)
    envelope = [
        (size, curves[way][size][1]) for size, way in sorted(chosen.items()) if size in curves.get(way, {})
    ]
    if envelope:
        axis.plot(*zip(*envelope, strict=True), color="black", lw=6, alpha=0.3, label="chosen", zorder=0)
        _mark_changes(axis, chosen)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("bytes", fontsize=8)
    powers = range(sizes[0].bit_length() - 1, sizes[-1].bit_length())
    shown = [1 << exponent for exponent in powers[:: max(1, ceil(len(powers) / 6))]]
    axis.set_xticks(shown, [format_size(size) for size in shown])
    axis.tick_params(labelsize=8)
    axis.minorticks_off()


def _bars(axis: Any, curves: Curves, chosen: Mapping[int, str], colours: Mapping[str, str]) -> None:
    """An operation without data: one bar for each way, the choice in full colour."""
    for way, curve in curves.items():
        low, middle, high = curve[0]
        faint = 1.0 if chosen.get(0, way) == way else 0.4
        axis.bar(
            way, middle, color=colours[way], alpha=faint, label=way, yerr=[[middle - low], [high - middle]]
        )


def _mark_changes(axis: Any, chosen: Mapping[int, str]) -> None:
    """A thin line where the choice changes, named on its right."""
    previous = None
    for size, way in sorted(chosen.items()):
        if previous is not None and way != previous:
            axis.axvline(size, color="black", lw=0.6, alpha=0.5)
            axis.annotate(
                f"{way} ≥ {format_size(size)}", (size, 0.02), xycoords=("data", "axes fraction"),
                fontsize=7, rotation=90, va="bottom", ha="right",
            )  # fmt: skip
        previous = way
