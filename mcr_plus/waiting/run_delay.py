"""How long a thread has waited for a core, because other threads had it."""

from __future__ import annotations

import os


class RunDelay:
    """The time for which the thread that makes this was ready and had no core; zero where Linux hides it."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        """In all, from its start; from any thread. It takes about a microsecond."""
        if self._file < 0:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):  # the thread has ended
            return 0.0

    def close(self) -> None:
        """Close the file; nothing has been waited for then."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
