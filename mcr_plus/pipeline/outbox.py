"""Operations that a stage holds back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol


class PendingBucket(Protocol):
    """Operations that a stage holds back."""

    def send(self) -> Exception | None:
        """Issue them, under the engine's lock; they are no longer in the list. Returns the error, if any."""
        ...

    def digests(self) -> Collection[int]:
        """Digests that peers would see if the bucket were sent now, as one operation or several."""
        ...
