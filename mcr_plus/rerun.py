"""Operations bound to their tensors once and run many times."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from mcr_plus.arrays import as_tensor, is_plain
from mcr_plus.dispatch.operation import Operation
from mcr_plus.dispatch.work import Work
from mcr_plus.errors import InvalidArgument, unknown
from mcr_plus.message import Message

if TYPE_CHECKING:
    from mcr_plus.interfaces import Issue

KINDS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
)


class Call(NamedTuple):
    """A bound chain and the message it is to issue; `rest` is what the message has besides tensors."""

    issue: Issue
    message: Message

    @property
    def rest(self) -> dict[str, Any]:
        """What a message for the same tensors must be given too."""
        return vars(self.message).copy()


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
        raise InvalidArgument(f"kind: {unknown('persistent operation', kind, KINDS)}")
    if "async_op" in options:
        raise InvalidArgument("async_op: call op() for a synchronous run, op.start() for an asynchronous one")
    for index, tensor in enumerate(tensors):
        if hasattr(tensor, "__dlpack__") and not is_plain(as_tensor(tensor, f"tensors[{index}]")):
            raise InvalidArgument(f"tensors[{index}]: a persistent operation needs contiguous tensors")


def bind_persistent(now: Call, later: Call, group: object) -> PersistentOp:
    """Calls bound to their tensors, on a persistent request of the library where the chain is one call of it.

    `now` is the synchronous call, `later` the same with a handle; neither has been issued. `group` lives as
    long as what is returned.
    """
    operation = getattr(now.issue, "operation", None)
    native = operation.persistent(now.message) if isinstance(operation, Operation) else None
    issue, signature = later.issue, later.message.signature
    run: Any = partial(getattr(now.issue, "run", None) or partial(_run, now.issue), now.message)
    if native is not None:
        issue, run = native
        signature = now.message.signature
    # Held here: a library's request refers to these tensors, and a handle lets go of its message's.
    inputs, outputs, rest = later.message.inputs, later.message.outputs, later.rest
    latest: list[Work] = []

    def start() -> Work:
        if latest and not latest[0].is_completed():
            raise InvalidArgument("the persistent operation is still in flight; wait for its Work first")
        latest[:] = [issue(Message(signature, inputs, outputs, **rest))]
        return latest[0]

    run.start, run.group = start, group
    return cast("PersistentOp", run)


def _run(issue: Issue, message: Message) -> None:
    issue(message).wait()
