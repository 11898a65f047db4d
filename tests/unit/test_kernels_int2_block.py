"""The payload of int2_block: its layout; its quantiser is the one with the least error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_exam import F64, f64
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from mcr_plus.kernels import int2_block as kernel

SIZES = (1, 5, 33, 127, 128, 129, 1000, 5003)


def encoded(values: torch.Tensor) -> torch.Tensor:
    wire = torch.zeros(kernel.nbytes(values.numel()), dtype=torch.uint8)
    kernel.encode(values, wire)
    return wire


def decoded(values: torch.Tensor) -> F64:
    out = torch.empty_like(values)
    kernel.decode(encoded(values), out)
    return f64(out)


def test_contents_of_a_payload() -> None:
    """The oracle follows the layout of the docstring, one value at a time."""
    values = torch.randn(300, generator=torch.Generator().manual_seed(0))
    raw = encoded(values).numpy()
    assert raw.size == 3 * 36
    levels = (raw[:12].view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(3, 2)
    codes = raw[12:].reshape(3, 32)
    for block in range(3):
        part = f64(values)[block * 128 : block * 128 + 128]
        above = np.abs(part) > 1.2303 * np.abs(part).mean()
        means = [np.abs(part[~above]).mean(), np.abs(part[above]).mean()]
        np.testing.assert_allclose(levels[block], means, rtol=2.0**-8)
        for at, value in enumerate(part):
            code = codes[block, at % 32] >> (2 * (at // 32)) & 3
            assert code == (value < 0) + 2 * above[at]


def test_the_error_of_gaussian_blocks_is_that_of_the_best_quantiser() -> None:
    """0.1175 of the energy (Max 1960, table I); its own levels gain as much as bfloat16 loses."""
    values = torch.randn(128 * 4000, generator=torch.Generator().manual_seed(1))
    error = ((decoded(values) - f64(values)) ** 2).sum() / (f64(values) ** 2).sum()
    assert 0.108 < error < 0.1175


@settings(max_examples=examples(40))
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=128))
def test_two_levels_are_no_worse_than_one(values: list[float]) -> None:
    """Means of parts leave no more squared error than the mean of the whole, which is sign1's level."""
    tensor = torch.tensor(values, dtype=torch.float32)
    true = f64(tensor)
    error = float(((decoded(tensor) - true) ** 2).sum())
    alone = float(((np.abs(true) - np.abs(true).mean()) ** 2).sum())
    assert error <= alone * 1.01 + (np.abs(true).max() * 2.0**-8) ** 2 * true.size + 1e-60


def test_an_outlier_is_kept_and_what_is_constant_is_exact() -> None:
    lone = torch.zeros(128)
    lone[40] = -5.0
    assert np.array_equal(decoded(lone), f64(lone))
    flat = torch.full((200,), -3.5)
    assert np.array_equal(decoded(flat), f64(flat))


@pytest.mark.parametrize("size", [1, 100, 128, 300])
def test_blocks_of_the_largest_float_stay_finite(size: int) -> None:
    values = torch.full((size,), -torch.finfo(torch.float32).max)
    np.testing.assert_allclose(decoded(values), f64(values), rtol=2.0**-7)
