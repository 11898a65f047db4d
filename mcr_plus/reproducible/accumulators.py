"""Exact sums of gradients over backward passes and ranks, for `mcr.wrap(accumulate="exact")`.

An element is the sum of float64 parts, of which most need one: float32 leaves it 29 bits. What an addition
would lose goes to the next part (Shewchuk, 1997, Grow-Expansion). The first parts are added up over ranks
exactly; then the elements that have others on any rank are added up anew. So a result depends on the set of
all addends alone, and not on their distribution over passes and ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from typing import Any, Final

import numpy as np
import torch
from torch.autograd import Variable

from mcr_plus.backends.shm.exact_kernels import is_inexact
from mcr_plus.backends.shm.reductions import SumTable
from mcr_plus.errors import McrError, Unsupported
from mcr_plus.kernels import cpu

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_CHUNK: Final = 1024  # elements whose errors stay in the nearest cache
_TAIL: Final = 2  # elements behind a bucket: the number of passes, and 1 if there are further parts


@cpu.compiled
def _add(sums, addends, errors, has_errors, lo, hi):  # type: ignore[no-untyped-def]
    """Add chunks with `has_errors`; write the errors of chunks that have any (Knuth's TwoSum)."""
    earlier = np.empty(_CHUNK, np.float64)
    for chunk in range(lo, hi):
        if not has_errors[chunk]:
            continue
        begin = chunk * _CHUNK
        size, inexact = min(_CHUNK, addends.size - begin), np.int64(0)
        for i in range(size):
            addend, before = np.float64(addends[begin + i]), sums[begin + i]
            total = before + addend
            inexact |= is_inexact(total, before, addend)
            earlier[i], sums[begin + i] = before, total
        has_errors[chunk] = False
        for i in range(size if inexact else 0):
            addend, before, total = np.float64(addends[begin + i]), earlier[i], sums[begin + i]
            part, error = total - before, 0.0
            if abs(total) < np.inf:  # NaN and infinity stay what they are
                error = (before - (total - part)) + (addend - part)
            errors[begin + i] = error
            has_errors[chunk] |= error != 0.0


class ExactSums:
    """Exact sums of the gradients of one bucket of `numel` elements."""

    def __init__(self, numel: int) -> None:
        self._parts = [_zeros(numel + _TAIL)]
        self._total = _zeros(numel + _TAIL)

    def reset(self) -> None:
        """Begin again; a sum of nothing is -0, which changes no addend."""
        self._parts[0].fill_(-0.0)
        del self._parts[1:]

    def add(self, values: torch.Tensor, begin: int) -> None:
        """Add flat, contiguous values of one of `DTYPES` to the elements from `begin` on."""
        addends = values.float().numpy()
        errors = np.empty(addends.size)
        has_errors = np.ones(-(-addends.size // _CHUNK), np.bool_)
        for level in count():
            if level == len(self._parts):
                self._parts.append(_zeros(self._total.numel()))
            part = self._parts[level].numpy()[begin : begin + addends.size]
            cpu.spread(_add, has_errors.size, values.nbytes, part, addends, errors, has_errors)
            if not has_errors.any():
                return
            addends = errors

    def of_passes(self, passes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what to add up over the ranks by an exact all_reduce, and memory for its result."""
        first = self._parts[0]
        first[-2], first[-1] = passes, len(self._parts) > 1
        return first, self._total

    def write_means(self, means: torch.Tensor, gather: Callable[[object], list[Any]]) -> None:
        """Write the means over all passes of all ranks, once the all_reduce is done.

        `gather`: all_gather of an object over the same ranks, which all of them call or none.
        """
        if self._total[-1] > 0:
            self._add_others(gather)
        total = self._total[:-_TAIL].div_(self._total[-2].item())
        # To half types in two steps, for all elements alike.
        means.copy_(total if means.dtype is torch.float32 else total.float())

    def _add_others(self, gather: Callable[[object], list[Any]]) -> None:
        """Add up the elements that have several parts on any rank, and these only."""
        more = self._parts[1:]
        own = torch.stack(more).ne(0).any(0).nonzero().view(-1) if more else _empty(0, torch.long)
        index = torch.cat(gather(own)).unique()
        rows = torch.cat(gather(torch.stack([part[index] for part in self._parts])))
        sums = _empty(index.numel(), torch.float64)
        SumTable("exact", torch.float64, "SUM", len(rows)).reduce(rows.view(-1), sums)
        self._total[index] = sums


class ExactPasses:
    """Counts the backward passes since gradients were last averaged.

    Attributes:
        number: of complete passes.
        dtypes: of gradients that can be added up.
        sums: class of the sums of a bucket.
    """

    dtypes, sums = DTYPES, ExactSums

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin again, for the next step."""
        self.number = 0
        self._task: int | None = None  # the graph task of a pass that has not ended

    def has_failed(self) -> bool:
        """Return whether the last pass did not come to its end, outside of passes."""
        return self._task is not None

    def note(self) -> None:
        """Note a gradient of the pass that runs.

        Raises `Unsupported` in the pass of a reentrant checkpoint, and `McrError` after one that failed.
        """
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        depth, frame = 0, sys._getframe()
        while (caller := frame.f_back) is not None:
            frame = caller
            depth += frame.f_code is torch.autograd.backward.__code__
        if depth > 1:
            raise Unsupported(
                "accumulate='exact' adds up whole backward passes, and a reentrant checkpoint has one of its "
                "own: pass use_reentrant=False to torch.utils.checkpoint"
            )
        if self._task is not None:
            raise McrError(
                "accumulate='exact': a backward pass that raised was repeated without a forward pass, so "
                "gradients would count twice; call optimizer.zero_grad() and repeat the step's passes"
            )
        self._task = task
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        if self._task is not None:  # otherwise the pass has averaged, and all counts from zero
            self._task = None
            self.number += 1


def _zeros(numel: int) -> torch.Tensor:
    return _empty(numel, torch.float64).fill_(-0.0)


def _empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device="cpu")
