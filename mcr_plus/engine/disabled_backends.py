"""Libraries that this process no longer calls, after an error that left them unusable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcr_plus.board.base import Failure
from mcr_plus.engine.issue import refusing
from mcr_plus.errors import BackendError

if TYPE_CHECKING:
    from mcr_plus.backends.base import Backend
    from mcr_plus.engine.engine import Engine
    from mcr_plus.engine.operation import BoundOperation
    from mcr_plus.engine.work import IssuedWork


def why_off(engine: Engine, operation: BoundOperation) -> str | None:
    """Return why an operation's library is switched off; None if it is not, or another library takes over."""
    return None if operation.has_failover else engine.off.get(operation.signature.backend or "")


def switch_off_after(engine: Engine, work: IssuedWork, error: BaseException) -> None:
    """Switch the library of `work` off if `error` leaves it unusable."""
    name = work.operation.signature.backend
    backend = next((known for known in engine.backends if known.name == name), None)
    reason = "" if backend is None else backend.breaks(error)
    if backend is not None and reason:
        switch_off(engine, backend, reason, work)


def switch_off(engine: Engine, backend: Backend, reason: str, work: IssuedWork | None = None) -> None:
    """Never call a library again, after an error of `work`; the caller fails `work` itself.

    Operations in flight on the library fail, in all groups, and later ones are refused, unless another
    library takes over.
    """
    if backend not in engine.backends:
        return
    engine.backends.remove(backend)
    engine.off[backend.name] = reason
    backend.switched_off(reason)
    for wrapper in engine.wrappers:
        wrapper.on_library_off(backend, reason)
    for operation in engine.bound:
        refuse_if_off(engine, operation)
    deferred = [pending for channel in engine.blocked for pending in channel.pending]
    for other in (*engine.in_flight, *engine.unordered, *deferred):
        if other is not work and not other.is_done and why_off(engine, other.operation) == reason:
            engine.peers.keep.append((other.message, other.message.inputs, other.message.outputs, other.poll))
            failure = BackendError(f"{other.operation.name(other.sequence)}: {reason}")
            other.fail(failure)
            other.operation.state.fail(failure, other.sequence)
            other.operation.state.board.mark_failed(Failure(other.sequence, f"BackendError: {reason}"))


def refuse_if_off(engine: Engine, operation: BoundOperation) -> None:
    """Make an operation fail at once, without comparing signatures, if its library is switched off."""
    reason = why_off(engine, operation)
    if reason is not None:
        operation.start = refusing(reason)
        operation.stop_polling()
        operation.gate = None
        operation.compare_every = operation.compared = False
        operation.deferred = True  # the fast path keeps its own reference to `start`
