"""Store the noted times of a rank's operations in parts; each part is a value in the job's store."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from mcr_plus.board.base import Noted

PART: Final = 1024
"""Operations in a part, by consecutive numbers."""
KEPT: Final = 256
"""Number of latest parts of a rank that are kept."""
_COLUMNS: Final = 4  # number, and three times in µs
_BYTES: Final = PART * _COLUMNS * 8


class NotedParts:
    """Noted operations of this rank in one group. Noting an operation again replaces its times."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, tuple[float, float, float]]] = {}  # noted since the last packing
        self._packed: dict[int, bytes] = {}  # earlier operations, packed to save memory

    def add(self, sequence: int, times: tuple[float, float, float]) -> None:
        """Note an operation."""
        self._parts.setdefault(sequence // PART, {})[sequence] = times

    def changed(self) -> Iterator[tuple[int, bytes]]:
        """Return the parts changed since the last call, as values; forget old parts."""
        parts, self._parts = self._parts, {}
        for part in sorted({*self._packed, *parts})[:-KEPT]:
            self._packed.pop(part, None)
            parts.pop(part, None)
        for part in sorted(parts):
            before = self._packed.get(part)
            self._packed[part] = packed((unpacked(before) if before else {}) | parts[part])
            yield part, self._packed[part]


def place_of(part: int) -> int:
    """Return the place of a part in the store, taken over from a part that is no longer kept.

    No part is removed while a rank may read it, so a reader that has found a part gets it.
    """
    return part % KEPT


def packed(noted: Noted) -> bytes:
    """Pack operations into a value, as compressed differences of microseconds."""
    rows = np.array([(number, *times) for number, times in list(noted.items())])
    rows[:, 1:] *= 1e6
    whole = np.rint(rows).astype(np.int64)
    return zlib.compress(np.diff(whole, axis=0, prepend=0).T.tobytes(), 1)


def unpacked(value: bytes) -> Noted:
    """Return the operations of a packed value, to the microsecond; empty if the value is malformed."""
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
