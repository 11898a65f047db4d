"""Operations bound to their tensors once and run many times."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mcr_plus.arrays import as_tensor, is_plain
from mcr_plus.dispatch.operation import Operation
from mcr_plus.dispatch.work import IssuedWork, Work
from mcr_plus.errors import InvalidArgument

if TYPE_CHECKING:
    from mcr_plus.interfaces import Issue, Poll
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


class PersistentOp:
    """What `mcr.persistent` returns: `op()` runs the operation, `op.start()` returns its `Work`."""

    def __init__(self, run: Callable[[], None], start: Callable[[], Work]) -> None:
        self._run = run
        self.start = start

    def __call__(self) -> None:
        """Run the operation and return once its result may be used."""
        self._run()


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
    """A bound chain for one message; the library's own persistent request where the chain is one call of it."""
    operation = getattr(issue, "operation", None)
    native = operation.bind_persistent(message) if isinstance(operation, Operation) else None
    if native is None or not isinstance(operation, Operation):
        return PersistentOp(lambda: issue(message).wait(), lambda: issue(message))
    begin, test = native
    return PersistentOp(_fast(operation, message, begin, test), _handle(operation, message, begin, test))


def _handle(
    operation: Operation, message: Message, begin: Callable[[], Any], test: Poll
) -> Callable[[], Work]:
    """The persistent request behind an ordinary handle."""
    issue = operation.bind_started(lambda _: _started(begin, test))
    return lambda: issue(message)


def _started(begin: Callable[[], Any], test: Poll) -> Poll:
    begin()
    return test


def _fast(operation: Operation, message: Message, begin: Callable[[], Any], test: Poll) -> Callable[[], None]:
    """Run to completion with nothing but the start and the polls, while all goes well."""
    engine, state = operation.engine, operation.state
    lock, counter, pending, spins = engine.lock, state.board.counter, operation.lane.pending, operation.spins
    checked_every_time = operation.check_every
    slow = _handle(operation, message, begin, test)

    def run() -> None:
        if get_ident() != state.owner or pending or operation.check or checked_every_time or engine.recorders:
            slow().wait()
            return
        with lock:
            state.sequence = sequence = state.sequence + 1
            counter[0] = sequence
            begin()
        try:
            for _ in spins:
                if test():
                    return
        except Exception as error:
            work = IssuedWork(operation, message, test, sequence)
            engine.fail(work, error)
            work.wait()
        work = IssuedWork(operation, message, test, sequence)
        work.t_issue = perf_counter()
        engine.wait(work)
        work.wait()

    return run
