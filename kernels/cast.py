"""Round float32 stochastically to bfloat16 or float16: torch reference, CPU kernels, launcher.

A value between two neighbours is rounded up with the probability that makes the mean equal to the value. The
random bits come from the value's index in a stream (see `mcr_plus.kernels.counter`), so the result depends
only on the key. Random bits are added below the last bit that is kept, and the lower bits are then cut off:

    bfloat16: 16 bits. float16: 13 bits, and more for values below 2^-14, where neighbours are 2^-24
    apart. At most 31 bits are random, so for values below 2^-32, probabilities are multiples of 2^-31.

NaN becomes the quiet NaN, infinities are kept, and the upper neighbour of the largest finite number is
infinity.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from mcr_plus.kernels import counter, cpu

BLOCK: Final = 1024
_SEGMENT: Final = 1 << 32  # indices of a key have 32 bits; larger arrays use several keys
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_SIGN: Final = np.uint32(0x80000000)
_INFINITE: Final = np.uint32(0x7F800000)
_16: Final = np.uint32(16)
_LOW_16: Final = np.uint32(0xFFFF)
_LOW_13: Final = np.uint32(0x1FFF)
_13: Final = np.uint32(13)
_23: Final = np.uint32(23)
_31: Final = np.uint32(31)
_ONE: Final = np.uint32(1)
_FRACTION: Final = np.uint32(0x7FFFFF)
_LEADING: Final = np.uint32(0x800000)
_NORMAL: Final = np.uint32(113)  # the exponent field of 2^-14, float16's smallest normal number
_REBIAS: Final = np.uint32(112 << 10)
_BF16_NAN: Final = np.uint32(0x7FC0)
_FP16_NAN: Final = np.uint32(0x7E00)
_FP16_INFINITE: Final = np.uint32(0x7C00)


# --- torch: reference for tests of the other kernels --------------------------------------------------------


def encode_reference(values: torch.Tensor, wire: torch.Tensor, key: counter.Key) -> None:
    """Run `encode` in plain torch."""
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    random = counter.draw_reference(torch.arange(values.numel(), device=values.device), key)
    magnitude, sign = bits & 0x7FFFFFFF, bits >> 31 << 15
    if wire.dtype is torch.bfloat16:
        rounded = magnitude + (random & 0xFFFF) >> 16
        nan = 0x7FC0
    else:
        exponent = magnitude >> 23
        normal = (magnitude + (random & 0x1FFF) >> 13) - (112 << 10)
        shift = 126 - exponent
        whole = torch.where(exponent > 0, magnitude & 0x7FFFFF | 0x800000, magnitude)
        whole = whole >> (shift - 31).clamp(0, 31)
        shift = shift.clamp(0, 31)
        subnormal = whole + (random & (1 << shift) - 1) >> shift
        rounded = torch.where(exponent < 113, subnormal, normal).clamp(max=0x7C00)
        nan = 0x7E00
    rounded = torch.where(magnitude > 0x7F800000, nan, rounded) | sign
    wire.view(torch.int16).copy_(rounded)


# --- CPU ----------------------------------------------------------------------------------------------------


@cpu.embedded
def _bfloat16(bits, random):  # type: ignore[no-untyped-def]
    magnitude = np.uint32(bits & _MAGNITUDE)
    rounded = np.uint32(np.uint32(magnitude + np.uint32(random & _LOW_16)) >> _16)
    chosen = rounded if magnitude <= _INFINITE else _BF16_NAN
    return np.uint16(chosen | np.uint32(np.uint32(bits & _SIGN) >> _16))


@cpu.embedded
def _float16(bits, random):  # type: ignore[no-untyped-def]
    magnitude = np.uint32(bits & _MAGNITUDE)
    exponent = np.uint32(magnitude >> _23)
    normal = np.uint32(np.uint32(np.uint32(magnitude + np.uint32(random & _LOW_13)) >> _13) - _REBIAS)
    # 13 bits, plus one for each binade below 2^-14. If that exceeds 31, only the upper bits are random.
    shift = np.uint32(_13 + _NORMAL - min(exponent, _NORMAL))
    whole = np.uint32(np.uint32(magnitude & _FRACTION) | np.uint32(min(exponent, _ONE) * _LEADING))
    whole = np.uint32(whole >> np.uint32(min(max(shift, _31) - _31, _31)))
    kept = np.uint32(min(shift, _31))
    mask = np.uint32(np.uint32(_ONE << kept) - _ONE)
    subnormal = np.uint32(np.uint32(whole + np.uint32(random & mask)) >> kept)
    rounded = min(subnormal if exponent < _NORMAL else normal, _FP16_INFINITE)
    chosen = rounded if magnitude <= _INFINITE else _FP16_NAN
    return np.uint16(chosen | np.uint32(np.uint32(bits & _SIGN) >> _16))


@cpu.inlined
def _to_bfloat16(bits, start, first, second, out):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        out[i] = _bfloat16(bits[i], counter.draw(np.uint32(start + np.uint32(i)), first, second))


@cpu.inlined
def _to_float16(bits, start, first, second, out):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        out[i] = _float16(bits[i], counter.draw(np.uint32(start + np.uint32(i)), first, second))


@cpu.compiled
def _encode_bfloat16(bits, first, second, out, lo, hi):  # type: ignore[no-untyped-def]
    whole = min(hi, bits.size // BLOCK)
    for block in range(lo, whole):  # constant slice lengths give vector instructions
        at = block * BLOCK
        _to_bfloat16(bits[at : at + BLOCK], np.uint32(at), first, second, out[at : at + BLOCK])
    for block in range(whole, hi):
        at = block * BLOCK
        _to_bfloat16(bits[at:], np.uint32(at), first, second, out[at:])


@cpu.compiled
def _encode_float16(bits, first, second, out, lo, hi):  # type: ignore[no-untyped-def]
    whole = min(hi, bits.size // BLOCK)
    for block in range(lo, whole):
        at = block * BLOCK
        _to_float16(bits[at : at + BLOCK], np.uint32(at), first, second, out[at : at + BLOCK])
    for block in range(whole, hi):
        at = block * BLOCK
        _to_float16(bits[at:], np.uint32(at), first, second, out[at:])


# --- launcher -----------------------------------------------------------------------------------------------


def encode(values: torch.Tensor, wire: torch.Tensor, *name: object) -> None:
    """Round flat float32 `values` to `wire`: bfloat16 or float16, of the same size.

    `name`: name of the random stream, which determines the random bits.
    """
    for segment, begin in enumerate(range(0, values.numel(), _SEGMENT)):
        part = slice(begin, begin + _SEGMENT)
        _encode(values[part], wire[part], counter.key_of(*name, segment))


def _encode(values: torch.Tensor, wire: torch.Tensor, key: counter.Key) -> None:
    if values.is_cuda:
        _gpu().encode(values, wire, key)
        return
    kernel = _encode_bfloat16 if wire.dtype is torch.bfloat16 else _encode_float16
    bits, out = values.numpy().view(np.uint32), wire.view(torch.uint16).numpy()
    cpu.spread(kernel, -(-bits.size // BLOCK), bits.nbytes, bits, *key, out)


def _gpu() -> Any:
    from mcr_plus.kernels.gpu import cast

    return cast
