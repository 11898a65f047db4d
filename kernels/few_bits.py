"""Pack numbers of a few bits into 32-bit words, and find set bits; functions for CPU kernels.

The first number is in the lowest bits of the first word; numbers with a width that does not divide 32 cross
word boundaries. No function branches on data, because a mispredicted branch costs more than all other work
for a number.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mcr_plus.kernels import cpu

SLACK: Final = 32
"""Elements that room for numbers or places must have beyond those that are wanted."""

_BITS: Final = np.arange(256)[:, None] >> np.arange(8) & 1
_COUNTS: Final = _BITS.sum(1).astype(np.uint8)
"""How many bits of a byte are set, and (below) which, in ascending order."""
_PLACES: Final = np.argsort(1 - _BITS, 1, kind="stable").astype(np.uint8)
_SQUEEZE: Final = np.uint64(
    0x0102040810204080
)  # eight bytes of 0 or 1, times this: their bits in the top byte
_TOP_BYTE: Final = np.uint64(56)
_BYTE: Final = np.uint32(0xFF)
_NONE: Final = np.uint32(0)


@cpu.inlined
def _append(places, found, base, byte):  # type: ignore[no-untyped-def]
    """Append the places of a byte's bits after the first `found`; further writes are garbage."""
    row = _PLACES[byte]
    for i in range(8):
        places[found + i] = np.uint32(base + row[i])
    return found + np.int64(_COUNTS[byte])


@cpu.compiled
def places_of_bits(words, places):  # type: ignore[no-untyped-def]
    """Write the places of set bits in uint32 `words` to uint32 `places`; returns the number of set bits."""
    found = np.int64(0)
    for word in range(words.size):
        bits = words[word]
        for part in range(4):
            byte = np.uint32(bits >> np.uint32(8 * part)) & _BYTE
            found = _append(places, found, 32 * word + 8 * part, byte)
    return found


@cpu.compiled
def places_of_flags(flags, places):  # type: ignore[no-untyped-def]
    """Run `places_of_bits` on bytes of 0 or 1, eight in each element of uint64 `flags`."""
    found = np.int64(0)
    for word in range(flags.size):
        byte = np.uint64(flags[word] * _SQUEEZE) >> _TOP_BYTE
        found = _append(places, found, 8 * word, byte)
    return found


@cpu.compiled
def pack_flags(flags, words):  # type: ignore[no-untyped-def]
    """Pack bytes of 0 or 1, eight in each element of uint64 `flags`, as bits into uint32 `words`."""
    for word in range(words.size):
        bits = _NONE
        for part in range(4):
            byte = np.uint32(np.uint64(flags[4 * word + part] * _SQUEEZE) >> _TOP_BYTE)
            bits |= np.uint32(byte << np.uint32(8 * part))
        words[word] = bits


@cpu.inlined
def _pack(numbers, width, each, count, words):  # type: ignore[no-untyped-def]
    whole = count // each
    for word in range(whole):
        bits = _NONE
        for i in range(each):
            bits |= np.uint32(numbers[word * each + i] << np.uint32(width * i))
        words[word] = bits
    if whole < words.size:
        bits = _NONE
        for i in range(count - whole * each):
            bits |= np.uint32(numbers[whole * each + i] << np.uint32(width * i))
        words[whole] = bits


@cpu.compiled
def pack(numbers, width, count, words):  # type: ignore[no-untyped-def]
    """Pack the first `count` of uint32 `numbers`, with `width` bits each, into uint32 `words`."""
    if width == 2:  # constants, for vector instructions
        _pack(numbers, 2, 16, count, words)
    elif width == 4:
        _pack(numbers, 4, 8, count, words)
    elif 32 % width == 0:
        _pack(numbers, width, 32 // width, count, words)
    else:
        for word in range(words.size):
            words[word] = _NONE
        for i in range(count):
            at = i * width
            number, word, shift = numbers[i], at >> 5, at & 31
            words[word] |= np.uint32(number << np.uint32(shift))
            if shift + width > 32:
                words[word + 1] |= np.uint32(number >> np.uint32(32 - shift))


@cpu.inlined
def _unpack(words, width, each, numbers):  # type: ignore[no-untyped-def]
    mask = np.uint32((1 << width) - 1)
    for word in range(words.size):
        bits = words[word]
        for i in range(each):
            numbers[word * each + i] = np.uint32(bits >> np.uint32(width * i)) & mask


@cpu.compiled
def unpack(words, width, count, numbers):  # type: ignore[no-untyped-def]
    """Unpack the result of `pack`. Writes up to `SLACK` elements more than `count`."""
    if width == 2:
        _unpack(words, 2, 16, numbers)
    elif width == 4:
        _unpack(words, 4, 8, numbers)
    elif 32 % width == 0:
        _unpack(words, width, 32 // width, numbers)
    else:
        mask = np.uint64((1 << width) - 1)
        for i in range(count):
            at = i * width
            word, shift = at >> 5, at & 31
            bits = np.uint64(words[word]) >> np.uint64(shift)
            if shift + width > 32:
                bits |= np.uint64(words[word + 1]) << np.uint64(32 - shift)
            numbers[i] = np.uint32(bits & mask)
