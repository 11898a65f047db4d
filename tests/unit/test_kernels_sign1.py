"""The payload of sign1: its layout, and its means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_exam import f64

from mcr_plus.kernels import sign1 as kernel

SIZES = (1, 5, 31, 33, 1000, 1023, 1024, 1025, 5003)


def test_contents_of_a_payload() -> None:
    """The oracle follows the layout of the docstring, one value at a time."""
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
