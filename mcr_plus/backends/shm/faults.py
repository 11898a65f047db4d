"""Bit flips for tests of compiled functions that compute checksums of the data they move."""

from __future__ import annotations

from typing import Final

from mcr_plus.backends.shm.atomics import copy, load_acquire, store_release
from mcr_plus.kernels.cpu import compiled

# Words of a fault.
PLACE: Final = 0  # place of the flip, as numbered by the functions; 0 for none
AFTER: Final = 1  # number of passes at that place before the flip
BYTE: Final = 2  # offset of the byte, modulo the number of bytes
MASK: Final = 3  # mask of the bit in its byte
SCRATCH: Final = 4
FAULT_WORDS: Final = 5


@compiled
def damage(fault, place, address, nbytes):  # type: ignore[no-untyped-def]
    """Flip the bit that a test has requested, if it is due here. `fault`: address of `FAULT_WORDS` int64."""
    if load_acquire(fault) != place or nbytes <= 0:
        return
    if load_acquire(fault + 8 * AFTER):
        store_release(fault + 8 * AFTER, load_acquire(fault + 8 * AFTER) - 1)
        return
    at, byte = address + load_acquire(fault + 8 * BYTE) % nbytes, fault + 8 * SCRATCH
    store_release(byte, 0)
    copy(byte, at, 1)
    store_release(byte, load_acquire(byte) ^ load_acquire(fault + 8 * MASK))
    copy(at, byte, 1)
    store_release(fault, 0)
