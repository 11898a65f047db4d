"""dispatch: the end of the pipeline, where an operation is bound to a library's own call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Final, NoReturn, Protocol

from mcr_plus.backends.local import done
from mcr_plus.config import DispatchOptions
from mcr_plus.dispatch.engine import Engine, GroupState, refusing
from mcr_plus.dispatch.operation import Lane, Operation
from mcr_plus.dispatch.streams import stage_through_host
from mcr_plus.errors import Unsupported
from mcr_plus.interfaces import Backend, Channel, Context, Issue, Next, Poll, Start
from mcr_plus.message import VECTOR, Message, Signature


@dataclass(frozen=True)
class Line:
    """A library as one group uses it: the open channel, and the operations waiting to start on it."""

    backend: Backend
    channel: Channel
    lane: Lane


class Held(Protocol):
    """Operations that a stage holds back."""

    def send(self) -> Exception | None:
        """Issue them, under the engine's lock; they are no longer in the list. Returns what went wrong."""
        ...

    def digests(self) -> Collection[int]:
        """What peers would see of it if it were sent now, as one operation or several."""
        ...


SIGNATURES: Final = 4096
"""How many signatures a group remembers. Each takes some KiB."""


@dataclass(eq=False)
class GroupRuntime:
    """What stages work with that issue or hold back operations; a group that only explains has none.

    `held`: what stages hold back, in the order in which it is to be sent. `restored`: what operations
    had kept in an earlier job, by their names; `found`: what online refinement had found out in it.
    `caches`: empty what is remembered of signatures, see `forget`. `bound`: how many have been bound since.
    """

    engine: Engine
    state: GroupState
    lines: Mapping[str, Line]
    operations: dict[Signature, Issue]
    held: list[Held] = field(default_factory=list)
    restored: dict[str, Any] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)
    caches: list[Callable[[], None]] = field(default_factory=list)
    bound: int = 0

    def count(self) -> None:
        """Count a signature that all ranks bind at this call; if there are too many, forget those before it.

        Ranks must forget at the same call, because all of them compare a signature when it comes again. So
        this counts what all ranks bind alike, and not what a rank looks up, which may differ between them.
        """
        if self.bound >= SIGNATURES:
            self.forget()
        self.bound += 1

    def forget(self) -> None:
        """Forget what signatures are bound to. What comes again is bound and compared anew.

        Whoever still has something bound, such as a persistent operation or a bucket that is held back, keeps
        it. What codecs keep for operations and online refinement has found out is not forgotten.
        """
        self.bound = 0
        for clear in self.caches:
            clear()
        self.operations.clear()

    def forget_messages(self) -> None:
        """Forget what sends and receives are bound to: they are compared with nobody, so each rank may."""
        for signature in [each for each in self.operations if each.is_p2p]:
            del self.operations[signature]

    def send_held(self, only: Held | None = None) -> None:
        """Issue everything that is held back, or `only` this, all of it even if some fails.

        Raises the first error; `OrderMismatch` in a thread that may not issue operations of the group.
        """
        if get_ident() != self.state.owner:
            self.state.admit()  # before anything is taken out that could not be sent
        with self.engine.lock:
            held = self.held[:] if only is None else [only]
            self.held[:] = [each for each in self.held if each not in held]
            errors = [error for each in held if (error := each.send()) is not None]
        if errors:
            raise errors[0]


class DispatchStage:
    """Binds a signature to a library call, with its deadline and its place in the order."""

    def __init__(self, options: DispatchOptions, context: Context) -> None:
        self._options = options
        self._runtime = context.runtime
        self._backends = context.backends

    def bind(self, signature: Signature, next: Next) -> Issue:
        """The callable that issues the operation; the same one whenever the signature comes again."""
        if signature.backend is None:
            raise Unsupported(
                f"{signature.describe()} reached dispatch without a backend: a select stage is missing"
            )
        if signature.compress not in (None, False):
            raise Unsupported(
                f"compress={signature.compress!r} on {signature.kind}: this pipeline has no compress stage"
            )
        when = "at every call" if self._compares_every(signature) else "the first time"
        next.note(f"deadline {self._options.timeout:g} s; {when}, ranks compare what they issue")
        runtime = self._runtime
        if runtime is None:
            return _refuse
        issue = runtime.operations.get(signature)
        if issue is None:
            issue = runtime.operations[signature] = self._bind(signature, runtime)
        return issue

    def _compares_every(self, signature: Signature) -> bool:
        """Whether every operation is compared: also where the library would pair those that differ.

        It sees how much is encoded, and not of how many values that is.
        """
        if self._options.check == "every":
            return True
        backend = self._backends.get(signature.backend or "")
        if backend is None or backend.on_stream:
            return False
        of_any_size = signature.encoding is not None and signature.kind in VECTOR
        return of_any_size or not getattr(backend, "keeps_apart", False)

    def _bind(self, signature: Signature, runtime: GroupRuntime) -> Issue:
        line = runtime.lines[signature.backend or ""]
        backend = line.backend
        if signature.device != "cpu" and not backend.on_stream and backend.name != "local":
            return stage_through_host(
                signature, self._operation(signature.replace(device="cpu"), runtime).bind()
            )
        return self._operation(signature, runtime).bind()

    def _operation(self, signature: Signature, runtime: GroupRuntime) -> Operation:
        line = runtime.lines[signature.backend or ""]
        backend = line.backend
        # Nothing to move: the operation keeps its number and its check, but needs no library.
        empty = signature.nbytes == 0 and not signature.is_p2p and signature.kind != "barrier"
        start: Start
        if empty:
            start = _nothing
        elif (reason := runtime.engine.off.get(backend.name)) is not None:
            start = refusing(reason)
        else:
            start = line.channel.bind(signature)
        return Operation(
            signature,
            start,
            runtime.engine,
            runtime.state,
            line.lane,
            channel=None if empty else line.channel,
            on_stream=backend.on_stream and not empty,
            spins=runtime.engine.spins_for(backend.spins),
            burst=runtime.engine.burst_for(backend),
            timeout=self._options.timeout,
            compare_every=self._compares_every(signature),
            rings=getattr(backend, "rings", False),
        )


def _nothing(message: Message) -> Poll:  # noqa: ARG001 - a Start
    return done


def _refuse(message: Message) -> NoReturn:
    raise Unsupported(f"{message.signature.describe()}: this pipeline only explains, it has no ranks")
