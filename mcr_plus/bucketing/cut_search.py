"""Search for the best cuts of a compiled graph jointly with the best buckets: an extension of `search`.

    found = search_cuts(ready, compute, prices, positions, costs)
    found.cuts          # [index in positions, …]
    found.buckets       # [(begin, end, choice), …]

All gradients of a part become ready at the end of the part. A cut between two parts delays all later
computation by the cost of the cut, which is the loss of fusion. A state of the search is the number of sent
gradients, and the end of the part that contains the last of them. States have labels (F, D) as in `search`. A
bucket that ends in another part than the previous bucket pays for the cut at the end of the previous bucket's
part. A cut inside a bucket makes no gradient ready earlier, and is never chosen.
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
    """The best plan, and its `cuts`: ascending indices into `positions`.

    `bound` holds for every choice of cuts, even if cuts cost nothing.
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
        ready: ready time of each gradient in seconds, ascending, if the graph is cut at all positions at no
            cost. compute: total seconds of computation, without cuts.
        prices: prices of all buckets and choices. positions: number of gradients that become ready before
            each possible cut, strictly ascending, from 1 to the number of gradients - 1. costs: non-negative
            seconds of each cut. labels: maximum number of labels kept for a state.

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
    """Trace back the buckets and cuts that led to a label of the last gradient."""
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
    """Return the labels (F, D) of each state: the last sent gradient, and the end of its part.

    Also returns the bucket that led to each label: (begin, part at begin, label at begin, choice). Labels
    that cannot end by `upper` are dropped, as in `search`.
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
                # Not as arrays: array assignments take seconds to compile.
                came[j, part, label, 0], came[j, part, label, 1] = origins[at, 0], origins[at, 1]
                came[j, part, label, 2], came[j, part, label, 3] = origins[at, 2], origins[at, 3]
            known[j, part] = len(kept)
    return free, delay, came, dropped
