"""Handles of operations, from the call to the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mcr_plus.dispatch.work import Work
from mcr_plus.errors import BackendError, CommTimeout, McrError, OrderMismatch
from mcr_plus.horovod.request import HorovodInternalError, Request

if TYPE_CHECKING:
    from mcr_plus.horovod.negotiation import Negotiator


class Handle:
    """A started operation: see `synchronize` and `poll`. Called, it is synchronized.

    It waits for the other ranks' requests of its name (`launched` is False), then for its `works`; then
    `finish` makes the result of what has arrived.
    """

    def __init__(
        self,
        negotiator: Negotiator,
        request: Request,
        tensors: list[torch.Tensor],
        *,
        in_place: bool = False,
        result: Callable[[Any], Any] | None = None,
    ) -> None:
        """`result` makes the caller's result of the operation's."""
        self.negotiator = negotiator
        self.request = request
        self.tensors = tensors
        self.in_place = in_place
        self.launched = False
        self.works: list[Work] = []
        self.finish: Callable[[], Any] = lambda: None
        self.offsets: list[int] = []  # of this rank's rows in what an allgather makes
        self._result = result
        self._value: Any = None
        self._done = False
        self._error: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensors."""
        return sum(0 if tensor.is_sparse else tensor.nbytes for tensor in self.tensors)

    def start(self, works: list[Work], finish: Callable[[], Any]) -> None:
        """Its operations have been issued."""
        self.launched, self.works, self.finish = True, works, finish

    def fail(self, error: BaseException) -> None:
        """It will not take place."""
        self.launched = self._done = True
        self._error = error
        self._release()

    @property
    def is_done(self) -> bool:
        """Whether it has a result or an error."""
        return self._done

    def look(self) -> None:
        """See whether what is in flight has arrived."""
        if not self._done and self.launched and all(work.is_completed() for work in self.works):
            self.settle()

    def settle(self) -> None:
        """Wait for what was issued, and make the result. What goes wrong is kept for `value`."""
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
        """The result; raises what went wrong."""
        if self._error is not None:
            raise self._error
        return self._value

    def __call__(self) -> Any:
        """The result, as of `synchronize`."""
        return self.negotiator.parley.synchronize(self)

    def __repr__(self) -> str:
        return f"<Handle of {self.request.kind} '{self.request.name}'>"
