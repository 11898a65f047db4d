"""A hand-over to a thread of the same process and back, which has the scheduler place the caller anew.

A thread that never blocks stays where it is: on a core that many others want it has its turn once in many
milliseconds, although the core of its peer may be free. The rank of a group that arrives last at each
operation is such a thread, since all that it needs is there already. When it blocks for a moment, and another
thread wakes it, the scheduler chooses its core again and prefers it to those that have been running.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Final

_LONGEST: Final = 5e-3  # seconds: another thread of the program may hold the interpreter


class ReschedulingThread:
    """A thread that wakes whoever has woken it. One caller at a time; others return at once.

    By queues without locks of Python's own, which a signal's handler that closes this would wait for.
    """

    def __init__(self) -> None:
        self._calls, self._answers = SimpleQueue[int | None](), SimpleQueue[int]()
        self._in_use = Lock()
        self._number = 0
        self._thread = Thread(target=self._run, name="mcr_plus relay", daemon=True)
        self._thread.start()

    def hand_over(self) -> None:
        """Block until the thread answers, for at most 5 ms."""
        if not self._in_use.acquire(False):
            return
        try:
            self._number += 1
            self._calls.put(self._number)
            while self._answers.get(timeout=_LONGEST) != self._number:
                pass  # that of a call which has not waited for it
        except Empty:
            pass
        finally:
            self._in_use.release()

    def close(self) -> None:
        """End the thread."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (number := self._calls.get()) is not None:
            self._answers.put(number)
