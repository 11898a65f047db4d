"""Search for a plan: data, tensor and pipeline parallelism, micro-batches, shards, and what is recomputed.

For each combination of the former, stages of consecutive blocks are cut, and blocks to recompute chosen, so
that a step of 1F1B takes least under a bound of memory:

    step = Σ stages (time + transfer) + (micro-batches - 1) · max of all times and transfers + sums of stage 0

with times and bytes of the profile, and costs of operations as in `foretell`. Given the combination this is
exact: a stage's choice of what to recompute is a knapsack, and the cuts minimise sum and maximum together.
Memory is counted in units of 1/1024 of the bound, rounded up. The best few are simulated in full. Stages by
time and memory follow Alpa (Zheng et al. 2022, arXiv 2201.12023) and RaNNC (Tanaka et al. 2021); choices by
layer under memory follow Galvatron (Miao et al. 2022, arXiv 2211.13878).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from mcr_plus.bucketing import events
from mcr_plus.bucketing.scaling import CAPTURED, ClusterCosts
from mcr_plus.bucketing.simulation_result import Timeline
from mcr_plus.core.units import about
from mcr_plus.errors import InvalidArgument
from mcr_plus.kernels.compiling import preparing
from mcr_plus.plans import stage_search
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.foretell import OVERHEAD, BestCosts, foretell
from mcr_plus.plans.language import OUTSIDE, Held, PlanTask
from mcr_plus.plans.memory import RankMemory, memory_of
from mcr_plus.plans.named import hybrid, mesh
from mcr_plus.plans.proof import ProvedPlan, prove, seconds_of, share_of
from mcr_plus.plans.stage_search import CELLS, BlockCosts, Floats, Ints, solve
from mcr_plus.plans.tensors import PlanTensors

SIMULATED: Final = 64
"""Most ranks of plans that are simulated in full."""
_UNBOUND: Final = 1 << 50


class PlanChoice(NamedTuple):
    """Arguments of `named.hybrid` that a search chooses."""

    data: int
    tensor: int
    micro_batches: int
    held: Held
    outside: str | None
    stages: tuple[range, ...] = ()
    recompute: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [f"data {self.data}", f"tensor {self.tensor}", f"stages {len(self.stages)}"]
        parts.append(f"micro-batches {self.micro_batches}")
        parts += [f"{self.held} in shards"] if self.held != "whole" else []
        parts += [f"{self.outside} between sums"] if self.outside else []
        parts += [f"{len(self.recompute)} blocks recomputed"] if self.recompute else []
        return ", ".join(parts)


@dataclass(frozen=True)
class FoundModelPlan:
    """A plan that a search has found.

    `seconds`: of a step, by the search's model. `memory`: most bytes of a rank, by the same.
    """

    choice: PlanChoice
    seconds: float
    memory: int
    profile: Profile = field(repr=False)
    ranks: int
    costs: ClusterCosts = field(repr=False)

    @cached_property
    def plan(self) -> ProvedPlan:
        """The plan, proved."""
        choice = self.choice._asdict()
        choice["stages"] = list(self.choice.stages)
        return prove(hybrid(self.profile, self.ranks, name="auto", **choice))

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return foretell(self.plan, self.costs)

    @cached_property
    def step(self) -> float:
        """Seconds of a step: simulated, or by the model if there are too many ranks."""
        return self.timeline.step_s if self.ranks <= SIMULATED else self.seconds

    @cached_property
    def peak(self) -> int:
        """Most bytes of a rank."""
        if self.ranks > SIMULATED:
            return self.memory
        return max(memory_of(self.plan, rank).peak for rank in range(self.ranks))


@dataclass(frozen=True)
class SearchResult:
    """Plans by time, and a bound: computation shared evenly among all ranks, without communication."""

    plans: tuple[FoundModelPlan, ...]
    bound: float
    tried: int

    @property
    def gap(self) -> float:
        """Part of the best plan's step that is beyond the bound."""
        return 1 - self.bound / self.plans[0].step


def search(
    profile: Profile, ranks: int, costs: ClusterCosts, *, memory: int | None = None, best: int = 4,
    micro_batches: Sequence[int] | None = None,
) -> SearchResult:  # fmt: skip
    """Return the best plans of a profile on a cluster, the fastest first.

    Args:
        ranks: their number. costs: of operations, with the topology. memory: bytes of a rank; None: no bound.
        best: number of plans to return. micro_batches: numbers to try; None: powers of two.

    Raises:
        InvalidArgument: no plan has so little memory, and the text says how much more has one; or the
            topology, or every combination, has another number of ranks; or a block draws random numbers.
    """
    for block in profile.blocks:
        if block.random:
            raise InvalidArgument(
                f"{block.name}: it draws random numbers, which no plan runs; set its dropout to 0"
            )
    if not 1 <= ranks <= costs.topology.ranks:
        raise InvalidArgument(f"ranks: {ranks}; the topology has {costs.topology.ranks}")
    _prepare()
    most = max(min(memory, _UNBOUND), 1) if memory is not None else _UNBOUND
    fastest = BestCosts(costs.measured, costs.topology, costs.measured_on, costs.guessed)
    tables = _Tables(profile, fastest)
    work = sum(block.forward + block.backward for block in profile.blocks)
    found: list[FoundModelPlan] = []
    tried = 0
    nearest: tuple[int, BlockCosts, int, int] | None = None
    refused: InvalidArgument | None = None
    for choice, stages in _choices(profile, ranks, costs.topology.ranks_per_node, micro_batches):
        worst = found[best - 1].seconds if len(found) >= best else math.inf
        try:
            of_blocks = tables.of(choice, stages)
        except InvalidArgument as error:  # for example, a sequence shorter than its number of parts
            refused = error
            continue
        tried += 1
        solved = solve(of_blocks, stages, choice.micro_batches, most, worst)
        if not found and (nearest is None or solved.memory < nearest[0]):
            nearest = solved.memory, of_blocks, stages, choice.micro_batches
        if solved.seconds < worst:
            done = choice._replace(stages=solved.stages, recompute=solved.recompute)
            found.append(FoundModelPlan(done, solved.seconds, solved.memory, profile, ranks, costs))
            found.sort(key=lambda each: each.seconds)
            del found[2 * best :]
    if nearest is None:
        raise refused or InvalidArgument(
            f"ranks: {ranks}; the model has no so many stages, parts of its batch and of its parameters"
        )
    if not found:
        text = f"memory: {about(most)}; the nearest plan needs {_missing(most, *nearest)} more on some rank"
        raise InvalidArgument(text)
    ordered = sorted(found, key=lambda each: each.step)
    return SearchResult(tuple(ordered[:best]), work / ranks, tried)


@cache
def _prepare() -> None:
    """Let one process of a host compile the kernels, where all search."""
    with preparing("searches for plans"):
        stage_search.prepare()
        events.prepare()


def _missing(most: int, least: int, costs: BlockCosts, stages: int, micro_batches: int) -> str:
    """Return what a bound lacks for a combination that needs at least `least` bytes; sizes are rounded up."""
    hundredth, number = (1 << 20) / 100, 0
    for cells in range(min(len(costs.seconds) + 2, CELLS - 1) + 1):
        number = math.ceil((least * CELLS / (CELLS - cells) - most) / hundredth)
        bound = most + math.floor(number * hundredth)
        if bound > most and math.isfinite(solve(costs, stages, micro_batches, bound).seconds):
            break
    return f"{number / 100:,.2f} MiB"


def _choices(
    profile: Profile, ranks: int, per_node: int, micro_batches: Sequence[int] | None
) -> Iterator[tuple[PlanChoice, int]]:
    """Yield the combinations and their numbers of stages; few parts of tensors first."""
    blocks = profile.blocks
    items = min((block.axes["batch"].parts[0] for block in blocks if "batch" in block.axes), default=1)
    all_cut = all("batch" in block.axes for block in blocks)
    inner = [
        axis.parts[0] for block in blocks for axis in block.axes.values() if axis.how in OUTSIDE
    ]  # what `tensor_cut` cuts
    sequence = any("sequence" in block.axes and "heads" in block.axes for block in blocks)
    for tensor in [n for n in _divisors(ranks) if n == 1 or (inner and n <= min(min(inner), per_node))]:
        for stages in [n for n in _divisors(ranks // tensor) if n <= len(blocks)]:
            data = ranks // tensor // stages
            if data > 1 and not all_cut:
                continue
            numbers = [1 << power for power in range(11)] if micro_batches is None else micro_batches
            for micro in [n for n in numbers if n * data <= items and (n == 1 or all_cut)]:
                helds: tuple[Held, ...] = ("whole",) if data == 1 else ("whole", "optimizer", "parameters")
                for held in helds if stages == 1 else helds[:2]:
                    for outside in (None, "sequence") if tensor > 1 and sequence else (None,):
                        yield PlanChoice(data, tensor, micro, held, outside), stages


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


class _Tables:
    """Costs of blocks by combination; those of one micro-batch depend on its share of the batch alone."""

    def __init__(self, profile: Profile, costs: BestCosts) -> None:
        self.profile, self.costs = profile, costs
        self._known: dict[object, Any] = {}

    def of(self, choice: PlanChoice, stages: int) -> BlockCosts:
        """Return the costs of all blocks."""
        data, tensor, micro, held, outside = choice[:5]
        key = tensor, data * micro, outside
        if key not in self._known:
            self._known[key] = self._measured(tensor, data * micro, outside)
        seconds, again, kept, kept_input, parts, transient, transient_again, output, within = self._known[key]
        parameters, gradients, state = parts
        every = tensor * data
        group = range(0, every, tensor)  # of the first stage; other stages lie alike
        fixed = gradients + parameters // (data if held == "parameters" else 1)
        fixed = fixed + state // (1 if held == "whole" else data)
        sums = np.zeros(len(seconds))
        gathers = np.zeros(len(seconds))
        if data > 1:
            kind = "all_reduce" if held == "whole" else "reduce_scatter"
            sums = np.array([self._time(kind, int(n), group) for n in gradients])
            if held == "parameters":
                gathers = np.array([self._time("all_gather", int(n), group) for n in parameters])
                transient, transient_again = transient + parameters, transient_again + parameters
        sends = np.zeros(len(seconds))
        if stages > 1:
            sends = np.array([2 * self._time("send", int(n), (0, every)) for n in output])
        inner = self._within(within, range(tensor), outside)
        seconds = seconds + inner + 2 * gathers
        again = again + inner / 2 * (inner > 0)
        return BlockCosts(
            seconds, again, kept, kept_input, fixed, transient, transient_again, output, sends, sums
        )

    def _time(self, kind: str, nbytes: int, group: Sequence[int]) -> float:
        if not nbytes or len(group) < 2:
            return 0.0
        return self.costs.of(kind, nbytes, group, CAPTURED).seconds + OVERHEAD

    def _within(self, nbytes: Ints, group: Sequence[int], outside: str | None) -> Floats:
        """Return the seconds of the sums within blocks, of both passes; `nbytes`: [blocks, sums]."""
        kinds = ("all_reduce",) if outside is None else ("all_gather", "reduce_scatter")
        return np.array([
            2 * sum(self._time(kind, int(n), group) for n in row for kind in kinds) for row in nbytes
        ])  # fmt: skip

    def _measured(self, tensor: int, pieces: int, outside: str | None) -> Any:
        """Return times and bytes of blocks on one of `tensor` ranks, for the largest of `pieces` of a batch.

        The last parts are the largest.
        """
        plan, _, _ = mesh(self.profile, tensor, tensor=tensor, micro_batches=pieces, outside=outside)
        whole = mesh(self.profile, tensor, tensor=tensor, outside=outside)[0]  # with fewer places to look at
        held = RankMemory(ProvedPlan(whole, PlanTensors(whole), (), ()), tensor - 1)
        proved = ProvedPlan(plan, PlanTensors(plan), (), ())
        last, micro = tensor - 1, pieces - 1
        one = RankMemory(proved, last)
        rows = []
        axes = ("heads", "hidden", "experts", "tables", "rows")
        within = np.zeros((len(plan.blocks), len(axes)), np.int64)
        for index, block in enumerate(plan.blocks):
            forward, backward = PlanTask(index, micro, 0, "F"), PlanTask(index, micro, 0, "B")
            both = [seconds_of(plan, proved.tensors, task, last) for task in (forward, backward)]
            kept = one.kept(forward)
            input_ = one.end_bytes(index, forward, "input") if index else 0
            output = one.end_bytes(index + 1, forward, "output") if index + 1 < len(plan.blocks) else 0
            transient = one.transient(backward)
            fixed = held.fixed([index])
            rows.append((sum(both), both[0], kept, input_, *fixed, transient, transient + kept, output))
            for cut in plan.cuts[index]:
                for name in cut.axes if plan.how(index, cut) in ("sum", "exchange") else ():
                    share = share_of(proved.tensors, forward, cut, range(tensor))
                    within[index, axes.index(name)] = round(share * block.axes[name].input)
        columns = list(zip(*rows, strict=True))
        floats, ints = (
            [np.array(each) for each in columns[:2]],
            [np.array(each, np.int64) for each in columns[2:]],
        )
        kepts, inputs, parameters, gradients, state, transients, transients_again, outputs = ints
        parts = parameters, gradients, state
        return (*floats, kepts, inputs, parts, transients, transients_again, outputs, within)
