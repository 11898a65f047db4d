"""The operations of one arena, one after the other in the order in which they were started."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Lock, Semaphore, Thread
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.errors import BackendError

if TYPE_CHECKING:
    from mcr_plus.backends.msccl.arena import Arena
    from mcr_plus.interfaces import Poll

Begin = Callable[[Any, int, int], int]
"""`direct.begin` or `executor.begin`: state, addresses of source and target → 1 if done."""
Advance = Callable[[Any, int], int]
"""`direct.advance` or `executor.advance`: state, whether to wait a moment → 1 if done."""

_NAP_S: Final = 100e-6  # of the worker while nothing moves and nobody waits: the cores are for computing


def _done() -> bool:
    return True


class _Operation:
    """A poll of an operation that was not done at once."""

    __slots__ = ("advance", "arguments", "begin", "begun", "done", "lane")

    def __init__(self, lane: Lane, begin: Begin, advance: Advance, arguments: tuple[Any, int, int]) -> None:
        self.lane, self.begin, self.advance, self.arguments = lane, begin, advance, arguments
        self.begun = self.done = False

    def __call__(self) -> bool:
        return self.done or self.lane.drive(self)

    def go_on(self, patient: int) -> bool:
        """As far as it comes; whether it is done."""
        if self.begun:
            self.done = bool(self.advance(self.arguments[0], patient))
        else:
            self.begun = True
            self.done = bool(self.begin(*self.arguments))
        return self.done


class Lane:
    """Starts what `Direct.bind` and `Interpreter.bind` describe. For one thread at a time.

    Polls move operations, and so does a thread of the lane's own where an operation is to go on while the
    program computes: the compiled code needs no GIL. From then on, and as long as operations are left, it
    alone moves them.

    Counters in the arena mean the same on all ranks only between operations. So when one is given up, by
    `stop`, every rank's polls and starts raise `BackendError` from then on.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._running: deque[_Operation] = deque()
        self._stopped = False
        self._worker: Thread | None = None
        self._owned = False  # by the worker: set by `start`, cleared by the worker when nothing is left
        self._lock = Lock()  # for the end of owning
        self._wanted = Semaphore(0)
        self._polled = False  # since the worker last looked

    def start(
        self,
        begin: Begin,
        advance: Advance,
        state: Any,
        source: int,
        target: int,
        aside: bool = False,
    ) -> Poll:
        """Begin an operation if it is its turn, and return its poll. Never waits longer than microseconds.

        `aside`: leave it to the lane's thread. What a peer has given up is seen by the poll: it cannot have
        come as far as this operation.

        Raises:
            BackendError: this rank has given up, or has seen another do so.
        """
        if self._stopped:
            self._arena.check()
        if not self._running and not aside and begin(state, source, target):
            return _done
        operation = _Operation(self, begin, advance, (state, source, target))
        # An empty lane has just begun it, unless the worker is to.
        operation.begun = not self._running and not aside
        if not aside and not self._owned:
            self._running.append(operation)
            return operation
        with self._lock:
            self._running.append(operation)
            if aside and not self._owned:
                self._owned = True
                self._wanted.release()
        if self._worker is None:
            self._worker = Thread(target=self._work, name="mcr-msccl", daemon=True)
            self._worker.start()
        return operation

    def drive(self, wanted: _Operation) -> bool:
        """Go on with the first operation, and with those that follow as far as they come at once.

        Returns whether `wanted` is done.

        Raises:
            BackendError: a rank has given up.
        """
        if self._owned:
            self._polled = True
            self._look()
        elif self._stopped or not self._go_on(1):
            self._look()
        return wanted.done

    def progress(self) -> None:
        """Go on with what is in flight, without a wait: another operation is waited for. Raises nothing."""
        if self._running and not self._owned and not self._stopped:
            self._go_on(0)

    def stop(self) -> None:
        """Give up what is in flight, on all ranks."""
        self._stopped = True
        self._arena.stop()

    def close(self) -> None:
        """End the thread, if there is one: afterwards nothing looks at the arena."""
        self._stopped = True
        if self._worker is not None:
            self._wanted.release()
            self._worker.join()
            self._worker = None

    def _go_on(self, patient: int) -> bool:
        """As far as operations come; whether all are done."""
        running = self._running
        while running:
            if not running[0].go_on(patient):
                return False
            running.popleft()
        return True

    def _work(self) -> None:
        while not self._stopped:
            self._wanted.acquire()
            while not self._stopped:
                if not self._go_on(1):
                    if not self._polled:
                        time.sleep(_NAP_S)
                    self._polled = False
                    continue
                with self._lock:
                    if not self._running:
                        self._owned = False
                        break

    def _look(self) -> None:
        try:
            self._arena.check()
        except BackendError:
            self._stopped = True
            raise
