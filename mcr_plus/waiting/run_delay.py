"""Measure the time for which a thread has waited for a core."""

from __future__ import annotations

import os


class RunDelay:
    """Time for which the creating thread was ready to run but had no core; 0 if Linux does not provide it."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        """Return the total since the thread's start. Callable from any thread; takes about a microsecond."""
        if self._file < 0:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):  # the thread has ended
            return 0.0

    def close(self) -> None:
        """Close the file; afterwards the total is 0."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
