"""Support tensors of torch's inference mode in operations that end outside the mode.

A tensor created in inference mode can only be written in inference mode. Tensors that a stage creates in the
mode, such as residuals of error feedback, could not be written by a later call outside it. So stages compute
outside the mode, on tensors that share the memory of the caller's tensors.
"""

from __future__ import annotations

import torch

from mcr_plus.core.message import Message
from mcr_plus.core.work import Work
from mcr_plus.pipeline.stage import Issue


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor unchanged; for an inference tensor, an ordinary tensor on the same memory."""
    if not tensor.is_inference():
        return tensor
    shared = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return shared.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def outside_of_inference_mode(issue: Issue) -> Issue:
    """Wrap `issue` to work in inference mode too; its tensors have no lazy conjugation or negation."""

    def changed(message: Message) -> Message:
        same = {id(each): ordinary(each) for each in (*message.inputs, *message.outputs)}
        inputs, outputs = (
            tuple(same[id(each)] for each in part) for part in (message.inputs, message.outputs)
        )
        return message.with_tensors(inputs, outputs)

    def start(message: Message) -> Work:
        if not _concerns(message):
            return issue.start(message)
        with torch.inference_mode(False), torch.no_grad():
            return issue.start(changed(message))

    def run(message: Message) -> None:
        if not _concerns(message):
            issue.run(message)
            return
        with torch.inference_mode(False), torch.no_grad():
            issue.run(changed(message))

    return Issue(start, run)


def _concerns(message: Message) -> bool:
    if torch.is_inference_mode_enabled():
        return True
    return any(each.is_inference() for part in (message.inputs, message.outputs) for each in part)
