"""Work queue of a segment: runs operations in the order in which they were started."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import RLock, Semaphore, Thread
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.backends.base import NativeStart

if TYPE_CHECKING:
    from mcr_plus.backends.base import Poll

Begin = Callable[[Any, int, int], int]
"""`begin` of collectives or of an interpreter: (state, source address, target address) → 1 if done."""
Advance = Callable[[Any, int], int]
"""`advance` of either: (state, whether to wait a moment) → 1 if done."""

Check = Callable[[Any], None]
"""Raises an error if an operation, given by its state, can never be done."""

_NAP_S: Final = 50e-6  # sleep of the thread without progress, to leave the cores to computation

Run = Callable[[int, int, object], "Poll"]
"""Start an operation: addresses of source and target, an object to keep alive → its poll."""


def done_at_once() -> bool:
    """Poll of an operation that was done when it started."""
    return True


class _QueuedOperation:
    """Poll of an operation that did not complete at once."""

    __slots__ = ("advance", "arguments", "begin", "begun", "check", "done", "keep", "queue")

    def __init__(
        self,
        queue: WorkQueue,
        begin: Begin,
        advance: Advance,
        arguments: tuple[Any, int, int],
        keep: object,
        check: Check | None,
    ) -> None:
        self.queue, self.begin, self.advance, self.arguments = queue, begin, advance, arguments
        self.check = check
        self.begun = self.done = False
        # Keep the memory alive until the operation is done, even if the wait was interrupted.
        self.keep = keep

    def __call__(self) -> bool:
        if self.done or self.queue.drive(self):
            return True
        if self.check is not None:
            self.check(self.arguments[0])
        return False

    def run(self, patient: int) -> bool:
        """Advance as far as possible; return True when complete. `patient`: wait a moment for peers."""
        if self.begun:
            self.done = bool(self.advance(self.arguments[0], patient))
        else:
            self.begun = True
            self.done = bool(self.begin(*self.arguments))
        return self.done


class WorkQueue:
    """Runs operations described by `DirectCollectives.bind` and `Interpreter.bind`.

    Any poll advances the operations. The queue's thread advances operations that should overlap with the
    program's computation, since the compiled code needs no GIL. Only one thread advances at a time.

    A poll never blocks on a missing peer: it returns False, and the engine detects that the peer is dead.
    """

    def __init__(self, on_idle: Callable[[], None] | None = None) -> None:
        """`on_idle`: called by the queue's thread when no operation is left."""
        self._running: deque[_QueuedOperation] = deque()
        self._on_idle = on_idle
        self._closing = False
        # Held by the advancing thread. An RLock, so that an interrupted thread can find out whether it holds
        # the lock.
        self._lock: Any = RLock()
        self._worker: Thread | None = None
        self._wanted = Semaphore(0)

    def bind(
        self,
        begin: Begin,
        advance: Advance,
        state: Any,
        *,
        in_thread: bool = False,
        check: Check | None = None,
    ) -> Run:
        """Return a function that starts an operation without blocking; it begins if the queue is empty.

        `in_thread`: the queue's thread runs the operation. Only one thread at a time may start operations.
        `check`: called by polls of an operation that is not done.
        """
        running, lock, begun = self._running, self._lock, self.begun(begin, advance, state, check)
        acquire, release, has_it = lock.acquire, lock.release, lock._is_owned

        def start(source: int, target: int, keep: object) -> Poll:
            tried = False
            try:
                if not running and acquire(False):
                    tried = True  # no interrupt occurs between this line and the call
                    if begin(state, source, target):
                        return done_at_once
                    return begun(source, target, keep)
            except BaseException:  # interrupted, but peers depend on an operation that may have begun
                if tried and not running:
                    begun(source, target, keep)
                raise
            finally:
                if has_it():
                    release()
            operation = _QueuedOperation(self, begin, advance, (state, source, target), keep, check)
            running.append(operation)
            return operation

        def start_in_thread(source: int, target: int, keep: object) -> Poll:
            operation = _QueuedOperation(self, begin, advance, (state, source, target), keep, check)
            running.append(operation)
            self._wake()
            return operation

        return start_in_thread if in_thread else start

    def begun(self, begin: Begin, advance: Advance, state: Any, check: Check | None = None) -> Run:
        """Return a function that enqueues an operation after its first, incomplete `begin`."""
        running = self._running

        def enqueue(source: int, target: int, keep: object) -> Poll:
            operation = _QueuedOperation(self, begin, advance, (state, source, target), keep, check)
            operation.begun = True
            running.append(operation)
            return operation

        return enqueue

    def native(
        self, begin: Begin, advance: Advance, state: Any, addresses: tuple[int, int], check: Check
    ) -> NativeStart:
        """Return the start of small operations in compiled code; `addresses`: of both as C functions.

        It may run while no operation is in the queue. The caller holds the GIL, so none is added meanwhile.
        """
        return NativeStart(*addresses, state, self._running, self.begun(begin, advance, state, check))

    def drive(self, wanted: _QueuedOperation) -> bool:
        """Advance the first operation, then the following ones; return whether `wanted` is done."""
        self._advance(1)
        return wanted.done

    def progress(self) -> None:
        """Advance pending operations without waiting for peers."""
        if self._running:
            self._advance(0)

    def stop(self) -> None:
        """End the thread and drop pending operations; their memory is not accessed any more."""
        self.close()
        with self._lock:
            self._running.clear()

    def close(self) -> None:
        """End the thread, even with pending operations."""
        self._closing = True
        if self._worker is not None:
            self._wanted.release()
            self._worker.join()
            self._worker = None

    def _advance(self, patient: int) -> bool:
        """Advance operations unless another thread does; return True if none is left."""
        running, lock = self._running, self._lock
        try:
            if not lock.acquire(False):
                return False
            while running:
                if not running[0].run(patient):
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
            while not self._closing and not self._advance(1):
                time.sleep(_NAP_S)
            if self._on_idle is not None:
                self._on_idle()
