"""The part of a program's time that is not its own, measured while arrivals at operations are noted."""

from __future__ import annotations

from typing import Final

from mcr_plus.waiting.run_delay import RunDelay

_READ_EVERY: Final = 250e-6  # seconds; what is lost in less is far below the delays that are looked for


class WaitTime:
    """For how long the thread that makes this has waited for operations, or outside of that for a core.

    Times of day, `now`, are seconds of `time.perf_counter`.
    """

    def __init__(self) -> None:
        self._delay = RunDelay()
        self._waited = 0.0
        self._lost = 0.0  # without a core, within waits
        self._seen, self._next_read = 0.0, 0.0

    def lost(self, now: float) -> float:
        """Seconds without a core, in all, up to `now`, or shortly before: reading it takes microseconds."""
        if now >= self._next_read:
            self._seen, self._next_read = self._delay.seconds(), now + _READ_EVERY
        return self._seen

    def add(self, began: float, now: float, lost_before: float) -> None:
        """Add a wait for an operation from `began` until `now`; `lost_before`: `lost` when it began."""
        self._waited += now - began
        self._lost += self.lost(now) - lost_before

    def seconds(self, now: float) -> float:
        """The idle time until now."""
        return self._waited + self.lost(now) - self._lost

    def close(self) -> None:
        """Measure no longer."""
        self._delay.close()
