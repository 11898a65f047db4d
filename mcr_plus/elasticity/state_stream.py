"""Messages that bring the state to a newcomer during training, on a connection of their own.

    FROZEN     parameters that the optimizer does not change, sent without a copy
    COPY       everything that it changes: parameters, buffers, its own state, as of one moment between steps
    STEP       gradients and settings of one optimizer step, which the newcomer repeats
    REACHED    the newcomer has the current state
    GIVEN_UP   no further steps follow: they are faster than they can be sent, or cannot be repeated
    LAST       the newcomer has been taken in
    ALIVE      a sign of life

The result need not be exact: once the newcomer has been taken in, digests of the whole state are compared,
and differing parts are sent again (`broadcast_differences`).
"""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import torch

from mcr_plus.communicator.transfer import outline, rebuilt
from mcr_plus.errors import BackendError
from mcr_plus.hosts.acceptor import Acceptor
from mcr_plus.rendezvous import stream as links
from mcr_plus.rendezvous.stream import Payload, StreamClosed, StreamConnection

FROZEN, COPY, STEP, REACHED, GIVEN_UP, LAST, ALIVE = range(16, 23)
WORTH: Final = 16 << 20
"""Bytes of a state below which newcomers are taken in at once: making the next world takes longer."""
STALLED_S: Final = 30.0
"""Seconds without a byte after which either end gives up."""
_COMES_WITHIN: Final = 20.0  # s; the other end must connect by then
_LARGEST_OUTLINE: Final = 1 << 30


class StateMessage(NamedTuple):
    """A message: its kind, an outline (see `transfer.outline`), and the outline's tensors."""

    kind: int
    plain: Any = None
    tensors: tuple[torch.Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def copied(kind: int, state: Any) -> StateMessage:
    """Return a message with copies of the state's tensors in CPU memory."""
    tensors: list[torch.Tensor] = []
    plain = outline(state, tensors, lambda each: each.detach().to("cpu", copy=True).contiguous())
    return StateMessage(kind, plain, tuple(tensors))


def referring(kind: int, state: Any) -> StateMessage:
    """Return a message with the state's own tensors; tensors of other devices are copied when sent."""
    tensors: list[torch.Tensor] = []
    outline(state, tensors)
    plain = outline(state, [], lambda each: torch.empty(0, dtype=each.dtype, device="cpu"))
    return StateMessage(kind, plain, tuple(tensors))


def send(link: StreamConnection, message: StateMessage) -> None:
    """Send a message. Raises like `StreamConnection.send`.

    Only its outline is signed. Hashing the tensors would slow the training on this host down, and differing
    parts are found later.
    """
    outlined = pickle.dumps(message.plain, protocol=pickle.HIGHEST_PROTOCOL)
    link.send(message.kind, second=1, payloads=[Payload.of(outlined)])
    for tensor in message.tensors:
        link.put(_bytes(tensor.detach().cpu().contiguous()))


def receive(link: StreamConnection) -> tuple[int, Any]:
    """Return the kind and state of the next message, with tensors in CPU memory.

    Raises like `StreamConnection.receive`, without unpickling what the source has not signed.
    """
    kind, _, _, body = link.receive(_LARGEST_OUTLINE)
    tensors: list[torch.Tensor] = []
    state = rebuilt(pickle.loads(memoryview(body)[8:]), tensors)
    for tensor in tensors:
        link.fill(_bytes(tensor))
    return kind, state


def _bytes(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    view: Any = tensor.view(-1).view(torch.uint8).numpy()  # Any: type checkers do not accept it as a buffer
    return memoryview(view)


def accepted(
    listener: socket.socket, secret: bytes, name: str, is_closed: Callable[[], bool]
) -> StreamConnection:
    """Return the connection of a process of the job; silent connections of others do not delay it.

    Raises `EOFError` if none comes within 20 s, or `is_closed` turns true.
    """
    ends = time.monotonic() + _COMES_WITHIN
    came: SimpleQueue[StreamConnection] = SimpleQueue()
    acceptor = Acceptor(listener, name, members=1)

    def greet(connection: socket.socket) -> None:
        """Pass on the connection if the process belongs to the job, else close it."""
        try:
            link = StreamConnection(
                connection, lambda: is_closed() or time.monotonic() > link.moved + STALLED_S
            )
            links.greeted(link, secret)
        except (OSError, EOFError, BackendError, StreamClosed) as error:
            acceptor.refuse(connection, error)
            return
        if acceptor.admit(connection):
            came.put(link)
        else:  # there is a connection already
            link.close()

    try:
        while not is_closed() and time.monotonic() < ends:
            if (connection := acceptor.accept()) is not None:
                threading.Thread(target=greet, args=(connection,), daemon=True).start()
            if not came.empty():
                return came.get()
    finally:
        acceptor.close()
    raise EOFError("it has not connected")


def nbytes_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state of a model and an optimizer."""
    states = (value for state in optimizer.state.values() for value in _values(state))
    tensors = (*model.parameters(), *model.buffers(), *states)
    return sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))


def _values(state: Any) -> tuple[Any, ...]:
    return tuple(state.values()) if isinstance(state, Mapping) else ()


def without_hooks(optimizer: torch.optim.Optimizer, call: Callable[[], object]) -> None:
    """Call a function that makes the optimizer's step, without the program's hooks on that step."""
    hooks = {name: getattr(optimizer, name) for name in _HOOKS}
    try:
        for name, kept in hooks.items():
            setattr(optimizer, name, type(kept)())
        call()
    finally:
        for name, kept in hooks.items():
            setattr(optimizer, name, kept)


_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
