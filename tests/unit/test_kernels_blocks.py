"""The kernels of codecs of fixed rate agree bit for bit, format by format: torch, the CPU, Triton."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_exam import for_triton, hard_tensors, same_bits, triton_device
from tiers import examples

from mcr_plus.kernels import fp8_block, int2_block, int4_block, int8_block, sign1


@dataclass(frozen=True)
class Format:
    """A format of payloads.

    Attributes:
        kernel: its module.
        block: values of a block, or of the blocks that are encoded together.
        arguments: last arguments of `encode`, `decode`, `accumulate` and `reduce`.
        sizing: the arguments that `nbytes` and `split` take, too.
    """

    kernel: ModuleType
    block: int
    arguments: tuple[Any, ...] = ()
    sizing: tuple[Any, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return numbers of values around the sizes of blocks and of their lanes."""
        return (1, 5, 31, 33, self.block - 1, self.block, self.block + 1, 1000, 5003)

    def empty(self, values: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Return an empty payload for `values`."""
        return torch.full((self.kernel.nbytes(values.numel(), *self.sizing),), fill, dtype=torch.uint8)

    def encoded(self, values: torch.Tensor) -> torch.Tensor:
        """Return the payload of `values` by the CPU kernel."""
        wire = self.empty(values)
        self.kernel.encode(values, wire, *self.arguments)
        return wire

    def expected(self, values: torch.Tensor) -> torch.Tensor:
        """Return the payload by torch."""
        wire = self.empty(values)
        self.kernel.encode_reference(values, wire, *self.arguments)
        return wire

    def gpu_encode(self, gpu: Any, values: torch.Tensor, wire: torch.Tensor) -> None:
        """Encode by Triton."""
        size = values.numel()
        last: tuple[float, ...] = ()
        if self.kernel is sign1:
            last = (sign1.mean_factor(size - (sign1.blocks_of(size) - 1) * sign1.BLOCK),)
        gpu.encode(values, *self.kernel.split(wire, size, *self.sizing), *self.arguments, *last)

    def gpu_decode(self, gpu: Any, wire: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        """Decode by Triton; with `add`, 0.3 times the values are added."""
        parts = self.kernel.split(wire, out.numel(), *self.sizing)
        if self.kernel not in (int8_block, sign1):
            gpu.decode(*parts, out, 0.3, add, *self.arguments)
        elif add:
            gpu.accumulate(*parts, out, 0.3)
        else:
            gpu.decode(*parts, out)


FORMATS: Final = {
    "int8_block": Format(int8_block, 256),
    "int4_block": Format(int4_block, 256, (False,)),
    "int4_block hadamard": Format(int4_block, 256, (True,)),
    "int2_block": Format(int2_block, 128),
    "sign1": Format(sign1, 1024),
    **{
        f"{name} {scale}": Format(fp8_block, 256, (fp8_block.FORMATS[name], scale), (scale,))
        for name in fp8_block.FORMATS
        for scale in ("float32", "e8m0")
    },
}
every_format = pytest.mark.parametrize("name", FORMATS)


def check(name: str, what: str, values: torch.Tensor) -> None:
    """Check the CPU kernels against the torch reference."""
    form = FORMATS[name]
    wire = form.encoded(values)
    same_bits(what, wire, form.expected(values))
    outs = [torch.empty_like(values) for _ in range(2)]
    form.kernel.decode(wire, outs[0], *form.arguments)
    form.kernel.decode_reference(wire, outs[1], *form.arguments)
    same_bits(what, *outs)
    total, once = torch.ones_like(values), torch.ones_like(values)
    form.kernel.accumulate(wire, total, 1.0, *form.arguments)
    same_bits(what, total, once + outs[1])


@every_format
def test_the_cpu_kernels_are_the_reference(name: str) -> None:
    for what, values in hard_tensors(FORMATS[name].sizes):
        check(name, what, values)


@every_format
@settings(max_examples=examples(20))
@given(values=st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=300))
def test_any_floats(name: str, values: list[float]) -> None:
    check(name, "drawn", torch.tensor(values, dtype=torch.float32))


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if hasattr(form.kernel, "reduce")])
@pytest.mark.parametrize("skip", [-1, 1])
def test_reducing_is_accumulating_and_encoding(name: str, skip: int) -> None:
    form = FORMATS[name]
    for size in (*form.sizes, 20_003):
        rows = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
        rows[0, size // 2] = torch.inf
        wires, total = torch.stack([form.encoded(row) for row in rows]), torch.linspace(-1, 1, size)
        expected = total.clone()
        for row in (row for row in range(3) if row != skip):
            form.kernel.accumulate(wires[row], expected, 0.3, *form.arguments)
        wire = form.empty(total)
        form.kernel.reduce(wires, skip, total, wire, 0.3, *form.arguments)
        same_bits(f"sum of {size}", total, expected)
        same_bits(f"payload of {size}", wire, form.encoded(expected))


@every_format
@pytest.mark.short("e4m3 float32", "int2_block", "int4_block hadamard", "int8_block", "sign1")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # inf - inf is NaN, as wanted
def test_the_triton_kernels_are_the_reference(name: str) -> None:
    device, form = triton_device(), FORMATS[name]
    gpu = importlib.import_module(f"mcr_plus.kernels.gpu.{form.kernel.__name__.rpartition('.')[2]}")
    for what, values in for_triton(hard_tensors(form.sizes)):
        wire = form.expected(values)
        there = torch.zeros_like(wire, device=device)
        form.gpu_encode(gpu, values.to(device), there)
        same_bits(what, wire, there)
        out, total = torch.empty_like(values), torch.ones_like(values)
        form.kernel.decode_reference(wire, out, *form.arguments)
        form.kernel.accumulate(wire, total, 0.3, *form.arguments)
        for add, expected in ((False, out), (True, total)):
            got = torch.ones(values.numel(), device=device)
            form.gpu_decode(gpu, there, got, add)
            same_bits(what, expected, got)
