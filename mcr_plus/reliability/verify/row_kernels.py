"""Compiled functions for rows of checksums in shared memory, and for local reductions of small operations."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numba
import numpy as np

from mcr_plus.backends.shm.atomics import load_acquire, pause, store_release
from mcr_plus.backends.shm.reduce_kernels import reduce_rows
from mcr_plus.kernels.cpu import compiled

MISSING: Final = 0
AGREE: Final = 1
DIFFER: Final = 2

_types: Any = numba.types  # partly annotated, which type checkers report here


@compiled
def claim(counter):  # type: ignore[no-untyped-def]
    """Begin an exchange; return its number. `counter`: address of the last exchange's number."""
    number = load_acquire(counter) + 1
    store_release(counter, number)
    return number


@compiled
def post(row, words, place, number):  # type: ignore[no-untyped-def]
    """Copy a row, with the sum of its words as the last one, then set the number that publishes it."""
    total = np.int64(0)
    for word in range(words - 1):
        value = load_acquire(row + 8 * word)
        total += value
        store_release(place + 8 + 8 * word, value)
    store_release(place + 8 * words, total)
    store_release(place, number)


@compiled
def compared(first, stride, ranks):  # type: ignore[no-untyped-def]
    """Return whether rows, `stride` bytes apart, have correct sums, are of the same operation, and match: the
    data sent in each stage have arrived.
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
    """Return `compared` once the rows of all ranks have this number; `MISSING` after `tries` tries."""
    for rank in range(ranks):
        while load_acquire(first + rank * stride) != number:
            if tries <= 0:
                return np.int64(MISSING)
            tries -= 1
            pause()
    return compared(first + 8, stride, ranks)


@cache
def prepare() -> None:
    """Compile the functions, or load them from disk."""
    word = _types.int64
    claim.compile((word,))
    post.compile((word,) * 4)
    compared.compile((word,) * 3)
    gathered.compile((word,) * 5)
    reduce_rows.compile((word,) * 7)
