"""Trials of plans in this process; among trials that share a rank, only one runs at a time.

A trial times whole steps, which plans that change in another model would distort. So a trial begins only
after a pass in which no rank of its group had another trial running. Different trials may have different
groups, so ranks agree on this in the operation that ends every pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from mcr_plus.job.init import current

if TYPE_CHECKING:
    from mcr_plus.bucketing.auto_plan import AutoPlan

_ATTACHED: Final = "trials"
_IDLE: Final = 50
"""Number of passes of other models, without one of its own, after which a trial no longer delays others."""


class Trials:
    """Running trials of this process, each with the number of refusals since its last pass."""

    def __init__(self) -> None:
        self._idle: WeakKeyDictionary[AutoPlan, int] = WeakKeyDictionary()

    def must_wait(self, trial: AutoPlan) -> bool:
        """Return whether a trial that has not begun must wait for another trial; called once per pass."""
        if trial in self._idle:
            return False
        others = [other for other, idle in self._idle.items() if idle < _IDLE]
        for other in others:
            self._idle[other] += 1
        return bool(others)

    def passed(self, trial: AutoPlan) -> None:
        """Note a pass of a trial, which runs from its first pass until its plan is final."""
        if trial.is_final:
            self._idle.pop(trial, None)
        else:
            self._idle[trial] = 0


def trials() -> Trials:
    """Return the trials of the job."""
    found: Trials = current().attached.setdefault(_ATTACHED, Trials())
    return found
