"""Sums of small integers that wrap around, as C callbacks for MPI.

Open MPI's vectorised SUM saturates 8- and 16-bit integers (component op/avx, as of 5.0) and its scalar one
wraps, so the same sum depends on the processor and on an element's position. Ours wraps, as torch does.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from numba import carray, cfunc, types

SATURATED: Final = {torch.int8: types.int8, torch.int16: types.int16, torch.uint8: types.uint8}


@cache
def wrapping_sum(dtype: torch.dtype) -> Any:
    """A numba cfunc `void(void* in, void* inout, int* count, void* datatype)`: `inout = in + inout`.

    The signature of MPI_User_function (MPI 4.1, section 6.9.5); `.address` is the function pointer. Kept
    alive by the cache. Compiled on first use, for this machine.
    """
    pointer = types.CPointer(SATURATED[dtype])

    @cfunc(types.void(pointer, pointer, types.CPointer(types.int32), types.voidptr))  # type: ignore[untyped-decorator]
    def run(source, target, count, datatype):  # type: ignore[no-untyped-def]  # noqa: ARG001
        values, results = carray(source, count[0]), carray(target, count[0])
        for i in range(results.size):
            results[i] += values[i]

    return run
