"""Kernels that add up the values of several buffers exactly, and round each sum once.

Sums are kept in float64, and the error of each addition is computed (Knuth's TwoSum, TAOCP vol. 2, 4.2.2).
Most have none, since float32 leaves 29 bits. If there are errors, they are added up in a second float64; if
one of that addition is lost, too, the element is added up in integers that cover float64's whole range
(Kulisch's long accumulator). So each result is the exact sum, rounded to nearest even once. It does not
depend on the order, nor on how the addends are distributed. It is NaN if an addend is NaN or both infinities
are there; the sum of zeros is -0 only if all are -0.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numba.extending
import numpy as np

from mcr_plus.backends.shm.atomics import call
from mcr_plus.backends.shm.reductions import LANES, LIMBS
from mcr_plus.kernels.cpu import embedded, linked

_numba: Any = numba  # partly annotated, which type checkers report
_types: Any = _numba.types

_LOWEST: Final = -1088  # exponent of the first bit of a long accumulator; the last one is 2^1215
_FRACTION: Final = (1 << 52) - 1
_MASK: Final = (1 << 32) - 1
_INFINITE: Final = 0x7FF << 52
_BELOW: Final = (1 << 29) - 1  # bits of float64 that float32 lacks
_LEAST_NORMAL: Final = 2.0**-126


@_numba.extending.intrinsic
def _pointer(typing_context, address):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return an address as a pointer."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return builder.inttoptr(args[0], context.get_value_type(_types.voidptr))

    return _types.voidptr(_types.int64), generate


@_numba.extending.intrinsic
def _bits_of(typing_context, value):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the bits of a float64."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return builder.bitcast(args[0], context.get_value_type(_types.int64))

    return _types.int64(_types.float64), generate


@_numba.extending.intrinsic
def _of_bits(typing_context, bits):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the float64 with these bits."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return builder.bitcast(args[0], context.get_value_type(_types.float64))

    return _types.float64(_types.int64), generate


@linked
def _odd(high, low):  # type: ignore[no-untyped-def]
    """Return `high + low` rounded to odd, so that it can be rounded again (Boldo & Melquiond, 2008)."""
    total = high + low
    part = total - high
    rest = (high - (total - part)) + (low - part)
    if rest == 0 or not abs(total) < np.inf:
        return total
    bits = _bits_of(total)
    if (rest > 0) != (total > 0):
        bits -= 1
    return _of_bits(bits | 1)


@linked
def _add_to_limbs(limbs, value):  # type: ignore[no-untyped-def]
    """Add a finite float64 to a long accumulator."""
    bits = _bits_of(value)
    exponent, mantissa = (bits >> 52) & 0x7FF, bits & _FRACTION
    if exponent:
        mantissa |= _FRACTION + 1
    at = max(exponent, np.int64(1)) - 1075 - _LOWEST
    sign, first, shift = (np.int64(-1) if bits < 0 else np.int64(1)), at // 32, at % 32
    limbs[first] += sign * ((mantissa << shift) & _MASK)
    limbs[first + 1] += sign * ((mantissa >> (32 - shift)) & _MASK)
    if shift:
        limbs[first + 2] += sign * (mantissa >> (64 - shift))


@linked
def _carry(limbs):  # type: ignore[no-untyped-def]
    """Bring limbs to 32 bits each, of the absolute value; return whether the sum is negative."""
    is_negative = False
    while True:
        carry = np.int64(0)
        for index in range(LIMBS):
            total = limbs[index] + carry
            limbs[index], carry = total & _MASK, total >> 32
        if carry == 0:
            return is_negative
        is_negative = True
        for index in range(LIMBS):
            limbs[index] = -limbs[index]
        limbs[LIMBS - 1] -= carry << 32


@linked
def _bit(limbs, at):  # type: ignore[no-untyped-def]
    return limbs[at // 32] >> (at % 32) & 1


@linked
def _rounded(limbs, halfway):  # type: ignore[no-untyped-def]
    """Return the bits of a long accumulator as float64, rounded to nearest even if `halfway`, else to odd."""
    limb = LIMBS - 1
    while limb >= 0 and limbs[limb] == 0:
        limb -= 1
    if limb < 0:
        return np.int64(0)
    highest = np.int64(32 * limb + 31)
    while _bit(limbs, highest) == 0:
        highest -= 1
    if highest + _LOWEST > 1023:
        return _INFINITE
    lowest = max(highest - 52, np.int64(-1074 - _LOWEST))
    mantissa = np.int64(0)
    for at in range(highest, lowest - 1, -1):
        mantissa = 2 * mantissa + _bit(limbs, at)
    # The leading bit of a normal number adds one to the exponent.
    bits = (max(highest + _LOWEST + 1022, np.int64(0)) << 52) + mantissa
    half, below = _bit(limbs, lowest - 1), lowest - 1  # bits below the half
    rest = limbs[below // 32] & ((1 << below % 32) - 1)
    for limb in range(below // 32):
        rest |= limbs[limb]
    rest = np.int64(rest != 0)
    if not halfway:
        return bits | half | rest
    return bits + (half & (rest | (mantissa & 1)))


@linked
def _like(sums, address, count):  # type: ignore[no-untyped-def]
    return _numba.carray(_pointer(address), (count,), sums.dtype)


@linked
def _start(high, lost, first, size):  # type: ignore[no-untyped-def]
    for i in range(size):
        high[i], lost[i] = first[i], 0.0


@embedded
def is_inexact(total, a, b):  # type: ignore[no-untyped-def]
    """Return whether the sum of two values lost bits: its difference to the larger one shows it."""
    return np.int64(total - a != b) | np.int64(total - b != a)


@linked
def _add(high, values, size):  # type: ignore[no-untyped-def]
    """Add values; return whether any sum is inexact."""
    inexact = np.int64(0)
    for i in range(size):
        addend, before = np.float64(values[i]), high[i]
        total = before + addend
        inexact |= is_inexact(total, before, addend)
        high[i] = total
    return inexact


@linked
def _add_two(high, left, right, size):  # type: ignore[no-untyped-def]
    """Write the sums of values; return whether any is inexact. (LLVM needs two functions.)"""
    inexact = np.int64(0)
    for i in range(size):
        a, b = np.float64(left[i]), np.float64(right[i])
        total = a + b
        inexact |= is_inexact(total, a, b)
        high[i] = total
    return inexact


@linked
def _add_to_pairs(high, low, lost, values, size):  # type: ignore[no-untyped-def]
    """Add values to `high + low`; add the size of what that cannot keep to `lost`."""
    for i in range(size):
        addend, before, below = np.float64(values[i]), high[i], low[i]
        total = before + addend
        part = total - before
        error = (before - (total - part)) + (addend - part)
        rest = below + error
        part = rest - below
        lost[i] += abs((below - (rest - part)) + (error - part))
        high[i], low[i] = total, rest


@linked
def _sum_of_column(column, count, limbs, wide):  # type: ignore[no-untyped-def]
    """Return the sum of float64 values, rounded to nearest even if `wide`, else to odd."""
    special = 0.0
    for index in range(LIMBS):
        limbs[index] = 0
    for index in range(count):
        if abs(column[index]) < np.inf:
            _add_to_limbs(limbs, column[index])
        else:
            special += column[index]
    if special != 0.0:  # also NaN
        return special
    is_negative = _carry(limbs)
    total = _of_bits(_rounded(limbs, wide))
    return -total if is_negative else total


@linked
def _odd_single(value):  # type: ignore[no-untyped-def]
    """Return a float64 rounded to odd to what float32 holds, for values that are narrowed further."""
    if not abs(value) < np.inf:
        return value
    if abs(value) >= _LEAST_NORMAL:
        bits = _bits_of(value)
        return _of_bits((bits & ~_BELOW) | (_BELOW + 1 if bits & _BELOW else 0))
    scaled = value * 2.0**149  # subnormal values are multiples of 2^-149
    whole = np.int64(scaled)
    if whole != scaled:
        whole |= 1
        if value < 0 and np.int64(scaled) & 1 == 0:
            whole = np.int64(scaled) - 1
    return whole * 2.0**-149 if whole else value * 0.0


@linked
def _to_odd_singles(singles, totals, size):  # type: ignore[no-untyped-def]
    """Write `_odd_single` of the totals; of normal ones and zeros by bits alone."""
    others = np.int64(0)
    for i in range(size):
        total = totals[i]
        is_normal = (abs(total) >= _LEAST_NORMAL) & (abs(total) < np.inf)
        others |= np.int64(not (is_normal | (total == 0.0)))
        bits = _bits_of(total)
        singles[i] = _of_bits((bits & ~_BELOW) | (np.int64((bits & _BELOW) != 0) << 29))
    if others:
        for i in range(size):
            singles[i] = _odd_single(totals[i])


@linked
def _values(like, address, size, widen, buffer):  # type: ignore[no-untyped-def]
    """Return values of a rank as an array, of a half type as float32 in the buffer."""
    if widen:
        call(widen, buffer, address, size, np.int64(0))
        return _like(like, buffer, size)
    return _like(like, address, size)


@linked
def _add_chunk(table, sums, at, size, ranks, wide):  # type: ignore[no-untyped-def]
    """Add up `size` values of each rank, `at` bytes after the beginning of its buffer.

    Returns the float64 sums, exact, or rounded to odd unless `wide`.
    """
    addresses = _numba.carray(_pointer(table), (ranks + 5,), np.int64)
    memory, widen = addresses[ranks], addresses[ranks + 3]
    high = _numba.carray(_pointer(memory), (LANES,), np.float64)
    low = _numba.carray(_pointer(memory + 8 * LANES), (LANES,), np.float64)
    lost = _numba.carray(_pointer(memory + 16 * LANES), (LANES,), np.float64)
    buffer = memory + 24 * LANES
    first, inexact = _values(sums, addresses[0] + at, size, widen, buffer), np.int64(0)
    if ranks == 1 or widen:  # there is one buffer for values of half types
        _start(high, lost, first, size)
    for rank in range(1, ranks):
        values = _values(sums, addresses[rank] + at, size, widen, buffer)
        if rank == 1 and not widen:
            inexact |= _add_two(high, first, values, size)
        else:
            inexact |= _add(high, values, size)
    if not inexact:
        return high
    for i in range(size):
        low[i] = 0.0
    _start(high, lost, _values(sums, addresses[0] + at, size, widen, buffer), size)
    for rank in range(1, ranks):
        _add_to_pairs(high, low, lost, _values(sums, addresses[rank] + at, size, widen, buffer), size)
    limbs = _numba.carray(_pointer(memory + 32 * LANES), (LIMBS,), np.int64)
    column = _numba.carray(_pointer(memory + 32 * LANES + 8 * LIMBS), (ranks,), np.float64)
    for i in range(size):
        if lost[i] == 0.0:
            if low[i] != 0.0:
                high[i] = high[i] + low[i] if wide else _odd(high[i], low[i])
            continue
        for rank in range(ranks):
            column[rank] = _values(sums, addresses[rank] + at, size, widen, buffer)[i]
        high[i] = _sum_of_column(column, ranks, limbs, wide)
    return high


def exact(wide: bool) -> tuple[Any, Any]:
    """Describe the kernel for float64 if `wide`, else for float32 and the half types, see `images.image`.

    Its arguments are those of `reductions.SumTable`.
    """
    dtype = np.float64 if wide else np.float32

    def add_exactly(target, table, ranks, count):  # type: ignore[no-untyped-def]
        words = _numba.carray(_pointer(table + 8 * ranks), (5,), np.int64)
        width, widen, narrow, narrowed = words[2], words[3], words[4], words[0] + 28 * LANES
        like = _numba.carray(_pointer(target), (1,), dtype)
        for begin in range(0, count, LANES):
            size, at = min(np.int64(LANES), count - begin), begin * width
            sums = _like(like, narrowed if widen else target + at, size)
            totals = _add_chunk(table, sums, at, size, ranks, wide)
            if widen:
                _to_odd_singles(sums, totals, size)
                call(narrow, target + at, narrowed, size, np.int64(0))
            else:
                for i in range(size):
                    sums[i] = totals[i]

    return _types.void(*[_types.int64] * 4), add_exactly
