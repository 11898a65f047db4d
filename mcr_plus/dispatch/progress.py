"""The progress thread: what is in flight advances while the program computes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mcr_plus.dispatch.engine import Engine

# Seconds between two looks. Shorter ones take the core from the program's own work, longer ones leave a
# library without the next piece of a large message: socket buffers hold a few hundred KiB, 2 ms at 1 Gbit/s.
_PAUSE: Final = 100e-6


class ProgressThread:
    """Drives an engine while asynchronous operations are in flight, and sleeps while none are."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wanted = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mcr_plus progress", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something is in flight."""
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
            while not self._stopping and self._engine.drive():
                time.sleep(_PAUSE)
