"""Idle time of a program while operations are recorded: waits for operations, and for a core."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from mcr_plus.core.stacks import position_of
from mcr_plus.engine.hook import OperationHook
from mcr_plus.waiting.run_delay import RunDelay

if TYPE_CHECKING:
    from mcr_plus.engine.work import IssuedWork

_READ_EVERY: Final = 250e-6  # seconds between readings; the delays of interest are far longer


class IdleTime(OperationHook):
    """Measures how long its creating thread has waited for operations or, outside of waits, for a core.

    Adds the idle time until its issue to each operation, and posts it to the peers of this host. The times
    `now` are in seconds of `time.perf_counter`.
    """

    def __init__(self) -> None:
        self._delay = RunDelay()
        self._waited = 0.0
        self._lost = 0.0  # seconds without a core during waits
        self._seen, self._next_read = 0.0, 0.0

    def issued(self, work: IssuedWork) -> None:  # noqa: D102
        work.site = position_of(sys._getframe(3))
        if work.sequence:
            work.idle = until_now = self.seconds(work.t_issue)
            work.operation.state.board.arrive(work.sequence, work.t_issue, until_now)

    def waits(self, work: IssuedWork) -> None:  # noqa: D102
        work.lost_before = self.lost(work.t_wait)

    def ended(self, work: IssuedWork) -> None:  # noqa: D102
        if work.lost_before is not None and work.t_done is not None:
            self.add(work.t_wait, work.t_done, work.lost_before)

    def lost(self, now: float) -> float:
        """Return the total seconds without a core until `now`; readings may be 250 µs old."""
        if now >= self._next_read:
            self._seen, self._next_read = self._delay.seconds(), now + _READ_EVERY
        return self._seen

    def add(self, began: float, now: float, lost_before: float) -> None:
        """Add a wait for an operation from `began` until `now`; `lost_before` is `lost` at its begin."""
        self._waited += now - began
        self._lost += self.lost(now) - lost_before

    def seconds(self, now: float) -> float:
        """Return the idle time until now."""
        return self._waited + self.lost(now) - self._lost

    def close(self) -> None:
        """Stop measuring."""
        self._delay.close()
