"""Sums of the values of all ranks by a tree, or exactly, in Triton; equal bit for bit to those of the CPU."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

MOST: Final = 64
"""Most ranks whose values `tree` combines: a program has those of an element all at once."""
_BLOCK: Final = 1024


@triton.jit
def _load(rows, at, inside):  # type: ignore[no-untyped-def]
    """Load values, of half types as float32; bfloat16 is given as int16: the interpreter loses subnormals."""
    x = tl.load(rows + at, inside, 0)
    if rows.dtype.element_ty == tl.int16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif rows.dtype.element_ty == tl.float16:
        x = x.to(tl.float32)
    return x


@triton.jit
def _tree(rows, out, numel, ranks, levels: tl.constexpr, product: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Combine neighbours level by level; a value beyond the last rank changes nothing."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    rank = tl.arange(0, 1 << levels).to(tl.int64)
    inside = (at < numel)[:, None] & (rank < ranks)[None, :]
    x = tl.where(inside, _load(rows, rank[None, :] * numel + at[:, None], inside), 1.0 if product else -0.0)
    for level in tl.static_range(levels):
        left, right = tl.split(tl.reshape(x, [block, 1 << (levels - level - 1), 2]))
        x = left * right if product else left + right
    tl.store(out + at, tl.reshape(x, [block]), at < numel)


@triton.jit
def _two_sum(a, b):  # type: ignore[no-untyped-def]
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    return total, tl.where(tl.abs(total) < float("inf"), error, 0.0)


@triton.jit
def _to_odd(total, rest, integer: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `total + rest`, rounded to odd, where `total` is its rounding to nearest."""
    bits = total.to(integer, bitcast=True)
    away = ((rest > 0) != (total > 0)).to(integer)  # towards zero, one bit less
    return tl.where((rest != 0) & (rest == rest), (bits - away) | 1, bits).to(total.dtype, bitcast=True)


@triton.jit
def _exact(rows, out, lost, numel, ranks, half: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write sums, to be rounded once more if `half`, and 1 where two float64 do not hold a sum, or else 0."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < numel
    high = _load(rows, at, inside).to(tl.float64)
    low, lacks = tl.zeros([block], tl.float64), tl.zeros([block], tl.int32)
    place = at
    for _ in range(1, ranks):
        place += numel  # in 64 bits
        high, error = _two_sum(high, _load(rows, place, inside).to(tl.float64))
        low, error = _two_sum(low, error)
        lacks |= (error != 0).to(tl.int32)
    total = tl.where(low == 0, high, high + low)  # keeps -0
    if out.dtype.element_ty == tl.float32:
        _, rest = _two_sum(high, low)
        total = _to_odd(total, rest, tl.int64)
        single = total.to(tl.float32)
        if half:
            single = _to_odd(single, total - single.to(tl.float64), tl.int32)
        tl.store(out + at, single, inside)
    else:
        tl.store(out + at, total, inside)
    tl.store(lost + at, lacks.to(tl.int8), inside)


def tree(rows: torch.Tensor, out: torch.Tensor, product: bool) -> None:
    """Combine `rows` of at most `MOST` ranks into flat `out`: of float32 for half types, or like them."""
    ranks, numel = rows.shape
    levels = (ranks - 1).bit_length()
    arrays = (_plain(rows), out, numel, ranks)
    _launch(_tree, numel, _BLOCK >> levels // 2, *arrays, levels=levels, product=product)


def exact(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Add up `rows` into flat `out`; return 1 for each sum that is wrong, as two float64 do not hold it.

    For half types, `out` is of float32, to be rounded once more.
    """
    ranks, numel = rows.shape
    lost = torch.empty(numel, dtype=torch.int8, device=rows.device)
    _launch(_exact, numel, _BLOCK, _plain(rows), out, lost, numel, ranks, half=rows.element_size() == 2)
    return lost


def _plain(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.int16) if rows.dtype is torch.bfloat16 else rows


def _launch(kernel: Any, numel: int, block: int, *args: object, **constants: object) -> None:
    # Fused multiply-adds would round differently from the CPU.
    kernel[(triton.cdiv(numel, block),)](*args, block=block, enable_fp_fusion=False, **constants)
