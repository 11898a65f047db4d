"""never_slower: measure on a few calls what a codec gains, and do without it where it loses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Final

import torch

from mcr_plus.dispatch.work import Work
from mcr_plus.interfaces import Issue, Next
from mcr_plus.message import Message, Signature

_log = logging.getLogger("mcr_plus")
_WARM: Final = 2
"""Calls of each way before it is timed: they allocate, compile and compare signatures."""
_TIMED: Final = 5
"""Calls of each way that are timed."""
_TRIAL: Final = 2 * (_WARM + _TIMED)
_PERIOD: Final = 100
"""Calls between the first two trials; twice as many after every trial that has changed nothing."""
_LONGEST: Final = 16_000
_SHARE: Final = 0.002
"""Of the time of calls that trials may cost, whatever the codec costs; longer periods pay for it."""
_GAIN: Final = 0.95
"""Of the uncompressed time, what a codec must stay below: less is within the noise of a trial."""
_LAG: Final = 8
"""Calls between a trial and its verdict, so that nobody waits for it where a call should only be issued."""


def never_slower(raw: Issue, compressed: Issue, codec: str, signature: Signature, next: Next) -> Issue:
    """Issue by whichever of two ways has been faster; which one, ranks agree on.

    A trial is a fixed number of calls, by turns one way and the other. After it the medians of all ranks
    are compared by an all_reduce of their maximum, and some calls later all ranks go the same way. What
    a call takes is the time until its end is noticed.
    """
    trials = _Trials(raw, compressed, f"{signature.describe()}: codec {codec}", signature, next)

    def issue(message: Message) -> Work:
        return trials.issue(message)

    direct: Callable[[Message], None] | None = getattr(raw, "run", None)
    if direct is not None:  # synchronous: between trials as fast as without all this

        def run(message: Message) -> None:
            if trials.left and not trials.best:
                trials.left -= 1
                direct(message)
            else:
                trials.issue(message).wait()

        issue.run = run  # type: ignore[attr-defined]
    return issue


class _Trials:
    """Which way calls go: `best`, for `left` more of them; then they are a trial."""

    def __init__(self, raw: Issue, compressed: Issue, what: str, signature: Signature, next: Next) -> None:
        self.left = self.best = 0
        self._at = 0  # the next call's place in the trial
        self._ways, self._what = (raw, compressed), what
        self._wanted = signature.replace(
            kind="all_reduce", reduce_op="MAX", dtype=torch.float64, shape=(2,), nbytes=16, device="cpu",
            root=None, backend=None, parts=None, key=None, async_op=True,
        )  # fmt: skip
        self._agree = next(self._wanted)
        self._times: tuple[list[float], list[float]] = ([], [])
        self._period: int | None = None  # none before the first verdict
        self._verdict: tuple[Work, torch.Tensor] | None = None

    def issue(self, message: Message) -> Work:
        """Issue a call one way or the other."""
        if self.left:
            self.left -= 1
            return self._ways[self.best](message)
        at = self._at
        self._at += 1
        if at >= _TRIAL:
            if at == _TRIAL + _LAG:
                self._decide()
            return self._ways[self.best](message)
        way, began = at % 2, perf_counter()
        work = self._ways[way](message).then(lambda: self._times[way].append(perf_counter() - began))
        if at == _TRIAL - 1:
            self._ask()
        return work

    def _ask(self) -> None:
        """Have ranks compare what they have seen; the last calls may not be done yet."""
        seen = [median(each[-_TIMED:]) if each else float("inf") for each in self._times]
        medians = torch.tensor(seen, dtype=torch.float64)
        self._verdict = self._agree(Message(self._wanted, (medians,), (medians,))), medians

    def _decide(self) -> None:
        assert self._verdict is not None
        work, medians = self._verdict
        work.wait()
        without, with_codec = medians.tolist()
        chosen = 1 if with_codec < _GAIN * without else 0  # without, if nobody has waited for any yet
        changed = self._period is None or chosen != self.best
        _log.log(
            logging.INFO if changed else logging.DEBUG,
            "%s takes %.3g ms, %.3g ms without it: %s",
            self._what, with_codec * 1e3, without * 1e3, "on" if chosen else "off",
        )  # fmt: skip
        self._period = _PERIOD if changed else min(2 * (self._period or _PERIOD), _LONGEST)
        self.left = max(self._period, _pays_for(without, with_codec))
        self.best, self._at, self._verdict = chosen, 0, None
        for each in self._times:
            each.clear()


def _pays_for(one: float, other: float) -> int:
    """Calls of the faster way among which a trial of both is `_SHARE` of their time."""
    fast, slow = sorted((one, other))
    if not 0 < fast < float("inf") or slow == float("inf"):
        return 0
    return round(_TRIAL / 2 * (slow / fast - 1) / _SHARE)
