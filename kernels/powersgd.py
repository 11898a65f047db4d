"""Compute, orthonormalise and multiply factors of matrices: CPU kernels and batched torch operations.

Matrices come in batches of equal shape. A batch of matrices n × m of rank r has factors left (count × r × n)
and right (count × r × m), float32 and contiguous; the product of its matrix b is left[b]ᵀ @ right[b]. The
values of a matrix are stored row by row in a flat tensor, from element `offset + b × stride` on.

Results that must be equal on all ranks are summed in an order that depends neither on the number of threads
nor on the processor. A BLAS does not guarantee this, and its threads spin, which disturbs other ranks on the
host. On GPUs, batched torch operations do the same work.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from mcr_plus.kernels import cpu

_DEPENDENT: Final = 1e-6
"""What is left of a row without the earlier rows' parts, against all of it: less is float32's rounding."""
_COLUMNS: Final = 1024  # columns per step: their sums over rows fit the first-level cache
_PARTS: Final = 64  # partial sums of a dot product, for vector instructions
_STEP: Final = 4 * _PARTS


# --- torch: for GPUs, and as reference for tests of the CPU kernels -----------------------------------------


def orthonormalise_reference(factors: torch.Tensor, spare: torch.Tensor) -> None:
    """Run `orthonormalise` by torch operations."""
    basis = torch.zeros_like(factors, dtype=torch.float64)
    for row in range(factors.shape[1]):
        found, sound = _unit(factors[:, row].to(torch.float64), basis[:, :row])
        other, _ = _unit(spare[row].to(torch.float64).expand_as(found), basis[:, :row])
        basis[:, row] = torch.where(sound, found, other)
    finite = factors.isfinite().all(2, keepdim=True).all(1, keepdim=True)
    factors.copy_(torch.where(finite, basis, torch.nan))


def _unit(rows: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normalised rows without components along `basis`, and whether anything was left of each."""
    largest = rows.abs().amax(1, keepdim=True)
    rows = rows / largest.where(largest > 0, 1.0)
    before = rows.square().sum(1, keepdim=True).sqrt()
    for _ in range(2):  # all at once; nearly dependent rows need two passes
        rows = rows - torch.bmm(torch.bmm(rows[:, None], basis.mT), basis)[:, 0]
    after = rows.square().sum(1, keepdim=True).sqrt()
    sound = after > before * _DEPENDENT
    return torch.where(sound, rows / after.where(sound, 1.0), 0.0), sound


def find_left_reference(
    values: torch.Tensor, offset: int, stride: int, right: torch.Tensor, left: torch.Tensor
) -> None:
    """Run `find_left` by torch operations."""
    torch.bmm(right, _matrices(values, offset, stride, left, right).mT, out=left)


def find_right_reference(
    values: torch.Tensor, offset: int, stride: int, left: torch.Tensor, right: torch.Tensor
) -> None:
    """Run `find_right` by torch operations."""
    torch.bmm(left, _matrices(values, offset, stride, left, right), out=right)


def expand_reference(
    left: torch.Tensor,
    right: torch.Tensor,
    values: torch.Tensor,
    offset: int,
    stride: int,
    factor: float,
    add: bool,
) -> None:
    """Run `expand` by torch operations."""
    matrices = _matrices(values, offset, stride, left, right)
    matrices.baddbmm_(left.mT, right, beta=1.0 if add else 0.0, alpha=factor)


def _matrices(
    values: torch.Tensor, offset: int, stride: int, left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    """Return the matrices of a batch, count × n × m, as a view."""
    shape = (len(left), left.shape[2], right.shape[2])
    return values.as_strided(shape, (stride, shape[2], 1), values.storage_offset() + offset)


# --- CPU ----------------------------------------------------------------------------------------------------


@cpu.inlined
def _dot(first, second):  # type: ignore[no-untyped-def]
    # Four sums, because each addition waits for the previous one.
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
    """Make `source` row `row` of the basis; return False, and leave the row undefined, if it is dependent."""
    target = basis[row]
    largest = np.float64(0)
    for i in range(source.size):
        largest = max(largest, abs(np.float64(source[i])))
    if largest == 0:
        return False
    for i in range(source.size):
        target[i] = source[i] / largest
    before = _dot(target, target)
    for earlier in range(row):  # one after another, from the remainder, which nearly dependent rows need
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
        for row in range(rows.shape[0]):
            cpu.put(basis[row], rows[row])


@cpu.inlined
def _add_four(target, a, first, b, second, c, third, d, fourth):  # type: ignore[no-untyped-def]
    # Four at a time: a quarter of the loads and stores of the target.
    for i in range(target.size):
        target[i] += (a * first[i] + b * second[i]) + (c * third[i] + d * fourth[i])


@cpu.inlined
def _add_one(target, a, first):  # type: ignore[no-untyped-def]
    for i in range(target.size):
        target[i] += a * first[i]


@cpu.inlined
def _add_products(sums, x, y):  # type: ignore[no-untyped-def]
    for i in range(_PARTS):
        first, second = x[i] * y[i], x[i + _PARTS] * y[i + _PARTS]
        third, fourth = x[i + 2 * _PARTS] * y[i + 2 * _PARTS], x[i + 3 * _PARTS] * y[i + 3 * _PARTS]
        sums[i] += (first + second) + (third + fourth)


@cpu.inlined
def _sum_up(sums):  # type: ignore[no-untyped-def]
    # Sum of _PARTS, by halves.
    for i in range(32):
        sums[i] += sums[i + 32]
    for i in range(16):
        sums[i] += sums[i + 16]
    for i in range(8):
        sums[i] += sums[i + 8]
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))


@cpu.compiled
def _find_left(values, offset, stride, right, left, lo, hi):  # type: ignore[no-untyped-def]
    _, rank, rows = left.shape
    columns = right.shape[2]
    whole = columns // _STEP * _STEP
    sums = np.empty(_PARTS, np.float32)
    for line in range(lo, hi):
        batch, row = line // rows, line % rows
        start = offset + batch * stride + row * columns
        source = values[start : start + columns]
        for k in range(rank):
            factor = right[batch, k]
            sums[:] = 0
            for at in range(0, whole, _STEP):
                _add_products(sums, source[at : at + _STEP], factor[at : at + _STEP])
            total = _sum_up(sums)
            for i in range(whole, columns):
                total += source[i] * factor[i]
            left[batch, k, row] = total


@cpu.compiled
def _find_right(values, offset, stride, left, right, lo, hi):  # type: ignore[no-untyped-def]
    _, rank, rows = left.shape
    columns = right.shape[2]
    chunks = -(-columns // _COLUMNS)
    fours = rows // 4 * 4
    for index in range(lo, hi):
        batch, at = index // chunks, index % chunks * _COLUMNS
        end = min(at + _COLUMNS, columns)
        start = offset + batch * stride
        right[batch, :, at:end] = 0
        for row in range(0, fours, 4):
            begin = start + row * columns
            first, second = (
                values[begin + at : begin + end],
                values[begin + columns + at : begin + columns + end],
            )
            begin += 2 * columns
            third, fourth = (
                values[begin + at : begin + end],
                values[begin + columns + at : begin + columns + end],
            )
            for k in range(rank):
                p = left[batch, k, row : row + 4]
                _add_four(right[batch, k, at:end], p[0], first, p[1], second, p[2], third, p[3], fourth)
        for row in range(fours, rows):
            begin = start + row * columns
            for k in range(rank):
                _add_one(right[batch, k, at:end], left[batch, k, row], values[begin + at : begin + end])


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
            for k in range(0, fours, 4):
                a, b = left[batch, k, row] * factor, left[batch, k + 1, row] * factor
                c, d = left[batch, k + 2, row] * factor, left[batch, k + 3, row] * factor
                first, second = right[batch, k, at:end], right[batch, k + 1, at:end]
                third, fourth = right[batch, k + 2, at:end], right[batch, k + 3, at:end]
                _add_four(target, a, first, b, second, c, third, d, fourth)
            for k in range(fours, rank):
                _add_one(target, left[batch, k, row] * factor, right[batch, k, at:end])


# --- launchers ----------------------------------------------------------------------------------------------


def find_left(
    values: torch.Tensor, offset: int, stride: int, right: torch.Tensor, left: torch.Tensor
) -> None:
    """Write right @ Mᵀ to `left` for each matrix M of a batch in flat float32 `values`."""
    if values.is_cuda:
        find_left_reference(values, offset, stride, right, left)
        return
    count, _, rows = left.shape
    arrays = (values.numpy(), offset, stride, right.numpy(), left.numpy())
    cpu.spread(_find_left, count * rows, count * rows * right.shape[2] * 4, *arrays)


def find_right(
    values: torch.Tensor, offset: int, stride: int, left: torch.Tensor, right: torch.Tensor
) -> None:
    """Write left @ M to `right` for each matrix M of a batch in flat float32 `values`."""
    if values.is_cuda:
        find_right_reference(values, offset, stride, left, right)
        return
    count, _, rows = left.shape
    columns = right.shape[2]
    arrays = (values.numpy(), offset, stride, left.numpy(), right.numpy())
    cpu.spread(_find_right, count * -(-columns // _COLUMNS), count * rows * columns * 4, *arrays)


def orthonormalise(factors: torch.Tensor, spare: torch.Tensor) -> None:
    """Make the rows of each factor orthonormal, in place, by Gram-Schmidt in float64.

    A factor with a NaN or an infinity becomes all NaN. A row that depends on earlier rows is replaced by the
    row of `spare` (r × n, any values), or by zeros if that row is dependent, too.
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
    """Overwrite a batch's matrices in flat float32 `values` by `factor` × left × right, or add this."""
    if values.is_cuda:
        expand_reference(left, right, values, offset, stride, factor, add)
        return
    count, _, rows = left.shape
    arrays = (left.numpy(), right.numpy(), values.numpy(), offset, stride, np.float32(factor), add)
    cpu.spread(_expand, count * rows, count * rows * right.shape[2] * 4, *arrays)
