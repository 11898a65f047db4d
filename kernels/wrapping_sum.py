"""Sums of small integers that wrap around, as C callbacks for MPI.

Open MPI's vectorised SUM saturates 8- and 16-bit integers (component op/avx, as of 5.0) and its scalar one
wraps, so the same sum depends on the processor and on an element's position. Ours wraps, as torch does.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numba
import torch

_numba: Any = numba  # annotated in part, which type checkers take for a mistake of ours
_INTEGERS: Final = {torch.int8: numba.int8, torch.int16: numba.int16, torch.uint8: numba.uint8}


@cache
def wrapping_sum(dtype: torch.dtype) -> Any:
    """A numba cfunc `void(void* in, void* inout, int* count, void* datatype)`: `inout = in + inout`.

    The signature of MPI_User_function (MPI 4.1, section 6.9.5); `.address` is the function pointer. Kept
    alive by the cache. Compiled on first use, for this machine.
    """
    pointer = _numba.types.CPointer(_INTEGERS[dtype])

    count_pointer = _numba.types.CPointer(_numba.int32)
    carray = _numba.carray

    @_numba.cfunc(_numba.void(pointer, pointer, count_pointer, _numba.types.voidptr))
    def run(source, target, count, datatype):  # type: ignore[no-untyped-def]  # noqa: ARG001
        values, results = carray(source, count[0]), carray(target, count[0])
        for i in range(results.size):
            results[i] += values[i]

    return run
