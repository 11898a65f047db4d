"""The state of a group that its stages share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Final, Protocol

from mcr_plus.core.message import Signature
from mcr_plus.engine.engine import Engine
from mcr_plus.engine.group_state import BackendChannel, GroupState
from mcr_plus.engine.issue import Issue

SIGNATURES: Final = 4096
"""Number of signatures that a group remembers. Each takes some KiB."""


class PendingBucket(Protocol):
    """Operations that a stage holds back to send them together."""

    def send(self) -> Exception | None:
        """Issue the operations, under the engine's lock, and clear the list. Returns the error, if any."""
        ...

    def digests(self) -> Collection[int]:
        """Return the digests that peers would see if the bucket were sent now (one operation or several)."""
        ...


@dataclass(eq=False)
class GroupRuntime:
    """The state that the stages of a group share. A group that only explains decisions has none.

    Attributes:
        channels: open channels by backend name.
        operations: bound operations by signature.
        pending: buckets that stages hold back, in the order in which they will be sent.
        restored: entries of a loaded state by stage, see `Stage.load_state`.
        caches: functions that clear the stages' caches of signatures, see `forget`.
        bound: number of signatures bound since the last `forget`.
    """

    engine: Engine
    state: GroupState
    channels: Mapping[str, BackendChannel]
    operations: dict[Signature, Issue]
    pending: list[PendingBucket] = field(default_factory=list)
    restored: dict[str, dict[str, Any]] = field(default_factory=dict)
    caches: list[Callable[[], None]] = field(default_factory=list)
    bound: int = 0

    def count(self) -> None:
        """Count a signature that all ranks bind at this call; if there are too many, forget the earlier ones.

        All ranks must forget at the same call, because all of them compare a signature when it comes again.
        Look-ups may differ between ranks, so only signatures that all ranks bind are counted.
        """
        if self.bound >= SIGNATURES:
            self.forget()
        self.bound += 1

    def forget(self) -> None:
        """Drop the bindings of all signatures. A signature that comes again is bound and compared anew.

        Persistent operations and pending buckets keep their bindings. The state of codecs and the
        results of online refinement are kept.
        """
        self.bound = 0
        for clear in self.caches:
            clear()
        self.operations.clear()

    def forget_messages(self) -> None:
        """Drop the bindings of sends and receives; a rank may do so alone, since ranks do not compare
        them.
        """
        for signature in [known for known in self.operations if known.is_p2p]:
            del self.operations[signature]

    def flush_pending(self, only: PendingBucket | None = None) -> None:
        """Issue all pending buckets, or only the bucket `only`; continue with the others if one fails.

        Raises the first error; `OrderMismatch` in a thread that may not issue operations of the group.
        """
        if get_ident() != self.state.owner:
            self.state.check_thread()  # before a bucket leaves the list: it could not be sent
        with self.engine.lock:
            sent = self.pending[:] if only is None else [only]
            self.pending[:] = [bucket for bucket in self.pending if bucket not in sent]
            errors = [error for bucket in sent if (error := bucket.send()) is not None]
        if errors:
            raise errors[0]
