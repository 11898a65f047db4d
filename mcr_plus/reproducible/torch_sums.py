"""`SumTable` for tensors on a device: by Triton's kernels on a GPU, or in plain torch, their reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from mcr_plus.backends.shm.reductions import SumTable
from mcr_plus.core.kinds import ReduceOp, Sums

_HALVES = (torch.float16, torch.bfloat16)


class TorchSum:
    """A reduction of the values of all ranks by a tree, or exactly; the same bits as those of `SumTable`.

    Exact sums are kept in pairs of float64. The host waits for the device to learn which elements need more,
    and adds up these itself.
    """

    def __init__(self, sums: Sums, dtype: torch.dtype, op: ReduceOp, ranks: int) -> None:
        self._sums, self._dtype, self._op, self._ranks = sums, dtype, op, ranks

    def reduce(self, parts: torch.Tensor, out: torch.Tensor) -> None:
        """Reduce `parts` of all ranks, one after the other, into `out`: both flat and contiguous."""
        rows, is_product = parts.view(self._ranks, -1), self._op == "PRODUCT"
        if self._sums == "exact":
            self._add(rows, out)
        elif (kernels := _kernels_for(rows)) is not None:
            wide = torch.empty_like(out, dtype=torch.float32) if self._dtype in _HALVES else out
            kernels.tree(rows, wide, is_product)
            out.copy_(wide)
        else:
            leaves = [row.float() if self._dtype in _HALVES else row for row in rows]
            out.copy_(_tree(leaves, torch.mul if is_product else torch.add))
        if self._op == "AVG":
            out.div_(self._ranks)

    def _add(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        if (kernels := _kernels_for(rows)) is not None:
            total = torch.empty_like(out, dtype=torch.float32) if self._dtype in _HALVES else out
            lost = kernels.exact(rows, total)
        else:
            total, lost = self._totals(rows)
        out.copy_(total)
        index = lost.nonzero().view(-1)
        if index.numel():
            columns = rows[:, index].cpu().contiguous()
            sums = torch.empty_like(columns[0])
            SumTable("exact", self._dtype, "SUM", self._ranks).reduce(columns.view(-1), sums)
            out[index] = sums.to(out.device)

    def _totals(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sums to be rounded once more, and which are wrong."""
        high = rows[0].double()
        low, lost = torch.zeros_like(high), torch.zeros_like(high, dtype=torch.bool)
        for row in rows[1:]:
            high, error = _two_sum(high, row.double())
            low, error = _two_sum(low, error)
            lost |= error != 0
        total = torch.where(low == 0, high, high + low)  # keeps -0
        if self._dtype is not torch.float64:
            total = _to_odd(total, _two_sum(high, low)[1])
        if self._dtype in _HALVES:
            single = total.float()
            total = _to_odd(single, total - single.double())
        return total, lost


def _kernels_for(rows: torch.Tensor) -> Any:
    """Return Triton's kernels if they can add up these values, otherwise None."""
    if not rows.is_cuda or not rows.numel() or rows.is_complex() or find_spec("triton") is None:
        return None
    from mcr_plus.kernels.gpu import sums

    return sums if len(rows) <= sums.MOST else None


def _tree(
    rows: Sequence[torch.Tensor], combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Halve at the largest power of two below the number of leaves."""
    if len(rows) == 1:
        return rows[0]
    half = 1 << (len(rows) - 1).bit_length() - 1
    return combine(_tree(rows[:half], combine), _tree(rows[half:], combine))


def _two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and its error (Knuth); no error of infinity and NaN."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    return total, torch.where(total.isfinite(), error, 0.0)


def _to_odd(total: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return `total + rest`, rounded to odd, where `total` is its rounding to nearest."""
    bits = total.view(torch.int64 if total.dtype is torch.float64 else torch.int32)
    away = ((rest > 0) != (total > 0)).to(bits.dtype)  # towards zero, one bit less
    return torch.where((rest != 0) & ~rest.isnan(), (bits - away) | 1, bits).view(total.dtype)
