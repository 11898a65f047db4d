"""Kernels of `mcr_plus.kernels.int8_block` in Triton, with payloads that are equal bit for bit."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

_BLOCK: Final = tl.constexpr(256)
_ROWS: Final = 8  # blocks per program: enough loads in flight, few enough registers
_HALF: Final = tl.constexpr(12582912.0)  # 1.5 × 2^23: adding it rounds to an integer, to nearest even


@triton.jit
def _encode(values, scales, codes, numel, step, tiniest, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = at < numel
    x = tl.load(values + at, inside, 0.0)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = largest < 0x7F800000
    scale = tl.maximum(largest.to(tl.float32, bitcast=True) * step, tiniest)
    units = tl.where(finite[:, None], x, 0.0) * tl.where(finite, tl.div_rn(1.0, scale), 0.0)[:, None]
    rounded = (units + _HALF) - _HALF
    tl.store(scales + block, tl.where(finite, scale, float("nan")), block * _BLOCK < numel)
    tl.store(codes + at, rounded.to(tl.int8), inside)


@triton.jit
def _decode(scales, codes, out, numel, factor, add: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = at < numel
    scale = tl.load(scales + block, block * _BLOCK < numel, 0.0)
    if add:
        scale = scale * factor
    x = tl.load(codes + at, inside, 0).to(tl.float32) * scale[:, None]
    if add:
        x += tl.load(out + at, inside, 0.0)
    tl.store(out + at, x, inside)


def encode(values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
    """See `mcr_plus.kernels.int8_block.encode`."""
    _launch(_encode, values.numel(), values, scales, codes, values.numel(), 1 / 127, 2.0**-126)


def decode(scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
    """See `mcr_plus.kernels.int8_block.decode`."""
    _launch(_decode, out.numel(), scales, codes, out, out.numel(), 1.0, add=False)


def accumulate(scales: torch.Tensor, codes: torch.Tensor, total: torch.Tensor, factor: float) -> None:
    """See `mcr_plus.kernels.int8_block.accumulate`."""
    _launch(_decode, total.numel(), scales, codes, total, total.numel(), factor, add=True)


def _launch(kernel: Any, numel: int, *args: object, **constants: object) -> None:
    # Fused multiply-adds would round differently from the CPU.
    grid = (triton.cdiv(numel, 256 * _ROWS),)
    kernel[grid](*args, rows=_ROWS, enable_fp_fusion=False, **constants)
