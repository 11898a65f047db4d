"""The operations of one arena, one after the other in the order in which they were started."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import RLock, Semaphore, Thread
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mcr_plus.interfaces import Poll

Begin = Callable[[Any, int, int], int]
"""`direct.begin` or `executor.begin`: state, addresses of source and target → 1 if done."""
Advance = Callable[[Any, int], int]
"""`direct.advance` or `executor.advance`: state, whether to wait a moment → 1 if done."""

_NAP_S: Final = 50e-6  # of the thread while nothing moves: the cores are for computing

Run = Callable[[int, int, object], "Poll"]
"""Start an operation: addresses of source and target, and what must live until it is done."""


def done_at_once() -> bool:
    """The poll of what was done when it was started."""
    return True


class _Operation:
    """A poll of an operation that was not done at once."""

    __slots__ = ("advance", "arguments", "begin", "begun", "done", "keep", "lane")

    def __init__(
        self, lane: Lane, begin: Begin, advance: Advance, arguments: tuple[Any, int, int], keep: object
    ) -> None:
        self.lane, self.begin, self.advance, self.arguments = lane, begin, advance, arguments
        self.begun = self.done = False
        # What the addresses point to, until it is done, even if whoever waited has been interrupted.
        self.keep = keep

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
    """Starts what `Direct.bind` and `Interpreter.bind` describe.

    Operations are moved by whoever polls one, and where one is to go on while the program computes, by a
    thread of the lane's own: the compiled code needs no GIL. One of them does so at a time, others come
    back later.

    Who waits for a peer that does not come gets its poll back, false; that the peer is gone is for
    others to see.
    """

    def __init__(self, moved: Callable[[], None] | None = None) -> None:
        """`moved`: called by the lane's thread when it has come to the end of what it had to do."""
        self._running: deque[_Operation] = deque()
        self._moved = moved
        self._closing = False
        # For moving. Whoever is interrupted between taking it and what follows can tell that it has it.
        self._lock: Any = RLock()
        self._worker: Thread | None = None
        self._wanted = Semaphore(0)

    def bind(self, begin: Begin, advance: Advance, state: Any, *, aside: bool = False) -> Run:
        """How to start an operation: it begins if it is its turn, and never waits for a peer.

        `aside`: it is left to the lane's thread. One thread at a time starts operations.
        """
        running, lock = self._running, self._lock
        acquire, release, has_it = lock.acquire, lock.release, lock._is_owned

        def begun(source: int, target: int, keep: object) -> Poll:
            operation = _Operation(self, begin, advance, (state, source, target), keep)
            operation.begun = True
            running.append(operation)
            return operation

        def start(source: int, target: int, keep: object) -> Poll:
            tried = False
            try:
                if not running and acquire(False):
                    tried = True  # no interrupt comes between this and the call
                    if begin(state, source, target):
                        return done_at_once
                    return begun(source, target, keep)
            except BaseException:  # an interrupt: peers count on what may have begun
                if tried and not running:
                    begun(source, target, keep)
                raise
            finally:
                if has_it():
                    release()
            operation = _Operation(self, begin, advance, (state, source, target), keep)
            running.append(operation)
            return operation

        def start_aside(source: int, target: int, keep: object) -> Poll:
            operation = _Operation(self, begin, advance, (state, source, target), keep)
            running.append(operation)
            self._wake()
            return operation

        return start_aside if aside else start

    def drive(self, wanted: _Operation) -> bool:
        """Go on with the first operation, and with those that follow as far as they come at once.

        Returns whether `wanted` is done.
        """
        self._go_on(1)
        return wanted.done

    def progress(self) -> None:
        """Go on with what is in flight, without a wait: another operation is waited for."""
        if self._running:
            self._go_on(0)

    def close(self) -> None:
        """End the thread, if there is one, whatever is in flight."""
        self._closing = True
        if self._worker is not None:
            self._wanted.release()
            self._worker.join()
            self._worker = None

    def _go_on(self, patient: int) -> bool:
        """Go as far as operations come, unless somebody else does; whether nothing is left."""
        running, lock = self._running, self._lock
        try:
            if not lock.acquire(False):
                return False
            while running:
                if not running[0].go_on(patient):
                    return False
                running.popleft()
            return True
        finally:
            if lock._is_owned():
                lock.release()

    def _wake(self) -> None:
        self._wanted.release()
        if self._worker is None:
            self._worker = Thread(target=self._work, name="mcr-msccl", daemon=True)
            self._worker.start()

    def _work(self) -> None:
        while not self._closing:
            self._wanted.acquire()
            while not self._closing and not self._go_on(1):
                time.sleep(_NAP_S)
            if self._moved is not None:
                self._moved()
