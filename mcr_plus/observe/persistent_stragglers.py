"""Detection of a rank that persistently delays this one, from samples of this rank's waits."""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Final, NamedTuple

_SAMPLES: Final = 60
_LEAST: Final = 0.1  # share of samples in which this rank waits for the other
_OPERATIONS: Final = 5  # least number of different operations among these samples
_PARTS: Final = 3  # equal parts of the samples; each must contain such a wait
_TIMES_OTHERS: Final = 3
_PAUSE: Final = 300.0  # seconds between two log lines

_log = logging.getLogger("mcr_plus")


class Blame(NamedTuple):
    """The cause of this rank's wait at a moment: one rank of the job, and the operation."""

    rank: int
    group: str
    number: int
    operation: str
    place: str


class PersistentStragglers:
    """The latest samples, at equal intervals; logs at INFO which rank is late in most of them."""

    def __init__(self, period: float) -> None:
        self._period = period
        self._samples: deque[Blame | None] = deque(maxlen=_SAMPLES)
        self._silent_until = 0.0

    def sample(self, now: float, blame: Blame | None) -> str:
        """Add a sample; return the line logged about the samples, mostly empty."""
        self._samples.append(blame)
        if blame is None or now < self._silent_until or len(self._samples) < _SAMPLES:
            return ""
        text = self._found(blame.rank)
        if text:
            self._silent_until = now + _PAUSE
            _log.info("%s", text)
        return text

    def _found(self, rank: int) -> str:
        samples = list(self._samples)
        counts = Counter(each.rank for each in samples if each is not None)
        own = [each for each in samples if each is not None and each.rank == rank]
        others = max((count for other, count in counts.items() if other != rank), default=0)
        size = _SAMPLES // _PARTS
        parts = [samples[start : start + size] for start in range(0, _SAMPLES, size)]
        in_all = all(any(each is not None and each.rank == rank for each in part) for part in parts)
        operations = len({each[1:3] for each in own})
        share = len(own) / _SAMPLES
        if share < _LEAST or operations < _OPERATIONS or not in_all or len(own) < _TIMES_OTHERS * others:
            return ""
        worst, _ = Counter((each.operation, each.place) for each in own).most_common(1)[0]
        called = f", called at {worst[1]}" if worst[1] else ""
        return (
            f"rank {rank} is late: this rank has waited for it alone in {share:.0%} of the last "
            f"{_SAMPLES * self._period:.0f} s, mostly in {worst[0]}{called}; mcr.record() and "
            "log.stragglers() show where it is late"
        )
