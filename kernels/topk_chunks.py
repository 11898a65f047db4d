"""Select the k values of largest magnitude of every chunk of N values: CPU kernels, launchers.

Payloads have the format of `kernels.topk_records`, with places in few bits.

Values are selected as in `kernels.topk`, chunk by chunk: magnitudes are compared as the integer |bits|, so
infinity and NaN are the largest; of equal magnitudes at the threshold, values with lower index are sent.

Values of 32 and 16 bits are float32 and bfloat16. Values of 4 and 2 bits have a sign in the lowest bit and
the number of a magnitude; each chunk has its own levels of magnitudes, within the range of its k values:

    4 bits    eight equidistant levels from the smallest to the largest magnitude; the nearest is used
    2 bits    two levels: the means of the magnitudes up to a threshold and above it (Lloyd 1982). The
              threshold is smallest + 1.594 × (mean - smallest): magnitudes above a high threshold are nearly
              exponential, and for exponentials the quantiser with the smallest error has its threshold at
              1.594 × the mean

Both round to nearest and are therefore biased; error feedback sends the rest later. Levels are bfloat16.
Means are computed from integers, in units of 2^-36 of the power of two above the largest, so that sums are
exact in any order. If one of the k values is not finite, both levels are NaN and all k values decode to NaN.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from mcr_plus.errors import BackendError
from mcr_plus.kernels import cpu, few_bits
from mcr_plus.kernels.few_bits import SLACK
from mcr_plus.kernels.topk_chunks_reference import (
    LARGEST_LEVEL,
    TAIL,
    UNITS,
    contents_reference,
    encode_reference,
)
from mcr_plus.kernels.topk_records import Chunking, RecordForm, split

_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITE: Final = np.uint32(0x7F800000)
_NAN_LEVELS: Final = np.uint32(0x7FC07FC0)
_NAN: Final = np.uint32(0x7FC0)
_HALF: Final = np.uint32(16)
_ROUND: Final = np.uint32(0x7FFF)
_CAP: Final = np.uint32(LARGEST_LEVEL)
_NONE: Final = np.uint32(0)
_ONE: Final = np.uint32(1)
_SIGN: Final = np.uint32(31)
_UPPER: Final = np.uint32(0xFFFF0000)
_INFINITY: Final = np.int64(1 << 31)  # above all magnitudes
_STEP: Final = np.int64(1 << 18)  # 1/32 of an octave, by which thresholds of Gaussian chunks differ
_TOP: Final = np.float32(7)
_SET, _ADD, _CLEAR = 0, 1, 2


@cpu.embedded
def _nearest(value):  # type: ignore[no-untyped-def]
    """Return the bits of the bfloat16 nearest to a float32, given as bits; not for NaN."""
    odd = np.uint32(np.uint32(value >> _HALF) & _ONE)
    return np.uint32(np.uint32(value + np.uint32(_ROUND + odd)) >> _HALF)


@cpu.embedded
def _level(mean):  # type: ignore[no-untyped-def]
    return min(_nearest(np.float32(mean).view(np.uint32)), _CAP)


@cpu.embedded
def _float(level):  # type: ignore[no-untyped-def]
    return np.uint32(level << _HALF).view(np.float32)


@cpu.linked
def _reaching(bits, edge):  # type: ignore[no-untyped-def]
    count = _NONE
    for i in range(bits.size):
        count += np.uint32(np.uint32(bits[i] & _MAGNITUDE) >= edge)
    return np.int64(count)


@cpu.linked
def _edge(bits, rank, guess):  # type: ignore[no-untyped-def]
    """Return a magnitude that `rank` values reach (more if some are equal), and the number of surplus values.

    Unlike sorting, counting uses vector instructions. The search goes from `guess` in growing steps to a
    magnitude on the other side, then alternates between interpolation and bisection.
    """
    low, at_low, high, at_high = np.int64(0), np.int64(bits.size), _INFINITY, np.int64(0)
    edge, step, turn = min(max(guess, np.int64(1)), _INFINITY - 1), _STEP, 0
    while high - low > 1:
        count = _reaching(bits, np.uint32(edge))
        if count == rank:
            return edge, np.int64(0)
        if count > rank:
            low, at_low = edge, count
        else:
            high, at_high = edge, count
        if high == _INFINITY:
            edge, step = min(low + step, high - 1), step * 4
        elif low == 0:
            edge, step = max(high - step, np.int64(1)), step * 4
        else:
            turn += 1
            share = (2 * (at_low - rank) + 1) * (high - low) // (2 * (at_low - at_high))
            edge = low + share if turn & 1 else (low + high) >> 1
            edge = min(max(edge, low + 1), high - 1)
    return low, at_low - rank


@cpu.linked
def _choose(bits, sent, guess, flags, places, kept):  # type: ignore[no-untyped-def]
    """Write the places and bits of a chunk's largest values, by place; returns the smallest magnitude."""
    edge, surplus = _edge(bits, sent, guess)
    least = np.uint32(edge)
    for i in range(bits.size):
        flags[i] = np.uint32(bits[i] & _MAGNITUDE) >= least
    room = (bits.size + 7) // 8 * 8
    for i in range(bits.size, room):
        flags[i] = 0
    at = bits.size
    while surplus > 0:  # of equal values, the first are sent
        at -= 1
        if np.uint32(bits[at] & _MAGNITUDE) == least:
            flags[at] = 0
            surplus -= 1
    few_bits.places_of_flags(flags[:room].view(np.uint64), places)
    for i in range(sent):
        kept[i] = bits[places[i]]
    return edge


@cpu.linked
def _two_levels(kept, sent, numbers):  # type: ignore[no-untyped-def]
    """Return the word with the levels of 2-bit values; fills in the level number of each value."""
    most, least = _NONE, _INFINITE
    for i in range(sent):
        magnitude = np.uint32(kept[i] & _MAGNITUDE)
        most, least = max(most, magnitude), min(least, magnitude)
    _, exponent = math.frexp(np.float64(np.uint32(most).view(np.float32)))
    unit = math.ldexp(1.0, exponent - UNITS)
    per_unit = math.ldexp(1.0, UNITS - exponent)
    total = np.int64(0)
    for i in range(sent):
        total += np.int64(np.float64(np.uint32(kept[i] & _MAGNITUDE).view(np.float32)) * per_unit)
    smallest = np.float64(np.uint32(least).view(np.float32))
    threshold = smallest + (np.float64(total) / sent * unit - smallest) * TAIL
    many, high = np.int64(0), np.int64(0)
    for i in range(sent):
        magnitude = np.float64(np.uint32(kept[i] & _MAGNITUDE).view(np.float32))
        above = np.int64(magnitude > threshold)
        numbers[i] = np.uint32(above)
        many += above
        high += np.int64(magnitude * per_unit) * above
    lower = _level(np.float64(total - high) / max(sent - many, 1) * unit)
    higher = _level(np.float64(high) / max(many, 1) * unit)
    return np.uint32(lower | np.uint32(higher << _HALF))


@cpu.linked
def _eight_levels(kept, sent, numbers):  # type: ignore[no-untyped-def]
    """Return the word with the levels of 4-bit values; fills in the level number of each value."""
    most, least = _NONE, _INFINITE
    for i in range(sent):
        magnitude = np.uint32(kept[i] & _MAGNITUDE)
        most, least = max(most, magnitude), min(least, magnitude)
    lower, higher = min(_nearest(least), _CAP), min(_nearest(most), _CAP)
    lowest = _float(lower)
    step = np.float32((_float(higher) - lowest) / _TOP)
    for i in range(sent):
        magnitude = np.uint32(kept[i] & _MAGNITUDE).view(np.float32)
        exact = np.float32(np.float32(magnitude - lowest) / step) if step > 0 else np.float32(0)
        numbers[i] = np.uint32(min(max(np.rint(exact), np.float32(0)), _TOP))
    return np.uint32(lower | np.uint32(higher << _HALF))


@cpu.linked
def _write_codes(kept, form, numbers, record):  # type: ignore[no-untyped-def]
    sent, bits, codes = form[1], form[2], form[7]
    if bits == 32:
        for i in range(sent):
            record[codes + i] = kept[i]
        return
    if bits == 16:
        for i in range(sent):
            nan = np.uint32(kept[i] & _MAGNITUDE) > _INFINITE
            numbers[i] = _NAN if nan else _nearest(kept[i])
    else:
        finite = True
        for i in range(sent):
            finite &= np.uint32(kept[i] & _MAGNITUDE) < _INFINITE
        if finite:
            record[0] = _two_levels(kept, sent, numbers) if bits == 2 else _eight_levels(kept, sent, numbers)
            for i in range(sent):
                numbers[i] = np.uint32(np.uint32(kept[i] >> _SIGN) | np.uint32(numbers[i] << _ONE))
        else:
            record[0] = _NAN_LEVELS
            for i in range(sent):
                numbers[i] = _NONE
    few_bits.pack(numbers, bits, sent, record[codes:])


@cpu.linked
def _write_places(places, form, flags, numbers, record):  # type: ignore[no-untyped-def]
    sent, low, spread, upper, lower, codes = form[1], form[3], form[4], form[5], form[6], form[7]
    room = 32 * (lower - upper)
    for i in range(room):
        flags[i] = 0
    for i in range(sent):
        flags[np.uint32(np.uint32(places[i] >> np.uint32(low)) + np.uint32(spread * i))] = 1
    few_bits.pack_flags(flags[:room].view(np.uint64), record[upper:lower])
    if low:
        mask = np.uint32((1 << low) - 1)
        for i in range(sent):
            numbers[i] = places[i] & mask
        few_bits.pack(numbers, low, sent, record[lower:codes])


@cpu.compiled
def _encode(values, decay, rest, bits, with_rest, form, records, lo, hi):  # type: ignore[no-untyped-def]
    """Encode chunks of `bits`; with `with_rest`, of decay × rest + values, with the error in `rest`.

    With `with_rest`, `bits` are the bits of `rest`.
    """
    length, sent = form[0], form[1]
    flags = np.empty(max(length + 7, 32 * (form[6] - form[5])), np.uint8)
    room = length + SLACK
    places, kept, numbers = np.empty(room, np.uint32), np.empty(room, np.uint32), np.empty(room, np.uint32)
    guess = np.int64(0)  # the threshold of a chunk is usually close to that of the next chunk
    for chunk in range(lo, hi):  # all work while the chunk is in the first-level cache
        if with_rest:
            _add(values[chunk], decay, rest[chunk])
        guess = _choose(bits[chunk], sent, guess, flags, places, kept)
        _write_places(places, form, flags, numbers, records[chunk])
        _write_codes(kept, form, numbers, records[chunk])
        if with_rest:
            _take_off(records[chunk], form, numbers, places, kept[:sent].view(np.float32), rest[chunk])


@cpu.linked
def _add(values, decay, rest):  # type: ignore[no-untyped-def]
    for i in range(rest.size):
        rest[i] = np.float32(decay * rest[i]) + values[i]


@cpu.linked
def _take_off(record, form, numbers, places, values, rest):  # type: ignore[no-untyped-def]
    """Subtract the values of a record from `rest`, and clear non-finite elements."""
    _read_values(record, form, numbers, values)
    for i in range(values.size):
        rest[places[i]] -= values[i]
    bits, most = rest.view(np.uint32), _NONE
    for i in range(rest.size):
        most = max(most, np.uint32(bits[i] & _MAGNITUDE))
    if most >= _INFINITE:
        for i in range(rest.size):
            rest[i] = rest[i] if np.uint32(bits[i] & _MAGNITUDE) < _INFINITE else np.float32(0)


@cpu.linked
def _read_places(record, form, numbers, places):  # type: ignore[no-untyped-def]
    """Fill in the places; return whether their number is right and all are inside the chunk."""
    length, sent, low, spread = form[0], form[1], np.uint32(form[3]), np.uint32(form[4])
    upper, lower, codes = form[5], form[6], form[7]
    if few_bits.places_of_bits(record[upper:lower], places) != sent:
        return False
    if low:
        few_bits.unpack(record[lower:codes], form[3], sent, numbers)
    else:
        for i in range(sent):
            numbers[i] = _NONE
    most = _NONE
    for i in range(sent):
        place = np.uint32(np.uint32(places[i] - np.uint32(spread * np.uint32(i))) << low) | numbers[i]
        places[i] = place
        most = max(most, np.uint32(place))
    return most < length


@cpu.linked
def _read_values(record, form, numbers, values):  # type: ignore[no-untyped-def]
    sent, bits, codes = form[1], form[2], form[7]
    out = values.view(np.uint32)
    if bits == 32:
        for i in range(sent):
            out[i] = record[codes + i]
        return
    few_bits.unpack(record[codes:], bits, sent, numbers)
    if bits == 16:
        for i in range(sent):
            out[i] = np.uint32(numbers[i] << _HALF)
    elif bits == 2:
        lowest, highest = np.uint32(record[0] << _HALF), np.uint32(record[0] & _UPPER)
        for i in range(sent):
            level = highest if numbers[i] > _ONE else lowest
            out[i] = np.uint32(level ^ np.uint32(numbers[i] << _SIGN))
    else:
        lowest = _float(record[0])
        step = np.float32((_float(np.uint32(record[0] >> _HALF)) - lowest) / _TOP)
        for i in range(sent):
            level = lowest + np.float32(np.float32(numbers[i] >> _ONE) * step)
            out[i] = np.uint32(np.float32(level).view(np.uint32) ^ np.uint32(numbers[i] << _SIGN))


@cpu.linked
def _room(form):  # type: ignore[no-untyped-def]
    """Return memory for places, numbers and values of a record."""
    return (
        np.empty(32 * (form[6] - form[5]) + SLACK, np.uint32),
        np.empty(form[1] + SLACK, np.uint32),
        np.empty(form[1], np.float32),
    )


@cpu.compiled
def _decode(records, form, factor, how, out, lo, hi):  # type: ignore[no-untyped-def]
    """Decode chunks; returns the number of inconsistent chunks. `how`: `_SET`, `_ADD` or `_CLEAR`."""
    places, numbers, values = _room(form)
    wrong = 0
    for chunk in range(lo, hi):
        part = out[chunk]
        if how == _SET:
            for i in range(part.size):
                part[i] = 0
        if not _read_places(records[chunk], form, numbers, places):
            wrong += 1
        elif how == _CLEAR:
            for i in range(values.size):
                part[places[i]] = 0
        else:
            _read_values(records[chunk], form, numbers, values)
            if how == _SET:
                for i in range(values.size):
                    part[places[i]] = values[i]
            else:
                for i in range(values.size):
                    part[places[i]] += np.float32(factor * values[i])
    return wrong


@cpu.compiled
def _sum(words, begin, form, factor, out, lo, hi):  # type: ignore[no-untyped-def]
    """Write the sum of the payloads in the rows of `words`; records begin at the word `begin`."""
    places, numbers, values = _room(form)
    wrong = 0
    for chunk in range(lo, hi):
        part, at = out[chunk], begin + chunk * form[8]
        for i in range(part.size):
            part[i] = 0
        for rank in range(words.shape[0]):
            record = words[rank, at : at + form[8]]
            if _read_places(record, form, numbers, places):
                _read_values(record, form, numbers, values)
                for i in range(values.size):
                    part[places[i]] += np.float32(factor * values[i])
            else:
                wrong += 1
    return wrong


# --- launchers ----------------------------------------------------------------------------------------------


def encode(values: torch.Tensor, wire: torch.Tensor, how: Chunking) -> None:
    """Write the largest of each chunk of flat float32 `values` to `wire`."""
    if values.is_cuda:
        encode_reference(values, wire, how)
        return
    for form, records, rows in split(wire, values, how):
        _start(rows, 0.0, rows, False, form, records)


def encode_rest(
    values: torch.Tensor, decay: float, rest: torch.Tensor, wire: torch.Tensor, how: Chunking
) -> None:
    """Run `encode` on decay × `rest` + `values`, and write the encoding error to `rest`; on the CPU.

    All tensors are flat float32. Non-finite errors become zero in `rest`. One pass over memory gives the same
    bits as separate operations.
    """
    kept = split(wire, rest, how)
    for (form, records, rows), (_, _, given) in zip(kept, split(wire, values, how), strict=True):
        _start(given, decay, rows, True, form, records)


def _start(
    values: torch.Tensor,
    decay: float,
    rest: torch.Tensor,
    with_rest: bool,
    form: RecordForm,
    records: torch.Tensor,
) -> None:
    kept = rest.numpy()
    given = values.numpy() if with_rest else kept
    sources = (given, np.float32(decay), kept, kept.view(np.uint32), with_rest)
    arrays = (*sources, form.numbers, records.numpy().view(np.uint32))
    cpu.spread(_encode, len(rest), rest.nbytes, *arrays)


def decode(wire: torch.Tensor, out: torch.Tensor, how: Chunking) -> None:
    """Overwrite flat float32 `out` with the values of a payload. Raises `BackendError` if it is invalid."""
    for form, records, rows in split(wire, out, how):
        if out.is_cuda:
            rows.zero_().scatter_(1, *contents_reference(records, form))
            continue
        arrays = (records.numpy().view(np.uint32), form.numbers, np.float32(1), _SET, rows.numpy())
        _check(cpu.spread(_decode, len(rows), rows.nbytes, *arrays), form)


def accumulate(wire: torch.Tensor, total: torch.Tensor, factor: float, how: Chunking) -> None:
    """Add `factor` times the values of a payload to flat float32 `total`, only at their places."""
    for form, records, rows in split(wire, total, how):
        if total.is_cuda:
            places, values = contents_reference(records, form)
            rows.scatter_add_(1, places, values * factor)
            continue
        arrays = (records.numpy().view(np.uint32), form.numbers, np.float32(factor), _ADD, rows.numpy())
        _check(cpu.spread(_decode, len(rows), records.nbytes * 8, *arrays), form)


def sum_payloads(wires: torch.Tensor, total: torch.Tensor, factor: float, how: Chunking) -> None:
    """Overwrite flat float32 `total` by `factor` times the sum of the payloads in the rows of `wires`.

    Payloads are added in the order of the rows; on the CPU.
    """
    words, begin = wires.view(torch.int32).numpy().view(np.uint32), 0
    for form, records, rows in split(wires[0], total, how):
        arrays = (words, begin, form.numbers, np.float32(factor), rows.numpy())
        _check(cpu.spread(_sum, len(rows), rows.nbytes, *arrays), form)
        begin += records.numel()


def clear(wire: torch.Tensor, values: torch.Tensor, how: Chunking) -> None:
    """Set the places of a payload to zero in flat float32 `values`."""
    for form, records, rows in split(wire, values, how):
        if values.is_cuda:
            rows.scatter_(1, contents_reference(records, form)[0], 0.0)
            continue
        arrays = (records.numpy().view(np.uint32), form.numbers, np.float32(1), _CLEAR, rows.numpy())
        _check(cpu.spread(_decode, len(rows), records.nbytes * 8, *arrays), form)


def _check(wrong: list[int], form: RecordForm) -> None:
    if any(wrong):
        raise BackendError(
            f"a topk payload contradicts itself: {sum(wrong)} chunks do not hold the places of {form.sent} "
            f"of {form.length} values"
        )
