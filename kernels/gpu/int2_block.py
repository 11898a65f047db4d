"""Kernels of `mcr_plus.kernels.int2_block` in Triton, with payloads that are equal bit for bit."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from mcr_plus.kernels.int2_block import LARGEST_LEVEL, THRESHOLD

_ROWS: Final = 16  # blocks per program: a warp reads 128 consecutive bytes of each


@triton.jit
def _folded(sums, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    for level in tl.static_range(5):
        lower, upper = tl.split(tl.permute(tl.reshape(sums, [rows, 2, 16 >> level]), [0, 2, 1]))
        sums = lower + upper
    return tl.reshape(sums, [rows])


@triton.jit
def _bits_of_mean(total, count, cap):  # type: ignore[no-untyped-def]
    """Return the bits of the nearest bfloat16 to the mean of `count` magnitudes; sum = 128 × `total`."""
    share = tl.div_rn(tl.full(total.shape, 128.0, tl.float32), tl.maximum(count, 1).to(tl.float32))
    bits = (total * share).to(tl.int32, bitcast=True)
    return tl.minimum((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, cap)


@triton.jit
def _encode(values, levels, codes, numel, threshold, cap, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    lane = tl.arange(0, 32)[None, :]
    count = tl.minimum(tl.maximum(numel - block * 128, 0), 128).to(tl.int32)
    sums = tl.zeros([rows, 32], tl.float32)
    for k in tl.static_range(4):
        at = block[:, None] * 128 + k * 32 + lane
        sums += tl.abs(tl.load(values + at, at < numel, 0.0)) * 0.0078125
    total = _folded(sums, rows)
    finite = total < float("inf")
    share = tl.div_rn(tl.full([rows], 128.0, tl.float32), tl.maximum(count, 1).to(tl.float32))
    edge = ((total * share) * threshold)[:, None]
    low, high = tl.zeros([rows, 32], tl.float32), tl.zeros([rows, 32], tl.float32)
    many, packed = tl.zeros([rows, 32], tl.int32), tl.zeros([rows, 32], tl.int32)
    for k in tl.static_range(4):
        at = block[:, None] * 128 + k * 32 + lane
        x = tl.load(values + at, at < numel, 0.0)
        part = tl.abs(x) * 0.0078125
        above = tl.abs(x) > edge
        high += tl.where(above, part, 0.0)
        low += tl.where(above, 0.0, part)
        many += above.to(tl.int32)
        sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
        packed |= (sign | (above.to(tl.int32) << 1)) << (2 * k)
    found = tl.sum(many, 1)
    present = block * 128 < numel
    lower = tl.where(finite, _bits_of_mean(_folded(low, rows), count - found, cap), 0x7FC0)
    higher = tl.where(finite, _bits_of_mean(_folded(high, rows), found, cap), 0x7FC0)
    tl.store(levels + block * 2, lower.to(tl.int16), present)
    tl.store(levels + block * 2 + 1, higher.to(tl.int16), present)
    packed = tl.where(finite[:, None], packed, 0)
    tl.store(codes + block[:, None] * 32 + lane, packed.to(tl.uint8), present[:, None])


@triton.jit
def _decode(levels, codes, out, numel, factor, add: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    lane = tl.arange(0, 32)[None, :]
    present = block * 128 < numel
    lower = (tl.load(levels + block * 2, present, 0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    higher = (tl.load(levels + block * 2 + 1, present, 0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if add:
        lower, higher = lower * factor, higher * factor
    packed = tl.load(codes + block[:, None] * 32 + lane, present[:, None], 0).to(tl.int32)
    for k in tl.static_range(4):
        at = block[:, None] * 128 + k * 32 + lane
        code = packed >> (2 * k)
        magnitude = tl.where((code & 2) != 0, higher[:, None], lower[:, None])
        x = (magnitude.to(tl.int32, bitcast=True) ^ (code << 31)).to(tl.float32, bitcast=True)
        if add:
            x += tl.load(out + at, at < numel, 0.0)
        tl.store(out + at, x, at < numel)


def encode(values: torch.Tensor, levels: torch.Tensor, codes: torch.Tensor) -> None:
    """See `mcr_plus.kernels.int2_block.encode`."""
    _launch(_encode, values.numel(), values, levels, codes, values.numel(), THRESHOLD, LARGEST_LEVEL)


def decode(levels: torch.Tensor, codes: torch.Tensor, out: torch.Tensor, factor: float, add: bool) -> None:
    """Overwrite `out` with the values of a payload, or add `factor` times the values."""
    _launch(_decode, out.numel(), levels, codes, out, out.numel(), factor, add=add)


def _launch(kernel: Any, numel: int, *args: object, **constants: object) -> None:
    # No fused multiply-add, which rounds once where the CPU rounds twice.
    kernel[(triton.cdiv(numel, 128 * _ROWS),)](*args, **constants, rows=_ROWS, enable_fp_fusion=False)
