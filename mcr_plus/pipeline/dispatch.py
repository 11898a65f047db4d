"""Stage `dispatch`: the end of the pipeline, where an operation is bound to a library call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from mcr_plus.backends.base import Backend, Poll, Start, done
from mcr_plus.core.kinds import REDUCING, VECTOR
from mcr_plus.core.message import Message, Signature
from mcr_plus.engine.channel_wrapper import bound_every, has_failover, second_of
from mcr_plus.engine.group_runtime import GroupRuntime
from mcr_plus.engine.issue import refusing
from mcr_plus.engine.operation import BoundOperation, burst_of
from mcr_plus.engine.options import DispatchOptions
from mcr_plus.errors import Unsupported
from mcr_plus.pipeline.stage import Context, Issue, Next, Stage
from mcr_plus.pipeline.treatment import Treatment


class DispatchStage(Stage):
    """Binds a signature to a library call, and applies the deadline and the order of operations."""

    Options = DispatchOptions

    def __init__(self, options: DispatchOptions, context: Context) -> None:
        self._options = options
        self._runtime = context.runtime
        self._backends = context.backends
        self._hosts = context.world.hosts_of(context.group)

    def bind(self, signature: Signature, next: Next) -> Issue:
        """Return the callable that issues the operation; equal signatures share one callable."""
        if signature.backend is None:
            raise Unsupported(
                f"{signature.describe()} reached dispatch without a backend: a select stage is missing"
            )
        if signature.compress not in (None, False):
            raise Unsupported(
                f"compress={signature.compress!r} on {signature.kind}: this pipeline has no compress stage"
            )
        runtime = self._runtime
        notes = [f"deadline {self._options.timeout:g} s", self._when_compared(signature)]
        if self._options.failover:
            notes.append(self._taken_over(signature.backend, is_p2p=signature.is_p2p))
        if self._options.verify:
            notes.append(self._verified(signature))
        next.note("; ".join(notes))
        if runtime is None:
            return Issue(_refuse)
        issue = runtime.operations.get(signature)
        if issue is None:
            issue = runtime.operations[signature] = self._bind(signature, runtime)
        return issue

    @property
    def timeout(self) -> float:
        """The deadline of operations in seconds."""
        return self._options.timeout

    def set_timeout(self, seconds: float) -> None:
        """Set the deadline of operations that are bound from now on."""
        self._options = self._options.model_copy(update={"timeout": seconds})

    def treatment(self, signature: Signature, rest: Callable[[Signature], Treatment]) -> Treatment:
        """See `Stage.treatment`."""
        return replace(rest(signature), compared=self._options.check == "every")

    def _when_compared(self, signature: Signature) -> str:
        if self._compares_every(signature):
            return "ranks compare what they issue at every call"
        backend = self._backends.get(signature.backend or "")
        apart = backend is not None and self._keeps_apart(backend, signature)
        later = f"; later {signature.backend} keeps operations that differ apart" if apart else ""
        return f"ranks compare what they issue the first time{later}"

    def _taken_over(self, name: str, *, is_p2p: bool) -> str:
        hosts = [each for each, backend in self._backends.items() if not getattr(backend, "on_stream", False)]
        second = second_of([each for each in hosts if each != "local"], name)
        if second is None or is_p2p:
            return "no failover"
        return f"{second} takes over if {name} fails"

    def _verified(self, signature: Signature) -> str:
        every, what = self._options.verify, "checksums of sent and received data"
        if signature.kind == "barrier" or signature.ranks == 1:
            return "nothing to verify"
        if (backend := self._backends.get(signature.backend or "")) is not None and backend.on_stream:
            return f"{signature.backend} is refused: verify has no checksums of data on a stream"
        how = ", as exchange, local reduction and gathering" if signature.kind in REDUCING else ""
        return f"{'every' if every == 1 else f'1 in {every}'} verified by {what}{how}"

    def _compares_every(self, signature: Signature) -> bool:
        """Return True if ranks compare every operation: by option, or if the library might mix up operations.

        A library sees the encoded size, not the number of values, so it may not notice a mismatch.
        """
        if self._options.check == "every":
            return True
        backend = self._backends.get(signature.backend or "")
        if backend is None or backend.on_stream:
            return False
        of_any_size = signature.encoding is not None and signature.kind in VECTOR
        return of_any_size or not self._keeps_apart(backend, signature)

    def _keeps_apart(self, backend: type[Backend], signature: Signature) -> bool:
        """Return True if the library, with these options, never pairs different operations."""
        if backend.on_stream or backend.keeps_apart or self._options.failover or self._options.verify:
            return backend.keeps_apart
        return backend.keeps_those_apart(signature, self._hosts)

    def _bind(self, signature: Signature, runtime: GroupRuntime) -> Issue:
        channel = runtime.channels[signature.backend or ""]
        backend = channel.backend
        if signature.device != "cpu" and not backend.on_stream and backend.name != "local":
            from mcr_plus.engine.streams import stage_through_host

            return stage_through_host(
                signature, self._operation(signature.replace(device="cpu"), runtime).bind()
            )
        return self._operation(signature, runtime).bind()

    def _operation(self, signature: Signature, runtime: GroupRuntime) -> BoundOperation:
        channel = runtime.channels[signature.backend or ""]
        backend = channel.backend
        # There is no data to move. The operation keeps its number and its check, but needs no library.
        empty = signature.nbytes == 0 and not signature.is_p2p and signature.kind != "barrier"
        start: Start
        if empty:
            start = _nothing
        elif (reason := runtime.engine.off.get(backend.name)) is not None and not has_failover(
            channel.channel, signature
        ):
            start = refusing(reason)
        else:
            if self._options.verify and backend.on_stream and backend.name != "local":
                raise Unsupported(
                    f"{signature.describe()}: `verify` has no checksums for {backend.name}, which runs on a "
                    "stream; name another backend, which is staged through the host, or `verify: off`"
                )
            start = bound_every(channel.channel, self._options.verify)(signature)
        every, ballots = self._compares_every(signature), runtime.state.board.ballots
        alone = signature.async_op or backend.on_stream or signature.is_p2p or signature.kind in VECTOR
        balloted = every and ballots is not None and not alone
        if balloted and ballots is not None:
            start = _compared(start, ballots, signature.digest())
        return BoundOperation(
            signature,
            start,
            runtime.engine,
            runtime.state,
            channel,
            channel=None if empty else channel.channel,
            on_stream=backend.on_stream and not empty,
            spins=runtime.engine.waiting.spins_for(backend.spins),
            burst=burst_of(backend),
            timeout=self._options.timeout,
            compare_every=every,
            balloted=balloted,
            rings=backend.rings,
        )


def _compared(start: Start, ballots: Callable[[int], Poll], digest: int) -> Start:
    """Start a synchronous operation once all ranks have cast the same ballot, see `SharedBoard.cast`."""

    def cast(message: Message) -> Poll:
        agreed, poll = ballots(digest), None

        def run() -> bool:
            nonlocal poll
            if poll is None:
                if not agreed():
                    return False
                poll = start(message)
            return poll()

        return run

    return cast


def _nothing(message: Message) -> Poll:  # noqa: ARG001 - a Start
    return done


def _refuse(message: Message) -> NoReturn:
    raise Unsupported(f"{message.signature.describe()}: this pipeline only explains, it has no ranks")
