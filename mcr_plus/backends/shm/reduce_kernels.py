"""Kernels of reductions: `target[i] = left[i] op right[i]`, compiled for each dtype and operation.

A kernel is a C function `void(int64 target, int64 left, int64 right, int64 count)`, reached by its address:
so the functions that move data are compiled once and not for every dtype. `target` may be `left` or `right`,
or overlap neither. Blocks of 64 bytes are written as vector instructions, because a compiler that must rule
out overlaps does not vectorise equal buffers.

float16 and bfloat16 are widened to float32, combined, and rounded to nearest even, in every addition. MIN
and MAX give NaN if either side is NaN, as torch does. Integers wrap around.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

import numba
import numba.extending
import torch
from llvmlite import ir
from numba.core.errors import TypingError

from mcr_plus.core.kinds import ReduceOp, dtype_name
from mcr_plus.errors import Unsupported
from mcr_plus.kernels.cpu import c_function

Emit = Callable[[Any, Any, Any], Any]
"""(llvmlite builder, value, value) → value."""

_numba: Any = numba  # partly annotated, which type checkers report here
_types: Any = _numba.types
_I16: Final = ir.IntType(16)
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_FLOAT: Final = ir.FloatType()
_DOUBLE: Final = ir.DoubleType()
_HALF: Final = ir.HalfType()
_BLOCK: Final = 64
"""Bytes of a vector of computed values."""


class _Format(NamedTuple):
    """The stored and the computed type of values of a dtype."""

    stored: Any
    computed: Any
    kind: str  # f: floating, i: signed, u: unsigned
    narrow: str = ""


_FORMATS: Final[dict[torch.dtype, _Format]] = {
    torch.float64: _Format(_DOUBLE, _DOUBLE, "f"),
    torch.float32: _Format(_FLOAT, _FLOAT, "f"),
    torch.float16: _Format(_I16, _FLOAT, "f", "float16"),
    torch.bfloat16: _Format(_I16, _FLOAT, "f", "bfloat16"),
    torch.int8: _Format(ir.IntType(8), ir.IntType(8), "i"),
    torch.int16: _Format(_I16, _I16, "i"),
    torch.int32: _Format(_I32, _I32, "i"),
    torch.int64: _Format(_I64, _I64, "i"),
    torch.uint8: _Format(ir.IntType(8), ir.IntType(8), "u"),
}
_DTYPES: Final = tuple(_FORMATS)
_LOGIC: Final[dict[str, str]] = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
"""Arithmetic on bool, whose bytes are 0 or 1."""
_OPS: Final = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "DIVIDE")


def _chosen(builder: Any, better: Any, kind: str, a: Any, b: Any) -> Any:
    """`a` where it is better or NaN, else `b`."""
    if kind == "f":
        better = builder.or_(better, builder.fcmp_unordered("uno", a, a))
    return builder.select(better, a, b)


def _compare(builder: Any, kind: str, sign: str, a: Any, b: Any) -> Any:
    compare = {"f": builder.fcmp_ordered, "i": builder.icmp_signed, "u": builder.icmp_unsigned}[kind]
    return compare(sign, a, b)


def _emit(op: str, kind: str) -> Emit:
    floating = kind == "f"
    emits: dict[str, Emit] = {
        "SUM": lambda builder, a, b: (builder.fadd if floating else builder.add)(a, b),
        "PRODUCT": lambda builder, a, b: (builder.fmul if floating else builder.mul)(a, b),
        "MIN": lambda builder, a, b: _chosen(builder, _compare(builder, kind, "<", a, b), kind, a, b),
        "MAX": lambda builder, a, b: _chosen(builder, _compare(builder, kind, ">", a, b), kind, a, b),
        "BAND": lambda builder, a, b: builder.and_(a, b),
        "BOR": lambda builder, a, b: builder.or_(a, b),
        "BXOR": lambda builder, a, b: builder.xor(a, b),
    }
    return emits[op]


def _spread(element: Any, lanes: int) -> Any:
    return element if lanes == 1 else ir.VectorType(element, lanes)


def _constant(element: Any, lanes: int, value: int) -> Any:
    single = ir.Constant(element, value)
    return single if lanes == 1 else ir.Constant(ir.VectorType(element, lanes), [single] * lanes)


def _widened(builder: Any, form: _Format, lanes: int, value: Any) -> Any:
    floats = _spread(_FLOAT, lanes)
    if form.narrow == "float16":
        return builder.fpext(builder.bitcast(value, _spread(_HALF, lanes)), floats)
    if form.narrow == "bfloat16":
        wide = builder.zext(value, _spread(_I32, lanes))
        return builder.bitcast(builder.shl(wide, _constant(_I32, lanes, 16)), floats)
    return value


def _narrowed(builder: Any, form: _Format, lanes: int, value: Any) -> Any:
    if form.narrow == "float16":
        half = builder.fptrunc(value, _spread(_HALF, lanes))
        return builder.bitcast(half, _spread(_I16, lanes))
    if form.narrow == "bfloat16":
        bits = builder.bitcast(value, _spread(_I32, lanes))
        odd = builder.and_(builder.lshr(bits, _constant(_I32, lanes, 16)), _constant(_I32, lanes, 1))
        rounded = builder.add(builder.add(bits, _constant(_I32, lanes, 0x7FFF)), odd)
        # A NaN gets a fixed payload, since rounding could make it infinite.
        nan = builder.fcmp_unordered("uno", value, value)
        rounded = builder.select(nan, _constant(_I32, lanes, 0x7FC00000), rounded)
        return builder.trunc(builder.lshr(rounded, _constant(_I32, lanes, 16)), _spread(_I16, lanes))
    return value


@_numba.extending.intrinsic(prefer_literal=True)
def _combine(typing_context, dtype, op, lanes, target, left, right):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Combine `lanes` values; the first three arguments are constants of the calling function."""
    if not all(isinstance(each, _types.IntegerLiteral) for each in (dtype, op, lanes)):
        raise TypingError("dtype, op and lanes must be constants")
    form, count = _FORMATS[_DTYPES[dtype.literal_value]], lanes.literal_value
    emit = _emit(_OPS[op.literal_value], form.kind)
    stored = _spread(form.stored, count)
    size = _width(form.stored)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        def pointer(address: Any) -> Any:
            return builder.inttoptr(address, stored.as_pointer())

        def load(address: Any) -> Any:
            return _widened(builder, form, count, builder.load(pointer(address), align=size))

        value = emit(builder, load(args[4]), load(args[5]))
        builder.store(_narrowed(builder, form, count, value), pointer(args[3]), align=size)

    return _types.void(dtype, op, lanes, _types.int64, _types.int64, _types.int64), generate


@_numba.extending.intrinsic(prefer_literal=True)
def _divide(typing_context, dtype, lanes, target, divisor):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Divide `lanes` floating-point values in place by an integer."""
    form, count = _FORMATS[_DTYPES[dtype.literal_value]], lanes.literal_value
    stored = _spread(form.stored, count)
    size = _width(form.stored)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        pointer = builder.inttoptr(args[2], stored.as_pointer())
        value = _widened(builder, form, count, builder.load(pointer, align=size))
        by = builder.sitofp(args[3], form.computed)
        if count > 1:
            vector = ir.Constant(_spread(form.computed, count), ir.Undefined)
            for lane in range(count):
                vector = builder.insert_element(vector, by, ir.Constant(_I32, lane))
            by = vector
        builder.store(_narrowed(builder, form, count, builder.fdiv(value, by)), pointer, align=size)

    return _types.void(dtype, lanes, _types.int64, _types.int64), generate


@_numba.extending.intrinsic(prefer_literal=True)
def _multiply(typing_context, dtype, target, left, right):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Multiply two complex values, pairs of floating-point ones of this dtype."""
    element = _FORMATS[_DTYPES[dtype.literal_value]].stored
    size = _width(element)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        def pointers(address: Any) -> list[Any]:
            first = builder.inttoptr(address, element.as_pointer())
            return [first, builder.gep(first, [ir.Constant(_I64, 1)])]

        a, b, c, d = (builder.load(each, align=size) for each in pointers(args[2]) + pointers(args[3]))
        real = builder.fsub(builder.fmul(a, c), builder.fmul(b, d))
        imaginary = builder.fadd(builder.fmul(a, d), builder.fmul(b, c))
        for value, pointer in zip((real, imaginary), pointers(args[1]), strict=True):
            builder.store(value, pointer, align=size)

    return _types.void(dtype, _types.int64, _types.int64, _types.int64), generate


def _width(element: Any) -> int:
    return {_DOUBLE: 8, _FLOAT: 4}.get(element) or element.width // 8


def _cfunc(function: Callable[..., Any]) -> Any:
    return c_function(_types.void(*[_types.int64] * 4), function)


@cache
def _kernel(dtype: torch.dtype, op: str) -> Any:
    form = _FORMATS[dtype]
    # The function closes over integers only, since they are part of the key of the cache on disk.
    code, action, size = _DTYPES.index(dtype), _OPS.index(op), _width(form.stored)
    lanes = _BLOCK // _width(form.computed)
    step = lanes * size

    def combine(target, left, right, count):  # type: ignore[no-untyped-def]
        whole = count // lanes
        for block in range(whole):
            at = block * step
            _combine(code, action, lanes, target + at, left + at, right + at)
        for index in range(whole * lanes, count):
            at = index * size
            _combine(code, action, 1, target + at, left + at, right + at)

    def divide(target, left, right, count):  # type: ignore[no-untyped-def]  # noqa: ARG001
        whole = count // lanes
        for block in range(whole):
            _divide(code, lanes, target + block * step, right)
        for index in range(whole * lanes, count):
            _divide(code, 1, target + index * size, right)

    return _cfunc(divide if op == "DIVIDE" else combine)


@cache
def _complex_product(dtype: torch.dtype) -> Any:
    code, size = _DTYPES.index(dtype), 2 * dtype.itemsize

    def combine(target, left, right, count):  # type: ignore[no-untyped-def]
        for index in range(count):
            at = index * size
            _multiply(code, target + at, left + at, right + at)

    return _cfunc(combine)


class ReduceKernels(NamedTuple):
    """Addresses of the kernels of one reduction.

    Attributes:
        combine: `target = left op right`.
        divide: `target /= right`, where `right` is the number of ranks; 0 for all operations but AVG.
        parts: values of the kernels in one element; 2 where complex numbers are taken as pairs.
    """

    combine: int = 0
    divide: int = 0
    parts: int = 1


@cache
def kernels_for(dtype: torch.dtype, op: ReduceOp) -> ReduceKernels:
    """Return the kernels of `op` on `dtype`; the first call compiles them in some tenths of a second.

    Raises:
        Unsupported: `op` is not defined on `dtype`.
    """
    if dtype.is_complex and op in ("SUM", "AVG"):
        return kernels_for(dtype.to_real(), op)._replace(parts=2)
    if dtype.is_complex and op == "PRODUCT":
        return ReduceKernels(_complex_product(dtype.to_real()).address)
    if dtype is torch.bool:
        return ReduceKernels(_kernel(torch.uint8, _LOGIC.get(op, op)).address)
    form = _FORMATS.get(dtype)
    if form is None:
        known = ", ".join(map(dtype_name, (*_FORMATS, torch.bool)))
        raise Unsupported(f"reduce op {op} on {dtype_name(dtype)}; known: {known}")
    if op == "AVG" and form.kind == "f":
        return ReduceKernels(_kernel(dtype, "SUM").address, _kernel(dtype, "DIVIDE").address)
    if op == "AVG" or (op in ("BAND", "BOR", "BXOR") and form.kind == "f"):
        raise Unsupported(f"reduce op {op} on {dtype_name(dtype)}")
    return ReduceKernels(_kernel(dtype, op).address)
