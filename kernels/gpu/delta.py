"""Lists of `mcr_plus.kernels.delta_lists` in Triton, with the same bytes.

A program processes one block. Changes are first collected in rows of scratch memory, one row per block, so
that later kernels process only changes. Values are the bits of elements, as integers of 1, 2, 4 or 8 bytes.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from mcr_plus.kernels.delta_lists import RAW
from mcr_plus.kernels.digest import BLOCK, blocks_of

_BLOCK: Final = tl.constexpr(BLOCK)
_PIECE: Final = tl.constexpr(4096)  # bytes that a program moves at a time
_SPACE: Final = 2 * BLOCK  # bits of quotients: more than any list has


@triton.jit
def _wide(bits, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return integers as int64, unsigned unless they have 8 bytes."""
    wide = bits.to(tl.int64)
    return wide if width == 8 else wide & ((1 << (8 * width)) - 1)


@triton.jit
def _order(bits, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the positions of values in the order of floats."""
    if width == 8:
        order = tl.where(bits < 0, ~bits, bits ^ (-9223372036854775807 - 1))
    else:
        sign: tl.constexpr = 1 << (8 * width - 1)
        order = tl.where((bits & sign) != 0, bits ^ (2 * sign - 1), bits ^ sign)
    return order


@triton.jit
def _bits_of(order, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Invert `_order`; positions are modulo their number."""
    if width == 8:
        bits = tl.where(order < 0, order ^ (-9223372036854775807 - 1), ~order)
    else:
        sign: tl.constexpr = 1 << (8 * width - 1)
        place = order & (2 * sign - 1)
        bits = tl.where((place & sign) != 0, place ^ sign, place ^ (2 * sign - 1))
    return bits


@triton.jit
def _low_bits(size, count):  # type: ignore[no-untyped-def]
    """Return the number of low bits stored per gap."""
    mean = (size - count) * 11 // (16 * tl.maximum(count, 1))
    low = 0
    for bit in tl.static_range(1, 14):
        low += (mean >= (1 << bit)).to(tl.int32)
    return low


@triton.jit
def _find(new, old, places, counts, numel):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, _BLOCK)
    at = block * _BLOCK + lane
    inside = at < numel
    changed = (tl.load(new + at, inside, 0) != tl.load(old + at, inside, 0)).to(tl.int32)
    place = tl.cumsum(changed, 0) - 1
    tl.store(places + block * _BLOCK + place, lane, changed != 0)
    tl.store(counts + block, tl.sum(changed, 0))


@triton.jit
def _classify(  # type: ignore[no-untyped-def]
    new, old, places, counts, lows, kinds, nibbles, escapes, ones, sizes, numel, space, width: tl.constexpr
):
    """Compute the numbers in the parts of each list, and the bytes of the parts."""
    block = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + block)
    size = tl.minimum(numel - block * _BLOCK, _BLOCK).to(tl.int32)
    low = _low_bits(size, count)
    i = tl.arange(0, _BLOCK)
    row, is_one = block * _BLOCK, i < count
    at = tl.load(places + row + i, is_one, 0)
    before = tl.load(places + row + i - 1, is_one & (i > 0), -1)
    gap = tl.where(is_one, at - before - 1, 0)
    bit = tl.cumsum(gap >> low, 0) + i
    tl.store(ones + block * space + bit, tl.full([_BLOCK], 1, tl.uint8), is_one)
    tl.store(lows + row + i, gap & ((1 << low) - 1), is_one)
    given = tl.load(new + row + at, is_one, 0)
    step = _order(_wide(given, width), width)
    step -= _order(_wide(tl.load(old + row + at, is_one, 0), width), width)
    if width < 8:
        step = (step << (64 - 8 * width)) >> (64 - 8 * width)
    near = (step >= -9) & (step <= 9)
    one = (step == 1) | (step == -1)
    kind = tl.where(one, (step < 0).to(tl.int32), tl.where(near, 2, 3))
    tl.store(kinds + row + i, kind, is_one)
    short, far = (is_one & (kind == 2)).to(tl.int32), (is_one & (kind == 3)).to(tl.int32)
    code = tl.where(step < 0, -step - 2 + 8, step - 2).to(tl.int32)
    tl.store(nibbles + row + tl.cumsum(short, 0) - 1, code, short != 0)
    tl.store(escapes + row + tl.cumsum(far, 0) - 1, given, far != 0)
    last = tl.max(tl.where(is_one, bit, -1), 0)
    tl.store(sizes + block * 5, (count * low + 7) // 8)
    tl.store(sizes + block * 5 + 1, (count + 3) // 4)
    tl.store(sizes + block * 5 + 2, (tl.sum(short, 0) + 1) // 2)
    tl.store(sizes + block * 5 + 3, tl.sum(far, 0) * width)
    tl.store(sizes + block * 5 + 4, (last + 8) // 8)


@triton.jit
def _pack(numbers, counts, begins, nbytes, widths, out, row):  # type: ignore[no-untyped-def]
    """Pack each block's numbers of `widths` bits, without gaps, into bytes of `out` from `begins` on."""
    block = tl.program_id(0).to(tl.int64)
    count, begin = tl.load(counts + block), tl.load(begins + block)
    size, width = tl.load(nbytes + block).to(tl.int32), tl.load(widths + block).to(tl.int32)
    for piece in range(0, size, _PIECE):
        byte = piece + tl.arange(0, _PIECE)
        value = tl.zeros([_PIECE], tl.int32)
        for k in tl.static_range(8):
            bit = byte * 8 + k
            index = bit // width
            number = tl.load(numbers + block * row + index, (byte < size) & (index < count), 0).to(tl.int32)
            value |= (number >> (bit % width) & 1) << k
        tl.store(out + begin + byte, value.to(tl.uint8), byte < size)


@triton.jit
def _unpack(lists, begins, counts, widths, numbers, row):  # type: ignore[no-untyped-def]
    """Unpack the result of `_pack`."""
    block = tl.program_id(0).to(tl.int64)
    count, begin = tl.load(counts + block).to(tl.int32), tl.load(begins + block)
    width = tl.load(widths + block).to(tl.int32)
    for piece in range(0, count, _PIECE):
        index = piece + tl.arange(0, _PIECE)
        value = tl.zeros([_PIECE], tl.int32)
        for k in range(width):
            bit = index * width + k
            byte = tl.load(lists + begin + bit // 8, index < count, 0).to(tl.int32)
            value |= (byte >> (bit % 8) & 1) << k
        tl.store(numbers + block * row + index, value, index < count)


@triton.jit
def _copy(source, begins, target, places, nbytes):  # type: ignore[no-untyped-def]
    """Copy bytes of each block from one place to another."""
    block = tl.program_id(0).to(tl.int64)
    begin, place, size = tl.load(begins + block), tl.load(places + block), tl.load(nbytes + block)
    for piece in range(0, size, _PIECE):
        byte = piece + tl.arange(0, _PIECE)
        value = tl.load(source + begin + byte, byte < size, 0)
        tl.store(target + place + byte, value, byte < size)


@triton.jit
def _apply(  # type: ignore[no-untyped-def]
    counts, quotients, lows, kinds, nibbles, escapes, out, numel, width: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + block)
    size = tl.minimum(numel - block * _BLOCK, _BLOCK).to(tl.int32)
    low = _low_bits(size, count)
    i = tl.arange(0, _BLOCK)
    row, is_one = block * _BLOCK, i < count
    quotient = tl.load(quotients + row + i, is_one, 0)
    quotient -= tl.load(quotients + row + i - 1, is_one & (i > 0), 0)
    gap = (quotient << low) | tl.load(lows + row + i, is_one, 0)
    at = tl.cumsum(tl.where(is_one, gap + 1, 0), 0) - 1
    is_one = is_one & (at >= 0) & (at < size)
    kind = tl.load(kinds + row + i, is_one, 0)
    short, far = (is_one & (kind == 2)).to(tl.int32), (is_one & (kind == 3)).to(tl.int32)
    code = tl.load(nibbles + row + tl.cumsum(short, 0) - 1, short != 0, 0)
    further = tl.where(code >= 8, 6 - code, code + 2)
    step = tl.where(kind == 2, further, 1 - 2 * kind).to(tl.int64)
    held = _order(_wide(tl.load(out + row + at, is_one, 0), width), width)
    moved = _bits_of(held + step, width)
    given = tl.load(escapes + row + tl.cumsum(far, 0) - 1, far != 0, 0).to(tl.int64)
    tl.store(out + row + at, tl.where(far != 0, given, moved).to(out.dtype.element_ty), is_one)


@triton.jit
def _rank(flags, counts, quotients, bits, space):  # type: ignore[no-untyped-def]
    """Count the zeros before each one in a row of bits."""
    block = tl.program_id(0).to(tl.int64)
    count, size = tl.load(counts + block), tl.load(bits + block)
    bit = tl.arange(0, _BLOCK)
    flag = tl.load(flags + block * space + bit, bit < size, 0).to(tl.int32)
    rank = tl.cumsum(flag, 0) - 1
    tl.store(quotients + block * _BLOCK + rank, bit - rank, (flag != 0) & (rank < count))


def encode(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the heads (blocks × 2, int32) and the bytes of the lists of changes from flat `old` to `new`.

    Both tensors are integers of 1, 2, 4 or 8 bytes on one device, and not empty.
    """
    numel, width, blocks, device = new.numel(), new.element_size(), blocks_of(new.numel()), new.device

    def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    places, counts, sizes = numbers(blocks, BLOCK), numbers(blocks), numbers(blocks, 5)
    lows, kinds, nibbles = (numbers(blocks, BLOCK) for _ in range(3))
    escapes, ones = numbers(blocks, BLOCK, dtype=new.dtype), numbers(blocks, _SPACE, dtype=torch.uint8)
    _launch(_find, blocks, new, old, places, counts, numel)
    parts = (lows, kinds, nibbles, escapes, ones, sizes, numel, _SPACE)
    _launch(_classify, blocks, new, old, places, counts, *parts, width=width)
    elements = torch.full((blocks,), BLOCK, dtype=torch.int64, device=device)
    elements[-1] = numel - BLOCK * (blocks - 1)
    ends = sizes.to(torch.int64).cumsum(1)
    lengths = ends[:, -1] + ends[:, -1] % 2
    raw = lengths >= elements * width
    counts = counts.where(~raw, 0)
    nbytes = sizes.to(torch.int64).where(~raw[:, None], 0)
    lengths = torch.where(raw, elements * width, lengths)
    starts = lengths.cumsum(0) - lengths
    begins = starts[:, None] + ends - sizes
    lists = numbers(int(lengths.sum()), dtype=torch.uint8)
    low = _lows(elements, counts)
    bits = nbytes[:, 4] * 8
    for part, values, many, each, row in (
        (0, lows, counts, low.clamp(min=1), BLOCK),
        (1, kinds, counts, torch.full_like(low, 2), BLOCK),
        (2, nibbles, nbytes[:, 2] * 2, torch.full_like(low, 4), BLOCK),
        (4, ones, bits, torch.ones_like(low), _SPACE),
    ):
        begin, size = begins[:, part].contiguous(), nbytes[:, part].contiguous()
        _launch(_pack, blocks, values, many, begin, size, each, lists, row)
    own = torch.arange(blocks, device=device) * (BLOCK * width)
    of_escapes = nbytes[:, 3].contiguous()
    _launch(_copy, blocks, escapes.view(torch.uint8), own, lists, begins[:, 3].contiguous(), of_escapes)
    _launch(_copy, blocks, new.view(torch.uint8), own, lists, starts, lengths.where(raw, 0))
    heads = torch.stack([counts.where(~raw, RAW), (lengths // 2).where(~raw, 0).to(torch.int32)], 1)
    return heads, lists


def apply(heads: torch.Tensor, lists: torch.Tensor, out: torch.Tensor) -> None:
    """Apply the lists that `encode` has returned to flat `out`, integers as in `encode`.

    Inconsistent lists never write outside `out`; only a digest of the result detects them.
    """
    numel, width, blocks, device = out.numel(), out.element_size(), blocks_of(out.numel()), out.device
    elements = torch.full((blocks,), BLOCK, dtype=torch.int64, device=device)
    elements[-1] = numel - BLOCK * (blocks - 1)
    counts, halves = heads.to(torch.int64).unbind(1)
    raw = counts == RAW
    lengths = torch.where(raw, elements * width, 2 * halves)
    starts = lengths.cumsum(0) - lengths
    counts = counts.where(~raw, 0).clamp(max=BLOCK)
    low = _lows(elements, counts)
    lows, kinds, nibbles, quotients = (
        torch.zeros(blocks, BLOCK, dtype=torch.int32, device=device) for _ in range(4)
    )
    escapes = torch.zeros(blocks, BLOCK, dtype=out.dtype, device=device)
    flags = torch.zeros(blocks, _SPACE, dtype=torch.uint8, device=device)
    # Zeros after the lists: parts of damaged lists may extend beyond the end.
    lists = torch.nn.functional.pad(lists, (0, BLOCK * (width + 1)))
    two, four, one = (torch.full_like(low, each) for each in (2, 4, 1))
    _launch(_unpack, blocks, lists, starts, counts.where(low > 0, 0), low, lows, BLOCK)
    begins = starts + (counts * low + 7) // 8
    _launch(_unpack, blocks, lists, begins, counts, two, kinds, BLOCK)
    listed = torch.arange(BLOCK, device=device) < counts[:, None]
    short, far = ((listed & (kinds == kind)).sum(1) for kind in (2, 3))
    begins += (counts + 3) // 4
    _launch(_unpack, blocks, lists, begins, short, four, nibbles, BLOCK)
    begins += (short + 1) // 2
    own = torch.arange(blocks, device=device) * (BLOCK * width)
    _launch(_copy, blocks, lists, begins, escapes.view(torch.uint8), own, far * width)
    begins += far * width
    bits = ((starts + lengths - begins) * 8).clamp(min=0, max=BLOCK).where(counts > 0, 0)
    _launch(_unpack, blocks, lists, begins.clamp(max=lists.numel() - BLOCK), bits, one, flags, _SPACE)
    _launch(_rank, blocks, flags, counts, quotients, bits, _SPACE)
    _launch(_apply, blocks, counts, quotients, lows, kinds, nibbles, escapes, out, numel, width=width)
    _launch(_copy, blocks, lists, starts, out.view(torch.uint8), own, lengths.where(raw, 0))


def _launch(kernel: Any, blocks: int, *args: object, **constants: object) -> None:
    # The maximum number of warps: a program has a whole block, and so each thread has fewer elements.
    kernel[(blocks,)](*args, num_warps=32, **constants)


def _lows(elements: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return `_low_bits` of each block."""
    mean = (elements - counts) * 11 // (16 * counts.clamp(min=1))
    return sum((mean >= 1 << bit).to(torch.int64) for bit in range(1, 14)).where(counts > 0, 0)  # type: ignore[union-attr]
