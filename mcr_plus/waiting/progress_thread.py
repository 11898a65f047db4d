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
_SHARE: Final = 1 / 32  # of the time since it was woken, if pauses may grow


class ProgressThread:
    """Calls `step` repeatedly while it returns true, then sleeps until it is woken.

    `step` is `Engine.progress_once` (all operations in flight) or `Engine.start_pending` (deferred ones).
    `longest`: seconds up to which pauses grow.
    """

    def __init__(self, step: Callable[[], bool], longest: float = _PAUSE) -> None:
        self._step, self._longest = step, longest
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
            began = time.monotonic()
            while not self._stopping and self._step():
                if self._wanted.is_set():
                    self._wanted.clear()
                    began = time.monotonic()
                time.sleep(min(max(_PAUSE, _SHARE * (time.monotonic() - began)), self._longest))
