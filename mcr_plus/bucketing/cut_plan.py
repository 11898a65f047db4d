"""`mcr.compile(model, cuts="auto")`: measure the cost of cuts, search for the best ones, and try them.

Passes of a job, counted from the one after the first:

    0           the whole graph, buckets by size; warm-up
    1 … 3       the whole graph, captured
    4           cut at every block; the parts are compiled
    5 … 7       cut at every block, captured
    8 …         the candidates alternate, three counted passes each; the first pass of a turn is not counted

The candidates are the whole graph and the graph cut at every block, both with buckets by size. With `fuse:
{plan: auto}`, a third candidate has the best cuts and buckets from an exact search. For this search, captured
passes send their buckets at the end, as in `auto_plan`. The cost of a cut is the additional computation time
with all cuts, divided by the number of cuts. The candidate with the shortest time on the slowest rank is
kept; it must beat the whole graph by a margin.
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
from mcr_plus.bucketing.costs import OVERHEAD, groups, prices
from mcr_plus.bucketing.given_plan import named_choices
from mcr_plus.communicator.gradient_policy import Choice
from mcr_plus.core.kinds import MAX
from mcr_plus.fusion.bucket import packed
from mcr_plus.job.init import current

_log = logging.getLogger("mcr_plus")
_PLACES: Final = 24  # maximum number of places in a search; if there are more, evenly spread ones
_SEARCHED: Final = 200  # maximum number of gradients; with more, small neighbours in a part stay together
_NAMES: Final = {"whole": "uncut, by size", "blocks": "cut at every block, by size", "searched": "searched"}

Plan = list[tuple[tuple[int, ...], Choice]]
"""Gradients of each bucket, and its library and codec."""


class Candidate(NamedTuple):
    """A candidate of the trial: cuts and buckets."""

    name: str
    cuts: Cuts
    plan: Plan


class Stretch(NamedTuple):
    """Gradients between two places at which a graph may be cut.

    `after`: modules at the preceding place, in the order of the forward pass; empty at the beginning of a
    graph, where a part ends in any case. `gradients`: number of gradients.
    """

    after: Cuts
    gradients: int


@dataclass(eq=False)
class CutPlan(AutoPlan):
    """Chooses the cuts and the buckets of a compiled model; replaces `AutoPlan`.

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
        """True: cuts of a compiled model are tried."""
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
        """Return the minimum computation time over captured passes (noise adds time), maximum over ranks."""
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
        """Search for candidates with the captured times, and begin the trial."""
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
        """Return the candidates, on the first rank, and store their predicted times in the report."""
        by_part, stretches = self._in_parts(cut)
        places = tuple(name for stretch in stretches[1:] for name in stretch.after)
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
            candidates.append(self._searched_cuts(by_part, stretches, cost))
        return candidates

    def _sized(self, order: Sequence[int]) -> Plan:
        return [(bucket.members, Choice()) for bucket in self._by_size(order)]

    def _in_parts(self, cut: Captured) -> tuple[Captured, list[Stretch]]:
        """Return the gradients ordered by part, last part first, and the number in each part.

        The parts come from the graph, not from measured times, so noise cannot move a gradient between parts.
        """
        parts: list[GraphPart] = [GraphPart((), ()), *self.call.parts()]
        place = {name: at for at, part in enumerate(parts) for name in part.parameters}
        where = {index: place.get(self.names[index], 0) for index in cut.order}
        rank = {index: at for at, index in enumerate(cut.order)}
        order = sorted(cut.order, key=lambda index: (-where[index], rank[index]))
        ready = np.maximum.accumulate([cut.ready[rank[index]] for index in order]).tolist()
        stretches, later = list[Stretch](), tuple[str, ...]()
        for at in range(len(parts) - 1, -1, -1):
            if count := sum(where[index] == at for index in order):
                stretches.append(Stretch(later, count))
                later = parts[at].after
        return Captured(order, ready, cut.compute), stretches

    def _searched_cuts(self, cut: Captured, stretches: Sequence[Stretch], cost: float) -> Candidate:
        """Return the best cuts and buckets."""
        from mcr_plus.bucketing.cut_search import search_cuts

        count = len(cut.order)
        starts = np.cumsum([stretch.gradients for stretch in stretches])[:-1].tolist()
        costs = [cost if stretch.after else 0.0 for stretch in stretches[1:]]
        paid = np.zeros(count)  # cost of the cuts before each gradient
        for start, price in zip(starts, costs, strict=True):
            paid[start:] += price
        ready = np.maximum.accumulate(np.maximum(np.array(cut.ready) - paid, 0.0))
        compute = max(cut.compute - sum(costs), float(ready[-1]))
        kept = sorted({round(at) for at in np.linspace(0, len(starts) - 1, min(len(starts), _PLACES))})
        ends = groups(
            [self.entries[index].nbytes for index in cut.order], _SEARCHED, [starts[at] for at in kept]
        )
        at = [0, *ends]
        whole = [
            packed([self.entries[index] for index in cut.order[begin:end]], self.alignment).nbytes
            for begin, end in zip(at, ends, strict=False)
        ]
        choices = list(self.curves)
        of = prices(whole, self.alignment, [self.curves[each] for each in choices], OVERHEAD)
        positions = [at.index(starts[each]) for each in kept]
        found = search_cuts(ready[np.array(ends) - 1], compute, of, positions, [costs[each] for each in kept])
        plan: Plan = [
            (tuple(cut.order[at[begin] : at[end]]), choices[choice]) for begin, end, choice in found.buckets
        ]
        chosen = [kept[each] for each in found.cuts]
        names = tuple(name for each in chosen for name in stretches[each + 1].after)
        self._foretell_cuts(Captured(cut.order, ready.tolist(), compute), starts, costs, chosen, plan)
        self.report |= {
            "bound_ms": 1e3 * (found.bound + self._tail_time()),
            "gap": found.gap,
            "exact": found.exact and len(ends) == count and len(kept) == len(starts),
        }
        return Candidate("searched", names, plan)

    def _foretell_cuts(
        self, free: Captured, starts: Sequence[int], costs: Sequence[float], chosen: Sequence[int], plan: Plan
    ) -> None:
        """Store the predicted times with and without cuts. `free`: ready times if all cuts were free."""
        count = len(free.order)
        for key, cuts, buckets in (
            ("foretold_ms", chosen, plan),
            ("foretold_baseline_ms", (), self._sized(free.order)),
        ):
            ready, paid = np.zeros(count), 0.0
            begins = [0, *(starts[at] for at in cuts)]
            prices_paid = [0.0, *(costs[at] for at in cuts)]
            for begin, end, price in zip(begins, [*begins[1:], count], prices_paid, strict=True):
                paid += price
                ready[begin:end] = free.ready[end - 1] + paid
            course = self.course(Captured(free.order, ready.tolist(), free.compute + paid), buckets)
            self.report[key] = 1e3 * (course.step + self._tail_time())

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
