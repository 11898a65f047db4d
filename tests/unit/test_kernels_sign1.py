"""The kernels of sign1 agree bit for bit, in the mean as well."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_exam import f64
from kernel_exam import for_triton, hard_tensors, same_bits, triton_device

from mcr_plus.kernels import sign1 as kernel

SIZES = (1, 5, 31, 33, 1000, 1023, 1024, 1025, 5003)


def test_the_cpu_kernels_are_the_reference() -> None:
    for what, values in hard_tensors(SIZES):
        wires = [torch.zeros(kernel.nbytes(values.numel()), dtype=torch.uint8) for _ in range(2)]
        kernel.encode(values, wires[0])
        kernel.encode_reference(values, wires[1])
        same_bits(what, *wires)
        outs = [torch.empty_like(values) for _ in range(2)]
        kernel.decode(wires[0], outs[0])
        kernel.decode_reference(wires[0], outs[1])
        same_bits(what, *outs)


def test_contents_of_a_payload() -> None:
    """By the layout of the docstring, one value at a time."""
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    wire = torch.zeros(kernel.nbytes(3000), dtype=torch.uint8)
    kernel.encode(values, wire)
    raw = wire.numpy()
    words = raw[12:].view("<u4").reshape(3, 32)
    for at, value in enumerate(values.tolist()):
        block, inside = divmod(at, 1024)
        assert bool(words[block, inside % 32] >> (inside // 32) & 1) == (value < 0)
    means = [np.abs(f64(values)[at : at + 1024]).mean() for at in (0, 1024, 2048)]
    np.testing.assert_allclose(raw[:12].view("<f4"), means, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 700, 1024, 2500])
def test_blocks_of_the_largest_float_stay_finite(size: int) -> None:
    values = torch.full((size,), -torch.finfo(torch.float32).max)
    wire, out = torch.zeros(kernel.nbytes(size), dtype=torch.uint8), torch.empty(size)
    kernel.encode(values, wire)
    kernel.decode(wire, out)
    torch.testing.assert_close(out, values, rtol=1e-5, atol=0)


def test_the_triton_kernels_are_the_reference() -> None:
    device = triton_device()
    from mcr_plus.kernels.gpu import sign1 as gpu

    for what, values in for_triton(hard_tensors(SIZES)):
        size = values.numel()
        wire = torch.zeros(kernel.nbytes(size), dtype=torch.uint8)
        kernel.encode_reference(values, wire)
        there = torch.zeros_like(wire, device=device)
        last = kernel.mean_factor(size - (kernel.blocks_of(size) - 1) * kernel.BLOCK)
        gpu.encode(values.to(device), *kernel.split(there, size), last)
        same_bits(what, wire, there)
        out, total = torch.empty_like(values), torch.ones_like(values)
        kernel.decode_reference(wire, out)
        kernel.accumulate(wire, total, 0.3)
        for add, expected in ((False, out), (True, total)):
            got = torch.ones(size, device=device)
            if add:
                gpu.accumulate(*kernel.split(there, size), got, 0.3)
            else:
                gpu.decode(*kernel.split(there, size), got)
            same_bits(what, expected, got)
