"""fp8_block rounds like torch's conversions."""

from __future__ import annotations

import pytest
import torch
from kernel_exam import same_bits

from mcr_plus.kernels import fp8_block as kernel

SIZES = (1, 5, 31, 33, 255, 256, 257, 1000, 5003)

every_format = pytest.mark.parametrize("name", sorted(kernel.FORMATS))
every_scale = pytest.mark.parametrize("scale", ["float32", "e8m0"])


@every_format
@every_scale
def test_every_float_rounds_as_torch_rounds(name: str, scale: kernel.Scale) -> None:
    """Test every fp8 value, every midpoint of two, and the floats next to them, at scale 1."""
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
