"""`mcr.compile(model, cuts="auto")`: measure the costs of cuts, and try them in the job.

Passes of a job, counted from the one after the first:

    0           the whole graph, buckets by size; warm-up
    1 … 3       the whole graph, captured
    4           cut at every block; the parts are compiled
    5 … 7       cut at every block, captured
    8 …         the candidates take turns, three passes each, not counting the first pass of a turn

The candidates are the whole graph and the graph cut at every block, both with buckets by size; and with
`fuse: {plan: auto}` the graph cut at every block with the best buckets, by the search of `auto_plan`. For
this search, captured passes send their buckets at the end, as there. The cost of a cut, which is only
reported, is the additional computation time with all cuts, divided by their number. The fastest candidate by
the slowest rank's times is kept; it has to be faster than the whole graph by a margin.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from mcr_plus.bucketing import REPORT
from mcr_plus.bucketing.auto_plan import (
    CAPTURED,
    MARGIN,
    ROUNDS,
    TURN,
    WARM,
    AutoPlan,
    Captured,
    ExecutablePlan,
    PassTimes,
)
from mcr_plus.bucketing.compiled import CompiledCall, Cuts, GraphPart
from mcr_plus.bucketing.given_plan import named_choices
from mcr_plus.communicator.gradient_policy import Choice
from mcr_plus.core.kinds import MAX
from mcr_plus.fusion.bucket import packed
from mcr_plus.job.init import current

_log = logging.getLogger("mcr_plus")
_NAMES: Final = {"whole": "uncut, by size", "blocks": "cut at every block, by size", "searched": "searched"}

Plan = list[tuple[tuple[int, ...], Choice]]
"""Gradients of each bucket, and its library and codec."""


class Candidate(NamedTuple):
    """A candidate of the trial: cuts, and their buckets."""

    name: str
    cuts: Cuts
    plan: Plan


@dataclass(eq=False)
class CutPlan(AutoPlan):
    """Choice of cuts of a compiled model, and of its buckets; replaces `AutoPlan`.

    Args:
        call: the compiled model, which can be cut at its `places`. curves: empty without a search.
    """

    call: CompiledCall = field(kw_only=True)
    _whole: Captured | None = None
    _least: list[float] = field(default_factory=list)  # seconds of computation: whole graph, cut graph
    _candidates: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.call.set_cuts(())

    @property
    def is_of_cuts(self) -> bool:
        """Whether cuts of a compiled model are tried: always."""
        return True

    @property
    def holds(self) -> bool:
        """Whether the buckets of the next pass are sent at its end."""
        return bool(self.curves) and WARM <= self._passes < 2 * (WARM + CAPTURED)

    def after(
        self, began: float, ready: Mapping[int, float], computed: float, ended: float, order: Sequence[int]
    ) -> ExecutablePlan | None:
        """Record a whole pass, see `AutoPlan.after`."""
        times = PassTimes(began, ready, computed, ended)
        number, self._passes = self._passes, self._passes + 1
        phase, place = divmod(number, WARM + CAPTURED)
        if phase < 2:
            if place >= WARM:
                self._captured.append(times)
            if place < WARM + CAPTURED - 1:
                return None
            self._least.append(self._least_time())
            if phase == 0:
                self._whole, self._captured = self._agreed(order), []
                self.call.set_cuts(self.call.places)
                return None
            seen = sorted(ready, key=ready.__getitem__)
            unseen = [index for index in reversed(range(len(self.entries))) if index not in ready]
            return self._begin([*seen, *unseen])  # other passes or ranks may have the unseen gradients
        turn, place = divmod(number - 2 * (WARM + CAPTURED), TURN)
        if place:
            self._steps[self._tried(turn)].append(times.ended - times.began)
        if place < TURN - 1:
            return None
        if turn < ROUNDS * len(self._candidates) - 1:
            return self._use(self._tried(turn + 1))
        return self._end()

    def _least_time(self) -> float:
        """Return the minimal computation time over captured passes (noise only adds), maximal over ranks."""
        least = torch.tensor(
            [min(each.computed - each.began for each in self._captured)], dtype=torch.float64, device="cpu"
        )
        self.comm.all_reduce(least, MAX, compress=False, tag="plan")
        return float(least)

    def _use(self, number: int) -> ExecutablePlan:
        self.call.set_cuts(self._candidates[number].cuts)
        return self._plans[number]

    def _give_up(self, reason: str) -> ExecutablePlan | None:
        self.call.set_cuts(())
        return super()._give_up(reason)

    # -- planning ---------------------------------------------------------------------------------

    def _begin(self, order: Sequence[int]) -> ExecutablePlan | None:
        """Search candidates for the captured times, and begin their trial."""
        order = self.comm.broadcast_object(list(order), self.comm.ranks[0])
        whole, cut = self._whole, self._agreed(order)
        assert whole is not None
        candidates: list[Candidate] = []
        problem: str | None = None
        if self.comm.rank == 0:
            try:
                candidates = self._found(whole, cut)
            except Exception as error:  # must not propagate: the other ranks wait for the broadcast
                problem = f"the search for cuts failed: {type(error).__name__}: {error}"
        candidates, self.report, problem = self.comm.broadcast_object(
            (candidates, self.report, problem), self.comm.ranks[0]
        )
        if problem is None and len(candidates) < 2:
            problem = "the graph has no place for a cut"
        if problem is not None:
            return self._give_up(problem)
        self._candidates = [
            Candidate(name, cuts, [(members, Choice(*choice)) for members, choice in plan])
            for name, cuts, plan in candidates
        ]
        self._steps = [[] for _ in candidates]
        self._plans = [
            ExecutablePlan(
                [packed([self.entries[index] for index in members], self.alignment) for members, _ in plan],
                [choice for _, choice in plan],
            )
            for _, _, plan in self._candidates
        ]
        return self._use(self._tried(0))

    def _found(self, whole: Captured, cut: Captured) -> list[Candidate]:
        """Return the candidates, on the first rank; stores their expected times in the report."""
        by_part, places = self._in_parts(cut)
        candidates = [Candidate("whole", (), self._sized(whole.order))]
        if places:
            candidates.append(Candidate("blocks", places, self._sized(by_part.order)))
        cost = max(0.0, self._least[1] - self._least[0]) / max(1, len(places))
        self.report = {
            "plan": "auto",
            "compute_ms": 1e3 * whole.compute,
            "cut_ms": 1e3 * cost,
            "cuts_known": len(places),
        }
        if self.curves:
            candidates.append(self._planned(whole, by_part, places))
        return candidates

    def _sized(self, order: Sequence[int]) -> Plan:
        return [(bucket.members, Choice()) for bucket in self._by_size(order)]

    def _in_parts(self, cut: Captured) -> tuple[Captured, Cuts]:
        """Return the gradients in the order of parts, last part first, and the modules at the cuts between.

        The parts come from the graph, not from measured times, so noise cannot move a gradient between parts.
        """
        parts: list[GraphPart] = [GraphPart((), ()), *self.call.parts()]
        place = {name: at for at, part in enumerate(parts) for name in part.parameters}
        where = {index: place.get(self.names[index], 0) for index in cut.order}
        rank = {index: at for at, index in enumerate(cut.order)}
        order = sorted(cut.order, key=lambda index: (-where[index], rank[index]))
        ready = np.maximum.accumulate([cut.ready[rank[index]] for index in order]).tolist()
        places, later = list[str](), tuple[str, ...]()
        for at in sorted(set(where.values()), reverse=True):
            places += later
            later = parts[at].after
        return Captured(order, ready, cut.compute), tuple(places)

    def _planned(self, whole: Captured, cut: Captured, places: Cuts) -> Candidate:
        """Return all cuts with the best buckets for them; stores the expected times in the report."""
        choices = list(self.curves)
        found = self._searched(cut, choices)
        plan: Plan = [(tuple(cut.order[begin:end]), choices[choice]) for begin, end, choice in found.buckets]
        tail = self._tail_time()
        self.report |= {
            "foretold_ms": 1e3 * (self.course(cut, plan).step + tail),
            "foretold_baseline_ms": 1e3 * (self.course(whole, self._sized(whole.order)).step + tail),
            "bound_ms": 1e3 * (found.bound + tail),
            "gap": found.gap,
            "exact": found.exact,
        }
        return Candidate("searched", places, plan)

    # -- the verdict ------------------------------------------------------------------------------

    def _end(self) -> ExecutablePlan:
        """Compare the candidates by the slowest rank's times, and keep the best one."""
        steps = torch.tensor(self._steps, dtype=torch.float64, device="cpu")
        self.comm.all_reduce(steps, MAX, compress=False, tag="plan")
        middle = [median(each) for each in steps.tolist()]
        best = min(range(len(middle)), key=middle.__getitem__)
        if middle[best] >= middle[0] * (1 - MARGIN):
            best = 0
        self.is_final = True
        chosen, sent = self._candidates[best], self._use(best)
        self.report |= {
            "chosen": chosen.name,
            "cuts": list(self.call.cuts),  # in the order of the forward pass; a candidate's are reversed
            "buckets": [[self.names[index] for index in members] for members, _ in chosen.plan],
            **named_choices(choice for _, choice in chosen.plan),
            "baseline_buckets": len(self._candidates[0].plan),
            "baseline_ms": 1e3 * middle[0],
            "measured_ms": 1e3 * middle[-1],
            "tried_ms": {each.name: 1e3 * time for each, time in zip(self._candidates, middle, strict=True)},
        }
        current().attached[REPORT] = self.report
        if self.comm.rank == 0:
            _log.warning("%s", line(self.report))
        return sent


def line(report: Mapping[str, Any]) -> str:
    """Return the result of a trial in one line."""
    tried = ", ".join(f"{_NAMES[name]} {time:.0f} ms" for name, time in report["tried_ms"].items())
    predicted = f"; foretold {report['foretold_ms']:.0f}" if "foretold_ms" in report else ""
    return (
        f"compiled model: {len(report['cuts'])} cuts and {len(report['buckets'])} buckets are kept "
        f"(step: {tried}{predicted}; a cut costs {report['cut_ms']:.1f} ms)"
    )
