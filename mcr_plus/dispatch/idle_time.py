"""The part of a program's time that is not its own, measured while arrivals at operations are noted."""

from __future__ import annotations

from mcr_plus.core.run_delay import RunDelay


class IdleTime:
    """For how long the thread that makes this has waited for operations, or outside of that for a core."""

    def __init__(self) -> None:
        self._delay = RunDelay()
        self._waited = 0.0
        self._lost = 0.0  # without a core, within waits

    def lost(self) -> float:
        """Seconds without a core, in all."""
        return self._delay.seconds()

    def add(self, waited: float, lost_before: float) -> None:
        """Add a wait for an operation; `lost_before`: `lost` when it began."""
        self._waited += waited
        self._lost += self._delay.seconds() - lost_before

    def seconds(self) -> float:
        """The idle time until now."""
        return self._waited + self._delay.seconds() - self._lost

    def close(self) -> None:
        """Measure no longer."""
        self._delay.close()
