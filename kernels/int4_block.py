"""Blocks of 32 values as 4 bits times a bfloat16 scale: torch reference, CPU kernel, GPU launcher.

Payload of n values in b = ceil(n / 32) blocks, little endian:

    b bfloat16 scales, padded to a multiple of 4 bytes | 16 × b bytes of codes

value = code × scale. The scale is amax / 7 rounded up, at least 2^-126, and at most the largest scale with a
finite product with 7; code = value / scale rounded to nearest even, from -7 to 7. Byte j of a block has the
code of value j in the low half and the code of value j + 16 in the high half, both in two's complement. The
last block is padded with zeros.

With `hadamard` a block is H x / 32 instead of x, and decoded with H, the Walsh-Hadamard matrix in natural
order. This is the normalised transform with both factors of 1 / √32 in the encoder, where they are exact and
keep the sums finite. The sums of codes are exact as well.

A block with a NaN or an infinity has the scale NaN and codes of 0, so all its values decode to NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from mcr_plus.kernels import cpu, small_blocks

BLOCK: Final = small_blocks.BLOCK
TOGETHER: Final = small_blocks.TOGETHER
CHUNK: Final = small_blocks.CHUNK
STRIP: Final = 16
"""Chunks that stay in the first cache while they are summed and encoded."""
STEP: Final = float(np.float32(1 / 7))
TINIEST: Final = 2.0**-126
LARGEST_SCALE: Final = 0x7E12
"""2^128 / 7 rounded down, as bits of a bfloat16."""


def blocks_of(numel: int) -> int:
    """Return the number of blocks; the last may be shorter."""
    return -(-numel // BLOCK)


def nbytes(numel: int) -> int:
    """Return the length of a payload, a multiple of 4."""
    return _scale_nbytes(numel) + blocks_of(numel) * 16


def split(wire: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales (bits of bfloat16 as int16) and the codes of a payload, as views."""
    blocks, room = blocks_of(numel), _scale_nbytes(numel)
    return wire[: 2 * blocks].view(torch.int16), wire[room : room + 16 * blocks]


def _scale_nbytes(numel: int) -> int:
    return -(-blocks_of(numel) // 2) * 4


# --- torch: reference for tests of the other kernels --------------------------------------------------------


def transform(rows: torch.Tensor) -> torch.Tensor:
    """Multiply H by each row of 32: add neighbours, then neighbours of the sums, and so on."""
    for _ in range(5):
        even, odd = rows[:, 0::2], rows[:, 1::2]
        rows = torch.cat([even + odd, even - odd], 1)
    return rows


def encode_reference(values: torch.Tensor, wire: torch.Tensor, hadamard: bool) -> None:
    """Run `encode` in plain torch."""
    scales, codes = split(wire, values.numel())
    rows = torch.zeros(scales.numel(), BLOCK, device="cpu")
    rows.view(-1)[: values.numel()] = values
    if hadamard:
        rows = transform(rows / 32)
    amax = rows.abs().amax(1)
    finite = amax.isfinite()
    exact = (amax * STEP).clamp(min=TINIEST)
    nearest = exact.to(torch.bfloat16)
    above = nearest.nextafter(torch.tensor(torch.inf, dtype=torch.bfloat16, device="cpu"))
    up = torch.where(nearest.to(torch.float32) < exact, above, nearest)
    up = up.minimum(torch.tensor(LARGEST_SCALE, dtype=torch.int16, device="cpu").view(torch.bfloat16))
    scales.copy_(torch.where(finite, up, torch.nan).view(torch.int16))
    units = torch.where(finite[:, None], rows * (1 / up.to(torch.float32))[:, None], 0.0)
    whole = units.round().to(torch.int32) & 15
    codes.copy_((whole[:, :16] | whole[:, 16:] << 4).view(-1))


def decode_reference(wire: torch.Tensor, out: torch.Tensor, hadamard: bool) -> None:
    """Run `decode` in plain torch."""
    scales, codes = split(wire, out.numel())
    pairs = codes.view(-1, 16).to(torch.int32)
    whole = torch.cat([pairs & 15, pairs >> 4], 1)
    rows = torch.where(whole > 7, whole - 16, whole).to(torch.float32)
    if hadamard:
        rows = transform(rows)
    rows = rows * scales.view(torch.bfloat16).to(torch.float32)[:, None]
    out.copy_(rows.view(-1)[: out.numel()])


# --- CPU ----------------------------------------------------------------------------------------------------
# Eight blocks are processed together, see small_blocks. numba widens 32-bit results to 64 bits; the
# conversions keep 32-bit vectors.

_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITE: Final = np.uint32(0x7F800000)
NAN: Final = np.uint16(0x7FC0)
_UP: Final = np.uint32(0xFFFF)
_HALF: Final = np.uint32(16)
_CAP: Final = np.uint32(LARGEST_SCALE)
_STEP: Final = np.float32(STEP)
_TINIEST: Final = np.float32(TINIEST)
_ONE: Final = np.float32(1)
_32ND: Final = np.float32(1 / 32)
_LOW: Final = np.int32(15)
_FOUR: Final = np.int32(4)
_TOP: Final = np.int32(28)


@cpu.embedded
def _scale_for(largest):  # type: ignore[no-untyped-def]
    """Return the bits of a block's scale, given the bits of the largest magnitude."""
    exact = np.float32(max(np.uint32(largest).view(np.float32) * _STEP, _TINIEST)).view(np.uint32)
    return np.uint16(min(np.uint32(np.uint32(exact + _UP) >> _HALF), _CAP))


@cpu.embedded
def _scale(bits):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(bits) << _HALF).view(np.float32)


@cpu.embedded
def _pair(low, high):  # type: ignore[no-untyped-def]
    return np.uint8(np.int32(np.int32(np.rint(low)) & _LOW) | np.int32(np.int32(np.rint(high)) << _FOUR))


@cpu.embedded
def _low(pair):  # type: ignore[no-untyped-def]
    return np.float32(np.int32(np.int32(np.int32(pair) << _TOP) >> _TOP))


@cpu.embedded
def _high(pair):  # type: ignore[no-untyped-def]
    return np.float32(np.int32(np.int32(np.int8(pair)) >> _FOUR))


@cpu.inlined
def _pack(values, per_unit, codes):  # type: ignore[no-untyped-def]
    for i in range(codes.size):
        codes[i] = _pair(values[i] * per_unit, values[i + 16] * per_unit)


@cpu.inlined
def _unpack(codes, scale, values):  # type: ignore[no-untyped-def]
    for i in range(codes.size):
        values[i] = _low(codes[i]) * scale
        values[i + 16] = _high(codes[i]) * scale


@cpu.inlined
def _unpack_add(codes, scale, values):  # type: ignore[no-untyped-def]
    for i in range(codes.size):
        values[i] += _low(codes[i]) * scale
        values[i + 16] += _high(codes[i]) * scale


_largest_of_each: Any = cpu.linked(small_blocks.largest_of_each.py_func)


@cpu.embedded
def _encode_chunk(values, scales, codes, work):  # type: ignore[no-untyped-def]
    scratch, largest = work[0].view(np.uint32), work[2].view(np.uint32)
    _largest_of_each(values.view(np.uint32), scratch, largest)
    for block in range(TOGETHER):
        part = slice(block * 16, block * 16 + 16)
        if largest[block] >= _INFINITE:
            scales[block] = NAN
            codes[part] = 0
        else:
            scale = _scale_for(largest[block])
            scales[block] = scale
            _pack(values[block * BLOCK : block * BLOCK + BLOCK], _ONE / _scale(scale), codes[part])


# The transform of eight blocks adds neighbours and puts the sums before the differences, five times. Value t
# of block k is then at 8 t + k. So the largest magnitudes and the codes of all blocks are computed side by
# side, and only the bytes are reordered.


@cpu.linked
def _step_in(source, target):  # type: ignore[no-untyped-def]
    for i in range(128):
        first, second = source[2 * i], source[2 * i + 1]
        target[i] = first + second
        target[i + 128] = first - second


@cpu.linked
def _step_out(source, target):  # type: ignore[no-untyped-def]
    for i in range(128):
        first, second = source[i], source[i + 128]
        target[2 * i] = first + second
        target[2 * i + 1] = first - second


@cpu.linked
def _deal(source, target):  # type: ignore[no-untyped-def]
    for i in range(64):
        target[i] = source[2 * i]
        target[i + 64] = source[2 * i + 1]


@cpu.linked
def _shuffle(source, target):  # type: ignore[no-untyped-def]
    for i in range(64):
        target[2 * i] = source[i]
        target[2 * i + 1] = source[i + 64]


@cpu.inlined
def _fold(values, half):  # type: ignore[no-untyped-def]
    for i in range(half.size):
        half[i] = np.uint32(max(values[i], values[i + half.size]))


@cpu.linked
def _encode_chunk_hadamard(values, scales, codes, work):  # type: ignore[no-untyped-def]
    first, second, third, pairs, others = work
    for i in range(CHUNK):
        first[i] = values[i] * _32ND
    _step_in(first, second)
    _step_in(second, first)
    _step_in(first, second)
    _step_in(second, first)
    _step_in(first, second)
    bits, scratch = second.view(np.uint32), first.view(np.uint32)
    for i in range(128):
        scratch[i] = np.uint32(max(np.uint32(bits[i] & _MAGNITUDE), np.uint32(bits[i + 128] & _MAGNITUDE)))
    _fold(scratch[0:128], scratch[128:192])
    _fold(scratch[128:192], scratch[192:224])
    _fold(scratch[192:224], scratch[224:240])
    _fold(scratch[224:240], scratch[240:248])
    for block in range(TOGETHER):
        scales[block] = _scale_for(scratch[240 + block])
        third[block] = _ONE / _scale(scales[block])
    cpu.put(third[0:8], third[8:16])
    cpu.put(third[0:16], third[16:32])
    cpu.put(third[0:32], third[32:64])
    cpu.put(third[0:64], third[64:128])
    for i in range(128):
        pairs[i] = _pair(second[i] * third[i], second[i + 128] * third[i])
    _deal(pairs, others)
    _deal(others, pairs)
    _deal(pairs, codes)
    for block in range(TOGETHER):
        if scratch[240 + block] >= _INFINITE:
            scales[block] = NAN
            for i in range(16):
                codes[block * 16 + i] = 0


@cpu.linked
def _decode_chunk_hadamard(scales, codes, factor, add, values, work):  # type: ignore[no-untyped-def]
    first, second, _, pairs, others = work
    _shuffle(codes, pairs)
    _shuffle(pairs, others)
    _shuffle(others, pairs)
    for i in range(128):
        first[i] = _low(pairs[i])
        first[i + 128] = _high(pairs[i])
    _step_out(first, second)
    _step_out(second, first)
    _step_out(first, second)
    _step_out(second, first)
    _step_out(first, second)
    for block in range(TOGETHER):
        scale = _scale(scales[block]) * factor
        for i in range(BLOCK):
            first[block * BLOCK + i] = scale
    if add:
        for i in range(CHUNK):
            values[i] += second[i] * first[i]
    else:
        for i in range(CHUNK):
            values[i] = second[i] * first[i]


@cpu.embedded
def _work_space():  # type: ignore[no-untyped-def]
    """Return memory for computing chunks, and for a short last chunk."""
    spaces = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    work = (*spaces, np.empty(128, np.uint8), np.empty(128, np.uint8))
    return work, (np.empty(CHUNK, np.float32), np.empty(TOGETHER, np.uint16), np.empty(128, np.uint8))


@cpu.linked
def _fill(source, target):  # type: ignore[no-untyped-def]
    cpu.put(source, target)
    for i in range(source.size, target.size):
        target[i] = 0


@cpu.linked
def _pad(chunk, values, scales, codes, padded):  # type: ignore[no-untyped-def]
    """Copy the parts of a short last chunk to arrays of full size, padded with zeros."""
    _fill(values[chunk * CHUNK :], padded[0])
    _fill(scales[chunk * TOGETHER :], padded[1])
    _fill(codes[chunk * 128 :], padded[2])


@cpu.linked
def _put_back(chunk, padded, scales, codes):  # type: ignore[no-untyped-def]
    first, byte = chunk * TOGETHER, chunk * 128
    cpu.put(padded[1][: scales.size - first], scales[first:])
    cpu.put(padded[2][: codes.size - byte], codes[byte:])


@cpu.compiled
def encode_chunks(values, scales, codes, lo, hi):  # type: ignore[no-untyped-def]
    """Encode chunks of eight blocks; the last chunk may be short."""
    work, padded = _work_space()
    whole = min(hi, values.size // CHUNK)
    for chunk in range(lo, whole):
        at, first, byte = chunk * CHUNK, chunk * TOGETHER, chunk * 128
        few, room = scales[first : first + TOGETHER], codes[byte : byte + 128]
        _encode_chunk(values[at : at + CHUNK], few, room, work)
    for chunk in range(whole, hi):
        _pad(chunk, values, scales, codes, padded)
        _encode_chunk(padded[0], padded[1], padded[2], work)
        _put_back(chunk, padded, scales, codes)


@cpu.compiled
def _encode_hadamard(values, scales, codes, lo, hi):  # type: ignore[no-untyped-def]
    work, padded = _work_space()
    whole = min(hi, values.size // CHUNK)
    for chunk in range(lo, whole):
        at, first, byte = chunk * CHUNK, chunk * TOGETHER, chunk * 128
        few, room = scales[first : first + TOGETHER], codes[byte : byte + 128]
        _encode_chunk_hadamard(values[at : at + CHUNK], few, room, work)
    for chunk in range(whole, hi):
        _pad(chunk, values, scales, codes, padded)
        _encode_chunk_hadamard(padded[0], padded[1], padded[2], work)
        _put_back(chunk, padded, scales, codes)


@cpu.linked
def _decode_rest(scales, codes, factor, add, out):  # type: ignore[no-untyped-def]
    """Decode the values after the last whole block."""
    block, spare = out.size // BLOCK, np.empty(CHUNK, np.float32)
    _unpack(codes[block * 16 : block * 16 + 16], _scale(scales[block]) * factor, spare)
    for i in range(out.size - block * BLOCK):
        at = block * BLOCK + i
        out[at] = out[at] + spare[i] if add else spare[i]


@cpu.compiled
def decode_chunks(scales, codes, factor, add, out, lo, hi):  # type: ignore[no-untyped-def]
    """Decode chunks (the last may be short), or add `factor` times the values if `add`."""
    end = min(hi * TOGETHER, scales.size)
    whole = min(end, out.size // BLOCK)
    for block in range(lo * TOGETHER, whole):
        pairs, scale = codes[block * 16 : block * 16 + 16], _scale(scales[block]) * factor
        part = slice(block * BLOCK, block * BLOCK + BLOCK)
        if add:
            _unpack_add(pairs, scale, out[part])
        else:
            _unpack(pairs, scale, out[part])
    if whole < end:
        _decode_rest(scales, codes, factor, add, out)


@cpu.compiled
def _decode_hadamard(scales, codes, factor, add, out, lo, hi):  # type: ignore[no-untyped-def]
    work, padded = _work_space()
    whole = min(hi, out.size // CHUNK)
    for chunk in range(lo, whole):
        at, first, byte = chunk * CHUNK, chunk * TOGETHER, chunk * 128
        few, room = scales[first : first + TOGETHER], codes[byte : byte + 128]
        _decode_chunk_hadamard(few, room, factor, add, out[at : at + CHUNK], work)
    for chunk in range(whole, hi):
        _pad(chunk, out, scales, codes, padded)
        _decode_chunk_hadamard(padded[1], padded[2], factor, add, padded[0], work)
        cpu.put(padded[0][: out.size - chunk * CHUNK], out[chunk * CHUNK :])


@cpu.compiled
def _reduce(wires, room, skip, factor, total, scales, codes, lo, hi):  # type: ignore[no-untyped-def]
    for first in range(lo, hi, STRIP):
        end = min(first + STRIP, hi)
        for row in range(wires.shape[0]):
            if row != skip:
                theirs = wires[row, : 2 * scales.size].view(np.uint16)
                decode_chunks(theirs, wires[row, room : room + codes.size], factor, True, total, first, end)
        encode_chunks(total, scales, codes, first, end)


@cpu.compiled
def _reduce_hadamard(wires, room, skip, factor, total, scales, codes, lo, hi):  # type: ignore[no-untyped-def]
    for first in range(lo, hi, STRIP):
        end = min(first + STRIP, hi)
        for row in range(wires.shape[0]):
            if row != skip:
                theirs = wires[row, : 2 * scales.size].view(np.uint16)
                _decode_hadamard(
                    theirs, wires[row, room : room + codes.size], factor, True, total, first, end
                )
        _encode_hadamard(total, scales, codes, first, end)


# --- launchers ----------------------------------------------------------------------------------------------


def encode(values: torch.Tensor, wire: torch.Tensor, hadamard: bool) -> None:
    """Write the payload of flat float32 `values` to `wire`."""
    scales, codes = split(wire, values.numel())
    if values.is_cuda:
        _gpu().encode(values, scales, codes, hadamard)
        return
    arrays = (values.numpy(), scales.numpy().view(np.uint16), codes.numpy())
    cpu.spread(_encode_hadamard if hadamard else encode_chunks, chunks_of(values), values.nbytes, *arrays)


def decode(wire: torch.Tensor, out: torch.Tensor, hadamard: bool) -> None:
    """Overwrite flat float32 `out` with the values of a payload."""
    _start_decode(wire, out, 1.0, False, hadamard)


def accumulate(wire: torch.Tensor, total: torch.Tensor, factor: float, hadamard: bool) -> None:
    """Add `factor` times the values of a payload to flat float32 `total`."""
    _start_decode(wire, total, factor, True, hadamard)


def reduce(
    wires: torch.Tensor, skip: int, total: torch.Tensor, wire: torch.Tensor, factor: float, hadamard: bool
) -> None:
    """Add `factor` × every row of `wires` but `skip` to `total`, and encode `total`, in one pass over memory.

    Args:
        wires: one payload per rank, in rows of at least `nbytes(total.numel())` bytes, at multiples of 4
            bytes.
        skip: the row to omit, -1 for none.
        total: flat float32; contains the sum afterwards.
        wire: receives the payload of `total`.
        factor: factor of decoded values.
        hadamard: True if blocks are transformed.
    """
    if total.is_cuda:
        for row in range(len(wires)):
            if row != skip:
                accumulate(wires[row], total, factor, hadamard)
        encode(total, wire, hadamard)
        return
    scales, codes = split(wire, total.numel())
    many = wires.contiguous().numpy()
    arrays = (many, _scale_nbytes(total.numel()), skip, np.float32(factor), total.numpy())
    rest = (scales.numpy().view(np.uint16), codes.numpy())
    cpu.spread(_reduce_hadamard if hadamard else _reduce, chunks_of(total), total.nbytes, *arrays, *rest)


def _start_decode(wire: torch.Tensor, out: torch.Tensor, factor: float, add: bool, hadamard: bool) -> None:
    scales, codes = split(wire, out.numel())
    if out.is_cuda:
        _gpu().decode(scales, codes, out, factor, add, hadamard)
        return
    arrays = (scales.numpy().view(np.uint16), codes.numpy(), np.float32(factor), add, out.numpy())
    cpu.spread(_decode_hadamard if hadamard else decode_chunks, chunks_of(out), out.nbytes, *arrays)


def chunks_of(values: torch.Tensor) -> int:
    """Return the number of chunks of eight blocks; the last may be shorter."""
    return -(-values.numel() // CHUNK)


def _gpu() -> Any:
    from mcr_plus.kernels.gpu import int4_block

    return int4_block
