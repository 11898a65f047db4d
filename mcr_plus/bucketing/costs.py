"""Costs of buckets: duration when alone, and share of the core taken from concurrent computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mcr_plus.bucketing.search import Prices

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

OVERHEAD: Final = 50e-6
"""Seconds in which a rank issues an operation and waits for it."""
SEARCHED: Final = 600
"""Most gradients in a search; its memory and time grow with the square of their number."""


@dataclass(frozen=True)
class BucketCurve:
    """Duration and core share of an operation as functions of its bytes, linear between points.

    Above the largest size, the time continues with the slope of the last two points; below the smallest size,
    it is constant.
    """

    sizes: Floats
    seconds: Floats
    shares: Floats

    @classmethod
    def through(cls, points: Mapping[int, tuple[float, float]]) -> BucketCurve:
        """Return the curve through points {bytes: (seconds, share)}, with seconds made non-decreasing."""
        sizes = np.array(sorted(points), np.float64)
        seconds, shares = (np.array([points[int(size)][part] for size in sizes]) for part in (0, 1))
        return cls(sizes, np.maximum.accumulate(seconds), np.clip(shares, 0.0, 1.0))

    def times(self, nbytes: Ints | Floats) -> Floats:
        """Return the seconds of operations of these sizes."""
        within: Floats = np.interp(nbytes, self.sizes, self.seconds)
        if len(self.sizes) < 2:
            return within
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
        beyond: Floats = np.maximum(np.asarray(nbytes, np.float64) - self.sizes[-1], 0.0)
        found: Floats = within + slope * beyond
        return found

    def losses(self, nbytes: Ints | Floats) -> Floats:
        """Return the core shares of operations of these sizes."""
        found: Floats = np.interp(nbytes, self.sizes, self.shares)
        return found


def prices(nbytes: Sequence[int], alignment: int, curves: Sequence[BucketCurve], overhead: float) -> Prices:
    """Return the prices of all buckets of consecutive gradients with these sizes, for each curve.

    In a bucket, every gradient is aligned to `alignment` bytes.
    """
    count = len(nbytes)
    own = np.array(nbytes, np.int64)
    ends = np.concatenate([[0], np.cumsum(-(-own // alignment) * alignment)])
    last = np.concatenate([[0], own - np.diff(ends)])  # no padding after the last gradient
    sizes = np.maximum(ends[None, :] + last[None, :] - ends[:, None], 0)
    later = np.arange(count + 1)[None, :] > np.arange(count + 1)[:, None]
    seconds = np.stack([np.where(later, curve.times(sizes), np.inf) for curve in curves])
    shares = np.stack([np.where(later, curve.losses(sizes), 0.0) for curve in curves])
    return Prices(seconds, shares, overhead)


def groups(sizes: Sequence[int], most: int = SEARCHED, starts: Sequence[int] = ()) -> list[int]:
    """Return the ends of groups of neighbouring gradients that a search keeps together.

    Up to `most` gradients form groups of one gradient each; with more gradients, small neighbours share a
    group. No group extends across an index in `starts`.
    """
    least = 2 * sum(sizes) / most if len(sizes) > most else 0.0
    fixed, held = {*starts, len(sizes)}, 0
    ends: list[int] = []
    for end, size in enumerate(sizes, start=1):
        held += size
        if held >= least or end in fixed:
            ends.append(end)
            held = 0
    return ends
