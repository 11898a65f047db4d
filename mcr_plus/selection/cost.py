"""What an operation is expected to cost: the times of a table, between and beyond the sizes measured.

    model = CostModel(table)
    model.expected("mpi", Query("all_reduce", 1 << 20))      # Estimate(us=105.2, extrapolated=False)

A curve is made monotone (a larger message never costs less: pool adjacent violators, Barlow et al. 1972) and
is linear in bytes between measured sizes, which is exact wherever latency plus size over bandwidth (Hockney
1994) is. Below the smallest size it is flat; beyond the largest it goes on at the bandwidth of the last
stretch. Both are flagged, and so are numbers of ranks or nodes that the table has no rules for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mcr_plus.selection.table import Query, Table, TableKey

_EPS: Final = 1e-6  # microseconds

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """Expected microseconds of one operation; `extrapolated` says that no measurement encloses it."""

    us: float
    extrapolated: bool


@dataclass(frozen=True)
class Curve:
    """Time over size: monotone, linear in bytes between its points."""

    sizes: Floats
    times: Floats

    @classmethod
    def through(cls, points: Mapping[int, float]) -> Curve:
        """The curve of measured microseconds by bytes; at least one point."""
        sizes = sorted(points)
        return cls(np.array(sizes, np.float64), isotonic(np.array([points[size] for size in sizes])))

    def at(self, nbytes: int) -> Estimate:
        """Expected time of an operation of `nbytes`."""
        smallest, largest = self.sizes[0], self.sizes[-1]
        if nbytes <= largest:
            time = float(np.interp(nbytes, self.sizes, self.times))
            return Estimate(time, extrapolated=nbytes < smallest)
        slope = 0.0
        if len(self.sizes) > 1:
            slope = float((self.times[-1] - self.times[-2]) / (largest - self.sizes[-2]))
        # Where noise makes the last stretch flat, at least the largest message's own bandwidth holds.
        slope = max(slope, float(self.times[-1] / largest) / 2 if largest else 0.0)
        return Estimate(float(self.times[-1]) + slope * (nbytes - float(largest)), extrapolated=True)


def isotonic(values: Floats) -> Floats:
    """The closest sequence that never falls, by least squares: neighbours that fall are averaged."""
    blocks: list[tuple[float, int]] = []  # mean and length
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean + _EPS:
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
        return list(dict.fromkeys(c for key, found in self._curves.items() if key.covers(query) for c in found))

    def expected(self, choice: str, query: Query) -> Estimate | None:
        """Expected time of `query` by `choice` (`name` or `name:algorithm`); None if nothing is known.

        Measurements of another number of ranks or nodes are taken where there are none of this one; those
        of other dtypes and of synchronous calls likewise. Without a size, None.
        """
        exact = self._curve(choice, query)
        if exact is not None:
            return self._at(exact, query, extrapolated=False)
        other = next((key for key in self._curves if choice in self._curves[key] and _akin(key, query)), None)
        return None if other is None else self._at((other, self._curves[other][choice]), query, extrapolated=True)

    def _curve(self, choice: str, query: Query) -> tuple[TableKey, Curve] | None:
        found = (key for key, curves in self._curves.items() if choice in curves and key.covers(query))
        return next(((key, self._curves[key][choice]) for key in found), None)

    @staticmethod
    def _at(found: tuple[TableKey, Curve], query: Query, *, extrapolated: bool) -> Estimate | None:
        key, curve = found
        size = query.size(key.basis)
        if size is None:
            return None
        estimate = curve.at(size)
        return Estimate(estimate.us, extrapolated or estimate.extrapolated)


def _akin(key: TableKey, query: Query) -> bool:
    """Whether only the scale, the dtype or the manner of the call is another."""
    alike = TableKey(key.kind, device=key.device, basis=key.basis)
    return key.kind != "*" and alike.covers(query)


def _joined(measured: Iterable[Mapping[str, Mapping[int, float]]]) -> dict[str, dict[int, float]]:
    """Every choice's points, of all rules of a key."""
    joined: dict[str, dict[int, float]] = {}
    for curves in measured:
        for choice, points in curves.items():
            joined.setdefault(choice, {}).update(points)
    return {choice: points for choice, points in joined.items() if points}
