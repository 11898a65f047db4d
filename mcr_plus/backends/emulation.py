"""Local reductions, for libraries that can move data but not reduce it."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Final

import torch

from mcr_plus.core.kinds import ReduceOp, dtype_name
from mcr_plus.kernels.compiling import compiling

LocalReduce = Callable[[torch.Tensor, torch.Tensor], None]
"""Reduce `parts` over dim 0 into `out`: parts [ranks, n], out [n], same dtype, contiguous."""

_PIECE: Final = 1 << 18
"""Elements reduced at a time where a reduction needs extra memory; a piece stays in the caches."""
_HALVES = (torch.float16, torch.bfloat16)
_LOGIC: dict[str, ReduceOp] = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


def local_reduce(op: ReduceOp, dtype: torch.dtype) -> LocalReduce:
    """Return a reduction in rank order, the same on every rank, so that all ranks get the same bits.

    float16 and bfloat16 are summed and multiplied in float32 and rounded once. For host memory only.
    """
    reduce_parts = _reduction(op, dtype)

    def run(parts: torch.Tensor, out: torch.Tensor) -> None:
        with torch.inference_mode():  # tensors created in inference mode can be written only in it
            reduce_parts(parts, out)

    return run


def _reduction(op: ReduceOp, dtype: torch.dtype) -> LocalReduce:
    if dtype is torch.bool:
        op = _LOGIC.get(op, op)
    if op in _BITWISE:
        return _in_pieces(_bitwise(_BITWISE[op]))
    if op in ("MIN", "MAX"):
        if dtype.is_floating_point:  # torch propagates NaN, but may return either zero
            return _compiled(op, dtype)
        return _in_pieces(_extreme(torch.amin if op == "MIN" else torch.amax))
    if dtype.is_complex and op != "PRODUCT":
        return _by_parts(_in_place(op))
    return _in_pieces(_arithmetic(op, torch.float32)) if dtype in _HALVES else _in_place(op)


def _by_parts(reduce_parts: LocalReduce) -> LocalReduce:
    """Sum complex numbers by parts: torch multiplies addends by 1+0j, which turns an infinity into NaN."""

    def run(parts: torch.Tensor, out: torch.Tensor) -> None:
        reduce_parts(torch.view_as_real(parts).flatten(1), torch.view_as_real(out).view(-1))

    return run


def _in_pieces(reduce_parts: LocalReduce) -> LocalReduce:
    def run(parts: torch.Tensor, out: torch.Tensor) -> None:
        for piece, target in zip(parts.split(_PIECE, dim=1), out.split(_PIECE), strict=True):
            reduce_parts(piece, target)

    return run


def _bitwise(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> LocalReduce:
    def run(parts: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(reduce(function, parts.unbind(0)))

    return run


def _extreme(function: Callable[..., torch.Tensor]) -> LocalReduce:
    def run(parts: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(function(parts, dim=0))

    return run


def _compiled(op: ReduceOp, dtype: torch.dtype) -> LocalReduce:
    from mcr_plus.backends.shm.reduce_kernels import reduce_rows  # imported here: needs numba
    from mcr_plus.backends.shm.reductions import kernels_for

    with compiling(f"{op} on {dtype_name(dtype)}"):
        combine = kernels_for(dtype, op).combine

    def run(parts: torch.Tensor, out: torch.Tensor) -> None:
        ranks, count = parts.shape
        if ranks == 1:
            out.copy_(parts[0])
            return
        reduce_rows(combine, 0, parts.data_ptr(), out.data_ptr(), ranks, count, dtype.itemsize)

    return run


def divide(total: torch.Tensor, number: int) -> None:
    """Divide a sum in place to get the mean; integers are rounded towards zero."""
    with torch.inference_mode():  # tensors created in inference mode can be written only in it
        values = torch.view_as_real(total) if total.is_complex() else total
        rounding = None if values.is_floating_point() else "trunc"
        # A number beyond the dtype's range would wrap around.
        is_wide = rounding is not None and number > torch.iinfo(values.dtype).max
        values.copy_((values.long() if is_wide else values).div_(number, rounding_mode=rounding))


def _in_place(op: ReduceOp) -> LocalReduce:
    combine = torch.mul if op == "PRODUCT" else torch.add

    def run(parts: torch.Tensor, out: torch.Tensor) -> None:
        if len(parts) == 1:
            out.copy_(parts[0])
            return
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)
        if op == "AVG":
            divide(out, len(parts))

    return run


def _arithmetic(op: ReduceOp, wide: torch.dtype) -> LocalReduce:
    def run(parts: torch.Tensor, out: torch.Tensor) -> None:
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total = total.mul_(part) if op == "PRODUCT" else total.add_(part)
        out.copy_(total)
        if op == "AVG":  # divide the rounded sum, which may be infinite, like all libraries
            divide(out, len(parts))

    return run
