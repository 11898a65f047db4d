"""A timeline of recorded operations: a bar for each operation, by group and backend."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.errors import InvalidArgument, Unsupported, unknown

if TYPE_CHECKING:
    from mcr_plus.observe.record import Record

ENDINGS: Final = (".png", ".svg", ".pdf")
# Okabe and Ito's palette, which colour-blind readers can distinguish.
COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_LINES: Final = 6  # rows for one group and backend; further overlapping operations share rows
_HEIGHT: Final = 0.8


def check_picture(path: Path) -> None:
    """Raise an error if no picture can be drawn to `path`.

    `InvalidArgument` for an unknown ending or a missing folder, `Unsupported` without matplotlib.
    """
    if path.suffix.lower() not in ENDINGS:
        raise InvalidArgument(f"{path}: {unknown('ending', path.suffix, ENDINGS)}")
    if not path.absolute().parent.is_dir():
        raise InvalidArgument(f"{path}: no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise Unsupported("a picture needs matplotlib; pip install 'mcr_plus[plot]' brings it")


def plot_records(records: Sequence[Record], title: str, path: Path) -> None:
    """Draw the records; the dark end of a bar is the time that the program waited."""
    check_picture(path)
    if not records:
        raise InvalidArgument(f"{path}: nothing was recorded, so there is nothing to draw")
    from matplotlib.figure import Figure

    lanes = sorted({(record.group, record.backend) for record in records})
    kinds = list(dict.fromkeys(record.kind for record in records))
    colours = {kind: COLOURS[index % len(COLOURS)] for index, kind in enumerate(kinds)}
    start = min(record.t_issue for record in records)
    lines, first = _lines(records, lanes)
    height = first[-1]
    figure = Figure(figsize=(11, 1.8 + 0.28 * height), layout="constrained")
    axis = figure.subplots()
    handles: dict[str, Any] = {}
    for kind in kinds:
        of_kind = [(record, line) for record, line in zip(records, lines, strict=True) if record.kind == kind]
        for record, line in of_kind:
            begin, end = (record.t_issue - start) * 1e3, (record.t_done - start) * 1e3
            waited = record.waited * 1e3
            bar = axis.barh(line, end - begin, _HEIGHT, begin, color=colours[kind], alpha=0.45, linewidth=0)
            axis.barh(line, waited, _HEIGHT, end - waited, color=colours[kind], linewidth=0)
            handles.setdefault(kind, bar)
    middles = [(low + high - 1) / 2 for low, high in pairwise(first)]
    axis.set_yticks(middles, [f"{group}\n{backend}" for group, backend in lanes])
    axis.invert_yaxis()
    axis.set_xlabel("ms since the first operation; dark: the program waited")
    axis.set_title(title, loc="left")
    figure.legend(handles.values(), handles, loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=130)


def _lines(records: Sequence[Record], lanes: Sequence[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """Return the row of each record, with few overlaps, each lane's first row, and the number of rows."""
    line_of: dict[int, int] = {}
    first = [0]
    for lane in lanes:
        ends: list[float] = []  # end of the last operation on each row of the lane
        in_lane = [index for index, record in enumerate(records) if (record.group, record.backend) == lane]
        for index in sorted(in_lane, key=lambda index: records[index].t_issue):
            free = [line for line, end in enumerate(ends) if end <= records[index].t_issue]
            if not free and len(ends) < _LINES:
                ends.append(0.0)
                free = [len(ends) - 1]
            line = free[0] if free else min(range(len(ends)), key=ends.__getitem__)
            ends[line] = max(ends[line], records[index].t_done)
            line_of[index] = first[-1] + line
        first.append(first[-1] + len(ends))
    return [line_of[index] for index in range(len(records))], first
