"""Kernels of `mcr_plus.kernels.fp8_block` in Triton, with payloads that are equal bit for bit.

Rounding works on bits, as on the CPU, so hardware need not support 8-bit floats.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from mcr_plus.kernels.fp8_block import Float8Format, Scale, block_of

_VALUES: Final = 2048  # values per program: enough loads in flight, few enough registers


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    values,
    scales,
    codes,
    numel,
    step,
    tiniest,
    emax,
    lowest,
    top,
    shift: tl.constexpr,
    small: tl.constexpr,
    block_size: tl.constexpr,
    rows: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = block[:, None] * block_size + tl.arange(0, block_size)[None, :]
    inside = at < numel
    x = tl.load(values + at, inside, 0.0)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = largest < 0x7F800000
    if small:
        exponent = tl.maximum(largest >> 23, emax) - emax
        per_unit = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(finite, exponent, 255).to(tl.uint8)
    else:
        factor = tl.maximum(largest.to(tl.float32, bitcast=True) * step, tiniest)
        per_unit = tl.div_rn(tl.full([rows], 1.0, tl.float32), factor)
        scale = tl.where(finite, factor, float("nan"))
    tl.store(scales + block, scale, block * block_size < numel)
    units = tl.where(finite[:, None], x, 0.0) * tl.where(finite, per_unit, 0.0)[:, None]
    bits = units.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    exponents = tl.maximum(magnitude, lowest) & 0x7F800000
    anchor = exponents + (shift << 23)
    total = magnitude.to(tl.float32, bitcast=True) + anchor.to(tl.float32, bitcast=True)
    code = (total.to(tl.int32, bitcast=True) - anchor) + ((exponents - lowest) >> shift)
    tl.store(codes + at, (tl.minimum(code, top) | ((bits >> 24) & 0x80)).to(tl.uint8), inside)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    scales,
    codes,
    out,
    numel,
    factor,
    bias,
    least,
    shift: tl.constexpr,
    add: tl.constexpr,
    small: tl.constexpr,
    block_size: tl.constexpr,
    rows: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = block[:, None] * block_size + tl.arange(0, block_size)[None, :]
    inside = at < numel
    scale = tl.load(scales + block, block * block_size < numel, 0)
    if small:
        exponent = scale.to(tl.int32)
        power = tl.maximum(exponent << 23, 0x00400000)  # 2^-127 is half of the smallest normal
        scale = tl.where(exponent == 255, 0x7FC00000, power).to(tl.float32, bitcast=True)
    if add:
        scale = scale * factor
    code = tl.load(codes + at, inside, 0).to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << shift) + bias).to(tl.float32, bitcast=True)
    x = tl.where(magnitude >= 1 << (23 - shift), normal, magnitude.to(tl.float32) * least)
    x = tl.where(code >= 0x80, -x, x) * scale[:, None]
    if add:
        x += tl.load(out + at, inside, 0.0)
    tl.store(out + at, x, inside)


def encode(
    values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, fmt: Float8Format, scale: Scale
) -> None:
    """See `mcr_plus.kernels.fp8_block.encode`."""
    numbers = (values.numel(), fmt.step, 2.0**-126, fmt.emax, fmt.lowest, fmt.top)
    _launch(_encode, scale, values.numel(), values, scales, codes, *numbers, shift=fmt.shift)


def decode(
    scales: torch.Tensor,
    codes: torch.Tensor,
    out: torch.Tensor,
    factor: float,
    add: bool,
    fmt: Float8Format,
    scale: Scale,
) -> None:
    """Overwrite `out` with the values of a payload, or add `factor` times the values."""
    numbers = (out.numel(), factor, fmt.bias << 23, fmt.least)
    _launch(_decode, scale, out.numel(), scales, codes, out, *numbers, shift=fmt.shift, add=add)


def _launch(kernel: Any, scale: Scale, numel: int, *args: object, **constants: object) -> None:
    block = block_of(scale)
    constants |= {"small": scale == "e8m0", "block_size": block, "rows": _VALUES // block}
    # No fused multiply-add, which rounds once where the CPU rounds twice.
    kernel[(triton.cdiv(numel, _VALUES),)](*args, **constants, enable_fp_fusion=False)
