"""Messages that stages hand down the pipeline."""

from __future__ import annotations

import pytest
import torch

from mcr_plus.core.message import Message, Signature

SIGNATURE = Signature("all_to_all_v", torch.float32, (), None, "world", 2)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match=r"a message has no prepar\b"):
        Message(SIGNATURE, (), (), prepar=lambda: None)  # type: ignore[call-arg]


def test_a_message_for_other_tensors_keeps_the_rest() -> None:
    calls: list[str] = []
    message = Message(
        SIGNATURE,
        (torch.ones(3),),
        (torch.zeros(4),),
        input_counts=(1, 2),
        output_counts=(3, 1),
        peer=1,
        codec="int8_block",
        prepare=lambda: calls.append("old"),
    )
    tensors = (torch.ones(5),), (torch.ones(6),)
    other = message.with_tensors(*tensors, prepare=lambda: calls.append("new"))
    assert (other.inputs, other.outputs) == tensors
    assert other.signature == SIGNATURE
    assert (other.input_counts, other.output_counts, other.peer, other.codec) == (
        (1, 2),
        (3, 1),
        1,
        "int8_block",
    )
    assert other.prepare is not None
    assert message.prepare is not None
    other.prepare()
    message.prepare()
    assert calls == ["new", "old"]
    assert message.inputs[0].shape == (3,)
    on_gpu = message.with_tensors((), (), SIGNATURE.replace(device="cuda"), peer=None)
    assert (on_gpu.signature.device, on_gpu.peer, on_gpu.match_tag) == ("cuda", None, 0)
