"""int4_block's scales, its transform, and its residuals."""

from __future__ import annotations

import pytest
import torch
from codec_exam import f64
from kernel_exam import hard_tensors, same_bits

from mcr_plus.kernels import int4_block as kernel
from mcr_plus.kernels import int4_block_rest

SIZES = (1, 5, 31, 33, 255, 256, 257, 1000, 5003)

either_way = pytest.mark.parametrize("hadamard", [False, True])


@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_what_is_left_is_what_the_payload_lacks(decay: float) -> None:
    """One pass has the bits of single steps in torch; values that are not finite are not kept."""
    random = torch.Generator().manual_seed(7)
    for what, values in hard_tensors(SIZES):
        before = torch.randn(values.numel(), generator=random)
        rest, wires = before.clone(), torch.full((2, kernel.nbytes(values.numel())), 0xA5, dtype=torch.uint8)
        int4_block_rest.encode_rest(values, decay, rest, wires[0])
        total, decoded = before * decay + values, torch.empty_like(values)
        kernel.encode_reference(total, wires[1], False)
        kernel.decode_reference(wires[1], decoded, False)
        same_bits(what, *wires)
        same_bits(what, rest, (total - decoded).nan_to_num(0.0, 0.0, 0.0))


def test_the_transform_is_hadamards() -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(5):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    assert torch.equal(kernel.transform(torch.eye(32, dtype=torch.float64)), matrix)


@either_way
def test_scales_reach_the_largest(hadamard: bool) -> None:
    """Rounded up, they let no code go over 7: no value of any block is cut off."""
    for what, values in hard_tensors(SIZES):
        wire = torch.zeros(kernel.nbytes(values.numel()), dtype=torch.uint8)
        kernel.encode(values, wire, hadamard)
        bits, _ = kernel.split(wire, values.numel())
        scales = bits.view(torch.bfloat16).to(torch.float64)
        rows = torch.zeros(scales.numel(), 32, dtype=torch.float64)
        rows.view(-1)[: values.numel()] = values
        rows = kernel.transform(rows) / 32 if hadamard else rows
        amax, sound = rows.abs().amax(1), scales.isfinite()
        assert bool((7 * scales >= amax * (1 - 1e-6))[sound].all()), what
        assert bool((scales <= (amax / 7 * (1 + 2.0**-6)).clamp(min=2.0**-126))[sound].all()), what


def test_the_transform_helps_heavy_tails() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(32 * 2000, generator=generator)
    values *= (torch.randn(values.shape, generator=generator) * 1.5).exp()
    errors = []
    for hadamard in (False, True):
        wire = torch.zeros(kernel.nbytes(values.numel()), dtype=torch.uint8)
        kernel.encode(values, wire, hadamard)
        out = torch.empty_like(values)
        kernel.decode(wire, out, hadamard)
        errors.append(float(((f64(out) - f64(values)) ** 2).sum()))
    assert errors[1] < 0.9 * errors[0]
