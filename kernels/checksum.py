"""64-bit checksums of memory, one for every 64 KiB, at about the speed at which a core reads; CPU kernels.

A block is read in rows of 64 words of 64 bits, the last row filled up with zeros. Each of 64 chains, which
do not wait for each other, takes one word of every row by `mixed` of `kernels/digest.py`; then chain i takes
chain i + 32, rotated, in the same way, chain i then chain i + 16, down to one word. Each step is a bijection
of either of its arguments, so that one changed word always changes the checksum, and several but for one case
in 2^64. A vector instruction serves eight chains. It is no protection against an attacker.

A multiplication does not spread the highest bits of a word. A flip of bit 63 changes bits 63 and 34 of a
chain, whatever is in it, and flips of the bits below it often do the same to theirs. What undoes that must
therefore not be a flip of the same line of a bus, in another word: hence a fold that is no multiple of eight
bits, and the rotation before two chains meet, where both may have changed in the last row.

All functions take addresses: an array would cost as much as the checksum of a small payload.
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
from mcr_plus.kernels.digest import FACTOR, FOLD, SEED, mix, mixed, to_signed

BLOCK: Final = 64 << 10
"""Bytes of a block."""
CUT_WORDS: Final = 3
"""Words of a part of a cut: offset and bytes of the part, number of its first block."""
FLOW_WORDS: Final = 4
"""Words of a flow: number of its first block, number of blocks, first word of a row, number of words."""
_LANES: Final = 64
_ROW: Final = 8 * _LANES
_VECTOR: Final = 8
_TURN: Final = 17
_SEEDS: Final = tuple(to_signed(SEED * (2 * lane + 1) & (2**64 - 1)) for lane in range(_LANES))

_numba: Any = numba  # partly annotated, which type checkers report here
_types: Any = _numba.types
_I64: Final = ir.IntType(64)
_BYTES: Final = ir.IntType(8).as_pointer()


def reference(values: torch.Tensor) -> int:
    """The checksum of up to `BLOCK` bytes of contiguous `values`, in plain torch."""
    raw = values.reshape(-1).view(torch.uint8)
    rows = torch.nn.functional.pad(raw, (0, -raw.numel() % _ROW)).view(torch.int64).view(-1, _LANES)
    chains = torch.tensor(_SEEDS, device="cpu")
    for row in rows:
        chains = mixed(chains, row)
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


def _turned(builder: Any, chain: Any, width: int) -> Any:
    upper = builder.shl(chain, _spread(_TURN, width))
    return builder.or_(upper, builder.lshr(chain, _spread(64 - _TURN, width)))


def _folded(builder: Any, chains: list[Any]) -> Any:
    """One word of vectors of chains, see the module."""
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


def _emit_checksum(builder: Any, address: Any, nbytes: Any) -> Any:
    vector = ir.VectorType(_I64, _VECTOR)
    zero, one, row_bytes = (ir.Constant(_I64, value) for value in (0, 1, _ROW))
    # The last row, filled up: where there is none it stays unused.
    last = cgutils.alloca_once(builder, ir.ArrayType(_I64, _LANES))
    last_address = builder.ptrtoint(last, _I64)
    whole = builder.udiv(nbytes, row_bytes)
    rest = builder.urem(nbytes, row_bytes)
    has_rest = builder.icmp_unsigned("!=", rest, zero)
    with builder.if_then(has_rest):
        cgutils.memset(builder, builder.bitcast(last, _BYTES), row_bytes, 0)
        source = builder.inttoptr(builder.add(address, builder.mul(whole, row_bytes)), _BYTES)
        cgutils.raw_memcpy(builder, builder.bitcast(last, _BYTES), source, rest, 1)
    rows = builder.add(whole, builder.zext(has_rest, _I64))
    start = builder.basic_block
    head, body, end = (builder.append_basic_block(name) for name in ("rows", "row", "folded"))
    builder.branch(head)
    builder.position_at_end(head)
    number = builder.phi(_I64)
    number.add_incoming(zero, start)
    chains = []
    for first in range(0, _LANES, _VECTOR):
        chain = builder.phi(vector)
        chain.add_incoming(ir.Constant(vector, list(_SEEDS[first : first + _VECTOR])), start)
        chains.append(chain)
    builder.cbranch(builder.icmp_unsigned("<", number, rows), body, end)
    builder.position_at_end(body)
    in_place = builder.add(address, builder.mul(number, row_bytes))
    at = builder.select(builder.icmp_unsigned("<", number, whole), in_place, last_address)
    for index, chain in enumerate(chains):
        place = builder.add(at, ir.Constant(_I64, 8 * _VECTOR * index))
        words = builder.load(builder.inttoptr(place, vector.as_pointer()), align=1)
        chain.add_incoming(_mix_vectors(builder, chain, words, _VECTOR), body)
    number.add_incoming(builder.add(number, one), body)
    builder.branch(head)
    builder.position_at_end(end)
    return _folded(builder, list(chains))


@_numba.extending.intrinsic
def block_checksum(typing_context, address, nbytes):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """The checksum of up to a block."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return _emit_checksum(builder, *args)

    return _types.int64(_types.int64, _types.int64), generate


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


# -- kernels --------------------------------------------------------------------------------------------


@cpu.compiled
def checksums(base, cut, parts, out, lo, hi):  # type: ignore[no-untyped-def]
    """Write the checksums of blocks `lo` to `hi` of the parts of a cut, numbered in their order, to `out`.

    `base`: address that the offsets of parts count from. `cut`: address of `parts` times `CUT_WORDS` int64.
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
def join(flows, count, checksums, row):  # type: ignore[no-untyped-def]
    """Write one word for each flow, of the checksums of its blocks, to the flow's words of a row.

    `flows`: address of `count` times `FLOW_WORDS` int64. One block has its checksum, none has 0.
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


@cache
def prepare() -> None:
    """Compile the kernels, or load them from disk."""
    word = _types.int64
    checksums.compile((word,) * 6)
    join.compile((word,) * 4)
