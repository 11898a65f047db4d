"""Handles of operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING, cast

from mcr_plus.backends.base import ReceivePoll
from mcr_plus.core.deadline import check_wait
from mcr_plus.core.work import Info, Work
from mcr_plus.engine.channel_wrapper import PollOfEither

if TYPE_CHECKING:
    from mcr_plus.backends.base import Poll, StreamPoll
    from mcr_plus.core.message import Message
    from mcr_plus.core.stacks import Position
    from mcr_plus.core.streams import Event, Streams
    from mcr_plus.engine.hook import Noted
    from mcr_plus.engine.operation import BoundOperation


class IssuedWork(Work):
    """The handle of one library call."""

    __slots__ = (
        "__dict__",
        "error",
        "finish",
        "gate",
        "is_done",
        "message",
        "operation",
        "poll",
        "sequence",
        "source",
        "waited",
    )

    # Class-level defaults of rarely set attributes: slots would have to be set in the constructor, which runs
    # for every operation.
    position: Event | None = None  # position of the caller's stream, for a deferred stream operation
    next_comparison: float | None = None  # time to read peers' rows one by one, while comparing signatures
    undescribed_since: float | None = None  # since when a peer's different operation has not been posted
    polled_since: float | None = None  # start of polling by a caller that does not wait
    next_check: float = 0.0  # time of the next check of the peers, while the caller polls
    doubted_since: float | None = None  # since when a peer has looked dead
    compiling_seen: float = -math.inf  # when a needed rank was last seen compiling kernels
    compiling_turns: dict[int, int] | None = None  # `GroupBoard.compiling` of peers at the last check
    t_issue: float = 0.0
    t_wait: float = math.inf  # start of the first wait
    t_done: float | None = None
    lost_before: float | None = None  # `IdleTime.lost` at `t_wait`
    idle: float | None = None  # `IdleTime.seconds` at the issue, if arrivals are recorded
    site: Position | None = None  # place of the issue in the program, if arrivals are recorded
    error_raised: bool = False  # whether a wait has raised `error`
    issued: int = 0  # time of issue of a send or receive, in `time.time_ns()`
    noted: Noted | None = None  # record of a long wait or a failure
    _on_stream: StreamPoll | None = None  # poll of an operation that completes on a stream
    late: StreamPoll | None = None  # orders streams after functions added when it was already done
    ran_on: str = ""  # library that completed it, if another one may have taken over

    def __init__(self, operation: BoundOperation, message: Message, poll: Poll | None, sequence: int) -> None:
        self.operation = operation
        self.message = message
        self.poll = poll
        self.sequence = sequence
        self.is_done = False
        self.error: BaseException | None = None
        self.finish: list[Callable[[], None]] | None = None
        self.gate: Poll | None = None  # the library's gate, to pass before the start
        self.source: int | None = None  # sender of a completed receive, as a rank of the job
        self.waited = False  # or polled until done: its results may be read

    def is_behind(self, issued: Iterable[IssuedWork]) -> bool:
        """True if this send or receive must start after an earlier one: messages with the same peer and tag
        are matched in the order of their start.
        """
        earlier = _Places()
        for work in issued:
            if not work.is_done:
                earlier.add(work)
        return earlier.matches(self)

    def wait(self, timeout: float | timedelta | None = None) -> None:  # noqa: D102
        if timeout is not None:
            check_wait(timeout)
        self.waited = True
        if not self.is_done:
            operation = self.operation
            poll = self.poll
            if (hooks := operation.hooks).timed:
                self.t_wait = perf_counter()
                for waits in hooks.waits:
                    waits(self)
            if poll is not None and operation.inline and operation.engine.waiting.calm:
                try:
                    for _ in operation.spins:
                        if poll():
                            self.complete()
                            break
                except Exception as error:
                    operation.engine.fail(self, error)
            if not self.is_done:
                operation.engine.wait(self, timeout)
        if self.error is not None:
            self.error_raised = self.operation.state.failure_raised = True
            raise self.error
        if self.late is not None:
            self.late.order_current_stream()

    def is_completed(self) -> bool:  # noqa: D102
        if not self.is_done:
            self.operation.engine.advance(self)
        self.waited = self.waited or self.is_done
        return self.is_done and (self.late is None or self._is_late_done(self.late))

    def probe(self) -> bool:  # noqa: D102
        if not (self.is_done or self.operation.engine.try_poll(self)):
            return False
        self.waited = True
        return self.late is None or self._is_late_done(self.late)

    def _is_late_done(self, late: StreamPoll) -> bool:
        try:
            return late()
        except Exception as error:
            self.error = self.error or error
            return True

    def exception(self) -> BaseException | None:  # noqa: D102
        return self.error

    @property
    def streams(self) -> Streams | None:  # noqa: D102
        operation = self.operation
        return operation.backend_channel.start_order.streams if operation.on_stream else None

    def source_rank(self) -> int | None:  # noqa: D102
        return self.source

    @property
    def info(self) -> Info:  # noqa: D102
        signature, message = self.operation.signature, self.message
        wire_bytes = signature.nbytes if signature.nbytes is not None else message.own_bytes()
        chosen = signature.backend or ""
        ran_on = self.ran_on or self.operation.backend.partition(":")[0]
        return Info(
            kind=signature.kind,
            backend=signature.choice if ran_on == chosen else ran_on,
            codec=message.codec,
            bytes=wire_bytes if message.uncompressed_bytes is None else message.uncompressed_bytes,
            wire_bytes=wire_bytes,
            fused=message.fused,
            sequence=self.sequence,
            tag=signature.tag,
            group=signature.group,
            t_issue=self.t_issue,
            t_done=self.t_done,
            instead_of="" if ran_on == chosen else chosen,
        )

    def then(self, function: Callable[[], None]) -> Work:  # noqa: D102
        with self.operation.engine.lock:  # a progress thread may be completing it
            if self.is_done:
                if self.error is None and self._on_stream is not None:
                    self.late = self._on_stream
                    self.late.chain(function)
                elif self.error is None:
                    function()
            elif self.operation.on_stream and self.poll is not None:
                self.poll.chain(function)  # type: ignore[attr-defined]  # stream polls have it
            else:
                if self.operation.on_stream:
                    function = self._ordered(function)
                if self.finish is None:
                    self.finish = [function]
                else:
                    self.finish.append(function)
        return self

    def _ordered(self, function: Callable[[], None]) -> Callable[[], None]:
        """Wrap a function so that its kernels run after the current stream's present position."""
        order = self.operation.backend_channel.start_order
        position = order.position()

        def run() -> None:
            order.streams.current().wait_event(position)
            function()

        return run

    def complete(self) -> None:
        """Run `finish` and mark the operation as done. Only the engine calls this."""
        if self.finish is not None:
            try:
                for function in self.finish:
                    function()
            except Exception as error:
                self.error = error
        self._complete()

    def fail(self, error: BaseException) -> None:
        """Mark the operation as done with an error. Only the engine calls this."""
        self.error = error
        self._complete()

    def _complete(self) -> None:
        operation = self.operation
        if operation.has_failover and isinstance(self.poll, PollOfEither):
            self.ran_on = self.poll.library
        if (hooks := operation.hooks).timed:
            self.t_done = perf_counter()
            for ended in hooks.ended:
                ended(self)
        if not operation.inline:  # free the tensors: the handle may long outlive the operation
            if operation.signature.kind == "recv":
                poll, source = self.poll, self.message.peer
                if isinstance(poll, ReceivePoll) and poll.source is not None:
                    source = poll.source
                self.source = None if source is None else operation.state.group.ranks[source]
            message = self.message
            if operation.signature.nbytes is None:
                message.released_bytes = message.own_bytes()
            message.inputs = message.outputs = ()
            message.after = message.prepare = None
            if operation.on_stream and self.error is None:
                self._on_stream = cast("StreamPoll", self.poll)
        self.poll = self.finish = None
        self.is_done = True  # last: other threads read it without the lock


def start_messages(issued: Iterable[IssuedWork], start: Callable[[IssuedWork], None]) -> list[IssuedWork]:
    """Start the sends and receives that can start, in issue order; return the others."""
    waiting: list[IssuedWork] = []
    places = _Places()
    for work in issued:
        if work.is_done:
            continue
        after = work.message.after
        if places.matches(work) or not (after is None or after.probe()):
            waiting.append(work)
            places.add(work)
        else:
            start(work)
    return waiting


class _Places:
    """Peers and tags of waiting sends and receives. Hundreds may wait, and every poll consults this."""

    __slots__ = ("_peers",)

    def __init__(self) -> None:
        self._peers: dict[tuple[int, str, int], set[int | None]] = {}  # by library, kind and tag

    def add(self, work: IssuedWork) -> None:
        """Add the peer and tag of a send or receive."""
        self._peers.setdefault(_place(work), set()).add(work.message.peer)

    def matches(self, work: IssuedWork) -> bool:
        """Return whether an added send or receive may be matched by the counterpart of `work`."""
        peers = self._peers.get(_place(work))
        if peers is None:
            return False
        peer = work.message.peer  # None: any
        return peer is None or peer in peers or None in peers


def _place(work: IssuedWork) -> tuple[int, str, int]:
    operation = work.operation
    return id(operation.backend_channel), operation.signature.kind, work.message.match_tag
