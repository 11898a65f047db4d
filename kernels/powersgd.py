"""Factors of matrices: orthonormal rows, and products added to values. CPU kernels and batched torch.

Matrices come in batches of equal shape. A batch of matrices n × m of rank r has factors left (count × r × n)
and right (count × r × m), float32 and contiguous; the product of its matrix b is left[b]ᵀ @ right[b]. The
values of a matrix lie row by row in a flat tensor, from element `offset + b × stride` on.

What must come out alike on all ranks is summed in an order that depends neither on the number of threads nor
on the processor, which a BLAS does not promise. On GPUs batched torch operations do the same work.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from mcr_plus.kernels import cpu

_DEPENDENT: Final = 1e-6
"""What is left of a row without the earlier rows' parts, against all of it: less is float32's rounding."""
_COLUMNS: Final = 1024  # of a row of the product at a time: they and the factors' parts fit the first cache


# --- torch: on GPUs, and what the CPU kernels are tested against --------------------------------------------


def orthonormalise_reference(factors: torch.Tensor, spare: torch.Tensor) -> None:
    """`orthonormalise` in torch operations."""
    basis = torch.zeros_like(factors, dtype=torch.float64)
    for row in range(factors.shape[1]):
        found, sound = _unit(factors[:, row].to(torch.float64), basis[:, :row])
        other, _ = _unit(spare[row].to(torch.float64).expand_as(found), basis[:, :row])
        basis[:, row] = torch.where(sound, found, other)
    finite = factors.isfinite().all(2, keepdim=True).all(1, keepdim=True)
    factors.copy_(torch.where(finite, basis, torch.nan))


def _unit(rows: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows without their parts along `basis`, of length one or zero; and whether anything was left."""
    largest = rows.abs().amax(1, keepdim=True)
    rows = rows / largest.where(largest > 0, 1.0)
    before = rows.square().sum(1, keepdim=True).sqrt()
    for _ in range(2):  # once leaves what rounding made of nearly dependent rows; twice is enough
        rows = rows - torch.bmm(torch.bmm(rows[:, None], basis.mT), basis)[:, 0]
    after = rows.square().sum(1, keepdim=True).sqrt()
    sound = after > before * _DEPENDENT
    return torch.where(sound, rows / after.where(sound, 1.0), 0.0), sound


def expand_reference(
    left: torch.Tensor,
    right: torch.Tensor,
    values: torch.Tensor,
    offset: int,
    stride: int,
    factor: float,
    add: bool,
) -> None:
    """`expand` in torch operations."""
    count, _, rows = left.shape
    columns = right.shape[2]
    matrices = values.as_strided(
        (count, rows, columns), (stride, columns, 1), values.storage_offset() + offset
    )
    matrices.baddbmm_(left.mT, right, beta=1.0 if add else 0.0, alpha=factor)


# --- CPU ----------------------------------------------------------------------------------------------------


@cpu.inlined
def _dot(first, second):  # type: ignore[no-untyped-def]
    # Four sums: each addition waits for the one before it.
    a = b = c = d = np.float64(0)
    fours = first.size // 4 * 4
    for i in range(0, fours, 4):
        a += first[i] * second[i]
        b += first[i + 1] * second[i + 1]
        c += first[i + 2] * second[i + 2]
        d += first[i + 3] * second[i + 3]
    for i in range(fours, first.size):
        a += first[i] * second[i]
    return (a + b) + (c + d)


@cpu.inlined
def _take(source, basis, row):  # type: ignore[no-untyped-def]
    """Make `source` row `row` of the basis; False, and no use of that row, if it depends on the others."""
    target = basis[row]
    largest = np.float64(0)
    for i in range(source.size):
        largest = max(largest, abs(np.float64(source[i])))
    if largest == 0:
        return False
    for i in range(source.size):
        target[i] = source[i] / largest
    before = _dot(target, target)
    for _ in range(2):  # once leaves what rounding made of nearly dependent rows; twice is enough
        for earlier in range(row):
            other = basis[earlier]
            along = _dot(other, target)
            for i in range(source.size):
                target[i] -= along * other[i]
    after = _dot(target, target)
    if after <= before * (_DEPENDENT * _DEPENDENT):
        return False
    length = np.sqrt(after)
    for i in range(source.size):
        target[i] /= length
    return True


@cpu.compiled
def _orthonormalise(factors, spare, lo, hi):  # type: ignore[no-untyped-def]
    basis = np.empty(spare.shape, np.float64)
    for batch in range(lo, hi):
        rows = factors[batch]
        if not np.isfinite(rows).all():
            rows[:] = np.nan
            continue
        for row in range(rows.shape[0]):
            if not _take(rows[row], basis, row) and not _take(spare[row], basis, row):
                basis[row] = 0
        rows[:] = basis


@cpu.compiled
def _expand(left, right, values, offset, stride, factor, add, lo, hi):  # type: ignore[no-untyped-def]
    _, rank, rows = left.shape
    columns = right.shape[2]
    for line in range(lo, hi):
        batch, row = line // rows, line % rows
        start = offset + batch * stride + row * columns
        for at in range(0, columns, _COLUMNS):
            end = min(at + _COLUMNS, columns)
            target = values[start + at : start + end]
            if not add:
                target[:] = 0
            fours = rank // 4 * 4
            for k in range(0, fours, 4):  # four at a time: a quarter of the loads and stores of the target
                a, b = left[batch, k, row] * factor, left[batch, k + 1, row] * factor
                c, d = left[batch, k + 2, row] * factor, left[batch, k + 3, row] * factor
                first, second = right[batch, k, at:end], right[batch, k + 1, at:end]
                third, fourth = right[batch, k + 2, at:end], right[batch, k + 3, at:end]
                for i in range(target.size):
                    target[i] += (a * first[i] + b * second[i]) + (c * third[i] + d * fourth[i])
            for k in range(fours, rank):
                a, first = left[batch, k, row] * factor, right[batch, k, at:end]
                for i in range(target.size):
                    target[i] += a * first[i]


# --- launchers ----------------------------------------------------------------------------------------------


def orthonormalise(factors: torch.Tensor, spare: torch.Tensor) -> None:
    """Make the rows of each factor orthonormal, in place, by Gram-Schmidt in float64.

    A factor with a NaN or an infinity becomes NaN throughout. A row that depends on those before it is
    replaced by the row of `spare` (r × n, any values), or by zeros where that depends on them too.
    """
    if factors.is_cuda:
        orthonormalise_reference(factors, spare)
    else:
        cpu.spread(_orthonormalise, len(factors), factors.nbytes, factors.numpy(), spare.numpy())


def expand(
    left: torch.Tensor,
    right: torch.Tensor,
    values: torch.Tensor,
    offset: int,
    stride: int,
    *,
    factor: float = 1.0,
    add: bool = False,
) -> None:
    """Overwrite a batch's matrices in flat float32 `values` by `factor` × their products, or add those."""
    if values.is_cuda:
        expand_reference(left, right, values, offset, stride, factor, add)
        return
    count, _, rows = left.shape
    arrays = (left.numpy(), right.numpy(), values.numpy(), offset, stride, np.float32(factor), add)
    cpu.spread(_expand, count * rows, count * rows * right.shape[2] * 4, *arrays)
