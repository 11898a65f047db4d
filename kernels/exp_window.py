"""Lossless floats: exponents as 3 bits below the block's largest; torch reference, CPU kernels.

A float32 is split into an upper half, which is a bfloat16, and a lower half; a bfloat16 has no lower half.
Payload of n values in b = ceil(n / 256) blocks, little endian, sections at multiples of 4 bytes:

    uint32 1 for bfloat16, 2 for float32 | b uint16 heads | 96 b bytes: codes
    | n bytes: sign and upper mantissa | float32 only: n uint16 lower halves | exponents that did not fit

A head has the block's largest exponent in the lower byte, and the number of exponents that did not fit in the
upper byte. The code of a value is the distance of its exponent from the largest. Code 7 means that the
exponent did not fit and is among the last bytes of the payload; within a block, these exponents are in the
order of the bits in the planes. Codes are stored in three planes of 32 bytes, one per bit; bit i of byte j of
a plane belongs to value 32 i + j.

If more than 160 exponents do not fit, the upper byte is 255 and all exponents are stored unencoded: the first
96 instead of the codes, the other 160 among the last bytes. So a payload exceeds its values by at most 2
bytes per block, the padding of an incomplete last block, and the header.

Missing values of the last block have the code 0. There is no kernel for GPUs yet.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from mcr_plus.errors import BackendError
from mcr_plus.kernels import cpu

BLOCK: Final = 256
_PLANE: Final = BLOCK // 8
_CODES: Final = 3 * _PLANE
_MOST: Final = BLOCK - _CODES  # maximum number of exponents of a block that do not fit
_RAW: Final = 255  # instead of their number: all exponents of the block are stored unencoded
_ESCAPE: Final = 7
_HALF: Final = np.uint32(16)
_WIDTHS: Final = {torch.bfloat16: 1, torch.float32: 2}  # halves of a value

Array = NDArray[Any]


def blocks_of(numel: int) -> int:
    """Number of blocks; the last may be shorter."""
    return -(-numel // BLOCK)


def most_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Return the maximum length of a payload, a multiple of 4."""
    if not numel:
        return 0
    return _sections(numel, _WIDTHS[dtype])[-1] + blocks_of(numel) * _MOST


def dtype_of(wire: torch.Tensor) -> torch.dtype:
    """Return the dtype of a payload's values."""
    width = int.from_bytes(wire[:4].numpy().tobytes(), "little")
    for dtype, known in _WIDTHS.items():
        if known == width:
            return dtype
    raise BackendError(f"an exp_window payload begins with {width}; expected 1 (bfloat16) or 2 (float32)")


def _sections(numel: int, width: int) -> tuple[int, int, int, int, int]:
    """Return the offsets of heads, codes, uppers, lowers and the last bytes."""
    heads = 4
    codes = heads + -(-blocks_of(numel) // 2) * 4
    uppers = codes + blocks_of(numel) * _CODES
    lowers = uppers + -(-numel // 4) * 4
    return heads, codes, uppers, lowers, lowers + (-(-numel // 2) * 4 if width == 2 else 0)


def _split(wire: Array, numel: int, width: int) -> tuple[Array, Array, Array, Array, Array]:
    """Return heads, codes, uppers, lowers (empty for bfloat16) and the last bytes, as views."""
    heads, codes, uppers, lowers, rest = _sections(numel, width)
    return (
        wire[heads : heads + 2 * blocks_of(numel)].view(np.uint16),
        wire[codes:uppers],
        wire[uppers : uppers + numel],
        wire[lowers : lowers + 2 * numel * (width - 1)].view(np.uint16),
        wire[rest:],
    )


# --- torch: reference for tests of the other kernels --------------------------------------------------------


def encode_reference(values: torch.Tensor) -> torch.Tensor:
    """Return the payload of flat float32 or bfloat16 values, in plain torch."""
    numel, width = values.numel(), _WIDTHS[values.dtype]
    words = values.view(torch.int16 if width == 1 else torch.int32).to(torch.int64)
    halves = words if width == 1 else words >> 16
    fields = torch.zeros(blocks_of(numel) * BLOCK, dtype=torch.int64, device="cpu")
    fields[:numel] = halves >> 7 & 255
    rows = fields.view(-1, BLOCK)
    largest = rows.amax(1, keepdim=True)
    fields[numel:] = largest[-1]
    codes = (largest - rows).clamp(max=_ESCAPE)
    inside = codes.view(-1, 8, _PLANE)
    planes = [((inside >> bit & 1) << torch.arange(8, device="cpu")[:, None]).sum(1) for bit in range(3)]
    stored, rest, counts = torch.cat(planes, 1), [], []
    for block, (row, code) in enumerate(zip(rows, codes, strict=True)):
        beyond = row.view(8, _PLANE).T[(code == _ESCAPE).view(8, _PLANE).T]
        if beyond.numel() > _MOST:
            stored[block], beyond = row[:_CODES], row[_CODES:]
            counts.append(_RAW)
        else:
            counts.append(beyond.numel())
        rest.append(beyond)
    parts = [
        torch.tensor([width], dtype=torch.int32, device="cpu"),
        (largest.view(-1) | torch.tensor(counts, device="cpu") << 8).to(torch.int16),
        stored.to(torch.uint8),
        ((halves & 127) | (halves >> 8 & 128)).to(torch.uint8),
        *([words.to(torch.int16)] if width == 2 else []),
        torch.cat(rest).to(torch.uint8),
    ]
    flat = [part.reshape(-1).view(torch.uint8) for part in parts]
    return torch.cat([torch.nn.functional.pad(part, (0, -part.numel() % 4)) for part in flat])


# --- CPU ----------------------------------------------------------------------------------------------------


@cpu.inlined
def _encode_block(halves, uppers, codes, exponents, packed, rest, found):  # type: ignore[no-untyped-def]
    """Encode 256 upper halves; appends to `rest`. Returns the head, and the new length of `rest`."""
    largest = np.uint16(0)
    for i in range(BLOCK):
        largest = max(largest, np.uint16((halves[i] >> np.uint16(7)) & np.uint16(255)))
    for i in range(BLOCK):
        exponent = np.uint16((halves[i] >> np.uint16(7)) & np.uint16(255))
        exponents[i] = exponent
        packed[i] = min(np.uint16(largest - exponent), np.uint16(_ESCAPE))
    for i in range(uppers.size):
        uppers[i] = (halves[i] & np.uint16(127)) | ((halves[i] >> np.uint16(8)) & np.uint16(128))
    for plane in range(3):  # by masks and minima, because no vector instruction shifts bytes
        part = codes[plane * _PLANE : plane * _PLANE + _PLANE]
        mask = np.uint8(1 << plane)
        for j in range(_PLANE):
            byte = np.uint8(0)
            for i in range(8):
                is_set = min(np.uint8(packed[_PLANE * i + j] & mask), np.uint8(1))
                byte |= np.uint8(np.uint8(0) - is_set) & np.uint8(1 << i)
            part[j] = byte
    before = found
    for j in range(_PLANE):
        escaped = codes[j] & codes[_PLANE + j] & codes[2 * _PLANE + j]
        if escaped:
            for i in range(8):
                rest[found] = exponents[_PLANE * i + j]
                found += (escaped >> i) & 1
    count = found - before
    if count > _MOST:
        cpu.put(exponents[:_CODES], codes)
        cpu.put(exponents[_CODES:], rest[before:])
        return largest | np.uint16(_RAW << 8), before + _MOST
    return np.uint16(largest | np.uint16(count << 8)), found


@cpu.compiled
def _encode(values, shift, heads, codes, uppers, lowers, lo, hi):  # type: ignore[no-untyped-def]
    """Encode integers with upper halves at `shift`; returns the exponents that did not fit."""
    rest = np.empty((hi - lo) * _MOST + BLOCK + 1, np.uint8)
    exponents, packed = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint8)
    halves = np.empty(BLOCK, np.uint16)
    found = 0
    whole = min(hi, values.size // BLOCK)
    for block in range(lo, whole):
        at = block * BLOCK
        source, code = values[at : at + BLOCK], codes[block * _CODES : block * _CODES + _CODES]
        for i in range(BLOCK):
            halves[i] = source[i] >> shift
        if lowers.size:
            lower = lowers[at : at + BLOCK]
            for i in range(BLOCK):
                lower[i] = source[i]
        upper = uppers[at : at + BLOCK]
        heads[block], found = _encode_block(halves, upper, code, exponents, packed, rest, found)
    for block in range(whole, hi):
        at = block * BLOCK
        source, code = values[at:], codes[block * _CODES : block * _CODES + _CODES]
        largest = np.uint16(0)
        for i in range(source.size):
            halves[i] = source[i] >> shift
            largest = max(largest, np.uint16(halves[i] & np.uint16(0x7F80)))
            if lowers.size:
                lowers[at + i] = source[i]
        halves[source.size :] = largest
        heads[block], found = _encode_block(halves, uppers[at:], code, exponents, packed, rest, found)
    return rest[:found]


@cpu.inlined
def _decode_exponents(head, codes, rest, at, exponents):  # type: ignore[no-untyped-def]
    """Write a block's 256 exponents; returns whether the number that did not fit matches the head."""
    largest, count = np.uint8(head & np.uint16(255)), np.int64(head >> np.uint16(8))
    if count == _RAW:
        cpu.put(codes[:_CODES], exponents)
        cpu.put(rest[at : at + _MOST], exponents[_CODES:])
        return True
    low, middle, high = codes[:_PLANE], codes[_PLANE : 2 * _PLANE], codes[2 * _PLANE : 3 * _PLANE]
    for i in range(8):
        part, mask = exponents[_PLANE * i : _PLANE * i + _PLANE], np.uint8(1 << i)
        for j in range(_PLANE):
            one = min(np.uint8(low[j] & mask), np.uint8(1))
            two = min(np.uint8(middle[j] & mask), np.uint8(1))
            four = min(np.uint8(high[j] & mask), np.uint8(1))
            part[j] = largest - np.uint8(one + two + two + four + four + four + four)
    found, last = at, rest.size - 1
    for j in range(_PLANE):
        escaped = low[j] & middle[j] & high[j]
        if escaped:
            for i in range(8):
                bit = (escaped >> i) & 1
                known = exponents[_PLANE * i + j]
                exponents[_PLANE * i + j] = rest[min(found, last)] if bit else known
                found += bit
    return found - at == count


@cpu.inlined
def _join(uppers, exponents, halves):  # type: ignore[no-untyped-def]
    for i in range(uppers.size):
        byte = np.uint16(uppers[i])
        sign = np.uint16((byte & np.uint16(128)) << np.uint16(8))
        halves[i] = sign | np.uint16(np.uint16(exponents[i]) << np.uint16(7)) | (byte & np.uint16(127))


@cpu.compiled
def _decode(heads, codes, uppers, lowers, rest, starts, out, lo, hi):  # type: ignore[no-untyped-def]
    """Decode blocks; returns the number of blocks that contradict their heads."""
    exponents, halves = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint16)
    wrong = 0
    for block in range(lo, hi):
        code = codes[block * _CODES : block * _CODES + _CODES]
        wrong += not _decode_exponents(heads[block], code, rest, starts[block], exponents)
        at = block * BLOCK
        end = min(at + BLOCK, out.size)
        target = out[at:end]
        _join(uppers[at:end], exponents, halves)
        if lowers.size:
            lower = lowers[at:end]
            for i in range(target.size):
                target[i] = (np.uint32(halves[i]) << _HALF) | np.uint32(lower[i])
        else:
            for i in range(target.size):
                target[i] = halves[i]
    return wrong


@cpu.compiled
def _accumulate(heads, codes, uppers, lowers, rest, starts, total, factor, lo, hi):  # type: ignore[no-untyped-def]
    """Decode blocks; returns the number of blocks that contradict their heads."""
    exponents, halves = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint16)
    bits = np.empty(BLOCK, np.uint32)
    values = bits.view(np.float32)
    wrong = 0
    for block in range(lo, hi):
        code = codes[block * _CODES : block * _CODES + _CODES]
        wrong += not _decode_exponents(heads[block], code, rest, starts[block], exponents)
        at = block * BLOCK
        end = min(at + BLOCK, total.size)
        target = total[at:end]
        _join(uppers[at:end], exponents, halves)
        for i in range(target.size):
            bits[i] = np.uint32(halves[i]) << _HALF
        if lowers.size:
            lower = lowers[at:end]
            for i in range(target.size):
                bits[i] |= np.uint32(lower[i])
        for i in range(target.size):
            target[i] += values[i] * factor
    return wrong


# --- launchers ----------------------------------------------------------------------------------------------


def encode(values: torch.Tensor, wire: torch.Tensor) -> int:
    """Write the payload of flat float32 or bfloat16 `values` to `wire`; returns the length in bytes."""
    width = _WIDTHS[values.dtype]
    target, bits = wire.numpy(), _bits(values)
    heads, codes, uppers, lowers, rest = _split(target, bits.size, width)
    target[:4] = (width, 0, 0, 0)
    shift = bits.dtype.type(16 * (width - 1))
    parts = cpu.spread(_encode, heads.size, bits.nbytes, bits, shift, heads, codes, uppers, lowers)
    found = 0
    for part in parts:
        rest[found : found + part.size] = part
        found += part.size
    return target.size - rest.size + -(-found // 4) * 4


def decode(wire: torch.Tensor, out: torch.Tensor) -> None:
    """Overwrite flat `out`, of the payload's `dtype_of`, with the values; `wire` may be longer.

    Raises `BackendError` if the payload does not fit the number of values.
    """
    _run(_decode, wire, out.dtype, _bits(out))


def accumulate(wire: torch.Tensor, total: torch.Tensor, factor: float) -> None:
    """Add `factor` times the values, of either dtype, to flat float32 `total`; otherwise like `decode`."""
    _run(_accumulate, wire, dtype_of(wire), total.numpy(), np.float32(factor))


def _run(kernel: Any, wire: torch.Tensor, dtype: torch.dtype, out: Array, *args: object) -> None:
    source, width, numel = wire.numpy(), _WIDTHS[dtype], out.size
    if source.size < _sections(numel, width)[-1]:
        raise BackendError(f"an exp_window payload of {numel} values ends after {source.size} bytes")
    heads, codes, uppers, lowers, rest = _split(source, numel, width)
    counts = (heads >> 8).astype(np.int64)
    sizes = np.where(counts == _RAW, _MOST, counts)
    starts = np.cumsum(sizes) - sizes
    if sizes.max() > _MOST or starts[-1] + sizes[-1] > rest.size:
        raise BackendError(f"an exp_window payload of {numel} values is cut off or damaged")
    if not rest.size:
        rest = np.zeros(1, np.uint8)  # for reads of unused values
    parts = (heads, codes, uppers, lowers, rest, starts)
    wrong = sum(cpu.spread(kernel, heads.size, out.nbytes, *parts, out, *args))
    if wrong:
        raise BackendError(f"an exp_window payload of {numel} values is damaged in {wrong} blocks")


def _bits(values: torch.Tensor) -> Array:
    bits: Array = values.view(torch.int16 if values.dtype is torch.bfloat16 else torch.int32).numpy()
    return bits.view(np.uint16 if bits.itemsize == 2 else np.uint32)
