"""The operations of one arena, one after the other in the order in which they were started."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mcr_plus.errors import BackendError

if TYPE_CHECKING:
    from mcr_plus.backends.msccl.arena import Arena
    from mcr_plus.interfaces import Poll

Begin = Callable[[Any, int, int], int]
"""`direct.begin` or `executor.begin`: state, addresses of source and target → 1 if done."""
Advance = Callable[[Any], int]
"""`direct.advance` or `executor.advance`: state → 1 if done."""


def _done() -> bool:
    return True


class _Operation:
    """A poll of an operation that was not done at once."""

    __slots__ = ("advance", "arguments", "begin", "done", "lane")

    def __init__(self, lane: Lane, begin: Begin, advance: Advance, arguments: tuple[Any, int, int]) -> None:
        self.lane, self.begin, self.advance, self.arguments = lane, begin, advance, arguments
        self.done = False

    def __call__(self) -> bool:
        return self.done or self.lane.drive(self)


class Lane:
    """Starts what `Direct.bind` and `Interpreter.bind` describe. For one thread at a time.

    Counters in the arena mean the same on all ranks only between operations. So when one is given up, by
    `stop`, every rank's polls and starts raise `BackendError` from then on.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._running: deque[_Operation] = deque()  # the first has begun
        self._stopped = False

    def start(self, begin: Begin, advance: Advance, state: Any, source: int, target: int) -> Poll:
        """Begin an operation if it is its turn, and return its poll. Never waits longer than microseconds.

        What a peer has given up is seen by the poll: it cannot have come as far as this operation.

        Raises:
            BackendError: this rank has given up, or has seen another do so.
        """
        if self._stopped:
            self._arena.check()
        if not self._running and begin(state, source, target):
            return _done
        operation = _Operation(self, begin, advance, (state, source, target))
        self._running.append(operation)
        return operation

    def drive(self, wanted: _Operation) -> bool:
        """Go on with the first operation, and with those that follow as far as they come at once.

        Returns whether `wanted` is done.

        Raises:
            BackendError: a rank has given up.
        """
        running = self._running
        while running:
            first = running[0]
            if self._stopped or not first.advance(first.arguments[0]):
                self._look()
                break
            first.done = True
            running.popleft()
            if running:
                running[0].begin(*running[0].arguments)
        return wanted.done

    def stop(self) -> None:
        """Give up what is in flight, on all ranks."""
        self._stopped = True
        self._arena.stop()

    def _look(self) -> None:
        try:
            self._arena.check()
        except BackendError:
            self._stopped = True
            raise
