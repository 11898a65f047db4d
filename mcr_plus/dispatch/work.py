"""Handles of operations."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING, Final

from mcr_plus.errors import BackendError, McrError

if TYPE_CHECKING:
    from mcr_plus.dispatch.operation import Operation
    from mcr_plus.dispatch.streams import CallerStream
    from mcr_plus.interfaces import Poll
    from mcr_plus.message import Message


@dataclass(frozen=True)
class Info:
    """What an operation was and which way it took.

    `backend` is the library, with the algorithm if one was chosen (`msccl:ring`). `bytes` is the
    payload, `wire_bytes` what was handed to the library; of vector collectives, whose sizes differ
    between ranks, both are this rank's own (the larger of what it sends and receives); `fused` counts
    the members packed into the operation; `sequence` is its number in its group. Times are
    `time.perf_counter()` seconds, 0.0 and None unless recording was on; `t_done` is when completion was
    noticed, since looking more often would change the program.
    """

    kind: str
    backend: str
    codec: str | None
    bytes: int
    wire_bytes: int
    fused: int
    sequence: int
    tag: str | None
    group: str
    t_issue: float = 0.0
    t_done: float | None = None


class Work(ABC):
    """A started operation. Keeps its tensors alive until it is done.

    Any thread may wait, one at a time. A wait drives the progress of everything in flight. After an error
    every further `wait` raises the same error.
    """

    __slots__ = ()

    @abstractmethod
    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Return once the result may be used.

        On a CUDA stream the current stream is ordered after the operation and the host runs on; otherwise
        the host waits. `timeout` is in seconds and bounds this wait only: when it expires `CommTimeout` is
        raised and the operation goes on. The operation's own deadline (`dispatch: {timeout: …}`) is final.

        Raises:
            CommTimeout, OrderMismatch, BackendError: what went wrong with the operation.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the operation is done, well or badly. Does not wait, but drives progress."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """What went wrong, or None (also while the operation is still running)."""

    @abstractmethod
    def then(self, function: Callable[[], None]) -> Work:
        """Run `function` when the operation is done, before anyone sees it as done; returns self.

        For stages: decoding, copying out. On a CUDA stream the function is run at once under the
        operation's stream, so what it launches comes after the operation.
        """

    @property
    @abstractmethod
    def info(self) -> Info:
        """What this operation was and which way it took."""

    def probe(self) -> bool:
        """As `is_completed`, without driving anything else: what the engine asks while it makes progress."""
        return self.is_completed()

    def source_rank(self) -> int | None:
        """After a finished receive: the rank (of the whole job) it came from. None for anything else."""
        return None


class IssuedWork(Work):
    """The handle of one library call."""

    __slots__ = (
        "asked",
        "caller",
        "doubted",
        "error",
        "finish",
        "gate",
        "held_up",
        "is_done",
        "look_at",
        "look_for_peers",
        "message",
        "operation",
        "poll",
        "sequence",
        "source",
        "t_done",
        "t_issue",
        "t_wait",
        "told",
        "turns",
        "unexplained",
    )

    # Set only where they are needed: the constructor is on every operation's path.
    asked: float  # since when somebody asks whether it is done
    look_for_peers: float  # when to look at peers next, while somebody asks
    caller: CallerStream  # where the caller's stream stood, for a deferred stream operation
    look_at: float  # when to look at peers one by one, while signatures are compared
    unexplained: float  # since when a peer has issued something else without saying what
    gate: Poll  # of the library, which the operation has to pass before it starts
    doubted: float  # since when a peer has seemed to be gone
    held_up: float  # when a rank that it needs was last seen to compile kernels
    turns: dict[int, int]  # what ranks had said of compiling when that was looked at
    source: int | None
    t_issue: float
    t_wait: float  # when somebody began to wait
    t_done: float
    told: bool  # somebody who waited has been given the error

    def __init__(self, operation: Operation, message: Message, poll: Poll | None, sequence: int) -> None:
        self.operation = operation
        self.message = message
        self.poll = poll
        self.sequence = sequence
        self.is_done = False
        self.error: BaseException | None = None
        self.finish: list[Callable[[], None]] | None = None

    def wait(self, timeout: float | timedelta | None = None) -> None:  # noqa: D102
        if not self.is_done:
            operation = self.operation
            poll = self.poll
            if operation.engine.recorders:
                self.t_wait = perf_counter()
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
            self.told = self.operation.state.told = True
            raise self.error

    def is_completed(self) -> bool:  # noqa: D102
        if not self.is_done:
            self.operation.engine.advance(self)
        return self.is_done

    def probe(self) -> bool:  # noqa: D102
        return self.is_done or self.operation.engine.try_poll(self)

    def exception(self) -> BaseException | None:  # noqa: D102
        return self.error

    def source_rank(self) -> int | None:  # noqa: D102
        return getattr(self, "source", None)

    @property
    def info(self) -> Info:  # noqa: D102
        signature, message = self.operation.signature, self.message
        wire_bytes = signature.nbytes if signature.nbytes is not None else message.own_bytes()
        return Info(
            kind=signature.kind,
            backend=self.operation.backend,
            codec=message.codec,
            bytes=wire_bytes if message.origin is None else message.origin,
            wire_bytes=wire_bytes,
            fused=message.fused,
            sequence=self.sequence,
            tag=signature.tag,
            group=signature.group,
            t_issue=getattr(self, "t_issue", 0.0),
            t_done=getattr(self, "t_done", None),
        )

    def then(self, function: Callable[[], None]) -> Work:  # noqa: D102
        with self.operation.engine.lock:  # a progress thread may be about to complete it
            if self.is_done:
                if self.error is None:
                    function()
            elif self.operation.on_stream and self.poll is not None:
                self.poll.chain(function)  # type: ignore[attr-defined]  # stream polls have it
            elif self.finish is None:
                self.finish = [function]
            else:
                self.finish.append(function)
        return self

    def complete(self) -> None:
        """Mark as done and run what was to follow. For the engine."""
        if self.finish is not None:
            try:
                for function in self.finish:
                    function()
            except Exception as error:
                self.error = error
        self._settle()

    def fail(self, error: BaseException, blame: str = "") -> None:
        """Mark as done with an error; `blame` names the ranks behind a library's own. For the engine."""
        if isinstance(error, Exception) and not isinstance(error, McrError):
            operation = self.operation
            reason = f"{blame}; {error}" if blame else error
            text = f"{operation.backend}: {operation.name(self.sequence)} failed: {reason}"
            named = BackendError(text)
            named.__cause__ = error
            error = named
        self.error = error
        self._settle()

    def _settle(self) -> None:
        operation = self.operation
        if operation.engine.recorders:
            self.t_done = perf_counter()
            for record in operation.engine.recorders:
                record(self)
        if not operation.inline:  # the handle may outlive the op by far: let the tensors go
            if operation.signature.kind == "recv":
                source = getattr(self.poll, "source", self.message.peer)
                self.source = None if source is None else operation.state.group.ranks[source]
            message = self.message
            if operation.signature.nbytes is None:
                message.seen_bytes = message.own_bytes()
            message.inputs = message.outputs = ()
            message.after = message.prepare = None
        self.poll = self.finish = None
        self.is_done = True  # last: another thread may look without the lock


_NAP_S: Final = 20e-6  # of who waits for another thread to copy out


class JointWork(Work):
    """Several handles as one: what a stage or a coalesced call hands out for the ops it issued.

    Done when all members are done. `kind`, `tag` and `nbytes` describe the operation the user asked for.
    With `legs` the members move the same payload one after another, so that `wire_bytes` is that of the
    largest, as for one operation of the library that does the same; otherwise the sum.
    """

    __slots__ = (
        "_error", "_finish", "_finisher", "_is_done", "_turn",
        "codec", "kind", "legs", "members", "nbytes", "tag",
    )  # fmt: skip

    def __init__(
        self,
        members: Sequence[Work],
        kind: str,
        *,
        nbytes: int,
        tag: str | None = None,
        codec: str | None = None,
        legs: bool = False,
    ) -> None:
        self.members = members
        self.legs = legs
        self.kind = kind
        self.nbytes = nbytes
        self.tag = tag
        self.codec = codec
        self._finish = deque[Callable[[], None]]()
        self._turn = [True]  # whoever takes it runs what was to follow
        self._finisher = 0
        self._is_done = False
        self._error: BaseException | None = None

    def wait(self, timeout: float | timedelta | None = None) -> None:  # noqa: D102
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        deadline = None if seconds is None else perf_counter() + seconds
        for member in self.members:
            member.wait(None if deadline is None else max(0.0, deadline - perf_counter()))
        self._settle()
        # Who comes second must not go on before the first has copied out.
        while not self._is_done and self._finisher != threading.get_ident():
            time.sleep(_NAP_S)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:  # noqa: D102
        return self._ended([member.is_completed() for member in self.members])

    def probe(self) -> bool:  # noqa: D102
        return self._ended([member.probe() for member in self.members])

    def _ended(self, members: list[bool]) -> bool:
        if all(members):
            self._settle()
        return self._is_done

    def exception(self) -> BaseException | None:  # noqa: D102
        errors = (member.exception() for member in self.members)
        return self._error or next((error for error in errors if error is not None), None)

    def then(self, function: Callable[[], None]) -> Work:  # noqa: D102
        self._finish.append(function)
        if self._is_done:
            self._run_finish()
        return self

    def _settle(self) -> None:
        """Run what was to follow, unless somebody has or does; waits for nobody, nor under any lock."""
        try:
            self._turn.pop()
        except IndexError:
            return
        self._finisher = threading.get_ident()
        try:
            self._run_finish()
        finally:
            self._is_done = True
        self._run_finish()  # what came meanwhile

    def _run_finish(self) -> None:
        while self._finish and self.exception() is None:
            try:
                function = self._finish.popleft()
            except IndexError:  # another thread has taken the last one
                return
            try:
                function()
            except Exception as error:
                self._error = error

    @property
    def info(self) -> Info:  # noqa: D102
        parts = [member.info for member in self.members]
        wire_bytes, fused = [part.wire_bytes for part in parts], [part.fused for part in parts]
        return Info(
            kind=self.kind,
            backend="+".join(dict.fromkeys(part.backend for part in parts)) or "local",
            codec=self.codec or next((part.codec for part in parts if part.codec), None),
            bytes=self.nbytes,
            wire_bytes=max(wire_bytes, default=0) if self.legs else sum(wire_bytes),
            fused=sum(fused) if self.kind.endswith("coalesced") else max(fused, default=1),
            sequence=parts[-1].sequence if parts else 0,
            tag=self.tag,
            group=parts[-1].group if parts else "",
            t_issue=min((part.t_issue for part in parts), default=0.0),
            t_done=None
            if any(part.t_done is None for part in parts)
            else max(p.t_done or 0.0 for p in parts),
        )
