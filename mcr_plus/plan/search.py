"""The best buckets of gradients, and the library of each: an exact search with a bound beside it.

    found = search(ready, compute, prices)
    found.buckets       # [(begin, end, choice), …] in the order of sending
    found.step, found.bound

The model: one channel, on which buckets are sent one after another. While an operation is in flight it takes
its *share* of the core that computes, so that everything that is still to be computed is delayed by share
times its time; issuing an operation delays it by a constant. A bucket of the gradients i … j-1 may start
once the
last of them is ready and the channel is free:

    start = max(F, ready of j-1 + D),   F' = start + time,   D' = D + share * time + overhead

with F the time at which the channel is free and D the delay of computing so far. The step ends when both have
ended: max(F, compute + D). Smaller F and D are both better, whatever follows, so of all ways to have sent the
first j gradients only those that are not worse in both than another need be kept (Pareto labels); then the
search over all consecutive buckets and all libraries is exact. The whole share of an operation is counted
before the next gradient, which is pessimistic by at most one operation's share; `simulate` has the exact
course.
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
_LABELS: Final = 1024  # kept for each gradient; `Found.exact` says whether that was enough
_BEAMS: Final = (8, 64, 512)  # tried before, as what they find rules out most labels
_SECONDS: Final = 2.0
_ROUNDING: Final = 1e-9  # bounds and labels add up the same numbers in another order
_NONE: Final = -1


@dataclass(frozen=True)
class Prices:
    """What buckets cost: `seconds[choice, i, j]` is the time of one of the gradients i … j-1, whole.

    `shares[choice, i, j]`: the part of it that is lost for computing, 0 to 1. `overhead`: seconds of
    computing that are lost with every bucket. Entries with j <= i are not read; those that cannot be are
    infinite.
    """

    seconds: Floats
    shares: Floats
    overhead: float = 0.0


@dataclass(frozen=True)
class Found:
    """The best plan, in seconds.

    `buckets`: (begin, end, choice) of consecutive gradients. `step`: the end of the step by the model.
    `bound`: no plan can end before, also if shares are counted while they are taken. `exact`: no label was
    dropped that could have led to an earlier end, so that `step` is the least. `least`: no plan ends before
    by this model, as far as labels that were dropped show it.
    """

    buckets: list[tuple[int, int, int]]
    step: float
    bound: float
    exact: bool
    least: float = 0.0

    @property
    def gap(self) -> float:
        """How far the plan may be above the best one of this model."""
        least = max(self.least, self.bound)
        return max(self.step / least - 1, 0.0) if least else 0.0


def search(
    ready: Sequence[float] | Floats,
    compute: float,
    prices: Prices,
    labels: int = _LABELS,
    seconds: float = _SECONDS,
) -> Found:
    """The buckets with the earliest end of the step.

    Args:
        ready: seconds after which each gradient is ready, ascending. compute: seconds of computing in all.
        prices: of all buckets and choices. labels: how many are kept for each gradient at most; fewer where
            so many would take longer than `seconds` in all.

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
    """`ready` as an array. Raises `ValueError` if it is not ascending, or prices are not of its length."""
    times = np.asarray(ready, np.float64)
    count = len(times)
    if np.any(np.diff(times) < 0):
        raise ValueError("ready: expected in ascending order")
    if prices.seconds.shape != (len(prices.seconds), count + 1, count + 1):
        raise ValueError(f"prices: expected [choices, {count + 1}, {count + 1}], got {prices.seconds.shape}")
    return times


def beams(labels: int) -> list[tuple[int, float]]:
    """How many labels are kept in one try after the other, and how much longer the next one takes."""
    most = [*(few for few in _BEAMS if few < labels), labels]
    return [(this, next_ / this) for this, next_ in zip(most, [*most[1:], labels], strict=True)]


def _traced(came: NDArray[np.int64], label: int) -> list[tuple[int, int, int]]:
    """The buckets that led to a label of the last gradient."""
    buckets, end = [], len(came) - 1
    while end:
        begin, before, choice = (int(each) for each in came[end, label])
        buckets.append((begin, end, choice))
        end, label = begin, before
    return buckets[::-1]


def prepare() -> None:
    """Compile, or load from disk, what a search needs."""
    seconds = np.ones((1, 2, 2))
    search(np.zeros(1), 0.0, Prices(seconds, np.zeros_like(seconds)))


def bound(ready: Floats, compute: float, prices: Prices) -> float:
    """Seconds that no plan of this model can beat.

    Everything has to be computed, and loses at least the least share that sending all gradients costs; and
    from the moment at which a gradient is ready, it and all later ones have to be sent.
    """
    _, loss, late = rest(ready, prices)
    return float(max(compute + loss[0], late[0]))


def rest(ready: Floats, prices: Prices) -> tuple[Floats, Floats, Floats]:
    """For every gradient the least seconds of sending it and all later ones, the least delay by that, and the
    earliest end of all.
    """
    known = np.isfinite(prices.seconds)
    lost = np.where(known, np.where(known, prices.seconds, 0.0) * prices.shares + prices.overhead, np.inf)
    times = prices.seconds.min(axis=0)
    # The bucket of a gradient may begin with an earlier one.
    ends = np.append(ready + _cheapest(np.minimum.accumulate(times, axis=0))[:-1], 0.0)
    return _cheapest(times), _cheapest(lost.min(axis=0)), np.maximum.accumulate(ends[::-1])[::-1]


@compiled
def _cheapest(price):  # type: ignore[no-untyped-def]
    """For every i the least total price of consecutive buckets of the gradients from i on."""
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
    """The labels (F, D) after each gradient, and which bucket led to each: (begin, label there, choice); and
    the earliest end to which a label that was dropped could have led.

    Those that cannot end by `upper` are left out: `after` and `loss` are the least that is still to be sent
    and lost, `late` the least end of what becomes ready later.
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
    """The indices of labels (F, D) of which none is worse in both than another.

    Of more than `most`, those with the lowest of `leasts`, which may still lead to the earliest end; and the
    least of those that are dropped, infinite without any.
    """
    kept, lowest = 0, np.inf
    found = np.empty(len(frees), np.int64)
    for at in np.argsort(frees, kind="mergesort"):
        if delays[at] < lowest:
            if kept and frees[found[kept - 1]] == frees[at]:  # of equal F only the least D stays
                kept -= 1
            found[kept] = at
            kept += 1
            lowest = delays[at]
    found = found[:kept]
    if kept <= most:
        return found, np.inf
    order = found[np.argsort(leasts[found], kind="mergesort")]
    return order[:most], leasts[order[most]]
