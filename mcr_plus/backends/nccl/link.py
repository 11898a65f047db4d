"""One NCCL communicator with a stream and a queue of operations.

An operation waits for the work enqueued so far on the caller's stream, runs on the communicator's own stream,
and ends in an event. An NCCL call may wait for peers: while the communicator is created, and while ranks
connect for an operation with a new kind, size or peer. Such calls run on a thread, one at a time, and other
operations are queued meanwhile. Operations are also queued while the device's queues have no room, since
launches would wait. All other operations are launched at once. NCCL's non-blocking communicators start a
thread for every launch, which takes ten times as long; if NCCL_COMM_BLOCKING=0 selects them, a thread waits
for their launches, too. Tests on GPUs: docs/gpu.md.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch

from mcr_plus.backends.nccl.abi import IN_PROGRESS, Call, Nccl, NcclError
from mcr_plus.core.deadline import Deadline, until
from mcr_plus.core.streams import Event, Streams
from mcr_plus.core.threads import Background
from mcr_plus.errors import CommTimeout, McrError, Unsupported

_CHECK_EVERY: Final = 0.01  # seconds between checks for background errors of NCCL
_POLL_STORE_EVERY: Final = 0.001  # seconds between the first polls of the store, doubled at each
_POLL_STORE_RARELY: Final = 0.1  # longest interval: thousands of ranks may poll
_NAP: Final = 100e-6
_ABORT_WAITS: Final = 1.0  # s for calls of other threads to end
_MOST_LAUNCHES: Final = 256  # in flight
_MOST_ENTRIES: Final = (
    900  # stream entries in flight; with 1,024, CUDA's launches wait, including those of decoders
)
_OF_LAUNCH: Final = 3
_OF_FUNCTION: Final = 16  # kernels of a decoder
_MOST_PARTS: Final = (
    2048  # NCCL calls of launches in flight; NCCL has 1 MiB for the descriptions, below 100 B each
)
_MOST_KNOWN: Final = 4096


class NcclLink:
    """A communicator of `size` ranks, in which this process is `rank`.

    `identity` returns the communicator's unique id, or None until all ranks have arrived; it is called until
    it returns an id. `drive` progresses all links of the process: a wait calls it, because a peer may wait on
    another link. `name` is part of error texts. After an error, all operations on the link fail with it.
    """

    def __init__(
        self,
        nccl: Nccl,
        streams: Streams,
        size: int,
        rank: int,
        *,
        name: str,
        identity: Callable[[], bytes | None],
        drive: Callable[[], None],
        timeout: float,
    ) -> None:
        self.nccl = nccl
        self.streams = streams
        self.name = name
        self.drive = drive
        self.timeout = timeout
        self.comm = 0
        self.error: NcclError | None = None
        self.stream = streams.create()
        self.lock = threading.RLock()  # `advance` only tries to acquire it
        self._size = size
        self._rank = rank
        self._identity = identity
        self._next_poll = 0.0
        self._pause = _POLL_STORE_EVERY
        self._next_check = 0.0
        self._queue: deque[EventPoll] = deque()
        self._background: Background[int] | None = None  # NCCL accepts no calls until it ends
        self._then: Callable[[int], None] = self._joined  # called with the result of `_background`
        self._known: set[Hashable] = set()  # keys of operations for which the ranks have connected
        self._flying: deque[EventPoll] = deque()  # launched, not known to be done
        self._parts = 0  # NCCL calls of the launches in flight
        self.entries = 0  # stream entries of the launches in flight
        self._last: EventPoll | None = None
        self._closing: Background[None] | None = None
        self._events: list[Event] = []

    # -- issuing ----------------------------------------------------------------------------------

    def submit(
        self, call: Call, key: Hashable, *tensors: torch.Tensor, parts: int = 1, on_host: bool = False
    ) -> EventPoll:
        """Queue an operation to run after the work enqueued so far on the current stream.

        `key`: equal for operations that need the same connections between ranks; a frozenset of keys for an
        operation that needs several connections. `parts`: number of NCCL calls in the operation.
        """
        for tensor in tensors:
            if tensor.get_device() != self.streams.device:
                raise Unsupported(
                    f"a tensor on {tensor.device}; the {self.name} is on cuda:{self.streams.device}, "
                    "which was current when the group was made (torch.cuda.set_device)"
                )
            self.streams.keep(tensor, self.stream)
        poll = EventPoll(self, call, key, parts, self.mark(), on_host)
        self._queue.append(poll)
        self.advance()
        return poll

    def mark(self) -> Event:
        """Return an event recorded on the current stream."""
        event = self.take_event()
        event.record(self.streams.current())
        return event

    def take_event(self) -> Event:
        """Return an unused event."""
        return self._events.pop() if self._events else self.streams.event()

    def give_event(self, event: Event) -> None:
        """Recycle an event that will not be queried again. Streams that wait for it are not affected."""
        self._events.append(event)

    # -- progress ---------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Return whether all submitted operations are enqueued on the stream."""
        return bool(self.comm) and self._background is None and not self._queue

    def advance(self) -> None:
        """Launch queued operations as far as NCCL accepts them; never block, and leave errors to polls.

        Errors of the store and of threads are left to polls, too, because the caller that drives all links
        may have no operation on this one.
        """
        if self.error is not None or not self.lock.acquire(blocking=False):
            return
        try:
            while self.error is None and self._accepts() and self._queue and self._has_room(self._queue[0]):
                self._launch(self._queue.popleft())
        except NcclError as error:
            self.error = error
        except Exception as error:
            self.error = NcclError(f"the {self.name}: {type(error).__name__}: {error}", 0)
            self.error.__cause__ = error
        finally:
            self.lock.release()

    def _accepts(self) -> bool:
        """Return whether NCCL accepts calls now."""
        background = self._background
        if background is None:
            if self.comm or self._closing is not None:
                return self._closing is None
            background = self._join()
        if background is None or not background.done:
            return False
        self._background = None
        self._then(background.result())
        return True

    def _join(self) -> Background[int] | None:
        """Begin to create the communicator, once all ranks have arrived."""
        now = time.monotonic()
        if now < self._next_poll:
            return None
        self._next_poll = now + self._pause
        self._pause = min(2 * self._pause, _POLL_STORE_RARELY)
        identity = self._identity()
        if identity is None:
            return None
        call = partial(self.nccl.init_rank, self._size, identity, self._rank)
        self._background = self.streams.background(call)
        return self._background

    def _joined(self, comm: int) -> None:
        self.comm = comm

    def _launch(self, poll: EventPoll) -> None:
        poll.arrange(self.stream)
        self._last = poll
        call = partial(poll.call, self.comm, self.stream.cuda_stream)
        if self._has_connected(poll.key) and poll.parts <= _MOST_PARTS:
            code = call()
            if code != IN_PROGRESS:
                self._launched(poll, code)
                return
            call = partial(int, code)
        self._then = partial(self._launched, poll)
        settled, comm = self.nccl.settled, self.comm
        self._background = self.streams.background(lambda: settled(comm, call(), lambda: self.error))

    def _has_connected(self, key: Hashable) -> bool:
        return key in self._known or (isinstance(key, frozenset) and key <= self._known)

    def _launched(self, poll: EventPoll, code: int) -> None:
        self.nccl.check(code, f"launching on the {self.name}", self.comm)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        if isinstance(poll.key, frozenset):
            self._known |= poll.key
        else:
            self._known.add(poll.key)
        poll.launched()
        poll.is_flying = True
        self._flying.append(poll)
        self._parts += poll.parts
        self.entries += poll.entries

    def _has_room(self, poll: EventPoll) -> bool:
        """Return whether the device's queues have room for another launch; empty queues always have room."""
        flying = self._flying
        while flying and (
            len(flying) >= _MOST_LAUNCHES
            or self._parts + poll.parts > _MOST_PARTS
            or self.entries + poll.expected > _MOST_ENTRIES
        ):
            first = flying[0]
            if not first.reached:
                return False
            flying.popleft()
            first.is_flying = False
            self._parts -= first.parts
            self.entries -= first.entries
        return True

    def watch(self) -> None:
        """Check for a background error of NCCL while an operation runs."""
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _CHECK_EVERY
            state = self.nccl.async_error(self.comm)
            try:
                self.nccl.check(state, f"running on the {self.name}", self.comm)
            except NcclError as error:
                self.error = error

    def connect(self) -> None:
        """Wait until the communicator is ready.

        Raises:
            NcclError: NCCL refused, or the store failed.
            PeerLost: a rank of the group was lost.
            CommTimeout: not all ranks have joined in time.
        """
        deadline = Deadline(self.timeout)
        while True:
            self.drive()
            if self.error is not None:
                cause = self.error.__cause__
                raise cause if isinstance(cause, McrError) else self.error
            if self.is_idle:
                return
            if deadline.passed():
                raise CommTimeout(
                    f"backend nccl: the {self.name} was not ready after {self.timeout:g} s; one of its "
                    f"{self._size} ranks has not connected or is unreachable (NCCL_DEBUG=INFO prints more)"
                )
            time.sleep(_NAP)

    # -- closing ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Begin to close the communicator if no operation is in flight on it."""
        if self._closing is None and self.is_idle and self._is_quiet():
            self._next_check = 0.0
            self.watch()
            if self.error is None:
                self._closing = self.streams.background(partial(self.nccl.close, self.comm))

    def _is_quiet(self) -> bool:
        with suppress(Exception):  # errors of a chained function, or of NCCL, which are in `error`
            return self._last is None or self._last()
        return True

    def destroy(self, deadline: Deadline) -> None:
        """Close the communicator; abort it if it has failed, or if operations are in flight at the deadline.

        Raises `NcclError` if NCCL cannot close it, or has not by the deadline: its thread then continues.
        """
        if not self.comm:
            self.abort()
            return
        while self._closing is None and self.error is None and not deadline.passed():
            self.advance()
            self.finish()
            if self._closing is None:
                time.sleep(_NAP)
        closing = self._closing
        if closing is None:
            self.abort()
            return
        until(lambda: closing.done, deadline, _NAP)
        self.comm = 0
        if not closing.done:  # an abort would free memory that NCCL is closing
            raise NcclError(f"the {self.name} was not closed within {self.timeout:g} s", 0)
        closing.result()

    def abort(self) -> None:
        """Abort the communicator, whatever is in flight; a second call does nothing.

        NCCL frees the communicator, and requires that no other thread is in a call on it. A launch takes
        microseconds. A call in the background ends when NCCL finds that a peer has died, but a silent peer
        may block it forever. NCCL 2.29 and later can end such a call (revoke); in earlier versions, a blocked
        call keeps the communicator.
        """
        self.error = self.error or NcclError(f"the {self.name} was aborted", 0)
        is_held = self.lock.acquire(timeout=_ABORT_WAITS)
        try:
            comm, self.comm = self.comm, 0
            background, self._background = self._background, None
        finally:
            if is_held:
                self.lock.release()
        if not comm:
            if background is not None:
                background.abandon(self.nccl.abort)
        elif background is None or _has_ended(background):
            self.nccl.abort(comm)
        else:
            if self.nccl.revoke(comm):
                _has_ended(background)
            background.follow(partial(self.nccl.abort, comm))


def _has_ended(call: Background[int]) -> bool:
    """Wait a moment for an NCCL call; return whether it has ended."""
    return until(lambda: call.done, Deadline(_ABORT_WAITS), _NAP)


class EventPoll:
    """Poll of one operation: queries the event recorded after the operation.

    `on_host`: the host waits for the operation, not a stream (barrier).
    """

    __slots__ = (
        "_begin",
        "_done",
        "_end",
        "_error",
        "_functions",
        "_link",
        "_on_host",
        "_ran",
        "call",
        "entries",
        "is_flying",
        "key",
        "parts",
    )

    def __init__(
        self, link: NcclLink, call: Call, key: Hashable, parts: int, begin: Event, on_host: bool
    ) -> None:
        self.call = call
        self.key = key
        self.parts = parts
        self.entries = _OF_LAUNCH  # entries of the stream
        self.is_flying = False  # counted by the link
        self._link = link
        self._begin = begin
        self._end: Event | None = None
        self._done = False
        self._error: Exception | None = None
        self._functions: list[tuple[Event, Callable[[], None]]] = []
        self._ran: list[Callable[[], None]] = []  # chained functions; kernels may use their memory
        self._on_host = on_host

    def __call__(self) -> bool:
        """Return whether the operation is done; raises NCCL's error."""
        if self._done:
            return True
        link = self._link
        if self._end is None:
            link.advance()
        if link.error is not None:
            raise NcclError(str(link.error), link.error.code)
        if self._end is None:
            return False
        if not self._end.query():
            link.watch()
            return False
        if self._error is not None:
            raise self._error
        self._done = True
        self._ran.clear()
        link.give_event(self._end)
        return True

    @property
    def ready(self) -> bool:
        """Return whether `order_current_stream` returns at once; until then, poll so that others progress."""
        return self._done or (self._end is not None and not self._on_host)

    def order_current_stream(self) -> None:
        """Make the current stream wait for the operation; blocks until it is `ready`."""
        if not self.ready:
            self._wait_until_ready()
        if not self._done:
            self._link.streams.current().wait_event(self._end)

    def _wait_until_ready(self) -> None:
        link = self._link

        def is_ready() -> bool:
            link.drive()
            return self() or self.ready

        if not until(is_ready, Deadline(link.timeout), _NAP):
            raise CommTimeout(
                f"backend nccl: an operation on the {link.name} has waited {link.timeout:g} s for a peer"
            )

    def chain(self, function: Callable[[], None]) -> None:
        """Run `function` on the link's stream, at once or as soon as the operation is launched.

        Kernels of `function` run after the operation and the work enqueued so far on the current stream.
        `function` must not block.
        """
        link = self._link
        arrived = link.mark()
        with link.lock:
            if self._end is None:
                self._functions.append((arrived, function))
                return
            if self._done:
                self._done, self._end = False, link.take_event()
            self._run(arrived, function)
            self._end.record(link.stream)

    def arrange(self, stream: Any) -> None:
        """Make `stream` wait for the operation's data. Called by the link."""
        stream.wait_event(self._begin)
        self._link.give_event(self._begin)

    @property
    def expected(self) -> int:
        """Number of stream entries that the launch takes."""
        return _OF_LAUNCH + _OF_FUNCTION * len(self._functions)

    @property
    def reached(self) -> bool:
        """Return whether the device has completed the operation and the functions chained to it so far."""
        return self._done or (self._end is not None and self._end.query())

    def launched(self) -> None:
        """Run the chained functions and record the end. Called by the link."""
        link = self._link
        try:
            for arrived, function in self._functions:
                self._run(arrived, function)
        except Exception as error:
            self._error = error
        self._functions.clear()
        end = link.take_event()
        end.record(link.stream)
        self._end = end

    def _run(self, arrived: Event, function: Callable[[], None]) -> None:
        link = self._link
        link.stream.wait_event(arrived)
        link.give_event(arrived)
        self._ran.append(function)
        self.entries += _OF_FUNCTION
        if self.is_flying:
            link.entries += _OF_FUNCTION
        with link.streams.under(link.stream):
            function()
