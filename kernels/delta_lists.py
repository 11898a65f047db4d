"""Lists of changes of `kernels/delta.py`: CPU kernels that write and apply lists block by block."""

from __future__ import annotations

from typing import Final

import numpy as np

from mcr_plus.kernels import cpu
from mcr_plus.kernels.digest import BLOCK, block_hash

RAW: Final = 0xFFFF  # instead of the number of changes: the block is stored unencoded
HEAD: Final = 4
"""Bytes of what is said of each block before all blocks."""
_SEVEN, _EIGHT, _HALF, _LOWER = np.uint64(7), np.uint64(8), np.uint64(32), np.uint64(2**32 - 1)
_ONE, _ZERO = np.uint64(1), np.uint64(0)
_GATHER: Final = np.uint64(0x0102040810204080)
_MANY: Final = 32
"""Changes of a block from which on it is read once in order beforehand."""
_DE_BRUIJN: Final = np.uint64(0x03F79D71B4CB0A89)
"""Any 6 bits in a row are others, so its product with a power of two names the power."""
_PLACES: Final = np.zeros(64, np.uint8)
for _place in range(64):
    _PLACES[(int(_DE_BRUIJN) << _place & (2**64 - 1)) >> 58] = _place


@cpu.embedded
def _order(bits, sign, top):  # type: ignore[no-untyped-def]
    """Return the position in the order of floats. `sign`: the highest bit. `top`: the number of this bit."""
    negative = _ZERO - (bits >> top)
    return bits ^ (sign | (negative & (sign - _ONE)))


@cpu.linked
def _compare(here, there, flags):  # type: ignore[no-untyped-def]
    """Write a flag (changed) for each element, and zeros up to a multiple of 64."""
    size = here.size
    for i in range(size):
        flags[i] = np.uint8(here[i] != there[i])
    for i in range(size, -(-size // 64) * 64):
        flags[i] = np.uint8(0)


@cpu.linked
def _find(size, words, where):  # type: ignore[no-untyped-def]
    """Write the places of changed elements to `where`; returns the number of changes.

    `words`: the flags of `_compare`, eight per word. The flags of 64 elements become the bits of one word.
    """
    count = 0
    for group in range(-(-size // 64)):
        bits = _ZERO
        for k in range(8):  # the multiplication collects the 8 flags of a word in the highest byte
            bits |= (words[8 * group + k] * _GATHER) >> np.uint64(56) << np.uint64(8 * k)
        while bits != _ZERO:
            where[count] = 64 * group + _lowest(bits)
            count += 1
            bits &= bits - _ONE
    return count


@cpu.embedded
def _step(here, there, where, steps, values, update):  # type: ignore[no-untyped-def]
    """Write the step and the new value of each changed element; also to `there` if `update`."""
    sign, top = _ONE << np.uint64(8 * here.itemsize - 1), np.uint64(8 * here.itemsize - 1)
    full = sign | (sign - _ONE)
    for i in range(where.size):
        at = where[i]
        value = here[at]
        steps[i] = _order(np.uint64(value), sign, top) - _order(np.uint64(there[at]), sign, top) & full
        values[i] = value
        if update:
            there[at] = value


@cpu.embedded
def _lowest(bits):  # type: ignore[no-untyped-def]
    """Return the number of the lowest set bit (Leiserson, Prokop and Randall 1998)."""
    return np.int64(_PLACES[np.int64(((bits & (_ZERO - bits)) * _DE_BRUIJN) >> np.uint64(58))])


@cpu.linked
def _low_bits(size, count):  # type: ignore[no-untyped-def]
    """Return the number of low bits stored per gap: about the logarithm of 0.69 times the mean gap."""
    bits = 0
    if count:
        mean = (size - count) * 11 // (16 * count)
        while mean >= 2:
            mean >>= 1
            bits += 1
    return bits


@cpu.linked
def _put_words(words, nbytes, body, at):  # type: ignore[no-untyped-def]
    """Write the first `nbytes` bytes of 32-bit words at `at`; returns the place after them."""
    for i in range(nbytes // 4):
        value = words[i]
        body[at] = np.uint8(value & np.uint32(255))
        body[at + 1] = np.uint8(value >> np.uint32(8) & np.uint32(255))
        body[at + 2] = np.uint8(value >> np.uint32(16) & np.uint32(255))
        body[at + 3] = np.uint8(value >> np.uint32(24))
        at += 4
    for k in range(nbytes % 4):
        body[at] = np.uint8(words[nbytes // 4] >> np.uint32(8 * k) & np.uint32(255))
        at += 1
    return at


@cpu.linked
def _put_values(values, width, body, at):  # type: ignore[no-untyped-def]
    """Write the first `width` bytes of each value at `at`; returns the place after them."""
    for i in range(values.size):
        for k in range(width):
            body[at] = np.uint8(values[i] >> np.uint64(8 * k) & np.uint64(255))
            at += 1
    return at


@cpu.embedded
def _write_list(where, steps, values, width, low, spaces, body):  # type: ignore[no-untyped-def]
    """Write the list of a block's changes to `body`; returns the length, even if there is no room.

    `spaces`: memory for the parts; the last space holds zeros before and after the call.
    """
    lows, classes, nibbles, escapes, ones = spaces
    full = (_ONE << np.uint64(8 * width - 1)) - _ONE | _ONE << np.uint64(8 * width - 1)
    not_two, mask = ~np.uint64(2), np.uint32((1 << low) - 1)
    before, bit, low_bit, short, escaped, count = -1, 0, 0, 0, 0, where.size
    part, kinds = _ZERO, np.uint32(0)
    for i in range(count):
        at = where[i]
        gap = at - before - 1
        before = at
        bit += gap >> low
        ones[bit >> 5] |= np.uint32(1) << np.uint32(bit & 31)
        bit += 1
        part |= np.uint64(np.uint32(gap) & mask) << np.uint64(low_bit & 31)
        if (low_bit & 31) + low >= 32:
            lows[low_bit >> 5] = np.uint32(part & _LOWER)
            part >>= _HALF
        low_bit += low
        step = steps[i]
        kind = np.uint32(step == full)
        if (step + _ONE) & full & not_two != _ZERO:  # neither 1 nor -1, tested by one branch
            up, down = step - np.uint64(2), (_ZERO - step) - np.uint64(2) & full
            if up < _EIGHT:
                kind = np.uint32(2)
                nibbles[short] = np.uint8(up)
                short += 1
            elif down < _EIGHT:
                kind = np.uint32(2)
                nibbles[short] = np.uint8(down | _EIGHT)
                short += 1
            else:
                kind = np.uint32(3)
                escapes[escaped] = values[i]
                escaped += 1
        kinds |= kind << np.uint32(2 * (i & 15))
        if i & 15 == 15:
            classes[i >> 4] = kinds
            kinds = np.uint32(0)
    lows[low_bit >> 5] = np.uint32(part & _LOWER)
    classes[count >> 4] = kinds
    nibbles[short] = 0
    sizes = (low_bit + 7) // 8, (count + 3) // 4, (short + 1) // 2, (bit + 7) // 8
    length = sizes[0] + sizes[1] + sizes[2] + escaped * width + sizes[3]
    length += length & 1
    if length < body.size:
        at = _put_words(lows, sizes[0], body, 0)
        at = _put_words(classes, sizes[1], body, at)
        for i in range(sizes[2]):
            body[at + i] = nibbles[2 * i] | np.uint8(nibbles[2 * i + 1] << np.uint8(4))
        at = _put_values(escapes[:escaped], width, body, at + sizes[2])
        at = _put_words(ones, sizes[3], body, at)
        if at < length:
            body[at] = np.uint8(0)
    for i in range((bit >> 5) + 1):
        ones[i] = 0
    return length


@cpu.linked
def _spaces():  # type: ignore[no-untyped-def]
    """Return memory for steps, new values, flags and places of changes, and for the parts of a list."""
    steps, values, flags = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint8)
    words = np.zeros(BLOCK // 4 + 1, np.uint32)
    ones, lows = words[: BLOCK // 8], words[BLOCK // 8 : BLOCK // 8 + BLOCK // 16]
    classes, nibbles = words[BLOCK // 8 + BLOCK // 16 :], np.empty(BLOCK + 1, np.uint8)
    parts = lows, classes, nibbles, np.empty(BLOCK, np.uint64), ones
    return steps, values, flags, np.empty(BLOCK + 64, np.int32), parts


@cpu.compiled
def list_blocks(raw, words, new, old, heads, bodies, lengths, hashes, update, lo, hi):  # type: ignore[no-untyped-def]
    """Write the lists of changes of blocks to their places in `bodies`; with `update`, also change `old`.

    `raw`: the bytes of `new`. `words`: the whole 8-byte words of `new`.
    """
    width = new.itemsize
    steps, values, flags, where, spaces = _spaces()
    for block in range(lo, hi):
        first = block * BLOCK
        last = min(first + BLOCK, new.size)
        here, there, body = new[first:last], old[first:last], bodies[first * width : last * width]
        _compare(here, there, flags)
        count = _find(here.size, flags.view(np.uint64), where)
        _step(here, there, where[:count], steps, values, update)
        end = last * width // 8
        hashes[block] = block_hash(words[first * width // 8 : end], raw[end * 8 : last * width])
        length = _write_list(where[:count], steps, values, width, _low_bits(here.size, count), spaces, body)
        if length < body.size:
            heads[block, 0], heads[block, 1] = count, length // 2
            lengths[block] = length
        else:
            cpu.put(raw[first * width : last * width], body)
            heads[block, 0], heads[block, 1] = RAW, 0
            lengths[block] = body.size


@cpu.compiled
def compact(bodies, lengths, step):  # type: ignore[no-untyped-def]
    """Make the lists of blocks contiguous; returns the total length."""
    at = np.int64(0)
    for block in range(lengths.size):
        begin = block * step
        if begin != at:
            for i in range(lengths[block]):
                bodies[at + i] = bodies[begin + i]
        at += lengths[block]
    return at


@cpu.linked
def _take(lists, begin, nbytes, space):  # type: ignore[no-untyped-def]
    """Copy bytes of a list to the beginning of `space`, then zeros up to a multiple of 8, and 8 more."""
    cpu.put(lists[begin : begin + nbytes], space)
    for i in range(nbytes, (nbytes + 7) // 8 * 8 + 8):
        space[i] = np.uint8(0)


@cpu.embedded
def _find_places(lists, count, low, size, spaces, one_at, where):  # type: ignore[no-untyped-def]
    """Write the places of `count` changes to `where`; returns True if the list is inconsistent."""
    low_bytes, one_bytes = spaces
    low_words, one_words = low_bytes.view(np.uint32), one_bytes.view(np.uint64)
    _take(lists, 0, (count * low + 7) // 8, low_bytes)
    _take(lists, one_at, lists.size - one_at, one_bytes)
    last_word = (lists.size - one_at + 7) // 8
    mask = (_ONE << np.uint64(low)) - _ONE
    at, word, rest, before = -1, 0, one_words[0], 0
    for i in range(count):
        while rest == _ZERO:
            word += 1
            if word >= last_word:
                return True
            rest = one_words[word]
        quotients = 64 * word + _lowest(rest) - i  # of all gaps up to the current one
        rest &= rest - _ONE
        bit = i * low
        part = np.uint64(low_words[bit >> 5]) | np.uint64(low_words[(bit >> 5) + 1]) << _HALF
        gap = (quotients - before) << low | np.int64(part >> np.uint64(bit & 31) & mask)
        before = quotients
        at += gap + 1
        if at >= size:
            return True
        where[i] = at
    while rest == _ZERO and word + 1 < last_word:
        word += 1
        rest = one_words[word]
    return rest != _ZERO


@cpu.embedded
def _read_list(lists, count, size, width, spaces, where, steps, far, values):  # type: ignore[no-untyped-def]
    """Read the list of `count` changes of a block of `size` elements.

    Writes the places of the changes, and the step of each element, or 0 for an element with a stored value.
    The indices and values of the latter go to `far` and `values`. Returns their number, or -1 if the list is
    inconsistent.
    """
    low = _low_bits(size, count)
    class_at = (count * low + 7) // 8
    short_at = class_at + (count + 3) // 4
    if short_at > lists.size:
        return -1
    short, escaped = 0, 0
    for i in range(count):
        kind = lists[class_at + i // 4] >> np.uint8(2 * (i % 4)) & np.uint8(3)
        short += kind == 2
        escaped += kind == 3
    escape_at = short_at + (short + 1) // 2
    one_at = escape_at + escaped * width
    if one_at >= lists.size or _find_places(lists, count, low, size, spaces, one_at, where):
        return -1
    short, escaped = 0, 0
    for i in range(count):
        kind = lists[class_at + i // 4] >> np.uint8(2 * (i % 4)) & np.uint8(3)
        step = _ONE - np.uint64(2) * np.uint64(kind)
        if kind == 2:
            code = np.uint64(lists[short_at + short // 2] >> np.uint8(4 * (short % 2)))
            step = (code & _SEVEN) + np.uint64(2)
            step = _ZERO - step if code & _EIGHT else step
            short += 1
        if kind == 3:
            step = value = _ZERO
            for k in range(width):
                value |= np.uint64(lists[escape_at + k]) << np.uint64(8 * k)
            escape_at += width
            far[escaped], values[escaped] = i, value
            escaped += 1
        steps[i] = step
    return escaped


@cpu.embedded
def _move(target, where, steps, far, values):  # type: ignore[no-untyped-def]
    sign, top = _ONE << np.uint64(8 * target.itemsize - 1), np.uint64(8 * target.itemsize - 1)
    full = sign | (sign - _ONE)
    for i in range(where.size):
        value = (_order(np.uint64(target[where[i]]), sign, top) + steps[i]) & full
        # Invert the order: the highest bit is set where the sign was not set.
        target[where[i]] = value ^ (sign | ((value >> top) - _ONE) & (sign - _ONE))
    for i in range(far.size):
        target[where[far[i]]] = values[i]


@cpu.linked
def _touch(words, begin, end):  # type: ignore[no-untyped-def]
    """Read words once in order, so that the processor prefetches them."""
    touched = _ZERO
    for i in range(begin, end, 8):
        touched |= words[i]
    return touched


@cpu.compiled
def apply_blocks(heads, body, starts, raw, words, out, hashes, lo, hi):  # type: ignore[no-untyped-def]
    """Apply the lists of blocks to `out`; returns the number of inconsistent lists. Writes only to `out`."""
    width = out.itemsize
    steps, values = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    where, far = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    spaces = np.empty(BLOCK * 8 + 16, np.uint8), np.empty(BLOCK * 8 + 16, np.uint8)
    wrong = 0
    for block in range(lo, hi):
        first = block * BLOCK
        last = min(first + BLOCK, out.size)
        begin, end = first * width // 8, last * width // 8
        count, target = np.int64(heads[block, 0]), out[first:last]
        lists = body[starts[block] : starts[block + 1]]
        if count == RAW:
            cpu.put(lists, raw[first * width : last * width])
        elif count:
            if count >= _MANY:  # before random accesses
                hashes[block] = _touch(words, begin, end)
            escaped = _read_list(lists, count, target.size, width, spaces, where, steps, far, values)
            if escaped >= 0:
                _move(target, where[:count], steps, far[:escaped], values)
            wrong += escaped < 0
        else:
            wrong += lists.size != 0
        hashes[block] = block_hash(words[begin:end], raw[end * 8 : last * width])
    return wrong
