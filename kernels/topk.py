"""Select the k values of largest magnitude and their places: torch reference, CPU kernels, launchers.

Payload of k out of n values in g = ceil(n / 65536) blocks, little endian, sections at multiples of 4 bytes:

    g uint32 counts of sent values | k uint16 places in their blocks | k values, float32 or bfloat16

Places ascend, so payloads are deterministic. Magnitudes are compared as the integer |bits|, which sorts like
floats with infinity and NaN on top: non-finite values are sent first. Of equal magnitudes at the threshold,
values with lower index are sent.

On the CPU, a sample gives a threshold that the k-th magnitude almost certainly exceeds. So one pass over
memory leaves few candidates, and the k largest of them are selected exactly. If the sample was misleading
(too few candidates, or far too many), a radix select reads all values three more times. There is no Triton
kernel: on a GPU the torch reference runs, which never waits for the device.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from mcr_plus.errors import BackendError
from mcr_plus.kernels import cpu

BLOCK: Final = 1 << 16
_FLAGS: Final = 512  # number of flags that are computed before they are tested
_WORD: Final = 8  # number of flags that are tested together
_LINE: Final = 16  # values per cache line, which are sampled together
_MOST_LINES: Final = 4096
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_ONE: Final = np.uint32(1)
_DIGITS: Final = ((20, 11), (9, 11), (0, 9))  # shift and width: 31 bits in three passes
_BUCKETS: Final = 1 << 11
_SCATTER: Final = np.uint32(2654435769)  # 2^32 / golden ratio: its multiples spread evenly

Array = NDArray[Any]


def blocks_of(numel: int) -> int:
    """Return the number of blocks; the last may be shorter."""
    return -(-numel // BLOCK)


def nbytes(numel: int, sent: int, dtype: torch.dtype) -> int:
    """Return the length of a payload of `sent` out of `numel` values, a multiple of 4."""
    return 4 * (blocks_of(numel) + -(-sent // 2) + -(-sent * dtype.itemsize // 4))


def split(
    wire: torch.Tensor, numel: int, sent: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the counts (int32), the places (uint16) and the values of a payload, as views."""
    places = 4 * blocks_of(numel)
    values = places + 4 * -(-sent // 2)
    return (
        wire[:places].view(torch.int32),
        wire[places : places + 2 * sent].view(torch.uint16),
        wire[values : values + sent * dtype.itemsize].view(dtype),
    )


# --- torch: reference for tests, and implementation for GPUs ------------------------------------------------


def encode_reference(values: torch.Tensor, wire: torch.Tensor, sent: int, dtype: torch.dtype) -> None:
    """Run `encode` in plain torch."""
    counts, places, chosen = split(wire, values.numel(), sent, dtype)
    magnitudes = values.view(torch.int32) & 0x7FFFFFFF
    threshold = magnitudes.topk(sent, sorted=False).values.amin()
    above, equal = magnitudes > threshold, magnitudes == threshold
    taken = above | (equal & (equal.cumsum(0) <= sent - above.sum()))
    # Index j is where the running count reaches j. `nonzero` would wait for the device.
    ranks = torch.arange(1, sent + 1, device=values.device)
    indices = torch.searchsorted(taken.cumsum(0), ranks)
    edges = torch.arange(counts.numel() + 1, device=values.device) * BLOCK
    counts.copy_(torch.searchsorted(indices, edges).diff())
    places.copy_(indices % BLOCK)
    chosen.copy_(values[indices])


def indices_reference(wire: torch.Tensor, numel: int, sent: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the ascending int64 indices of the values in a payload."""
    counts, places, _ = split(wire, numel, sent, dtype)
    blocks = torch.arange(counts.numel(), device=wire.device)
    of_each = torch.repeat_interleave(blocks, counts, output_size=sent)
    return of_each * BLOCK + places.to(torch.int64)


# --- CPU ----------------------------------------------------------------------------------------------------


@cpu.compiled
def _sample(bits, lines, out, lo, hi):  # type: ignore[no-untyped-def]
    # One line at a pseudo-random place in each of equal parts, so that periodic data do not bias the sample.
    whole = bits.size // _LINE
    for line in range(lo, hi):
        first, last = whole * line // lines, whole * (line + 1) // lines
        draw = np.int64(np.uint32(np.uint32(line) * _SCATTER) >> np.uint32(8))
        at = (first + ((draw * (last - first)) >> 24)) * _LINE
        for i in range(_LINE):
            out[line * _LINE + i] = bits[at + i]


@cpu.compiled
def _histogram(bits, prefix, above, shift, width, lo, hi):  # type: ignore[no-untyped-def]
    """Count each digit in the magnitudes with the upper bits `prefix` (from bit `above` on)."""
    # Four counters per digit, in turn: with repeated digits, a single counter would wait for its last store.
    counts = np.zeros((4, _BUCKETS), np.uint32)
    mask = (_ONE << width) - _ONE
    for i in range(lo, hi):
        magnitude = bits[i] & _MAGNITUDE
        counts[i & 3, (magnitude >> shift) & mask] += np.uint32((magnitude >> above) == prefix)
    total = np.empty(_BUCKETS, np.int64)
    for digit in range(_BUCKETS):
        total[digit] = np.int64(counts[0, digit]) + counts[1, digit] + counts[2, digit] + counts[3, digit]
    return total


@cpu.inlined
def _flag(bits, floor, flags):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        flags[i] = (bits[i] & _MAGNITUDE) >= floor


@cpu.linked
def _gather_block(bits, floor, dense, flags, words, places, kept, found, room):  # type: ignore[no-untyped-def]
    """Append a block's values of magnitude `floor` or more, and their places; stops beyond `room`."""
    whole = bits.size // _FLAGS * _FLAGS
    for at in range(0, whole, _FLAGS):
        if found > room:
            return found
        _flag(bits[at : at + _FLAGS], floor, flags)
        for word in range(_FLAGS // _WORD):
            if dense or words[word]:
                # Each value is written, and overwritten by the next unless it counts, so no branch can be
                # mispredicted.
                for i in range(_WORD):
                    place = at + word * _WORD + i
                    places[found] = place
                    kept[found] = bits[place]
                    found += flags[word * _WORD + i]
    if found <= room:
        for place in range(whole, bits.size):
            places[found] = place
            kept[found] = bits[place]
            found += (bits[place] & _MAGNITUDE) >= floor
    return found


@cpu.compiled
def _gather(bits, floor, dense, room, counts, lo, hi):  # type: ignore[no-untyped-def]
    """Return the candidates of blocks `lo` to `hi`: places, bits, and a flag that all fitted into `room`."""
    places, kept = np.empty(room + _FLAGS + 1, np.uint16), np.empty(room + _FLAGS + 1, np.uint32)
    flags = np.empty(_FLAGS, np.uint8)
    words = flags.view(np.uint64)
    found = 0
    for block in range(lo, hi):
        part = bits[block * BLOCK : min((block + 1) * BLOCK, bits.size)]
        before = found
        found = _gather_block(part, floor, dense, flags, words, places, kept, found, room)
        counts[block] = found - before
        if found > room:
            break
    return places[:found], kept[:found], found <= room


@cpu.compiled
def _tally(bits, starts, threshold, above, equal, lo, hi):  # type: ignore[no-untyped-def]
    for block in range(lo, hi):
        part = bits[starts[block] : starts[block + 1]]
        more, same = np.uint32(0), np.uint32(0)
        for i in range(part.size):
            magnitude = part[i] & _MAGNITUDE
            more += np.uint32(magnitude > threshold)
            same += np.uint32(magnitude == threshold)
        above[block], equal[block] = more, same


@cpu.linked
def _choose_block(places, bits, threshold, ties, room, sent_places, sent_bits):  # type: ignore[no-untyped-def]
    """Select a block's candidates above `threshold`, and the first `ties` candidates equal to it."""
    room_places, room_bits = room
    taken = 0
    for i in range(places.size):
        room_places[taken], room_bits[taken] = places[i], bits[i]
        magnitude = bits[i] & _MAGNITUDE
        tie = np.int64(magnitude == threshold) & np.int64(ties > 0)
        ties -= tie
        taken += tie + np.int64(magnitude > threshold)
    for i in range(sent_places.size):
        sent_places[i], sent_bits[i] = room_places[i], room_bits[i]


@cpu.compiled
def _choose(places, bits, starts, threshold, ties, edges, sent_places, sent_bits, lo, hi):  # type: ignore[no-untyped-def]
    room = np.empty(BLOCK + 1, np.uint16), np.empty(BLOCK + 1, np.uint32)
    for block in range(lo, hi):
        own, sent = slice(starts[block], starts[block + 1]), slice(edges[block], edges[block + 1])
        _choose_block(
            places[own], bits[own], threshold, ties[block], room, sent_places[sent], sent_bits[sent]
        )


@cpu.compiled
def _gather_and_choose(bits, threshold, ties, edges, sent_places, sent_bits, lo, hi):  # type: ignore[no-untyped-def]
    places, kept = np.empty(BLOCK + 1, np.uint16), np.empty(BLOCK + 1, np.uint32)
    room = np.empty(BLOCK + 1, np.uint16), np.empty(BLOCK + 1, np.uint32)
    flags = np.empty(_FLAGS, np.uint8)
    words = flags.view(np.uint64)
    for block in range(lo, hi):
        part, sent = (
            bits[block * BLOCK : min((block + 1) * BLOCK, bits.size)],
            slice(edges[block], edges[block + 1]),
        )
        floor = threshold if ties[block] else threshold + _ONE
        found = _gather_block(part, floor, False, flags, words, places, kept, 0, BLOCK)
        _choose_block(
            places[:found], kept[:found], threshold, ties[block], room, sent_places[sent], sent_bits[sent]
        )


@cpu.compiled
def _scatter(edges, places, chosen, out, lo, hi):  # type: ignore[no-untyped-def]
    for block in range(lo, hi):
        part = out[block * BLOCK : min((block + 1) * BLOCK, out.size)]
        part[:] = 0
        for i in range(edges[block], edges[block + 1]):
            if places[i] < part.size:
                part[places[i]] = chosen[i]


@cpu.compiled
def _accumulate(edges, places, chosen, factor, total, lo, hi):  # type: ignore[no-untyped-def]
    for block in range(lo, hi):
        part = total[block * BLOCK : min((block + 1) * BLOCK, total.size)]
        for i in range(edges[block], edges[block + 1]):
            if places[i] < part.size:
                part[places[i]] += factor * chosen[i]


@cpu.compiled
def _clear(edges, places, out, lo, hi):  # type: ignore[no-untyped-def]
    for block in range(lo, hi):
        part = out[block * BLOCK : min((block + 1) * BLOCK, out.size)]
        for i in range(edges[block], edges[block + 1]):
            if places[i] < part.size:
                part[places[i]] = 0


# --- launchers ----------------------------------------------------------------------------------------------


def encode(values: torch.Tensor, wire: torch.Tensor, sent: int, dtype: torch.dtype) -> None:
    """Write the `sent` largest of flat float32 `values` to `wire`, rounded to `dtype`."""
    if values.is_cuda:
        encode_reference(values, wire, sent, dtype)
        return
    counts, places, target = split(wire, values.numel(), sent, dtype)
    chosen = target if dtype is torch.float32 else torch.empty(sent, device="cpu")
    bits = values.numpy().view(np.uint32)
    counts.numpy()[:] = _encode(bits, places.numpy(), chosen.numpy().view(np.uint32))
    if chosen is not target:
        target.copy_(chosen)


def _encode(bits: Array, places: Array, chosen: Array) -> Array:
    """Write the places and bits of the largest; returns their number in each block."""
    sent, counts = places.size, np.zeros(blocks_of(bits.size), np.int64)
    above, equal = np.empty((2, counts.size), np.int64)
    floor, room = _floor(bits, sent)
    dense = room > bits.size // 8
    parts = cpu.spread(_gather, counts.size, bits.nbytes, bits, floor, dense, room, counts)
    found, kept = (parts[0][i] if len(parts) == 1 else np.concatenate([p[i] for p in parts]) for i in (0, 1))
    complete = all(part[2] for part in parts)
    trusted = complete and sent <= kept.size
    source, starts = (kept, _edges(counts)) if trusted else (bits, np.arange(counts.size + 1) * BLOCK)
    few = complete and not trusted and floor == _ONE  # fewer values are non-zero than are sent
    threshold = np.uint32(0) if few else _kth_largest(source, sent)
    cpu.spread(_tally, counts.size, source.nbytes, source, starts, threshold, above, equal)
    ties = np.clip(sent - above.sum() - (np.cumsum(equal) - equal), 0, equal)
    edges = _edges(above + ties)
    if trusted:
        target = (threshold, ties, edges, places, chosen)
        cpu.spread(_choose, counts.size, kept.nbytes, found, kept, starts, *target)
    else:
        cpu.spread(_gather_and_choose, counts.size, bits.nbytes, bits, threshold, ties, edges, places, chosen)
    sent_of_each: Array = above + ties
    return sent_of_each


def _floor(bits: Array, sent: int) -> tuple[np.uint32, int]:
    """Return a magnitude that at least `sent` values almost certainly reach, and room for these values."""
    lines = min(bits.size // 1024, _MOST_LINES)
    if lines < 16:  # no more values than a sample
        return _kth_largest(bits, sent), bits.size
    sample = np.empty(lines * _LINE, np.uint32)
    cpu.spread(_sample, lines, sample.nbytes, bits, lines, sample)
    expected = sent * sample.size / bits.size
    rank = math.ceil(expected + 6 * math.sqrt(expected) + 6)  # six sigma of a sample's variation
    if rank >= sample.size:
        return np.uint32(0), bits.size
    room = min(bits.size, 4096 + 2 * rank * bits.size // sample.size)
    return max(_kth_largest(sample, rank), _ONE), room


def _kth_largest(bits: Array, rank: int) -> np.uint32:
    """Return the magnitude that `rank` values reach (more if some are equal), by radix select."""
    prefix, above = 0, 31
    for shift, width in _DIGITS:
        arguments = (np.uint32(prefix), np.uint32(above), np.uint32(shift), np.uint32(width))
        counts = np.stack(cpu.spread(_histogram, bits.size, bits.nbytes, bits, *arguments))
        reached = counts.sum(0)[::-1].cumsum()
        turn = int(np.searchsorted(reached, rank))
        digit = _BUCKETS - 1 - turn
        rank -= int(reached[turn - 1]) if turn else 0
        prefix, above = prefix << width | digit, shift
    kth: np.uint32 = np.uint32(prefix)
    return kth


def _edges(counts: Array) -> Array:
    edges = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges


def decode(wire: torch.Tensor, out: torch.Tensor, sent: int, dtype: torch.dtype) -> None:
    """Overwrite flat float32 `out` with the values of a payload."""
    if out.is_cuda:
        *_, chosen = split(wire, out.numel(), sent, dtype)
        out.zero_()
        out[indices_reference(wire, out.numel(), sent, dtype)] = chosen.float()
        return
    cpu.spread(_scatter, blocks_of(out.numel()), out.nbytes, *_sent(wire, out, sent, dtype), out.numpy())


def accumulate(wire: torch.Tensor, total: torch.Tensor, factor: float, sent: int, dtype: torch.dtype) -> None:
    """Add `factor` times the values of a payload to flat float32 `total`, only at their positions."""
    if total.is_cuda:
        *_, chosen = split(wire, total.numel(), sent, dtype)
        total.index_add_(0, indices_reference(wire, total.numel(), sent, dtype), chosen.float(), alpha=factor)
        return
    arrays = (*_sent(wire, total, sent, dtype), np.float32(factor), total.numpy())
    cpu.spread(_accumulate, blocks_of(total.numel()), sent * 4 * _LINE, *arrays)


def clear(wire: torch.Tensor, values: torch.Tensor, sent: int, dtype: torch.dtype) -> None:
    """Set the positions of a payload to zero in flat float32 `values`."""
    if values.is_cuda:
        values[indices_reference(wire, values.numel(), sent, dtype)] = 0
        return
    edges, places, _ = _sent(wire, values, sent, dtype)
    cpu.spread(_clear, blocks_of(values.numel()), sent * 4 * _LINE, edges, places, values.numpy())


def _sent(
    wire: torch.Tensor, values: torch.Tensor, sent: int, dtype: torch.dtype
) -> tuple[Array, Array, Array]:
    """Return the contents of a payload: start of each block's part, places, and float32 values."""
    counts, places, chosen = split(wire, values.numel(), sent, dtype)
    edges = _edges(counts.view(torch.uint32).numpy())
    if edges[-1] != sent:
        raise BackendError(f"a topk payload of {sent} values has block counts that sum to {edges[-1]}")
    return edges, places.numpy(), chosen.float().numpy()
