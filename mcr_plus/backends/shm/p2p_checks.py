"""Move a message's data through a slot of a queue, and compute checksums.

Each block of 64 KiB has a checksum. The sender computes the checksum from the data copied into a slot, the
receiver from the target after the copy, in parts that fit the nearest cache; for a large message, from the
data written to the target past the caches. A block may begin in one slot and end in another; the slot in
which it ends has the checksum in its header.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import numba
import numpy as np

from mcr_plus.backends.shm.atomics import STREAMED, copy, fence, load_acquire, store_release
from mcr_plus.backends.shm.faults import damage
from mcr_plus.backends.shm.p2p_kernels import (
    ADDRESS,
    BYTES,
    CHAINS,
    CHECKED,
    CHECKS_AT,
    DAMAGED,
    FAULT,
    HEADER,
    KEPT,
    MARK,
)
from mcr_plus.kernels import checksum
from mcr_plus.kernels.checksum import (
    begin_block,
    block_checksum,
    copy_block,
    copy_part,
    end_block,
    stream_part,
    take_part,
)
from mcr_plus.kernels.checksum_sizes import BLOCK
from mcr_plus.kernels.cpu import c_function, compiled

_types: Any = numba.types  # partly annotated, which type checkers report

IN_SLOT: Final = 1  # places of faults: data just copied into a slot, or to the target
IN_TARGET: Final = 2
STREAMED_FROM: Final = 8 << 20
"""Bytes from which a message is written past the caches, as results of collectives are."""
_PART: Final = 16 << 10  # bytes that are read and copied at once


@compiled
def _word(row, word):  # type: ignore[no-untyped-def]
    return load_acquire(row + 8 * word)


@compiled
def _ends_of(row, at, left):  # type: ignore[no-untyped-def]
    """Return how many of `left` bytes from `at` on are in the block, and whether the block ends there."""
    size = min(BLOCK - at % BLOCK, left)
    return size, (at + size) % BLOCK == 0 or at + size == _word(row, BYTES)


def _carry_out(row, place, at, nbytes):  # type: ignore[no-untyped-def]
    """Copy bytes of a message into a slot, and the checksums of the blocks that end there into its header."""
    chains, source = _word(row, CHAINS), _word(row, ADDRESS) + at
    target, checks, done = place + HEADER, place + CHECKS_AT, np.int64(0)
    while done < nbytes:
        size, ends = _ends_of(row, at + done, nbytes - done)
        if ends and (at + done) % BLOCK == 0:
            store_release(checks, copy_block(target + done, source + done, size))
        else:
            if (at + done) % BLOCK == 0:
                begin_block(chains)
            copy_part(chains, target + done, source + done, size)
            if ends:
                store_release(checks, end_block(chains))
        done += size
        checks += 8
    damage(row + 8 * FAULT, np.int64(IN_SLOT), target, nbytes)


def _carry_in(row, place, at, nbytes):  # type: ignore[no-untyped-def]
    """Copy bytes of a message from a slot to their destination, and compare or keep the checksums."""
    chains, target, kept = _word(row, CHAINS), _word(row, ADDRESS) + at, _word(row, KEPT)
    source, checks, done = place + HEADER, place + CHECKS_AT, np.int64(0)
    streams = _word(row, BYTES) >= STREAMED_FROM and target % STREAMED == 0
    if _word(row, MARK) != CHECKED:
        store_release(row + 8 * DAMAGED, np.int64(0))
    while done < nbytes:
        block = (at + done) // BLOCK
        size, ends = _ends_of(row, at + done, nbytes - done)
        if kept:
            copy(target + done, source + done, size)
            if ends:
                store_release(kept + 8 * block, load_acquire(checks))
        else:
            found = np.int64(0)
            if size <= _PART and ends and (at + done) % BLOCK == 0:
                copy(target + done, source + done, size)
                damage(row + 8 * FAULT, np.int64(IN_TARGET), target + done, size)
                found = block_checksum(target + done, size)
            else:
                if (at + done) % BLOCK == 0:
                    begin_block(chains)
                if streams:
                    stream_part(chains, target + done, source + done, size)
                for skip in range(done, np.int64(0) if streams else done + size, _PART):
                    part = min(np.int64(_PART), done + size - skip)
                    copy(target + skip, source + skip, part)
                    damage(row + 8 * FAULT, np.int64(IN_TARGET), target + skip, part)
                    take_part(chains, target + skip, part)
                if ends:
                    found = end_block(chains)
            if ends and found != load_acquire(checks) and _word(row, DAMAGED) < 0:
                store_release(row + 8 * DAMAGED, block)
        done += size
        checks += 8
    if streams:
        fence()


class Carriers(NamedTuple):
    """Addresses of the functions that move data: out to a slot, in from a slot."""

    out: int
    into: int


@cache
def prepare() -> Carriers:
    """Compile the functions, or load them from disk."""
    checksum.prepare()
    kind = _types.void(*[_types.int64] * 4)
    return Carriers(*(c_function(kind, function).address for function in (_carry_out, _carry_in)))
