"""topk: sent values and residuals add up, and residuals are sent in the end."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from codec_exam import F64, decoded, f64, payload
from pydantic import ValidationError

from mcr_plus.compression.topk import TopK, TopKOptions


@pytest.mark.parametrize("ratio", [1e-6, 0.001, 0.01, 0.37, 1.0])
def test_sends_exactly_the_configured_ratio(ratio: float) -> None:
    codec = TopK(TopKOptions(ratio=ratio))
    for numel in (1, 10, 1000, 70_001):
        count = max(1, math.ceil(ratio * numel))
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        result = decoded(codec, payload(codec, values), values)
        sent = result != 0
        assert int(sent.sum()) == count == codec.sent(numel)
        assert torch.equal(result[sent], values[sent])
        if count < numel:
            assert result[sent].abs().min() >= values[~sent].abs().max()


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, math.nan])
def test_invalid_ratios_are_refused(ratio: float) -> None:
    with pytest.raises(ValidationError, match="ratio"):
        TopKOptions(ratio=ratio)


def test_bf16_values_are_rounded_to_nearest() -> None:
    codec = TopK(TopKOptions(ratio=0.1, values="bf16"))
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    result = decoded(codec, payload(codec, values), values)
    sent = result != 0
    assert int(sent.sum()) == 500
    assert torch.equal(result[sent], values[sent].to(torch.bfloat16).float())
    assert codec.wire_nbytes(5000) == 4 + 500 * 2 + 500 * 2


def summed(codec: TopK, steps: int, feedback: bool) -> tuple[F64, F64]:
    """Return the sum over all steps, and the expected sum."""
    numel = 400
    random = torch.Generator().manual_seed(0)
    slope = torch.linspace(0.1, 1, numel)
    left, got = torch.zeros(numel), torch.zeros(numel)
    true = np.zeros(numel)
    for _ in range(steps):
        values = slope + 0.1 * torch.randn(numel, generator=random)
        true += f64(values)
        left = left + values if feedback else values.clone()
        wire = payload(codec, left)
        codec.decode_accumulate(wire, got)
        codec.decode_accumulate(wire, left, -1.0)
    return f64(got), true


def test_error_feedback_sends_everything_in_time() -> None:
    """With feedback small values are sent once they have added up; without it (the control) never."""
    codec = TopK(TopKOptions(ratio=0.05))
    got, true = summed(codec, 400, feedback=True)
    assert np.abs(got / true - 1).max() < 0.6
    assert abs(got.sum() / true.sum() - 1) < 0.1
    got, true = summed(codec, 400, feedback=False)
    assert (got[:200] == 0).all()


def test_clearing_sent_values() -> None:
    codec = TopK(TopKOptions(ratio=0.02))
    values, momentum = torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.ones(1000)
    wire = payload(codec, values)
    codec.clear(wire, momentum)
    assert torch.equal(momentum == 0, decoded(codec, wire, values) != 0)
    codec.clear(torch.zeros(0, dtype=torch.uint8), torch.zeros(0))
