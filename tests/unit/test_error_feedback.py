"""Residuals of error feedback: no input is lost, in any sequence of operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_exam import f64

from mcr_plus.compression.codec import PayloadCodec, make
from mcr_plus.compression.error_feedback import ErrorFeedback

NUMEL = 700
PARTS = ((0, 300), (300, 700))
OWN = 1
STEPS = (
    "call",
    "call",  # of the own part nothing is left over
    "uncompressed",  # bfloat16 leaves a residual, of the own part, too
    "call",
    "call",
    "restored",
    "call",
    "other part",  # as after a change of the group
    "call",
    "call",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_payload_and_residual_add_up_to_the_input(dtype: torch.dtype) -> None:
    codec = make({"codec": "int4_block"})
    assert isinstance(codec, PayloadCodec)
    state = ErrorFeedback(codec, NUMEL, torch.device("cpu"))
    random = torch.Generator().manual_seed(3)
    wire = torch.empty(codec.wire_numel(NUMEL), dtype=torch.uint8)
    given, got, own = np.zeros(NUMEL), np.zeros(NUMEL), OWN
    for step in STEPS:
        if step == "other part":
            own = 1 - own
        if step == "restored":
            extra = torch.randn(NUMEL, generator=random)
            (residual,) = (each.tensor for each in state.tensors if each.name == "residual")
            given += f64(extra)
            state.restore({"residual": residual + extra})
            continue
        values = torch.randn(NUMEL, generator=random).to(dtype)
        given += f64(values)
        if step == "uncompressed":
            copy = values.to(torch.bfloat16)
            given += f64(copy) - f64(values)
            state.add_residual(copy)
            got += f64(copy)
            continue
        for index, (lo, hi) in enumerate(PARTS):
            total = torch.empty(hi - lo)
            if index == own:
                state.begin_sum(values[lo:hi], lo, total, 0.5)
                got[lo:hi] += 2 * f64(total)
            else:
                written = state.encode(values[lo:hi], lo, wire)
                codec.decode(wire[:written], total)
                got[lo:hi] += f64(total)
    (residual,) = (each.tensor for each in state.tensors if each.name == "residual")
    np.testing.assert_allclose(got + f64(residual), given, atol=1e-4)


def test_the_own_part_is_the_values_and_what_was_left() -> None:
    codec = make({"codec": "int4_block"})
    state = ErrorFeedback(codec, 4, torch.device("cpu"), decay=0.5)
    state.restore({"residual": torch.tensor([4.0, -4.0, 0.0, 8.0])})
    for step in range(3):
        total = torch.full((2,), torch.nan)
        state.begin_sum(torch.tensor([1.0, 2.0]), 0, total, 0.25)
        assert total.tolist() == ([0.75, 0.0] if step == 0 else [0.25, 0.5])


def test_messages_have_no_residual_to_save_and_the_state_of_their_codec_fits() -> None:
    how = {"codec": "bf16", "rounding": "stochastic"}
    sent = ErrorFeedback(make(how), 0, torch.device("cpu"))
    sent.encode_part(1, torch.ones(4), torch.empty(4, dtype=torch.bfloat16))
    saved = {each.name: each.tensor for each in sent.tensors}
    other = ErrorFeedback(make(how), 0, torch.device("cpu"))
    other.restore(saved)
    assert saved.keys() == {"step"}
    assert [each.tensor.item() for each in other.tensors] == [1]


def test_messages_of_two_lengths_in_turn_lose_nothing() -> None:
    """As of micro-batches that do not divide the batch."""
    state = ErrorFeedback(make({"codec": "bf16"}), 0, torch.device("cpu"))
    given, sent = np.zeros(4), np.zeros(4)
    for step in range(100):
        values = torch.full((3 + step % 2,), 1.001)
        wire = torch.empty(len(values), dtype=torch.bfloat16)
        state.encode_part(1, values, wire)
        given[: len(values)] += f64(values)
        sent[: len(values)] += f64(wire.float())
    np.testing.assert_allclose(sent, given, atol=0.01)
