"""The largest magnitude of each of eight blocks of 32 values, for CPU kernels.

A loop over one such block is unrolled first, and then not vectorised. So eight blocks are processed together,
and neighbours are compared until one value per block is left.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mcr_plus.kernels import cpu

BLOCK: Final = 32
TOGETHER: Final = 8
CHUNK: Final = BLOCK * TOGETHER
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)


@cpu.inlined
def _halve(source, half):  # type: ignore[no-untyped-def]
    for i in range(half.size):
        half[i] = np.uint32(max(source[2 * i], source[2 * i + 1]))


@cpu.inlined
def largest_of_each(bits, scratch, largest):  # type: ignore[no-untyped-def]
    """Write the bits of the largest magnitude of each block to `largest`.

    The bits are compared as integers, which sort like floats, with infinity and then NaN on top.

    Args:
        bits: bits of `CHUNK` float32 values.
        scratch: `CHUNK` uint32, overwritten.
        largest: `TOGETHER` uint32.
    """
    first = scratch[0:128]
    for i in range(first.size):
        first[i] = np.uint32(max(bits[2 * i] & _MAGNITUDE, bits[2 * i + 1] & _MAGNITUDE))
    _halve(first, scratch[128:192])
    _halve(scratch[128:192], scratch[192:224])
    _halve(scratch[192:224], scratch[224:240])
    _halve(scratch[224:240], largest[0:8])
