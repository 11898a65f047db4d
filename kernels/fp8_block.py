"""Blocks of values as 8-bit floats times a shared scale: torch reference, CPU kernel, GPU launcher.

Payload of n values in b = ceil(n / block) blocks:

    b scales, padded to a multiple of 4 bytes | n fp8 codes | up to 3 bytes of padding

The codes are bit patterns of torch.float8_e4m3fn or torch.float8_e5m2. value = code × scale, code =
value / scale rounded to nearest even, at most the largest finite code. Two kinds of scales:

    float32  blocks of 256, little endian; max(amax / largest code, 2^-126), with the quotient rounded down
    e8m0     blocks of 32; one byte e stands for 2^(e - 127), floor(log2 amax) less the exponent of the
             largest code and at least -127: MXFP8 of the OCP Microscaling Formats specification, v1.0

A block with a NaN or an infinity has the scale NaN (e8m0: 255) and codes of 0, so all its values decode to
NaN.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from mcr_plus.kernels import cpu, small_blocks

Scale = Literal["float32", "e8m0"]
CHUNK: Final = small_blocks.CHUNK
"""Values that are encoded together: one block with a float32 scale, or eight with e8m0."""


class Float8Format(NamedTuple):
    """An 8-bit float format, and its relation to float32.

    Attributes:
        dtype: the dtype in torch.
        shift: number of mantissa bits that float32 has more.
        bias: float32's exponent bias minus the format's bias.
        top: code of the largest finite value.
    """

    dtype: torch.dtype
    shift: int
    bias: int
    top: int

    @property
    def largest(self) -> float:
        """Largest finite value."""
        return float(torch.finfo(self.dtype).max)

    @property
    def step(self) -> float:
        """1 / largest, rounded down to a float32, so that the largest float32 decodes to a finite value."""
        nearest = np.float32(1 / self.largest)
        return float(nearest if float(nearest) * self.largest <= 1 else np.nextafter(nearest, np.float32(0)))

    @property
    def least(self) -> float:
        """Smallest positive value."""
        return 2.0 ** (self.shift + self.bias - 149)

    @property
    def emax(self) -> int:
        """Exponent of the largest value."""
        return int(np.log2(self.largest))

    @property
    def lowest(self) -> int:
        """Smallest normal value, as bits of a float32."""
        return (self.bias + 1) << 23


FORMATS: Final = {
    "e4m3": Float8Format(torch.float8_e4m3fn, shift=20, bias=120, top=0x7E),
    "e5m2": Float8Format(torch.float8_e5m2, shift=21, bias=112, top=0x7B),
}


def block_of(scale: Scale) -> int:
    """Return the number of values in a block."""
    return CHUNK if scale == "float32" else small_blocks.BLOCK


def nbytes(numel: int, scale: Scale) -> int:
    """Return the length of a payload, a multiple of 4."""
    return _scale_nbytes(numel, scale) + -(-numel // 4) * 4


def split(wire: torch.Tensor, numel: int, scale: Scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales (float32 or bytes) and the codes (bytes) of a payload, as views."""
    room = _scale_nbytes(numel, scale)
    blocks = -(-numel // block_of(scale))
    scales = wire[:room].view(torch.float32) if scale == "float32" else wire[:blocks]
    return scales, wire[room : room + numel]


def _scale_nbytes(numel: int, scale: Scale) -> int:
    blocks = -(-numel // block_of(scale))
    return blocks * 4 if scale == "float32" else -(-blocks // 4) * 4


# --- torch: reference for tests of the other kernels --------------------------------------------------------


def encode_reference(values: torch.Tensor, wire: torch.Tensor, fmt: Float8Format, scale: Scale) -> None:
    """Run `encode` in plain torch."""
    scales, codes = split(wire, values.numel(), scale)
    padded = torch.zeros(scales.numel(), block_of(scale), device="cpu")
    padded.view(-1)[: values.numel()] = values
    amax = padded.abs().amax(1)
    finite = amax.isfinite()
    if scale == "float32":
        factors = (amax * fmt.step).clamp(min=2.0**-126)
        scales.copy_(torch.where(finite, factors, torch.nan))
    else:
        exponents = torch.where(amax > 0, amax.frexp().exponent - 1 - fmt.emax, -127).clamp(min=-127)
        factors = torch.exp2(exponents.to(torch.float64)).to(torch.float32)
        scales.copy_(torch.where(finite, exponents + 127, 255))
    units = torch.where(finite[:, None], padded * (1 / factors)[:, None], 0.0)
    rounded = units.clamp(-fmt.largest, fmt.largest).to(fmt.dtype)
    codes.copy_(rounded.view(torch.uint8).view(-1)[: values.numel()])


def decode_reference(wire: torch.Tensor, out: torch.Tensor, fmt: Float8Format, scale: Scale) -> None:
    """Run `decode` in plain torch."""
    scales, codes = split(wire, out.numel(), scale)
    if scale == "e8m0":
        powers = torch.exp2(scales.to(torch.float64) - 127).to(torch.float32)
        scales = torch.where(scales == 255, torch.nan, powers)
    spread = scales.repeat_interleave(block_of(scale))[: out.numel()]
    out.copy_(codes.view(fmt.dtype).to(torch.float32) * spread)


# --- CPU ----------------------------------------------------------------------------------------------------
# numba widens results of uint32 to 64 bits; the conversions keep 32-bit vectors.

_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITE: Final = np.uint32(0x7F800000)
_NAN: Final = np.uint32(0x7FC00000)
_HALF_A_NORMAL: Final = np.uint32(0x00400000)  # 2^-127
_CODE_SIGN: Final = np.uint32(0x80)
_CODE_MAGNITUDE: Final = np.uint32(0x7F)
_NONE: Final = np.uint32(0)
_MANTISSA: Final = np.uint32(23)
_TO_SIGN: Final = np.uint32(24)
_SHIFTS: Final = np.uint32(31)
_RECIPROCAL: Final = np.uint32(254)
_E_NAN: Final = np.uint32(255)
_TINIEST: Final = np.float32(2.0**-126)
_ONE: Final = np.float32(1)
_SMALL: Final = small_blocks.BLOCK
_TOGETHER: Final = small_blocks.TOGETHER


@cpu.inlined
def _quantise(values, per_unit, top, codes, encoding):  # type: ignore[no-untyped-def]
    """Write the codes of `values` × `per_unit`, at most `top`.

    Adding a float whose last bit has the weight of the code's last bit rounds, and the sum's mantissa counts
    the units. Below `lowest` the units are constant, as in the code.
    """
    shift, lowest = encoding
    for i in range(values.size):
        bits = np.float32(values[i] * per_unit).view(np.uint32)
        magnitude = np.uint32(bits & _MAGNITUDE)
        exponent = np.uint32(max(magnitude, lowest) & _INFINITE)
        anchor = np.uint32(exponent + np.uint32(shift << _MANTISSA))
        total = np.float32(magnitude.view(np.float32) + anchor.view(np.float32)).view(np.uint32)
        above = np.uint32(np.uint32(exponent - lowest) >> np.uint32(shift & _SHIFTS))
        code = np.uint32(np.uint32(total - anchor) + above)
        codes[i] = np.uint8(min(code, top) | np.uint32(np.uint32(bits >> _TO_SIGN) & _CODE_SIGN))


@cpu.inlined
def _value(code, decoding):  # type: ignore[no-untyped-def]
    # Not as a denormal float32 times a power of two, which is slow on processors.
    shift, bias, normal, least = decoding
    magnitude = np.uint32(np.uint32(code) & _CODE_MAGNITUDE)
    large = np.uint32(np.uint32(magnitude << np.uint32(shift & _SHIFTS)) + bias)
    small = np.float32(np.float32(magnitude) * least).view(np.uint32)
    bits = large if magnitude >= normal else small
    sign = np.uint32(np.uint32(np.uint32(code) & _CODE_SIGN) << _TO_SIGN)
    return np.uint32(bits | sign).view(np.float32)


@cpu.inlined
def set_values(codes, scale, out, decoding):  # type: ignore[no-untyped-def]
    """Overwrite `out` with the values of `codes` × `scale`."""
    for i in range(out.size):
        out[i] = _value(codes[i], decoding) * scale


@cpu.inlined
def add_values(codes, scale, total, decoding):  # type: ignore[no-untyped-def]
    """Add the values of `codes` × `scale` to `total`."""
    for i in range(total.size):
        total[i] += _value(codes[i], decoding) * scale


# float32 scales


@cpu.inlined
def _encode_block(values, bits, scales, marks, codes, block, step, top, encoding):  # type: ignore[no-untyped-def]
    largest = _NONE
    for i in range(values.size):
        largest = max(largest, np.uint32(bits[i] & _MAGNITUDE))
    if largest >= _INFINITE:
        marks[block] = _NAN
        for i in range(values.size):
            codes[i] = 0
    else:
        marks[block] = largest
        scales[block] = max(scales[block] * step, _TINIEST)
        _quantise(values, _ONE / scales[block], top, codes, encoding)


@cpu.inlined
def encode_block_at(block, values, bits, scales, marks, codes, step, top, encoding):  # type: ignore[no-untyped-def]
    """Write the codes and the float32 scale of a block of `values` to a payload."""
    at = block * CHUNK
    if at + CHUNK <= values.size:  # constant slice lengths give vector instructions
        part = slice(at, at + CHUNK)
        _encode_block(values[part], bits[part], scales, marks, codes[part], block, step, top, encoding)
    else:
        rest = slice(at, values.size)
        _encode_block(values[rest], bits[rest], scales, marks, codes[rest], block, step, top, encoding)


@cpu.compiled
def _encode_float32(values, bits, scales, marks, codes, step, top, encoding, lo, hi):  # type: ignore[no-untyped-def]
    for block in range(lo, hi):
        encode_block_at(block, values, bits, scales, marks, codes, step, top, encoding)


@cpu.compiled
def _decode_float32(scales, codes, out, factor, add, decoding, lo, hi):  # type: ignore[no-untyped-def]
    for block in range(lo, hi):
        at = block * CHUNK
        end = min(at + CHUNK, out.size)
        if add:
            add_values(codes[at:end], scales[block] * factor, out[at:end], decoding)
        else:
            set_values(codes[at:end], scales[block], out[at:end], decoding)


@cpu.compiled
def _reduce_float32(  # type: ignore[no-untyped-def]
    wires,
    room,
    all_scales,
    skip,
    factor,
    decoding,
    total,
    bits,
    scales,
    marks,
    codes,
    step,
    top,
    encoding,
    lo,
    hi,
):
    for block in range(lo, hi):
        at = block * CHUNK
        end = min(at + CHUNK, total.size)
        for row in range(wires.shape[0]):
            if row != skip:
                source = wires[row, room + at : room + end]
                add_values(source, all_scales[row, block] * factor, total[at:end], decoding)
        encode_block_at(block, total, bits, scales, marks, codes, step, top, encoding)


# e8m0 scales


@cpu.inlined
def _power(exponent):  # type: ignore[no-untyped-def]
    bits = max(np.uint32(np.uint32(exponent) << _MANTISSA), _HALF_A_NORMAL)
    return np.uint32(_NAN if np.uint32(exponent) == _E_NAN else bits).view(np.float32)


@cpu.inlined
def _encode_chunk(values, bits, exponents, codes, emax, top, encoding, scratch, largest):  # type: ignore[no-untyped-def]
    small_blocks.largest_of_each(bits, scratch, largest)
    for block in range(exponents.size):
        part = slice(block * _SMALL, block * _SMALL + _SMALL)
        if largest[block] >= _INFINITE:
            exponents[block] = _E_NAN
            codes[part] = 0
        else:
            exponent = np.uint32(max(np.uint32(largest[block] >> _MANTISSA), emax) - emax)
            exponents[block] = np.uint8(exponent)
            per_unit = np.uint32(np.uint32(_RECIPROCAL - exponent) << _MANTISSA).view(np.float32)
            _quantise(values[part], per_unit, top, codes[part], encoding)


@cpu.inlined
def _encode_chunk_at(chunk, values, bits, exponents, codes, emax, top, encoding, scratch, largest):  # type: ignore[no-untyped-def]
    at, first = chunk * CHUNK, chunk * _TOGETHER
    if at + CHUNK <= values.size:
        part, few = slice(at, at + CHUNK), slice(first, first + _TOGETHER)
        _encode_chunk(
            values[part], bits[part], exponents[few], codes[part], emax, top, encoding, scratch, largest
        )
    else:
        rest = values.size - at
        padded = np.zeros(CHUNK, np.float32)
        cpu.put(values[at:], padded)
        exponents_8, codes_8 = np.empty(_TOGETHER, np.uint8), np.empty(CHUNK, np.uint8)
        _encode_chunk(
            padded, padded.view(np.uint32), exponents_8, codes_8, emax, top, encoding, scratch, largest
        )
        cpu.put(exponents_8[: exponents.size - first], exponents[first:])
        cpu.put(codes_8[:rest], codes[at:])


@cpu.compiled
def _encode_e8m0(values, bits, exponents, codes, emax, top, encoding, lo, hi):  # type: ignore[no-untyped-def]
    scratch, largest = np.empty(CHUNK, np.uint32), np.empty(_TOGETHER, np.uint32)
    for chunk in range(lo, hi):
        _encode_chunk_at(chunk, values, bits, exponents, codes, emax, top, encoding, scratch, largest)


@cpu.compiled
def _decode_e8m0(exponents, codes, out, factor, add, decoding, lo, hi):  # type: ignore[no-untyped-def]
    for block in range(lo * _TOGETHER, min(hi * _TOGETHER, exponents.size)):
        at = block * _SMALL
        end = min(at + _SMALL, out.size)
        if add:
            add_values(codes[at:end], _power(exponents[block]) * factor, out[at:end], decoding)
        else:
            set_values(codes[at:end], _power(exponents[block]), out[at:end], decoding)


@cpu.compiled
def _reduce_e8m0(  # type: ignore[no-untyped-def]
    wires,
    room,
    all_exponents,
    skip,
    factor,
    decoding,
    total,
    bits,
    exponents,
    codes,
    emax,
    top,
    encoding,
    lo,
    hi,
):
    scratch, largest = np.empty(CHUNK, np.uint32), np.empty(_TOGETHER, np.uint32)
    for chunk in range(lo, hi):
        for row in range(wires.shape[0]):
            if row != skip:
                for block in range(chunk * _TOGETHER, min(chunk * _TOGETHER + _TOGETHER, exponents.size)):
                    at = block * _SMALL
                    end = min(at + _SMALL, total.size)
                    scale = _power(all_exponents[row, block]) * factor
                    add_values(wires[row, room + at : room + end], scale, total[at:end], decoding)
        _encode_chunk_at(chunk, total, bits, exponents, codes, emax, top, encoding, scratch, largest)


# --- launchers ----------------------------------------------------------------------------------------------


def encode(values: torch.Tensor, wire: torch.Tensor, fmt: Float8Format, scale: Scale) -> None:
    """Write the payload of flat float32 `values` to `wire`."""
    scales, codes = split(wire, values.numel(), scale)
    if values.is_cuda:
        _gpu().encode(values, scales, codes, fmt, scale)
        return
    kernel = _encode_float32 if scale == "float32" else _encode_e8m0
    cpu.spread(kernel, chunks_of(values), values.nbytes, *_encoder(values, scales, codes, fmt, scale))


def decode(wire: torch.Tensor, out: torch.Tensor, fmt: Float8Format, scale: Scale) -> None:
    """Overwrite flat float32 `out` with the values of a payload."""
    _decode(wire, out, 1.0, False, fmt, scale)


def accumulate(
    wire: torch.Tensor, total: torch.Tensor, factor: float, fmt: Float8Format, scale: Scale
) -> None:
    """Add `factor` times the values of a payload to flat float32 `total`."""
    _decode(wire, total, factor, True, fmt, scale)


def reduce(
    wires: torch.Tensor,
    skip: int,
    total: torch.Tensor,
    wire: torch.Tensor,
    factor: float,
    fmt: Float8Format,
    scale: Scale,
) -> None:
    """Add `factor` × every row of `wires` but `skip` to `total`, and encode `total`, in one pass over memory.

    Args:
        wires: one payload per rank, in rows of at least `nbytes(total.numel(), scale)` bytes, at multiples of
            4 bytes.
        skip: the row to omit, -1 for none.
        total: flat float32; contains the sum afterwards.
        wire: receives the payload of `total`.
        factor: factor of decoded values.
        fmt: format of the codes.
        scale: kind of the scales.
    """
    if total.is_cuda:
        for row in range(len(wires)):
            if row != skip:
                accumulate(wires[row], total, factor, fmt, scale)
        encode(total, wire, fmt, scale)
        return
    kernel = _reduce_float32 if scale == "float32" else _reduce_e8m0
    scales, codes = split(wire, total.numel(), scale)
    room = _scale_nbytes(total.numel(), scale)
    many = wires.numpy()
    all_scales = many[:, : scales.nbytes].view(scales.numpy().dtype)
    arrays = (many, room, all_scales, skip, np.float32(factor), decoding_of(fmt))
    rest = _encoder(total, scales, codes, fmt, scale)
    cpu.spread(kernel, chunks_of(total), total.nbytes, *arrays, *rest)


def _decode(
    wire: torch.Tensor, out: torch.Tensor, factor: float, add: bool, fmt: Float8Format, scale: Scale
) -> None:
    scales, codes = split(wire, out.numel(), scale)
    if out.is_cuda:
        _gpu().decode(scales, codes, out, factor, add, fmt, scale)
        return
    kernel = _decode_float32 if scale == "float32" else _decode_e8m0
    arrays = (scales.numpy(), codes.numpy(), out.numpy(), np.float32(factor), add, decoding_of(fmt))
    cpu.spread(kernel, chunks_of(out), out.nbytes, *arrays)


def _encoder(
    values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, fmt: Float8Format, scale: Scale
) -> tuple[Any, ...]:
    """Return the arguments of both encoding kernels."""
    x, s = values.numpy(), scales.numpy()
    numbers = (np.uint32(fmt.top), (np.uint32(fmt.shift), np.uint32(fmt.lowest)))
    if scale == "e8m0":
        return x, x.view(np.uint32), s, codes.numpy(), np.uint32(fmt.emax), *numbers
    return x, x.view(np.uint32), s, s.view(np.uint32), codes.numpy(), np.float32(fmt.step), *numbers


def decoding_of(fmt: Float8Format) -> tuple[Any, ...]:
    """Return the arguments with which kernels decode a format."""
    normal = np.uint32(1 << (23 - fmt.shift))
    return np.uint32(fmt.shift), np.uint32(fmt.bias << 23), normal, np.float32(fmt.least)


def chunks_of(values: torch.Tensor) -> int:
    """Return the number of chunks; the last may be shorter."""
    return -(-values.numel() // CHUNK)


def _gpu() -> Any:
    from mcr_plus.kernels.gpu import fp8_block

    return fp8_block
