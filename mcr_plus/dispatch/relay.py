"""A hand-over to a thread of the same process and back, which has the scheduler place the caller anew.

A thread that never blocks stays where it is: on a core that many others want it has its turn once in many
milliseconds, although the core of its peer may be free. The rank of a group that arrives last at each
operation is such a thread, since all that it needs is there already. When it blocks for a moment, and another
thread wakes it, the scheduler chooses its core again and prefers it to those that have been running.
"""

from __future__ import annotations

from threading import Lock, Semaphore, Thread
from typing import Final

_LONGEST: Final = 5e-3  # seconds: another thread of the program may hold the interpreter


class Relay:
    """A thread that wakes whoever has woken it. One caller at a time; others return at once."""

    def __init__(self) -> None:
        self._called, self._answered = Semaphore(0), Semaphore(0)
        self._in_use = Lock()
        self._closing = False
        self._owed = 0  # answers that a caller has not waited for
        self._thread = Thread(target=self._run, name="mcr_plus relay", daemon=True)
        self._thread.start()

    def hand_over(self) -> None:
        """Block until the thread answers, for at most 5 ms."""
        if not self._in_use.acquire(False):
            return
        try:
            while self._owed and self._answered.acquire(False):
                self._owed -= 1
            self._owed += 1
            self._called.release()
            if self._answered.acquire(timeout=_LONGEST):
                self._owed -= 1
        finally:
            self._in_use.release()

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._called.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._called.acquire()
            if self._closing:
                return
            self._answered.release()
