"""Bound operations with their tensors laid out in memory, ready to be issued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mcr_plus.communicator.tensors import (
    check_apart,
    check_distinct,
    is_plain,
    overlap,
    pack,
    pack_space,
    plain,
    plain_like,
)
from mcr_plus.communicator.tensors import unpack as unpack_into
from mcr_plus.core.kinds import IN_PLACE
from mcr_plus.core.message import Message

if TYPE_CHECKING:
    from mcr_plus.communicator.calls import Call
    from mcr_plus.core.message import Extras, Signature
    from mcr_plus.core.work import Work
    from mcr_plus.pipeline.stage import Issue

Tensors = tuple[torch.Tensor, ...]
CopyOut = Callable[[], None]


class Prepared(NamedTuple):
    """Operation that is ready to be issued.

    `copy_out` copies the results to the caller's tensors once the operation is complete; None if no copy is
    needed.
    """

    issue: Issue
    message: Message
    copy_out: CopyOut | None

    def start(self) -> Work:
        """Issue the operation; return a handle whose `wait` also copies the results out."""
        work = self.issue.start(self.message)
        if self.copy_out is not None:
            work.then(self.copy_out)
        return work

    def run(self) -> None:
        """Issue the operation; return when its results are in the caller's tensors."""
        if self.copy_out is None and not self.message.signature.is_p2p:
            self.issue.run(self.message)
        else:
            self.start().wait()


def prepare(call: Call, signature: Signature, issue: Issue) -> Prepared:
    """Lay out the tensors of a call contiguously, a list as one flat tensor, without a copy where possible.

    Raises `InvalidArgument` if elements of an output share memory.
    """
    in_place, shift = call.kind in IN_PLACE, _shift(issue)
    inputs, outputs, copy_out = _laid_out(call.inputs, call.outputs, call.packed, in_place, shift)
    extras: Extras = call.extras or {}
    return Prepared(issue, Message(signature, inputs, outputs, **extras), copy_out)


def _laid_out(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    packed: bool,
    in_place: bool,
    shift: int | None,
) -> tuple[Tensors, Tensors, CopyOut | None]:
    if in_place and inputs[0] is outputs[0]:
        value = inputs[0]
        if is_plain(value):
            return (value,), (value,), None
        check_apart(value)
        copy = plain(value)
        return (copy,), (copy,), lambda: _assign(value, copy)
    source = pack(inputs) if packed and len(inputs) > 1 else plain(inputs[0]) if inputs else None
    target, copied = _target(outputs, packed)
    if source is not None and target is not None and overlap(source, target):
        source = source if source.data_ptr() - target.data_ptr() == shift else source.clone()
    copy_out = None
    if copied and target is not None:
        check_distinct(outputs)
        for output in outputs:
            check_apart(output)
        flat = target.view(-1)
        copy_out = lambda: unpack_into(flat, outputs)  # noqa: E731 - a named function would be no clearer
    return (() if source is None else (source,)), (() if target is None else (target,)), copy_out


def _shift(issue: Issue) -> int | None:
    """Return `BoundOperation.shift`; None if the chain does more than one operation."""
    return None if issue.operation is None else issue.operation.shift


def _target(outputs: Sequence[torch.Tensor], packed: bool) -> tuple[torch.Tensor | None, bool]:
    """Return one tensor to write to, and whether its values must be copied to `outputs` afterwards."""
    if not outputs:
        return None, False
    if packed and len(outputs) > 1:
        return pack_space(outputs)
    target = plain_like(outputs[0])
    return target, target is not outputs[0]


def _assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.inference_mode():  # else tensors created in inference mode cannot be written
        tensor.copy_(value)


def repeated(ready: Prepared, tensors: Tensors, async_op: bool) -> Callable[..., Work | None] | None:
    """Return a function that issues the same operation for other tensors of the same dtype, shape and layout.

    The function takes arguments like `tensors`, and returns a handle if `async_op`. Returns None if calls
    need the slow path: results are copied out, or tensors are not contiguous or complex (the key of a call
    does not show lazy conjugation).
    """
    issue, message, copy_out = ready
    if copy_out is not None or not all(is_plain(each) and not each.is_complex() for each in tensors):
        return None
    signature, extras = message.signature, message.extras
    inputs, outputs = message.inputs, message.outputs
    # `issue.run` is synchronous, and makes no handle if the chain supports that.
    go: Callable[[Message], Any] = issue.start if async_op else issue.run
    if signature.is_p2p and not async_op:  # observers learn the sender from the handle
        go = lambda message: issue.start(message).wait()  # noqa: E731 - as below
    if len(tensors) == 2:
        same = outputs[0] is tensors[0] and (inputs[0] is tensors[1] or overlap(tensors[1], tensors[0]))
        return _two(ready, go, tensors) if same else None
    if not tensors:
        return lambda: go(Message(signature))
    (tensor,) = tensors
    reads, writes = ((len(part) > 0 and part[0] is tensor) for part in (inputs, outputs))
    if reads and writes:
        without_message = issue.start_in_place if async_op else issue.run_in_place
        if without_message is not None:
            return without_message

        def in_place(x: torch.Tensor) -> Work | None:
            both = (x,)
            return go(Message(signature, both, both))  # type: ignore[no-any-return]

        return in_place
    if reads:
        return lambda x: go(Message(signature, (x,), outputs, **extras))
    return (lambda x: go(Message(signature, (), (x,), **extras))) if writes else None


def _two(ready: Prepared, go: Callable[[Message], Any], tensors: Tensors) -> Callable[..., Work | None]:
    """Return the function of `repeated` for one output and one input; each call checks their overlap."""
    signature = ready.message.signature
    written, read = (tensor.nbytes for tensor in tensors)
    shift = _shift(ready.issue)

    def from_one_to_other(target: torch.Tensor, source: torch.Tensor) -> Work | None:
        to, since = target.data_ptr(), source.data_ptr()
        if to < since + read and since < to + written and since - to != shift:
            source = source.clone()
        return go(Message(signature, (source,), (target,)))  # type: ignore[no-any-return]

    return from_one_to_other
