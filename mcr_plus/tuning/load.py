"""Warn if a machine is too busy for measurements, or results vary too much."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from mcr_plus.tuning.measurements import Sample

_SAMPLE_S: Final = 0.3
_BUSY: Final = 0.15  # share of the processors' time; a quiet machine's own services use a few percent
_SWITCHES: Final = 20.0  # preemptions of a rank per second; quiet machines have one or two
_WIDE: Final = 0.25  # half of a 95 % interval, relative to the median
_OFTEN: Final = 0.2  # share of the samples


def used_share() -> float:
    """Return the share of this host's processor time that is in use while the caller sleeps; 0 if unknown."""
    before = _ticks()
    time.sleep(_SAMPLE_S)
    used, total = (after - start for after, start in zip(_ticks(), before, strict=True))
    return used / total if total else 0.0


def _ticks() -> tuple[int, int]:
    """Return (used, total) clock ticks of all processors since boot."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0, 0
    values = [int(word) for word in words]  # user nice system idle iowait irq softirq steal
    return sum(values) - sum(values[3:5]), sum(values)


def busy_words(shares: Sequence[float]) -> list[str]:
    """Return warnings before a measurement; `shares` are results of `used_share`, by rank."""
    worst = max(range(len(shares)), key=lambda rank: shares[rank])
    if shares[worst] < _BUSY:
        return []
    return [
        f"The machine was busy: {shares[worst]:.0%} of the processor time of rank {worst}'s host went to "
        "other processes before anything was measured."
    ]


def scatter_words(samples: Iterable[Sample], switches: float) -> list[str]:
    """Return warnings after a measurement; `switches`: preemptions per second of the worst rank."""
    timed = [sample.timing for sample in samples if sample.timing is not None]
    wide = sum(timing.spread > _WIDE for timing in timed)
    words = []
    if timed and wide > _OFTEN * len(timed):
        words.append(f"Figures scatter: {wide} of {len(timed)} are uncertain by more than ± {_WIDE:.0%}.")
    if switches > _SWITCHES:
        words.append(f"Ranks shared their cores: one was preempted {switches:.0f} times per second.")
    return words
