"""64-bit digest of all bits of an array, in order; torch reference, CPU kernels.

An array of elements of 1, 2, 4 or 8 bytes is cut into blocks of 16384 elements. The 64-bit words of a block
(the last word is padded with zeros) are distributed over eight independent chains. A chain takes each of its
words by `(chain ^ word) * factor`, followed by a fold. This is a bijection of both arguments, so one changed
word always changes the digest. The chains of a block, then the hashes of blocks, then the number of elements
and the width are combined in the same way. The digest is no protection against an attacker.

A multiplication does not spread the highest bits of a word: a flip of bit 63 always changes bits 63 and 63 -
`FOLD` of a chain. A flip in the next word that cancels this change must not be on the same line of a bus, or
of a sign bit. Therefore the fold is not by a multiple of eight bits. Unlike in `kernels/checksum.py`, no
rotation is needed where chains are combined: chains are taken one after another, so a flip in an earlier
chain has been multiplied and folded once more than a flip in a later chain, and has another lowest changed
bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from mcr_plus.errors import BackendError
from mcr_plus.kernels import cpu

BLOCK: Final = 16384
UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
FOLD: Final = 29
FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd
SEED: Final = 0x243F6A8885A308D3
_SEEDS: Final = tuple(np.uint64(SEED * (2 * lane + 1) & (2**64 - 1)) for lane in range(8))
_S0, _S1, _S2, _S3, _S4, _S5, _S6, _S7 = _SEEDS
_ZERO: Final = np.uint64(0)
_UPPER: Final = np.uint64(FOLD)

Array = NDArray[Any]


def blocks_of(numel: int) -> int:
    """Return the number of blocks; the last may be shorter."""
    return -(-numel // BLOCK)


def reference_digest(values: torch.Tensor) -> int:
    """Return the digest of flat `values`, in plain torch and Python integers."""
    width, numel = values.element_size(), values.numel()
    raw = values.contiguous().view(torch.uint8) if numel else torch.empty(0, dtype=torch.uint8, device="cpu")
    total, step = 0, BLOCK * width
    for at in range(0, raw.numel(), step):
        part = raw[at : at + step]
        words = torch.nn.functional.pad(part, (0, -part.numel() % 64)).view(torch.int64).view(-1, 8)
        lanes = torch.tensor([to_signed(int(seed)) for seed in _SEEDS], device="cpu")
        for row in words:
            lanes = mixed(lanes, row)
        block = torch.tensor(0, device="cpu")
        for lane in lanes:
            block = mixed(block, lane)
        total = int(mixed(torch.tensor(total, device="cpu"), block))
    shape = torch.tensor(to_signed((numel << 4 | width) & (2**64 - 1)), device="cpu")
    return int(mixed(torch.tensor(total, device="cpu"), shape)) & (2**64 - 1)


def to_signed(value: int) -> int:
    """Return the int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def mixed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Run `mix` on int64 in plain torch."""
    product = (left ^ right) * to_signed(int(FACTOR))
    return product ^ (product >> FOLD & (1 << 64 - FOLD) - 1)


def mixed_words(words: Iterable[int]) -> int:
    """Run `mix` on one word after another, in Python integers (for few words)."""
    value = 0
    for word in words:
        value = (value ^ word) * int(FACTOR) & (2**64 - 1)
        value ^= value >> FOLD
    return value


@cpu.embedded
def mix(left, right):  # type: ignore[no-untyped-def]
    """Combine two words; a bijection of either argument, so that one changed word is always noticed."""
    product = (left ^ right) * FACTOR
    return product ^ (product >> _UPPER)


@cpu.linked
def block_hash(words, rest):  # type: ignore[no-untyped-def]
    """Return the hash of a block, in eight chains, from whole words and the remaining bytes."""
    a, b, c, d, e, f, g, h = _S0, _S1, _S2, _S3, _S4, _S5, _S6, _S7
    whole = words.size // 8
    for i in range(whole):
        row = words[8 * i : 8 * i + 8]
        a, b, c, d = mix(a, row[0]), mix(b, row[1]), mix(c, row[2]), mix(d, row[3])
        e, f, g, h = mix(e, row[4]), mix(f, row[5]), mix(g, row[6]), mix(h, row[7])
    if words.size % 8 or rest.size:
        last = np.zeros(8, np.uint64)
        for i in range(8 * whole, words.size):
            last[i - 8 * whole] = words[i]
        for i in range(rest.size):
            last[words.size - 8 * whole] |= np.uint64(rest[i]) << np.uint64(8 * i)
        a, b, c, d = mix(a, last[0]), mix(b, last[1]), mix(c, last[2]), mix(d, last[3])
        e, f, g, h = mix(e, last[4]), mix(f, last[5]), mix(g, last[6]), mix(h, last[7])
    return mix(mix(mix(mix(mix(mix(mix(mix(_ZERO, a), b), c), d), e), f), g), h)


@cpu.compiled
def _digests(raw, words, hashes, width, lo, hi):  # type: ignore[no-untyped-def]
    """Write the hashes of blocks."""
    for block in range(lo, hi):
        begin = block * BLOCK * width
        end = min(begin + BLOCK * width, raw.size)
        hashes[block] = block_hash(words[begin // 8 : end // 8], raw[end // 8 * 8 : end])


@cpu.compiled
def _fold(hashes, shape):  # type: ignore[no-untyped-def]
    total = _ZERO
    for i in range(hashes.size):
        total = mix(total, hashes[i])
    return mix(total, shape)


def digest(values: torch.Tensor) -> int:
    """Return the 64-bit digest of all bits of flat `values`, in order; waits for a GPU."""
    numel, width = values.numel(), values.element_size()
    if on_gpu(values):
        hashes = _gpu().hashes_of(values).cpu().numpy().view(np.uint64) if numel else np.empty(0, np.uint64)
        return folded(hashes, numel, width)
    raw, words, _ = views(values)
    hashes = np.empty(blocks_of(numel), np.uint64)
    if hashes.size:
        cpu.spread(_digests, hashes.size, raw.nbytes, raw, words, hashes, width)
    return folded(hashes, numel, width)


def on_gpu(values: torch.Tensor) -> bool:
    """Return whether to use the kernels for GPUs, also in `kernels/delta.py`."""
    return values.is_cuda


def folded(hashes: Array, numel: int, width: int) -> int:
    """Return the digest of `numel` elements of `width` bytes from the hashes of their blocks."""
    return int(_fold(hashes, np.uint64((numel << 4 | width) & (2**64 - 1))))


def _gpu() -> Any:
    from mcr_plus.kernels.gpu import digest

    return digest


def views(values: torch.Tensor) -> tuple[Array, Array, Array]:
    """Return the bytes, the whole words, and the elements of flat `values`, as views."""
    width = values.element_size()
    if width not in UNSIGNED:
        raise BackendError(f"elements of {width} bytes; expected 1, 2, 4 or 8")
    if not values.numel():
        raw: Array = np.empty(0, np.uint8)
    else:
        raw = values.detach().view(torch.uint8).numpy()
    whole = raw[: raw.size // 8 * 8]
    return raw, whole.view(np.uint64), raw.view(UNSIGNED[width])
