"""An operation bound to one library for one signature: what the pipeline ends in."""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

from mcr_plus.dispatch.board import pad
from mcr_plus.dispatch.work import IssuedWork, Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcr_plus.dispatch.engine import Engine, GroupState
    from mcr_plus.interfaces import Channel, Issue, Poll, Start
    from mcr_plus.message import Message, Signature


@dataclass(eq=False)
class Lane:
    """Operations of one group on one library that have been issued but not started, in program order.

    An operation waits here for the data it depends on and for the check of its signature. Those behind
    it wait too, because a library matches operations by their order.
    """

    pending: deque[IssuedWork] = field(default_factory=deque)


class Operation:
    """What a bound chain ends in. `issue` is its entry; everything it needs is resolved.

    Attributes:
        inline: a synchronous host operation: only the calling thread polls it, so it needs no lock.
        spins: polls at full speed before the engine's waiting loop takes over.
        burst: polls in each round of that loop.
        channel: where the library's own persistent requests come from; None if no library is involved.
        check: whether the next issue compares signatures with the peers first.
    """

    def __init__(
        self,
        signature: Signature,
        start: Start,
        engine: Engine,
        state: GroupState,
        lane: Lane,
        *,
        channel: Channel | None,
        on_stream: bool,
        spins: int,
        burst: range,
        timeout: float,
        check_every: bool = False,
    ) -> None:
        self.signature = signature
        self.backend = signature.choice
        self.start = start
        self.channel = channel
        self.engine = engine
        self.state = state
        self.lane = lane
        self.on_stream = on_stream
        self.inline = not (signature.async_op or on_stream or signature.is_p2p)
        self.spins = range(spins)
        self.burst = burst
        self.timeout = timeout
        self.digest = signature.digest()
        self.text = pad(signature.describe())
        self.check_every = check_every
        self.check = state.group.size > 1 and not signature.is_p2p

    def name(self, sequence: int) -> str:
        """For error messages: `all_reduce SUM float32[4] (#7 in group 'world')`."""
        number = "point-to-point" if self.signature.is_p2p else f"#{sequence}"
        return f"{self.signature.describe()} ({number} in group '{self.state.group.name}')"

    def bind(self) -> Issue:
        """The callable that issues this operation.

        It carries `operation`, and for synchronous ones `run`: the same as issuing and waiting, without a
        handle while all goes well.
        """
        issue = self._bind_p2p() if self.signature.is_p2p else self._bind_collective()
        issue.operation = self  # type: ignore[attr-defined]
        if self.inline:
            issue.run = self._bind_run(issue)  # type: ignore[attr-defined]
        return issue

    def persistent(self, message: Message) -> tuple[Issue, Callable[[], None]] | None:
        """The same operation by the library's persistent request for the message's tensors, if it has one.

        Returns how to issue it (with a handle of its own life) and how to run it. Collective. Persistent and
        ordinary calls cannot meet in a library, so the two have different digests.
        """
        binder = getattr(self.channel, "bind_persistent", None)
        if binder is None:
            return None
        self.engine.settle(self.lane)  # creating the request is an operation in the library's order
        with self.engine.lock:
            request: tuple[Callable[[], object], Poll] | None = binder(self.signature, message)
        if request is None:
            return None
        begin, test = request

        def start(message: Message) -> Poll:  # noqa: ARG001 - a Start
            begin()
            return test

        twin = copy(self)
        twin.start = start
        twin.digest = self.digest ^ 1
        twin.text = pad(f"persistent {self.signature.describe()}")
        twin.check = self.state.group.size > 1
        handled = copy(twin)
        handled.inline = False
        return handled.bind(), twin.bind_rerun(message, begin, test)

    def _bind_collective(self) -> Issue:
        engine, state, start = self.engine, self.state, self.start
        lock, counter, pending = engine.lock, state.board.counter, self.lane.pending
        inline = self.inline

        def issue(message: Message) -> Work:
            if get_ident() != state.owner:
                state.admit()
            with lock:
                counter[0] = state.sequence = sequence = state.sequence + 1
                work = IssuedWork(self, message, None, sequence)
                if engine.recorders:
                    work.t_issue = perf_counter()
                if self.check or pending or message.after is not None:
                    engine.defer(work)
                else:
                    try:
                        if message.prepare is not None:
                            message.prepare()
                        work.poll = start(message)
                    except Exception as error:
                        engine.fail(work, error)
                if not inline:
                    engine.hold(work)
            return work

        return issue

    def _bind_run(self, issue: Issue) -> Callable[[Message], None]:
        state, start, spins, counter = self.state, self.start, self.spins, self.state.board.counter

        # No lock: `fast` is this thread only while no other thread uses the group and no lane waits.
        def run(message: Message) -> None:
            if get_ident() != state.fast or self.check:
                issue(message).wait()
                return
            counter[0] = state.sequence = state.sequence + 1
            poll = None
            try:
                poll = start(message)
                for _ in spins:
                    if poll():
                        return
            except BaseException as error:
                self._fail_run(message, poll, error)
            self._finish_run(message, poll)

        return run

    def bind_rerun(self, message: Message, begin: Callable[[], object], test: Poll) -> Callable[[], None]:
        """As `run` for one message and a persistent request, without even a call to start it."""
        state, spins, issue, counter = self.state, self.spins, self.bind(), self.state.board.counter
        check = True

        def run() -> None:
            nonlocal check
            if check or get_ident() != state.fast:
                issue(message).wait()
                check = self.check
                return
            counter[0] = state.sequence = state.sequence + 1
            try:
                begin()
                for _ in spins:
                    if test():
                        return
            except BaseException as error:
                self._fail_run(message, test, error)
            self._finish_run(message, test)

        return run

    def _finish_run(self, message: Message, poll: Poll | None) -> None:
        work = IssuedWork(self, message, poll, self.state.sequence)
        try:
            work.wait()
        except Exception:
            raise
        except BaseException:
            self._keep(work)
            raise

    def _keep(self, work: IssuedWork) -> None:
        """After an interrupt: the operation goes on, and the library still has the tensors."""
        with self.engine.lock:
            self.engine.hold(work)

    def _fail_run(self, message: Message, poll: Poll | None, error: BaseException) -> NoReturn:
        work = IssuedWork(self, message, poll, self.state.sequence)
        if poll is not None and not isinstance(error, Exception):
            self._keep(work)
            raise error
        self.engine.fail(work, error)
        raise work.error or error

    def _bind_p2p(self) -> Issue:
        # Send and receive are matched by peer and tag, not by order: they have no number, and bypass the
        # lane. Not on a stream, which runs its operations in order: there they keep their place.
        engine, state, start = self.engine, self.state, self.start
        pending = self.lane.pending if self.on_stream else ()
        any_thread = not self.on_stream and engine.lets_threads_in(self.signature.backend)

        def issue(message: Message) -> Work:
            if get_ident() != state.owner:
                state.admit(any_thread=any_thread)
            with engine.lock:
                work = IssuedWork(self, message, None, 0)
                if engine.recorders:
                    work.t_issue = perf_counter()
                if pending or (self.on_stream and message.after is not None):
                    engine.defer(work)
                elif message.after is not None:
                    engine.defer_unordered(work)
                else:
                    try:
                        if message.prepare is not None:
                            message.prepare()
                        work.poll = start(message)
                    except Exception as error:
                        engine.fail(work, error)
                engine.hold(work)
            return work

        return issue
