"""Search exactly for the best buckets of gradients and the library of each, with a lower bound.

    found = search(ready, compute, prices)
    found.buckets       # [(begin, end, choice), …] in the order of sending
    found.step, found.bound

The model: one channel, on which buckets are sent one after another. An operation in flight takes a *share* of
the computing core, which delays all remaining computation by share times the operation's time. Issuing an
operation delays computation by a constant. A bucket of the gradients i … j-1 may start once the last of them
is ready and the channel is free:

    start = max(F, ready of j-1 + D),   F' = start + time,   D' = D + share * time + overhead

with F the time at which the channel is free and D the delay of computation so far. The step ends when
communication and computation have ended: max(F, compute + D). Smaller F and D are always better, so keeping
only the Pareto-optimal labels (F, D) after the first j gradients still gives an exact search over all
consecutive buckets and all libraries. An operation's whole share is counted before the next gradient, which
is pessimistic by at most one operation's share; `simulate` computes the exact timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.kernels.cpu import compiled

Floats = NDArray[np.float64]
_LABELS: Final = 1024  # maximum number of labels of a gradient; `FoundPlan.exact` is True if they sufficed
_BEAMS: Final = (8, 64, 512)  # smaller limits to try first: their results exclude most labels
_SECONDS: Final = 2.0
_ROUNDING: Final = 1e-9  # bounds and labels add the same numbers in a different order
_WEIGHINGS: Final = 16  # attempts to find the best weight of communication, to within 0.05 %
_BESIDE: Final = (
    0.0,
    0.02,
    0.1,
    0.3,
    1.0,
)  # further weights, as fractions of the distance from the best weight to 0 and 1
_NONE: Final = -1


@dataclass(frozen=True)
class Prices:
    """Costs of buckets: `seconds[choice, i, j]` is the duration of a bucket of the gradients i … j-1.

    `shares[choice, i, j]`: fraction of the duration by which computation is delayed, 0 to 1. `overhead`:
    seconds by which issuing a bucket delays computation. Entries with j <= i are not read; impossible buckets
    have infinite seconds.
    """

    seconds: Floats
    shares: Floats
    overhead: float = 0.0

    @property
    def lost(self) -> Floats:
        """Seconds by which each bucket delays computation; infinite for impossible buckets."""
        known = np.isfinite(self.seconds)
        lost = np.where(known, self.seconds, 0.0) * self.shares + self.overhead
        return np.where(known, lost, np.inf)


@dataclass(frozen=True)
class FoundPlan:
    """Best plan found; times in seconds.

    `buckets`: (begin, end, choice) of consecutive gradients. `step`: end of the step in the model.
    `bound`: lower bound over all plans, which also holds if shares are counted as they accrue. `exact`:
    `step` is the optimum, because no dropped label could have led to an earlier end. `least`: lower bound
    over all plans in this model, from the dropped labels.
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
) -> FoundPlan:
    """Return the buckets with the earliest end of the step.

    Args:
        ready: seconds after which each gradient is ready, ascending. compute: total seconds of
            computation. prices: prices of all buckets and choices. labels: maximum number of labels kept for
            each gradient; reduced if the search would take longer than `seconds`.

    Raises:
        ValueError: `ready` is not ascending, or prices have another length.
    """
    times = checked_times(ready, prices)
    count = len(times)
    if not count:
        return FoundPlan([], compute, compute, True, compute)
    to_come = rest(times, compute, prices.seconds, prices.lost)
    step, buckets, least = np.inf, list[tuple[int, int, int]](), 0.0
    began = perf_counter()
    for most, longer in beams(labels):
        before = perf_counter()
        free, delay, came, dropped = _labels(
            times, prices.seconds, prices.shares, prices.overhead, *to_come, step * (1 + _ROUNDING), most,
        )  # fmt: skip
        ends = np.maximum(free[count], compute + delay[count])
        if ends.min() < step:
            step, buckets = float(ends.min()), _traced(came, int(np.argmin(ends)))
        least = max(least, min(step, dropped))
        now = perf_counter()
        if least >= step * (1 - _ROUNDING) or now - began + longer * (now - before) > seconds:
            break
    lowest = to_come.bound
    return FoundPlan(buckets, step, lowest, least >= step * (1 - _ROUNDING), max(least, lowest))


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
    """Trace back the buckets that led to a label of the last gradient."""
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


class Rest(NamedTuple):
    """Lower bounds of the step, given that the first j gradients have been sent with the labels (F, D).

    The bounds are weight · F + (1 - weight) · D + `after[weight, j]` for each of `weights`, and D +
    `late[j]`.
    """

    weights: Floats
    after: Floats
    late: Floats

    @property
    def bound(self) -> float:
        """Lower bound of the step in seconds before any gradient has been sent."""
        return float(max(self.after[:, 0].max(), self.late[0]))


def rest(ready: Floats, compute: float, seconds: Floats, lost: Floats, weights: Floats | None = None) -> Rest:
    """Return lower bounds of the step for the gradients still to be sent.

    A step ends after its communication, and after its computation with all delays. So it takes at least the
    weighted mean of the two, for any weight. The mean is smallest if every bucket has the smallest weighted
    mean of its duration and of the delay that it causes. Weights 1 and 0 use one bound alone, and ignore that
    the fastest library may delay computation most.

    Args:
        seconds, lost: `Prices.seconds` and `Prices.lost` of the buckets. weights: weights of communication, 0
            to 1; None: the weight with the highest bound of the whole step, and weights near it.
    """
    known = np.isfinite(seconds)
    time, delay = (np.where(known, each, 0.0) for each in (seconds, lost))

    def of(weight: float) -> tuple[Floats, Floats]:
        price = np.where(known, weight * time + (1 - weight) * delay, np.inf).min(axis=0)
        idle = (1 - weight) * compute
        # A gradient's bucket may begin with an earlier gradient.
        ends = idle + weight * ready + _cheapest(np.minimum.accumulate(price, axis=0))[:-1]
        return idle + _cheapest(price), np.maximum.accumulate(np.append(ends, 0.0)[::-1])[::-1]

    if weights is None:
        best = _highest(lambda weight: max(each[0] for each in of(weight)))
        weights = np.unique([best + part * (end - best) for end in (0.0, 1.0) for part in _BESIDE])
    after, late = zip(*map(of, weights), strict=True)
    return Rest(weights, np.array(after), np.max(late, axis=0))


def _highest(value: Callable[[float], float]) -> float:
    """Return the position in [0, 1] of a function's only maximum, by golden-section search (Kiefer 1953)."""
    golden = (5**0.5 - 1) / 2
    low, high = 0.0, 1.0
    left, right = 1 - golden, golden
    at_left, at_right = value(left), value(right)
    for _ in range(_WEIGHINGS - 2):
        if at_left < at_right:
            low, left, at_left, right = left, right, at_right, left + golden * (high - left)
            at_right = value(right)
        else:
            high, right, at_right, left = right, left, at_left, right - golden * (right - low)
            at_left = value(left)
    return left if at_left > at_right else right


@compiled
def _cheapest(price):  # type: ignore[no-untyped-def]
    """Return, for every i, the minimum total price of buckets for the gradients from i on."""
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
    ready, seconds, shares, overhead, weights, after, late, upper, most
):
    """Return the labels (F, D) after each gradient, and the bucket that led to each.

    A bucket is (begin, label at begin, choice). Also returns the earliest end over all dropped labels. Labels
    that cannot end by `upper` are omitted. For `weights`, `after` and `late`, see `Rest`.
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
                    least = least_end(end, behind, weights, after, late, j)
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
def least_end(free, delay, weights, after, late, j):  # type: ignore[no-untyped-def]
    """Return the lower bound of the step for a label after j gradients, see `Rest`."""
    least = late[j] + delay
    for at in range(len(weights)):
        least = max(least, weights[at] * free + (1.0 - weights[at]) * delay + after[at, j])
    return least


@compiled
def front(frees, delays, leasts, most):  # type: ignore[no-untyped-def]
    """Return the indices of the Pareto-optimal labels (F, D), and the minimum of `leasts` of dropped labels.

    Of more than `most` labels, the labels with the lowest `leasts` are kept. If no label is dropped, the
    second result is infinite.
    """
    kept, lowest = 0, np.inf
    found = np.empty(len(frees), np.int64)
    for at in np.argsort(frees, kind="mergesort"):
        if delays[at] < lowest:
            if kept and frees[found[kept - 1]] == frees[at]:  # of equal F, only the smallest D is kept
                kept -= 1
            found[kept] = at
            kept += 1
            lowest = delays[at]
    found = found[:kept]
    if kept <= most:
        return found, np.inf
    order = found[np.argsort(leasts[found], kind="mergesort")]
    return order[:most], leasts[order[most]]
