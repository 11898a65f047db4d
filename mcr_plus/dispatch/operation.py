"""An operation bound to one library for one signature: what the pipeline ends in."""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

from mcr_plus.dispatch.board import pad
from mcr_plus.dispatch.waiting import FIRST_POLLS, GLANCE, SHORT_NAPS
from mcr_plus.dispatch.work import IssuedWork, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mcr_plus.dispatch.engine import Engine, GroupState
    from mcr_plus.dispatch.waiting import Waiting
    from mcr_plus.interfaces import Channel, Gate, Issue, Persistent, Poll, Start
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
        spins: polls at full speed before the engine's waiting loop takes over, as long as waits are calm;
            `first` of them otherwise.
        burst: polls in each round of that loop; `glance` where waits are not calm.
        polled: the library moves only while it is polled. `rings`: it wakes peers itself when it has.
        channel: where the library's own persistent requests come from; None if no library is involved.
        held: whether the next issue goes through the lane, to be compared or to pass the library's gate.
        compared: whether the next issue compares signatures with the peers before it starts.
        gate: what the library wants done before it is handed the operation; None if nothing.
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
        compare_every: bool = False,
        rings: bool = False,
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
        self.first = range(min(spins, GLANCE if rings else FIRST_POLLS))
        self.more = range(spins - len(self.first))
        self.burst = burst
        self.glance = burst[: len(self.first)]
        self.polled = len(burst) > 1
        self.rings = rings
        self.timeout = timeout
        self.digest = signature.digest()
        self.text = pad(signature.describe())
        self.compare_every = compare_every
        self.gate = _gate_of(channel, signature, self.digest)
        self.held = self.compared = state.group.size > 1 and not signature.is_p2p
        engine.bound.add(self)
        engine.refuse_if_off(self)

    def admitted(self) -> None:
        """Note that an operation may start: what its next issue has to go through."""
        gate = self.gate
        self.compared = self.compare_every or (gate is not None and gate.again)
        self.held = self.compared or (gate is not None and gate.every)

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

        Returns how to issue it (with a handle of its own life) and how to run it. The request is made by the
        first start, when all ranks have issued it. Persistent and ordinary calls cannot meet in a library, so
        the two have different digests.
        """
        digest = self.digest ^ 1
        is_off = self.signature.backend in self.engine.off
        binder = None if is_off else getattr(self.channel, "bind_persistent", None)
        request: Persistent | None = binder and binder(self.signature, message, digest)
        if request is None:
            return None

        def start(message: Message) -> Poll:  # noqa: ARG001 - a Start
            request.begin()
            return request.test

        twin = copy(self)
        twin.start = start
        twin.digest = digest
        twin.gate = _gate_of(self.channel, self.signature, digest)
        twin.text = pad(f"persistent {self.signature.describe()}")
        twin.held = twin.compared = self.state.group.size > 1
        handled = copy(twin)
        handled.inline = False
        self.engine.bound.update((twin, handled))
        return handled.bind(), twin.bind_rerun(message, request)

    def _bind_collective(self) -> Issue:
        engine, state = self.engine, self.state
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
                if self.held or pending or message.after is not None:
                    engine.defer(work)
                else:
                    try:
                        if message.prepare is not None:
                            message.prepare()
                        work.poll = self.start(message)
                    except Exception as error:
                        engine.fail(work, error)
                if not inline:
                    engine.hold(work)
            return work

        return issue

    def _bind_run(self, issue: Issue) -> Callable[[Message], None]:
        state, start, counter = self.state, self.start, self.state.board.counter
        first, more, waiting, asked, ring = self.first, self.more, *self._bells()

        # No lock: `fast` is this thread only while no other thread uses the group and no lane waits.
        def run(message: Message) -> None:
            if get_ident() != state.fast or self.held:
                issue(message).wait()
                return
            counter[0] = state.sequence = state.sequence + 1
            poll = None
            try:
                poll = start(message)
                for _ in first:
                    if poll():
                        if asked[0]:
                            ring()
                        return
                for _ in more if waiting.calm else ():
                    if poll():
                        if asked[0]:
                            ring()
                        return
                if not waiting.calm and self._nap(poll):
                    return
            except BaseException as error:
                self._fail_run(message, poll, error)
            self._finish_run(message, poll)

        return run

    def _bells(self) -> tuple[Waiting, Sequence[int] | memoryview, Callable[[], None]]:
        """How waits are, and how to see whether a peer asks to be rung: none does if the library rings."""
        waiting = self.engine.waiting
        if waiting.bells is None or not self.polled or self.rings:
            return waiting, (0,), self.engine.ring
        return waiting, waiting.bells.wanted, self.engine.ring

    def bind_rerun(self, message: Message, request: Persistent) -> Callable[[], None]:
        """As `run` for one message and a persistent request, without even a call to start it."""
        state, issue, counter = self.state, self.bind(), self.state.board.counter
        first, more, waiting, asked, ring = self.first, self.more, *self._bells()
        begin, test = request.begin, request.test

        def run() -> None:
            nonlocal begin, test
            if self.held or get_ident() != state.fast:
                issue(message).wait()
                begin, test = request.begin, request.test
                return
            counter[0] = state.sequence = state.sequence + 1
            try:
                begin()
                for _ in first:
                    if test():
                        if asked[0]:
                            ring()
                        return
                for _ in more if waiting.calm else ():
                    if test():
                        if asked[0]:
                            ring()
                        return
                if not waiting.calm and self._nap(test):
                    return
            except BaseException as error:
                self._fail_run(message, test, error)
            self._finish_run(message, test)

        return run

    def _nap(self, poll: Poll) -> bool:
        """Sleep a few times until a peer rings, where waits are not calm; whether `poll` is done then.

        What a longer wait looks after is left to `Engine.wait`. So is everything if there is more in flight.
        """
        engine, waiting = self.engine, self.engine.waiting
        if engine.occupied or not (self.polled and waiting.may_nap()):
            return False
        for _ in SHORT_NAPS:
            waiting.arm(self.state.group.ranks)
            if poll():
                break
            if not self.rings:
                engine.ring()  # what this rank has polled may be what others wait for
            waiting.nap(self.rings)
            if poll():
                break
        else:
            return False
        if not self.rings:
            engine.ring()
        return True

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
        engine, state = self.engine, self.state
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
                        work.poll = self.start(message)
                    except Exception as error:
                        engine.fail(work, error)
                engine.hold(work)
            return work

        return issue


def _gate_of(channel: Channel | None, signature: Signature, digest: int) -> Gate | None:
    """What a library that has gates wants done before each operation, or the first, of a signature."""
    gate = None if signature.is_p2p else getattr(channel, "gate", None)
    return None if gate is None else gate(signature, digest)
