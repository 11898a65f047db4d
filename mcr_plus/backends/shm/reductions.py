"""Reductions by kernels of `reduce_kernels`: which kernels an operation needs, and their addresses.

A kernel is a C function `void(int64 target, int64 left, int64 right, int64 count)`, called by address, so
that functions that move data are compiled only once for all dtypes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from mcr_plus.core.kinds import ReduceOp, dtype_name
from mcr_plus.errors import Unsupported
from mcr_plus.kernels.images import c_kernel

_KERNELS: Final = "mcr_plus.backends.shm.reduce_kernels"
_EXACT: Final = "mcr_plus.backends.shm.exact_kernels"
DTYPES: Final = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
_LOGIC: Final[dict[str, str]] = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
"""Logic operations for arithmetic on bool, whose bytes are 0 or 1."""


class ReduceKernels(NamedTuple):
    """Addresses of the kernels of one reduction.

    Attributes:
        combine: `target = left op right`.
        divide: `target /= right`, where `right` is the number of ranks; 0 for all operations but AVG.
        parts: kernel values per element; 2 if complex numbers are treated as pairs.
    """

    combine: int = 0
    divide: int = 0
    parts: int = 1


@cache
def kernels_for(dtype: torch.dtype, op: ReduceOp) -> ReduceKernels:
    """Return the kernels of `op` on `dtype`; the first call compiles them, which takes some 0.1 s.

    Raises:
        Unsupported: `op` is not defined on `dtype`.
    """
    if dtype.is_complex and op in ("SUM", "AVG"):
        return kernels_for(dtype.to_real(), op)._replace(parts=2)
    if dtype.is_complex and op == "PRODUCT":
        return ReduceKernels(_address("complex_product", dtype.to_real()))
    if dtype is torch.bool:
        return ReduceKernels(_address("kernel", torch.uint8, _LOGIC.get(op, op)))
    if dtype not in DTYPES:
        known = ", ".join(map(dtype_name, (*DTYPES, torch.bool)))
        raise Unsupported(f"reduce op {op} on {dtype_name(dtype)}; known: {known}")
    if op == "AVG":
        return ReduceKernels(_address("kernel", dtype, "SUM"), _address("kernel", dtype, "DIVIDE"))
    if op in ("BAND", "BOR", "BXOR") and dtype.is_floating_point:
        raise Unsupported(f"reduce op {op} on {dtype_name(dtype)}")
    return ReduceKernels(_address("kernel", dtype, op))


def mpi_function(dtype: torch.dtype, op: ReduceOp) -> int:
    """Return the address of an MPI_User_function (MPI 4.1, section 6.9.5): `inout = in op inout`.

    `op`: any but AVG.
    """
    return _address("mpi_function", dtype, op)


class Keys(NamedTuple):
    """Addresses of the functions that convert values to keys for MIN or MAX, and back.

    Keys of float64 are int64, all others int32, so keys can replace float64 and float32 values in place. The
    largest key of MAX, and the smallest of MIN, is NaN.
    """

    of_values: int
    to_values: int
    dtype: torch.dtype


@cache
def keys_for(dtype: torch.dtype, op: ReduceOp) -> Keys:
    """Return the functions for MIN or MAX of a floating-point dtype."""
    key = torch.int64 if dtype is torch.float64 else torch.int32
    return Keys(_address("conversion", dtype, op), _address("conversion", dtype, "VALUE"), key)


_KERNEL: Final = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
LEVELS: Final = 14
"""Most values that a tree over up to 8,192 ranks keeps; each has a buffer."""
PIECE: Final = 8 << 10
"""Bytes of such a buffer."""
LANES: Final = 512
"""Values that are added up exactly at a time; their sums stay in the nearest cache."""
LIMBS: Final = 72
"""Integers of a long accumulator, see `exact_kernels`."""


class SumTable:
    """A reduction of the buffers of all ranks by one function, in a given order or exactly.

    Attributes:
        function: address of `void(int64 target, int64 table, int64 ranks, int64 count)`.
        words: the table: addresses of the ranks' buffers, to be set; memory; what the function calls.
    """

    def __init__(self, sums: str, dtype: torch.dtype, op: ReduceOp, ranks: int) -> None:
        half = dtype in (torch.float16, torch.bfloat16)
        kernels = kernels_for(torch.float32 if half else dtype, op)
        if sums == "exact":
            self.function = c_kernel(_EXACT, "exact", dtype is torch.float64).address
            memory = 4 * LANES + LIMBS + ranks
        else:
            self.function = _address("tree")
            memory = LEVELS + (1 + ranks.bit_length()) * (PIECE // 8)
        self._memory = np.empty(memory, np.int64)
        resize = [_address("conversion", dtype, how) if half else 0 for how in ("WIDE", "NARROW")]
        width = dtype.itemsize // kernels.parts
        self.words: Any = np.array(
            [*[0] * ranks, self._memory.ctypes.data, kernels.combine, width, *resize], np.int64
        )
        self._ranks, self._per_element = ranks, kernels.parts
        self._numbers, self._sum = np.arange(ranks), _KERNEL(self.function)
        divide = kernels_for(dtype, op).divide
        self._divide = _KERNEL(divide) if divide else None

    def reduce(self, parts: torch.Tensor, out: torch.Tensor) -> None:
        """Reduce `parts` of all ranks, one after the other, into `out`: both flat and contiguous."""
        target, count = out.data_ptr(), out.numel() * self._per_element
        self.words[: self._ranks] = parts.data_ptr() + self._numbers * out.nbytes
        self._sum(target, self.words.ctypes.data, self._ranks, count)
        if self._divide is not None:
            self._divide(target, target, self._ranks, count)


def _address(name: str, *arguments: Any) -> int:
    address: int = c_kernel(_KERNELS, name, *arguments).address
    return address
