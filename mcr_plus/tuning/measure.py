"""Timing of all ways of doing one operation, in turns, until the answer is clear.

Each turn begins together on all ranks (a barrier), runs one way a number of times, and counts as one
sample: the time of the slowest rank. Ways take turns in an order drawn anew each time, so that a machine
that slows down slows all of them, and none always runs behind the same other one. What is decided here (when
to stop, which way is too slow to go on with) follows from numbers that were exchanged, so all ranks decide
alike.

With overlap, an asynchronous operation is started, a computation of about the operation's length runs,
and then the operation is waited for: what counts is the time beyond the computation's own, the exposed
time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import torch

from mcr_plus.communicator import Communicator
from mcr_plus.dispatch.work import Work
from mcr_plus.errors import McrError, Unsupported
from mcr_plus.tuning.operations import Call, Cell, Subject
from mcr_plus.tuning.statistics import Timing

_TURN_US: Final = 300.0  # a turn lasts at least this long: timer and barrier are then noise
_CALLS: Final = 1024  # at most, in one turn
_HOPELESS: Final = 8.0  # times as slow as the best: not worth many samples
_LEAST_US: Final = 0.05  # what is exposed less than this cannot be told from nothing
_COMPUTE_US: Final = (5.0, 5000.0)


@dataclass(frozen=True)
class Effort:
    """When to stop measuring a cell: after `seconds`, `most` turns, or once medians are known to `precision`.

    At least `least` turns are taken before precision counts, and one in any case.
    """

    least: int = 9
    most: int = 41
    precision: float = 0.02
    seconds: float = 3.0


@dataclass
class Outcome:
    """What was measured of one cell: timings by way, and why a way has none."""

    timings: dict[str, Timing] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)


class Meter:
    """Measures cells on the ranks of `control`; collective throughout.

    `control` is for what the measurement itself has to say; what is measured runs on a communicator that
    `open_group` makes of the same ranks, and on another one after an operation has failed.
    """

    def __init__(self, open_group: Callable[[], Communicator], control: Communicator, effort: Effort) -> None:
        self._open_group, self._control, self._effort = open_group, control, effort
        self._comm = open_group()
        self._random = random.Random(0)  # all ranks draw the same orders

    def measure(self, cell: Cell, ways: Sequence[str], *, overlap: bool = False) -> Outcome:
        """Verify all ways, then time those that are right."""
        outcome = Outcome()
        for way in ways:
            problem = self._problem(Subject(self._comm, cell), way)
            if problem is not None:
                outcome.excluded[way] = problem
        subject = Subject(self._comm, cell)
        right = [way for way in ways if way not in outcome.excluded]
        if overlap:
            self._time_overlapped(subject, right, outcome)
        else:
            self._time({way: subject.call(way) for way in right}, outcome)
        return outcome

    def _problem(self, subject: Subject, way: str) -> str | None:
        """What is wrong with a way on any rank; a refusal is an answer too."""
        broken = False
        try:
            mine = subject.verify(way)
        except McrError as error:
            mine = f"{type(error).__name__}: {error}"
            broken = not isinstance(error, Unsupported)
        told: list[tuple[str | None, bool]] = self._control.all_gather_object((mine, broken))
        if any(each for _, each in told):
            self._comm = self._open_group()
        return next((text for text, _ in told if text is not None), None)

    # -- timing -----------------------------------------------------------------------------------

    def _time(self, calls: Mapping[str, Call], outcome: Outcome) -> None:
        if not calls:
            return
        for call in calls.values():
            call()
        first = self._turns(dict.fromkeys(calls, 1), calls)
        self._sample({way: _repeats(us) for way, us in first.items()}, calls, outcome)

    def _time_overlapped(self, subject: Subject, ways: Sequence[str], outcome: Outcome) -> None:
        starts = {way: subject.start(way) for way in ways}
        alone: dict[str, Call] = {way: _waited(start) for way, start in starts.items()}
        if not alone:
            return
        for call in alone.values():
            call()
        once = self._turns(dict.fromkeys(alone, 3), alone)
        compute, us = self._computation(min(once.values()))
        calls: dict[str, Call] = {way: _overlapped(start, compute) for way, start in starts.items()}
        calls[""] = compute
        repeats = {way: _repeats(us + once.get(way, 0.0)) for way in calls}
        samples = self._collect(repeats, calls)
        busy = Timing.of(samples.pop("")).p50
        for way, values in samples.items():
            outcome.timings[way] = Timing.of([max(value - busy, _LEAST_US) for value in values])

    def _sample(self, repeats: Mapping[str, int], calls: Mapping[str, Call], outcome: Outcome) -> None:
        for way, values in self._collect(repeats, calls).items():
            outcome.timings[way] = Timing.of(values)

    def _collect(self, repeats: Mapping[str, int], calls: Mapping[str, Call]) -> dict[str, list[float]]:
        """Turns until all that can still win are known well enough; samples in microseconds by way."""
        effort = self._effort
        samples: dict[str, list[float]] = {way: [] for way in calls}
        going = list(calls)
        began, elapsed = time.perf_counter(), 0.0
        for turn in range(effort.most):
            order = going.copy()
            self._random.shuffle(order)  # whoever follows a slow way pays for it: not always the same one
            mine = [self._turn(calls[way], repeats[way]) for way in order]
            *agreed, elapsed = self._slowest([*mine, time.perf_counter() - began])
            for way, us in zip(order, agreed, strict=True):
                samples[way].append(us)
            if turn + 1 >= 3:
                best = min(Timing.of(samples[way]).p50 for way in going if way)
                going = [w for w in going if not w or Timing.of(samples[w]).p50 < _HOPELESS * best]
            if elapsed > effort.seconds or (turn + 1 >= effort.least and self._known(samples, going)):
                break
        return samples

    def _known(self, samples: Mapping[str, Sequence[float]], going: Sequence[str]) -> bool:
        return all(Timing.of(samples[way]).spread <= self._effort.precision for way in going)

    def _turns(self, repeats: Mapping[str, int], calls: Mapping[str, Call]) -> dict[str, float]:
        return dict(zip(calls, self._slowest([self._turn(calls[w], repeats[w]) for w in calls]), strict=True))

    def _turn(self, call: Call, repeats: int) -> float:
        """Microseconds per call on this rank."""
        if repeats > 1:
            call()  # what ran before has left caches and threads in some state
        self._control.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - began) / repeats * 1e6

    def _slowest(self, mine: Sequence[float]) -> list[float]:
        values = torch.tensor(mine, dtype=torch.float64)
        self._control.all_reduce(values, "MAX")
        return [float(value) for value in values]

    def _computation(self, us: float) -> tuple[Call, float]:
        """Work for this rank's core that takes about `us`, the same number of steps on all ranks."""
        values, factor = torch.zeros(2048), torch.ones(2048)

        def step() -> None:
            torch.mul(values, factor, out=values)

        for _ in range(10):
            step()
        per_step = self._turns({"": 50}, {"": step})[""]
        wanted = min(max(us, _COMPUTE_US[0]), _COMPUTE_US[1])
        steps = range(max(1, round(wanted / per_step)))

        def compute() -> None:
            for _ in steps:
                step()

        return compute, len(steps) * per_step


def _repeats(us: float) -> int:
    return int(min(max(1.0, _TURN_US / max(us, 1e-3)), _CALLS))


def _waited(start: Call) -> Call:
    return lambda: cast("Work", start()).wait()


def _overlapped(start: Call, compute: Callable[[], object]) -> Call:
    def call() -> None:
        work = cast("Work", start())
        compute()
        work.wait()

    return call
