"""Estimate the duration of measurements, corrected by the measurements of this run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from statistics import median
from typing import Final

from mcr_plus.tuning.measurements import Sample
from mcr_plus.tuning.plan import TableRequest, Task, next_task, rough_grid

_OVERHEAD_S: Final = 0.05  # per task, in addition to the turns: agreement, warm-up
_S_PER_BYTE: Final = 1e-8  # per candidate and rank: mostly verification
_LEAST_S: Final = 0.05  # minimum time of turns; less is noise on a shared host
_SHARE: Final = 0.5  # share of turns in the time of a task at the first sizes


class Pace:
    """Expected times of tasks, and the remaining budget, all in seconds.

    `sampling`: the time limit for the turns of a task. `budget`: None for no limit.
    """

    def __init__(self, request: TableRequest, sampling: float, budget: float | None) -> None:
        self._request, self._sampling, self._budget = request, sampling, budget
        self._began = time.monotonic()
        self._ratios: dict[int, list[float]] = {}  # actual over expected time, by size

    @property
    def left(self) -> float:
        """Return the remaining budget."""
        if self._budget is None:
            return math.inf
        return self._budget - (time.monotonic() - self._began)

    def next_task(self, samples: Sequence[Sample]) -> Task | None:
        """Return the next task that fits into the budget; the first task of a run need not fit."""
        fitting = next_task(self._request, samples, left=self.left, expected=self.expected)
        return fitting if fitting or self._ratios else next_task(self._request, samples)

    def took(self, task: Task, seconds: float) -> None:
        """Correct the estimate by the time of a finished task."""
        self._ratios.setdefault(task.case.nbytes, []).append(seconds / self._uncorrected(task))

    def expected(self, task: Task) -> float:
        """Return the expected time of a task, corrected by the times of the nearest size in this run."""
        near = min(self._ratios, key=lambda size: _octaves(size, task.case.nbytes), default=None)
        return self._uncorrected(task) * (1.0 if near is None else median(self._ratios[near]))

    def _uncorrected(self, task: Task) -> float:
        transfers = len(self._request.candidates_for(task.case)) * self._request.ranks
        return _OVERHEAD_S + self._sampling + _S_PER_BYTE * transfers * task.case.nbytes


def _octaves(one: int, other: int) -> float:
    return abs(math.log2(max(one, 1) / max(other, 1)))


def sampling_seconds(
    request: TableRequest, samples: Sequence[Sample], budget: float | None, most: float
) -> float:
    """Return the time for the turns of a task: `most`, or less if the budget would not cover all sizes."""
    tasks = chain.from_iterable(rough_grid(request).values())
    rough = len(unmeasured(tasks, samples))
    if budget is None or not rough:
        return most
    return min(most, max(_LEAST_S, _SHARE * budget / rough))


def left_out_sizes(
    request: TableRequest, samples: Sequence[Sample], expected: Callable[[Task], float]
) -> list[tuple[int, int, int, float]]:
    """Return (size, missing tasks, all tasks, seconds for missing tasks) for incomplete first sizes."""
    missing = {size: (unmeasured(tasks, samples), len(tasks)) for size, tasks in rough_grid(request).items()}
    return [
        (size, len(left), every, sum(map(expected, left))) for size, (left, every) in missing.items() if left
    ]


def unmeasured(tasks: Iterable[Task], samples: Iterable[Sample]) -> list[Task]:
    """Return the tasks without a sample."""
    done = {Task(sample.case, sample.overlap) for sample in samples}
    return [task for task in dict.fromkeys(tasks) if task not in done]
