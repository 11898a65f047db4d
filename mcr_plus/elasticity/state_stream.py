"""How the state for a newcomer travels beside training: messages on a connection of their own.

    FROZEN     parameters that the optimizer does not change, from where they are
    COPY       what it changes: parameters, buffers, its own state, as they were between two steps
    STEP       the gradients and settings of one step of the optimizer, which the newcomer makes as well
    REACHED    the newcomer has all that there is now
    GIVEN_UP   no further steps follow: they come faster than they can be sent, or cannot be repeated
    LAST       the newcomer has been taken in
    ALIVE      nothing

Nothing of it has to be right: once the newcomer has been taken in, digests of all of the state are compared,
and what differs is sent again (`broadcast_differences`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from mcr_plus.communicator.transfer import outline, rebuilt
from mcr_plus.errors import BackendError
from mcr_plus.rendezvous.signing import seal, unseal
from mcr_plus.rendezvous.stream import StreamConnection

FROZEN, COPY, STEP, REACHED, GIVEN_UP, LAST, ALIVE = range(16, 23)
WORTH: Final = 16 << 20
"""Bytes of a state below which newcomers are taken in at once: making the next world takes longer."""
STALLED_S: Final = 30.0
"""Seconds without a byte after which either end gives up."""
_LARGEST: Final = 1 << 62
_LARGEST_OUTLINE: Final = 1 << 30


class StateMessage(NamedTuple):
    """Something to be sent: its kind, an outline (see `transfer.outline`), and the tensors of it."""

    kind: int
    plain: Any = None
    tensors: tuple[torch.Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def copied(kind: int, state: Any) -> StateMessage:
    """A message with copies of the state's tensors, in memory of the CPU."""
    tensors: list[torch.Tensor] = []
    plain = outline(state, tensors, lambda each: each.detach().to("cpu", copy=True).contiguous())
    return StateMessage(kind, plain, tuple(tensors))


def referring(kind: int, state: Any) -> StateMessage:
    """A message with the state's tensors as they are; those of other devices are copied as they are sent."""
    tensors: list[torch.Tensor] = []
    outline(state, tensors)
    plain = outline(state, [], lambda each: torch.empty(0, dtype=each.dtype, device="cpu"))
    return StateMessage(kind, plain, tuple(tensors))


def send(link: StreamConnection, secret: bytes, name: str, message: StateMessage) -> None:
    """Send a message; `name` is part of its signature. Raises as `StreamConnection.send`."""
    written = pickle.dumps(message.plain, protocol=pickle.HIGHEST_PROTOCOL)
    sealed = seal(secret, f"{name}/{message.kind}", written)
    link.start(message.kind, len(sealed) + message.nbytes, len(sealed))
    link.put(sealed)
    for tensor in message.tensors:
        link.put(_bytes(tensor.detach().cpu().contiguous()))


def receive(link: StreamConnection, secret: bytes, name: str) -> tuple[int, Any]:
    """The kind and state of the next message, with tensors in memory of the CPU.

    Raises as `StreamConnection.receive`, and `BackendError` for one that was not signed: it is not unpickled.
    """
    kind, nbytes, length, _ = link.head(_LARGEST)
    if length > min(nbytes, _LARGEST_OUTLINE):
        raise BackendError(f"a message of {nbytes} bytes of state has an outline of {length}")
    written = unseal(secret, f"{name}/{kind}", bytes(link.take(length)))
    if written is None:
        raise BackendError("a message of state was not signed by a rank of this job, and is not unpickled")
    tensors: list[torch.Tensor] = []
    state = rebuilt(pickle.loads(written), tensors)
    if sum(tensor.nbytes for tensor in tensors) != nbytes - length:
        raise BackendError(f"a message of {nbytes} bytes of state has tensors of another size")
    for tensor in tensors:
        link.fill(_bytes(tensor))
    return kind, state


def _bytes(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    view: Any = tensor.view(-1).view(torch.uint8).numpy()  # which type checkers do not take for a buffer
    return memoryview(view)


def nbytes_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state of a model and an optimizer."""
    states = (value for state in optimizer.state.values() for value in _values(state))
    tensors = (*model.parameters(), *model.buffers(), *states)
    return sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))


def _values(state: Any) -> tuple[Any, ...]:
    return tuple(state.values()) if isinstance(state, Mapping) else ()


def without_hooks(optimizer: torch.optim.Optimizer, call: Callable[[], object]) -> None:
    """Call something that makes the optimizer's step; hooks of the program concern ranks that train."""
    hooks = {name: getattr(optimizer, name) for name in _HOOKS}
    try:
        for name, kept in hooks.items():
            setattr(optimizer, name, type(kept)())
        call()
    finally:
        for name, kept in hooks.items():
            setattr(optimizer, name, kept)


_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
