"""What a rank has noted of its operations, in parts of which each is a value in the job's store."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from mcr_plus.board.base import Noted

PART: Final = 1024
"""Operations, by their numbers."""
KEPT: Final = 256
"""The latest parts of a rank, which are kept."""
_COLUMNS: Final = 4  # number, and three times in µs
_BYTES: Final = PART * _COLUMNS * 8


class NotedParts:
    """The operations of this rank in one group. One that is noted again takes the place of the former."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, tuple[float, float, float]]] = {}  # noted since they were packed
        self._packed: dict[int, bytes] = {}  # those before, in a small part of the memory

    def add(self, sequence: int, times: tuple[float, float, float]) -> None:
        """Note an operation."""
        self._parts.setdefault(sequence // PART, {})[sequence] = times

    def changed(self) -> Iterator[tuple[int, bytes]]:
        """The parts with operations that were noted since the last call, as values; forgets old parts."""
        parts, self._parts = self._parts, {}
        for part in sorted({*self._packed, *parts})[:-KEPT]:
            self._packed.pop(part, None)
            parts.pop(part, None)
        for part in sorted(parts):
            before = self._packed.get(part)
            self._packed[part] = packed((unpacked(before) if before else {}) | parts[part])
            yield part, self._packed[part]


def place_of(part: int) -> int:
    """Where a part is in the store: in the place of one that is no longer kept.

    None is removed as long as a rank may read it, so that a reader that has found one gets it.
    """
    return part % KEPT


def packed(noted: Noted) -> bytes:
    """Operations as a value: differences of microseconds, which are small, and compressed."""
    rows = np.array([(number, *times) for number, times in list(noted.items())])
    rows[:, 1:] *= 1e6
    whole = np.rint(rows).astype(np.int64)
    return zlib.compress(np.diff(whole, axis=0, prepend=0).T.tobytes(), 1)


def unpacked(value: bytes) -> Noted:
    """The inverse of `packed`, to the microsecond; empty for what is none."""
    unpacking = zlib.decompressobj()
    try:
        columns = np.frombuffer(unpacking.decompress(value, _BYTES), np.int64)
        numbers, *times = columns.reshape(_COLUMNS, -1).cumsum(axis=1)
    except (ValueError, zlib.error):
        return {}
    if not unpacking.eof:
        return {}
    seconds = np.stack(times, axis=1) * 1e-6
    return {
        int(number): (issued, idle, done)
        for number, (issued, idle, done) in zip(numbers, seconds.tolist(), strict=True)
    }
