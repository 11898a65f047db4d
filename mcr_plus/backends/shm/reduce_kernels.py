"""Kernels of reductions: `target[i] = left[i] op right[i]`, compiled for each dtype and operation.

`reductions` has the addresses of kernels. `target` may be `left` or `right`, or
overlap neither. Blocks of 64 bytes are written as vector instructions, because a compiler that must rule out
overlaps does not vectorise equal buffers.

For float16 and bfloat16, every addition is computed in float32 and rounded to nearest even. Integers wrap
around, and means of integers are rounded towards zero. MIN and MAX are `minimum` and `maximum` of IEEE
754-2019: NaN if either side is NaN, and -0 is less than +0. MPI gets these kernels through `mpi_function`;
gloo compares `Keys`, integers in the order of the values.

PRODUCT of complex numbers multiplies by the definition, as torch does. Unlike in C, infinities are not
recovered if both parts are NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numba
import numba.extending
import numpy as np
import torch
from llvmlite import ir
from numba.core.errors import TypingError

from mcr_plus.backends.shm.atomics import call, copy, load_acquire, store_release
from mcr_plus.backends.shm.reductions import DTYPES, LEVELS, PIECE
from mcr_plus.core.kinds import ReduceOp
from mcr_plus.kernels.cpu import compiled

Emit = Callable[[Any, Any, Any], Any]
"""(llvmlite builder, value, value) → value."""

_numba: Any = numba  # partly annotated, which type checkers report
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
    """Stored type and computed type of a dtype's values."""

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
_INFINITE: Final[dict[torch.dtype, int]] = {
    torch.float64: 0x7FF << 52,
    torch.float32: 0xFF << 23,
    torch.float16: 0x1F << 10,
    torch.bfloat16: 0xFF << 7,
}
"""Bit pattern of infinity; without the sign, every NaN's pattern is larger."""
_OPS: Final = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "DIVIDE")
_CONVERSIONS: Final = ("MIN", "MAX", "VALUE", "WIDE", "NARROW")
# To keys for one of two operations, or back; of half types to float32, or back.


def _extreme(builder: Any, kind: str, sign: str, a: Any, b: Any) -> Any:
    """Return the larger value for `>`, the smaller one for `<`."""
    if kind != "f":
        compare = {"i": builder.icmp_signed, "u": builder.icmp_unsigned}[kind]
        return builder.select(compare(sign, a, b), a, b)
    # Not `llvm.maximum`, for which LLVM had no x86 instructions before version 17. If neither value is
    # greater, `second` wins: of two zeros it is the right one, and it is NaN unless only `first` is NaN.
    lanes = a.type.count if isinstance(a.type, ir.VectorType) else 1
    integer = _I64 if a.type in (_DOUBLE, _spread(_DOUBLE, lanes)) else _I32
    bits = builder.bitcast(a, _spread(integer, lanes))
    negative = builder.icmp_signed("<", bits, _constant(integer, lanes, 0))
    first, second = builder.select(negative, a, b), builder.select(negative, b, a)
    if sign == "<":
        first, second = second, first
    chosen = builder.select(builder.fcmp_ordered(sign, first, second), first, second)
    return builder.select(builder.fcmp_unordered("uno", first, first), first, chosen)


def _emit(op: str, kind: str) -> Emit:
    floating = kind == "f"
    emits: dict[str, Emit] = {
        "SUM": lambda builder, a, b: (builder.fadd if floating else builder.add)(a, b),
        "PRODUCT": lambda builder, a, b: (builder.fmul if floating else builder.mul)(a, b),
        "MIN": lambda builder, a, b: _extreme(builder, kind, "<", a, b),
        "MAX": lambda builder, a, b: _extreme(builder, kind, ">", a, b),
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
        # A NaN gets a fixed payload, since rounding could turn it into an infinity.
        nan = builder.fcmp_unordered("uno", value, value)
        rounded = builder.select(nan, _constant(_I32, lanes, 0x7FC00000), rounded)
        return builder.trunc(builder.lshr(rounded, _constant(_I32, lanes, 16)), _spread(_I16, lanes))
    return value


@_numba.extending.intrinsic(prefer_literal=True)
def _combine(typing_context, dtype, op, lanes, target, left, right):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Combine `lanes` values; the first three arguments are constants of the calling function."""
    if not all(isinstance(each, _types.IntegerLiteral) for each in (dtype, op, lanes)):
        raise TypingError("dtype, op and lanes must be constants")
    form, count = _FORMATS[DTYPES[dtype.literal_value]], lanes.literal_value
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
    """Divide `lanes` values in place by an integer; integers are rounded towards zero."""
    form, count = _FORMATS[DTYPES[dtype.literal_value]], lanes.literal_value
    stored = _spread(form.stored, count)
    size = _width(form.stored)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        pointer = builder.inttoptr(args[2], stored.as_pointer())
        value = builder.load(pointer, align=size)
        if form.kind != "f":  # in 64 bits, enough for any number of ranks
            wide = _spread(_I64, count)
            extend, divide = {"i": (builder.sext, builder.sdiv), "u": (builder.zext, builder.udiv)}[form.kind]
            quotient = divide(extend(value, wide), _splat(builder, args[3], count))
            builder.store(builder.trunc(quotient, stored), pointer, align=size)
            return
        by = _splat(builder, builder.sitofp(args[3], form.computed), count)
        quotient = builder.fdiv(_widened(builder, form, count, value), by)
        builder.store(_narrowed(builder, form, count, quotient), pointer, align=size)

    return _types.void(dtype, lanes, _types.int64, _types.int64), generate


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    """Return a vector of equal values."""
    if lanes == 1:
        return value
    vector = ir.Constant(_spread(value.type, lanes), ir.Undefined)
    for lane in range(lanes):
        vector = builder.insert_element(vector, value, ir.Constant(_I32, lane))
    return vector


@_numba.extending.intrinsic(prefer_literal=True)
def _convert(typing_context, dtype, conversion, lanes, target, source):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Convert `lanes` values, see `_CONVERSIONS`; the first three arguments are constants."""
    floating, count = DTYPES[dtype.literal_value], lanes.literal_value
    kind, width = _CONVERSIONS[conversion.literal_value], 8 * floating.itemsize
    bits, key = ir.IntType(width), ir.IntType(max(width, 32))

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        def pointer(address: Any, element: Any) -> Any:
            return builder.inttoptr(address, _spread(element, count).as_pointer())

        def constant(value: int) -> Any:
            return _constant(bits, count, value)

        def reflected(value: Any) -> Any:
            """Map integers in sign-magnitude order to two's complement order, and back."""
            return builder.xor(value, builder.and_(builder.ashr(value, constant(width - 1)), largest))

        if kind in ("WIDE", "NARROW"):
            form = _FORMATS[floating]
            of, to, change = form.stored, _FLOAT, _widened
            if kind == "NARROW":
                of, to, change = _FLOAT, form.stored, _narrowed
            value = builder.load(pointer(args[4], of), align=_width(of))
            builder.store(change(builder, form, count, value), pointer(args[3], to), align=_width(to))
            return
        largest = constant((1 << (width - 1)) - 1)
        if kind == "VALUE":
            value = builder.load(pointer(args[4], key), align=key.width // 8)
            value = value if key == bits else builder.trunc(value, _spread(bits, count))
            builder.store(reflected(value), pointer(args[3], bits), align=width // 8)
            return
        value = builder.load(pointer(args[4], bits), align=width // 8)
        is_nan = builder.icmp_unsigned(">", builder.and_(value, largest), constant(_INFINITE[floating]))
        of_nan = largest if kind == "MAX" else constant(-1 << (width - 1))
        value = builder.select(is_nan, of_nan, reflected(value))
        value = value if key == bits else builder.sext(value, _spread(key, count))
        builder.store(value, pointer(args[3], key), align=key.width // 8)

    return _types.void(dtype, conversion, lanes, _types.int64, _types.int64), generate


@_numba.extending.intrinsic(prefer_literal=True)
def _multiply(typing_context, dtype, target, left, right):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Multiply two complex values, each a pair of floating-point values of this dtype."""
    element = _FORMATS[DTYPES[dtype.literal_value]].stored
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


def _described(function: Callable[..., Any], third: Any = _types.int64) -> tuple[Any, Any]:
    """Return what `images.image` needs."""
    return _types.void(_types.int64, _types.int64, third, _types.int64), function


def _steps(dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the number of a dtype, the bytes of a value, and the values of a vector.

    Functions close over integers only, because these are part of the disk cache's key.
    """
    form = _FORMATS[dtype]
    return DTYPES.index(dtype), _width(form.stored), _BLOCK // _width(form.computed)


def kernel(dtype: torch.dtype, op: str) -> tuple[Any, Any]:
    """Describe the kernel of an operation, or of DIVIDE."""
    (code, size, lanes), action = _steps(dtype), _OPS.index(op)
    if op == "DIVIDE" and _FORMATS[dtype].kind != "f":
        lanes = 1  # processors divide one integer at a time
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

    return _described(divide if op == "DIVIDE" else combine)


def tree() -> tuple[Any, Any]:
    """Describe the reduction of buffers by a binary tree over the ranks, the same for every element.

    The leaves are the ranks in order. The 2^k ranks from a multiple of 2^k on are combined before others, and
    a rest from the right. Arguments: target, table (see `SumTable`), ranks, number of values.
    """

    def reduce_by_tree(target, table, ranks, count):  # type: ignore[no-untyped-def]
        after = table + 8 * ranks
        memory, combine, width = load_acquire(after), load_acquire(after + 8), load_acquire(after + 16)
        widen, narrow = load_acquire(after + 24), load_acquire(after + 32)
        if ranks == 2 and not widen:
            call(combine, target, load_acquire(table), load_acquire(table + 8), count)
            return
        buffers, step = memory + 8 * LEVELS, PIECE // (4 if widen else width)
        for begin in range(0, count, step):
            size, top, value = min(step, count - begin), np.int64(0), np.int64(0)
            for rank in range(ranks):
                value = load_acquire(table + 8 * rank) + begin * width
                if widen:
                    call(widen, buffers + top * PIECE, value, size, np.int64(0))
                    value = buffers + top * PIECE
                left = rank + 1
                while top > 0 and (
                    left % 2 == 0 or rank == ranks - 1
                ):  # the last rank combines the rest, too
                    top -= 1
                    left //= 2
                    into = buffers + top * PIECE
                    call(combine, into, load_acquire(memory + 8 * top), value, size)
                    value = into
                store_release(memory + 8 * top, value)
                top += 1
            if widen:
                call(narrow, target + begin * width, value, size, np.int64(0))
            else:
                copy(target + begin * width, value, size * width)

    return _described(reduce_by_tree)


def mpi_function(dtype: torch.dtype, op: ReduceOp) -> tuple[Any, Any]:
    """Describe `reductions.mpi_function`: `void* in, void* inout, int* count, void* datatype`."""
    if dtype.is_complex:
        code, size = DTYPES.index(dtype.to_real()), dtype.itemsize

        def multiply(source, target, count, datatype):  # type: ignore[no-untyped-def]  # noqa: ARG001
            for index in range(count[0]):
                at = index * size
                _multiply(code, target + at, source + at, target + at)

        return _described(multiply, _types.CPointer(_types.int32))

    (code, size, lanes), action = _steps(dtype), _OPS.index(op)
    step = lanes * size

    def combine(source, target, count, datatype):  # type: ignore[no-untyped-def]  # noqa: ARG001
        whole = count[0] // lanes
        for block in range(whole):
            at = block * step
            _combine(code, action, lanes, target + at, source + at, target + at)
        for index in range(whole * lanes, count[0]):
            at = index * size
            _combine(code, action, 1, target + at, source + at, target + at)

    return _described(combine, _types.CPointer(_types.int32))


def conversion(dtype: torch.dtype, kind: str) -> tuple[Any, Any]:
    """Describe a conversion function of the addresses of target and source, and the number of values."""
    (code, size, lanes), which = _steps(dtype), _CONVERSIONS.index(kind)
    key = max(size, 4)
    to, of = (size, key) if kind in ("VALUE", "NARROW") else (key, size)

    def convert(target, source, count, unused):  # type: ignore[no-untyped-def]  # noqa: ARG001
        whole = count // lanes
        for block in range(whole):
            _convert(code, which, lanes, target + block * lanes * to, source + block * lanes * of)
        for index in range(whole * lanes, count):
            _convert(code, which, 1, target + index * to, source + index * of)

    return _described(convert)


@compiled
def apply(function, target, first, second, third):  # type: ignore[no-untyped-def]
    """Call a function of this module by its address: two operands and a number of values, or one and 0."""
    call(function, target, first, second, third)


def prepare() -> None:
    """Compile the functions that call kernels by address, or load them from disk."""
    apply.compile((_types.int64,) * 5)


@compiled
def reduce_rows(combine, divide, parts, out, ranks, count, width):  # type: ignore[no-untyped-def]
    """Reduce `ranks` rows of `count` elements of `width` bytes in row order, with kernels of this module."""
    call(combine, out, parts, parts + count * width, count)
    for rank in range(2, ranks):
        call(combine, out, out, parts + rank * count * width, count)
    if divide:
        call(divide, out, out, ranks, count)


def complex_product(dtype: torch.dtype) -> tuple[Any, Any]:
    """Describe the kernel of PRODUCT on complex numbers of two values of `dtype`."""
    code, size = DTYPES.index(dtype), 2 * dtype.itemsize

    def combine(target, left, right, count):  # type: ignore[no-untyped-def]
        for index in range(count):
            at = index * size
            _multiply(code, target + at, left + at, right + at)

    return _described(combine)
