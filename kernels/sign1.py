"""Signs and the mean magnitude of blocks of 1024 values: torch reference, CPU kernel, GPU launcher.

Payload of n values in b = ceil(n / 1024) blocks, little endian:

    b float32 scales | 32 × b words of 32 bits

Bit k of word j of a block is set if the block's value 32 k + j is negative, so the values of a word are in
one vector lane, on CPUs and GPUs. value = -scale if the bit is set, otherwise scale. The last block is padded
with zeros, which do not count for the mean.

The mean is computed in a fixed order, so it is the same everywhere: first 32 sums of magnitudes with equal
index modulo 32, from first to last; then the upper half of the sums is added to the lower half, five times.
The magnitudes are divided by 2048, so that the sum does not overflow. A block with a NaN or an infinity has
the scale NaN, so all its values decode to NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from mcr_plus.kernels import cpu

BLOCK: Final = 1024
LANES: Final = 32
LARGEST: Final = float(np.finfo(np.float32).max)


def blocks_of(numel: int) -> int:
    """Return the number of blocks; the last may be shorter."""
    return -(-numel // BLOCK)


def nbytes(numel: int) -> int:
    """Return the length of a payload."""
    return blocks_of(numel) * (4 + 4 * LANES)


def split(wire: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and the words (int32) of a payload, as views."""
    room, end = blocks_of(numel) * 4, nbytes(numel)
    return wire[:room].view(torch.float32), wire[room:end].view(torch.int32)


def mean_factor(count: int) -> float:
    """Return the factor that turns a sum of `count` magnitudes / 2048 into a mean."""
    return float(np.float32(2048) / np.float32(count))


# --- torch: reference for tests of the other kernels --------------------------------------------------------


def encode_reference(values: torch.Tensor, wire: torch.Tensor) -> None:
    """Run `encode` in plain torch."""
    scales, words = split(wire, values.numel())
    blocks = torch.zeros(scales.numel(), LANES, LANES, device="cpu")
    blocks.view(-1)[: values.numel()] = values
    sums = torch.zeros(scales.numel(), LANES, device="cpu")
    for k in range(LANES):
        sums = sums + blocks[:, k].abs() / 2048
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    factors = torch.full_like(scales, 2.0)
    factors[-1] = mean_factor(values.numel() - (scales.numel() - 1) * BLOCK)
    means = (sums[:, 0] * factors).clamp(max=LARGEST)
    scales.copy_(torch.where(sums[:, 0].isfinite(), means, torch.nan))
    bits = blocks.signbit().to(torch.int64) << torch.arange(LANES, device="cpu")[:, None]
    words.copy_(bits.sum(1).view(-1))


def decode_reference(wire: torch.Tensor, out: torch.Tensor) -> None:
    """Run `decode` in plain torch."""
    scales, words = split(wire, out.numel())
    bits = words.view(-1, 1, LANES) >> torch.arange(LANES, device="cpu")[:, None] & 1
    signs = 1 - 2 * bits.to(torch.float32)
    out.copy_((signs * scales[:, None, None]).view(-1)[: out.numel()])


# --- CPU ----------------------------------------------------------------------------------------------------
# numba widens results of uint32 to 64 bits; the conversions keep 32-bit vectors.

_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_SIGN: Final = np.uint32(0x80000000)
_INFINITE: Final = np.float32(np.inf)
_NAN: Final = np.float32(np.nan)
_LARGEST: Final = np.float32(LARGEST)
_PART: Final = np.float32(1 / 2048)
_WHOLE: Final = np.float32(2)
_ZERO: Final = np.float32(0)
_NONE: Final = np.uint32(0)
_NEXT: Final = np.uint32(1)
_LAST: Final = np.uint32(31)


@cpu.inlined
def _encode_block(bits, words, factor, sums, signs):  # type: ignore[no-untyped-def]
    """Write the words of 1024 values; returns the scale."""
    for j in range(LANES):
        sums[j] = _ZERO
        signs[j] = _NONE
    for k in range(LANES):
        row = bits[k * LANES : k * LANES + LANES]
        for j in range(row.size):
            sums[j] += np.uint32(row[j] & _MAGNITUDE).view(np.float32) * _PART
            signs[j] = np.uint32(np.uint32(signs[j] >> _NEXT) | np.uint32(row[j] & _SIGN))
    for j in range(words.size):
        words[j] = signs[j]
    for half in (16, 8, 4, 2, 1):
        for j in range(half):
            sums[j] += sums[j + half]
    return min(np.float32(sums[0] * factor), _LARGEST) if sums[0] < _INFINITE else _NAN


@cpu.compiled
def _encode(bits, scales, words, last_factor, lo, hi):  # type: ignore[no-untyped-def]
    sums, signs = np.empty(LANES, np.float32), np.empty(LANES, np.uint32)
    whole = min(hi, bits.size // BLOCK)
    for block in range(lo, whole):
        part = bits[block * BLOCK : block * BLOCK + BLOCK]
        lanes = slice(block * LANES, block * LANES + LANES)
        scales[block] = _encode_block(part, words[lanes], _WHOLE, sums, signs)
    for block in range(whole, hi):
        padded = np.zeros(BLOCK, np.uint32)
        rest = bits[block * BLOCK :]
        cpu.put(rest, padded)
        scales[block] = _encode_block(padded, words[block * LANES :], last_factor, sums, signs)


@cpu.compiled
def _decode(marks, words, out, lo, hi):  # type: ignore[no-untyped-def]
    for block in range(lo, hi):
        lanes = words[block * LANES : block * LANES + LANES]
        for k in range(LANES):
            at = min(block * BLOCK + k * LANES, out.size)
            row, left = out[at : at + LANES], np.uint32(LANES - 1 - k)
            for j in range(row.size):
                sign = np.uint32(np.uint32(lanes[j] << np.uint32(left & _LAST)) & _SIGN)
                row[j] = np.uint32(sign ^ marks[block]).view(np.float32)


@cpu.compiled
def _accumulate(scales, words, total, factor, lo, hi):  # type: ignore[no-untyped-def]
    for block in range(lo, hi):
        lanes = words[block * LANES : block * LANES + LANES]
        mark = np.float32(scales[block] * factor).view(np.uint32)
        for k in range(LANES):
            at = min(block * BLOCK + k * LANES, total.size)
            row, left = total[at : at + LANES], np.uint32(LANES - 1 - k)
            for j in range(row.size):
                sign = np.uint32(np.uint32(lanes[j] << np.uint32(left & _LAST)) & _SIGN)
                row[j] += np.uint32(sign ^ mark).view(np.float32)


# --- launchers ----------------------------------------------------------------------------------------------


def encode(values: torch.Tensor, wire: torch.Tensor) -> None:
    """Write the payload of flat float32 `values` to `wire`."""
    scales, words = split(wire, values.numel())
    last = mean_factor(values.numel() - (scales.numel() - 1) * BLOCK)
    if values.is_cuda:
        _gpu().encode(values, scales, words, last)
        return
    arrays = (values.numpy().view(np.uint32), scales.numpy(), words.numpy().view(np.uint32), np.float32(last))
    cpu.spread(_encode, scales.numel(), values.nbytes, *arrays)


def decode(wire: torch.Tensor, out: torch.Tensor) -> None:
    """Overwrite flat float32 `out` with the values of a payload."""
    scales, words = split(wire, out.numel())
    if out.is_cuda:
        _gpu().decode(scales, words, out)
        return
    arrays = (scales.numpy().view(np.uint32), words.numpy().view(np.uint32), out.numpy())
    cpu.spread(_decode, scales.numel(), out.nbytes, *arrays)


def accumulate(wire: torch.Tensor, total: torch.Tensor, factor: float) -> None:
    """Add `factor` times the values of a payload to flat float32 `total`."""
    scales, words = split(wire, total.numel())
    if total.is_cuda:
        _gpu().accumulate(scales, words, total, factor)
        return
    arrays = (scales.numpy(), words.numpy().view(np.uint32), total.numpy(), np.float32(factor))
    cpu.spread(_accumulate, scales.numel(), total.nbytes, *arrays)


def _gpu() -> Any:
    from mcr_plus.kernels.gpu import sign1

    return sign1
