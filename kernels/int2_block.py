"""Blocks of 128 values as 2 bits and two bfloat16 levels: torch reference, CPU kernel, GPU launcher.

Payload of n values in b = ceil(n / 128) blocks, little endian:

    b pairs of bfloat16 (lower level, higher level) | 32 × b bytes of codes

The low bit of a code is the sign, set for negative values. The high bit is set if the magnitude is above the
block's threshold: the value is ± lower level or ± higher level. Byte j of a block has the codes of values j,
j + 32, j + 64 and j + 96, from the lowest bits up. The last block is padded with zeros, which do not count.

The threshold is 1.2303 × the mean magnitude, as in the four-level quantiser with the smallest squared error
for a Gaussian (Max, "Quantizing for Minimum Distortion", 1960: 0.9816 σ, where the mean magnitude is 0.7979
σ). Each level is the mean of the magnitudes that it represents, which minimises the error for given codes and
any distribution (Lloyd, "Least Squares Quantization in PCM", 1982); 0 if it represents none.

Sums are computed in a fixed order, so they are the same everywhere: first over the values j, j + 32, j + 64
and j + 96 in this order, then the upper half of the sums is added to the lower half, five times. Magnitudes
are divided by 128, so that sums do not overflow. A block with a NaN or an infinity has levels of NaN and
codes of 0, so all its values decode to NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from mcr_plus.kernels import cpu

BLOCK: Final = 128
LANES: Final = 32
ROWS: Final = BLOCK // LANES  # values per byte
THRESHOLD: Final = float(np.float32(0.9816 / 0.79788456))
LARGEST_LEVEL: Final = 0x7F7F
"""The largest finite bfloat16, as bits."""


def blocks_of(numel: int) -> int:
    """Return the number of blocks; the last may be shorter."""
    return -(-numel // BLOCK)


def nbytes(numel: int) -> int:
    """Return the length of a payload, a multiple of 4."""
    return blocks_of(numel) * (4 + LANES)


def split(wire: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the levels (bits of bfloat16 as int16, blocks × 2) and the codes of a payload, as views."""
    blocks = blocks_of(numel)
    return wire[: 4 * blocks].view(torch.int16).view(-1, 2), wire[4 * blocks : nbytes(numel)]


def factor_of(count: int) -> float:
    """Return the factor that turns a sum of `count` magnitudes / 128 into a mean."""
    return float(np.float32(BLOCK) / np.float32(max(count, 1)))


# --- torch: reference for tests of the other kernels --------------------------------------------------------


def _folded(rows: torch.Tensor) -> torch.Tensor:
    """Sum blocks × 4 × 32 values in the order that the module's docstring describes."""
    sums = torch.zeros(rows.shape[0], LANES, device="cpu")
    for row in range(ROWS):
        sums = sums + rows[:, row]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def encode_reference(values: torch.Tensor, wire: torch.Tensor) -> None:
    """Run `encode` in plain torch."""
    levels, codes = split(wire, values.numel())
    blocks = levels.shape[0]
    rows = torch.zeros(blocks, ROWS, LANES, device="cpu")
    rows.view(-1)[: values.numel()] = values
    counts = torch.full((blocks,), BLOCK, device="cpu")
    counts[-1] = values.numel() - (blocks - 1) * BLOCK
    factors = torch.tensor([factor_of(count) for count in range(BLOCK + 1)], device="cpu")
    parts = rows.abs() / BLOCK
    sums = _folded(parts)
    above = rows.abs() > (sums * factors[counts] * THRESHOLD)[:, None, None]
    many = above.sum((1, 2))
    means = [
        _folded(parts.where(~above, 0.0)) * factors[counts - many],
        _folded(parts.where(above, 0.0)) * factors[many],
    ]
    finite = sums.isfinite()
    rounded = torch.stack(means, 1).to(torch.bfloat16).view(torch.int16).clamp(max=LARGEST_LEVEL)
    levels.copy_(torch.where(finite[:, None], rounded, torch.tensor(0x7FC0, dtype=torch.int16, device="cpu")))
    both = torch.where(finite[:, None, None], rows.signbit().to(torch.int32) | above.to(torch.int32) << 1, 0)
    codes.copy_((both << torch.tensor([0, 2, 4, 6], device="cpu")[:, None]).sum(1).view(-1))


def decode_reference(wire: torch.Tensor, out: torch.Tensor) -> None:
    """Run `decode` in plain torch."""
    levels, codes = split(wire, out.numel())
    both = codes.view(-1, 1, LANES).to(torch.int32) >> torch.tensor([0, 2, 4, 6], device="cpu")[:, None]
    lower, higher = levels.view(torch.bfloat16).to(torch.float32)[:, :, None, None].unbind(1)
    magnitudes = torch.where((both & 2).bool(), higher, lower)
    out.copy_(torch.where((both & 1).bool(), -magnitudes, magnitudes).view(-1)[: out.numel()])


# --- CPU ----------------------------------------------------------------------------------------------------
# The loops run over the 32 lanes. numba widens results of uint32 to 64 bits; the conversions keep 32-bit
# vectors.

_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_SIGN: Final = np.uint32(0x80000000)
_INFINITE: Final = np.float32(np.inf)
_NAN: Final = np.uint32(0x7FC0)
_PART: Final = np.float32(1 / BLOCK)
_WHOLE: Final = np.float32(BLOCK)
_THRESHOLD: Final = np.float32(THRESHOLD)
_NONE: Final = np.uint32(0)
_ONE: Final = np.uint32(1)
_TWO: Final = np.uint32(2)
_FOUR: Final = np.uint32(4)
_ALL: Final = np.uint32(0xFFFFFFFF)
_HALF: Final = np.uint32(16)
_ROUND: Final = np.uint32(0x7FFF)
_CAP: Final = np.uint32(LARGEST_LEVEL)
_THIRTY_ONE: Final = np.uint32(31)
_STRIP: Final = 16  # blocks


@cpu.inlined
def _fold(sums):  # type: ignore[no-untyped-def]
    # One loop per constant length: a loop over the lengths would not become vector instructions.
    for j in range(16):
        sums[j] += sums[j + 16]
    for j in range(8):
        sums[j] += sums[j + 8]
    for j in range(4):
        sums[j] += sums[j + 4]
    return (sums[0] + sums[2]) + (sums[1] + sums[3])


@cpu.embedded
def _level(total, count):  # type: ignore[no-untyped-def]
    """Return the bits of the nearest bfloat16 to the mean of `count` magnitudes; sum = 128 × `total`."""
    mean = np.float32(total * np.float32(_WHOLE / np.float32(max(count, 1))))
    bits = mean.view(np.uint32)
    odd = np.uint32(np.uint32(bits >> _HALF) & _ONE)
    return np.uint16(min(np.uint32(np.uint32(bits + np.uint32(_ROUND + odd)) >> _HALF), _CAP))


@cpu.embedded
def _part(bits):  # type: ignore[no-untyped-def]
    return np.float32(np.uint32(bits & _MAGNITUDE).view(np.float32) * _PART)


@cpu.embedded
def _above(value, edge):  # type: ignore[no-untyped-def]
    """Return a mask: all bits if the magnitude is above the threshold, otherwise none."""
    return np.uint32(_NONE - np.uint32(np.uint32(value & _MAGNITUDE) > edge))


@cpu.embedded
def _code(value, above):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(value >> _THIRTY_ONE) | np.uint32(above & _TWO))


@cpu.linked
def _mean(bits, sums):  # type: ignore[no-untyped-def]
    for j in range(LANES):
        sums[j] = ((_part(bits[j]) + _part(bits[j + 32])) + _part(bits[j + 64])) + _part(bits[j + 96])
    return _fold(sums)


@cpu.linked
def _write_codes(bits, edge, codes, many):  # type: ignore[no-untyped-def]
    """Write the codes; returns the number of magnitudes above the threshold."""
    for j in range(LANES):
        a, b, c, d = bits[j], bits[j + 32], bits[j + 64], bits[j + 96]
        p, q, r, s = _above(a, edge), _above(b, edge), _above(c, edge), _above(d, edge)
        lower = np.uint32(_code(a, p) | np.uint32(_code(b, q) << _TWO))
        upper = np.uint32(_code(c, r) | np.uint32(_code(d, s) << _TWO))
        codes[j] = np.uint8(np.uint32(lower | np.uint32(upper << _FOUR)))
        many[j] = np.uint32(_NONE - np.uint32(np.uint32(p + q) + np.uint32(r + s)))
    found = np.uint32(0)
    for j in range(LANES):
        found = np.uint32(found + many[j])
    return np.int64(found)


@cpu.linked
def _add_parts(bits, edge, flip, sums):  # type: ignore[no-untyped-def]
    """Return the sum of the magnitudes above the threshold; with all bits in `flip`, of the others."""
    for j in range(LANES):
        a, b, c, d = bits[j], bits[j + 32], bits[j + 64], bits[j + 96]
        p, q = np.uint32(_above(a, edge) ^ flip), np.uint32(_above(b, edge) ^ flip)
        r, s = np.uint32(_above(c, edge) ^ flip), np.uint32(_above(d, edge) ^ flip)
        sums[j] = ((_part(a & p) + _part(b & q)) + _part(c & r)) + _part(d & s)
    return _fold(sums)


@cpu.compiled
def _encode(bits, levels, codes, lo, hi):  # type: ignore[no-untyped-def]
    # Separate arrays, so that LLVM knows that they do not overlap.
    sums, many, padded = np.empty(LANES, np.float32), np.empty(LANES, np.uint32), np.zeros(BLOCK, np.uint32)
    for block in range(lo, hi):
        part = bits[block * BLOCK : min((block + 1) * BLOCK, bits.size)]
        count = part.size
        if count < BLOCK:
            cpu.put(part, padded)
            part = padded
        room = codes[block * LANES : block * LANES + LANES]
        total = _mean(part, sums)
        if total < _INFINITE:
            mean = np.float32(total * np.float32(_WHOLE / np.float32(count)))
            edge = np.float32(mean * _THRESHOLD).view(np.uint32)  # magnitudes sort like their bits
            found = _write_codes(part, edge, room, many)
            levels[block, 0] = _level(_add_parts(part, edge, _ALL, sums), count - found)
            levels[block, 1] = _level(_add_parts(part, edge, _NONE, sums), found)
        else:
            levels[block, 0] = levels[block, 1] = np.uint16(_NAN)
            for j in range(LANES):
                room[j] = 0


@cpu.embedded
def _value(code, lower, other):  # type: ignore[no-untyped-def]
    """Return the value of a code. `lower`: bits of the lower level; `other`: those xor the higher level's."""
    above = np.uint32(_NONE - np.uint32(np.uint32(code >> _ONE) & _ONE))
    sign = np.uint32(np.uint32(code << _THIRTY_ONE) & _SIGN)
    return np.uint32(np.uint32(lower ^ np.uint32(other & above)) ^ sign).view(np.float32)


@cpu.compiled
def _decode(levels, codes, factor, add, out, lo, hi):  # type: ignore[no-untyped-def]
    for block in range(lo, hi):
        first = np.uint32(np.uint32(levels[block, 0]) << _HALF).view(np.float32)
        second = np.uint32(np.uint32(levels[block, 1]) << _HALF).view(np.float32)
        lower = np.float32(first * factor).view(np.uint32)
        other = np.uint32(lower ^ np.float32(second * factor).view(np.uint32))
        bytes_ = codes[block * LANES : block * LANES + LANES]
        for k in range(ROWS):
            at, shift = min(block * BLOCK + k * LANES, out.size), np.uint32(2 * k)
            row = out[at : at + LANES]
            if add:
                for j in range(row.size):
                    row[j] += _value(np.uint32(np.uint32(bytes_[j]) >> shift), lower, other)
            else:
                for j in range(row.size):
                    row[j] = _value(np.uint32(np.uint32(bytes_[j]) >> shift), lower, other)


@cpu.compiled
def _reduce(wires, skip, factor, total, bits, levels, codes, lo, hi):  # type: ignore[no-untyped-def]
    room = levels.size * 2
    for first in range(lo, hi, _STRIP):  # fits the first-level cache
        end = min(first + _STRIP, hi)
        for row in range(wires.shape[0]):
            if row != skip:
                theirs = wires[row, :room].view(np.uint16).reshape(levels.shape)
                _decode(theirs, wires[row, room : room + codes.size], factor, True, total, first, end)
        _encode(bits, levels, codes, first, end)


# --- launchers ----------------------------------------------------------------------------------------------


def encode(values: torch.Tensor, wire: torch.Tensor) -> None:
    """Write the payload of flat float32 `values` to `wire`."""
    levels, codes = split(wire, values.numel())
    if values.is_cuda:
        _gpu().encode(values, levels, codes)
        return
    arrays = (values.numpy().view(np.uint32), levels.numpy().view(np.uint16), codes.numpy())
    cpu.spread(_encode, levels.shape[0], values.nbytes, *arrays)


def decode(wire: torch.Tensor, out: torch.Tensor) -> None:
    """Overwrite flat float32 `out` with the values of a payload."""
    levels, codes = split(wire, out.numel())
    if out.is_cuda:
        _gpu().decode(levels, codes, out, 1.0, add=False)
        return
    arrays = (levels.numpy().view(np.uint16), codes.numpy(), np.float32(1), False, out.numpy())
    cpu.spread(_decode, levels.shape[0], out.nbytes, *arrays)


def accumulate(wire: torch.Tensor, total: torch.Tensor, factor: float) -> None:
    """Add `factor` times the values of a payload to flat float32 `total`."""
    levels, codes = split(wire, total.numel())
    if total.is_cuda:
        _gpu().decode(levels, codes, total, factor, add=True)
        return
    arrays = (levels.numpy().view(np.uint16), codes.numpy(), np.float32(factor), True, total.numpy())
    cpu.spread(_decode, levels.shape[0], total.nbytes, *arrays)


def reduce(wires: torch.Tensor, skip: int, total: torch.Tensor, wire: torch.Tensor, factor: float) -> None:
    """Add `factor` × every row of `wires` but `skip` to `total`, and encode `total`, in one pass over memory.

    Args:
        wires: one payload per rank, in rows of at least `nbytes(total.numel())` bytes, at multiples of 4
            bytes.
        skip: the row to omit, -1 for none.
        total: flat float32; contains the sum afterwards.
        wire: receives the payload of `total`.
        factor: factor of decoded values.
    """
    if total.is_cuda:
        for row in range(len(wires)):
            if row != skip:
                accumulate(wires[row], total, factor)
        encode(total, wire)
        return
    levels, codes = split(wire, total.numel())
    sums = total.numpy()
    targets = (sums, sums.view(np.uint32), levels.numpy().view(np.uint16), codes.numpy())
    cpu.spread(
        _reduce, levels.shape[0], total.nbytes, wires.contiguous().numpy(), skip, np.float32(factor), *targets
    )


def _gpu() -> Any:
    from mcr_plus.kernels.gpu import int2_block

    return int2_block
