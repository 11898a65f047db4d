"""The best buckets of gradients, and the library of each: an exact search with a lower bound.

    found = search(ready, compute, prices)
    found.buckets       # [(begin, end, choice), …] in the order of sending
    found.step, found.bound

The model: one channel, on which buckets are sent one after another. While an operation is in flight it takes
its *share* of the core that computes, so all remaining computation is delayed by share times its time;
issuing an operation delays it by a constant. A bucket of the gradients i … j-1 may start once the last of
them is ready and the channel is free:

    start = max(F, ready of j-1 + D),   F' = start + time,   D' = D + share * time + overhead

with F the time at which the channel is free and D the delay of computation so far. The step ends when both
have ended: max(F, compute + D). Smaller F and D are always better, so only the Pareto-optimal labels (F, D)
after the first j gradients need be kept; then the search over all consecutive buckets and all libraries is
exact. The whole share of an operation is counted before the next gradient, which is pessimistic by at most
one operation's share; `simulate` computes the exact timeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mcr_plus.kernels.cpu import compiled

Floats = NDArray[np.float64]
_LABELS: Final = 1024  # kept for each gradient; `Found.exact` is True if they sufficed
_BEAMS: Final = (8, 64, 512)  # smaller numbers tried first: their results exclude most labels
_SECONDS: Final = 2.0
_ROUNDING: Final = 1e-9  # bounds and labels add the same numbers in a different order
_NONE: Final = -1


@dataclass(frozen=True)
class Prices:
    """Costs of buckets: `seconds[choice, i, j]` is the duration of a bucket of the gradients i … j-1.

    `shares[choice, i, j]`: the fraction of it that is lost to computation, 0 to 1. `overhead`: seconds of
    computation that every bucket costs. Entries with j <= i are not read; impossible buckets have infinite
    seconds.
    """

    seconds: Floats
    shares: Floats
    overhead: float = 0.0


@dataclass(frozen=True)
class Found:
    """The best plan found; times in seconds.

    `buckets`: (begin, end, choice) of consecutive gradients. `step`: the end of the step in the model.
    `bound`: lower bound over all plans, which also holds if shares are counted as they accrue. `exact`: no
    dropped label could have led to an earlier end, so `step` is the optimum. `least`: lower bound over all
    plans in this model, from the dropped labels.
    """

    buckets: list[tuple[int, int, int]]
    step: float
    bound: float
    exact: bool
    least: float = 0.0

    @property
    def gap(self) -> float:
        """Upper bound of the plan's relative distance to the optimum of this model."""
        least = max(self.least, self.bound)
        return max(self.step / least - 1, 0.0) if least else 0.0


def search(
    ready: Sequence[float] | Floats,
    compute: float,
    prices: Prices,
    labels: int = _LABELS,
    seconds: float = _SECONDS,
) -> Found:
    """Return the buckets with the earliest end of the step.

    Args:
        ready: seconds after which each gradient is ready, ascending. compute: seconds of computation in
            total. prices: of all buckets and choices. labels: the largest number kept for each gradient;
            fewer if the search would take longer than `seconds`.

    Raises:
        ValueError: `ready` is not ascending, or prices are not of its length.
    """
    times = checked_times(ready, prices)
    count = len(times)
    if not count:
        return Found([], compute, compute, True, compute)
    after, loss, late = rest(times, prices)
    step, buckets, least, lowest = np.inf, list[tuple[int, int, int]](), 0.0, bound(times, compute, prices)
    began = perf_counter()
    for most, longer in beams(labels):
        before = perf_counter()
        free, delay, came, dropped = _labels(
            times, compute, prices.seconds, prices.shares, prices.overhead,
            after, loss, late, step * (1 + _ROUNDING), most,
        )  # fmt: skip
        ends = np.maximum(free[count], compute + delay[count])
        if ends.min() < step:
            step, buckets = float(ends.min()), _traced(came, int(np.argmin(ends)))
        least = max(least, min(step, dropped))
        now = perf_counter()
        if least >= step * (1 - _ROUNDING) or now - began + longer * (now - before) > seconds:
            break
    return Found(buckets, step, lowest, least >= step * (1 - _ROUNDING), max(least, lowest))


def checked_times(ready: Sequence[float] | Floats, prices: Prices) -> Floats:
    """Return `ready` as an array; raises `ValueError` if it is not ascending, or prices differ in length."""
    times = np.asarray(ready, np.float64)
    count = len(times)
    if np.any(np.diff(times) < 0):
        raise ValueError("ready: expected in ascending order")
    if prices.seconds.shape != (len(prices.seconds), count + 1, count + 1):
        raise ValueError(f"prices: expected [choices, {count + 1}, {count + 1}], got {prices.seconds.shape}")
    return times


def beams(labels: int) -> list[tuple[int, float]]:
    """Return the number of labels of each attempt, and the factor by which the next one takes longer."""
    most = [*(few for few in _BEAMS if few < labels), labels]
    return [(this, next_ / this) for this, next_ in zip(most, [*most[1:], labels], strict=True)]


def _traced(came: NDArray[np.int64], label: int) -> list[tuple[int, int, int]]:
    """Return the buckets that led to a label of the last gradient."""
    buckets, end = [], len(came) - 1
    while end:
        begin, before, choice = (int(each) for each in came[end, label])
        buckets.append((begin, end, choice))
        end, label = begin, before
    return buckets[::-1]


def prepare() -> None:
    """Compile the kernels of a search, or load them from disk."""
    seconds = np.ones((1, 2, 2))
    search(np.zeros(1), 0.0, Prices(seconds, np.zeros_like(seconds)))


def bound(ready: Floats, compute: float, prices: Prices) -> float:
    """Return a lower bound in seconds over all plans of this model.

    It is the maximum of two terms: the computation plus the least delay of sending all gradients; and, for
    each gradient, its ready time plus the least time of sending it and all later ones.
    """
    _, loss, late = rest(ready, prices)
    return float(max(compute + loss[0], late[0]))


def rest(ready: Floats, prices: Prices) -> tuple[Floats, Floats, Floats]:
    """Return, for every gradient, three lower bounds for it and all later ones.

    These are the seconds of sending them, the resulting delay of computation, and their earliest end.
    """
    known = np.isfinite(prices.seconds)
    lost = np.where(known, np.where(known, prices.seconds, 0.0) * prices.shares + prices.overhead, np.inf)
    times = prices.seconds.min(axis=0)
    # The bucket of a gradient may begin with an earlier one.
    ends = np.append(ready + _cheapest(np.minimum.accumulate(times, axis=0))[:-1], 0.0)
    return _cheapest(times), _cheapest(lost.min(axis=0)), np.maximum.accumulate(ends[::-1])[::-1]


@compiled
def _cheapest(price):  # type: ignore[no-untyped-def]
    """Return, for every i, the least total price of consecutive buckets of the gradients from i on."""
    count = len(price) - 1
    best = np.zeros(count + 1)
    for i in range(count - 1, -1, -1):
        least = np.inf
        for j in range(i + 1, count + 1):
            least = min(least, price[i, j] + best[j])
        best[i] = least
    return best


@compiled
def _labels(  # type: ignore[no-untyped-def]
    ready, compute, seconds, shares, overhead, after, loss, late, upper, most
):
    """Return the labels (F, D) after each gradient, and the bucket that led to each.

    A bucket is (begin, label there, choice). Also returns the earliest end of any dropped label. Labels that
    cannot end by `upper` are omitted: `after` and `loss` are lower bounds of the remaining seconds and delay,
    `late` of the end of later gradients.
    """
    choices, count = len(seconds), len(ready)
    free = np.full((count + 1, most), np.inf)
    delay = np.full((count + 1, most), np.inf)
    came = np.full((count + 1, most, 3), _NONE, np.int64)
    known = np.zeros(count + 1, np.int64)
    free[0, 0] = delay[0, 0] = 0.0
    known[0] = 1
    dropped = np.inf
    room = count * most * choices
    frees, delays, leasts = np.empty(room), np.empty(room), np.empty(room)
    begins, befores, taken = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    for j in range(1, count + 1):
        found = 0
        for i in range(j):
            for choice in range(choices):
                time = seconds[choice, i, j]
                if not np.isfinite(time):
                    continue
                lost = shares[choice, i, j] * time + overhead
                for label in range(known[i]):
                    end = max(free[i, label], ready[j - 1] + delay[i, label]) + time
                    behind = delay[i, label] + lost
                    least = max(end + after[j], compute + behind + loss[j], late[j] + behind)
                    if least <= upper:
                        frees[found], delays[found], leasts[found] = end, behind, least
                        begins[found], befores[found], taken[found] = i, label, choice
                        found += 1
        kept, least = front(frees[:found], delays[:found], leasts[:found], most)
        dropped = min(dropped, least)
        for label, at in enumerate(kept):
            free[j, label], delay[j, label] = frees[at], delays[at]
            came[j, label, 0], came[j, label, 1], came[j, label, 2] = begins[at], befores[at], taken[at]
        known[j] = len(kept)
    return free, delay, came, dropped


@compiled
def front(frees, delays, leasts, most):  # type: ignore[no-untyped-def]
    """Return the indices of the Pareto-optimal labels (F, D), and the least of `leasts` of dropped ones.

    Of more than `most` labels, those with the lowest `leasts` are kept. Without dropped labels, the second
    result is infinite.
    """
    kept, lowest = 0, np.inf
    found = np.empty(len(frees), np.int64)
    for at in np.argsort(frees, kind="mergesort"):
        if delays[at] < lowest:
            if kept and frees[found[kept - 1]] == frees[at]:  # of equal F, only the least D is kept
                kept -= 1
            found[kept] = at
            kept += 1
            lowest = delays[at]
    found = found[:kept]
    if kept <= most:
        return found, np.inf
    order = found[np.argsort(leasts[found], kind="mergesort")]
    return order[:most], leasts[order[most]]
