"""Statistics of repeated timings: medians, confidence intervals, and bandwidths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb
from typing import Final

import numpy as np

from mcr_plus.core.kinds import bus_factor

CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Timing:
    """Microseconds of one operation by one candidate; `low` and `high` are the median's 95 % interval."""

    p20: float
    p50: float
    p80: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Summarise the samples, at least one."""
        ordered = np.sort(np.asarray(samples, np.float64))
        p20, p50, p80 = (float(value) for value in np.percentile(ordered, (20, 50, 80)))
        rank = confidence_rank(len(ordered))
        return cls(p20, p50, p80, float(ordered[rank]), float(ordered[len(ordered) - 1 - rank]), len(ordered))

    @property
    def spread(self) -> float:
        """Half the width of the interval, relative to the median."""
        return (self.high - self.low) / 2 / self.p50 if self.p50 else 0.0


@cache
def confidence_rank(count: int) -> int:
    """Return the index of the sorted sample (0: smallest) that bounds the median's 95 % interval below.

    The sample at the same distance from the largest one is the upper bound. The index follows from the
    binomial distribution, for any distribution of the samples (Conover 1999, section 3.2). With fewer than 6
    samples it is 0 (the whole range), which encloses the median with lower probability.
    """
    rank, outside = 0, 1
    while 2 * (outside := outside + comb(count, rank + 1)) <= (1 - CONFIDENCE) * 2**count:
        rank += 1
    return min(rank, (count - 1) // 2)


def algorithm_bandwidth(nbytes: int, us: float) -> float:
    """Return GB/s in nccl-tests' convention: bytes over time."""
    return nbytes / us / 1e3 if us else 0.0


def bus_bandwidth(kind: str, nbytes: int, us: float, ranks: int) -> float:
    """Return the GB/s on a link, by the formulas of nccl-tests."""
    return algorithm_bandwidth(nbytes, us) * bus_factor(kind, ranks)
