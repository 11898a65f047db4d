"""Trial of candidates for an operation: selects one for each call, and compares their times."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median
from typing import Final, Literal, NamedTuple

from mcr_plus.tables.statistics import confidence_rank

FEW: Final = 6
"""Number of times from which order statistics enclose the median with 95 %."""
FACTOR: Final = 3.0
"""Smallest ratio of times that a few samples can show."""
MARGIN: Final = 0.05
"""Smallest relative gain that justifies a change."""

Verdict = Literal["faster", "no faster", "open"]


class Turn(NamedTuple):
    """Candidate of a call, and the slot for its time; None if the call is not timed."""

    candidate: int
    slot: int | None


@dataclass
class Trial(ABC):
    """Choice of a candidate for each call of an operation, and the times of all candidates.

    Calls are timed in rounds. Before call `exchange_at` the ranks start an exchange of the round's times, and
    before call `apply_at` all of them draw the same conclusions from it (`agree`). A subclass defines the
    timed calls of a round (`schedule`) and the conclusion from the times (`_decide`).

    A trial has no clock and does not communicate. All fields except `local` are equal on all ranks, because
    they depend only on the number of calls and on agreed numbers. All fields are plain data.

    Attributes:
        candidates: names of the candidates, the initial choice first.
        lag: calls between an exchange and its use.
        chosen: index of the chosen candidate, used by calls outside `schedule`.
        calls: number of calls so far.
        began: number of the first call of the current round.
        exchanges: number of agreements on times so far.
        times: agreed seconds by candidate; the subclass clears them.
        local: this rank's clock in this round: at the start of each timed call, then at the end of each.
        frozen: the trial has ended.
    """

    candidates: tuple[str, ...]
    lag: int
    chosen: int = 0
    calls: int = 0
    began: int = 0
    exchanges: int = 0
    times: list[list[float]] = field(default_factory=list)
    local: list[float] = field(default_factory=list)
    frozen: bool = False

    def __post_init__(self) -> None:
        self.times = self.times or [[] for _ in self.candidates]
        self.local = self.local or [-inf] * (2 * self.slots)

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of calls of a round."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """Number of timed calls of a round."""

    @abstractmethod
    def schedule(self) -> dict[int, Turn]:
        """Return the calls of this round, by number, that are timed or do not use the chosen candidate."""

    @abstractmethod
    def _decide(self) -> None:
        """Draw conclusions from `times`; may postpone `began`, now the first call of the next round."""

    @property
    def exchange_at(self) -> int:
        """Number of the call before which the ranks share their times."""
        return self.began + self.length

    @property
    def apply_at(self) -> int:
        """Number of the call before which the shared times are used."""
        return self.exchange_at + self.lag

    def take(self, exchange: int, slot: int, began: float, ended: float) -> None:
        """Record begin and end of a timed call on this rank, in the round after `exchange` exchanges.

        Times are seconds on a clock shared by the ranks; without one, `began` is 0 and `ended` the duration.
        The record is ignored if the round is over.
        """
        if exchange == self.exchanges and not self.frozen:
            self.local[slot], self.local[self.slots + slot] = began, ended

    def contribution(self) -> list[float]:
        """Return this rank's numbers for the exchange, a maximum over ranks."""
        return list(self.local)

    def agree(self, numbers: Sequence[float]) -> None:
        """Draw conclusions from the maximum of all ranks' contributions, and begin a new round."""
        for turn in self.schedule().values():
            if turn.slot is not None:
                seconds = numbers[self.slots + turn.slot] - numbers[turn.slot]
                if isfinite(seconds):  # at least one rank has timed it
                    self.times[turn.candidate].append(seconds)
        self.began = self.apply_at
        self.exchanges += 1
        self._decide()
        self.local = [-inf] * (2 * self.slots)


def compare(own: Sequence[float], rival: Sequence[float]) -> Verdict:
    """Compare a rival's median with the chosen candidate's median; return `open` if uncertain.

    `faster` and `no faster` refer to a gain of more than `MARGIN`. Order statistics enclose each median with
    95 %; with fewer times than `FEW`, all of them must differ by `FACTOR`.
    """
    if min(len(own), len(rival)) < FEW:
        if clearly_slower(own, rival):
            return "no faster"
        return "faster" if clearly_slower(rival, own) else "open"
    (own_low, own_high), (low, high) = _interval(own), _interval(rival)
    if high < own_low and median(rival) < (1 - MARGIN) * median(own):
        return "faster"
    return "no faster" if low > (1 - MARGIN) * own_high else "open"


def clearly_slower(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return True if `other` takes more than `FACTOR` times as long as `one`; needs three times of each."""
    if min(len(one), len(other)) < 3:
        return False
    return _interval(other)[0] > FACTOR * _interval(one)[1]


def _interval(times: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the median."""
    ordered = sorted(times)
    rank = confidence_rank(len(ordered))
    return ordered[rank], ordered[-1 - rank]
