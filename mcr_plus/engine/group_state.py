"""State of a group in one process: operation numbers, issuing thread, failure, deferred operations."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from mcr_plus.errors import NotInitialized, OrderMismatch, Revoked, following

if TYPE_CHECKING:
    from mcr_plus.backends.base import Backend, Channel
    from mcr_plus.board.base import GroupBoard
    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Signature
    from mcr_plus.engine.hook import Noted
    from mcr_plus.engine.streams import StartOrder
    from mcr_plus.engine.work import IssuedWork


@dataclass(eq=False)
class BackendChannel:
    """A backend as one group uses it: its open channel, and the operations that wait to start on it.

    Attributes:
        pending: operations issued but not started, in program order. Each waits for the data that it depends
            on and for the check of its signature. Later operations wait behind it, because a library matches
            operations by their order.
    """

    backend: Backend
    channel: Channel
    pending: deque[IssuedWork] = field(default_factory=deque)

    @cached_property
    def start_order(self) -> StartOrder:
        """The start order of a library whose operations run on a stream."""
        from mcr_plus.engine.streams import StartOrder  # imported here: jobs on CPUs have no streams

        return StartOrder(self.channel.streams)


_NOBODY: Final = -1
_NOTES: Final = 256  # long waits and failures that a group remembers


class GroupState:
    """State of one group in this process: numbering, board, issuing thread and failure.

    Attributes:
        sequence: number of the last operation issued.
        remedy: what errors about a failed group advise the program to do.
        owner: identity of the thread that may issue; 0 if every issue must go through `check_thread`.
        fast_path_thread: `owner` while its synchronous operations may skip lock and handle; 0 otherwise.
        agreed: number up to which operations are complete on all surviving ranks, once the group's world has
            been replaced; None before.
        failed_at: lowest number of an operation that has failed here; 0 if none has.
        failure_raised: whether `failure` has been raised in the program.
        revoked: why the group's world has been replaced; empty if it has not.
        ring: the last collectives: number, signature, and time of issue in `time.time_ns()`.
        messages: the last sends and receives: peer and tag, signature, and time of issue.
        notes: operations with a long wait or a failure.
        unfinished: libraries that may still work on operations that failed here.
        changes_threads: whether any thread may use the group, one at a time, as in torch.distributed.
        own_handles: whether programs wait through handles of torch or Horovod instead of ours.
        blocked_channels: number of channels with deferred operations.
        when_stuck: called during a long wait, since the wait may depend on a bucket held back here.
    """

    __slots__ = (
        "_shared",
        "_thread",
        "agreed",
        "blocked_channels",
        "board",
        "changes_threads",
        "closed",
        "failed_at",
        "failure",
        "failure_raised",
        "fast_path_thread",
        "group",
        "messages",
        "notes",
        "own_handles",
        "owner",
        "recorded",
        "remedy",
        "revoked",
        "ring",
        "sequence",
        "unfinished",
        "when_stuck",
    )

    def __init__(self, group: Group, board: GroupBoard, remedy: str = "", *, ring: int = 0) -> None:
        """`ring`: number of last operations to remember."""
        self.ring: deque[tuple[int, Signature, int]] = deque(maxlen=ring)
        self.messages: deque[tuple[int | None, int, Signature, int]] = deque(maxlen=ring)
        self.notes: deque[Noted] = deque(maxlen=_NOTES)
        self.group = group
        self.board = board
        self.remedy = remedy
        self.sequence = 0
        self.failure: BaseException | None = None
        self.agreed: int | None = None
        self.failed_at = 0
        self.failure_raised = False
        self.unfinished: set[str | None] = set()
        self.closed = False
        self.revoked = ""
        self.recorded = False
        self.blocked_channels = 0
        self.changes_threads = self.own_handles = False
        self.when_stuck: list[Callable[[], None]] = []
        self._shared = False
        self._thread = threading.current_thread()
        self.owner = threading.get_ident()
        self.fast_path_thread = self.owner

    def refresh(self) -> None:
        """Update `fast_path_thread`."""
        special = self._shared or self.recorded or self.blocked_channels or self.owner <= 0
        self.fast_path_thread = 0 if special else self.owner

    def publish(self) -> None:
        """Publish the number of operations issued."""
        self.board.counter[0] = self.sequence

    def check_thread(self, *, any_thread: bool = False) -> None:
        """Admit or refuse a caller that is not the group's issuing thread: the slow path of an issue.

        `any_thread`: admit every thread, for sends and receives, which have no number in the group's order.

        Raises:
            NotInitialized: the group is closed, or belongs to the parent of a forked process.
            Revoked: the group's world has been replaced.
            BackendError: an earlier operation of the group failed; `PeerLost` if ranks were lost.
            OrderMismatch: another thread uses this group, so the order of operations is not defined.
        """
        name = self.group.name
        if self.revoked:
            raise Revoked(f"group '{name}' is of a world that has been replaced: {self.revoked}")
        if self.closed:
            raise NotInitialized(f"group '{name}' is closed: finalize, close or reset has been called")
        if isinstance(self.failure, OrderMismatch) and not self.failure_raised:
            self.failure_raised = True
            raise self.failure
        if self.failure is not None:
            remedy = f" ({self.remedy})" if self.remedy else ""
            text = f"group '{name}' cannot be used after it has failed{remedy}: {self.failure}"
            raise following(self.failure, text)
        if self.owner == _NOBODY:
            raise NotInitialized(
                f"group '{name}' belongs to the parent process; a forked child must call mcr.init itself, "
                "under a launcher of its own"
            )
        caller = threading.current_thread()
        # autograd's threads, which Python did not start, run while their caller waits, so they keep its
        # order.
        if any_thread or isinstance(caller, threading._DummyThread):
            self._shared = True
            self.refresh()
            return
        if self.changes_threads or not self._thread.is_alive():
            self.take_over()
            return
        raise OrderMismatch(
            f"group '{name}' is used by thread '{self._thread.name}', and now by '{caller.name}': the order "
            "of their operations would differ between ranks. Give each thread a group of its own "
            "(mcr.new_group), or hand this one over with comm.take_over() when the other thread is done"
        )

    def is_its_thread(self) -> bool:
        """Return whether the caller is the group's thread, or an autograd thread that it waits for."""
        caller = threading.current_thread()
        return threading.get_ident() == self.owner or isinstance(caller, threading._DummyThread)

    def take_over(self) -> None:
        """Make the calling thread the group's issuing thread; raise as `check_thread` does if none may
        issue.
        """
        if self.closed or self.failure is not None or self.owner == _NOBODY:
            self.check_thread()
        self._thread = threading.current_thread()
        self.owner = threading.get_ident()
        self.refresh()

    def fail(self, error: BaseException, sequence: int) -> None:
        """Refuse further operations, because the group's numbering or data can no longer be trusted.

        `sequence`: number of the failed operation, 0 if it has none.
        """
        if sequence:
            self.failed_at = min(self.failed_at or sequence, sequence)
        if self.failure is None:
            self.failure = error
            self.owner = self.fast_path_thread = 0  # no thread has this identity

    def close(self) -> None:
        """Refuse further operations."""
        self.closed = True
        self.owner = self.fast_path_thread = 0

    def abandon(self) -> None:
        """Mark the group as unusable in a forked child."""
        self.owner = _NOBODY
        self.fast_path_thread = 0
