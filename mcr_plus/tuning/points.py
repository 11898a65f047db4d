"""Measured points, and the file they are kept in while a table is tuned.

One JSON document per line: first what was measured where, then one line per point, written as soon as it is
known, so that a run that was interrupted or has used up its budget goes on where it stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from mcr_plus.errors import ConfigError
from mcr_plus.selection.fingerprint import Fingerprint, differences
from mcr_plus.tuning.operations import Cell
from mcr_plus.tuning.statistics import Timing

_VERSION: Final = 1


@dataclass(frozen=True)
class Point:
    """What was measured of one cell by one way; `timing` is None where it was excluded for `problem`.

    `overlap`: an asynchronous operation's exposed time beside a computation, instead of its whole time.
    """

    cell: Cell
    way: str
    overlap: bool
    timing: Timing | None
    problem: str | None = None

    def document(self) -> dict[str, Any]:
        """As plain data; `from_document` gives it back."""
        timing = None if self.timing is None else asdict(self.timing)
        rest = {"way": self.way, "overlap": self.overlap, "timing": timing, "problem": self.problem}
        return {**asdict(self.cell), **rest}

    @classmethod
    def from_document(cls, data: Mapping[str, Any]) -> Point:
        """What `document` made. Raises `KeyError` or `TypeError` for anything else."""
        cell = Cell(data["kind"], data["nbytes"], data["dtype"], data["async_op"])
        timing = None if data["timing"] is None else Timing(**data["timing"])
        return cls(cell, data["way"], data["overlap"], timing, data["problem"])


def settled(points: Iterable[Point]) -> list[Point]:
    """One point for each way of each cell: of what was measured several times the one with the median p50.

    Of an even number the lower one of the two in the middle, because what disturbs only ever adds time.
    """
    apart: dict[tuple[Cell, str, bool], list[Point]] = {}
    for point in points:
        apart.setdefault((point.cell, point.way, point.overlap), []).append(point)
    return [_middle(found) for found in apart.values()]


def _middle(points: Sequence[Point]) -> Point:
    """A way that was ever excluded stays so."""
    timed = sorted((timing.p50, index) for index, each in enumerate(points) if (timing := each.timing))
    excluded = (point for point in points if point.timing is None)
    return next(excluded, None) or points[timed[(len(timed) - 1) // 2][1]]


class PointFile:
    """The points of one tuning run on disk. Rank 0 only."""

    def __init__(self, path: Path, fingerprint: Fingerprint, *, fresh: bool) -> None:
        """Open `path`, keeping what it has unless `fresh`.

        Raises `ConfigError` if it cannot be read or written, or holds what was measured elsewhere.
        """
        self.points: list[Point] = []
        self._path = path
        head = {"version": _VERSION, "fingerprint": {name: list(v) for name, v in fingerprint.items()}}
        try:
            if path.exists() and not path.is_file():  # a FIFO may have nobody at its other end
                raise ConfigError(f"{path}: expected a regular file")
            if not fresh and path.exists():
                self.points = _read(path, fingerprint)
            # Whole or not at all: what was measured must survive whatever ends this run.
            draft = path.with_name(f"{path.name}.{os.getpid()}")
            documents = [head, *(point.document() for point in self.points)]
            draft.write_text("".join(f"{json.dumps(each)}\n" for each in documents))
            draft.replace(path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None

    def add(self, points: Iterable[Point]) -> None:
        """Keep points, on disk too."""
        with self._path.open("a") as file:
            for point in points:
                self.points.append(point)
                file.write(f"{json.dumps(point.document())}\n")


def _read(path: Path, fingerprint: Fingerprint) -> list[Point]:
    lines = path.read_text(errors="replace").splitlines()
    try:
        head = json.loads(lines[0])
        stated = {name: tuple(values) for name, values in head["fingerprint"].items()}
        version = head["version"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise ConfigError(f"{path}:1: not a file of measurements; name another with --measurements") from None
    found = differences(stated, fingerprint)
    if version != _VERSION or found:
        what = "; ".join(found) or f"unknown version {version}; known: {_VERSION}"
        raise ConfigError(
            f"{path}: measured elsewhere ({what}); name another file with --measurements, or use --fresh"
        )
    points = [_point(line) for line in lines[1:]]
    if points and points[-1] is None:
        points.pop()  # the run was killed while it wrote this line
    for number, point in enumerate(points, 2):
        if point is None:
            raise ConfigError(
                f"{path}:{number}: not a measurement; name another file with --measurements, or use --fresh"
            )
    return [point for point in points if point is not None]


def _point(line: str) -> Point | None:
    try:
        return Point.from_document(json.loads(line))
    except (ValueError, KeyError, TypeError):
        return None
