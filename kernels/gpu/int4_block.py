"""Kernels of `mcr_plus.kernels.int4_block` in Triton, with payloads that are equal bit for bit."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from mcr_plus.kernels.int4_block import LARGEST_SCALE, STEP, TINIEST

_ROWS: Final = 64  # blocks per program: enough loads in flight, few enough registers
_HALF: Final = tl.constexpr(12582912.0)  # 1.5 × 2^23: adding it rounds to an integer, to nearest even


@triton.jit
def _transform(x, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    for _ in tl.static_range(5):
        even, odd = tl.split(tl.reshape(x, [rows, 16, 2]))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), [0, 2, 1]), [rows, 32])
    return x


@triton.jit
def _encode(values, scales, codes, numel, step, tiniest, cap, hadamard: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(values + at, at < numel, 0.0)
    if hadamard:
        x = _transform(x * 0.03125, rows)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = largest < 0x7F800000
    exact = tl.maximum(largest.to(tl.float32, bitcast=True) * step, tiniest).to(tl.int32, bitcast=True)
    scale = tl.minimum(((tl.where(finite, exact, 0x3F800000)) + 0xFFFF) >> 16, cap)
    per_unit = tl.div_rn(tl.full([rows], 1.0, tl.float32), (scale << 16).to(tl.float32, bitcast=True))
    inside = block * 32 < numel
    tl.store(scales + block, tl.where(finite, scale, 0x7FC0).to(tl.int16), inside)
    units = tl.where(finite[:, None], x, 0.0) * per_unit[:, None]
    whole = ((units + _HALF) - _HALF).to(tl.int32)
    low, high = tl.split(tl.permute(tl.reshape(whole, [rows, 2, 16]), [0, 2, 1]))
    pairs = (low & 15) | ((high & 15) << 4)
    tl.store(codes + block[:, None] * 16 + tl.arange(0, 16)[None, :], pairs.to(tl.uint8), inside[:, None])


@triton.jit
def _decode(scales, codes, out, numel, factor, add: tl.constexpr, hadamard: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    present = block * 32 < numel
    pairs = tl.load(codes + block[:, None] * 16 + tl.arange(0, 16)[None, :], present[:, None], 0).to(tl.int32)
    both = tl.join((pairs << 28) >> 28, (pairs << 24) >> 28)
    x = tl.reshape(tl.permute(both, [0, 2, 1]), [rows, 32]).to(tl.float32)
    if hadamard:
        x = _transform(x, rows)
    bits = tl.load(scales + block, present, 0).to(tl.int32)
    scale = (bits << 16).to(tl.float32, bitcast=True)
    if add:
        scale = scale * factor
    x = x * scale[:, None]
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    if add:
        x += tl.load(out + at, at < numel, 0.0)
    tl.store(out + at, x, at < numel)


def encode(values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, hadamard: bool) -> None:
    """See `mcr_plus.kernels.int4_block.encode`."""
    numbers = (values.numel(), STEP, TINIEST, LARGEST_SCALE)
    _launch(_encode, values.numel(), values, scales, codes, *numbers, hadamard=hadamard)


def decode(
    scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor, factor: float, add: bool, hadamard: bool
) -> None:
    """Overwrite `out` with the values of a payload, or add `factor` times the values."""
    _launch(_decode, out.numel(), scales, codes, out, out.numel(), factor, add=add, hadamard=hadamard)


def _launch(kernel: Any, numel: int, *args: object, **constants: object) -> None:
    # No fused multiply-add, which rounds once where the CPU rounds twice.
    kernel[(triton.cdiv(numel, 32 * _ROWS),)](*args, **constants, rows=_ROWS, enable_fp_fusion=False)
