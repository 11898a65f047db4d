"""`never_slower`: measure the gain of a codec in occasional calls, and omit the codec while it is slower."""

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

TAG: Final = "compress.never_slower"  # tag of the all_reduce that shares times
WARM: Final = 2
"""Calls of each candidate before it is timed: they allocate, compile and compare signatures."""
TIMED: Final = FEW
"""Timed calls of each candidate in a round."""
ROUNDS: Final = 8
"""Most rounds of a comparison; after them it ends undecided."""
PERIOD: Final = 100
"""Calls between the first two comparisons; doubled after each comparison that changes nothing."""
LONGEST: Final = 16_000
SHARE: Final = 0.002
"""Largest share of the calls' time that comparisons may cost; the period is extended to meet it."""
LAG: Final = 8
"""Calls between a round and its verdict, so that a call that only issues need not wait for the verdict."""


@dataclass
class RecurringTrial(Trial):
    """Endless trial of two candidates: the first is chosen unless the second is faster.

    Beginning with the first call of the operation, the calls of a round alternate between both candidates.
    Rounds are repeated until the times show the faster candidate, at most `ROUNDS` times. Then all calls use
    the chosen candidate for a period.

    Attributes:
        rounds: rounds of the current comparison so far; 0 after a conclusion.
        period: smallest number of calls until the next comparison; 0 before the first conclusion.
        changed: True if the last conclusion was the first, or differed from the previous one.
        medians: seconds of both candidates at the last conclusion, infinite if no call was timed.
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
        """Return the number of fast calls after which the last comparison has cost only the share `SHARE`."""
        fast, slow = sorted(self.medians)
        if not 0 < fast < slow < inf:
            return 0
        return round(self.rounds * self.length / 2 * (slow / fast - 1) / SHARE)


def never_slower(
    raw: Issue, compressed: Issue, codec: str, signature: Signature, next: Next, *, one_clock: bool
) -> Issue:
    """Return an issue that uses the faster of `raw` and `compressed`; the ranks agree on the choice.

    The time of a call lasts until its end is noticed. `one_clock`: True if the ranks of the group are on one
    host.
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
