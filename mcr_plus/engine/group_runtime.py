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
"""How many signatures a group remembers. Each takes some KiB."""


class PendingBucket(Protocol):
    """Operations that a stage holds back."""

    def send(self) -> Exception | None:
        """Issue them, under the engine's lock; they are no longer in the list. Returns the error, if any."""
        ...

    def digests(self) -> Collection[int]:
        """Digests that peers would see if the bucket were sent now, as one operation or several."""
        ...


@dataclass(eq=False)
class GroupRuntime:
    """The state that the stages of a group share; a group that only explains has none.

    Attributes:
        channels: by backend name.
        operations: by signature.
        pending: buckets that stages hold back, in the order in which they are to be sent.
        restored: entries of a loaded state by stage, see `Stage.load_state`.
        caches: functions that clear the stages' caches of signatures, see `forget`.
        bound: number of signatures bound since.
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
        """Count a signature that all ranks bind at this call; if there are too many, forget those before it.

        Ranks must forget at the same call, because all of them compare a signature when it comes again. So
        this counts signatures that all ranks bind, and not look-ups, which may differ between ranks.
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
        """Drop the bindings of sends and receives: ranks do not compare them, so each may on its own."""
        for signature in [known for known in self.operations if known.is_p2p]:
            del self.operations[signature]

    def flush_pending(self, only: PendingBucket | None = None) -> None:
        """Issue all pending buckets, or `only` this one; all of them even if some fail.

        Raises the first error; `OrderMismatch` in a thread that may not issue operations of the group.
        """
        if get_ident() != self.state.owner:
            self.state.check_thread()  # before a bucket is taken out that could not be sent
        with self.engine.lock:
            sent = self.pending[:] if only is None else [only]
            self.pending[:] = [bucket for bucket in self.pending if bucket not in sent]
            errors = [error for bucket in sent if (error := bucket.send()) is not None]
        if errors:
            raise errors[0]
