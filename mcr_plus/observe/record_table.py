"""Recorded operations as text: a log by kind, tag and backend, and the rows of its summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mcr_plus.core.kinds import bus_factor
from mcr_plus.core.units import about
from mcr_plus.errors import phrase_ranks
from mcr_plus.observe.record import Record, Row
from mcr_plus.observe.stragglers import Stragglers


@dataclass(frozen=True)
class CommunicationRow:
    """All operations of one kind, tag and backend that one rank recorded."""

    kind: str
    tag: str
    backend: str
    count: int
    bytes: int
    wire: int  # bytes that each rank sends, by the formulas of nccl-tests; approximate if sizes differ
    p50_us: float
    share: float  # share of the time; overlapped time counts in full
    waited: float  # share of the time in which the program waited for it and for no earlier operation


def communication(records: Sequence[Record], seconds: float) -> list[CommunicationRow]:
    """Sum the records of `seconds` by kind, tag and backend, sorted by wait time, longest first.

    Where waits overlap, as waits of streams do, the time counts for the wait that began first.
    """
    groups: dict[tuple[str, str, str], list[Record]] = {}
    exposed: dict[tuple[str, str, str], float] = {}
    last = float("-inf")
    for record in sorted(records, key=lambda record: record.t_done - record.waited):
        key = record.kind, record.tag or "", record.backend
        groups.setdefault(key, []).append(record)
        alone = record.t_done - max(last, record.t_done - record.waited)
        exposed[key] = exposed.get(key, 0.0) + max(0.0, alone)
        last = max(last, record.t_done if record.waited else last)
    rows = []
    for key, group in groups.items():
        times = [record.t_done - record.t_issue for record in group]
        total = sum(record.bytes for record in group)
        wire = round(sum(record.wire_bytes * bus_factor(record.kind, record.ranks) for record in group))
        waited = exposed[key] / seconds
        p50_us, share = median(times) * 1e6, sum(times) / seconds
        rows.append(CommunicationRow(*key, len(group), total, wire, p50_us, share, waited))
    return sorted(rows, key=lambda row: -row.waited)


_HEADINGS = ("op", "tag", "backend", "count", "bytes", "p50 µs", "in flight", "waited")
_LATE_ROWS = 20
_NAMES = 3  # leading columns with names; the others hold numbers
_MEANINGS = (
    "size: operations of at most so many bytes, and more than half; data: bytes of all; wire: as encoded",
    "p50, p95: half of the operations, and 95 % of them, took at most this long until they were complete",
    "alg GB/s: bytes by time; bus GB/s: that by a factor for each op, comparable with the speed of a link",
)


def _cells(row: CommunicationRow) -> tuple[str, ...]:
    """Return the cells of a row, in the order of `_HEADINGS`."""
    numbers = f"{row.count:,}", about(row.bytes), f"{row.p50_us:,.0f}"
    return row.kind, row.tag, row.backend, *numbers, f"{row.share:.1%}", f"{row.waited:.1%}"


def table_text(title: str, rows: Sequence[CommunicationRow]) -> str:
    """Return the rows as text in columns."""
    waited = sum(row.waited for row in rows)
    caption = (
        "in flight: from issue until completion was noticed, overlapped work included",
        f"waited: exposed communication, {waited:.1%} of the time in all; the rest is computing",
    )
    return "\n".join([title, "", *_aligned([_HEADINGS, *map(_cells, rows)], _NAMES), "", *caption])


def summary_text(rows: Sequence[Row]) -> str:
    """Return the rows of a summary as text; columns for codecs and ranks appear only if values differ."""
    if not rows:
        return "no operations were recorded, or all of them failed"
    coded = any(row.codec is not None for row in rows)
    groups = len({row.ranks for row in rows}) > 1
    headings = ["op", "backend", *["codec"] * coded, *["ranks"] * groups, "size", "count", "data"]
    headings += [*["wire"] * coded, "p50 µs", "p95 µs", "alg GB/s", "bus GB/s"]
    table = [headings]
    for row in rows:
        cells = [row.kind, row.backend, *[row.codec or "-"] * coded, *[f"{row.ranks}"] * groups]
        cells += [about(row.size_class), f"{row.count:,}", about(row.bytes), *[about(row.wire_bytes)] * coded]
        cells += [f"{row.p50_us:,.0f}", f"{row.p95_us:,.0f}"]
        table.append([*cells, *map(_speed, (row.algbw_GBps, row.busbw_GBps))])
    title = "Operations" if groups else f"Operations of {rows[0].ranks} ranks"
    return "\n".join([title, "", *_aligned(table, 3 if coded else 2), "", *_MEANINGS])


def lateness_text(found: Stragglers) -> str:
    """Return the rows of late ranks as text in columns, and the ranks that are late persistently."""
    rows = [row for row in found.rows if row.late]
    title = f"Arrivals of ranks at {found.compared:,} operations"
    if found.left_out:
        title += f", without {found.left_out:,} of which not all are known"
        if found.missing:
            title += f" (not published by {phrase_ranks(found.missing)})"
    if found.error:
        title += f"; clocks of hosts compared to {1e3 * found.error:.2g} ms"
    named = [*map(str, found)] or ["no rank is late all the time"]
    if not rows:
        return "\n".join([title, "", *named])
    table = [("rank", "op", "tag", "line", "late", "of", "mean ms", "longest ms", "seconds")]
    for row in rows[:_LATE_ROWS]:
        times = f"{1e3 * row.mean:.3g}", f"{1e3 * row.longest:.3g}", f"{row.seconds:.3g}"
        table.append(
            (f"{row.rank}", row.kind, row.tag or "", row.site, f"{row.late:,}", f"{row.count:,}", *times)
        )
    left = [f"and {len(rows) - _LATE_ROWS} lines more"] if len(rows) > _LATE_ROWS else []
    return "\n".join([title, "", *_aligned(table, 4), *left, "", *named])


def _speed(found: float) -> str:
    return "< 0.001" if 0 < found < 1e-3 else f"{found:.3g}"


def _aligned(table: Sequence[Sequence[str]], names: int) -> list[str]:
    """Return the lines of a table: the first `names` columns left-aligned, the others right-aligned."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = []
    for line in table:
        sized = list(zip(line, widths, strict=True))
        cells = [cell.ljust(width) for cell, width in sized[:names]]
        lines.append("  ".join([*cells, *(cell.rjust(width) for cell, width in sized[names:])]).rstrip())
    return lines
