"""int_shared: sums of ranks that share their scales, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_exam import F64, exchanged, f64, per_block, samples
from pydantic import ValidationError

from mcr_plus.compression.int_shared import IntShared, IntSharedOptions

WORLDS = (1, 2, 3, 5, 8, 19)


def codec(bits: int = 8) -> IntShared:
    return IntShared(IntSharedOptions.model_validate({"bits": bits}))


def by_blocks(values: F64) -> F64:
    """Return the largest magnitude of each value's block."""
    return per_block(256, 1.0)(values)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("ranks", WORLDS)
def test_the_error_of_a_sum(bits: int, ranks: int) -> None:
    levels, _ = codec(bits).grid(ranks)
    for size in (1, 5, 257, 1030):
        every = zip(*(samples(size, seed) for seed in range(ranks)), strict=True)
        for tensors in every:
            what, inputs = tensors[0][0], [values for _, values in tensors]
            left = [values.clone() for values in inputs]
            results = exchanged([codec(bits)] * ranks, inputs, left=left)
            assert all(torch.equal(result, results[0]) for result in results), what
            largest = np.max([by_blocks(f64(values)) for values in inputs], axis=0)
            half = largest / levels / 2 * 1.0001 + 2.0**-127
            true = sum(f64(values) for values in inputs)
            slack = 2.0**-22 * (np.abs(true) + largest)  # float32, of the decoded sum and of the residual
            assert (np.abs(f64(results[0]) - true) <= ranks * half + slack).all(), what
            for values, rest in zip(inputs, left, strict=True):
                assert (np.abs(f64(rest)) <= half + 2.0**-22 * np.abs(f64(values))).all(), what
            sent = sum(f64(values) - f64(rest) for values, rest in zip(inputs, left, strict=True))
            np.testing.assert_allclose(
                f64(results[0]), sent, rtol=0, atol=float(2.0**-20 * ranks * largest.max())
            )


@pytest.mark.parametrize("bits", [8, 16])
def test_sums_never_overflow(bits: int) -> None:
    """All ranks have the largest code: the lanes of the sum still hold it."""
    for ranks in (*range(1, 40), 127, 128, 258, 259, 4681, 4682, 32767, 10**6):
        levels, lanes = codec(bits).grid(ranks)
        assert levels >= 2 ** (bits // 2 - 1) - 1
        assert levels * ranks < 2 ** (32 // lanes - 1)
        assert 32 // lanes >= bits
    for ranks in (1, 18, 19, 300):
        inputs = [torch.full((300,), 0.7 if index % 2 else 0.9) for index in range(300)]
        inputs = [torch.where(torch.arange(300) % 3 == 0, -values, values) for values in inputs[:ranks]]
        results = exchanged([codec(bits)] * ranks, inputs)
        true = torch.stack(inputs).to(torch.float64).sum(0)
        levels, _ = codec(bits).grid(ranks)
        assert float((results[0] - true).abs().max()) <= ranks * 0.9 / levels / 2 * 1.01


def test_rounds_of_the_codec() -> None:
    first, second = codec().rounds([(1000,), (10, 3)], 8)
    assert (first.dtype, first.numel, first.op) == (torch.float32, 5, "MAX")
    assert (second.dtype, second.numel, second.op) == (torch.int32, 258, "SUM")
    assert codec().grid(8) == (15, 4)
    assert codec().grid(18) == (7, 4)
    assert codec().grid(19) == (1724, 2)  # 16 bits
    assert codec(16).grid(258) == (127, 2)
    assert codec(16).grid(259) == (2**20, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 255, 256, 999])
def test_non_finite_values_of_one_rank_are_nan_on_all(bad: float, at: int) -> None:
    inputs = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    sound = exchanged([codec()] * 3, inputs)
    inputs[1][at] = bad
    own = torch.arange(1000) // 256 == at // 256
    left = [values.clone() for values in inputs]
    for result in exchanged([codec()] * 3, inputs, left=left):
        assert result[own].isnan().all()
        assert torch.equal(result[~own], sound[0][~own])
    for rest in left:
        assert rest[own].isnan().all()
        assert rest[~own].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats(dtype: torch.dtype) -> None:
    inputs = [torch.randn(700, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(2)]
    results = exchanged([codec()] * 2, inputs)
    through = exchanged([codec()] * 2, [values.to(torch.float32) for values in inputs])
    assert results[0].dtype == dtype
    assert torch.equal(results[0], through[0].to(dtype))


def test_nothing_to_sum() -> None:
    results = exchanged([codec()] * 2, [torch.zeros(0)] * 2)
    assert results[0].numel() == 0


def test_the_mean_of_many_sums_with_error_feedback_is_true() -> None:
    """The residual of one sum goes into the next: errors do not add up."""
    random = np.random.default_rng(0)
    inputs = [torch.from_numpy(random.standard_normal(512).astype(np.float32)) for _ in range(4)]
    rests = [torch.zeros(512) for _ in inputs]
    total = torch.zeros(512, dtype=torch.float64)
    for _ in range(50):
        inputs_now = [values + rest for values, rest in zip(inputs, rests, strict=True)]
        rests = [values.clone() for values in inputs_now]
        total += exchanged([codec()] * 4, inputs_now, left=rests)[0]
    true = 50 * torch.stack(inputs).to(torch.float64).sum(0)
    once = exchanged([codec()] * 4, inputs)[0].to(torch.float64)
    assert float((total - true).abs().max()) < 1.0
    assert float((50 * once - true).abs().max()) > 5.0


def test_bits_are_8_or_16() -> None:
    with pytest.raises(ValidationError, match="bits"):
        IntSharedOptions.model_validate({"bits": 12})
