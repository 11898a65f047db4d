"""Kernels of `mcr_plus.kernels.int_shared` in Triton, with words that are equal bit for bit."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from mcr_plus.kernels.int_shared import SIGNS

_BLOCK: Final = tl.constexpr(256)
_ROWS: Final = 8  # blocks per program: enough loads in flight, few enough registers
_HALF: Final = tl.constexpr(12582912.0)  # 1.5 × 2^23: adding it rounds to an integer, to nearest even
_INFINITE: Final = tl.constexpr(0x7F800000)


@triton.jit
def _amax(values, amax, numel, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    x = tl.load(values + at, at < numel, 0.0)
    largest = tl.minimum(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), _INFINITE)
    tl.store(amax + block, largest.to(tl.float32, bitcast=True), block * _BLOCK < numel)


@triton.jit
def _load_scale(amax, block, inside, step, tiniest):  # type: ignore[no-untyped-def]
    largest = tl.load(amax + block, inside, 0.0)
    finite = largest.to(tl.int32, bitcast=True) < _INFINITE
    return tl.where(finite, tl.maximum(largest * step, tiniest), float("nan")), finite


@triton.jit
def _encode(values, amax, words, numel, step, tiniest, lanes: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    scale, finite = _load_scale(amax, block, block * _BLOCK < numel, step, tiniest)
    per_unit = tl.div_rn(tl.full([rows], 1.0, tl.float32), scale)
    word = block[:, None] * (_BLOCK // lanes) + tl.arange(0, _BLOCK // lanes)[None, :]
    lane = tl.arange(0, lanes)
    at = word[:, :, None] * lanes + lane[None, None, :]
    x = tl.load(values + at, at < numel, 0.0)
    units = tl.where(finite[:, None, None], x * per_unit[:, None, None], 0.0)
    codes = ((units + _HALF) - _HALF).to(tl.int32)
    packed = tl.sum(codes << (lane * (32 // lanes))[None, None, :], 2)
    # The interpreter of Triton 3.2 (torch 2.6) sums in 64 bits, and would store all 64.
    tl.store(words + word, packed.to(tl.int64).to(tl.int32), word * lanes < numel)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    amax,
    words,
    out,
    numel,
    step,
    tiniest,
    factor,
    signs,
    lanes: tl.constexpr,
    add: tl.constexpr,
    rows: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    scale, _ = _load_scale(amax, block, block * _BLOCK < numel, step, tiniest)
    word = block[:, None] * (_BLOCK // lanes) + tl.arange(0, _BLOCK // lanes)[None, :]
    lane = tl.arange(0, lanes)
    flipped = (tl.load(words + word, word * lanes < numel, 0) + signs) ^ signs
    # to the top of the word and back, which extends the sign
    high = flipped[:, :, None] << ((lanes - 1 - lane) * (32 // lanes))[None, None, :]
    codes = high >> (32 - 32 // lanes)
    at = word[:, :, None] * lanes + lane[None, None, :]
    inside = at < numel
    if add:
        scale = scale * factor
    x = codes.to(tl.float32) * scale[:, None, None]
    if add:
        x += tl.load(out + at, inside, 0.0)
    tl.store(out + at, x, inside)


def amax(values: torch.Tensor, out: torch.Tensor) -> None:
    """See `mcr_plus.kernels.int_shared.amax`."""
    _launch(_amax, values.numel(), values, out, values.numel())


def encode(values: torch.Tensor, amax: torch.Tensor, words: torch.Tensor, levels: int, lanes: int) -> None:
    """See `mcr_plus.kernels.int_shared.encode`."""
    arrays = (values, amax, words, values.numel())
    _launch(_encode, values.numel(), *arrays, 1 / levels, 2.0**-126, lanes=lanes)


def decode(
    amax: torch.Tensor,
    words: torch.Tensor,
    out: torch.Tensor,
    levels: int,
    lanes: int,
    factor: float,
    add: bool,
) -> None:
    """See `mcr_plus.kernels.int_shared.decode` and `accumulate`."""
    arrays = (amax, words, out, out.numel(), 1 / levels, 2.0**-126, factor, SIGNS[lanes])
    _launch(_decode, out.numel(), *arrays, lanes=lanes, add=add)


def _launch(kernel: Any, numel: int, *args: object, **constants: object) -> None:
    # Fused multiply-adds would round differently from the CPU.
    kernel[(triton.cdiv(numel, 256 * _ROWS),)](*args, rows=_ROWS, enable_fp_fusion=False, **constants)
