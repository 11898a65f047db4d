"""Handles of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mcr_plus.core.foreign_names import OF_HANDLES, name_others
from mcr_plus.core.work import Work
from mcr_plus.errors import BackendError, CommTimeout, McrError, OrderMismatch
from mcr_plus.horovod.request import HorovodInternalError, OperationRequest

if TYPE_CHECKING:
    from mcr_plus.horovod.negotiation import Negotiator


class Handle:
    """Handle of a started operation, see `synchronize` and `poll`. Calling the handle synchronizes it.

    The handle first waits for the other ranks' requests of the same name (`launched` is False), then for its
    `works`; then `finish` returns the result.
    """

    def __init__(
        self,
        negotiator: Negotiator,
        request: OperationRequest,
        tensors: list[torch.Tensor],
        *,
        in_place: bool = False,
        result: Callable[[Any], Any] | None = None,
    ) -> None:
        """`result` converts the operation's result for the caller."""
        self.negotiator = negotiator
        self.request = request
        self.tensors = tensors
        self.in_place = in_place
        self.launched = False
        self.works: list[Work] = []
        self.finish: Callable[[], Any] = lambda: None
        self.offsets: list[int] = []  # index of this rank's first row in each output of an allgather
        self._result = result
        self._value: Any = None
        self._done = False
        self._error: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensors."""
        return sum(0 if tensor.is_sparse else tensor.nbytes for tensor in self.tensors)

    def start(self, works: list[Work], finish: Callable[[], Any]) -> None:
        """Set the issued operations."""
        self.launched, self.works, self.finish = True, works, finish

    def fail(self, error: BaseException) -> None:
        """Complete the handle with an error."""
        self.launched = self._done = True
        self._error = error
        self._release()

    @property
    def is_done(self) -> bool:
        """True if the handle has a result or an error."""
        return self._done

    def update(self) -> None:
        """Complete the handle if its operations are complete; does not wait."""
        if not self._done and self.launched and all(work.is_completed() for work in self.works):
            self.complete()

    def complete(self) -> None:
        """Wait for the issued operations and compute the result; an error is stored for `value`."""
        if self._done:
            return
        try:
            for work in self.works:
                work.wait()
            value = self.finish()
            self._value = value if self._result is None else self._result(value)
        except (BackendError, CommTimeout, OrderMismatch) as error:
            self._error = HorovodInternalError(f"{self.request.kind} '{self.request.name}': {error}")
            self._error.__cause__ = error
        except McrError as error:
            self._error = error
        self._done = True
        self._release()

    def _release(self) -> None:
        self.works, self.tensors, self._result = [], [], None
        self.finish = lambda: None

    def value(self) -> Any:
        """Return the result, or raise the operation's error."""
        if self._error is not None:
            raise self._error
        return self._value

    def __call__(self) -> Any:
        """Return the result, as `synchronize` does."""
        return self.negotiator.negotiations.synchronize(self)

    def __repr__(self) -> str:
        return f"<Handle of {self.request.kind} '{self.request.name}'>"


name_others(Handle, OF_HANDLES)
