"""Hand over to another thread of the process and back, so that the scheduler moves the caller to a free core.

A thread that never blocks stays on its core. If many threads want this core, it runs only once in many
milliseconds, even if its peer's core is free. The rank that arrives last at each operation has such a thread,
since all the data that it needs is already there. If the thread blocks for a moment and another thread wakes
it, the scheduler chooses a core again, and prefers the thread to others that have been running.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Final

_LONGEST: Final = 5e-3  # s: another thread of the program may hold the interpreter


class ReschedulingThread:
    """A thread that wakes its caller again. It serves one caller at a time; others return at once.

    Uses queues without Python locks, for which a signal handler that closes this object would wait.
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
                pass  # answer to a call that did not wait for it
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
