"""Expected cost of operations: interpolate and extrapolate a table's measurements over size.

    model = CostModel(table)
    model.expected("mpi", Query("all_reduce", 1 << 20))      # Estimate(us=105.2, figure="measured", …)

Curves are made monotone, so that a larger message never costs less (pool adjacent violators, Barlow et al.
1972). Between measured sizes it is linear in bytes, which is exact for latency plus size over bandwidth
(Hockney 1994), or linear in logarithms if that is lower, since time may grow faster than size when messages
outgrow a cache. Below the smallest size, the smallest size's time is an upper bound. Above the largest size,
the curve continues with the bandwidth of the last rising segment; without such a segment (as with a single
size), the largest size's time is a lower bound. These estimates are flagged. For numbers of ranks or nodes
without rules in the table,
estimates are flagged too: they use the times of the nearest numbers, scaled by the algorithm's formula
(`scaling`) if the links are the same, and unscaled otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mcr_plus.core.kinds import SHARED
from mcr_plus.core.units import Range
from mcr_plus.tables.fingerprint import Fingerprint
from mcr_plus.tables.scaling import UNKNOWN, Placement, Stretched, algorithms
from mcr_plus.tables.table import Query, Table, TableKey

Floats = NDArray[np.float64]
Figure = Literal["measured", "at_most", "at_least", "extrapolated", "unknown"]


@dataclass(frozen=True)
class Estimate:
    """Expected microseconds of one operation, and the quality of this estimate.

    `figure`: "measured" at a measured size or between two; "extrapolated" along a slope, or from other
    numbers of ranks or nodes; "at_most" below the smallest size, and "at_least" above the largest size if the
    slope is unknown: then only `bound_us` was measured, and `us` is an assumption for plans; "unknown" if the
    bound was measured on other numbers of ranks or nodes.
    """

    us: float
    figure: Figure = "measured"
    bound_us: float | None = None

    @property
    def extrapolated(self) -> bool:
        """True unless the estimate lies between measurements."""
        return self.figure != "measured"

    @property
    def comparable(self) -> bool:
        """True if `us` may be compared with the estimate of another library."""
        return self.figure in {"measured", "extrapolated"}

    def from_elsewhere(self) -> Estimate:
        """Return this estimate, marked for numbers of ranks or nodes that were not measured."""
        return Estimate(self.us, "extrapolated" if self.comparable else "unknown")


@dataclass(frozen=True)
class TimeCurve:
    """Time over size: monotone, interpolated between its points."""

    sizes: Floats
    times: Floats

    @classmethod
    def through(cls, points: Mapping[int, float]) -> TimeCurve:
        """Return the curve through measured microseconds by bytes, at least one point."""
        sizes = sorted(points)
        return cls(np.array(sizes, np.float64), isotonic(np.array([points[size] for size in sizes])))

    def at(self, nbytes: float) -> Estimate:
        """Return the expected time of an operation of `nbytes`."""
        if nbytes < self.sizes[0]:
            return Estimate(float(self.times[0]), "at_most", float(self.times[0]))
        if nbytes > self.sizes[-1]:
            slope, largest = self._slope_beyond(), float(self.times[-1])
            beyond = nbytes - float(self.sizes[-1])
            if slope is None:
                return Estimate(largest + self._half_bandwidth() * beyond, "at_least", largest)
            return Estimate(largest + slope * beyond, "extrapolated")
        return Estimate(self._between(nbytes))

    def _between(self, nbytes: float) -> float:
        """Return the lower of the linear and the log-log interpolation between the two nearest points."""
        index = int(np.searchsorted(self.sizes, nbytes))
        if self.sizes[index] == nbytes:
            return float(self.times[index])
        sizes, times = self.sizes[index - 1 : index + 1], self.times[index - 1 : index + 1]
        straight = float(np.interp(nbytes, sizes, times))
        if sizes[0] == 0:
            return straight
        return min(straight, math.exp(np.interp(math.log(nbytes), np.log(sizes), np.log(times))))

    def _slope_beyond(self) -> float | None:
        """Return the microseconds per byte above the largest size, from the last rising segment; or None."""
        largest, time = self.sizes[-1], self.times[-1]
        below = np.flatnonzero(self.times < time)
        if len(below):
            return float((time - self.times[below[-1]]) / (largest - self.sizes[below[-1]]))
        return None

    def _half_bandwidth(self) -> float:
        """Return the microseconds per byte if half of a single point's time is latency."""
        return float(self.times[-1] / self.sizes[-1]) / 2 if self.sizes[-1] else 0.0


def isotonic(values: Floats) -> Floats:
    """Return the closest non-decreasing sequence by least squares: decreasing neighbours are averaged."""
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
        self._fingerprint = table.fingerprint
        self._curves: dict[TableKey, dict[str, TimeCurve]] = {
            key: {choice: TimeCurve.through(points) for choice, points in _joined(rules).items()}
            for key, rules in (
                (key, [rule.measured for rule in rules]) for key, rules in table.by_key().items()
            )
        }

    def choices(self, query: Query) -> list[str]:
        """Return the choices with measurements for operations like this one."""
        covering = (curves for key, curves in self._curves.items() if key.covers(query))
        return list(dict.fromkeys(choice for curves in covering for choice in curves))

    def expected(self, choice: str, query: Query) -> Estimate | None:
        """Return the expected time of `query` by `choice` (`name` or `name:algorithm`).

        None without a measurement or without a size. If this number of ranks or nodes was not measured, the
        nearest number is used, scaled if the formula of an algorithm applies; the same holds for dtypes.
        Asynchronous and synchronous measurements do not replace each other: tables have exposed times of
        asynchronous operations, and whole times of synchronous operations.
        """
        measured = [key for key, curves in self._curves.items() if choice in curves]
        exact = next((key for key in measured if key.covers(query)), None)
        similar = (key for key in measured if _is_similar(key, query))
        key = exact or min(similar, key=lambda key: _distance(key, query), default=None)
        size = None if key is None else query.size(key.basis)
        if key is None or size is None:
            return None
        curve = self._curves[key][choice]
        return (
            curve.at(size)
            if exact
            else self._scaled(curve, key, choice, query) or curve.at(size).from_elsewhere()
        )

    def _scaled(self, curve: TimeCurve, key: TableKey, choice: str, query: Query) -> Estimate | None:
        """Return the estimate by the formulas of the choice's algorithms; None if none applies."""
        at, to = placement_of(key, self._fingerprint), placed(query.ranks, query.nodes, query.ranks_per_node)
        # Other numbers of nodes are comparable only if as many ranks share a node's link as measured.
        alike = at is not None and (
            at.nodes == to.nodes == 1 or (min(at.nodes, to.nodes) > 1 and at.per_node == to.per_node)
        )
        if at is None or not alike or at == to or query.nbytes is None:
            return None
        asked: list[Estimate] = []

        def measured(nbytes: float) -> float:
            asked.append(curve.at(basis_bytes(nbytes, key, at)))
            return asked[-1].us

        found = (
            Stretched(algorithm, measured, at, UNKNOWN, to, UNKNOWN).seconds(query.nbytes)
            for algorithm in algorithms(query.kind, choice)
        )
        us = min((each for each in found if each is not None), default=None)
        if us is None:
            return None
        return Estimate(us, "extrapolated" if all(each.comparable for each in asked) else "unknown")


def basis_bytes(nbytes: float, key: TableKey, at: Placement) -> float:
    """Return the bytes in the basis of a key, for an operation of `nbytes` in total."""
    per_rank = key.basis == "per_rank" and key.kind.removesuffix("_v") in SHARED
    return nbytes / at.ranks if per_rank else nbytes


def placed(ranks: int, nodes: int, per_node: int) -> Placement:
    """Return the placement of ranks in one rack."""
    return Placement(ranks, nodes, ranks if nodes == 1 else per_node, 1, ranks)


def placement_of(key: TableKey, fingerprint: Fingerprint) -> Placement | None:
    """Return the placement of the measured ranks of a key, from the key or else the table's fingerprint.

    None unless the numbers of ranks, nodes and ranks per node are unique.
    """
    found: list[int] = []
    for name in ("ranks", "nodes", "ranks_per_node"):
        numbers: Range | None = getattr(key, name)
        facts = fingerprint.get(name, ())
        if numbers is not None and numbers.hi == numbers.lo + 1:
            found.append(numbers.lo)
        elif numbers is None and len(facts) == 1 and facts[0].isdigit():
            found.append(int(facts[0]))
        else:
            return None
    ranks, nodes, per_node = found
    return placed(ranks, nodes, per_node) if 0 < nodes <= ranks <= nodes * per_node else None


def _is_similar(key: TableKey, query: Query) -> bool:
    """Return whether the key differs from the query only in scale or dtype."""
    alike = TableKey(key.kind, device=key.device, async_op=key.async_op, basis=key.basis)
    return key.kind != "*" and alike.covers(query)


def _distance(key: TableKey, query: Query) -> tuple[float, ...]:
    """Return the distance of a key's measurements from an operation, most influential property first."""
    return (
        _octaves(key.nodes, query.nodes),
        _octaves(key.ranks_per_node, query.ranks_per_node),
        _octaves(key.ranks, query.ranks),
        key.dtype not in (None, query.dtype),
    )


def _octaves(measured: Range | None, number: int) -> float:
    """Return the number of doublings or halvings between a number and a range; 0 inside."""
    if measured is None or measured.covers(number):
        return 0.0
    nearest = measured.lo if number < measured.lo or measured.hi is None else measured.hi - 1
    return abs(math.log2(nearest / number))


def _joined(measured: Iterable[Mapping[str, Mapping[int, float]]]) -> dict[str, dict[int, float]]:
    """Return the points of every choice, from all rules of a key."""
    joined: dict[str, dict[int, float]] = {}
    for curves in measured:
        for choice, points in curves.items():
            joined.setdefault(choice, {}).update(points)
    return {choice: points for choice, points in joined.items() if points}
