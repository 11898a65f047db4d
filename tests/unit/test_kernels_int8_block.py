"""The kernels of int8_block agree bit for bit."""

from __future__ import annotations

import torch
from kernel_exam import for_triton, hard_tensors, same_bits, triton_device

from mcr_plus.kernels import int8_block as kernel

SIZES = (1, 5, 255, 256, 257, 1000, 5003)


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


def test_the_triton_kernels_are_the_reference() -> None:
    device = triton_device()
    from mcr_plus.kernels.gpu import int8_block as gpu

    for what, values in for_triton(hard_tensors(SIZES)):
        size = values.numel()
        wire = torch.zeros(kernel.nbytes(size), dtype=torch.uint8)
        kernel.encode_reference(values, wire)
        there = torch.zeros_like(wire, device=device)
        gpu.encode(values.to(device), *kernel.split(there, size))
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
