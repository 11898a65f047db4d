"""Horovod's reduce ops, and their translation to mcr_plus."""

from __future__ import annotations

import warnings
from enum import IntEnum
from typing import Final

import torch

from mcr_plus.backends.emulation import divide
from mcr_plus.core.kinds import ReduceOp as Op
from mcr_plus.errors import InvalidArgument, Unsupported


class HorovodReduceOp(IntEnum):
    """Reduce ops, with Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average: Final = HorovodReduceOp.AVERAGE
Sum: Final = HorovodReduceOp.SUM
Adasum: Final = HorovodReduceOp.ADASUM
Min: Final = HorovodReduceOp.MIN
Max: Final = HorovodReduceOp.MAX
Product: Final = HorovodReduceOp.PRODUCT

_NAMES: Final[dict[int, Op]] = {Sum: "SUM", Min: "MIN", Max: "MAX", Product: "PRODUCT"}


def reduce_op_of(op: int | None, average: bool | None = None) -> HorovodReduceOp:
    """Return the reduce op for `op` and `average` (deprecated); `Average` if neither is given.

    Raises `InvalidArgument` (a `ValueError`) for both or an unknown `op`, `Unsupported` for `Adasum`.
    """
    if op is not None and average is not None:
        raise InvalidArgument("op, average: expected one of them; op replaces average")
    if average is not None:
        warnings.warn("average is deprecated; pass op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    try:
        reduce_op = Average if op is None else HorovodReduceOp(op)
    except ValueError:
        known = ", ".join(member.name.capitalize() for member in HorovodReduceOp if member is not Adasum)
        raise InvalidArgument(f"op: unknown reduce op {op!r}; known: {known}") from None
    if reduce_op is Adasum:
        raise Unsupported("op: Adasum is not implemented; use Average or Sum")
    return reduce_op


def issued_op(
    op: int, dtype: torch.dtype, before: float, after: float, ranks: int
) -> tuple[Op, float, float]:
    """Return the op to issue, and the factors before and after the reduction.

    Without factors, an average of floats is the library's AVG. An average of integers is the sum divided by
    the number of ranks, rounded towards zero.
    """
    if op != Average:
        return _NAMES[op], before, after
    if before == after == 1.0 and (dtype.is_floating_point or dtype.is_complex):
        return "AVG", 1.0, 1.0
    return "SUM", before, after / ranks


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place: integers in float64 with rounding towards zero, 16-bit floats in float32."""
    if factor == 1.0:
        return
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor.copy_(tensor.float().mul_(factor))
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor)
    elif factor < 1.0 and (1.0 / factor).is_integer():
        divide(tensor, int(1.0 / factor))  # exact, also beyond 2**53
    else:
        tensor.copy_(tensor.double().mul_(factor))


def neutral(op: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return the neutral element of `op`: the contribution of a rank without a tensor."""
    if op == Product:
        return torch.ones(shape, dtype=dtype, device=device)
    if op not in (Min, Max):
        return torch.zeros(shape, dtype=dtype, device=device)
    if dtype is torch.bool:
        return torch.full(shape, op == Min, dtype=dtype, device=device)
    if dtype.is_floating_point:
        return torch.full(shape, float("inf") if op == Min else float("-inf"), dtype=dtype, device=device)
    limits = torch.iinfo(dtype)
    return torch.full(shape, limits.max if op == Min else limits.min, dtype=dtype, device=device)
