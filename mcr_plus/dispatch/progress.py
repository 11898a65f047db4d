"""Threads of our own: what is in flight, or may start, advances while the program computes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# Seconds between two looks. Shorter ones take the core from the program's own work, longer ones leave a
# library without the next piece of a large message: socket buffers hold a few hundred KiB, 2 ms at 1 Gbit/s.
_PAUSE: Final = 100e-6


class ProgressThread:
    """Calls `drive` again and again while that returns true, and sleeps until it is woken once it does not.

    `drive` is `Engine.drive` (all that is in flight) or `Engine.start_pending` (what waits for other ranks).
    """

    def __init__(self, drive: Callable[[], bool]) -> None:
        self._drive = drive
        self._wanted = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mcr_plus progress", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something to do."""
        if not self._wanted.is_set():
            self._wanted.set()

    def stop(self) -> None:
        """End, and be gone when this returns: the libraries are about to be closed."""
        self._stopping = True
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._stopping:
                return
            self._wanted.clear()  # before looking: what is issued meanwhile wakes us again
            while not self._stopping and self._drive():
                time.sleep(_PAUSE)
