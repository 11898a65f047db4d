"""Compile the codecs' Triton kernels for a GPU, without one, by the calls that codecs make.

    python compile_kernels.py NAME…      names of modules of mcr_plus.kernels.gpu

A launch compiles its kernel for the types of its arguments to machine code of compute capability 9.0, and
runs nothing. Prints the compiled kernels.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from itertools import product
from typing import Any, Final, get_args

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from mcr_plus.kernels.digest import blocks_of
from mcr_plus.kernels.fp8_block import FORMATS, Scale

TARGET: Final = GPUTarget("cuda", 90, 32)
TYPES: Final = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
NUMEL: Final = 40_000
SCALES: Final = torch.zeros(NUMEL)
CODES, HALVES, WORDS = (torch.zeros(NUMEL, dtype=dtype) for dtype in (torch.uint8, torch.int16, torch.int32))
done: Final[set[str]] = set()


def type_of(value: Any) -> str:
    """Return an argument's type, as launches derive it."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
    """Compile a kernel instead of launching it."""
    names = [param.name for param in kernel.params]
    constant = {param.name for param in kernel.params if param.is_constexpr}
    values = dict(zip(names, args, strict=False)) | {n: v for n, v in given.items() if n in names}
    options = {name: value for name, value in given.items() if name not in names}
    # Launches make constants of integers that are 1.
    constants = {n: v for n, v in values.items() if n in constant or (type(v) is int and v == 1)}
    types = {n: "constexpr" if n in constants else type_of(values[n]) for n in names}
    source = ASTSource(kernel, types, {(names.index(n),): v for n, v in constants.items()})
    compiled = triton.compile(source, target=TARGET, options=options)
    assert compiled.asm["cubin"]
    done.add(f"{kernel.fn.__name__} {' '.join(types.values())} {constants}")


def _cast(gpu: Any, values: torch.Tensor) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        gpu.encode(values, values.to(dtype), (3, 5))


def _delta(gpu: Any, values: torch.Tensor) -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        new = values.to(dtype)
        gpu.encode(new, torch.zeros_like(new))
        gpu.apply(torch.zeros(blocks_of(NUMEL), 2, dtype=torch.int32), CODES, new)


def _digest(gpu: Any, values: torch.Tensor) -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        for numel in (1, NUMEL):  # of one element, numbers become constants
            gpu.hashes_of(values[:numel].to(dtype))


def _fp8_block(gpu: Any, values: torch.Tensor) -> None:
    for fmt, scale in product(FORMATS.values(), get_args(Scale)):
        scales = CODES if scale == "e8m0" else SCALES
        gpu.encode(values, scales, CODES, fmt, scale)
        for add in (False, True):
            gpu.decode(scales, CODES, values, 0.5, add, fmt, scale)


def _int2_block(gpu: Any, values: torch.Tensor) -> None:
    gpu.encode(values, HALVES, CODES)
    for add in (False, True):
        gpu.decode(HALVES, CODES, values, 0.5, add=add)


def _int4_block(gpu: Any, values: torch.Tensor) -> None:
    for hadamard in (False, True):
        gpu.encode(values, HALVES, CODES, hadamard)
        for add in (False, True):
            gpu.decode(HALVES, CODES, values, 0.5, add, hadamard)


def _int8_block(gpu: Any, values: torch.Tensor) -> None:
    codes = CODES.view(torch.int8)
    gpu.encode(values, SCALES, codes)
    gpu.decode(SCALES, codes, values)
    gpu.accumulate(SCALES, codes, values, 0.5)


def _int_shared(gpu: Any, values: torch.Tensor) -> None:
    gpu.amax(values, SCALES)
    for lanes in (1, 2, 4):
        gpu.encode(values, SCALES, WORDS, 100, lanes)
        for add in (False, True):
            gpu.decode(SCALES, WORDS, values, 100, lanes, 0.5, add)


def _sign1(gpu: Any, values: torch.Tensor) -> None:
    gpu.encode(values, SCALES, WORDS, 0.5)
    gpu.decode(SCALES, WORDS, values)
    gpu.accumulate(SCALES, WORDS, values, 0.5)


def _sums(gpu: Any, values: torch.Tensor) -> None:
    for dtype, ranks in product((torch.float64, torch.float32, torch.float16, torch.bfloat16), (2, 3, 64)):
        rows = values[: NUMEL // 64 * ranks].view(ranks, -1).to(dtype)
        out = torch.zeros(NUMEL // 64, dtype=dtype if dtype is torch.float64 else torch.float32)
        for is_product in (False, True):
            gpu.tree(rows, out, is_product)
        gpu.exact(rows, out)


MODULES: Final[dict[str, Callable[[Any, torch.Tensor], None]]] = {
    "cast": _cast,
    "delta": _delta,
    "digest": _digest,
    "fp8_block": _fp8_block,
    "int2_block": _int2_block,
    "int4_block": _int4_block,
    "int8_block": _int8_block,
    "int_shared": _int_shared,
    "sign1": _sign1,
    "sums": _sums,
}


if __name__ == "__main__":
    JITFunction.run = compile_launch  # pyright: ignore[reportAttributeAccessIssue] - it takes the same
    for name in sys.argv[1:]:
        MODULES[name](importlib.import_module(f"mcr_plus.kernels.gpu.{name}"), torch.randn(NUMEL))
    print("\n".join(sorted(done)))
