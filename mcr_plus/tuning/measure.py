"""Time all candidates for one operation in turns, until the winner is clear.

A turn begins with a barrier and runs one candidate several times; the result is the time per call of the
slowest rank. The order of candidates is random in each round, so that a slowdown of the machine affects all
candidates, and no candidate always follows the same other one. Decisions (to stop, to drop a slow candidate)
depend on exchanged numbers, so they are the same on all ranks.

With overlap, a rank starts an asynchronous operation, computes for about as long as the operation takes, and
then waits for it. The result is the exposed time, i.e. the time in excess of the computation.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.work import Work
from mcr_plus.errors import McrError, Unsupported
from mcr_plus.tables.statistics import Timing
from mcr_plus.tuning.operations import BenchCase, Call, OpUnderTest

_TURN_US: Final = 300.0  # minimum length of a turn, which makes timer and barrier negligible
_CALLS: Final = 1024  # maximum number of calls in a turn
_HOPELESS: Final = 8.0  # a candidate this many times slower than the best is not worth many turns
_LEAST_US: Final = 0.05  # less exposed time cannot be resolved
_COMPUTE_US: Final = (5.0, 5000.0)


@dataclass(frozen=True)
class Effort:
    """Limits on measuring a case: `seconds`, `most` turns, or medians known to `precision`.

    Precision is evaluated after `least` turns. At least one turn is always run.
    """

    least: int = 9
    most: int = 41
    precision: float = 0.02
    seconds: float = 3.0


@dataclass
class CaseOutcome:
    """Result for one case: timings by candidate, or the reason why a candidate has none."""

    timings: dict[str, Timing] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)


class Meter:
    """Measures cases on the ranks of `control`; all methods are collective.

    The meter sends its own messages on `control`. Candidates run on another communicator of the same ranks,
    made by `open_group`, and replaced after a failed operation.
    """

    def __init__(self, open_group: Callable[[], Communicator], control: Communicator, effort: Effort) -> None:
        self._open_group, self._control, self._effort = open_group, control, effort
        self._comm = open_group()
        self._random = random.Random(0)  # all ranks draw the same orders

    def measure(self, case: BenchCase, candidates: Sequence[str], *, overlap: bool = False) -> CaseOutcome:
        """Verify all candidates, then time those with correct results."""
        outcome = CaseOutcome()
        for candidate in candidates:
            problem = self._problem(OpUnderTest(self._comm, case), candidate)
            if problem is not None:
                outcome.excluded[candidate] = problem
        op = OpUnderTest(self._comm, case)
        right = [candidate for candidate in candidates if candidate not in outcome.excluded]
        if overlap:
            self._time_overlapped(op, right, outcome)
        else:
            self._time({candidate: op.call(candidate) for candidate in right}, outcome)
        return outcome

    def _problem(self, op: OpUnderTest, candidate: str) -> str | None:
        """Return the problem of a candidate on any rank (wrong result, `Unsupported`); None without one."""
        broken = False
        try:
            mine = op.verify(candidate)
        except McrError as error:
            mine = f"{type(error).__name__}: {error}"
            broken = not isinstance(error, Unsupported)
        problems: list[tuple[str | None, bool]] = self._control.all_gather_object((mine, broken))
        if any(each for _, each in problems):
            self._comm = self._open_group()
        return next((text for text, _ in problems if text is not None), None)

    # -- timing -----------------------------------------------------------------------------------

    def _time(self, calls: Mapping[str, Call], outcome: CaseOutcome) -> None:
        if not calls:
            return
        for call in calls.values():
            call()
        first = self._turns(dict.fromkeys(calls, 1), calls)
        self._sample({candidate: _repeats(us) for candidate, us in first.items()}, calls, outcome)

    def _time_overlapped(self, op: OpUnderTest, candidates: Sequence[str], outcome: CaseOutcome) -> None:
        starts = {candidate: op.start(candidate) for candidate in candidates}
        alone: dict[str, Call] = {candidate: _waited(start) for candidate, start in starts.items()}
        if not alone:
            return
        for call in alone.values():
            call()
        once = self._turns(dict.fromkeys(alone, 3), alone)
        compute, us = self._computation(min(once.values()))
        calls: dict[str, Call] = {
            candidate: _overlapped(start, compute) for candidate, start in starts.items()
        }
        calls[""] = compute
        repeats = {candidate: _repeats(us + once.get(candidate, 0.0)) for candidate in calls}
        times = self._collect(repeats, calls)
        busy = Timing.of(times.pop("")).p50
        for candidate, values in times.items():
            outcome.timings[candidate] = Timing.of([max(value - busy, _LEAST_US) for value in values])

    def _sample(self, repeats: Mapping[str, int], calls: Mapping[str, Call], outcome: CaseOutcome) -> None:
        for candidate, values in self._collect(repeats, calls).items():
            outcome.timings[candidate] = Timing.of(values)

    def _collect(self, repeats: Mapping[str, int], calls: Mapping[str, Call]) -> dict[str, list[float]]:
        """Run turns until medians of promising candidates are precise; return microseconds by candidate."""
        effort = self._effort
        times: dict[str, list[float]] = {candidate: [] for candidate in calls}
        going = list(calls)
        began, elapsed = time.perf_counter(), 0.0
        for turn in range(effort.most):
            order = going.copy()
            self._random.shuffle(order)  # a candidate that follows a slow one is slower
            mine = [self._turn(calls[candidate], repeats[candidate]) for candidate in order]
            *agreed, elapsed = self._slowest([*mine, time.perf_counter() - began])
            for candidate, us in zip(order, agreed, strict=True):
                times[candidate].append(us)
            if turn + 1 >= 3:
                best = min(Timing.of(times[candidate]).p50 for candidate in going if candidate)
                going = [w for w in going if not w or Timing.of(times[w]).p50 < _HOPELESS * best]
            if elapsed > effort.seconds or (turn + 1 >= effort.least and self._known(times, going)):
                break
        return times

    def _known(self, times: Mapping[str, Sequence[float]], going: Sequence[str]) -> bool:
        return all(Timing.of(times[candidate]).spread <= self._effort.precision for candidate in going)

    def _turns(self, repeats: Mapping[str, int], calls: Mapping[str, Call]) -> dict[str, float]:
        return dict(zip(calls, self._slowest([self._turn(calls[w], repeats[w]) for w in calls]), strict=True))

    def _turn(self, call: Call, repeats: int) -> float:
        """Return the microseconds per call on this rank."""
        if repeats > 1:
            call()  # warm-up: the previous turn changed the state of caches and threads
        self._control.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - began) / repeats * 1e6

    def _slowest(self, mine: Sequence[float]) -> list[float]:
        values = torch.tensor(mine, dtype=torch.float64, device="cpu")
        self._control.all_reduce(values, "MAX")
        return [float(value) for value in values]

    def _computation(self, us: float) -> tuple[Call, float]:
        """Return a computation of about `us` microseconds, the same on all ranks, and its real duration."""
        values, factor = torch.zeros(2048, device="cpu"), torch.ones(2048, device="cpu")

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
