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


class BlockCosts(NamedTuple):
    """Of each block for one micro-batch on a rank, in several ways to save memory.

    `seconds`: in the first way. `extra`: further seconds of each way, [blocks, ways], from 0, ascending.
    `kept`, `fixed`, `transient`: bytes kept for the backward pass; of parameters, gradients and state; while
    the block runs; each [blocks, ways]. `output`, `input`: bytes that go to the next stage, and come from
    the one before. `sends`: seconds of the output, [blocks, stages].
    """

    seconds: Floats
    extra: Floats
    kept: Ints
    fixed: Ints
    transient: Ints
    output: Ints
    input: Ints
    sends: Floats


def prepare() -> None:
    """Compile the kernels of a search, or load them from disk."""
    ones, extra, few = np.ones(2), np.array([[0.0, 1.0]] * 2), np.ones((2, 2), np.int64)
    for kept in ([1, 1], [CELLS, 1], [CELLS, CELLS]):
        sizes = few * kept, few, few, few[0]
        solve(BlockCosts(ones, extra, *sizes, few[0], np.ones((2, 1))), 1, 1, CELLS)


class Solution(NamedTuple):
    """Stages, and the way of each block; without any, infinite seconds. `memory`: most bytes of a stage."""

    seconds: float
    stages: tuple[range, ...]
    ways: tuple[int, ...]
    memory: int


def solve(costs: BlockCosts, stages: int, micro_batches: int, most: int) -> Solution:
    """Cut the blocks into stages, and choose their ways, for the least seconds under `most` bytes."""
    count = len(costs.seconds)
    whole = float(costs.seconds.sum())
    best = np.full((stages, count + 1, count + 1), np.inf)
    for stage in range(stages):
        inflight = min(stages - stage, micro_batches)
        if stage and inflight == micro_batches:
            best[stage] = best[0]
        else:
            _stage_times(*_in_cells(costs, inflight, most), best[stage])
    sends = costs.sends.copy()
    sends[-1] = 0.0
    seconds, bounds = _cut(best, sends, micro_batches, whole)
    if not np.isfinite(seconds):
        alive = np.minimum(stages - np.arange(stages), micro_batches)
        return Solution(math.inf, (), (), int(_least_memory(*costs[2:7], alive)))
    cuts = tuple(range(low, high) for low, high in pairwise(bounds.tolist()))
    ways: list[int] = []
    peak = 0
    for stage, blocks in enumerate(cuts):
        inflight = min(stages - stage, micro_batches)
        part = BlockCosts._make(each[blocks.start : blocks.stop] for each in costs)
        own = _ways(*_in_cells(part, inflight, most))
        ways += own.tolist()
        peak = max(peak, stage_memory(part, own, inflight))
    return Solution(float(seconds), cuts, tuple(ways), peak)


def stage_memory(costs: BlockCosts, ways: Ints, inflight: int) -> int:
    """Return the bytes of a stage with these blocks, which keeps `inflight` micro-batches.

    The input of one more has come, and a gradient.
    """
    at = np.arange(len(ways)), ways
    transient = costs.transient.max() if ways.any() else costs.transient[:, 0].max()
    moved = (costs.output[-1] + costs.input[0]) * (inflight + 1)
    return int((costs.fixed + costs.kept * inflight)[at].sum() + transient + moved)


def _in_cells(costs: BlockCosts, inflight: int, most: int) -> tuple[NDArray[Any], ...]:
    """Return the times and memory of a stage's blocks, in units of the bound, for `_stage_times`."""
    moved = [each * (inflight + 1) for each in (costs.output, costs.input)]
    sizes = costs.fixed + costs.kept * inflight, costs.transient, *moved
    return costs.seconds, costs.extra, *(-(np.minimum(each, most + 1) * -CELLS // most) for each in sizes)


@compiled
def _more(least, next_, extra, sizes):  # type: ignore[no-untyped-def]
    """Set `next_` to the least additional seconds by cells, with one more block in the best way."""
    next_[:] = np.inf
    smallest = len(least)
    for way in range(len(sizes)):
        size = sizes[way]
        if size >= smallest:  # a faster way is as small
            continue
        smallest = size
        for cell in range(len(least) - size):
            next_[cell + size] = min(next_[cell + size], least[cell] + extra[way])


@compiled
def _stage_times(seconds, extra, sizes, transient, output, input_, best):  # type: ignore[no-untyped-def]
    """Set best[i, j] to the least seconds of a stage of blocks i to j-1 that fits; infinity if none does."""
    count = len(seconds)
    least, next_ = np.empty(CELLS + 1), np.empty(CELLS + 1)
    for begin in range(count):
        least[:] = np.inf
        least[0] = 0.0
        base, used, most, most_other, room = 0.0, 0, 0, 0, CELLS - input_[begin]
        follows = sizes[begin:, 0].sum() + transient[:, 0].max() + output.max() > room  # some does not fit
        for end in range(begin, count):
            base += seconds[end]
            used += sizes[end, 0]
            most, most_other = max(most, transient[end, 0]), max(most_other, transient[end].max())
            if follows:
                _more(least, next_, extra[end], sizes[end])
                least, next_ = next_, least
            if used + most + output[end] <= room:
                best[begin, end + 1] = base
                continue
            found = np.inf
            for cell in range(room + 1 - most_other - output[end]):
                found = min(found, least[cell])
            best[begin, end + 1] = base + found
            follows = least.min() < np.inf


@compiled
def _ways(seconds, extra, sizes, transient, output, input_):  # type: ignore[no-untyped-def]
    """Return the way of each block of a stage, for the least time."""
    count = len(seconds)
    found = np.zeros(count, np.int64)
    room = CELLS - output[count - 1] - input_[0]
    if sizes[:, 0].sum() + transient[:, 0].max() <= room:
        return found
    table = np.empty((count + 1, CELLS + 1))
    table[0] = np.inf
    table[0, 0] = 0.0
    for block in range(count):
        _more(table[block], table[block + 1], extra[block], sizes[block])
    at = np.argmin(table[count, : room + 1 - transient.max()])
    for block in range(count - 1, -1, -1):
        for way in range(sizes.shape[1]):
            before = at - sizes[block, way]
            if before >= 0 and table[block, before] + extra[block, way] == table[block + 1, at]:
                found[block] = way
                break
        at = at - sizes[block, found[block]]
    return found


@compiled
def _with_most(best, sends, limit, times, firsts):  # type: ignore[no-untyped-def]
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
                if times[stage, begin] + own < times[stage + 1, end]:
                    times[stage + 1, end] = times[stage, begin] + own
                    firsts[stage, end] = begin
    return times[stages, count]


@compiled
def _cut(best, sends, micro_batches, whole):  # type: ignore[no-untyped-def]
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
        if _with_most(best, sends, limits[middle], times, firsts) < np.inf:
            high = middle
        else:
            low = middle + 1
    least = np.inf
    for number in range(low, len(limits)):
        limit = limits[number]
        if limit == np.inf or whole + (micro_batches - 1) * limit >= least:
            break
        step = _with_most(best, sends, limit, times, firsts) + (micro_batches - 1) * limit
        if step < least:
            least = step
            bounds[stages] = count
            for stage in range(stages - 1, -1, -1):
                bounds[stage] = firsts[stage, bounds[stage + 1]]
    return least, bounds


@compiled
def _least_memory(kept, fixed, transient, output, input_, inflight):  # type: ignore[no-untyped-def]
    """Return the fewest bytes of the fullest stage: see `stage_memory`."""
    stages, count = len(inflight), len(kept)
    least = np.full((stages + 1, count + 1), np.inf)
    least[0, 0] = 0.0
    for stage in range(stages):
        for begin in range(stage, count):
            plain, other, most, most_other = 0.0, 0.0, 0.0, 0.0
            for end in range(begin, count):
                sizes = fixed[end] + kept[end] * inflight[stage]
                plain += sizes[0]
                other += sizes.min()
                most, most_other = max(most, transient[end, 0]), max(most_other, transient[end].max())
                own = min(plain + most, other + most_other)
                own += (output[end] + input_[begin]) * (inflight[stage] + 1)
                least[stage + 1, end + 1] = min(least[stage + 1, end + 1], max(least[stage, begin], own))
    return least[stages, count]
