"""Result of binding a stage: `Issue`, with the functions that issue operations of one signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from mcr_plus.errors import BackendError

if TYPE_CHECKING:
    import torch

    from mcr_plus.backends.base import NativeStart
    from mcr_plus.core.message import Message
    from mcr_plus.core.work import Work
    from mcr_plus.engine.operation import BoundOperation


class Issue:
    """Functions that issue an operation of one signature: the result of binding a stage.

    Attributes:
        start: starts an operation and returns its handle; never waits for a peer.
        run: runs a synchronous operation to its end, by default with `start(message).wait()`. The one of
            dispatch creates a handle only after an error; a stage that wraps an issue passes it on.
        operation: the library operation that `start` starts, if it starts exactly one and nothing else.
        start_in_place, run_in_place: `start` and `run` for an in-place operation on one tensor, without a
            message; None if the chain has no such form.
        native: makes the start of the same operation in compiled code, for a message of a peer and tag; None
            if there is none.
    """

    __slots__ = ("native", "operation", "run", "run_in_place", "start", "start_in_place")

    def __init__(
        self,
        start: Callable[[Message], Work],
        run: Callable[[Message], None] | None = None,
        *,
        operation: BoundOperation | None = None,
        start_in_place: Callable[[torch.Tensor], Work] | None = None,
        run_in_place: Callable[[torch.Tensor], None] | None = None,
        native: Callable[..., NativeStart | None] | None = None,
    ) -> None:
        self.start = start
        self.run = run or (lambda message: start(message).wait())
        self.operation = operation
        self.start_in_place = start_in_place
        self.run_in_place = run_in_place
        self.native = native

    def __call__(self, message: Message) -> Work:
        """Same as `start`."""
        return self.start(message)


def refusing(reason: str) -> Callable[[Message], NoReturn]:
    """Return a `start` that raises, for an operation whose library is switched off."""

    def refuse(message: Message) -> NoReturn:  # noqa: ARG001 - a Start
        raise BackendError(reason)

    return refuse
