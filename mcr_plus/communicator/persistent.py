"""Persistent operations: bound to their tensors once and run many times."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from mcr_plus.communicator.tensors import as_tensor, is_plain
from mcr_plus.core.message import Message
from mcr_plus.core.work import Work
from mcr_plus.errors import InvalidArgument, unknown

if TYPE_CHECKING:
    from mcr_plus.communicator.prepared import Prepared

KINDS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
)


class PersistentOp(Protocol):
    """The result of `mcr.persistent`."""

    def __call__(self) -> None:
        """Run the operation; returns when its result may be used."""
        ...

    def start(self) -> Work:
        """Start the operation. Its `Work` must be complete before the next start or call."""
        ...


def check_persistent(kind: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise `InvalidArgument` for operations without a persistent form, or non-contiguous tensors."""
    if kind not in KINDS:
        raise InvalidArgument(f"kind: {unknown('persistent operation', kind, KINDS)}")
    if "async_op" in options:
        raise InvalidArgument("async_op: call op() for a synchronous run, op.start() for an asynchronous one")
    for index, tensor in enumerate(tensors):
        if hasattr(tensor, "__dlpack__") and not is_plain(as_tensor(tensor, f"tensors[{index}]")):
            raise InvalidArgument(f"tensors[{index}]: a persistent operation needs contiguous tensors")


def bind_persistent(now: Prepared, later: Prepared, group: object) -> PersistentOp:
    """Return an operation bound to its tensors, on a persistent request if its chain is one library call.

    `now` is the synchronous call, `later` the asynchronous one; neither has been issued. The result keeps
    `group` alive.
    """
    operation = now.issue.operation
    native = None if operation is None else operation.persistent(now.message)
    issue, signature = later.issue, later.message.signature
    run: Any = partial(now.issue.run, now.message)
    if native is not None:
        issue, run = native
        signature = now.message.signature
    # Kept alive here: the library's request refers to these tensors, and a handle drops its message's.
    inputs, outputs, extras = later.message.inputs, later.message.outputs, later.message.extras
    latest: list[Work] = []

    def start() -> Work:
        if latest and not latest[0].is_completed():
            raise InvalidArgument("the persistent operation is still pending; wait for its Work first")
        latest[:] = [issue.start(Message(signature, inputs, outputs, **extras))]
        return latest[0]

    run.start, run.group = start, group
    return cast("PersistentOp", run)
