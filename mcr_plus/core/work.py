"""Handles of operations."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from mcr_plus.core.deadline import Deadline, check_wait
from mcr_plus.core.foreign_names import OF_WORKS, name_others
from mcr_plus.core.streams import Event, Retained, Streams


@dataclass(frozen=True)
class Info:
    """A description of an operation: its kind, size, library and codec.

    `backend` is the library, with the algorithm if one was chosen (`msccl:ring`). `bytes` is the
    payload, `wire_bytes` the bytes handed to the library; for vector collectives, whose sizes differ
    between ranks, both are this rank's own (the larger of sent and received bytes); `fused` counts
    the members packed into the operation; `sequence` is its number in its group. Times are
    `time.perf_counter()` seconds, 0.0 and None unless recording was on; `t_done` is when completion was
    noticed, because more frequent polls would change the program. `instead_of`: the library that was
    chosen, if it has failed and `backend` has taken over (`dispatch: {failover: true}`); else empty.
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
    instead_of: str = ""


class Work(ABC):
    """A started operation. Keeps its tensors alive until it is done.

    Any thread may wait, one at a time. A wait drives the progress of all operations in flight. After an error
    every further `wait` raises the same error.
    """

    __slots__ = ()

    @abstractmethod
    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Return once the result may be used.

        On a CUDA stream, the current stream is ordered after the operation and the host continues; otherwise
        the host waits. `timeout` is in seconds and bounds this wait only: when it expires, `CommTimeout` is
        raised and the operation continues. The operation's own deadline (`dispatch: {timeout: …}`) is final.

        Raises:
            CommTimeout, OrderMismatch, BackendError: the operation failed.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether the operation has succeeded or failed. Does not wait, but drives progress."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """Return the error of the operation; None if it succeeded or is still running."""

    @abstractmethod
    def then(self, function: Callable[[], None]) -> Work:
        """Run `function` when the operation is done, before any handle reports it as done; return self.

        For stages: decoding, copying out. On a CUDA stream the function is run at once under the
        operation's stream, so kernels it launches run after the operation.
        """

    @property
    @abstractmethod
    def info(self) -> Info:
        """Return the operation's kind, size, library and codec."""

    def probe(self) -> bool:
        """Return `is_completed` without driving other operations; the engine calls it in its progress."""
        return self.is_completed()

    @property
    def streams(self) -> Streams | None:
        """The streams of the device that the results are ordered on; None if the host waits for them."""
        return None

    def source_rank(self) -> int | None:
        """Return the rank in the job from which a finished receive came; None for anything else."""
        return None

    def __repr__(self) -> str:
        info, error = self.info, self.exception()
        state = f"failed, {type(error).__name__}" if error else "done" if self.probe() else "in flight"
        codec = f" with {info.codec}" if info.codec else ""
        tag = f", tag {info.tag!r}" if info.tag else ""
        where = f" on {info.backend}{codec} in group {info.group!r}{tag}"
        return f"<Work: {info.kind} of {info.bytes} bytes{where}: {state}>"


name_others(Work, OF_WORKS)

_NAP_S: Final = 20e-6  # pause while another thread copies the results out
_retained: Final = Retained()


class JointWork(Work):
    """Several handles as one: the handle of a coalesced call, or of a stage that issues several operations.

    Done when all members are done. `kind`, `tag` and `nbytes` describe the operation that the program issued.
    With `legs` the members move the same payload one after another, and `wire_bytes` is the largest member's,
    as for a single operation of the library; otherwise it is the sum.

    Functions of `then` launch their kernels on the current stream of the first thread that waits or finds the
    members done; other waits are ordered after them.
    """

    __slots__ = (
        "_end", "_error", "_finish", "_finisher", "_is_done", "_turn",
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
        self._finish = deque[tuple[Callable[[], None], Event | None]]()  # each with the event of its `add`
        self._turn = [True]  # the thread that pops it runs the functions of `then`
        self._finisher = 0
        self._is_done = False
        self._error: BaseException | None = None
        self._end: Event | None = None  # after the kernels of the functions

    def wait(self, timeout: float | timedelta | None = None) -> None:  # noqa: D102
        check_wait(timeout)
        deadline = Deadline(timeout)
        for member in self.members:
            member.wait(deadline.left())
        self._finish_once()
        # A second waiter must not return before the first has copied the results out.
        while not self._is_done and self._finisher != threading.get_ident():
            time.sleep(_NAP_S)
        if self._error is not None:
            raise self._error
        if self._end is not None and (of := self.streams) is not None:
            of.current().wait_event(self._end)

    def is_completed(self) -> bool:  # noqa: D102
        return self._ended([member.is_completed() for member in self.members])

    def probe(self) -> bool:  # noqa: D102
        return self._ended([member.probe() for member in self.members])

    def _ended(self, members: list[bool]) -> bool:
        if not all(members):  # a wait may finish before members on a stream are done
            return False
        self._finish_once()
        return self._is_done and (self._end is None or self._end.query())

    def exception(self) -> BaseException | None:  # noqa: D102
        errors = (member.exception() for member in self.members)
        return self._error or next((error for error in errors if error is not None), None)

    def then(self, function: Callable[[], None]) -> Work:  # noqa: D102
        of, position = self.streams, None
        if of is not None:
            position = of.event()
            position.record(of.current())
        self._finish.append((function, position))
        if self._is_done:
            self._run_finish()
        return self

    def _finish_once(self) -> None:
        """Run the functions of `then` once, in the first thread to get here; never waits, takes no lock."""
        try:
            self._turn.pop()
        except IndexError:
            return
        self._finisher = threading.get_ident()
        try:
            self._run_finish()
        finally:
            self._is_done = True
        self._run_finish()  # functions added meanwhile

    def _run_finish(self) -> None:
        while self._finish and self.exception() is None:
            try:
                function, position = self._finish.popleft()
            except IndexError:  # another thread has taken the last one
                return
            of = self.streams
            if of is not None:
                if position is not None:
                    of.current().wait_event(position)
                if self._end is not None:
                    of.current().wait_event(self._end)
            try:
                function()
            except Exception as error:
                self._error = error
            if of is not None:
                end = of.event()
                end.record(of.current())
                self._end = end
                _retained.add(end, function)

    @property
    def streams(self) -> Streams | None:  # noqa: D102
        for member in self.members:
            if (of := member.streams) is not None:
                return of
        return None

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
