"""Triton versions of the kernels in `mcr_plus.kernels.cast`. Results are equal bit for bit."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from mcr_plus.kernels.counter import Key

_BLOCK: Final = 1024


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * tl.full((1,), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((1,), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _encode(values, out, numel, key, half: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < numel
    bits = tl.load(values + at, inside, 0.0).to(tl.uint32, bitcast=True)
    first, second = tl.load(key).to(tl.uint32, bitcast=True), tl.load(key + 1).to(tl.uint32, bitcast=True)
    random = _mixed(_mixed(at.to(tl.uint32) ^ first) ^ second)
    magnitude = bits & 0x7FFFFFFF
    if half:
        exponent = magnitude >> 23
        normal = ((magnitude + (random & 0x1FFF)) >> 13) - (112 << 10)
        shift = 126 - tl.minimum(exponent, 113).to(tl.int32)
        whole = (magnitude & 0x7FFFFF) | tl.where(exponent > 0, 0x800000, 0).to(tl.uint32)
        whole = whole >> tl.minimum(tl.maximum(shift - 31, 0), 31).to(tl.uint32)
        kept = tl.minimum(shift, 31).to(tl.uint32)
        mask = (tl.full((block,), 1, tl.uint32) << kept) - 1
        subnormal = (whole + (random & mask)) >> kept
        rounded = tl.minimum(tl.where(exponent < 113, subnormal, normal), 0x7C00)
        rounded = tl.where(magnitude > 0x7F800000, 0x7E00, rounded)
    else:
        rounded = (magnitude + (random & 0xFFFF)) >> 16
        rounded = tl.where(magnitude > 0x7F800000, 0x7FC0, rounded)
    tl.store(out + at, (rounded | ((bits >> 31) << 15)).to(tl.uint16).to(tl.int16, bitcast=True), inside)


def encode(values: torch.Tensor, wire: torch.Tensor, key: Key) -> None:
    """See `mcr_plus.kernels.cast.encode`; for one key."""
    # The key is read from memory: the compiler would specialise the kernel for some values of an argument.
    words = torch.tensor(
        [int(part) - (int(part) >> 31 << 32) for part in key], dtype=torch.int32, device="cpu"
    )
    kernel: Any = _encode[(triton.cdiv(values.numel(), _BLOCK),)]
    half = wire.dtype is torch.float16
    kernel(values, wire.view(torch.int16), values.numel(), words.to(values.device), half=half, block=_BLOCK)
