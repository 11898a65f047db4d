"""Exchanges between the two ranks of a group: a message each way, under a tag of the operation's signature.

gloo matches collectives by their order, but messages by their tags. So exchanges of different signatures are
never matched with each other, and need not be compared before they start.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any, Final

import torch

from mcr_plus.backends.base import BlockingPoll
from mcr_plus.backends.gloo.messages import FIRST_FREE, bytes_of, watchers
from mcr_plus.core.message import Signature

SWAPPED: Final = ("all_gather", "all_to_all", "reduce_scatter")
"""Kinds that two ranks make of one exchange."""


def swaps(signature: Signature) -> bool:
    """Whether an operation is made of one exchange."""
    return signature.ranks == 2 and signature.kind in SWAPPED and signature.device == "cpu"


def tag_of(signature: Signature) -> int:
    """gloo's tag of the exchanges of a signature, beyond those of sends and receives."""
    return FIRST_FREE + signature.digest() % FIRST_FREE


def swapped(
    pg: Any,
    rank: int,
    tag: int,
    value: torch.Tensor,
    parts: torch.Tensor,
    running: set[object],
    finish: Callable[[], None] | None = None,
) -> Swap:
    """all_to_all of the bytes of `value` to those of `parts`, two halves each, between two ranks."""
    sent, received = (each.view(2, -1) for each in (bytes_of(value), bytes_of(parts)))
    received[rank].copy_(sent[rank])
    return Swap(pg, 1 - rank, tag, sent[1 - rank], received[1 - rank], running, finish)


class Swap(BlockingPoll):
    """The poll of an exchange: a thread waits for gloo, which cannot be polled for messages."""

    __slots__ = ("_ended", "_error", "_finish", "_running", "_works")

    def __init__(
        self,
        pg: Any,
        peer: int,
        tag: int,
        sent: torch.Tensor,
        received: torch.Tensor,
        running: set[object],
        finish: Callable[[], None] | None = None,
    ) -> None:
        """`sent`, `received`: flat bytes. `finish`: what follows in the poll that finds it complete."""
        self._running, self._finish = running, finish
        self._error: Exception | None = None
        self._ended = Event()
        self._works = [pg.recv([received], peer, tag), pg.send([sent], peer, tag)]
        running.add(self)
        watchers.run(self._watch)

    def __call__(self) -> bool:
        """See `Poll`."""
        if not self._ended.is_set():
            return False
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            self._finish()
        return True

    def block(self, seconds: float) -> None:
        """See `BlockingPoll`."""
        self._ended.wait(seconds)

    def _watch(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except Exception as error:
            self._error = error
        self._running.discard(self)
        self._works.clear()  # a handle kept by the program must not keep gloo's group alive
        self._ended.set()
