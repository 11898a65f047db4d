"""Polls of sends and receives, and messages that nobody has expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mcr_plus.backends.base import Corrupted, ReceivePoll

if TYPE_CHECKING:
    import torch

    from mcr_plus.backends.shm.p2p import PointToPoint
    from mcr_plus.core.message import Signature


class QueueSend:
    """Poll of a send that did not complete at once."""

    done = False
    error: Exception | None = None  # sends do not fail

    def __init__(
        self, p2p: PointToPoint, tensor: torch.Tensor, arguments: tuple[int, int, int, int, int, int]
    ) -> None:
        self.p2p, self.tensor, self.arguments = p2p, tensor, arguments

    def __call__(self) -> bool:
        """Poll."""
        return self.done or self.p2p.drive(self)


class QueueReceive(ReceivePoll):
    """Poll of a receive; `source` is set once the message has arrived."""

    done = False
    error: Exception | None = None
    number = 0  # order of posting among waiting receives

    def __init__(
        self,
        p2p: PointToPoint,
        signature: Signature,
        peer: int | None,
        tag: int,
        target: torch.Tensor,
        corrupted: Corrupted | None,
    ) -> None:
        self.p2p, self.signature = p2p, signature
        self.peer, self.tag, self.target = peer, tag, target
        self.corrupted = corrupted

    def end(self, source: int, damaged: int) -> None:
        """Mark the message as received; `damaged`: index of the first damaged block, or -1."""
        self.source = source
        if damaged < 0 or self.corrupted is None:
            self.done = True
        else:
            self.error = self.corrupted(source, damaged)

    def __call__(self) -> bool:
        """Poll; raises `OrderMismatch` for another dtype or size, and `corrupted`'s error for damage."""
        return self.done or self.p2p.drive(self)


class Unexpected:
    """An unexpected message in memory of this process, and the receive posted for it while it arrives.

    `kept`: checksums of the message; None without checksums.
    """

    __slots__ = ("code", "complete", "data", "kept", "number", "receive", "source", "tag")

    def __init__(self, source: int, tag: int, code: int, nbytes: int, number: int) -> None:
        self.source, self.tag, self.code, self.number = source, tag, code, number
        self.data: Any = np.empty(nbytes, np.uint8)
        self.complete = False
        self.kept: Any = None
        self.receive: QueueReceive | None = None
