"""Order and progress of operations: the state that all groups of a process share."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final, cast
from weakref import WeakSet

from mcr_plus.board.base import Failure
from mcr_plus.engine.backoff import pause_wait
from mcr_plus.engine.desync import compare_signatures, explain_difference, find_mismatch
from mcr_plus.engine.disabled_backends import switch_off_after, why_off
from mcr_plus.engine.hook import Hooks, OperationHook, ProgramWait
from mcr_plus.engine.watchdog import LONG_WAIT, Watchdog
from mcr_plus.engine.work import start_messages
from mcr_plus.errors import BackendError, McrError, OperationsDiffer, OrderMismatch, following
from mcr_plus.waiting.policy import LONGEST_NAP, Pause, WaitPolicy, WaitStrategy

if TYPE_CHECKING:
    from mcr_plus.backends.base import Backend, StreamPoll
    from mcr_plus.engine.channel_wrapper import ChannelWrapper
    from mcr_plus.engine.group_state import BackendChannel, GroupState
    from mcr_plus.engine.operation import BoundOperation
    from mcr_plus.engine.work import IssuedWork
    from mcr_plus.rendezvous.processes import Peers
    from mcr_plus.waiting.futex import Wakeups
    from mcr_plus.waiting.progress_thread import ProgressThread

_VERY_LONG_WAIT: Final = 1.0  # s of waiting after which checks become rarer
_REAP: Final = 2  # completed handles dropped per issue: a constant, so that an issue never scans them all
_UNREAD: Final = 1024  # completed handles kept to find out whether the program ever waits for them


class Engine:
    """Starts operations in order, and makes progress on all of them while the program waits for any.

    Attributes:
        in_flight: asynchronous operations, started or not.
        unread: operations that completed before the program waited for them.
        blocked: channels with deferred operations.
        unordered: deferred sends and receives; they hold back no other operation.
        off: backends that this process no longer calls, with the reason.
        writes: address of a storage → number of the last operation with failover that writes to it.
        wrappers: channels that replace libraries' channels, for failover or verification.
        failed: whether any operation has failed.
        waits: the program's current waits that have outlasted the first polls.
        progressed: time of the last progress by a wait.
        hooks: observers of operations.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        wait: WaitPolicy,
        oversubscribed: bool,
        bells: Wakeups | None = None,
        beside: Sequence[int] = (),
        ranks: int = 1,
        short: bool = False,
    ) -> None:
        """`bells`, `beside`, `ranks`, `short`: see `WaitStrategy`; `beside` are its `peers`."""
        self.lock = threading.RLock()
        self.peers = peers
        self.hooks = Hooks()
        self.states: list[GroupState] = []
        self.backends: list[Backend] = []
        self.bound: WeakSet[BoundOperation] = WeakSet()
        self.off: dict[str, str] = {}
        self.writes: dict[int, int] = {}
        self.wrappers: list[ChannelWrapper] = []
        self.failed = False
        self._failing_dependents = False
        self.watchdog = Watchdog(peers)
        self.progress_thread: ProgressThread | None = None
        self.waiting = WaitStrategy(
            wait, short=short, ranks=ranks, bells=bells, peers=beside, oversubscribed=oversubscribed
        )
        self.start_thread: ProgressThread | None = None
        self.in_flight: deque[IssuedWork] = deque()
        self.unread: list[IssuedWork] = []
        self.blocked: list[BackendChannel] = []
        self.unordered: list[IssuedWork] = []
        self.waits: list[ProgramWait] = []
        self.progressed = 0.0

    # -- starting ---------------------------------------------------------------------------------

    def keep_alive(self, work: IssuedWork) -> None:
        """Keep an asynchronous operation alive until it is done, even if the caller drops its handle."""
        in_flight = self.in_flight
        for _ in range(_REAP):
            if not in_flight or not (in_flight[0].is_done or self.try_poll(in_flight[0])):
                break
            if not (done := in_flight.popleft()).waited:
                self._keep_unread(done)
        in_flight.append(work)
        if self.progress_thread is not None:
            self.progress_thread.wake()
        self.ring()

    def _keep_unread(self, work: IssuedWork) -> None:
        self.unread.append(work)
        if len(self.unread) > _UNREAD:  # drop half at once, which makes room for later handles
            self.unread = [work for work in self.unread if not work.waited][: _UNREAD // 2]

    def occupied(self) -> bool:
        """Return whether operations other than the one the caller waits for are in flight."""
        with self.lock:  # polled, since completed ones would otherwise stay until the next issue
            while self.in_flight and self.in_flight[0].is_done:
                if not (work := self.in_flight.popleft()).waited:
                    self._keep_unread(work)
        return bool(self.in_flight or self.blocked or self.unordered)

    def ring(self) -> None:
        """Wake ranks of this host that wait for this one, after a post or a start."""
        bells = self.waiting.bells
        if bells is not None and bells.wanted[0]:
            bells.ring()

    def defer(self, work: IssuedWork) -> None:
        """Queue an operation that may not start yet; later operations on the channel queue behind it."""
        operation = work.operation
        channel = operation.backend_channel
        if operation.on_stream:
            work.position = channel.start_order.position()
        if operation.compared:
            self.post(work)
        if not channel.pending:
            self.mark_blocked(channel, operation.state, True)
        channel.pending.append(work)
        self._start_ready(channel)
        if channel.pending and operation.signature.async_op and _runs_by_itself(work):
            self._start_in_background()

    def _start_in_background(self) -> None:
        """Let a thread start an operation once all ranks have issued it; its library then needs no polls."""
        if self.progress_thread is None:
            if self.start_thread is None:
                from mcr_plus.waiting.progress_thread import ProgressThread

                self.start_thread = ProgressThread(self.start_pending, LONGEST_NAP)
            self.start_thread.wake()

    def start_pending(self) -> bool:
        """Start pending operations of libraries with threads of their own; return whether any are left."""
        if self.waits and time.monotonic() < self.progressed + LONGEST_NAP:
            return True  # the program starts them as it waits
        with self.lock:
            channels = [channel for channel in self.blocked if _runs_by_itself(channel.pending[0])]
            for channel in channels:
                self._start_ready(channel)
            return any(channel.pending for channel in channels)

    def add_hook(self, hook: OperationHook) -> None:
        """Report operations to a hook, beginning with the next one that is issued."""
        self._use_hooks((*self.hooks.all, hook))

    def remove_hook(self, hook: OperationHook) -> None:
        """Stop reporting to a hook."""
        self._use_hooks(tuple(each for each in self.hooks.all if each is not hook))

    def _use_hooks(self, hooks: tuple[OperationHook, ...]) -> None:
        self.hooks.use(hooks)
        for state in self.states:
            state.recorded = self.hooks.timed
            state.refresh()

    def mark_blocked(self, channel: BackendChannel, state: GroupState, blocked: bool) -> None:
        """Update whether a channel counts as one with deferred operations."""
        (self.blocked.append if blocked else self.blocked.remove)(channel)
        state.blocked_channels += 1 if blocked else -1
        state.refresh()

    def post(self, work: IssuedWork) -> None:
        """Publish the number and signature of an operation on the group's board."""
        operation = work.operation
        state = operation.state
        state.publish()
        if work.message.compares_counts:
            state.board.post_counts(work.sequence, *work.message.compared_flows(state.group.rank))
        if not operation.signature.is_p2p:
            state.board.post(work.sequence, operation.digest, operation.text)
        self.ring()

    def _start_ready(self, channel: BackendChannel) -> None:
        """Start the deferred operations of a channel in order, up to the first that may not start."""
        pending = channel.pending
        while pending and (pending[0].is_done or self._may_start(pending[0])):
            work = pending.popleft()
            if not work.is_done:
                self._start(work)
            if not pending:  # only after the start: the fast path takes no lock, and must not overtake it
                self.mark_blocked(channel, work.operation.state, False)

    def _may_start(self, work: IssuedWork) -> bool:
        """Return whether a deferred operation can start; may fail the operation."""
        if work.operation.deferred and not self._is_admitted(work):
            return work.is_done
        after = work.message.after
        if after is None:
            return True
        if not after.probe():
            return False
        if (error := after.exception()) is not None:
            self.fail(work, error)
        return True

    def _is_admitted(self, work: IssuedWork) -> bool:
        """Return whether all ranks have issued `work` and its library is ready for it; may fail `work`."""
        operation, gate = work.operation, work.gate
        if gate is _admitted:  # admitted before, and it must not pass the gate twice
            return True
        try:
            if gate is None and operation.compared and (match := compare_signatures(work)) is not True:
                if match is not False:
                    self.fail(work, self.watchdog.board_failed(work, match))
                return False
            if gate is None:
                gate = None if operation.gate is None else operation.gate(work.message)
            if gate is not None:
                work.gate = gate
                if not gate():
                    return False
        except Exception as error:
            self.fail(work, error)
            return False
        operation.update_checks()
        work.gate = _admitted
        return True

    def _start(self, work: IssuedWork) -> None:
        message, operation = work.message, work.operation
        try:
            if work.position is None:
                operation.prepare(message)
                work.poll = operation.start(message)
            else:
                with operation.backend_channel.start_order.after(work.position):
                    operation.prepare(message)
                    work.poll = operation.start(message)
        except Exception as error:
            self.fail(work, error)
            return
        if work.finish and operation.on_stream:
            finish, work.finish = work.finish, None
            for function in finish:
                _stream(work).chain(function)

    # -- waiting ----------------------------------------------------------------------------------

    def advance(self, work: IssuedWork) -> None:
        """Poll one operation and let deferred ones start."""
        with self.lock:
            if not work.is_done and not self.try_poll(work):
                self.progress()
                if not work.is_done:
                    self._check_polled(work)

    def _check_polled(self, work: IssuedWork) -> None:
        """Check deadline and peers for a program that polls repeatedly instead of waiting.

        Does not flush pending buckets, because the caller may be our own progress thread.
        """
        now = time.monotonic()
        if work.polled_since is None:
            work.polled_since = now
            work.next_check = now + work.operation.state.board.first_check
        since = work.polled_since
        self.waiting.may_yield(now - since)
        if now >= work.next_check:
            work.next_check = now + max(work.operation.state.board.check_every, LONG_WAIT)
            self._check(work, now - since, flushes=False)
        if not work.is_done and self.watchdog.is_overdue(work, since, now):
            self.fail(work, self.watchdog.timeout_error(work, now - since))

    def try_poll(self, work: IssuedWork) -> bool:
        """Poll once; return whether `work` is done. Needs the lock unless no other thread has `work`."""
        poll = work.poll
        if poll is None or work.is_done:
            return work.is_done
        if self.off and (reason := why_off(self, work.operation)) is not None:
            self.fail(work, BackendError(f"{work.operation.name(work.sequence)}: {reason}"))
            return True
        try:
            if poll():
                work.complete()
                if work.operation.polled:
                    self.ring()
        except Exception as error:
            self.fail(work, error)
        return work.is_done

    def progress(self) -> None:
        """Advance everything that needs the host: the libraries themselves and deferred operations."""
        for backend in self.backends:
            backend.progress()
        for wrapper in self.wrappers:
            wrapper.tick()
        for channel in list(self.blocked):
            self._start_ready(channel)
        if self.unordered:
            self.unordered[:] = start_messages(self.unordered, self._start)

    def stop_thread(self) -> None:
        """End the background threads; from now on only callers make progress."""
        threads = self.progress_thread, self.start_thread
        self.progress_thread = self.start_thread = None
        for thread in filter(None, threads):
            thread.stop()

    def progress_once(self) -> bool:
        """Make progress on operations in flight, for the progress thread; return False if there are none.

        Operations complete in this call, so decoding and copying are done before the program waits.
        """
        with self.lock:
            in_flight = self.in_flight
            while in_flight and (in_flight[0].is_done or self.try_poll(in_flight[0])):
                if not (work := in_flight.popleft()).waited:
                    self._keep_unread(work)
            if in_flight:
                self.progress()
            return bool(in_flight)

    def _polled_first(self, work: IssuedWork) -> bool:
        """Poll at full speed, unless `work` is inline and has had these polls; return whether it is done."""
        operation = work.operation
        if operation.inline or work.poll is None:
            return False
        for _ in operation.spins if self.waiting.calm else operation.glance:
            with self.lock:
                if self.try_poll(work):
                    return True
            if operation.on_stream:
                break
        return False

    def wait(
        self, work: IssuedWork, timeout: float | timedelta | None = None, *, until_done: bool = False
    ) -> None:
        """Poll until `work` is done, and make progress on all other operations.

        The operation fails at its own deadline. After `timeout` seconds, `CommTimeout` is raised.

        For an operation on a stream, return once it has been handed to the stream and the current stream is
        ordered after it, unless `until_done`.
        """
        if not self._polled_first(work):
            wait = ProgramWait(work, threading.get_ident(), time.time_ns())
            self.waits.append(wait)
            try:
                self._wait(work, timeout, until_done)
            finally:
                self.waits.remove(wait)
                self.waiting.may_yield(0.0)
                if work.noted is not None:
                    work.noted.ended = time.time_ns()
        if not self.waiting.calm and work.operation.polled:
            self.waiting.relay()

    def _wait(self, work: IssuedWork, timeout: float | timedelta | None, until_done: bool) -> None:
        operation, waiting = work.operation, self.waiting
        pause: Pause | None = None
        began = time.monotonic()
        patience = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        board = operation.state.board
        next_check, next_look = began + board.first_check, began + LONG_WAIT
        while not work.is_done:
            with self.lock:
                polls = operation.burst if waiting.calm else operation.glance
                if any(self.try_poll(work) for _ in polls):
                    return
                if operation.on_stream and not until_done and work.poll is not None and _stream(work).ready:
                    _stream(work).order_current_stream()
                    return
                self.progress()
                self.progressed = now = time.monotonic()
                if now >= next_check:
                    self._check(work, now - began)
                    longer = 1 if now - began < _VERY_LONG_WAIT else 25
                    next_check = now + min(board.check_every * longer, 1.0)
                    next_look = now + LONG_WAIT
                elif now >= next_look:
                    next_look = now + LONG_WAIT
                    if (lost := self.watchdog.look(work, now - began)) is not None:
                        self.fail(work, lost)
            if work.is_done:
                return
            waited = now - began
            if waited >= operation.timeout and self.watchdog.is_overdue(work, began, now):
                self.fail(work, self.watchdog.timeout_error(work, waited))
                return
            if patience is not None and waited >= patience:
                raise self.watchdog.timeout_error(work, waited)
            if pause is None:
                pause = Pause(waiting, operation.polled, operation.rings, operation.state.group.ranks)
            pause_wait(self, work, pause, now, waited)

    def compiles(self, begins: bool) -> None:
        """Publish that this process begins or ends compiling kernels; callable from any thread."""
        for state in list(self.states):
            if not state.closed:
                state.board.mark_compiling(begins)

    def _check(self, work: IssuedWork, waited: float, *, flushes: bool = True) -> None:
        """Slow path of a long wait: publish this rank's position, then look for mismatches and failed peers.

        `flushes`: flush pending buckets too.
        """
        if waited > _VERY_LONG_WAIT and work.noted is None:
            for waits_long in self.hooks.waits_long:
                waits_long(work)
        for state in self.states if flushes else ():
            for flush in state.when_stuck:
                flush()
        operation = work.operation
        if operation.state.group.size == 1:
            return
        self.post(work)
        mismatch = None if operation.signature.is_p2p else find_mismatch(work)
        if (error := mismatch or self.watchdog.check(work, waited)) is not None:
            self.fail(work, error)

    def fail(self, work: IssuedWork, error: BaseException) -> None:
        """Complete an operation with an error, and mark its group as failed."""
        reports: list[Callable[[], None] | None] = []
        if not work.is_done:
            # The library may still write to these tensors, so they are never freed.
            self.peers.keep.append((work.message, work.message.inputs, work.message.outputs, work.poll))
            work.operation.state.unfinished.add(work.operation.signature.backend)
            work.operation.backend_channel.channel.withdraw()
            if isinstance(error, OperationsDiffer):
                self.post(work)
                error = explain_difference(work, error, self.watchdog)
            switch_off_after(self, work, error)
            if isinstance(error, Exception) and not isinstance(error, McrError):
                error = self.watchdog.library_error(work, error)
            if not self._failing_dependents:
                reports = [fails(work, error) for fails in self.hooks.fails]
            work.fail(error)
        error = work.error or error
        self.failed = True
        state = work.operation.state
        state.publish()
        pending = work.operation.backend_channel.pending
        unstarted = [other for other in pending if other is not work and not other.is_done]
        # Deferred operations that were issued before it will not start either, and peers wait for them.
        others = [other.sequence for other in unstarted]
        first = min([work.sequence, *others])
        relayed = error.passed_on if isinstance(error, McrError) else ""
        state.board.mark_failed(Failure(first, relayed or f"{type(error).__name__}: {error}"))
        state.fail(error, min((number for number in (work.sequence, *others) if number), default=0))
        text = f"not started: another operation has failed: {error}"
        for other in unstarted:
            other.fail(OrderMismatch(text) if isinstance(error, OrderMismatch) else following(error, text))
        self._fail_dependents()
        for report in reports:
            if report is not None:
                report()

    def _fail_dependents(self) -> None:
        """Fail now the deferred operations that depend on a failed one: this rank may never wait for them."""
        if self._failing_dependents:
            return
        self._failing_dependents = True
        try:
            any_failed = True
            while any_failed:
                deferred = [work for channel in self.blocked for work in channel.pending if not work.is_done]
                failed = [(work, error) for work in deferred if (error := _error_before(work)) is not None]
                for work, error in failed:
                    self.fail(work, error)
                any_failed = bool(failed)
        finally:
            self._failing_dependents = False


def _stream(work: IssuedWork) -> StreamPoll:
    return cast("StreamPoll", work.poll)


def _error_before(work: IssuedWork) -> BaseException | None:
    """Return the error of the operation that `work` follows; None if that has not failed."""
    after = work.message.after
    return after.exception() if after is not None and after.probe() else None


def _runs_by_itself(work: IssuedWork) -> bool:
    """Return whether the library's own threads complete an operation without polls."""
    return len(work.operation.burst) == 1 and not work.operation.on_stream


def _admitted() -> bool:
    """Gate of an operation that has passed its library's gate."""
    return True
