"""Intrinsics for memory shared by processes: ordered loads and stores, copies, pauses, futexes.

All are numba intrinsics on addresses (int64), not on arrays. So a compiled function takes a single array of
state with the addresses of all buffers, which makes calls as cheap as possible with numba. Addresses of
counters are multiples of 8.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any, Final

import numba
import numba.extending
from llvmlite import ir
from numba.core import cgutils

from mcr_plus.waiting.futex_memory import EVERYBODY, SYSTEM_CALL, WAKE

_numba: Any = numba  # numba's partial annotations make type checkers report errors
_types: Any = _numba.types
_I8: Final = ir.IntType(8)
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_AARCH64_YIELD: Final = 1
STREAMED: Final = 64
"""Bytes that `stream` copies."""


def _of_integers(arguments: int, returns: bool, emit: Callable[[Any, Any], Any]) -> Any:
    """Return a numba function of several int64 from LLVM instructions: `emit(builder, arguments)`."""
    result = _types.int64 if returns else _types.void

    def build() -> Any:
        return result(*[_types.int64] * arguments), (
            lambda context, builder, signature, args: emit(builder, args)  # noqa: ARG005
        )

    # numba inspects the parameters, so there is one function per number of parameters.
    def none(typing_context: Any) -> Any:  # noqa: ARG001
        return build()

    def one(typing_context: Any, a: Any) -> Any:  # noqa: ARG001
        return build()

    def two(typing_context: Any, a: Any, b: Any) -> Any:  # noqa: ARG001
        return build()

    def three(typing_context: Any, a: Any, b: Any, c: Any) -> Any:  # noqa: ARG001
        return build()

    def four(typing_context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:  # noqa: ARG001
        return build()

    def five(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:  # noqa: ARG001
        return build()

    chosen: Any = (none, one, two, three, four, five)[arguments]
    return _numba.extending.intrinsic(chosen)


def _emit_load(builder: Any, args: Any) -> Any:
    pointer = builder.inttoptr(args[0], _I64.as_pointer())
    return builder.load_atomic(pointer, "acquire", 8)


def _emit_store(builder: Any, args: Any) -> None:
    builder.store_atomic(args[1], builder.inttoptr(args[0], _I64.as_pointer()), "release", 8)


def _emit_pause(builder: Any, args: Any) -> None:  # noqa: ARG001
    # LLVM intrinsics, because numba has no parser for assembly.
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
    elif machine in ("aarch64", "arm64"):
        kind = ir.FunctionType(ir.VoidType(), [_I32])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
        builder.call(hint, [ir.Constant(_I32, _AARCH64_YIELD)])


def _emit_yield(builder: Any, args: Any) -> None:  # noqa: ARG001
    # Functions are called by name, which the linker resolves in every process: the disk cache cannot hold
    # addresses.
    kind = ir.FunctionType(_I32, [])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])


def _emit_clock(builder: Any, args: Any) -> Any:  # noqa: ARG001
    now = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))  # a timespec
    kind = ir.FunctionType(_I32, [_I32, now.type])
    function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
    builder.call(function, [ir.Constant(_I32, time.CLOCK_MONOTONIC), now])
    seconds, nanoseconds = (builder.load(cgutils.gep_inbounds(builder, now, 0, word)) for word in (0, 1))
    return builder.add(builder.mul(seconds, ir.Constant(_I64, 10**9)), nanoseconds)


def _emit_copy(builder: Any, args: Any) -> None:
    target, source, nbytes = args
    pointer = _I8.as_pointer()
    cgutils.raw_memcpy(
        builder, builder.inttoptr(target, pointer), builder.inttoptr(source, pointer), nbytes, 1
    )


def _emit_differs(builder: Any, args: Any) -> Any:
    kind = ir.FunctionType(_I32, [_I8.as_pointer(), _I8.as_pointer(), _I64])
    function = cgutils.get_or_insert_function(builder.module, kind, "memcmp")
    pointers = [builder.inttoptr(each, _I8.as_pointer()) for each in args[:2]]
    found = builder.call(function, [*pointers, args[2]])
    return builder.zext(builder.icmp_signed("!=", found, ir.Constant(_I32, 0)), _I64)


def _emit_remote_read(builder: Any, args: Any) -> Any:
    process, target, source, nbytes = args
    ranges = []
    for address in (target, source):
        found = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))  # an iovec
        builder.store(address, cgutils.gep_inbounds(builder, found, 0, 0))
        builder.store(nbytes, cgutils.gep_inbounds(builder, found, 0, 1))
        ranges.append(found)
    one, pointer = ir.Constant(_I64, 1), ranges[0].type
    kind = ir.FunctionType(_I64, [_I32, pointer, _I64, pointer, _I64, _I64])
    function = cgutils.get_or_insert_function(builder.module, kind, "process_vm_readv")
    number = builder.trunc(process, _I32)
    return builder.call(function, [number, ranges[0], one, ranges[1], one, ir.Constant(_I64, 0)])


def _emit_call(builder: Any, args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_I64] * 4)
    builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])


def _emit_stream(builder: Any, args: Any) -> None:
    kind = ir.VectorType(_I64, STREAMED // 8)
    value = builder.load(builder.inttoptr(args[1], kind.as_pointer()), align=1)
    stored = builder.store(value, builder.inttoptr(args[0], kind.as_pointer()), align=STREAMED)
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))


def _emit_fence(builder: Any, args: Any) -> None:  # noqa: ARG001
    builder.fence("seq_cst")


def _emit_exchange(builder: Any, args: Any) -> Any:
    pointer = builder.inttoptr(args[0], _I64.as_pointer())
    return builder.atomic_rmw("xchg", pointer, args[1], "seq_cst")


def _emit_wake(builder: Any, args: Any) -> None:
    kind = ir.FunctionType(_I64, [_I64], var_arg=True)
    function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    words = (SYSTEM_CALL, args[0], WAKE, EVERYBODY, 0, 0, 0)
    builder.call(
        function, [word if isinstance(word, ir.Value) else ir.Constant(_I64, word) for word in words]
    )


load_acquire: Final = _of_integers(1, True, _emit_load)
"""`load_acquire(address) -> value`: writes before the matching release are visible after it."""
store_release: Final = _of_integers(2, False, _emit_store)
"""`store_release(address, value)`: all earlier writes are visible to a thread that acquires the value."""
pause: Final = _of_integers(0, False, _emit_pause)
"""Hint to the core that this is a spin wait: it uses less power, and leaves the wait sooner."""
sched_yield: Final = _of_integers(0, False, _emit_yield)
"""Yield the core to another process."""
clock: Final = _of_integers(0, True, _emit_clock)
"""`clock() -> nanoseconds`, of the monotonic clock."""
copy: Final = _of_integers(3, False, _emit_copy)
"""`copy(target, source, nbytes)` by the C library; the two may not overlap."""
remote_read: Final = _of_integers(4, True, _emit_remote_read)
"""`remote_read(process, target, source, nbytes) -> nbytes`, or less on failure: copy from a process's memory.

See process_vm_readv(2). The calling process needs the right to trace the other one.
"""
differs: Final = _of_integers(3, True, _emit_differs)
"""`differs(a, b, nbytes) -> 1` or 0, by the C library."""
stream: Final = _of_integers(2, False, _emit_stream)
"""`stream(target, source)`: copy `STREAMED` bytes past the caches; `target` is a multiple of them.

Not ordered by `store_release`: a `fence` must follow before other threads read it.
"""
fence: Final = _of_integers(0, False, _emit_fence)
"""Order all earlier accesses, streamed stores included, before all later ones."""
exchange: Final = _of_integers(2, True, _emit_exchange)
"""`exchange(address, value) -> value`: atomic exchange, sequentially consistent."""
futex_wake: Final = _of_integers(1, False, _emit_wake)
"""Wake all threads of all processes that sleep on a word of shared memory."""
call: Final = _of_integers(5, False, _emit_call)
"""`call(function, a, b, c, d)`: call a C function of four int64 by its address."""
