"""never_slower: from time to time a few calls measure the gain of a codec; it is left out where it loses."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Final

from mcr_plus.core.message import Message, Signature
from mcr_plus.pipeline.stage import Issue, Next
from mcr_plus.trials.router import Router, exchange_signature
from mcr_plus.trials.trial import FEW, Trial, Turn, compare

_log = logging.getLogger("mcr_plus")

TAG: Final = "compress.never_slower"  # of the all_reduce by which the ranks share times
WARM: Final = 2
"""Calls of each candidate before it is timed: they allocate, compile and compare signatures."""
TIMED: Final = FEW
"""Calls of each candidate that are timed in a round."""
ROUNDS: Final = 8
"""Rounds in a row after which a comparison ends, though undecided."""
PERIOD: Final = 100
"""Calls between the first two comparisons; twice as many after each that has changed nothing."""
LONGEST: Final = 16_000
SHARE: Final = 0.002
"""Of the time of calls that comparisons may cost, whatever the codec costs; longer periods pay for it."""
LAG: Final = 8
"""Calls between a round and its verdict, so that a call that only issues need not wait for it."""


@dataclass
class RecurringTrial(Trial):
    """A trial of two candidates that never ends: the first is in charge unless the second is faster.

    In a round the calls use both in turns, from the first call of the operation on. Rounds follow each other
    until the times show which is faster, at most `ROUNDS` of them; then the candidate in charge has the calls
    to itself for a while.

    Attributes:
        rounds: rounds of the present comparison so far; 0 after a conclusion.
        period: least calls between the last comparison and the next; 0 before the first conclusion.
        changed: whether the last conclusion was the first, or another than the one before.
        medians: seconds of both candidates at the last conclusion, infinite where no call was timed.
    """

    lag: int = LAG
    rounds: int = 0
    period: int = 0
    changed: bool = False
    medians: tuple[float, float] = (inf, inf)

    @property
    def length(self) -> int:  # noqa: D102
        return 2 * (WARM + TIMED)

    @property
    def slots(self) -> int:  # noqa: D102
        return 2 * TIMED

    def schedule(self) -> dict[int, Turn]:  # noqa: D102
        return {
            self.began + place: Turn(place % 2, place - 2 * WARM if place >= 2 * WARM else None)
            for place in range(self.length)
        }

    def _decide(self) -> None:
        self.rounds += 1
        verdict = compare(*self.times)
        if verdict == "open" and self.rounds < ROUNDS:
            return
        chosen = self.chosen if verdict == "open" else int(verdict == "faster")
        self.changed = not self.period or chosen != self.chosen
        self.period = PERIOD if self.changed else min(2 * self.period, LONGEST)
        first, second = (median(times) if times else inf for times in self.times)
        self.medians = first, second
        self.began += max(self.period, self._paid_off())
        self.chosen, self.rounds, self.times = chosen, 0, [[], []]

    def _paid_off(self) -> int:
        """Calls of the faster candidate among which the last comparison is `SHARE` of their time."""
        fast, slow = sorted(self.medians)
        if not 0 < fast < slow < inf:
            return 0
        return round(self.rounds * self.length / 2 * (slow / fast - 1) / SHARE)


def never_slower(
    raw: Issue, compressed: Issue, codec: str, signature: Signature, next: Next, *, one_clock: bool
) -> Issue:
    """Issue by `raw` or `compressed`, whichever has been faster; the ranks agree on which.

    The time of a call is that until its end is noticed. `one_clock`: the ranks of the group are on one host.
    """
    trial = RecurringTrial(("raw", codec))
    reduction = exchange_signature(signature, trial, TAG)
    exchange = next(reduction)
    what = f"{signature.describe()}: codec {codec}"

    def report() -> None:
        if not trial.rounds:
            without, with_codec = trial.medians
            _log.log(
                logging.INFO if trial.changed else logging.DEBUG,
                "%s takes %.3g ms, %.3g ms without it: %s",
                what, with_codec * 1e3, without * 1e3, "on" if trial.chosen else "off",
            )  # fmt: skip

    router = Router(
        trial,
        (raw, compressed),
        lambda values: exchange(Message(reduction, (values,), (values,))),
        one_clock=one_clock,
        dependent=True,
        agreed=report,
    )
    return router.issue
