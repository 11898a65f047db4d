"""Stages of a pipeline and blocks to recompute, for the least time under a bound of memory; see `search`."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.kernels.cpu import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CELLS: Final = 1024
"""Units of the memory bound."""
_NO_MEMORY: Final = 1 << 62


class BlockCosts(NamedTuple):
    """Of each block for one micro-batch on a rank: seconds, bytes kept, and the same if it is recomputed.

    `fixed`: bytes of parameters, gradients and state. `transient`: bytes while it runs. `output`: bytes that
    go to the next stage. `sends`: seconds of this, [blocks, stages]. `sums`: seconds of the gradients' sum.
    """

    seconds: Floats
    again: Floats
    kept: Ints
    kept_input: Ints
    fixed: Ints
    transient: Ints
    transient_again: Ints
    output: Ints
    sends: Floats
    sums: Floats


def prepare() -> None:
    """Compile the kernels of a search, or load them from disk."""
    ones = np.ones(2)
    few = np.ones(2, np.int64)
    sends = np.ones((2, 1))
    for kept, kept_input in ((1, 1), (CELLS, 1), (CELLS, CELLS)):
        bytes_ = few * kept, few * kept_input, few, few, few, few
        solve(BlockCosts(ones, ones, *bytes_, sends, ones), 1, 1, CELLS)


class Solution(NamedTuple):
    """Stages and recomputed blocks. Without any: infinite seconds. `memory`: bytes of the fullest stage."""

    seconds: float
    stages: tuple[range, ...]
    recompute: tuple[int, ...]
    memory: int


def solve(costs: BlockCosts, stages: int, micro_batches: int, most: int, worst: float = math.inf) -> Solution:
    """Cut the blocks into stages, and choose what to recompute, for the least seconds under `most` bytes.

    `worst`: seconds from which a solution is of no use.
    """
    count = len(costs.seconds)
    whole = float(costs.seconds.sum())
    if whole + (micro_batches - 1) * whole / stages >= worst:
        return Solution(math.inf, (), (), _NO_MEMORY)
    best = np.full((stages, count + 1, count + 1), np.inf)
    for stage in range(stages):
        inflight = min(stages - stage, micro_batches)
        if stage and inflight == micro_batches:
            best[stage] = best[0]
        else:
            _stage_times(*_in_cells(costs, inflight, most), best[stage])
    sends = costs.sends.copy()
    sends[-1] = 0.0
    seconds, bounds = _cut(best, sends, costs.sums, micro_batches, whole)
    if not np.isfinite(seconds):
        alive = np.minimum(stages - np.arange(stages), micro_batches)
        return Solution(math.inf, (), (), int(_least_memory(*costs[2:8], alive)))
    cuts = tuple(range(low, high) for low, high in pairwise(bounds.tolist()))
    again: list[int] = []
    peak = 0
    for stage, blocks in enumerate(cuts):
        inflight = min(stages - stage, micro_batches)
        part = BlockCosts._make(each[blocks.start : blocks.stop] for each in costs)
        flags = _recomputed(*_in_cells(part, inflight, most))
        again += (blocks.start + np.flatnonzero(flags)).tolist()
        peak = max(peak, stage_memory(part, flags, inflight))
    return Solution(float(seconds), cuts, tuple(again), peak)


def stage_memory(costs: BlockCosts, again: NDArray[np.bool_], inflight: int) -> int:
    """Return the bytes of a stage with these blocks, which keeps `inflight` micro-batches."""
    kept = np.where(again, costs.kept_input, costs.kept).sum() * inflight
    transient = (costs.transient_again if again.any() else costs.transient).max()
    return int(costs.fixed.sum() + kept + transient + costs.output[-1] * inflight)


def _in_cells(costs: BlockCosts, inflight: int, most: int) -> tuple[NDArray[Any], ...]:
    """Return the times and memory of a stage's blocks, in units of the bound, for `_stage_times`."""
    sizes = (
        costs.fixed + costs.kept * inflight, costs.fixed + costs.kept_input * inflight, costs.transient,
        costs.transient_again, costs.output * inflight,
    )  # fmt: skip
    return costs.seconds, costs.again, *(-(np.minimum(each, most + 1) * -CELLS // most) for each in sizes)


@compiled
def _more(extra, next_, plain, small, again):  # type: ignore[no-untyped-def]
    """Set `next_` to the least additional seconds by cells, with one more block that is recomputed or not."""
    next_[:] = np.inf
    for cell in range(len(extra)):
        if extra[cell] < np.inf:
            if cell + plain < len(extra):
                next_[cell + plain] = min(next_[cell + plain], extra[cell])
            if cell + small < len(extra):
                next_[cell + small] = min(next_[cell + small], extra[cell] + again)


@compiled
def _stage_times(seconds, again, plain, small, transient, transient_again, output, best):  # type: ignore[no-untyped-def]
    """Set best[i, j] to the least seconds of a stage of blocks i to j-1 that fits; infinity if none does."""
    count = len(seconds)
    extra, next_ = np.empty(CELLS + 1), np.empty(CELLS + 1)
    for begin in range(count):
        extra[:] = np.inf
        extra[0] = 0.0
        base, used, most, most_again = 0.0, 0, 0, 0
        follows = plain[begin:].sum() + transient.max() + output.max() > CELLS  # some stage does not fit
        for end in range(begin, count):
            base += seconds[end]
            used += plain[end]
            most, most_again = max(most, transient[end]), max(most_again, transient_again[end])
            if follows:
                _more(extra, next_, plain[end], small[end], again[end])
                extra, next_ = next_, extra
            if used + most + output[end] <= CELLS:
                best[begin, end + 1] = base
                continue
            least = np.inf
            for cell in range(CELLS + 1 - most_again - output[end]):
                least = min(least, extra[cell])
            best[begin, end + 1] = base + least
            follows = extra.min() < np.inf


@compiled
def _recomputed(seconds, again, plain, small, transient, transient_again, output):  # type: ignore[no-untyped-def]
    """Return which blocks of a stage are recomputed in the least time."""
    count = len(seconds)
    found = np.zeros(count, np.bool_)
    if plain.sum() + transient.max() + output[count - 1] <= CELLS:
        return found
    table = np.empty((count + 1, CELLS + 1))
    table[0] = np.inf
    table[0, 0] = 0.0
    for block in range(count):
        _more(table[block], table[block + 1], plain[block], small[block], again[block])
    at = np.argmin(table[count, : CELLS + 1 - transient_again.max() - output[count - 1]])
    for block in range(count - 1, -1, -1):
        before = at - plain[block]
        found[block] = before < 0 or table[block, before] != table[block + 1, at]
        at = at - small[block] if found[block] else before
    return found


@compiled
def _with_most(best, sends, sums, limit, times, firsts):  # type: ignore[no-untyped-def]
    """Return the least sum of stages of at most `limit` seconds; `firsts[s, j]`: where stage s begins."""
    stages, count = best.shape[0], best.shape[1] - 1
    times[:] = np.inf
    times[0, 0] = 0.0
    for stage in range(stages):
        for end in range(stage + 1, count + 1):
            for begin in range(stage, end):
                own = best[stage, begin, end]
                if max(own, sends[end - 1, stage]) > limit or times[stage, begin] == np.inf:
                    continue
                own += sends[end - 1, stage]
                if stage == 0:
                    for block in range(end):
                        own += sums[block]
                if times[stage, begin] + own < times[stage + 1, end]:
                    times[stage + 1, end] = times[stage, begin] + own
                    firsts[stage, end] = begin
    return times[stages, count]


@compiled
def _cut(best, sends, sums, micro_batches, whole):  # type: ignore[no-untyped-def]
    """Return the least seconds of a step, and the bounds of its stages."""
    stages, count = best.shape[0], best.shape[1] - 1
    limits = np.empty(stages * count * (count + 1) // 2)
    number = 0
    for stage in range(stages):
        for begin in range(count):
            for end in range(begin + 1, count + 1):
                limits[number] = max(best[stage, begin, end], sends[end - 1, stage])
                number += 1
    limits = np.unique(limits)
    times, firsts = np.empty((stages + 1, count + 1)), np.zeros((stages, count + 1), np.int64)
    bounds = np.zeros(stages + 1, np.int64)
    low, high = 0, len(limits) - 1  # the first limit that allows stages
    while low < high:
        middle = (low + high) // 2
        if _with_most(best, sends, sums, limits[middle], times, firsts) < np.inf:
            high = middle
        else:
            low = middle + 1
    least = np.inf
    for number in range(low, len(limits)):
        limit = limits[number]
        if limit == np.inf or whole + (micro_batches - 1) * limit >= least:
            break
        step = _with_most(best, sends, sums, limit, times, firsts) + (micro_batches - 1) * limit
        if step < least:
            least = step
            bounds[stages] = count
            for stage in range(stages - 1, -1, -1):
                bounds[stage] = firsts[stage, bounds[stage + 1]]
    return least, bounds


@compiled
def _least_memory(kept, kept_input, fixed, transient, transient_again, output, inflight):  # type: ignore[no-untyped-def]
    """Return the fewest bytes of the fullest stage: see `stage_memory`."""
    stages, count = len(inflight), len(kept)
    least = np.full((stages + 1, count + 1), np.inf)
    least[0, 0] = 0.0
    for stage in range(stages):
        for begin in range(stage, count):
            plain, again, most, most_again = 0.0, 0.0, 0.0, 0.0
            for end in range(begin, count):
                plain += fixed[end] + kept[end] * inflight[stage]
                again += fixed[end] + min(kept[end], kept_input[end]) * inflight[stage]
                most, most_again = max(most, transient[end]), max(most_again, transient_again[end])
                own = min(plain + most, again + most_again) + output[end] * inflight[stage]
                least[stage + 1, end + 1] = min(least[stage + 1, end + 1], max(least[stage, begin], own))
    return least[stages, count]
