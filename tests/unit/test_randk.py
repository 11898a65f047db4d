"""randk: the same positions on all ranks, each value as often as any other, and an unbiased sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_exam import exchanged

from mcr_plus.compression.randk import RandK, RandKOptions
from mcr_plus.kernels import counter
from mcr_plus.kernels import randk as kernel

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("numel", "count"), [(1, 1), (2, 1), (10, 3), (1000, 999), (1000, 1000), (300_007, 3001)]
)
def test_the_cpu_kernel_is_the_reference(numel: int, count: int) -> None:
    for step in range(20):
        key = counter.key_of("a key", step)
        positions = kernel.positions(numel, count, key, CPU)
        assert torch.equal(positions, kernel.positions_reference(numel, count, key, CPU))
        assert positions.unique().numel() == count
        assert 0 <= int(positions.min()) <= int(positions.max()) < numel


def test_more_than_two_billion_values() -> None:
    numel, count = 2**33 + 5, 1000
    key = counter.key_of("large")
    positions = kernel.positions(numel, count, key, CPU)
    assert torch.equal(positions, kernel.positions_reference(numel, count, key, CPU))
    gaps = positions.sort().values.diff()
    assert 0 < int(gaps.min()) <= int(gaps.max()) <= 2 * (numel // count + 1)
    assert int(positions.max()) > 2**32


@pytest.mark.short("10-3")
@pytest.mark.parametrize(("numel", "count"), [(10, 3), (11, 4), (7, 6), (5, 1)])
def test_every_value_is_drawn_equally_often(numel: int, count: int) -> None:
    """Within six sigma. In parts that begin at 0 a value of 10 / 3 would be drawn 1/3 or 1/4 of the time."""
    draws = 20_000
    drawn = np.zeros(numel)
    for step in range(draws):
        drawn[kernel.positions(numel, count, counter.key_of(step), CPU).numpy()] += 1
    share = count / numel
    bound = 6 * np.sqrt(draws * share * (1 - share))
    assert np.abs(drawn - draws * share).max() < bound
    assert draws * (1 / 3 - share) > bound or (numel, count) != (10, 3)  # it would have seen this


def all_ranks(ranks: int, **options: object) -> list[RandK]:
    codecs = [RandK(RandKOptions(**options)) for _ in range(ranks)]  # type: ignore[arg-type]
    for rank, codec in enumerate(codecs):
        codec.enter(rank, "layer")
    return codecs


def sent_by(codecs: list[RandK], numel: int) -> list[int]:
    """The positions that the next exchange sends."""
    (result, *_) = exchanged(codecs, [torch.ones(numel) for _ in codecs])
    return result.nonzero().view(-1).tolist()


def test_draws_depend_on_seed_key_and_step_alone() -> None:
    first = [sent_by(all_ranks(2), 1000)]
    codecs = all_ranks(2)
    steps = [sent_by(codecs, 1000) for _ in range(3)]
    assert steps[0] == first[0]
    assert steps[0] != steps[1] != steps[2]
    assert sent_by(all_ranks(2, seed=1), 1000) != steps[0]
    other = all_ranks(2)
    for codec in other:
        codec.enter(0, "another layer")
    assert sent_by(other, 1000) != steps[0]
    resumed = all_ranks(2)
    for codec, old in zip(resumed, codecs, strict=True):
        codec.load_state(old.state())
    assert sent_by(resumed, 1000) == sent_by(codecs, 1000)


def test_sums_sent_values_and_leaves_the_rest() -> None:
    codecs = all_ranks(3, ratio=0.1)
    inputs = [torch.arange(1, 1001, dtype=torch.float32) * (rank + 1) for rank in range(3)]
    left = [tensor.clone() for tensor in inputs]
    result = exchanged(codecs, inputs, left=left)[2]
    sent = result != 0
    assert int(sent.sum()) == 100
    assert torch.equal(result[sent], torch.arange(1, 1001)[sent] * 6.0)
    for before, rest in zip(inputs, left, strict=True):
        assert torch.equal(rest, torch.where(sent, 0.0, before))


@pytest.mark.short("False")
@pytest.mark.parametrize("rescale", [True, False])
def test_unbiased_if_rescaled(rescale: bool) -> None:
    """The mean over steps is the value within six sigma; without rescaling, the control, far off."""
    numel, steps = 60, 4000
    values = torch.linspace(-3, 3, numel)
    codecs = all_ranks(1, ratio=0.25, rescale=rescale)
    assert codecs[0].traits.unbiased is rescale
    assert codecs[0].traits.needs_error_feedback is not rescale
    total = np.zeros(numel)
    for _ in range(steps):
        total += exchanged(codecs, [values])[0].numpy()
    off = np.abs(total / steps - values.numpy())
    sigma = np.abs(values.numpy()) * np.sqrt(3 / steps)  # of 0 or 4 × the value, at 1 in 4
    assert bool((off <= 6 * sigma + 1e-6).all()) is rescale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    inputs = [torch.arange(1, 101).to(dtype) for _ in range(2)]
    (result, _) = exchanged(all_ranks(2, ratio=0.5), inputs)
    assert result.dtype is dtype
    sent = result != 0
    assert torch.equal(result[sent], (2 * inputs[0])[sent])


def test_empty_and_non_finite_input() -> None:
    codecs = all_ranks(2, ratio=1.0)
    assert exchanged(codecs, [torch.zeros(0)] * 2)[0].numel() == 0
    spoilt = torch.tensor([1.0, torch.nan, torch.inf])
    (result, _) = exchanged(codecs, [spoilt, torch.ones(3)])
    assert result[0] == 2
    assert result[1].isnan()
    assert result[2].isinf()
