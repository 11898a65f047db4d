"""What an operation is expected to cost: the times of a table, between and beyond the sizes measured.

    model = CostModel(table)
    model.expected("mpi", Query("all_reduce", 1 << 20))      # Estimate(us=105.2, extrapolated=False)

A curve is made monotone (a larger message never costs less: pool adjacent violators, Barlow et al. 1972).
Between measured sizes it is a straight line in bytes, exact where latency plus size over bandwidth is
(Hockney 1994), or one in logarithms where that is lower: where time grows faster than size, as it does where
a message outgrows a cache. Below the smallest size it is flat; beyond the largest it goes on at the bandwidth
of the last stretch that rises. Both are flagged, and so are numbers of ranks or nodes that the table has no
rules for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcr_plus.selection.table import Query, Table, TableKey
from mcr_plus.units import Range

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """Expected microseconds of one operation; `extrapolated` says that no measurement encloses it."""

    us: float
    extrapolated: bool


@dataclass(frozen=True)
class Curve:
    """Time over size: monotone, in pieces between its points."""

    sizes: Floats
    times: Floats

    @classmethod
    def through(cls, points: Mapping[int, float]) -> Curve:
        """The curve of measured microseconds by bytes; at least one point."""
        sizes = sorted(points)
        return cls(np.array(sizes, np.float64), isotonic(np.array([points[size] for size in sizes])))

    def at(self, nbytes: int) -> Estimate:
        """Expected time of an operation of `nbytes`."""
        if nbytes < self.sizes[0]:
            return Estimate(float(self.times[0]), extrapolated=True)
        if nbytes > self.sizes[-1]:
            beyond = float(self.times[-1] + self._slope_beyond() * (nbytes - self.sizes[-1]))
            return Estimate(beyond, extrapolated=True)
        return Estimate(self._between(nbytes), extrapolated=False)

    def _between(self, nbytes: int) -> float:
        """The lower of the lines in bytes and in logarithms through the two points around `nbytes`."""
        index = int(np.searchsorted(self.sizes, nbytes))
        if self.sizes[index] == nbytes:
            return float(self.times[index])
        sizes, times = self.sizes[index - 1 : index + 1], self.times[index - 1 : index + 1]
        straight = float(np.interp(nbytes, sizes, times))
        if sizes[0] == 0:
            return straight
        return min(straight, math.exp(np.interp(math.log(nbytes), np.log(sizes), np.log(times))))

    def _slope_beyond(self) -> float:
        """Microseconds per byte beyond the largest size: those of the last stretch that rises."""
        largest, time = self.sizes[-1], self.times[-1]
        below = np.flatnonzero(self.times < time)
        if len(below):
            return float((time - self.times[below[-1]]) / (largest - self.sizes[below[-1]]))
        # Nothing tells latency from bandwidth: each gets half of the time.
        return float(time / largest) / 2 if largest else 0.0


def isotonic(values: Floats) -> Floats:
    """The closest sequence that never falls, by least squares: neighbours that fall are averaged."""
    blocks: list[tuple[float, int]] = []  # mean and length
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, length = blocks.pop()
            mean, count = (before * length + mean * count) / (length + count), count + length
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks]).astype(np.float64)


class CostModel:
    """Expected times by choice and operation, from the measurements of one table."""

    def __init__(self, table: Table) -> None:
        """Collect the curves of every key of the table."""
        self._curves: dict[TableKey, dict[str, Curve]] = {
            key: {choice: Curve.through(points) for choice, points in _joined(rules).items()}
            for key, rules in (
                (key, [rule.measured for rule in rules]) for key, rules in table.by_key().items()
            )
        }

    def choices(self, query: Query) -> list[str]:
        """What has been measured for operations like this one."""
        covering = (found for key, found in self._curves.items() if key.covers(query))
        return list(dict.fromkeys(choice for found in covering for choice in found))

    def expected(self, choice: str, query: Query) -> Estimate | None:
        """Expected time of `query` by `choice` (`name` or `name:algorithm`); None if nothing is known.

        Where there are no measurements of this number of ranks or nodes those of the nearest are taken; those
        of other dtypes likewise. Not those of the other manner of calling: for asynchronous operations
        tables have exposed times, for synchronous ones whole times. Without a size, None.
        """
        measured = [key for key, curves in self._curves.items() if choice in curves]
        exact = next((key for key in measured if key.covers(query)), None)
        akin = (key for key in measured if _akin(key, query))
        key = exact or min(akin, key=lambda key: _distance(key, query), default=None)
        size = None if key is None else query.size(key.basis)
        if key is None or size is None:
            return None
        estimate = self._curves[key][choice].at(size)
        return Estimate(estimate.us, exact is None or estimate.extrapolated)


def _akin(key: TableKey, query: Query) -> bool:
    """Whether only the scale or the dtype is another."""
    alike = TableKey(key.kind, device=key.device, async_op=key.async_op, basis=key.basis)
    return key.kind != "*" and alike.covers(query)


def _distance(key: TableKey, query: Query) -> tuple[float, ...]:
    """How far the measurements of a key are from an operation; what changes times most stands first."""
    return (
        _octaves(key.nodes, query.nodes),
        _octaves(key.ranks_per_node, query.ranks_per_node),
        _octaves(key.ranks, query.ranks),
        key.dtype not in (None, query.dtype),
    )


def _octaves(measured: Range | None, number: int) -> float:
    """How often a number must be doubled or halved to be in a range."""
    if measured is None or measured.covers(number):
        return 0.0
    nearest = measured.lo if number < measured.lo or measured.hi is None else measured.hi - 1
    return abs(math.log2(nearest / number))


def _joined(measured: Iterable[Mapping[str, Mapping[int, float]]]) -> dict[str, dict[int, float]]:
    """Every choice's points, of all rules of a key."""
    joined: dict[str, dict[int, float]] = {}
    for curves in measured:
        for choice, points in curves.items():
            joined.setdefault(choice, {}).update(points)
    return {choice: points for choice, points in joined.items() if points}
