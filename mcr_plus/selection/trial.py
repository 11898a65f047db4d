"""Compare the candidates of a size online: each gets some of the job's calls, until one is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from mcr_plus.trials.trial import Trial, Turn, clearly_slower, compare

BLOCK: Final = 32
"""Calls of a block; at most two of them go to a rival."""
TURN: Final = 2
"""Consecutive calls of a rival; only the last is timed, because the first calls after a change are slower."""
TIMED: Final = 4
"""Timed calls of a block: one of the rival, and three of the current choice."""
TURNS: Final = 3
"""Blocks per rival between two exchanges, as long as no rival has been dropped."""
ROUNDS: Final = 12
"""Exchanges without a change after which a trial ends undecided."""
LAG: Final = 16
"""Calls between an exchange of times and the use of its result."""
_GOLDEN: Final = 0x9E3779B9
"""2³² divided by the golden ratio: its multiples modulo 2³² are evenly distributed."""


@dataclass
class OnlineTrial(Trial):
    """Trial with bounded cost and length; `candidates` are choices, `name` or `name:algorithm`.

    At most n × `TURN` / `BLOCK` of the first n calls, for every n, go to rivals of the current choice.
    A trial of k candidates ends within `BLOCK` + k × `ROUNDS` × (`TURNS` × (k - 1) × `BLOCK` + lag) calls.

    Attributes:
        rivals: indices of the candidates that are still tried.
        former: indices of former choices. The trial ends if one of them becomes the choice again.
        rounds: exchanges since the choice changed.
        medians: the last median of each candidate in seconds; for a former choice, measured while it was the
            choice.
    """

    lag: int = LAG
    began: int = BLOCK
    rivals: list[int] = field(default_factory=list)
    former: list[int] = field(default_factory=list)
    rounds: int = 0
    medians: list[float | None] = field(default_factory=list)

    @classmethod
    def of(cls, candidates: Sequence[str], lag: int = LAG) -> OnlineTrial:
        """Return a new trial of at least two candidates; the first is the choice."""
        count = len(candidates)
        return cls(tuple(candidates), lag, rivals=list(range(1, count)), medians=[None] * count)

    @property
    def _blocks(self) -> int:
        """Number of blocks of a round."""
        return TURNS * (len(self.candidates) - 1)

    @property
    def length(self) -> int:  # noqa: D102
        return self._blocks * BLOCK

    @property
    def slots(self) -> int:  # noqa: D102
        return self._blocks * TIMED

    def schedule(self) -> dict[int, Turn]:
        """Return the calls of this round that are timed or go to a rival, by number.

        The position of such a call in a block varies evenly. Otherwise a periodic program (such as the layers
        of a step) would always give the same calls to the same candidate.
        """
        turns: dict[int, Turn] = {}
        for block in range(0 if self.frozen else self._blocks):
            start = self.began + block * BLOCK
            place = ((start // BLOCK * _GOLDEN) % (1 << 32)) * (BLOCK - TURN + 1) >> 32
            rival = self.rivals[block % len(self.rivals)]
            for call in range(place, place + TURN):
                turns[start + call] = Turn(rival, None)
            for index in range(TIMED):
                call = (place + TURN - 1 + index * BLOCK // TIMED) % BLOCK
                turns[start + call] = Turn(self.chosen if index else rival, block * TIMED + index)
        return turns

    def _decide(self) -> None:
        for candidate, times in enumerate(self.times):
            if times and candidate not in self.former:
                self.medians[candidate] = median(times)
        self.rounds += 1
        own = self.times[self.chosen]
        verdicts = {rival: compare(own, self.times[rival]) for rival in self.rivals}
        self.rivals = [rival for rival, verdict in verdicts.items() if verdict != "no faster"]
        faster = [rival for rival, verdict in verdicts.items() if verdict == "faster"]
        if faster:
            self._change(min(faster, key=lambda rival: median(self.times[rival])))
        self.frozen |= not self.rivals or self.rounds >= ROUNDS

    def _change(self, new: int) -> None:
        """Make another candidate the choice, and discard all times: they may depend on the choice."""
        old = self.chosen
        self.rivals.remove(new)
        if not clearly_slower(self.times[new], self.times[old]):
            self.rivals.append(old)
        self.frozen = new in self.former
        self.former.append(old)
        self.chosen = new
        self.rounds = 0
        self.times = [[] for _ in self.candidates]
