"""Exchanges in a group of two ranks: one message each way, tagged by the operation's signature.

gloo matches collectives by order, but messages by tag. Exchanges of different signatures are therefore never
matched with each other, and need no comparison before they start. Between hosts this saves requests to the
job's store. On one host a comparison takes only some microseconds, and gloo's own collectives are faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Final

import torch

from mcr_plus.backends.base import BlockingPoll
from mcr_plus.backends.gloo.messages import FIRST_FREE, LONGEST, bytes_of, watchers
from mcr_plus.core.message import Signature

SWAPPED: Final = ("all_gather", "all_to_all", "reduce_scatter")
"""Kinds that two ranks perform as one exchange."""


def swaps(signature: Signature, hosts: int) -> bool:
    """Return whether an operation is one exchange, in a group on `hosts` hosts."""
    return hosts == signature.ranks == 2 and signature.kind in SWAPPED and signature.device == "cpu"


def tag_of(signature: Signature) -> int:
    """Return gloo's tag for exchanges of a signature, above the tags of sends and receives."""
    return FIRST_FREE + signature.digest() % FIRST_FREE


class Swaps:
    """Exchanges of a group, and the thread that waits for exchanges in flight.

    gloo's messages cannot be polled. One thread waits for all exchanges of a group in the order of their
    issue. The order is the same on both ranks, so no exchange waits for a later one.
    """

    def __init__(self, rank: int, running: set[object]) -> None:
        """`rank`: group rank, 0 or 1. `running`: exchanges that gloo has not completed."""
        self._rank, self._running = rank, running
        self._in_flight: deque[Swap] = deque()
        self._lock = Lock()
        self._is_watched = False

    def halves(
        self,
        pg: Any,
        tag: int,
        value: torch.Tensor,
        parts: torch.Tensor,
        finish: Callable[[], None] | None = None,
    ) -> Swap:
        """Exchange the halves of `value`: all_to_all into the halves of `parts`."""
        rank = self._rank
        sent, received = (each.view(2, -1) for each in (bytes_of(value), bytes_of(parts)))
        received[rank].copy_(sent[rank])
        return self.start(pg, tag, sent[1 - rank], received[1 - rank], finish)

    def start(
        self,
        pg: Any,
        tag: int,
        sent: torch.Tensor,
        received: torch.Tensor,
        finish: Callable[[], None] | None = None,
    ) -> Swap:
        """Exchange flat bytes. `finish`: called by the poll that finds the exchange complete."""
        peer = 1 - self._rank
        swap = Swap([pg.recv([received], peer, tag), pg.send([sent], peer, tag)], finish)
        self._running.add(swap)
        with self._lock:
            self._in_flight.append(swap)
            if not self._is_watched:
                watchers.run(self._watch)
                self._is_watched = True
        return swap

    def _watch(self) -> None:
        while True:
            with self._lock:
                if not self._in_flight:
                    self._is_watched = False
                    return
                swap = self._in_flight.popleft()
            swap.end(self._running)


class Swap(BlockingPoll):
    """Poll of an exchange."""

    __slots__ = ("_error", "_finish", "_has_ended", "_in_flight", "_works")

    def __init__(self, works: Sequence[Any], finish: Callable[[], None] | None) -> None:
        self._works, self._finish = works, finish
        self._error: Exception | None = None
        self._has_ended = False
        self._in_flight = Lock()  # held until the exchange has ended; cheaper than an Event
        self._in_flight.acquire()

    def __call__(self) -> bool:
        """See `Poll`."""
        if not self._has_ended:
            return False
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            self._finish()
        return True

    def block(self, seconds: float) -> None:
        """See `BlockingPoll`."""
        if self._in_flight.acquire(timeout=seconds):
            self._in_flight.release()

    def end(self, running: set[object]) -> None:
        """Wait until gloo no longer reads or writes the tensors; `running`: see `Swaps`."""
        for work in self._works:
            try:
                work.wait(LONGEST)
            except Exception as error:  # noqa: PERF203 - the other one is waited for all the same
                self._error = self._error or error
        self._works = ()  # a handle kept by the program must not keep gloo's group alive
        running.discard(self)
        self._has_ended = True
        self._in_flight.release()
