"""Counter-based random numbers: number i of a stream depends only on the stream's key and i.

So numbers are the same on any device and with any number of threads. The function is two rounds of lowbias32
(C. Wellons' low-bias 32-bit integer hash), with half of the key before each round. It uses 32-bit
multiplications, because 64-bit vector multiplications are slow.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import torch

from mcr_plus.kernels import cpu

Key = tuple[np.uint32, np.uint32]
_FIRST: Final = 0x7FEB352D
_SECOND: Final = 0x846CA68B
_LOW: Final = 0xFFFFFFFF
_A: Final = np.uint32(_FIRST)
_B: Final = np.uint32(_SECOND)
_15: Final = np.uint32(15)
_16: Final = np.uint32(16)


def key_of(*parts: object) -> Key:
    """Return the key of a stream named by values with a stable text, such as numbers and strings."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    first, second = np.frombuffer(digest, np.dtype("<u4"))
    return first, second


@cpu.embedded
def _mixed(x):  # type: ignore[no-untyped-def]
    x = np.uint32((x ^ (x >> _16)) * _A)
    x = np.uint32((x ^ (x >> _15)) * _B)
    return np.uint32(x ^ (x >> _16))


@cpu.embedded
def draw(index, first, second):  # type: ignore[no-untyped-def]
    """Return 32 random bits for a uint32 index, in CPU kernels."""
    return _mixed(np.uint32(_mixed(np.uint32(index ^ first)) ^ second))


def draw_reference(indices: torch.Tensor, key: Key) -> torch.Tensor:
    """Return 32 random bits for each int64 index below 2³², as int64, on any device."""

    def mixed(x: torch.Tensor) -> torch.Tensor:  # wraps at 64 bits, so the lower 32 are correct
        x = ((x ^ (x >> 16)) * _FIRST) & _LOW
        x = ((x ^ (x >> 15)) * _SECOND) & _LOW
        return x ^ (x >> 16)

    return mixed(mixed(indices ^ int(key[0])) ^ int(key[1]))
