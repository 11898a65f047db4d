"""Routing of calls to the candidates of a trial, and agreement of the ranks on the measured times.

A time is measured from the last rank's call to the last rank's end, because earlier ranks wait for the others
whatever the candidate. On one host all ranks read the same clock; between hosts each rank measures its own
duration, and the maximum is used.

A small all_reduce (MAX) shares the times. It is issued before one call and used `lag` calls later, so a rank
waits for it only if the rank is `lag` calls ahead of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import torch

from mcr_plus.core.message import Message, Signature
from mcr_plus.core.work import Work
from mcr_plus.engine.issue import Issue
from mcr_plus.trials.trial import Trial, Turn


class Router:
    """Router of one operation's calls to the candidates of its trial; `issue` is the stage's result.

    Args:
        trial: the trial that selects the candidate of a call.
        issues: the bound candidates, in the trial's order.
        share: function that starts the exchange: an in-place all_reduce (MAX) of a flat float64 CPU tensor
            that holds `trial.contribution()`.
        one_clock: True if all ranks of the group are on one host and read the same clock.
        dependent: True to also time calls that wait for another operation (`Message.after`), including the
            wait.
        agreed: called after each conclusion of the trial.
    """

    def __init__(
        self,
        trial: Trial,
        issues: Sequence[Issue],
        share: Callable[[torch.Tensor], Work],
        *,
        one_clock: bool,
        dependent: bool = False,
        agreed: Callable[[], None] = lambda: None,
    ) -> None:
        self.trial = trial
        self._issues = issues
        self._runs = [each.run for each in issues]
        self._share = share
        self._shared: tuple[Work, torch.Tensor] | None = None
        self._one_clock, self._dependent = one_clock, dependent
        self._agreed = agreed
        self._turns = trial.schedule()
        self._usual = Turn(trial.chosen, None)
        self._next = trial.exchange_at
        self._start: Callable[[Message], Work] = self._try_start
        self._run: Callable[[Message], None] = self._try_run
        # The lambdas use the current `_start` and `_run` at each call.
        self.issue = Issue(lambda message: self._start(message), lambda message: self._run(message))

    def _try_start(self, message: Message) -> Work:
        turn = self._turn()
        if turn.slot is None or (message.after is not None and not self._dependent):
            work = self._issues[turn.candidate](message)
        else:
            began = perf_counter()
            work = self._issues[turn.candidate](message)
            work.then(partial(self._take, self.trial.exchanges, turn.slot, began))
        self.trial.calls += 1  # counted last: a refused call does not count
        return work

    def _try_run(self, message: Message) -> None:
        turn = self._turn()
        if turn.slot is None:
            self._runs[turn.candidate](message)
        else:
            began = perf_counter()
            self._runs[turn.candidate](message)
            self._take(self.trial.exchanges, turn.slot, began)
        self.trial.calls += 1

    def _take(self, exchange: int, slot: int, began: float) -> None:
        ended = perf_counter()
        self.trial.take(exchange, slot, *((began, ended) if self._one_clock else (0.0, ended - began)))

    def _turn(self) -> Turn:
        if self.trial.calls == self._next:
            self._step()
        return self._turns.get(self.trial.calls, self._usual)

    def _step(self) -> None:
        """Share times, or use shared times; all ranks do so before the same call."""
        if self._shared is None:
            values = torch.tensor(self.trial.contribution(), dtype=torch.float64, device="cpu")
            self._shared = self._share(values), values
            self._next = self.trial.apply_at
        else:
            self._conclude(*self._shared)

    def _conclude(self, work: Work, values: torch.Tensor) -> None:
        work.wait()
        self._shared = None
        trial = self.trial
        trial.agree(values.tolist())
        self._turns, self._usual = trial.schedule(), Turn(trial.chosen, None)
        self._next = trial.exchange_at
        if trial.frozen:
            chosen = self._issues[trial.chosen]
            self._start, self._run = chosen.start, chosen.run
        self._agreed()

    def finish(self) -> None:
        """Use shared times that are not yet used, at the end of the job."""
        if self._shared is not None and self._shared[0].is_completed():
            self._conclude(*self._shared)


def exchange_signature(signature: Signature, trial: Trial, tag: str) -> Signature:
    """Return the signature of the all_reduce that shares the times of an operation's trial."""
    numbers = len(trial.local)
    return Signature(
        "all_reduce", torch.float64, (numbers,), numbers * torch.float64.itemsize, signature.group,
        signature.ranks, reduce_op="MAX", tag=tag, async_op=True,
    )  # fmt: skip
