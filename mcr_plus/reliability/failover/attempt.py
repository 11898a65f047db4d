"""Poll of an operation that may run a second time; keeps the state of the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mcr_plus.core.kinds import IN_PLACE, SAME_RESULT
from mcr_plus.core.message import Message, Signature
from mcr_plus.engine.channel_wrapper import PollOfEither
from mcr_plus.reliability.failover.rules import RankOperation
from mcr_plus.reliability.failover.state import Copy, TensorState, WeakTensor, nbytes_of, restored

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcr_plus.backends.base import Poll
    from mcr_plus.reliability.failover.channel import Binding, FailoverChannel

Tensors = tuple[torch.Tensor, ...]
Copies = tuple[Copy, ...]


class FailoverPoll(PollOfEither):
    """Poll of an operation of a library with failover.

    Attributes:
        number: number of the operation among its library's operations in its group.
        library: name of the library that runs it.
        poll: poll of the library; None while the operation waits for the second library.
        second: message for the second library, set when it is the operation's turn.
        gate: gate of the second library, which the operation must pass.
        error: the reason for its final failure.
        is_done: True if the operation is complete here, and the program has the result.
        kept_bytes: bytes of the tensors that a complete operation keeps alive, and of copies.
    """

    __slots__ = (
        "__dict__", "_channel", "_copies", "_inputs", "_outputs", "_states", "_watched", "binding", "is_done",
        "kept_bytes", "library", "message", "number", "poll",
    )  # fmt: skip

    # Class-level defaults: rarely set, so the hot constructor skips them.
    second: Message | None = None
    gate: Poll | None = None
    error: Exception | None = None
    _is_overwritten = False  # the inputs are overwritten, and their copies are gone
    _result: torch.Tensor | None = None
    _weak: tuple[tuple[WeakTensor, ...], ...] = ()  # inputs and outputs that are not kept alive

    def __init__(self, channel: FailoverChannel, binding: Binding, message: Message, number: int) -> None:
        self._channel = channel
        self.binding = binding
        self.message = message
        self.number = number
        self.library = channel.library
        self.poll: Poll | None = None
        self.is_done = False
        # The message drops its tensor references once the operation is complete.
        self._inputs: Tensors = message.inputs
        self._outputs: Tensors = message.outputs
        self._copies: Copies | None = None

    def __call__(self) -> bool:
        """Poll the library; a synchronous operation polls without holding the engine's lock."""
        channel, poll = self._channel, self.poll
        if poll is None or channel.moved:
            with channel.lock:
                return self._poll_on()
        try:
            if not poll():
                return False
        except Exception as error:
            with channel.lock:
                channel.on_error(self, error)
            return False
        channel.on_complete(self)
        return True

    def _poll_on(self) -> bool:
        """Process a failure, or poll the second library."""
        if self.poll is None:
            self._channel.advance()
            if self.error is not None:
                raise self.error
            return False
        try:
            if not self.poll():
                return False
        except Exception as error:
            self._channel.on_error(self, error)
            return False
        self._channel.on_complete(self)
        return True

    def keep_inputs(self, copied: Callable[[torch.Tensor], Copy]) -> None:
        """Copy inputs that will be overwritten; called before the library gets the inputs."""
        message, signature = self.message, self.message.signature
        is_step = signature.sums is not None and signature.reduce_op is None  # the next one overwrites them
        if message.codec is not None or is_step or _is_in_place(message):
            self._copies = tuple(map(copied, message.inputs))

    @property
    def held(self) -> tuple[object, ...]:
        """Objects that the library uses."""
        return self.message, self.tensors, self.poll

    @property
    def tensors(self) -> Tensors:
        """Inputs and outputs of the operation."""
        return (*self._inputs, *self._outputs)

    def complete(self) -> None:
        """Mark the operation as complete, and note the state of its tensors."""
        self.is_done, self.poll = True, None
        kept = 0  # loops: a generator takes half a microsecond
        for each in self._inputs:
            kept += each.nbytes
        for each in self._outputs:
            kept += each.nbytes
        for copy in self._copies or ():
            kept += nbytes_of(copy)
        self.kept_bytes = kept

    def note_state(self, writes: dict[int, int]) -> None:
        """Store the state of the tensors at completion, except for copied inputs."""
        self._watched = self.tensors if self._copies is None else self._outputs
        self._states = [TensorState.of(each, writes) for each in self._watched]

    def weaken(self) -> None:
        """Hold the tensors by weak references from now on; the program keeps most of them alive anyway."""
        if self._weak:
            return
        weak = {id(each): WeakTensor(each) for each in self.tensors}
        self._weak = tuple(tuple(weak[id(each)] for each in part) for part in (self._inputs, self._outputs))
        self.kept_bytes -= sum(each.nbytes for each in self.tensors)
        self._inputs = self._outputs = self._watched = ()

    def _strengthen(self) -> None:
        """Undo `weaken`; tensors whose memory has been freed count as changed."""
        if not self._weak:
            return
        found = {id(each): each.found() for part in self._weak for each in part}
        self._inputs, self._outputs = (tuple(found[id(each)][0] for each in part) for part in self._weak)
        both = [found[id(each)] for part in self._weak for each in part]
        watched = both[len(both) - len(self._states) :]  # copied inputs have no noted state
        self._watched = tuple(tensor for tensor, _ in watched)
        self._states = [
            state if is_there else state._replace(version=None)
            for state, (_, is_there) in zip(self._states, watched, strict=True)
        ]
        self._weak = ()

    def let_go(self) -> Copies:
        """Drop the tensors; return the copies for reuse."""
        copies = self.give_copies()
        self._inputs = self._outputs = self._watched = ()
        if self._weak:
            self._weak = ()
        if self._result is not None:
            self._result = None
        return copies

    def give_copies(self) -> Copies:
        """Drop the copies and return them; the operation cannot run again after that."""
        copies, self._copies = self._copies or (), None
        self.kept_bytes -= sum(map(nbytes_of, copies))
        self._is_overwritten |= bool(copies)
        return copies

    def record(self, writes: dict[int, int]) -> RankOperation:
        """Return this rank's record of the operation, and copy the result, because the program continues."""
        digest = self.binding.digest
        if not self.is_done:
            return RankOperation(digest, is_done=False, has_input=True, has_result=False)
        self._strengthen()
        same = [
            state.is_that_of(tensor, writes)
            for state, tensor in zip(self._states, self._watched, strict=True)
        ]
        tracked = self.message.codec is None  # codecs write to their buffers in compiled code
        first = len(same) - len(self._outputs)
        inputs, outputs = same[:first], same[first:]
        if self.message.signature.kind in SAME_RESULT and tracked and len(outputs) == 1 and outputs[0]:
            self._result = self._outputs[0].clone()
        elif self._copies is None and not self._is_overwritten and tracked and all(inputs):
            self._copies = tuple(each.clone() for each in self._inputs)
        return RankOperation(
            digest, is_done=True, has_input=self._copies is not None, has_result=self._result is not None
        )

    def again(self, signature: Signature) -> Message:
        """Return the message to run on the second library, named by `signature`.

        If the operation is complete here, the new result is written to other memory.
        """
        inputs, outputs = self._inputs, self._outputs
        kept = self._copies or ()
        copies = tuple(restored(copy, tensor) for tensor, copy in zip(inputs, kept, strict=False))
        if not self.is_done:
            for tensor, copy in zip(inputs, copies, strict=False):
                tensor.copy_(copy)
            return self._message(signature, inputs, outputs)
        own = {id(tensor): copy for tensor, copy in zip(inputs, copies, strict=True)}
        return self._message(
            signature, copies, tuple(own.get(id(each), torch.empty_like(each)) for each in outputs)
        )

    def sent(self, signature: Signature, source: int, rank: int) -> Message:
        """Return a message that broadcasts the result from `source`; `rank` is this process's group rank."""
        output = self._outputs[0]
        if rank == source:
            assert self._result is not None
            output = self._result
        elif self.is_done:
            output = torch.empty_like(output)
        values = output.view(-1)
        broadcast = signature.replace(
            kind="broadcast", reduce_op=None, root=source, shape=tuple(values.shape), nbytes=values.nbytes,
            parts=None, encoding=None, call=None, counts_agreed=False,
        )  # fmt: skip
        return Message(broadcast, (values,) if rank == source else (), (values,))

    def _message(self, signature: Signature, inputs: Tensors, outputs: Tensors) -> Message:
        return self.message.with_tensors(inputs, outputs, signature, after=None, prepare=None)


def _is_in_place(message: Message) -> bool:
    """Return whether the input is the program's result, or shares memory with the result."""
    kind = message.signature.kind
    # An all_reduce of gradients may write to other memory.
    if kind in IN_PLACE and (kind != "all_reduce" or message.inputs[0] is message.outputs[0]):
        return True
    used = [each.untyped_storage().data_ptr() for each in message.outputs]
    for each in message.inputs:  # noqa: SIM110 - a generator takes half a microsecond
        if each.untyped_storage().data_ptr() in used:
            return True
    return False
