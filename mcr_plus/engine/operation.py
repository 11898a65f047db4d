"""An operation bound to one library for one signature: the end of the pipeline."""

from __future__ import annotations

from copy import copy
from functools import partial
from threading import get_ident
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mcr_plus.backends.base import FirstCalls
from mcr_plus.board.base import pad
from mcr_plus.core.kinds import IN_PLACE
from mcr_plus.core.message import Message
from mcr_plus.core.work import Work
from mcr_plus.engine.channel_wrapper import ChannelWrapper, has_failover
from mcr_plus.engine.disabled_backends import refuse_if_off
from mcr_plus.engine.issue import Issue
from mcr_plus.engine.work import IssuedWork
from mcr_plus.waiting.policy import FIRST_POLLS, GLANCE, SHORT_NAPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from mcr_plus.backends.base import Backend, Channel, Gate, NativeStart, Persistent, Poll, Start
    from mcr_plus.core.message import Extras, Signature
    from mcr_plus.engine.engine import Engine
    from mcr_plus.engine.group_state import BackendChannel, GroupState


_BURST: Final = 16
_WEIGHED: Final = 16  # bytes are noted for one of 16 issues of an operation without a fixed size


class BoundOperation:
    """The end of a bound chain: holds everything that an issue needs.

    Attributes:
        inline: a synchronous host operation; only the calling thread polls it, so it needs no lock.
        spins: polls at full speed before the engine's waiting loop takes over, while waits are calm;
            otherwise `first` polls.
        burst: polls in each round of that loop; `glance` while waits are not calm.
        polled: the library makes progress only while it is polled. `rings`: it then wakes peers itself.
        channel: source of the library's persistent requests; None if no library is involved.
        shift: distance in bytes at which the source may overlap the target; None if it may not.
        deferred: whether the next issue is queued, to compare signatures or to pass the library's gate.
        has_failover: another library takes over if this one fails.
        by_option: every call is compared, by `compare_every` or by ballots that `start` casts.
        compared: whether the next issue compares signatures with the peers before the operation starts.
        gate: condition of the library before an operation may be passed to it; None if there is none.
    """

    def __init__(
        self,
        signature: Signature,
        start: Start,
        engine: Engine,
        state: GroupState,
        backend_channel: BackendChannel,
        *,
        channel: Channel | None,
        on_stream: bool,
        spins: int,
        burst: range,
        timeout: float,
        compare_every: bool = False,
        balloted: bool = False,
        rings: bool = False,
    ) -> None:
        self.signature = signature
        self.backend = signature.choice
        self.start = self._weighed(start) if signature.nbytes is None else start
        self.native: Callable[..., NativeStart | None] | None = getattr(start, "native", None)
        self.shift: int | None = getattr(start, "shift", None)
        if isinstance(self.start, FirstCalls):
            self.start.on_settled = partial(setattr, self, "start")
        self.channel = channel
        self.engine = engine
        self.hooks = engine.hooks
        self.state = state
        self.backend_channel = backend_channel
        self.on_stream = on_stream
        self.has_failover = has_failover(channel, signature)
        if self.has_failover and isinstance(channel, ChannelWrapper):
            self.backend = channel.taken_over_by or signature.choice
        self.inline = not (signature.async_op or on_stream or signature.is_p2p)
        # Lists, so that `stop_polling` can empty them under another thread's loop.
        self.spins = [None] * spins
        self.first = [None] * min(spins, GLANCE if rings else FIRST_POLLS)
        self.more = [None] * (spins - len(self.first))
        self.burst = burst
        self.glance = burst[: len(self.first)]
        self.polled = len(burst) > 1
        self.rings = rings
        self.timeout = timeout
        self.digest = signature.digest()
        self.text = pad(signature.describe())
        self.compare_every, self.by_option = compare_every and not balloted, compare_every
        self.gate = _gate_of(channel, signature, self.digest)
        self.deferred = self.compared = state.group.size > 1 and not signature.is_p2p
        engine.bound.add(self)
        refuse_if_off(engine, self)

    def update_checks(self) -> None:
        """Update the requirements of the next issue after an operation has been admitted."""
        gate = self.gate
        self.compared = self.compare_every or (gate is not None and gate.again)
        self.deferred = self.compared or (gate is not None and gate.every)

    @property
    def mean_bytes(self) -> float:
        """Mean bytes of one issue, as counted by nccl-tests; this rank's own if sizes differ by rank."""
        if self.signature.nbytes is not None:
            return self.signature.nbytes
        return self._weight[1] / max(self._weight[0], 1)

    def _weighed(self, start: Start) -> Start:
        """Note the bytes of one in 16 issues of an operation whose messages differ in size."""
        calls = 0
        self._weight = 0, 0

        def started(message: Message) -> Poll:
            nonlocal calls
            if not calls % _WEIGHED:
                self._weight = self._weight[0] + 1, self._weight[1] + message.own_bytes()
            calls += 1
            return start(message)

        return started

    def runs_on(self, backend: Backend) -> None:
        """Switch to another library, which may need more or fewer polls."""
        self.backend = backend.name
        self.burst = burst_of(backend)
        self.glance = self.burst[: len(self.first) or 1]
        self.polled, self.rings = backend.host_driven, backend.rings

    def stop_polling(self) -> None:
        """End the full-speed polling loops of all threads: the library must not be called again."""
        for polls in (self.spins, self.first, self.more):
            polls.clear()

    def prepare(self, message: Message) -> None:
        """Run the stages' preparation before the operation starts."""
        if self.on_stream:
            self.backend_channel.start_order.prepare(message)
        elif message.prepare is not None:
            message.prepare()

    def name(self, sequence: int) -> str:
        """Text for error messages: `all_reduce SUM float32[4] (#7 in group 'world')`."""
        number = "point-to-point" if self.signature.is_p2p else f"#{sequence}"
        return f"{self.signature.describe()} ({number} in group '{self.state.group.name}')"

    def bind(self) -> Issue:
        """Return how to issue this operation; a synchronous one needs no handle unless there is an error."""
        start = self._bind_p2p() if self.signature.is_p2p else self._bind_collective()
        if not self.inline:
            return Issue(start, operation=self, native=self.native if self.signature.is_p2p else None)
        in_place = self._bind_run_in_place(start) if self.signature.kind in IN_PLACE else None
        run = self._bind_run(start)
        return Issue(start, run, operation=self, run_in_place=in_place, native=self.native)

    def persistent(self, message: Message) -> tuple[Issue, Callable[[], None]] | None:
        """Return the operation as a persistent request of the library for the message's tensors, or None.

        The result says how to issue it (with a handle that can be reused) and how to run it. The first start
        makes the request, when all ranks have issued it. Libraries cannot match a persistent call with an
        ordinary one, so the two have different digests.
        """
        digest = self.digest ^ 1
        is_off = self.signature.backend in self.engine.off
        if is_off or self.channel is None:
            return None
        request = self.channel.bind_persistent(self.signature, message, digest)
        if request is None:
            return None

        def start(message: Message) -> Poll:  # noqa: ARG001 - a Start
            request.begin()
            return request.test

        twin = copy(self)
        twin.compare_every = self.by_option  # a request has no ballot
        twin.start = twin._weighed(start) if self.signature.nbytes is None else start
        twin.digest = digest
        twin.gate = _gate_of(self.channel, self.signature, digest)
        twin.text = pad(f"persistent {self.signature.describe()}")
        twin.deferred = twin.compared = self.state.group.size > 1
        handled = copy(twin)
        handled.inline = False
        self.engine.bound.update((twin, handled))
        return handled.bind(), twin.bind_request(message, request)

    def _bind_collective(self) -> Callable[[Message], Work]:
        engine, state = self.engine, self.state
        lock, counter, pending = engine.lock, state.board.counter, self.backend_channel.pending
        inline, remember, signature, clock = self.inline, state.ring.append, self.signature, time_ns
        hooks = self.hooks

        def issue(message: Message) -> Work:
            if get_ident() != state.owner:
                state.check_thread()
            with lock:
                counter[0] = state.sequence = sequence = state.sequence + 1
                remember((sequence, signature, clock()))
                work = IssuedWork(self, message, None, sequence)
                if hooks.timed:
                    self._note_issue(work)
                if self.deferred or pending or message.after is not None:
                    engine.defer(work)
                else:
                    try:
                        if message.prepare is not None:
                            self.prepare(message)
                        work.poll = self.start(message)
                    except Exception as error:
                        engine.fail(work, error)
                if not inline:
                    engine.keep_alive(work)
            return work

        return issue

    def _note_issue(self, work: IssuedWork) -> None:
        work.t_issue = perf_counter()
        for issued in self.hooks.issued:
            issued(work)

    def _bind_run(self, issue: Callable[[Message], Work]) -> Callable[[Message], None]:
        state, counter = self.state, self.state.board.counter
        first, waiting, (wanted, ring) = self.first, self.engine.waiting, self._bells()
        remember, signature, clock = state.ring.append, self.signature, time_ns

        # No lock: `fast_path_thread` is this thread only while no other thread uses the group and no
        # operation in it is deferred.
        def run(message: Message) -> None:
            if get_ident() != state.fast_path_thread or self.deferred:
                issue(message).wait()
                return
            counter[0] = state.sequence = sequence = state.sequence + 1
            remember((sequence, signature, clock()))
            poll = None
            try:
                poll = self.start(message)
                for _ in first:
                    if poll():
                        if wanted[0]:
                            ring()
                        if waiting.calm:
                            return
                        is_done = True
                        break
                else:
                    is_done = self._poll_longer(poll)
            except BaseException as error:
                self._fail_run(message, poll, error)
            if is_done:
                waiting.relay()
            else:
                self._wait_run(message, poll)

        return run

    def _bind_run_in_place(self, issue: Callable[[Message], Work]) -> Callable[[torch.Tensor], None]:
        """Bind `run` with one message for all calls, because creating a message takes 0.1 µs."""
        state, counter = self.state, self.state.board.counter
        first, waiting, (wanted, ring) = self.first, self.engine.waiting, self._bells()
        remember, signature, clock = state.ring.append, self.signature, time_ns
        spare: Message | None = None  # None while in use, so that a signal handler may call this

        def run_in_place(tensor: torch.Tensor) -> None:
            nonlocal spare
            if get_ident() != state.fast_path_thread or self.deferred:
                issue(Message(signature, (tensor,), (tensor,))).wait()
                return
            counter[0] = state.sequence = sequence = state.sequence + 1
            remember((sequence, signature, clock()))
            message, spare = spare or Message(signature), None
            message.inputs = message.outputs = (tensor,)
            poll = None
            try:
                poll = self.start(message)
                for _ in first:
                    if poll():
                        if wanted[0]:
                            ring()
                        message.inputs = message.outputs = ()
                        spare = message
                        if waiting.calm:
                            return
                        is_done = True
                        break
                else:
                    is_done = self._poll_longer(poll)
            except BaseException as error:
                self._fail_run(message, poll, error)
            if is_done:
                waiting.relay()
            else:
                self._wait_run(message, poll)

        return run_in_place

    def _bells(self) -> tuple[Sequence[int] | memoryview, Callable[[], None]]:
        """Return functions that find and wake waiting peers; no-ops if the library wakes peers itself."""
        bells = self.engine.waiting.bells
        if bells is None or not self.polled or self.rings:
            return (0,), self.engine.ring
        return bells.wanted, self.engine.ring

    def bind_request(self, message: Message, request: Persistent) -> Callable[[], None]:
        """Bind `run` for one message and a persistent request, without a separate call to start it."""
        state, counter = self.state, self.state.board.counter
        first, waiting, (wanted, ring) = self.first, self.engine.waiting, self._bells()
        issue, begin, test = self.bind().start, request.begin, request.test
        remember, signature, clock = state.ring.append, self.signature, time_ns

        def run() -> None:
            nonlocal begin, test
            if self.deferred or get_ident() != state.fast_path_thread:
                issue(message).wait()
                begin, test = request.begin, request.test
                return
            counter[0] = state.sequence = sequence = state.sequence + 1
            remember((sequence, signature, clock()))
            try:
                begin()
                for _ in first:
                    if test():
                        if wanted[0]:
                            ring()
                        if waiting.calm:
                            return
                        is_done = True
                        break
                else:
                    is_done = self._poll_longer(test)
            except BaseException as error:
                self._fail_run(message, test, error)
            if is_done:
                waiting.relay()
            else:
                self._wait_run(message, test)

        return run

    def resuming(
        self, begun: Callable[[int, int, Any], Poll], extras: Extras
    ) -> tuple[Callable[..., Any], Callable[..., None]]:
        """Bind the rest of a synchronous call whose operation compiled code has begun, see `NativeStart`.

        Returns a function that takes the operation over, and one that keeps it in flight after an interrupt.
        The first returns a function that waits; for a message it is called under the lock.
        """
        waiting, signature, lock = self.engine.waiting, self.signature, self.engine.lock

        def finish(message: Message, poll: Poll) -> None:
            def locked() -> bool:
                with lock:
                    return poll()

            try:  # compiled code has made the first polls
                is_done = self._poll_longer(locked if signature.is_p2p else poll)
            except Exception as error:
                self._fail_run(message, poll, error)
            if is_done:
                waiting.relay()
            else:
                self._issued(message, poll).wait()

        def take(source: int, target: int, tensors: tuple[torch.Tensor, ...]) -> Any:
            message = Message(signature, tensors[-1:], tensors[:1], **extras)
            return partial(finish, message, begun(source, target, tensors))

        def retain(taken: Any) -> None:
            self._keep(self._issued(*taken.args))

        return take, retain

    def _poll_longer(self, poll: Poll) -> bool:
        """Continue polling, with naps if waits are not calm; return whether the operation is done."""
        waiting = self.engine.waiting
        for _ in self.more if waiting.calm else ():
            if poll():
                if self.polled and not self.rings:
                    self.engine.ring()
                return True
        return not waiting.calm and self._nap(poll)

    def _nap(self, poll: Poll) -> bool:
        """Sleep a few times until a peer rings, if waits are not calm; return whether `poll` is done then.

        `Engine.wait` checks deadline and peers, and does the whole wait if other operations are in flight.
        """
        engine, waiting = self.engine, self.engine.waiting
        if engine.occupied() or not (self.polled and waiting.may_nap()):
            return False
        for _ in SHORT_NAPS:
            if self.signature.backend in engine.off:
                return False
            waiting.arm(self.state.group.ranks)
            if poll():
                break
            if not self.rings:
                engine.ring()  # this rank's polls may have advanced an operation that peers wait for
            waiting.nap(self.rings)
            if poll():
                break
        else:
            return False
        if not self.rings:
            engine.ring()
        return True

    def _wait_run(self, message: Message, poll: Poll | None) -> None:
        work = self._issued(message, poll)
        try:
            work.wait()
        except Exception:
            raise
        except BaseException:
            self._keep(work)
            raise

    def _issued(self, message: Message, poll: Poll | None) -> IssuedWork:
        """Return the handle of an operation that was started without one."""
        work = IssuedWork(self, message, poll, 0 if self.signature.is_p2p else self.state.sequence)
        work.issued = time_ns() if self.signature.is_p2p else 0
        return work

    def _keep(self, work: IssuedWork) -> None:
        """Keep the operation in flight after an interrupt, since the library still has the tensors."""
        with self.engine.lock:
            self.engine.keep_alive(work)

    def _fail_run(self, message: Message, poll: Poll | None, error: BaseException) -> NoReturn:
        work = self._issued(message, poll)
        if poll is not None and not isinstance(error, Exception):
            self._keep(work)
            raise error
        self.engine.fail(work, error)
        self.state.failure_raised = True
        raise work.error or error

    def _bind_p2p(self) -> Callable[[Message], Work]:
        # Sends and receives are matched by peer and tag. They have no number, and queue only behind messages
        # that could be matched in their place. On a stream order is kept anyway, so they queue there.
        engine, state = self.engine, self.state
        pending = self.backend_channel.pending if self.on_stream else ()
        any_thread = not self.on_stream and _allows_threads(engine, self.signature.backend)
        remember, signature, hooks = state.messages.append, self.signature, self.hooks

        def issue(message: Message) -> Work:
            if get_ident() != state.owner:
                state.check_thread(any_thread=any_thread)
            with engine.lock:
                work = IssuedWork(self, message, None, 0)
                work.issued = issued = time_ns()
                remember((message.peer, message.match_tag, signature, issued))
                if hooks.timed:
                    self._note_issue(work)
                if pending or (self.on_stream and message.after is not None):
                    engine.defer(work)
                elif message.after is not None or (engine.unordered and work.is_behind(engine.unordered)):
                    engine.unordered.append(work)
                else:
                    try:
                        if message.prepare is not None:
                            self.prepare(message)
                        work.poll = self.start(message)
                    except Exception as error:
                        engine.fail(work, error)
                engine.keep_alive(work)
            return work

        return issue


def burst_of(backend: Backend) -> range:
    """Return how many polls to make in a row in a longer wait; large operations take many.

    A library with threads of its own may need the core that polls would occupy. This also holds for an
    operation of several steps, because a poll starts the next step.
    """
    return range(_BURST if backend.host_driven else 1)


def _gate_of(channel: Channel | None, signature: Signature, digest: int) -> Gate | None:
    """Return the library's gate for the operations of a signature, or None."""
    return None if channel is None or signature.is_p2p else channel.gate(signature, digest)


def _allows_threads(engine: Engine, name: str | None) -> bool:
    """Return whether a library may be called while another thread is inside it."""
    backend = next((each for each in engine.backends if each.name == name), None)
    return backend is None or not backend.thread_restriction()
