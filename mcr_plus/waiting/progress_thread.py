"""Background threads that make progress while the program computes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# Seconds between two steps. A shorter pause takes the core from the program's own work. With a longer pause,
# a library runs out of data of a large message: socket buffers hold a few hundred KiB, i.e. 2 ms at 1 Gbit/s.
_PAUSE: Final = 100e-6


class ProgressThread:
    """Calls `step` repeatedly while it returns true, then sleeps until it is woken.

    `step` is `Engine.progress_once` (all operations in flight) or `Engine.start_pending` (deferred ones).
    """

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._wanted = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mcr_plus progress", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Resume calling `step`."""
        if not self._wanted.is_set():
            self._wanted.set()

    def stop(self) -> None:
        """Stop the thread and join it, since the libraries are about to be closed."""
        self._stopping = True
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._stopping:
                return
            self._wanted.clear()  # before the step: an operation issued during the step sets it again
            while not self._stopping and self._step():
                time.sleep(_PAUSE)
