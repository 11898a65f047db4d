"""64-bit checksums of memory, one per 64 KiB, at about the speed of reading; CPU kernels.

A block is read in rows of 64 words of 64 bits; the last row is padded with zeros. Each of 64 independent
chains takes one word of every row. Chain and word are combined by exclusive or, each 32-bit half is
multiplied by an odd number, and the product, with halves exchanged, is folded with its halves shifted down by
15 bits. Each of these five steps is one instruction; processors before AVX-512 need ten for a product of 64
bits. At the end, chain i takes chain i + 32, rotated, by `mixed` of `kernels/digest.py`, then chain i + 16,
and so on down to one word. Each step is a bijection of either argument. So one changed word always changes
the checksum, and several changed words do so except for one case in 2^64. The checksum is no protection
against an attacker.

A multiplication does not spread the highest bit of a half. A flip of bit 63 always changes bits 31 and 48 of
a chain, and flips of lower bits often change two bits in the same way. A flip in another word that cancels
this change must not be on the same line of a bus. Therefore the fold is not by a multiple of eight bits, and
chains are rotated before they are combined, since both may have changed in the last row.

All functions take addresses, because an array argument costs as much as the checksum of a small payload.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numba
import numba.extending
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils

from mcr_plus.kernels import cpu
from mcr_plus.kernels.checksum_sizes import BLOCK
from mcr_plus.kernels.checksum_sizes import CHAIN_BYTES as _ROW
from mcr_plus.kernels.checksum_sizes import LANES as _LANES
from mcr_plus.kernels.digest import FACTOR, FOLD, SEED, mix, mixed, to_signed


def _signed_half(value: int) -> int:
    """Return the lowest 32 bits as an int32."""
    return (value & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)


CUT_WORDS: Final = 3
"""Words of a part of a cut: offset and bytes of the part, number of its first block."""
FLOW_WORDS: Final = 4
"""Words of a flow: number of its first block, number of blocks, first word of a row, number of words."""
_VECTOR: Final = 8
_TURN: Final = 17
_HALF_FOLD: Final = 15
_FACTORS: Final = tuple(_signed_half(int(FACTOR) >> shift) for shift in (0, 32))  # lower and upper half
_SEEDS: Final = tuple(to_signed(SEED * (2 * lane + 1) & (2**64 - 1)) for lane in range(_LANES))

_numba: Any = numba  # numba's partial annotations make type checkers report errors here
_types: Any = _numba.types
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_BYTES: Final = ir.IntType(8).as_pointer()
_WORDS: Final = ir.VectorType(_I64, _VECTOR)
_HALVES: Final = ir.VectorType(_I32, 2 * _VECTOR)


def reference(values: torch.Tensor) -> int:
    """Return the checksum of up to `BLOCK` bytes of contiguous `values`, in plain torch."""
    raw = values.reshape(-1).view(torch.uint8)
    rows = torch.nn.functional.pad(raw, (0, -raw.numel() % _ROW)).view(torch.int64).view(-1, _LANES)
    chains = torch.tensor(_SEEDS, device="cpu")
    for row in rows:
        products = (chains ^ row).view(torch.int32).view(-1, 2) * torch.tensor(
            _FACTORS, dtype=torch.int32, device="cpu"
        )
        folds = products >> _HALF_FOLD & (1 << 32 - _HALF_FOLD) - 1
        chains = (products.flip(1) ^ folds).view(-1).view(torch.int64)
    while chains.numel() > 1:
        left, right = chains.view(2, -1)
        chains = mixed(left, right << _TURN | right >> 64 - _TURN & (1 << _TURN) - 1)
    return int(chains)


# -- instructions ---------------------------------------------------------------------------------------


def _spread(value: int, width: int) -> Any:
    return ir.Constant(ir.VectorType(_I64, width), [value] * width) if width > 1 else ir.Constant(_I64, value)


def _mix_vectors(builder: Any, left: Any, right: Any, width: int) -> Any:
    product = builder.mul(builder.xor(left, right), _spread(to_signed(int(FACTOR)), width))
    return builder.xor(product, builder.lshr(product, _spread(FOLD, width)))


def _taken(builder: Any, chains: Any, words: Any) -> Any:
    """Return the chains after they have taken a vector of words."""
    factors = ir.Constant(_HALVES, list(_FACTORS) * _VECTOR)
    product = builder.mul(builder.bitcast(builder.xor(chains, words), _HALVES), factors)
    order = [index ^ 1 for index in range(2 * _VECTOR)]
    exchanged = builder.shuffle_vector(product, product, ir.Constant(ir.VectorType(_I32, 2 * _VECTOR), order))
    fold = builder.lshr(product, ir.Constant(_HALVES, [_HALF_FOLD] * (2 * _VECTOR)))
    return builder.bitcast(builder.xor(exchanged, fold), _WORDS)


def _turned(builder: Any, chain: Any, width: int) -> Any:
    upper = builder.shl(chain, _spread(_TURN, width))
    return builder.or_(upper, builder.lshr(chain, _spread(64 - _TURN, width)))


def _folded(builder: Any, chains: list[Any]) -> Any:
    """Combine vectors of chains into one word, see the module."""
    while len(chains) > 1:
        half = len(chains) // 2
        pairs = zip(chains[:half], chains[half:], strict=True)
        chains = [
            _mix_vectors(builder, left, _turned(builder, right, _VECTOR), _VECTOR) for left, right in pairs
        ]
    (chain,), width = chains, _VECTOR
    while width > 1:
        width //= 2
        halves = []
        for first in (0, width):
            if width == 1:
                halves.append(builder.extract_element(chain, ir.Constant(ir.IntType(32), first)))
            else:
                mask = ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(first, first + width)))
                halves.append(builder.shuffle_vector(chain, chain, mask))
        chain = _mix_vectors(builder, halves[0], _turned(builder, halves[1], width), width)
    return chain


class _Chains:
    """Chains of a block in progress, which the compiler keeps in registers."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._places = [cgutils.alloca_once(builder, _WORDS) for _ in range(0, _LANES, _VECTOR)]

    def begin(self) -> None:
        for first, place in zip(range(0, _LANES, _VECTOR), self._places, strict=True):
            self._builder.store(ir.Constant(_WORDS, list(_SEEDS[first : first + _VECTOR])), place)

    def take(self, vectors: list[Any]) -> None:
        """Take the next row."""
        builder = self._builder
        for place, words in zip(self._places, vectors, strict=True):
            builder.store(_taken(builder, builder.load(place), words), place)

    def load(self, address: Any) -> None:
        """Load stored chains."""
        for place, words in zip(self._places, _row(self._builder, address), strict=True):
            self._builder.store(words, place)

    def store(self, address: Any) -> None:
        """Store the chains for a later `load`."""
        for first, place in zip(range(0, _LANES, _VECTOR), self._places, strict=True):
            target = self._builder.inttoptr(_after(self._builder, address, 8 * first), _WORDS.as_pointer())
            self._builder.store(self._builder.load(place), target, align=1)

    def folded(self) -> Any:
        return _folded(self._builder, [self._builder.load(place) for place in self._places])


def _row(builder: Any, address: Any) -> list[Any]:
    """Return the vectors of a row."""
    return [
        builder.load(builder.inttoptr(_after(builder, address, 8 * first), _WORDS.as_pointer()), align=1)
        for first in range(0, _LANES, _VECTOR)
    ]


def _after(builder: Any, address: Any, nbytes: int) -> Any:
    return builder.add(address, ir.Constant(_I64, nbytes))


def _at(builder: Any, address: Any, row: Any) -> Any:
    return builder.add(address, builder.mul(row, ir.Constant(_I64, _ROW)))


def _put(builder: Any, address: Any, vectors: list[Any], streams: bool) -> None:
    """Store a row; with `streams` past the caches, which requires an address that is a multiple of 64."""
    for first, words in zip(range(0, _LANES, _VECTOR), vectors, strict=True):
        place = builder.inttoptr(_after(builder, address, 8 * first), _WORDS.as_pointer())
        stored = builder.store(words, place, align=8 * _VECTOR if streams else 1)
        if streams:
            stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))


def _take_all(
    builder: Any, chains: _Chains, address: Any, nbytes: Any, target: Any = None, streams: bool = False
) -> None:
    """Take `nbytes` bytes, with the last row padded, and copy them to a target if there is one."""
    whole, rest = (each(nbytes, ir.Constant(_I64, _ROW)) for each in (builder.udiv, builder.urem))
    with cgutils.for_range(builder, whole) as loop:
        vectors = _row(builder, _at(builder, address, loop.index))
        if target is not None:
            _put(builder, _at(builder, target, loop.index), vectors, streams)
        chains.take(vectors)
    last = cgutils.alloca_once(builder, ir.ArrayType(_I64, _LANES))
    with builder.if_then(builder.icmp_unsigned("!=", rest, ir.Constant(_I64, 0))):
        place = builder.bitcast(last, _BYTES)
        cgutils.memset(builder, place, ir.Constant(_I64, _ROW), 0)
        source = builder.inttoptr(_at(builder, address, whole), _BYTES)
        cgutils.raw_memcpy(builder, place, source, rest, 1)
        chains.take(_row(builder, builder.ptrtoint(last, _I64)))
        if target is not None:
            cgutils.raw_memcpy(
                builder, builder.inttoptr(_at(builder, target, whole), _BYTES), source, rest, 1
            )


@_numba.extending.intrinsic
def block_checksum(typing_context, address, nbytes):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the checksum of at most a block."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        chains = _Chains(builder)
        chains.begin()
        _take_all(builder, chains, *args)
        return chains.folded()

    return _types.int64(_types.int64, _types.int64), generate


@_numba.extending.intrinsic
def copy_block(typing_context, target, source, nbytes):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Copy at most a block, and return the checksum of the source as read."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        chains = _Chains(builder)
        chains.begin()
        _take_all(builder, chains, args[1], args[2], args[0])
        return chains.folded()

    return _types.int64(*[_types.int64] * 3), generate


@_numba.extending.intrinsic
def stream_block(typing_context, target, source, nbytes):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Run `copy_block` past the caches, to a target that is a multiple of 64; see `stream` in `atomics`."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        chains = _Chains(builder)
        chains.begin()
        _take_all(builder, chains, args[1], args[2], args[0], streams=True)
        return chains.folded()

    return _types.int64(*[_types.int64] * 3), generate


@_numba.extending.intrinsic
def begin_block(typing_context, chains):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Begin the checksum of a block that is taken in parts. `chains`: address of `CHAIN_BYTES` bytes."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        under_way = _Chains(builder)
        under_way.begin()
        under_way.store(args[0])

    return _types.void(_types.int64), generate


@_numba.extending.intrinsic
def take_part(typing_context, chains, address, nbytes):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Take a part of the block; except for the last part, a multiple of `CHAIN_BYTES`."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        under_way = _Chains(builder)
        under_way.load(args[0])
        _take_all(builder, under_way, args[1], args[2])
        under_way.store(args[0])

    return _types.void(*[_types.int64] * 3), generate


@_numba.extending.intrinsic
def copy_part(typing_context, chains, target, source, nbytes):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Copy a part of the source, and take it like `take_part`."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        under_way = _Chains(builder)
        under_way.load(args[0])
        _take_all(builder, under_way, args[2], args[3], args[1])
        under_way.store(args[0])

    return _types.void(*[_types.int64] * 4), generate


@_numba.extending.intrinsic
def stream_part(typing_context, chains, target, source, nbytes):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Run `copy_part` past the caches, to a target that is a multiple of 64."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        under_way = _Chains(builder)
        under_way.load(args[0])
        _take_all(builder, under_way, args[2], args[3], args[1], streams=True)
        under_way.store(args[0])

    return _types.void(*[_types.int64] * 4), generate


@_numba.extending.intrinsic
def end_block(typing_context, chains):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the checksum of a block after all parts have been taken."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        under_way = _Chains(builder)
        under_way.load(args[0])
        return under_way.folded()

    return _types.int64(_types.int64), generate


@_numba.extending.intrinsic
def _load(typing_context, address):  # type: ignore[no-untyped-def]  # noqa: ARG001
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return builder.load(builder.inttoptr(args[0], _I64.as_pointer()))

    return _types.int64(_types.int64), generate


@_numba.extending.intrinsic
def _store(typing_context, address, value):  # type: ignore[no-untyped-def]  # noqa: ARG001
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        builder.store(args[1], builder.inttoptr(args[0], _I64.as_pointer()))

    return _types.void(_types.int64, _types.int64), generate


@_numba.extending.intrinsic
def _copy(typing_context, target, source, nbytes):  # type: ignore[no-untyped-def]  # noqa: ARG001
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        target, source = (builder.inttoptr(each, _BYTES) for each in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)

    return _types.void(*[_types.int64] * 3), generate


# -- kernels --------------------------------------------------------------------------------------------


@cpu.compiled
def checksums(base, cut, parts, out, lo, hi):  # type: ignore[no-untyped-def]
    """Write the checksums of blocks `lo` to `hi` of a cut, numbered over its parts in order, to `out`.

    `base`: address to which the offsets of parts are relative. `cut`: address of `parts` × `CUT_WORDS` int64.
    """
    before = 0
    for part in range(parts):
        words = cut + 8 * CUT_WORDS * part
        address, nbytes, first = base + _load(words), _load(words + 8), _load(words + 16)
        blocks = (nbytes + BLOCK - 1) // BLOCK
        for block in range(max(lo - before, 0), min(hi - before, blocks)):
            skip = block * BLOCK
            _store(out + 8 * (first + block), block_checksum(address + skip, min(BLOCK, nbytes - skip)))
        before += blocks


@cpu.compiled
def changed(base, nbytes, sent, lo, hi):  # type: ignore[no-untyped-def]
    """Return the first of blocks `lo` to `hi` of `nbytes` at `base` that does not match `sent`, or -1."""
    for block in range(lo, hi):
        skip = block * BLOCK
        if block_checksum(base + skip, min(BLOCK, nbytes - skip)) != _load(sent + 8 * block):
            return block
    return np.int64(-1)


@cpu.compiled
def join(flows, count, checksums, row):  # type: ignore[no-untyped-def]
    """Combine the checksums of each flow's blocks into one word, and write it to the flow's words in a row.

    `flows`: address of `count` × `FLOW_WORDS` int64. For one block the word is the checksum; without blocks,
    0.
    """
    for flow in range(count):
        words = flows + 8 * FLOW_WORDS * flow
        first, blocks, word = checksums + 8 * _load(words), _load(words + 8), _load(words + 16)
        total = np.int64(0)
        if blocks == 1:
            total = _load(first)
        else:
            for block in range(blocks):
                total = np.int64(mix(np.uint64(total), np.uint64(_load(first + 8 * block))))
        for target in range(word, word + _load(words + 24)):
            _store(row + 8 * target, total)


@cpu.compiled
def pack(packed, source, nbytes):  # type: ignore[no-untyped-def]
    """Write the checksum of at most a block, followed by a copy of the data."""
    _store(packed, block_checksum(source, nbytes))
    _copy(packed + 8, source, nbytes)


@cpu.compiled
def unpack(packed, target, nbytes):  # type: ignore[no-untyped-def]
    """Copy the data after a checksum to the target; returns whether the target has that checksum."""
    _copy(target, packed + 8, nbytes)
    return block_checksum(target, nbytes) == _load(packed)


def blocks_of(nbytes: int) -> int:
    """Return the number of blocks in `nbytes` bytes."""
    return -(-nbytes // BLOCK)


def take_all(address: int, nbytes: int, out: int) -> None:
    """Write the checksums of the blocks at `address` to the address `out`."""
    cut: Any = np.array([0, nbytes, 0])
    cpu.spread(checksums, blocks_of(nbytes), nbytes, address, cut.ctypes.data, 1, out)


def of_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return the checksums of contiguous `values`: int64, one for every `BLOCK` bytes."""
    words = torch.empty(blocks_of(values.nbytes), dtype=torch.int64, device="cpu")
    take_all(values.data_ptr(), values.nbytes, words.data_ptr())
    return words


def first_changed(values: torch.Tensor, words: torch.Tensor) -> int | None:
    """Return the first block of contiguous `values` that does not match `words`; None if all match."""
    nbytes = values.nbytes
    parts = cpu.spread(changed, words.numel(), nbytes, values.data_ptr(), nbytes, words.data_ptr())
    return next((block for block in parts if block >= 0), None)


@cache
def prepare() -> None:
    """Compile the kernels, or load them from disk."""
    word = _types.int64
    checksums.compile((word,) * 6)
    changed.compile((word,) * 5)
    join.compile((word,) * 4)
    pack.compile((word,) * 3)
    unpack.compile((word,) * 3)
