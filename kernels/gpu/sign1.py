"""Kernels of `mcr_plus.kernels.sign1` in Triton, with payloads that are equal bit for bit."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from mcr_plus.kernels.sign1 import LARGEST

_ROWS: Final = 8  # blocks per program: a warp reads 128 consecutive bytes of each


@triton.jit
def _encode(values, scales, words, numel, blocks, last_factor, highest, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    lane = tl.arange(0, 32)[None, :]
    sums = tl.zeros([rows, 32], tl.float32)
    signs = tl.zeros([rows, 32], tl.int32)
    for k in tl.static_range(32):
        at = block[:, None] * 1024 + k * 32 + lane
        x = tl.load(values + at, at < numel, 0.0)
        sums += tl.abs(x) * 0.00048828125
        signs |= ((x.to(tl.int32, bitcast=True) >> 31) & 1) << k
    present = block < blocks
    tl.store(words + block[:, None] * 32 + lane, signs, present[:, None])
    for level in tl.static_range(5):
        lower, upper = tl.split(tl.permute(tl.reshape(sums, [rows, 2, 16 >> level]), [0, 2, 1]))
        sums = lower + upper
    total = tl.reshape(sums, [rows])
    mean = tl.minimum(total * tl.where(block == blocks - 1, last_factor, 2.0), highest)
    tl.store(scales + block, tl.where(total < float("inf"), mean, float("nan")), present)


@triton.jit
def _decode(scales, words, out, numel, blocks, factor, add: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    lane = tl.arange(0, 32)[None, :]
    present = block < blocks
    scale = tl.load(scales + block, present, 0.0)
    if add:
        scale = scale * factor
    mark = scale.to(tl.int32, bitcast=True)[:, None]
    signs = tl.load(words + block[:, None] * 32 + lane, present[:, None], 0)
    for k in tl.static_range(32):
        at = block[:, None] * 1024 + k * 32 + lane
        x = (((signs >> k) << 31) ^ mark).to(tl.float32, bitcast=True)
        if add:
            x += tl.load(out + at, at < numel, 0.0)
        tl.store(out + at, x, at < numel)


def encode(values: torch.Tensor, scales: torch.Tensor, words: torch.Tensor, last_factor: float) -> None:
    """See `mcr_plus.kernels.sign1.encode`."""
    numbers = (values.numel(), scales.numel(), last_factor, LARGEST)
    _launch(_encode, scales.numel(), values, scales, words, *numbers)


def decode(scales: torch.Tensor, words: torch.Tensor, out: torch.Tensor) -> None:
    """See `mcr_plus.kernels.sign1.decode`."""
    _launch(_decode, scales.numel(), scales, words, out, out.numel(), scales.numel(), 1.0, add=False)


def accumulate(scales: torch.Tensor, words: torch.Tensor, total: torch.Tensor, factor: float) -> None:
    """See `mcr_plus.kernels.sign1.accumulate`."""
    _launch(_decode, scales.numel(), scales, words, total, total.numel(), scales.numel(), factor, add=True)


def _launch(kernel: Any, blocks: int, *args: object, **constants: object) -> None:
    # No fused multiply-add, which rounds once where the CPU rounds twice.
    kernel[(triton.cdiv(blocks, _ROWS),)](*args, **constants, rows=_ROWS, enable_fp_fusion=False)
