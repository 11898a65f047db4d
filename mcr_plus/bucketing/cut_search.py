"""The best positions to cut a compiled graph, jointly with the best buckets: an extension of `search`.

    found = search_cuts(ready, compute, prices, positions, costs)
    found.cuts          # [index in positions, …]
    found.buckets       # [(begin, end, choice), …]

All gradients of a part become ready at its end, that is when its last one is computed. A cut between two
parts delays all later computation by its cost, the loss of fusion across it. A state of the search is the
number of gradients sent and the end of the part that contains the last of them; its labels (F, D) are those
of `search`. A bucket that ends in another part than its predecessor pays for the cut at the end of the
predecessor's part. A cut inside a bucket, which would make no gradient ready earlier, is never taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mcr_plus.bucketing.search import Floats, FoundPlan, Prices, checked_times, front, least_end, rest
from mcr_plus.kernels.cpu import compiled

_LABELS: Final = 64  # per state
_FEW: Final = 4
_ROUNDING: Final = 1e-9  # bounds and labels add the same numbers in a different order
_NONE: Final = -1


@dataclass(frozen=True)
class FoundCuts(FoundPlan):
    """The best plan and `cuts`: ascending indices into the given positions.

    `bound` holds for every choice of cuts, including cuts without a cost.
    """

    cuts: tuple[int, ...] = ()


def search_cuts(
    ready: Sequence[float] | Floats,
    compute: float,
    prices: Prices,
    positions: Sequence[int],
    costs: Sequence[float],
    labels: int = _LABELS,
) -> FoundCuts:
    """Return the cuts and buckets with the earliest end of the step.

    Args:
        ready: seconds after which each gradient is ready if the graph is cut at all positions at no cost,
            ascending. compute: seconds of computation in total, without cuts.
        prices: of all buckets and choices. positions: the number of gradients that become ready before each
            possible cut, strictly ascending, from 1 to the number of gradients - 1. costs: non-negative
            seconds of each cut. labels: the largest number of labels kept for a state.

    Raises:
        ValueError: `ready` or `positions` is not ascending, a position or a cost is out of range, or an
            argument has an unexpected length.
    """
    times = checked_times(ready, prices)
    count = len(times)
    if not count and not len(positions):
        return FoundCuts([], compute, compute, True, compute, ())
    if len(costs) != len(positions) or any(not cost >= 0 for cost in costs):
        raise ValueError(f"costs: expected {len(positions)} that are not negative, got {list(costs)}")
    if any(not low < high for low, high in zip([0, *positions], [*positions, count], strict=True)):
        raise ValueError(f"positions: expected ascending ones from 1 to {count - 1}, got {list(positions)}")
    ends = np.array([*positions, count], np.int64)
    to_come = rest(times, compute, prices.seconds, prices.lost)
    step, buckets, cuts, least = np.inf, list[tuple[int, int, int]](), tuple[int, ...](), 0.0
    for most in sorted({min(_FEW, labels), labels}):
        free, delay, came, dropped = _labels(
            times, prices.seconds, prices.shares, prices.overhead, ends,
            np.array([*costs, 0.0]), *to_come, step * (1 + _ROUNDING), most,
        )  # fmt: skip
        last = np.maximum(free[count, -1], compute + delay[count, -1])
        if last.min() < step:
            step = float(last.min())
            buckets, cuts = _traced(came, len(positions), int(np.argmin(last)))
        least = max(least, min(step, dropped))
        if least >= step * (1 - _ROUNDING):
            break
    lowest = to_come.bound
    exact = least >= step * (1 - _ROUNDING)
    return FoundCuts(buckets, step, lowest, exact, max(least, lowest), cuts)


def prepare() -> None:
    """Compile the kernels of a search, or load them from disk."""
    seconds = np.ones((1, 3, 3))
    search_cuts(np.zeros(2), 0.0, Prices(seconds, np.zeros_like(seconds)), [1], [0.0])


def _traced(
    came: NDArray[np.int64], part: int, label: int
) -> tuple[list[tuple[int, int, int]], tuple[int, ...]]:
    """Return the buckets and cuts that led to a label of the last gradient."""
    buckets, cuts, end = list[tuple[int, int, int]](), list[int](), len(came) - 1
    while end:
        begin, before, at, choice = (int(each) for each in came[end, part, label])
        buckets.append((begin, end, choice))
        if before != part:
            cuts.append(before)
        end, part, label = begin, before, at
    return buckets[::-1], tuple(cuts[::-1])


@compiled
def _labels(  # type: ignore[no-untyped-def]
    ready, seconds, shares, overhead, ends, costs, weights, after, late, upper, most
):
    """Return the labels (F, D) for each gradient as the last one sent, and each part that may contain it.

    Also returns the bucket that led to each label: (begin, part there, label there, choice). Labels that
    cannot end by `upper` are dropped, as in `search`.
    """
    choices, count, parts = len(seconds), len(ready), len(ends)
    free = np.full((count + 1, parts, most), np.inf)
    delay = np.full((count + 1, parts, most), np.inf)
    came = np.full((count + 1, parts, most, 4), _NONE, np.int64)
    known = np.zeros((count + 1, parts), np.int64)
    free[0, :, 0] = delay[0, :, 0] = 0.0
    known[0, :] = 1
    dropped = np.inf
    room = count * parts * most * choices
    frees, delays, leasts = np.empty(room), np.empty(room), np.empty(room)
    origins = np.empty((room, 4), np.int64)
    for j in range(1, count + 1):
        for part in range(parts):
            if ends[part] < j:
                continue
            until = ready[ends[part] - 1]
            found = 0
            for i in range(j):
                for before in range(part + 1):
                    if before != part and (i == 0 or ends[before] >= j):
                        continue
                    cut = costs[before] if before != part else 0.0
                    for choice in range(choices):
                        time = seconds[choice, i, j]
                        if not np.isfinite(time):
                            continue
                        lost = shares[choice, i, j] * time + overhead
                        for label in range(known[i, before]):
                            behind = delay[i, before, label] + cut
                            end = max(free[i, before, label], until + behind) + time
                            behind += lost
                            least = least_end(end, behind, weights, after, late, j)
                            if least <= upper:
                                frees[found], delays[found], leasts[found] = end, behind, least
                                origins[found, 0], origins[found, 1] = i, before
                                origins[found, 2], origins[found, 3] = label, choice
                                found += 1
            kept, least = front(frees[:found], delays[:found], leasts[:found], most)
            dropped = min(dropped, least)
            for label, at in enumerate(kept):
                free[j, part, label], delay[j, part, label] = frees[at], delays[at]
                came[j, part, label] = origins[at]
            known[j, part] = len(kept)
    return free, delay, came, dropped
