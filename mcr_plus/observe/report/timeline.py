"""The timeline of a step as HTML: the program's activity on each rank, and the operations in flight."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from mcr_plus.core.units import about
from mcr_plus.observe.report.analysis import StepDurations, merged, waits_of
from mcr_plus.observe.report.job import Floats, Ints, RecordedJob

_MOST_RANKS: Final = 8
_MOST_ROWS: Final = 4  # rows per library; overlapping operations are stacked
_SLOTS: Final = 1000  # slots of the width; at most one bar starts in each
_TICKS: Final = 4
COLOURS: Final = 8
"""Number of colours of kinds, `--k0` and so on."""


def timeline(job: RecordedJob, steps: StepDurations, kinds: Sequence[str]) -> str:
    """Return the timeline; `kinds` are in the order of their colours."""
    begin, end = steps.begin, max(steps.end, steps.begin + 1e-9)
    ranks = list(job.ranks)
    shown = ranks[:_MOST_RANKS]
    parts = ["<div class='timeline'>", _axis(end - begin)]
    for rank in shown:
        where = f" on {job.hosts[rank]}" if len(set(job.hosts)) > 1 and rank < len(job.hosts) else ""
        parts.append(f"<div class='rank'><b>Rank {rank}</b>{html.escape(where)}</div>")
        parts.append(_program(job, rank, begin, end))
        parts += _flights(job, rank, begin, end, kinds)
    parts.append("</div>")
    if len(ranks) > len(shown):
        parts.append(f"<p class='quiet'>The first {len(shown)} of {len(ranks)} ranks are shown.</p>")
    return "".join(parts)


def legend(kinds: Sequence[str]) -> str:
    """Return the legend of colours."""
    entries = [("computing", "computing"), ("waiting", "waiting")]
    entries += [(f"k{at % COLOURS}", kind) for at, kind in enumerate(kinds)]
    spans = (f"<span><i class='{css}'></i>{html.escape(name)}</span>" for css, name in entries)
    return f"<div class='legend'>{''.join(spans)}</div>"


def _axis(seconds: float) -> str:
    digits = max(0, 2 - int(np.floor(np.log10(seconds * 1e3)))) if seconds > 0 else 0
    ticks = []
    for at in range(_TICKS + 1):
        text = f"{seconds * 1e3 * at / _TICKS:.{digits}f}" + (" ms" if at == _TICKS else "")
        side = "right:0" if at == _TICKS else f"left:{100 * at / _TICKS:g}%"
        ticks.append(f"<span style='{side}'>{text}</span>")
    return _row("", f"<div class='axis'>{''.join(ticks)}</div>")


def _program(job: RecordedJob, rank: int, begin: float, end: float) -> str:
    """Return the lane of the program: it computes whenever it does not wait."""
    begins, ends = waits_of(job, rank)
    inside = (ends > begin) & (begins < end)
    bars = list(_bars(begins[inside], ends[inside], begin, end))
    waits = "".join(_bar("waiting", left, width, f"waiting, {_time(s)}") for left, width, s, _ in bars)
    return _row("", f"<div class='lane program' title='computing'>{waits}</div>")


def _row(label: str, lane: str) -> str:
    return f"<div class='row'><em>{html.escape(label)}</em>{lane}</div>"


def _flights(job: RecordedJob, rank: int, begin: float, end: float, kinds: Sequence[str]) -> Iterator[str]:
    """Yield a lane for each library, and for overlapping operations."""
    columns = job.columns
    inside = (columns["rank"] == rank) & (columns["t_done"] > begin) & (columns["t_issue"] < end)
    rows = np.flatnonzero(inside)
    for backend in np.unique(columns["backend"][rows]):
        own = rows[columns["backend"][rows] == backend]
        own = own[np.argsort(columns["t_issue"][own], kind="stable")]
        lanes = _packed(columns["t_issue"][own], columns["t_done"][own], (end - begin) / _SLOTS)
        for number in range(int(lanes.max()) + 1):
            label = job.name("backend", backend) if number == 0 else ""
            bars = _lane(job, own[lanes == number], begin, end, kinds)
            yield _row(label, f"<div class='lane'>{bars}</div>")


def _lane(job: RecordedJob, rows: Ints, begin: float, end: float, kinds: Sequence[str]) -> str:
    columns = job.columns
    found = []
    for kind in np.unique(columns["kind"][rows]):
        own = rows[columns["kind"][rows] == kind]
        name = job.name("kind", kind)
        css = f"k{kinds.index(name) % COLOURS}"
        for left, width, seconds, some in _bars(columns["t_issue"][own], columns["t_done"][own], begin, end):
            found.append(_bar(css, left, width, _what(job, own[some], name, seconds)))
    return "".join(found)


def _what(job: RecordedJob, rows: Ints, kind: str, seconds: float) -> str:
    columns = job.columns
    if len(rows) > 1:
        return f"{len(rows)} × {kind}, {about(int(columns['bytes'][rows].sum()))}, {_time(seconds)}"
    row = int(rows[0])
    tag, codec = job.name("tag", columns["tag"][row]), job.name("codec", columns["codec"][row])
    parts = [f"{kind} {tag}".strip(), about(int(columns["bytes"][row])), _time(seconds)]
    parts += [codec] * bool(codec) + [f"waited {_time(float(columns['waited'][row]))}"]
    return ", ".join(parts)


def _packed(begins: Floats, ends: Floats, gap: float) -> Ints:
    """Return a row for each interval, with few overlaps within a row; intervals are sorted by begin."""
    free = [-np.inf] * _MOST_ROWS
    rows = np.zeros(len(begins), np.int64)
    for at, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        row = next((row for row, until in enumerate(free) if until <= begin + gap), _MOST_ROWS - 1)
        free[row] = max(free[row], end)
        rows[at] = row
    return rows


def _bars(
    begins: Floats, ends: Floats, begin: float, end: float
) -> Iterator[tuple[float, float, float, Ints]]:
    """Yield bars: left and width in percent, seconds, and their intervals; near intervals share a bar."""
    if not len(begins):
        return
    order = np.argsort(begins, kind="stable")
    least = (end - begin) / _SLOTS
    starts, lasts = merged(begins[order], np.maximum(ends[order], begins[order] + least))
    bars = np.searchsorted(starts, begins[order], side="right") - 1
    firsts = np.searchsorted(bars, np.arange(len(starts)))
    for at, some in enumerate(np.split(order, firsts[1:])):
        left, right = max(starts[at], begin), min(lasts[at], end)
        seconds = float((ends[some] - begins[some]).sum())
        yield 100 * (left - begin) / (end - begin), 100 * (right - left) / (end - begin), seconds, some


def _bar(css: str, left: float, width: float, text: str) -> str:
    place = f"left:{left:.3f}%;width:{width:.3f}%"
    return f"<i class='{css}' style='{place}' title='{html.escape(text, quote=True)}'></i>"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"
