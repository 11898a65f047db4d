"""The k values of largest magnitude of every chunk of N values: torch reference, CPU kernels, launchers.

Payloads are those of `kernels.topk_records`, with places in few bits.

Selection is that of `kernels.topk`, chunk by chunk: magnitudes are compared as the integer |bits|, so
infinity and NaN are the largest; of equal magnitudes at the edge those of lower index are sent.

Values of 32 and 16 bits are float32 and bfloat16. Those of 4 and 2 bits are a sign in the lowest bit and
the number of a magnitude; the magnitudes of a chunk are on levels of its own, between those of its k
values:

    4 bits    eight at equal distances from the smallest to the largest; the nearest is taken
    2 bits    two: the means of the magnitudes up to a threshold and above it (Lloyd 1982). The threshold is
              smallest + 1.594 × (mean - smallest): what is beyond a high threshold is nearly exponential
              there, and for exponentials the quantiser of least error has it at 1.594 of the mean

Both are to nearest, so they are biased; error feedback sends the rest. Levels are bfloat16. Means are made
of integers, units of 2^-36 of the power of two above the largest, so that their sums are exact in any
order. If one of the k values is not finite, both levels are NaN and all k decode to NaN.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from mcr_plus.errors import BackendError
from mcr_plus.kernels import cpu
from mcr_plus.kernels.topk import FLAGS, gather_block
from mcr_plus.kernels.topk_records import Chunking, Form, split

TAIL: Final = 1.594
UNITS: Final = 36
LARGEST_LEVEL: Final = 0x7F7F
"""The largest finite bfloat16, as bits."""

# --- torch: what the CPU kernels are tested against, and what runs on a GPU ---------------------------------


def _pack(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """Numbers of `width` bits, chunks × numbers, as words of 32 bits, chunks × words."""
    bits = numbers[:, :, None] >> torch.arange(width, device=numbers.device) & 1
    flat = torch.nn.functional.pad(bits.flatten(1), (0, -numbers.shape[1] * width % 32))
    words = flat.view(flat.shape[0], -1, 32) << torch.arange(32, device=numbers.device)
    return words.sum(2).to(torch.int32)  # modulo 2^32


def _unpack(words: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """The opposite of `_pack`: `count` numbers of each chunk, int64."""
    if not width:
        return torch.zeros(words.shape[0], count, dtype=torch.int64, device=words.device)
    bits = words.to(torch.int64)[:, :, None] >> torch.arange(32, device=words.device) & 1
    rows = bits.flatten(1)[:, : count * width].view(-1, count, width)
    return (rows << torch.arange(width, device=words.device)).sum(2)


def _ranks_found(flags: torch.Tensor, sent: int) -> torch.Tensor:
    """Where the first, second, … `sent`-th flag of each row is; `nonzero` would wait for the device."""
    ranks = torch.arange(1, sent + 1, device=flags.device).expand(flags.shape[0], sent)
    return torch.searchsorted(flags.cumsum(1), ranks.contiguous())


def _bfloat16_bits(values: torch.Tensor) -> torch.Tensor:
    """float32 → bits of the nearest bfloat16, int32; one bit pattern for all NaN."""
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return torch.where(values.isnan(), 0x7FC0, rounded).to(torch.int32)


def _levels_reference(magnitudes: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of the levels, chunks × 2, and the number of each magnitude's level, for finite ones."""
    most, least = magnitudes.amax(1, keepdim=True), magnitudes.amin(1, keepdim=True)
    if bits == 4:
        levels = _bfloat16_bits(torch.cat([least, most], 1)).clamp(max=LARGEST_LEVEL)
        lower, higher = (levels << 16).view(torch.float32).split(1, 1)
        step = (higher - lower) / 7
        numbers = ((magnitudes - lower) / step.where(step > 0, 1.0)).round().clamp(0, 7)
        return levels, numbers.where(step > 0, 0.0).to(torch.int64)
    wide = magnitudes.to(torch.float64)
    _, exponent = torch.frexp(most.to(torch.float64))
    unit = torch.ldexp(torch.ones_like(wide[:, :1]), exponent - UNITS)
    units = (wide / unit).to(torch.int64)
    mean = units.sum(1, keepdim=True).to(torch.float64) / magnitudes.shape[1] * unit
    above = wide > least.to(torch.float64) + (mean - least.to(torch.float64)) * TAIL
    means = []
    for part in (~above, above):
        many = part.sum(1, keepdim=True).clamp(min=1)
        means.append((units * part).sum(1, keepdim=True).to(torch.float64) / many * unit)
    levels = _bfloat16_bits(torch.cat(means, 1).to(torch.float32)).clamp(max=LARGEST_LEVEL)
    return levels, above.to(torch.int64)


def _codes_reference(chosen: torch.Tensor, bits: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The word of the levels, and the codes of values, chunks × sent."""
    raw = chosen.view(torch.int32)
    if bits == 32:
        return None, raw
    if bits == 16:
        return None, _pack(_bfloat16_bits(chosen), 16)
    magnitudes = chosen.abs()
    finite = magnitudes.isfinite().all(1, keepdim=True)
    levels, numbers = _levels_reference(magnitudes.where(finite, 0.0), bits)
    levels = levels.where(finite, 0x7FC0)
    codes = torch.where(finite, (raw < 0).to(torch.int64) | numbers << 1, 0)
    return (levels[:, :1] | levels[:, 1:] << 16), _pack(codes, bits)


def encode_reference(values: torch.Tensor, wire: torch.Tensor, how: Chunking) -> None:
    """`encode` in plain torch."""
    for form, records, rows in split(wire, values, how):
        magnitudes = rows.view(torch.int32) & 0x7FFFFFFF
        threshold = magnitudes.topk(form.sent, 1, sorted=False).values.amin(1, keepdim=True)
        above, equal = magnitudes > threshold, magnitudes == threshold
        taken = above | (equal & (equal.cumsum(1) <= form.sent - above.sum(1, keepdim=True)))
        places = _ranks_found(taken, form.sent)
        levels, codes = _codes_reference(rows.gather(1, places), form.bits)
        if levels is not None:
            records[:, :1] = levels
        upper = torch.zeros(len(rows), 32 * (form.lower - form.upper), dtype=torch.int64, device=rows.device)
        spread = form.spread * torch.arange(form.sent, device=rows.device)
        upper.scatter_(1, (places >> form.low) + spread, 1)
        records[:, form.upper : form.lower] = _pack(upper, 1)
        if form.low:
            records[:, form.lower : form.codes] = _pack(places & (1 << form.low) - 1, form.low)
        records[:, form.codes :] = codes


def contents_reference(records: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """The places (int64) and the values (float32) of records, chunks × sent."""
    flags = _unpack(records[:, form.upper : form.lower], 32 * (form.lower - form.upper), 1)
    spread = form.spread * torch.arange(form.sent, device=records.device)
    lower = _unpack(records[:, form.lower : form.codes], form.sent, form.low)
    places = (_ranks_found(flags, form.sent) - spread << form.low) | lower
    places = places.clamp(max=form.length - 1)  # of a payload that is none; on a GPU nobody looks
    codes = records[:, form.codes :].contiguous()
    if form.bits == 32:
        return places, codes.view(torch.float32)
    if form.bits == 16:
        return places, (_unpack(codes, form.sent, 16) << 16).to(torch.int32).view(torch.float32)
    numbers = _unpack(codes, form.sent, form.bits)
    head = records[:, :1].contiguous()
    lowest, highest = (head << 16).view(torch.float32), (head & -65536).view(torch.float32)
    if form.bits == 4:
        step = (highest - lowest) / 7
        levels = lowest + (numbers >> 1).to(torch.float32) * step
    else:
        levels = torch.where((numbers >> 1).bool(), highest, lowest)
    return places, torch.where((numbers & 1).bool(), -levels, levels)


# --- CPU ----------------------------------------------------------------------------------------------------

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
_EXPONENT: Final = np.uint32(23)
_BIAS: Final = np.int64(127)
_BELOW: Final = np.uint32(1 << 20)
"""A sixteenth to an eighth: about twice as many of a Gaussian's tail reach a threshold so far below."""
_TOP: Final = np.float32(7)


@cpu.inlined
def _nearest(value):  # type: ignore[no-untyped-def]
    """Bits of the bfloat16 nearest to a float32 that is given by its bits and is not NaN."""
    odd = np.uint32(np.uint32(value >> _HALF) & _ONE)
    return np.uint32(np.uint32(value + np.uint32(_ROUND + odd)) >> _HALF)


@cpu.inlined
def _level(mean):  # type: ignore[no-untyped-def]
    return min(_nearest(np.float32(mean).view(np.uint32)), _CAP)


@cpu.inlined
def _float(level):  # type: ignore[no-untyped-def]
    return np.uint32(level << _HALF).view(np.float32)


@cpu.compiled
def _kth_largest(magnitudes, rank, floor):  # type: ignore[no-untyped-def]
    """The magnitude that exactly `rank` reach, or more if there are equal ones, and how many are above it.

    `floor`: `rank` of them are no less. Bisection: counting goes through vectors, which sorting does not.
    """
    low, high = np.int64(floor), np.int64(1) << 31  # `rank` reach `low`, fewer `high`
    while high - low > 1:
        middle = (low + high) >> 1
        edge, count = np.uint32(middle), np.uint32(0)
        for i in range(magnitudes.size):
            count += np.uint32(magnitudes[i] >= edge)
        if count == rank:
            least = np.uint32(_MAGNITUDE)
            for i in range(magnitudes.size):
                reaches = magnitudes[i] >= edge
                least = min(least, magnitudes[i] if reaches else _MAGNITUDE)
            low = np.int64(least)
            break
        if count > rank:
            low = middle
        else:
            high = middle
    edge, above = np.uint32(low), np.uint32(0)
    for i in range(magnitudes.size):
        above += np.uint32(magnitudes[i] > edge)
    return edge, np.int64(above)


@cpu.compiled
def _choose(places, kept, found, sent, kth, ties):  # type: ignore[no-untyped-def]
    """Move the candidates above the k-th magnitude, and the first `ties` equal to it, to the front."""
    taken = 0
    for i in range(found):
        magnitude = kept[i] & _MAGNITUDE
        places[taken], kept[taken] = places[i], kept[i]
        tie = np.int64(magnitude == kth) & np.int64(ties > 0)
        ties -= tie
        taken += tie + np.int64(magnitude > kth)
        if taken == sent:
            break


@cpu.compiled
def _two_levels(kept, sent, numbers):  # type: ignore[no-untyped-def]
    """The word of the levels of 2-bit values; fills in the number of each."""
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


@cpu.compiled
def _eight_levels(kept, sent, numbers):  # type: ignore[no-untyped-def]
    """The same for 4-bit values."""
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


@cpu.compiled
def _write_codes(kept, form, numbers, record):  # type: ignore[no-untyped-def]
    sent, bits, codes = form[1], form[2], form[7]
    if bits == 32:
        for i in range(sent):
            record[codes + i] = kept[i]
    elif bits == 16:
        for i in range(sent):
            nan = np.uint32(kept[i] & _MAGNITUDE) > _INFINITE
            half = _NAN if nan else _nearest(kept[i])
            record[codes + (i >> 1)] |= np.uint32(half << np.uint32((i & 1) << 4))
    else:
        finite = True
        for i in range(sent):
            finite &= np.uint32(kept[i] & _MAGNITUDE) < _INFINITE
        if not finite:
            record[0] = _NAN_LEVELS
        else:
            record[0] = _two_levels(kept, sent, numbers) if bits == 2 else _eight_levels(kept, sent, numbers)
            for i in range(sent):
                code = np.uint32(np.uint32(kept[i] >> _SIGN) | np.uint32(numbers[i] << _ONE))
                at = i * bits
                record[codes + (at >> 5)] |= np.uint32(code << np.uint32(at & 31))


@cpu.compiled
def _write_places(places, form, record):  # type: ignore[no-untyped-def]
    sent, low, spread, upper, lower = form[1], form[3], form[4], form[5], form[6]
    mask = np.uint32((1 << low) - 1)
    for i in range(sent):
        at = (np.int64(places[i]) >> low) + spread * i
        record[upper + (at >> 5)] |= np.uint32(_ONE << np.uint32(at & 31))
    if low:
        for i in range(sent):
            at = i * low
            part, word, shift = np.uint32(places[i] & mask), lower + (at >> 5), at & 31
            record[word] |= np.uint32(part << np.uint32(shift))
            if shift + low > 32:
                record[word + 1] |= np.uint32(part >> np.uint32(32 - shift))


@cpu.compiled
def _encode(bits, form, records, lo, hi):  # type: ignore[no-untyped-def]
    length, sent = form[0], form[1]
    places, kept = np.empty(length + FLAGS, np.uint16), np.empty(length + FLAGS, np.uint32)
    magnitudes, numbers = np.empty(length, np.uint32), np.empty(sent, np.uint32)
    flags = np.empty(FLAGS, np.uint8)
    words = flags.view(np.uint64)
    floor = _NONE
    for chunk in range(lo, hi):
        part, record = bits[chunk], records[chunk]
        for word in range(record.size):
            record[word] = _NONE
        # What the chunk before has sent tells nearly always how small the values sent of this one are.
        found = gather_block(part, floor, sent * 40 > length, flags, words, places, kept, 0, length)
        if found < sent:
            floor = _NONE
            found = gather_block(part, _NONE, True, flags, words, places, kept, 0, length)
        for i in range(found):
            magnitudes[i] = kept[i] & _MAGNITUDE
        kth, above = _kth_largest(magnitudes[:found], sent, floor)
        _choose(places, kept, found, sent, kth, sent - above)
        floor = np.uint32(max(np.int64(kth) - np.int64(_BELOW), 0))
        _write_places(places, form, record)
        _write_codes(kept, form, numbers, record)


@cpu.compiled
def _read_places(record, form, places):  # type: ignore[no-untyped-def]
    """Fill in the places; whether they are as many as they should be, and inside the chunk."""
    length, sent, low, spread, upper, lower = form[0], form[1], form[3], form[4], form[5], form[6]
    found, sound = 0, True
    for word in range(upper, lower):
        left = record[word]
        while left:
            if found == sent:
                return False
            lowest = np.uint32(left & np.uint32(_NONE - left))
            bit = np.int64(np.float32(lowest).view(np.uint32) >> _EXPONENT) - _BIAS
            place = ((word - upper) * 32 + bit - spread * found) << low
            if low:
                at = found * low
                first, shift = lower + (at >> 5), at & 31
                part = np.uint64(record[first]) >> np.uint64(shift)
                if shift + low > 32:
                    part |= np.uint64(record[first + 1]) << np.uint64(32 - shift)
                place += np.int64(part & np.uint64((1 << low) - 1))
            sound &= place < length
            places[found] = place
            found += 1
            left ^= lowest
    return sound & (found == sent)


@cpu.compiled
def _read_values(record, form, values):  # type: ignore[no-untyped-def]
    sent, bits, codes = form[1], form[2], form[7]
    if bits == 32:
        for i in range(sent):
            values[i] = np.uint32(record[codes + i]).view(np.float32)
    elif bits == 16:
        for i in range(sent):
            half = np.uint32(record[codes + (i >> 1)] >> np.uint32((i & 1) << 4))
            values[i] = np.uint32(half << _HALF).view(np.float32)
    else:
        levels = np.empty(8, np.float32)
        lowest, highest = _float(record[0]), _float(np.uint32(record[0] >> _HALF))
        if bits == 2:
            levels[0], levels[1] = lowest, highest
        else:
            step = np.float32((highest - lowest) / _TOP)
            for number in range(8):
                levels[number] = lowest + np.float32(np.float32(number) * step)
        mask = np.uint32((1 << bits) - 1)
        for i in range(sent):
            at = i * bits
            code = np.uint32(np.uint32(record[codes + (at >> 5)] >> np.uint32(at & 31)) & mask)
            level = levels[code >> _ONE]
            values[i] = np.uint32(np.float32(level).view(np.uint32) ^ np.uint32(code << _SIGN)).view(
                np.float32
            )


@cpu.compiled
def _decode(records, form, out, lo, hi):  # type: ignore[no-untyped-def]
    places, values = np.empty(form[1], np.int64), np.empty(form[1], np.float32)
    wrong = 0
    for chunk in range(lo, hi):
        part = out[chunk]
        for i in range(part.size):
            part[i] = 0
        if _read_places(records[chunk], form, places):
            _read_values(records[chunk], form, values)
            for i in range(places.size):
                part[places[i]] = values[i]
        else:
            wrong += 1
    return wrong


@cpu.compiled
def _accumulate(records, form, factor, total, lo, hi):  # type: ignore[no-untyped-def]
    places, values = np.empty(form[1], np.int64), np.empty(form[1], np.float32)
    wrong = 0
    for chunk in range(lo, hi):
        if _read_places(records[chunk], form, places):
            _read_values(records[chunk], form, values)
            for i in range(places.size):
                total[chunk, places[i]] += np.float32(factor * values[i])
        else:
            wrong += 1
    return wrong


@cpu.compiled
def _clear(records, form, out, lo, hi):  # type: ignore[no-untyped-def]
    places = np.empty(form[1], np.int64)
    wrong = 0
    for chunk in range(lo, hi):
        if _read_places(records[chunk], form, places):
            for i in range(places.size):
                out[chunk, places[i]] = 0
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
        arrays = (rows.numpy().view(np.uint32), form.numbers, records.numpy().view(np.uint32))
        cpu.spread(_encode, len(rows), rows.nbytes, *arrays)


def decode(wire: torch.Tensor, out: torch.Tensor, how: Chunking) -> None:
    """Overwrite flat float32 `out` with the values of a payload. Raises `BackendError` if it is none."""
    for form, records, rows in split(wire, out, how):
        if out.is_cuda:
            rows.zero_().scatter_(1, *contents_reference(records, form))
            continue
        arrays = (records.numpy().view(np.uint32), form.numbers, rows.numpy())
        _check(cpu.spread(_decode, len(rows), rows.nbytes, *arrays), form)


def accumulate(wire: torch.Tensor, total: torch.Tensor, factor: float, how: Chunking) -> None:
    """Add `factor` times the values of a payload to flat float32 `total`, at their places only."""
    for form, records, rows in split(wire, total, how):
        if total.is_cuda:
            places, values = contents_reference(records, form)
            rows.scatter_add_(1, places, values * factor)
            continue
        arrays = (records.numpy().view(np.uint32), form.numbers, np.float32(factor), rows.numpy())
        _check(cpu.spread(_accumulate, len(rows), records.nbytes * 8, *arrays), form)


def clear(wire: torch.Tensor, values: torch.Tensor, how: Chunking) -> None:
    """Set the places of a payload to zero in flat float32 `values`."""
    for form, records, rows in split(wire, values, how):
        if values.is_cuda:
            rows.scatter_(1, contents_reference(records, form)[0], 0.0)
            continue
        arrays = (records.numpy().view(np.uint32), form.numbers, rows.numpy())
        _check(cpu.spread(_clear, len(rows), records.nbytes * 8, *arrays), form)


def _check(wrong: list[int], form: Form) -> None:
    if any(wrong):
        raise BackendError(
            f"a topk payload contradicts itself: {sum(wrong)} chunks do not hold the places of {form.sent} "
            f"of {form.length} values"
        )
