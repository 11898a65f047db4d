"""Kernels of small operations: reduction, and checksum rows in shared memory."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numba
import numpy as np

from mcr_plus.backends.shm.atomics import load_acquire, pause, store_release
from mcr_plus.backends.shm.reduce_kernels import reduce_rows
from mcr_plus.kernels.checksum import checksums, join
from mcr_plus.kernels.cpu import compiled, linked

MISSING: Final = 0
AGREE: Final = 1
DIFFER: Final = 2

# Words of `settle`: addresses and numbers of parts and blocks of three cuts, see `kernels/checksum.py`.
SENT_CUT: Final = 0
GOT_CUT: Final = 3
SUMS_CUT: Final = 6
CHECKSUMS: Final = 9  # addresses and number of the arguments of `join`
FLOWS: Final = 10
FLOW_COUNT: Final = 11
ROW: Final = 12
ROW_WORDS: Final = 13
COUNTER: Final = 14  # addresses of the number of shared-memory exchanges and of the first row, or 0
ROWS: Final = 15
STRIDE: Final = 16
RANK: Final = 17
RANKS: Final = 18
COMBINE: Final = 19  # addresses of the kernels that reduce the received values, or 0
DIVIDE: Final = 20
COUNT: Final = 21  # elements of each rank, and bytes of one
WIDTH: Final = 22
TRIES: Final = 23
WORDS: Final = 24


_types: Any = numba.types  # numba's partial annotations make type checkers report errors here


@compiled
def claim(counter):  # type: ignore[no-untyped-def]
    """Begin an exchange and return its number. `counter`: address of the last exchange's number."""
    number = load_acquire(counter) + 1
    store_release(counter, number)
    return number


@compiled
def post(row, words, place, number):  # type: ignore[no-untyped-def]
    """Copy a row, with the sum of its words as last word, then set the number that publishes the row."""
    total = np.int64(0)
    for word in range(words - 1):
        value = load_acquire(row + 8 * word)
        total += value
        store_release(place + 8 + 8 * word, value)
    store_release(place + 8 * words, total)
    store_release(place, number)


@compiled
def compared(first, stride, ranks):  # type: ignore[no-untyped-def]
    """Return whether rows have correct sums, belong to the same operation, and match.

    Rows are `stride` bytes apart. They match if the data sent in each stage have arrived.
    """
    words = 4 * ranks + 1
    for rank in range(ranks):
        total, row = np.int64(0), first + rank * stride
        for word in range(words):
            total += load_acquire(row + 8 * word)
        if total != load_acquire(row + 8 * words):
            return np.int64(DIFFER)
        if load_acquire(row + 8 * words - 8) != load_acquire(first + 8 * words - 8):
            return np.int64(DIFFER)
    for stage in range(2):
        for source in range(ranks):
            for target in range(ranks):
                sent = load_acquire(first + source * stride + 8 * (2 * stage * ranks + target))
                got = load_acquire(first + target * stride + 8 * ((2 * stage + 1) * ranks + source))
                if sent != got:
                    return np.int64(DIFFER)
    return np.int64(AGREE)


@compiled
def gathered(first, stride, ranks, number, tries):  # type: ignore[no-untyped-def]
    """Return `compared` once the rows of all ranks have this number; `MISSING` after `tries` attempts."""
    for rank in range(ranks):
        while load_acquire(first + rank * stride) != number:
            if tries <= 0:
                return np.int64(MISSING)
            tries -= 1
            pause()
    return compared(first + 8, stride, ranks)


@linked
def _check(words, cut, address):  # type: ignore[no-untyped-def]
    at = words + 8 * cut
    parts, blocks, out = load_acquire(at + 8), load_acquire(at + 16), load_acquire(words + 8 * CHECKSUMS)
    checksums(address, load_acquire(at), parts, out, np.int64(0), blocks)


@compiled
def check_sent(words, address):  # type: ignore[no-untyped-def]
    """Take the checksums of a small operation's sent data; `words` as for `settle`."""
    _check(words, np.int64(SENT_CUT), address)


@compiled
def settle(words, got, out):  # type: ignore[no-untyped-def]
    """Finish a small operation after its only step: checksums of received data, sums, and exchange.

    `words`: address of `WORDS` int64. `got`: address of the received data, `out` of the sums. Returns the
    verdict, or `MISSING` if other rows are missing, or the library exchanges rows.
    """
    ranks = load_acquire(words + 8 * RANKS)
    _check(words, np.int64(GOT_CUT), got)
    combine = load_acquire(words + 8 * COMBINE)
    if combine:
        divide, count = load_acquire(words + 8 * DIVIDE), load_acquire(words + 8 * COUNT)
        reduce_rows(combine, divide, got, out, ranks, count, load_acquire(words + 8 * WIDTH))
    _check(words, np.int64(SUMS_CUT), out)
    row, flows = load_acquire(words + 8 * ROW), load_acquire(words + 8 * FLOWS)
    join(flows, load_acquire(words + 8 * FLOW_COUNT), load_acquire(words + 8 * CHECKSUMS), row)
    counter = load_acquire(words + 8 * COUNTER)
    if not counter:
        return np.int64(MISSING)
    number, stride = claim(counter), load_acquire(words + 8 * STRIDE)
    first = load_acquire(words + 8 * ROWS) + number % 2 * (stride // 2)
    place = first + load_acquire(words + 8 * RANK) * stride
    post(row, load_acquire(words + 8 * ROW_WORDS), place, number)
    return gathered(first, stride, ranks, number, load_acquire(words + 8 * TRIES))


@cache
def prepare() -> None:
    """Compile the functions, or load them from disk."""
    word = _types.int64
    claim.compile((word,))
    post.compile((word,) * 4)
    compared.compile((word,) * 3)
    gathered.compile((word,) * 5)
    reduce_rows.compile((word,) * 7)
    check_sent.compile((word,) * 2)
    settle.compile((word,) * 3)
