"""Lossless encoding of the changes between two versions of an array; CPU kernels.

Both versions are flat arrays of elements of 1, 2, 4 or 8 bytes, cut into blocks of 16384. Payload, little
endian:

    header, 64 bytes | 2 uint16 for each block: changed, half the bytes of its list | the lists

A list has the following parts for a block's changes, in order; each part fills whole bytes, lowest bit first:

    low bits    of the gaps (numbers of unchanged elements since the previous change), `low` bits each
    kinds       of the steps from old to new values, 2 bits each: 1, -1, 2 to 9 either way, larger
    nibbles     of steps of 2 to 9 either way, 4 bits each: 0 to 7 for 2 to 9, 8 to 15 for -2 to -9
    elements    with larger steps, unencoded
    quotients   of the gaps: gap >> low zeros, then a one (Golomb 1966, Rice 1979)

and a zero byte if the length would be odd. `low` follows from the number of changes, so it is not stored.
With this `low`, gaps between randomly placed changes take 0.03 to 0.1 bits more than their entropy.

A step is the difference of two positions in the order of floats, in units in the last place (ULP). The lowest
position is the NaN with all bits set, and -0 is directly before +0. The order is a bijection of bits, so NaN
payloads and signs of zero survive, and integers may be encoded as well. If a block's list would not be
shorter than its elements, the payload has the elements instead, and 65535 for `changed`.

An anchor has no lists and needs no old version: the header is followed by all elements, unencoded, or by a
payload of `exp_window`. `encode` chooses an anchor if it is shorter.

The header has the version of this format, a digest of all bits of the new version, and digests of the old
version and of the header. Up to 3 zero bytes at the end make the length a multiple of 4.
`kernels/delta_lists.py` has the kernels of lists; `kernels/gpu/delta.py` and `kernels/gpu/digest.py` have the
kernels for GPUs. Payloads of arrays on a GPU are on the GPU, with the same bytes except for anchors, which
are always unencoded: `exp_window` has no kernel for GPUs. Arrays begin at multiples of 8 bytes, as torch
allocates them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from mcr_plus.errors import BackendError
from mcr_plus.kernels import cpu, exp_window
from mcr_plus.kernels.compiling import preparing
from mcr_plus.kernels.delta_lists import HEAD, RAW, apply_blocks, compact, list_blocks
from mcr_plus.kernels.digest import (
    BLOCK,
    UNSIGNED,
    Array,
    blocks_of,
    digest,
    folded,
    mixed_words,
    on_gpu,
    views,
)

HEADER: Final = 64
_FORMAT: Final = struct.Struct("<4sBBBBQQQQQQ")
_MAGIC: Final = b"mcrd"
VERSION: Final = 2
"""Of payloads and digests: increased where either changes. Version 1 folded by 32 bits, and wrote 0."""
DELTA, _DENSE, _WINDOW = 0, 1, 2
_WINDOWED: Final = {torch.float32, torch.bfloat16}
WIDTHS: Final = tuple(UNSIGNED)


@dataclass(frozen=True)
class Header:
    """Header of a payload. `mode`: 0 for changes, else an anchor. `nbytes`: length of the whole payload."""

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
        """True if the payload can be applied to any held values."""
        return self.mode != DELTA


def most_nbytes(numel: int, width: int) -> int:
    """Return the maximum length of payloads of `numel` elements of `width` bytes, a multiple of 4."""
    return HEADER + _padded(HEAD * blocks_of(numel) + numel * width)


def dense_nbytes(numel: int, width: int) -> int:
    """Return the length of a payload with all elements unencoded."""
    return _padded(HEADER + numel * width)


def header_of(wire: torch.Tensor) -> Header:
    """Read the header of a payload, flat uint8.

    Raises `BackendError` if the payload is invalid or damaged.
    """
    raw = wire[:HEADER].cpu().numpy().tobytes()
    if len(raw) < HEADER:
        raise BackendError(f"a delta payload ends after {len(raw)} bytes, inside its header")
    magic, mode, width, version, _, numel, base, target, base_digest, digest, nbytes = _FORMAT.unpack(
        raw[: _FORMAT.size]
    )
    (own,) = struct.unpack("<Q", raw[HEADER - 8 :])
    if magic == _MAGIC and version != VERSION:
        raise BackendError(
            f"a delta payload has version {version}, not {VERSION}: it is damaged, or its sender runs "
            "another version of mcr_plus"
        )
    if magic != _MAGIC or mode > _WINDOW or width not in UNSIGNED or own != _header_digest(raw):
        raise BackendError(f"the header of a delta payload is damaged: {raw.hex()}")
    return Header(mode, width, numel, base, target, base_digest, digest, nbytes)


def _header_digest(raw: bytes) -> int:
    return mixed_words(word for (word,) in struct.iter_unpack("<Q", raw[: HEADER - 8]))


def put_header(wire: torch.Tensor, *fields: int) -> int:
    """Write the header and the zeros at the end; returns the total length of the payload."""
    raw = _FORMAT.pack(_MAGIC, fields[0], fields[1], VERSION, 0, *fields[2:])
    raw = raw.ljust(HEADER - 8, b"\0")
    raw += struct.pack("<Q", _header_digest(raw))
    wire[:HEADER].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    nbytes, end = fields[-1], _padded(fields[-1])
    wire[nbytes:end].zero_()
    return end


def _padded(nbytes: int) -> int:
    return -(-nbytes // 4) * 4


def prepare(width: int) -> None:
    """Compile the kernels for elements of `width` bytes, or load them from disk."""
    if width in _prepared:
        return
    with preparing(f"delta of {width} byte{'s' * (width > 1)}"):
        old = torch.zeros(600, dtype=_DTYPES[width], device="cpu")
        new, wire = old.clone(), torch.empty(most_nbytes(600, width), dtype=torch.uint8, device="cpu")
        new[::100] = 1
        apply(wire[: encode(new, old, wire, (0, 1), digest(old))], old)
        apply(wire[: encode_anchor(new, wire, 1)], old)
    _prepared.add(width)


_prepared: set[int] = set()
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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
    """Write the payload that turns `base` into `values` to `wire`; returns the length in bytes.

    Args:
        values: flat and contiguous, any dtype of 1, 2, 4 or 8 bytes.
        base: the same dtype and size; set to `values` if `update`.
        wire: flat uint8, at least `most_nbytes` long.
        versions: version of `base`, and version of `values`.
        base_digest: digest of `base`.
        update: True to set `base` to `values`.
    """
    if on_gpu(values):
        return _encode_there(values, base, wire, versions, base_digest, update)
    raw, words, new = views(values)
    _, _, old = views(base)
    width, blocks, target = new.itemsize, blocks_of(new.size), wire.numpy()
    begin = HEADER + HEAD * blocks
    heads = target[HEADER:begin].view(np.uint16).reshape(blocks, 2)
    lengths, hashes = np.empty(blocks, np.int64), np.empty(blocks, np.uint64)
    body = target[begin : begin + raw.size]
    found = 0
    if blocks:
        parts = (raw, words, new, old, heads, body, lengths, hashes, update)
        cpu.spread(list_blocks, blocks, raw.nbytes, *parts)
        found = int(compact(body, lengths, BLOCK * width))
    result = folded(hashes, new.size, width)
    if found >= raw.size // 2:
        shorter = _anchor(values, wire, begin + found, versions[1], result)
        if shorter is not None:
            return shorter
    return put_header(wire, DELTA, width, new.size, *versions, base_digest, result, begin + found)


def encode_anchor(values: torch.Tensor, wire: torch.Tensor, version: int, *, windowed: bool = True) -> int:
    """Write a payload of all `values`, which needs no base, to `wire`; otherwise like `encode`.

    Without `windowed`, the length is `dense_nbytes` for any values.
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
    """Write an anchor and return its length, or return None if it is not shorter than `most`."""
    numel, mode, body = values.numel(), _DENSE, _bytes_of(values)
    if windowed and values.dtype in _WINDOWED and numel >= 2 * exp_window.BLOCK and not on_gpu(values):
        # Zeros, because bytes between sections are not written.
        window = torch.zeros(exp_window.most_nbytes(numel, values.dtype), dtype=torch.uint8, device="cpu")
        packed = window[: exp_window.encode(values, window)]
        if packed.numel() < body.numel():
            mode, body = _WINDOW, packed
    nbytes = HEADER + body.numel()
    if most is not None and nbytes >= most:
        return None
    wire[HEADER:nbytes].copy_(body)
    return put_header(wire, mode, values.element_size(), numel, 0, version, 0, result, nbytes)


def _encode_there(
    values: torch.Tensor,
    base: torch.Tensor,
    wire: torch.Tensor,
    versions: tuple[int, int],
    base_digest: int,
    update: bool,
) -> int:
    """Run `encode` on a GPU, and wait for the GPU to know the length of the payload."""
    numel, width, blocks = values.numel(), values.element_size(), blocks_of(values.numel())
    begin = nbytes = HEADER + HEAD * blocks
    if numel:
        heads, lists = _gpu().encode(_integers(values), _integers(base))
        nbytes += lists.numel()
        result = digest(values)
        if update:
            base.copy_(values)
        shorter = _anchor(values, wire, nbytes, versions[1], result)
        if shorter is not None:
            return shorter
        wire[HEADER:begin].view(torch.int16).copy_(heads.view(-1))  # modulo 2**16
        wire[begin:nbytes].copy_(lists)
    else:
        result = digest(values)
    return put_header(wire, DELTA, width, numel, *versions, base_digest, result, nbytes)


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    if not values.numel():
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    return values.detach().view(torch.uint8)


def _integers(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of flat values as integers of the same width."""
    return values.detach().view(_INTEGERS[values.element_size()])


def _gpu() -> Any:
    from mcr_plus.kernels.gpu import delta

    return delta


def apply(wire: torch.Tensor, out: torch.Tensor) -> Header:
    """Apply a payload to flat `out`, which holds the payload's base; returns the payload's header.

    `wire` may be longer than the payload. The caller compares the base before, see `follow`. Raises
    `BackendError` if the payload does not fit the number of elements, or if the digest of the result differs
    from the one in the header; `out` is then undefined.
    """
    head = header_of(wire)
    numel, width = out.numel(), out.element_size()
    is_short = not HEADER <= head.nbytes <= wire.numel()
    if is_short or (head.width, head.numel) != (width, numel):
        raise BackendError(
            f"a delta payload of {wire.numel()} bytes says that it has {head.nbytes}, for {head.numel} "
            f"elements of {head.width} bytes; expected {numel} of {width}"
        )
    found = _apply_body(head, wire[HEADER : head.nbytes], out)
    if found != head.digest:
        raise BackendError(
            f"version {head.target} of {numel} elements was not received as it was sent: its digest is "
            f"{found:016x}, expected {head.digest:016x}"
        )
    return head


def follow(head: Header, version: int, digest: int | None) -> None:
    """Check that a payload is based on `version` with this digest; None if the held values are not usable.

    Raises `BackendError` for another base, or a version that is not newer.
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
    """Return the number of changed elements in a payload; unencoded elements all count."""
    head = header_of(wire)
    if head.is_anchor:
        return head.numel
    blocks = blocks_of(head.numel)
    counts = np.frombuffer(wire[HEADER : HEADER + HEAD * blocks].cpu().numpy().tobytes(), np.uint16)[::2]
    counts = counts.astype(np.int64)
    if counts.size:
        last = head.numel - BLOCK * (blocks - 1)
        counts = np.where(counts == RAW, np.append(np.full(blocks - 1, BLOCK), last), counts)
    return int(counts.sum())


def _apply_body(head: Header, body: torch.Tensor, out: torch.Tensor) -> int:
    """Apply the body of a payload; returns the digest of the result."""
    if head.mode == _WINDOW:
        if out.dtype not in _WINDOWED:
            raise BackendError(f"a delta payload holds float32 or bfloat16 values, not {out.dtype}")
        there = on_gpu(out)
        if body.data_ptr() % 4 or there:
            body = body.cpu().clone()
        target = torch.empty_like(out, device="cpu") if there else out
        exp_window.decode(body, target)
        if there:
            out.copy_(target)
        return digest(out)
    if head.mode == _DENSE:
        if body.numel() != out.nbytes:
            raise BackendError(f"a delta payload has {body.numel()} bytes of values, expected {out.nbytes}")
        _bytes_of(out).copy_(body)
        return digest(out)
    numel, width = out.numel(), out.element_size()
    heads, lists, starts = _lists_of(body, numel, width)
    if on_gpu(out):  # the digest detects invalid lists
        if numel:
            numbers = torch.from_numpy(heads.astype(np.int32)).to(out.device)
            _gpu().apply(numbers, lists, _integers(out))
        return digest(out)
    raw, words, bits = views(out)
    hashes = np.empty(len(heads), np.uint64)
    if numel:
        parts = (heads, lists.numpy(), starts, raw, words, bits, hashes)
        wrong = sum(cpu.spread(apply_blocks, len(heads), raw.nbytes, *parts))
        if wrong:
            raise BackendError(f"a delta payload contradicts itself in {wrong} of {len(heads)} blocks")
    return folded(hashes, numel, width)


def _lists_of(body: torch.Tensor, numel: int, width: int) -> tuple[Array, torch.Tensor, Array]:
    """Return the heads of the blocks (blocks × 2), the lists, and the start offset of each list."""
    blocks = blocks_of(numel)
    if body.numel() < HEAD * blocks:
        raise BackendError(f"a delta payload ends after {body.numel()} bytes, before its {blocks} blocks")
    written, lists = body[: HEAD * blocks].cpu().numpy().tobytes(), body[HEAD * blocks :]
    heads = np.frombuffer(written, np.uint16).reshape(blocks, 2)
    counts, halves = heads.astype(np.int64).T
    sizes = np.full(blocks, BLOCK, np.int64)
    if blocks:
        sizes[-1] = numel - BLOCK * (blocks - 1)
    raws = counts == RAW
    if (counts > sizes)[~raws].any():
        raise BackendError("a delta payload lists more changes than a block has elements")
    lengths = np.where(raws, sizes * width, 2 * halves)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    if starts[-1] != lists.numel():
        raise BackendError(
            f"a delta payload has {lists.numel()} bytes of changes, its blocks say {int(starts[-1])}"
        )
    return heads, lists, starts
