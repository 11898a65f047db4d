"""Changes between two versions of an array, by their bits, without loss; CPU kernels.

Both versions are flat arrays of elements of 1, 2, 4 or 8 bytes, cut into blocks of 16384. Payload, little
endian:

    header, 64 bytes | 3 uint16 for each block: changed, far, escapes | the blocks, one behind another

A block lists what changed in it: for each change, the number of unchanged elements since the change before,
in 8 bits, 255 if there are more; those larger numbers, `far` of them, in 16 bits; for each change, the step
from the old to the new value, in 4 bits, two to a byte, the first in the lower half; then the `escapes`, new
elements whose step is not among -7 to 8, as they are. Code 7 (a step of zero, which is no change) marks them.

A step is a difference of positions in the order of floats (of units in the last place, ULP): the lowest is
the NaN with the sign bit and all others set, and -0 lies just before +0. The order is a bijection of bits, so
NaN payloads and signs of zero survive, and integers may be sent in it as well. A block whose list would be
longer than its elements holds these instead, and 65535 for `changed`.

An anchor has no lists and needs no old version: behind the header are all elements as they are, or a payload
of `exp_window`. `encode` chooses it where it is shorter.

The header holds a digest of the new version, of all its bits in their order, and digests of the old version
and of itself. Up to 3 zero bytes follow, so that payloads end at a multiple of 4. There is no kernel for GPUs
yet. Arrays begin at multiples of 8 bytes, as those that torch allocates do.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from mcr_plus.errors import BackendError
from mcr_plus.kernels import cpu, exp_window
from mcr_plus.kernels.compiling import preparing
from mcr_plus.kernels.digest import (
    BLOCK,
    FACTOR,
    UNSIGNED,
    Array,
    blocks_of,
    digest,
    folded,
    hash_block,
    views,
)

HEADER: Final = 64
RAW: Final = 0xFFFF  # in place of the number of changes: the block is stored as it is
FAR: Final = 255
_FORMAT: Final = struct.Struct("<4sBBBBQQQQQQ")
_MAGIC: Final = b"mcrd"
DELTA, _DENSE, _WINDOW = 0, 1, 2
_ESCAPE: Final = np.uint64(7)
_MIDDLE: Final = np.uint64(7)  # added to a step to make it a code
_LAST: Final = np.uint64(15)
_ONE, _ZERO = np.uint64(1), np.uint64(0)
_WINDOWED: Final = {torch.float32, torch.bfloat16}
WIDTHS: Final = tuple(UNSIGNED)


@dataclass(frozen=True)
class Header:
    """What a payload says of itself. `mode`: 0 for changes, else an anchor. `nbytes`: of all of it."""

    mode: int
    width: int
    numel: int
    base: int
    target: int
    base_digest: int
    digest: int
    nbytes: int

    @property
    def is_anchor(self) -> bool:
        """Whether it can be applied whatever is held."""
        return self.mode != DELTA


def most_nbytes(numel: int, width: int) -> int:
    """The length in bytes that no payload of `numel` elements of `width` bytes exceeds, a multiple of 4."""
    return HEADER + _padded(6 * blocks_of(numel) + numel * width)


def dense_nbytes(numel: int, width: int) -> int:
    """The length of a payload that holds all elements as they are."""
    return _padded(HEADER + numel * width)


def header_of(wire: torch.Tensor) -> Header:
    """Read the header of a payload, flat uint8.

    Raises `BackendError` if it is not one, or is damaged.
    """
    raw = wire[:HEADER].numpy().tobytes()
    if len(raw) < HEADER:
        raise BackendError(f"a delta payload ends after {len(raw)} bytes, inside its header")
    magic, mode, width, _, _, numel, base, target, base_digest, digest, nbytes = _FORMAT.unpack(
        raw[: _FORMAT.size]
    )
    (own,) = struct.unpack("<Q", raw[HEADER - 8 :])
    if magic != _MAGIC or mode > _WINDOW or width not in UNSIGNED or own != _header_digest(raw):
        raise BackendError(f"the header of a delta payload is damaged: {raw.hex()}")
    return Header(mode, width, numel, base, target, base_digest, digest, nbytes)


def _header_digest(raw: bytes) -> int:
    value = 0
    for (word,) in struct.iter_unpack("<Q", raw[: HEADER - 8]):
        value = (value ^ word) * int(FACTOR) & (2**64 - 1)
        value ^= value >> 32
    return value


def put_header(target: Array, *fields: int) -> int:
    """Write a header, and the zeros at the end; returns the length of the payload with them."""
    raw = _FORMAT.pack(_MAGIC, fields[0], fields[1], 0, 0, *fields[2:])
    raw = raw.ljust(HEADER - 8, b"\0")
    target[:HEADER] = np.frombuffer(raw + struct.pack("<Q", _header_digest(raw)), np.uint8)
    nbytes, end = fields[-1], _padded(fields[-1])
    target[nbytes:end] = 0
    return end


def _padded(nbytes: int) -> int:
    return -(-nbytes // 4) * 4


# --- CPU ----------------------------------------------------------------------------------------------------


@cpu.inlined
def _order(bits, sign, top):  # type: ignore[no-untyped-def]
    """Position in the order of floats; `sign`: the highest bit, `top`: its number."""
    negative = _ZERO - (bits >> top)
    return bits ^ (sign | (negative & (sign - _ONE)))


@cpu.inlined
def _find(left, right, here, there, where):  # type: ignore[no-untyped-def]
    """Write the places of changed elements to `where`; returns their number. `left`, `right`: by words."""
    each = 8 // here.itemsize
    count = 0
    for i in range(left.size):
        if left[i] != right[i]:
            at = i * each
            for k in range(each):
                where[count] = at + k
                count += here[at + k] != there[at + k]
    for i in range(left.size * each, here.size):
        where[count] = i
        count += here[i] != there[i]
    return count


@cpu.inlined
def _put_lists(gaps, far, nibbles, escapes, body):  # type: ignore[no-untyped-def]
    """Write the lists of a block; `nibbles` has one more place, which is 0."""
    cpu.put(gaps, body)
    at = gaps.size
    for i in range(far.size):
        body[at] = np.uint8(far[i] & np.uint16(255))
        body[at + 1] = np.uint8(far[i] >> np.uint16(8))
        at += 2
    for i in range((gaps.size + 1) // 2):
        body[at + i] = nibbles[2 * i] | np.uint8(nibbles[2 * i + 1] << np.uint8(4))
    at += (gaps.size + 1) // 2
    for i in range(escapes.size):
        value = np.uint64(escapes[i])
        for k in range(escapes.itemsize):
            body[at] = np.uint8(value >> np.uint64(8 * k) & np.uint64(255))
            at += 1


@cpu.compiled
def _encode(raw, words, new, old_words, old, heads, bodies, lengths, hashes, update, lo, hi):  # type: ignore[no-untyped-def]
    """List the changes of blocks, each at its place in `bodies`; writes them to `old` if `update`.

    `raw`: the bytes of `new`, `words`: those that are whole, by 8.
    """
    width = new.itemsize
    sign, top = _ONE << np.uint64(8 * width - 1), np.uint64(8 * width - 1)
    full = sign | (sign - _ONE)
    where = np.empty(BLOCK + 8, np.int32)
    gaps, nibbles = np.empty(BLOCK, np.uint8), np.empty(BLOCK + 1, np.uint8)
    far, escapes = np.empty(BLOCK, np.uint16), np.empty(BLOCK, new.dtype)
    for block in range(lo, hi):
        first = block * BLOCK
        last = min(first + BLOCK, new.size)
        here, there = new[first:last], old[first:last]
        begin, end = first * width // 8, last * width // 8
        left = words[begin:end]
        count = _find(left, old_words[begin:end], here, there, where)
        before, fars, escaped = -1, 0, 0
        for i in range(count):
            at = where[i]
            gap = at - before - 1
            before = at
            gaps[i] = min(gap, FAR)
            if gap >= FAR:
                far[fars] = gap
                fars += 1
            value = here[at]
            code = _order(np.uint64(value), sign, top) - _order(np.uint64(there[at]), sign, top) + _MIDDLE
            code &= full
            if code > _LAST:
                code = _ESCAPE
                escapes[escaped] = value
                escaped += 1
            nibbles[i] = np.uint8(code)
            if update:
                there[at] = value
        nibbles[count] = 0
        hashes[block] = hash_block(left, raw[end * 8 : last * width])
        body = bodies[first * width : last * width]
        length = count + 2 * fars + (count + 1) // 2 + escaped * width
        if length >= body.size:
            cpu.put(raw[first * width : last * width], body)
            count, fars, escaped, length = RAW, 0, 0, body.size
        else:
            _put_lists(gaps[:count], far[:fars], nibbles, escapes[:escaped], body)
        heads[block, 0], heads[block, 1], heads[block, 2] = count, fars, escaped
        lengths[block] = length


@cpu.compiled
def _compact(bodies, lengths, step):  # type: ignore[no-untyped-def]
    """Move the lists of blocks together; returns their length."""
    at = np.int64(0)
    for block in range(lengths.size):
        begin = block * step
        if begin != at:
            for i in range(lengths[block]):
                bodies[at + i] = bodies[begin + i]
        at += lengths[block]
    return at


@cpu.compiled
def _apply(heads, body, starts, raw, words, out, hashes, lo, hi):  # type: ignore[no-untyped-def]
    """Apply the lists of blocks to `out`; returns how many contradict themselves. Writes nothing outside."""
    width = out.itemsize
    sign, top = _ONE << np.uint64(8 * width - 1), np.uint64(8 * width - 1)
    full = sign | (sign - _ONE)
    wrong = 0
    for block in range(lo, hi):
        first = block * BLOCK
        last = min(first + BLOCK, out.size)
        count, fars = np.int64(heads[block, 0]), np.int64(heads[block, 1])
        lists = body[starts[block] : starts[block + 1]]
        if count == RAW:
            cpu.put(lists, raw[first * width : last * width])
        else:
            target = out[first:last]
            far_at = count
            nibble_at = far_at + 2 * fars
            escape_at = nibble_at + (count + 1) // 2
            at, is_wrong = -1, False
            for i in range(count):
                gap = np.int64(lists[i])
                if gap == FAR:
                    if far_at + 2 > count + 2 * fars:
                        is_wrong = True
                        break
                    gap = np.int64(lists[far_at]) | np.int64(lists[far_at + 1]) << 8
                    far_at += 2
                at += gap + 1
                if at >= target.size:
                    is_wrong = True
                    break
                code = np.uint64(lists[nibble_at + i // 2] >> np.uint8(4 * (i % 2))) & _LAST
                if code == _ESCAPE:
                    if escape_at + width > lists.size:
                        is_wrong = True
                        break
                    value = _ZERO
                    for k in range(width):
                        value |= np.uint64(lists[escape_at + k]) << np.uint64(8 * k)
                    escape_at += width
                else:
                    value = (_order(np.uint64(target[at]), sign, top) + code - _MIDDLE) & full
                    # The inverse of the order: the highest bit is set where the sign was not.
                    value ^= sign | ((value >> top) - _ONE) & (sign - _ONE)
                target[at] = value
            wrong += is_wrong or far_at != count + 2 * fars or escape_at != lists.size
        end = last * width // 8
        hashes[block] = hash_block(words[first * width // 8 : end], raw[end * 8 : last * width])
    return wrong


def prepare(width: int) -> None:
    """Compile the kernels for elements of `width` bytes, or load them from disk."""
    if width in _prepared:
        return
    with preparing(f"delta of {width} byte{'s' * (width > 1)}"):
        old = torch.zeros(600, dtype=_DTYPES[width])
        new, wire = old.clone(), torch.empty(most_nbytes(600, width), dtype=torch.uint8)
        new[::100] = 1
        apply(wire[: encode(new, old, wire, (0, 1), digest(old))], old)
        apply(wire[: encode_anchor(new, wire, 1)], old)
    _prepared.add(width)


_prepared: set[int] = set()
_DTYPES: Final = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}

# --- launchers ----------------------------------------------------------------------------------------------


def encode(
    values: torch.Tensor,
    base: torch.Tensor,
    wire: torch.Tensor,
    versions: tuple[int, int],
    base_digest: int,
    *,
    update: bool = False,
) -> int:
    """Write the payload that turns `base` into `values` to `wire`; returns its length in bytes.

    Args:
        values: flat and contiguous, any dtype of 1, 2, 4 or 8 bytes.
        base: of the same dtype and size; made equal to `values` if `update`.
        wire: flat uint8, at least `most_nbytes` long.
        versions: of `base` and of `values`.
        base_digest: of `base`.
        update: whether `base` is to hold `values` afterwards.
    """
    raw, words, new = views(values)
    _, old_words, old = views(base)
    width, blocks, target = new.itemsize, blocks_of(new.size), wire.numpy()
    begin = HEADER + 6 * blocks
    heads = target[HEADER:begin].view(np.uint16).reshape(blocks, 3)
    lengths, hashes = np.empty(blocks, np.int64), np.empty(blocks, np.uint64)
    body = target[begin : begin + raw.size]
    found = 0
    if blocks:
        parts = (raw, words, new, old_words, old, heads, body, lengths, hashes, update)
        cpu.spread(_encode, blocks, raw.nbytes, *parts)
        found = int(_compact(body, lengths, BLOCK * width))
    result = folded(hashes, new)
    if found >= raw.size // 2:
        shorter = _anchor(values, wire, begin + found, versions[1], result)
        if shorter is not None:
            return shorter
    return put_header(target, DELTA, width, new.size, *versions, base_digest, result, begin + found)


def encode_anchor(values: torch.Tensor, wire: torch.Tensor, version: int, *, windowed: bool = True) -> int:
    """Write a payload of all `values`, which needs no base, to `wire`; else as `encode`.

    Without `windowed`, its length is `dense_nbytes`, whatever the values.
    """
    written = _anchor(values, wire, None, version, digest(values), windowed)
    assert written is not None
    return written


def _anchor(
    values: torch.Tensor,
    wire: torch.Tensor,
    most: int | None,
    version: int,
    result: int,
    windowed: bool = True,
) -> int | None:
    """Write an anchor if it is shorter than `most`; returns its length, else None."""
    raw, _, bits = views(values)
    target, mode, body = wire.numpy(), _DENSE, raw
    if windowed and values.dtype in _WINDOWED and bits.size >= 2 * exp_window.BLOCK:
        # Zeros: bytes between its sections are left as they are.
        window = torch.zeros(exp_window.most_nbytes(bits.size, values.dtype), dtype=torch.uint8)
        packed = window[: exp_window.encode(values, window)].numpy()
        if packed.size < raw.size:
            mode, body = _WINDOW, packed
    nbytes = HEADER + body.size
    if most is not None and nbytes >= most:
        return None
    target[HEADER:nbytes] = body
    return put_header(target, mode, bits.itemsize, bits.size, 0, version, 0, result, nbytes)


def apply(wire: torch.Tensor, out: torch.Tensor) -> Header:
    """Turn flat `out`, which holds the base of a payload, into its target. Returns the payload's header.

    `wire` may be longer than the payload. The caller compares the base before, see `follow`. Raises
    `BackendError` if the payload cannot be one for as many elements, or if the digest of the result is not
    the one that it names; `out` is then in an unknown state.
    """
    head = header_of(wire)
    raw, words, bits = views(out)
    is_short = not HEADER <= head.nbytes <= wire.numel()
    if is_short or (head.width, head.numel) != (bits.itemsize, bits.size):
        raise BackendError(
            f"a delta payload of {wire.numel()} bytes says that it has {head.nbytes}, for {head.numel} "
            f"elements of {head.width} bytes; expected {bits.size} of {bits.itemsize}"
        )
    found = _apply_body(head, wire[HEADER : head.nbytes], out, raw, words, bits)
    if found != head.digest:
        raise BackendError(
            f"version {head.target} of {bits.size} elements was not received as it was sent: its digest is "
            f"{found:016x}, expected {head.digest:016x}"
        )
    return head


def follow(head: Header, version: int, digest: int | None) -> None:
    """Check that a payload follows on `version` with this digest, None if what is held is not usable.

    Raises `BackendError` if it is for another base, or leads to a version that is no newer.
    """
    if head.target <= version:
        raise BackendError(f"version {head.target} of the weights came after version {version}")
    if head.is_anchor or (head.base == version and head.base_digest == digest):
        return
    known = "no usable weights are held" if digest is None else f"version {version} ({digest:016x}) is held"
    raise BackendError(
        f"changes from version {head.base} ({head.base_digest:016x}) to {head.target} of the weights came, "
        f"but {known}"
    )


def changed(wire: torch.Tensor) -> int:
    """Number of changed elements that a payload lists; of what it holds whole, all elements."""
    head = header_of(wire)
    if head.is_anchor:
        return head.numel
    blocks = blocks_of(head.numel)
    counts = np.frombuffer(wire[HEADER : HEADER + 6 * blocks].numpy().tobytes(), np.uint16)[::3]
    counts = counts.astype(np.int64)
    if counts.size:
        last = head.numel - BLOCK * (blocks - 1)
        counts = np.where(counts == RAW, np.append(np.full(blocks - 1, BLOCK), last), counts)
    return int(counts.sum())


def _apply_body(
    head: Header, body: torch.Tensor, out: torch.Tensor, raw: Array, words: Array, bits: Array
) -> int:
    if head.mode == _WINDOW:
        if out.dtype not in _WINDOWED:
            raise BackendError(f"a delta payload holds float32 or bfloat16 values, not {out.dtype}")
        if body.data_ptr() % 4:
            body = body.clone()
        exp_window.decode(body, out)
        return digest(out)
    source = body.numpy()
    if head.mode == _DENSE:
        if source.size != raw.size:
            raise BackendError(f"a delta payload has {source.size} bytes of values, expected {raw.size}")
        raw[:] = source
        return digest(out)
    blocks = blocks_of(bits.size)
    lists = source[6 * blocks :]
    if source.size < 6 * blocks:
        raise BackendError(f"a delta payload ends after {source.size} bytes, before its {blocks} blocks")
    heads = np.frombuffer(source[: 6 * blocks].tobytes(), np.uint16).reshape(blocks, 3)
    counts, far, escapes = heads.astype(np.int64).T
    sizes = np.full(blocks, BLOCK, np.int64)
    if blocks:
        sizes[-1] = bits.size - BLOCK * (blocks - 1)
    raws = counts == RAW
    if ((counts > sizes) & ~raws | (far > counts) | (escapes > counts)).any():
        raise BackendError("a delta payload lists more changes than a block has elements")
    width = bits.itemsize
    lengths = np.where(raws, sizes * width, counts + 2 * far + (counts + 1) // 2 + escapes * width)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    if starts[-1] != lists.size:
        raise BackendError(
            f"a delta payload has {lists.size} bytes of changes, its blocks say {int(starts[-1])}"
        )
    hashes = np.empty(blocks, np.uint64)
    if blocks:
        wrong = sum(cpu.spread(_apply, blocks, raw.nbytes, heads, lists, starts, raw, words, bits, hashes))
        if wrong:
            raise BackendError(f"a delta payload contradicts itself in {wrong} of {blocks} blocks")
    return folded(hashes, bits)
