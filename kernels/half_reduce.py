"""Reductions of float16 and bfloat16 as C callbacks, for libraries that know neither (MPI).

Each element is widened to float32, combined, and rounded to nearest even once. NaN stays NaN; MIN and MAX
give NaN if either side is NaN, as torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, Literal

import numba
import numba.extending
import torch
from llvmlite import ir
from numba.core.errors import TypingError

HalfOp = Literal["SUM", "PRODUCT", "MIN", "MAX"]
Emit = Callable[[Any, Any], Any]
"""(llvmlite builder, value) → value."""

_numba: Any = numba  # annotated in part, which type checkers take for a mistake of ours
_FLOAT: Final = ir.FloatType()
_I16: Final = ir.IntType(16)
_I32: Final = ir.IntType(32)
_QUIET_NAN: Final = ir.Constant(_I32, 0x7FC00000)
_SIXTEEN: Final = ir.Constant(_I32, 16)


def _conversion(source: Any, target: Any, emit: Emit) -> Any:
    """A numba function of one value from LLVM instructions."""

    def convert(typing_context: Any, value: Any) -> Any:  # noqa: ARG001 - numba's calling convention
        if value != source:
            raise TypingError(f"expected {source}, got {value}")
        return target(source), lambda context, builder, signature, args: emit(builder, args[0])  # noqa: ARG005

    return _numba.extending.intrinsic(convert)


def _emit_narrow_bfloat16(builder: Any, value: Any) -> Any:
    """Round to nearest even on the bits; a NaN gets a payload of its own, lest rounding make it infinite."""
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, _SIXTEEN), ir.Constant(_I32, 1))
    rounded = builder.add(builder.add(bits, ir.Constant(_I32, 0x7FFF)), odd)
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), _QUIET_NAN, rounded)
    return builder.trunc(builder.lshr(chosen, _SIXTEEN), _I16)


_WIDEN: Final[dict[torch.dtype, Emit]] = {
    torch.bfloat16: lambda b, v: b.bitcast(b.shl(b.zext(v, _I32), _SIXTEEN), _FLOAT),
    torch.float16: lambda b, v: b.fpext(b.bitcast(v, ir.HalfType()), _FLOAT),
}
_NARROW: Final[dict[torch.dtype, Emit]] = {
    torch.bfloat16: _emit_narrow_bfloat16,
    torch.float16: lambda b, v: b.bitcast(b.fptrunc(v, ir.HalfType()), _I16),
}


def _combine(op: HalfOp) -> Any:
    def add(a, b):  # type: ignore[no-untyped-def]
        return a + b

    def multiply(a, b):  # type: ignore[no-untyped-def]
        return a * b

    def smaller(a, b):  # type: ignore[no-untyped-def]
        return a if (a < b or a != a) else b

    def larger(a, b):  # type: ignore[no-untyped-def]
        return a if (a > b or a != a) else b

    chosen: Callable[..., Any] = {"SUM": add, "PRODUCT": multiply, "MIN": smaller, "MAX": larger}[op]
    return _numba.njit(chosen)


@cache
def reducer(op: HalfOp, dtype: torch.dtype) -> Any:
    """A numba cfunc `void(void* in, void* inout, int* count, void* datatype)`: `inout = in op inout`.

    The signature of MPI_User_function (MPI 4.1, section 6.9.5); `.address` is the function pointer. Kept
    alive by the cache. Compiled on first use, for this machine.
    """
    types, carray = _numba.types, _numba.carray
    combine = _combine(op)
    widen = _conversion(types.uint16, types.float32, _WIDEN[dtype])
    narrow = _conversion(types.float32, types.uint16, _NARROW[dtype])
    pointer = types.CPointer(types.uint16)

    @_numba.cfunc(types.void(pointer, pointer, types.CPointer(types.int32), types.voidptr))
    def run(source, target, count, datatype):  # type: ignore[no-untyped-def]  # noqa: ARG001
        values, results = carray(source, count[0]), carray(target, count[0])
        for i in range(results.size):
            results[i] = narrow(combine(widen(values[i]), widen(results[i])))

    return run
