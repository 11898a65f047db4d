"""Integers with scales shared by all ranks, several per word: torch reference, CPU kernels, GPU launchers.

Block b has the values [256 b, 256 b + 256), and one float32 amax: the largest magnitude, or infinity if a
value is NaN or infinite. The ranks agree on the largest amax of each block; then

    scale = max(amax / levels, 2^-126)
    code  = value / scale rounded to nearest even, from -levels to levels; 0 if amax is infinite

and a block with infinite amax decodes to 0 × infinity, which is NaN.

Payload: int32 words of 1, 2 or 4 lanes of 32, 16 or 8 bits. Value i is lane i % lanes of word i // lanes; a
word is the sum of code × 2^(lane × bits), so a sum of words contains the sums of codes as long as these fit
the lanes. Lanes after the last value are 0.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from mcr_plus.kernels import cpu

BLOCK: Final = 256
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITE: Final = np.uint32(0x7F800000)
_TINIEST: Final = np.float32(2.0**-126)
_ONE: Final = np.float32(1)
_LANES: Final = {1: torch.int32, 2: torch.int16, 4: torch.int8}
SIGNS: Final = {1: -0x80000000, 2: -0x7FFF8000, 4: -0x7F7F7F80}
"""The sign bits of a word's lanes, as an int32."""


def blocks_of(numel: int) -> int:
    """Return the number of blocks; the last may be shorter."""
    return -(-numel // BLOCK)


def words_of(numel: int, lanes: int) -> int:
    """Return the length of a payload in words."""
    return -(-numel // lanes)


def _step(levels: int) -> Any:
    return np.float32(1 / levels)


# --- torch: reference for tests of the other kernels --------------------------------------------------------


def amax_reference(values: torch.Tensor, amax: torch.Tensor) -> None:
    """Run `amax` in plain torch."""
    padded = torch.zeros(amax.numel() * BLOCK, device="cpu")
    padded[: values.numel()] = values
    amax.copy_(padded.view(-1, BLOCK).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(1))


def scales_reference(amax: torch.Tensor, levels: int) -> torch.Tensor:
    """Return the scales of codes, one per block."""
    return (amax * float(_step(levels))).clamp(min=float(_TINIEST))


def encode_reference(
    values: torch.Tensor, amax: torch.Tensor, words: torch.Tensor, levels: int, lanes: int
) -> None:
    """Run `encode` in plain torch."""
    per_unit = (1 / scales_reference(amax, levels)).repeat_interleave(BLOCK)[: values.numel()]
    codes = torch.zeros(words.numel() * lanes, dtype=torch.int64, device="cpu")
    codes[: values.numel()] = (values * per_unit).nan_to_num(nan=0.0).round().to(torch.int64)
    places = 2 ** (torch.arange(lanes, device="cpu") * (32 // lanes))
    words.copy_((codes.view(-1, lanes) * places).sum(1))


def decode_reference(
    amax: torch.Tensor, words: torch.Tensor, out: torch.Tensor, levels: int, lanes: int
) -> None:
    """Run `decode` in plain torch."""
    width = 32 // lanes
    rest, codes = words.to(torch.int64), []
    for _ in range(lanes):
        low = (rest + 2 ** (width - 1)) % 2**width - 2 ** (width - 1)
        codes.append(low)
        rest = (rest - low) >> width
    flat = torch.stack(codes, 1).view(-1)[: out.numel()].to(torch.float32)
    out.copy_(flat * scales_reference(amax, levels).repeat_interleave(BLOCK)[: out.numel()])


# --- CPU ----------------------------------------------------------------------------------------------------
# Packed codes with all sign bits flipped are codes plus 2^(bits - 1): non-negative, so no lane borrows from
# its neighbour. So (codes ^ signs) - signs computes a word, all lanes at once.


@cpu.inlined
def _largest(bits):  # type: ignore[no-untyped-def]
    # On integers, which sort like floats, with NaN on top; this becomes vector instructions.
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & _MAGNITUDE)
    return min(largest, _INFINITE)


@cpu.compiled
def _amax(bits, marks, lo, hi):  # type: ignore[no-untyped-def]
    whole = min(hi, bits.size // BLOCK)
    for block in range(lo, whole):  # constant slice lengths give vector instructions
        at = block * BLOCK
        marks[block] = _largest(bits[at : at + BLOCK])
    for block in range(whole, hi):
        marks[block] = _largest(bits[block * BLOCK : bits.size])


@cpu.inlined
def _encode_block(values, amax, step, codes, words, signs):  # type: ignore[no-untyped-def]
    if np.isinf(amax):
        for i in range(words.size):
            words[i] = 0
    else:
        per_unit = _ONE / max(amax * step, _TINIEST)
        for i in range(values.size):
            codes[i] = np.int32(np.rint(values[i] * per_unit))
        for i in range(values.size, codes.size):
            codes[i] = 0
        for i in range(words.size):
            words[i] = (words[i] ^ signs) - signs


@cpu.compiled
def _encode(values, amax, step, codes, words, signs, lo, hi):  # type: ignore[no-untyped-def]
    lanes = codes.size // words.size
    whole = min(hi, values.size // BLOCK)
    for block in range(lo, whole):
        at = block * BLOCK
        part, of_words = slice(at, at + BLOCK), words[at // lanes : (at + BLOCK) // lanes]
        _encode_block(values[part], amax[block], step, codes[part], of_words, signs)
    for block in range(whole, hi):
        at = block * BLOCK
        _encode_block(values[at:], amax[block], step, codes[at:], words[at // lanes :], signs)


@cpu.inlined
def _decode_block(amax, step, words, signs, flipped, codes, out, factor, add):  # type: ignore[no-untyped-def]
    for i in range(words.size):
        flipped[i] = (words[i] + signs) ^ signs
    scale = max(amax * step, _TINIEST) * factor
    if add:
        for i in range(out.size):
            out[i] += np.float32(codes[i]) * scale
    else:
        for i in range(out.size):
            out[i] = np.float32(codes[i]) * scale


@cpu.compiled
def _decode(amax, step, like, words, signs, out, factor, add, lo, hi):  # type: ignore[no-untyped-def]
    codes = np.empty(BLOCK, like.dtype)
    flipped = codes.view(np.uint32)
    lanes = BLOCK // flipped.size
    whole = min(hi, out.size // BLOCK)
    for block in range(lo, whole):
        at = block * BLOCK
        of_words = words[at // lanes : (at + BLOCK) // lanes]
        _decode_block(amax[block], step, of_words, signs, flipped, codes, out[at : at + BLOCK], factor, add)
    for block in range(whole, hi):
        at = block * BLOCK
        _decode_block(amax[block], step, words[at // lanes :], signs, flipped, codes, out[at:], factor, add)


# --- launchers ----------------------------------------------------------------------------------------------


def amax(values: torch.Tensor, out: torch.Tensor) -> None:
    """Write the amax of each block of flat float32 `values` to `out`: float32, `blocks_of` long."""
    if values.is_cuda:
        _gpu().amax(values, out)
        return
    cpu.spread(_amax, out.numel(), values.nbytes, values.numpy().view(np.uint32), out.numpy().view(np.uint32))


def encode(values: torch.Tensor, amax: torch.Tensor, words: torch.Tensor, levels: int, lanes: int) -> None:
    """Write the payload of flat float32 `values` to `words`.

    Args:
        values: at most as large as the `amax` of their block.
        amax: the maxima that the ranks agreed on: float32, `blocks_of` long.
        words: int32, `words_of` long.
        levels: the largest code, at most 2^20, so that rounding errors never reach the next code.
        lanes: 1, 2 or 4 per word.
    """
    if values.is_cuda:
        _gpu().encode(values, amax, words, levels, lanes)
        return
    arrays = (values.numpy(), amax.numpy(), _step(levels), *_views(words, lanes))
    cpu.spread(_encode, amax.numel(), values.nbytes, *arrays)


def decode(amax: torch.Tensor, words: torch.Tensor, out: torch.Tensor, levels: int, lanes: int) -> None:
    """Overwrite flat float32 `out` with the values of the sum of payloads."""
    _decode_into(amax, words, out, levels, lanes, 1.0, False)


def accumulate(
    amax: torch.Tensor, words: torch.Tensor, total: torch.Tensor, levels: int, lanes: int, factor: float
) -> None:
    """Add `factor` times the values of a payload to flat float32 `total`."""
    _decode_into(amax, words, total, levels, lanes, factor, True)


def _decode_into(
    amax: torch.Tensor,
    words: torch.Tensor,
    out: torch.Tensor,
    levels: int,
    lanes: int,
    factor: float,
    add: bool,
) -> None:
    if out.is_cuda:
        _gpu().decode(amax, words, out, levels, lanes, factor, add)
        return
    arrays = (amax.numpy(), _step(levels), *_views(words, lanes), out.numpy(), np.float32(factor), add)
    cpu.spread(_decode, amax.numel(), out.nbytes, *arrays)


def _views(words: torch.Tensor, lanes: int) -> tuple[Any, Any, np.uint32]:
    """Return the lanes and the words as arrays, and the sign bits of a word's lanes."""
    signs = np.uint32(SIGNS[lanes] & 0xFFFFFFFF)
    return words.view(_LANES[lanes]).numpy(), words.numpy().view(np.uint32), signs


def _gpu() -> Any:
    from mcr_plus.kernels.gpu import int_shared

    return int_shared
