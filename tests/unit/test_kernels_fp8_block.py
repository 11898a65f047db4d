"""The kernels of fp8_block agree bit for bit, with torch's conversions in their middle."""

from __future__ import annotations

import pytest
import torch
from kernel_exam import for_triton, hard_tensors, same_bits, triton_device

from mcr_plus.kernels import fp8_block as kernel

SIZES = (1, 5, 31, 33, 255, 256, 257, 1000, 5003)

every_format = pytest.mark.parametrize("name", sorted(kernel.FORMATS))
every_scale = pytest.mark.parametrize("scale", ["float32", "e8m0"])


@every_format
@every_scale
def test_the_cpu_kernels_are_the_reference(name: str, scale: kernel.Scale) -> None:
    fmt = kernel.FORMATS[name]
    for what, values in hard_tensors(SIZES):
        wires = [torch.zeros(kernel.nbytes(values.numel(), scale), dtype=torch.uint8) for _ in range(2)]
        kernel.encode(values, wires[0], fmt, scale)
        kernel.encode_reference(values, wires[1], fmt, scale)
        same_bits(what, *wires)
        outs = [torch.empty_like(values) for _ in range(2)]
        kernel.decode(wires[0], outs[0], fmt, scale)
        kernel.decode_reference(wires[0], outs[1], fmt, scale)
        same_bits(what, *outs)


@every_format
@every_scale
def test_every_float_rounds_as_torch_rounds(name: str, scale: kernel.Scale) -> None:
    """Every fp8 value, every point halfway between two, and the floats beside them, at scale 1."""
    fmt = kernel.FORMATS[name]
    values = torch.arange(fmt.top + 1, dtype=torch.uint8).view(fmt.dtype).to(torch.float32)
    halfway = (values[1:] + values[:-1]) / 2
    points = torch.cat([values, halfway])
    beside = [points.nextafter(torch.full_like(points, to)) for to in (-torch.inf, torch.inf)]
    positive = torch.cat([points, *beside])
    hard = torch.cat([positive, -positive]).clamp(-fmt.largest, fmt.largest)
    room = kernel.block_of(scale) - 1
    rows = torch.nn.functional.pad(hard, (0, -hard.numel() % room)).view(-1, room)
    top = torch.full((len(rows), 1), fmt.largest).nextafter(torch.tensor(torch.inf))
    blocks = torch.cat([rows, top], 1).contiguous()
    wire = torch.zeros(kernel.nbytes(blocks.numel(), scale), dtype=torch.uint8)
    kernel.encode(blocks.view(-1), wire, fmt, scale)
    scales, codes = kernel.split(wire, blocks.numel(), scale)
    assert bool((scales == (127 if scale == "e8m0" else 1)).all())
    same_bits(name, blocks.to(fmt.dtype).view(torch.uint8).view(-1), codes)


@pytest.mark.short("float32-e4m3")
@every_format
@every_scale
def test_the_triton_kernels_are_the_reference(name: str, scale: kernel.Scale) -> None:
    device = triton_device()
    from mcr_plus.kernels.gpu import fp8_block as gpu

    fmt = kernel.FORMATS[name]
    for what, values in for_triton(hard_tensors(SIZES)):
        size = values.numel()
        wire = torch.zeros(kernel.nbytes(size, scale), dtype=torch.uint8)
        kernel.encode_reference(values, wire, fmt, scale)
        there = torch.zeros_like(wire, device=device)
        gpu.encode(values.to(device), *kernel.split(there, size, scale), fmt, scale)
        same_bits(what, wire, there)
        out, total = torch.empty_like(values), torch.ones_like(values)
        kernel.decode_reference(wire, out, fmt, scale)
        kernel.accumulate(wire, total, 0.3, fmt, scale)
        for add, expected in ((False, out), (True, total)):
            got = torch.ones(size, device=device)
            gpu.decode(*kernel.split(there, size, scale), got, 0.3, add, fmt, scale)
            same_bits(what, expected, got)
