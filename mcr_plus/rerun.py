"""Operations bound to their tensors once and run many times."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from mcr_plus.arrays import as_tensor, is_plain
from mcr_plus.dispatch.operation import Operation
from mcr_plus.dispatch.work import Work
from mcr_plus.errors import InvalidArgument

if TYPE_CHECKING:
    from mcr_plus.interfaces import Issue
    from mcr_plus.message import Message

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
    """What `mcr.persistent` returns."""

    def __call__(self) -> None:
        """Run the operation and return once its result may be used."""
        ...

    def start(self) -> Work:
        """Start the operation. Its `Work` must be done before the next start or call."""
        ...


def check_persistent(kind: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise `InvalidArgument` for what has no persistent form."""
    if kind not in KINDS:
        raise InvalidArgument(f"kind: no persistent form of {kind!r}; known: {', '.join(KINDS)}")
    if "async_op" in options:
        raise InvalidArgument("async_op: call op() for a synchronous run, op.start() for an asynchronous one")
    for index, tensor in enumerate(tensors):
        if hasattr(tensor, "__dlpack__") and not is_plain(as_tensor(tensor, f"tensors[{index}]")):
            raise InvalidArgument(f"tensors[{index}]: a persistent operation needs contiguous tensors")


def bind_persistent(issue: Issue, message: Message) -> PersistentOp:
    """A bound chain for one message, on the library's persistent request where it is one call of it."""
    operation = getattr(issue, "operation", None)
    native = operation.persistent(message) if isinstance(operation, Operation) else None
    run: Any = partial(getattr(issue, "run", None) or partial(_run, issue), message)
    if native is not None:
        issue, run = native
    latest: list[Work] = []

    def start() -> Work:
        if latest and not latest[0].is_completed():
            raise InvalidArgument("the persistent operation is still in flight; wait for its Work first")
        latest[:] = [issue(message)]
        return latest[0]

    run.start = start
    return cast("PersistentOp", run)


def _run(issue: Issue, message: Message) -> None:
    issue(message).wait()
