"""A readable summary of recorded operations by kind, tag and backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mcr_plus.api.record import Record
from mcr_plus.core.kinds import bus_factor
from mcr_plus.core.units import about


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
    share: float  # of the time; overlapped time counts in full
    waited: float  # share of the time in which the program waited for it


def communication(records: Sequence[Record], seconds: float) -> list[CommunicationRow]:
    """Sum up the records of `seconds` by kind, tag and backend, sorted by the time waited, longest first."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
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


_HEADINGS = ("op", "tag", "backend", "count", "bytes", "p50 µs", "in flight", "waited")
_NAMES = 3  # leading columns that hold names; the others hold numbers


def _cells(row: CommunicationRow) -> tuple[str, ...]:
    """The cells of a row, as in `_HEADINGS`."""
    numbers = f"{row.count:,}", about(row.bytes), f"{row.p50_us:,.0f}"
    return row.kind, row.tag, row.backend, *numbers, f"{row.share:.1%}", f"{row.waited:.1%}"


def table_text(title: str, rows: Sequence[CommunicationRow]) -> str:
    """The rows as text in columns, names aligned to the left and numbers to the right."""
    table = [_HEADINGS, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(_HEADINGS))]
    lines = []
    for line in table:
        sized = list(zip(line, widths, strict=True))
        names = [cell.ljust(width) for cell, width in sized[:_NAMES]]
        numbers = [cell.rjust(width) for cell, width in sized[_NAMES:]]
        lines.append("  ".join([*names, *numbers]).rstrip())
    waited = sum(row.waited for row in rows)
    caption = (
        "in flight: from issue until completion was noticed, overlapped work included",
        f"waited: exposed communication, {waited:.1%} of the time in all; the rest is computing",
    )
    return "\n".join([title, "", *lines, "", *caption])
