"""Search for a plan: data, tensor and pipeline parallelism, micro-batches, shards, and what is recomputed.

For each combination, stages of consecutive blocks are cut. Each block may be recomputed, its parameters may
be in shards, and where ranks share the batch, its batch or its parameters are cut. All is chosen so that a
step of 1F1B takes least under a bound of memory:

    step = Σ stages (time + transfer) + (micro-batches - 1) · max of all times and transfers

with times and bytes of the profile, and costs of operations as in `foretell`. To the time of a stage belongs
a part of its sums of gradients: one of the (micro-batches + stages - 1) times that make a step. Given the
combination this is exact: a stage's choices for its blocks are a knapsack, as inputs and outputs are cut
alike whatever is chosen, and the cuts minimise sum and maximum together. Memory is counted in units of 1/1024
of the bound, rounded up. The best few are simulated in full. Stages by time and memory follow Alpa (Zheng et
al. 2022, arXiv 2201.12023) and RaNNC (Tanaka et al. 2021); choices by layer under memory follow Galvatron
(Miao et al. 2022, arXiv 2211.13878).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from typing import Final, NamedTuple

import numpy as np

from mcr_plus.bucketing import events
from mcr_plus.bucketing.scaling import ClusterCosts
from mcr_plus.bucketing.simulation_result import Timeline
from mcr_plus.core.units import about
from mcr_plus.errors import InvalidArgument
from mcr_plus.kernels.compiling import preparing
from mcr_plus.plans import stage_search
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.codecs import CodecChoice, can_encode, payload_codec, transfer_codec
from mcr_plus.plans.foretell import BestCosts, foretell, has_sums
from mcr_plus.plans.language import OUTSIDE, Held
from mcr_plus.plans.memory import memory_of
from mcr_plus.plans.named import Schedule, hybrid, inner_cuts
from mcr_plus.plans.proof import ProvedPlan, prove
from mcr_plus.plans.search_costs import PlanChoice, SearchCosts
from mcr_plus.plans.stage_search import CELLS, BlockCosts, Ints, solve

SIMULATED: Final = 64
"""Most ranks of plans that are simulated in full."""
SLACK: Final = 0.05
"""Part of a step that a milder codec may take longer."""
_TASKS: Final = 1 << 13
"""Most forward passes of plans for which schedules are compared."""
_SMALL: Final = 1 << 6
"""Most blocks of all ranks of which more plans are simulated, as the model leaves out what overlaps."""
_UNBOUND: Final = 1 << 50


@dataclass(frozen=True)
class FoundModelPlan:
    """A plan that a search has found.

    `seconds`: of a step, by the search's model. `memory`: most bytes of a rank, by the same. `allowed`:
    codecs.
    """

    choice: PlanChoice
    seconds: float
    memory: int
    profile: Profile = field(repr=False)
    ranks: int
    costs: ClusterCosts = field(repr=False)
    allowed: Sequence[CodecChoice] = ()

    @cached_property
    def plan(self) -> ProvedPlan:
        """The plan, proved."""
        choice = self.choice._asdict()
        choice["stages"] = list(self.choice.stages)
        proved = prove(hybrid(self.profile, self.ranks, name="auto", **choice))
        choose_codecs(proved, self.costs, self.allowed)
        return proved

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step, and after it the gathering of parameters that optimizers in shards change."""
        return foretell(self.plan, self.costs, gathers=True)

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
    """Plans by time, and a bound: computation shared evenly among all ranks or cores, alone."""

    plans: tuple[FoundModelPlan, ...]
    bound: float
    tried: int

    @property
    def gap(self) -> float:
        """Part of the best plan's step that is beyond the bound."""
        return 1 - self.bound / self.plans[0].step


def search(
    profile: Profile, ranks: int, costs: ClusterCosts, *, memory: int | None = None, best: int = 4,
    micro_batches: Sequence[int] | None = None, codecs: Sequence[CodecChoice] = (),
) -> SearchResult:  # fmt: skip
    """Return the best plans of a profile on a cluster, the fastest first.

    Args:
        ranks: their number. costs: of operations, with the topology. memory: bytes of a rank; None: no bound.
        best: number of plans to return. micro_batches: numbers to try; None: powers of two.
        codecs: allowed for tensors between stages, and sums of gradients, of up to 64 ranks; see
            `choose_codecs`.

    Raises:
        InvalidArgument: no plan has so little memory, and the text says how much more has one; the topology,
            or every combination, has another number of ranks; a block draws random numbers; a codec is
            unknown, or the ranks are too many for codecs.
    """
    for block in profile.blocks:
        if block.random:
            raise InvalidArgument(
                f"{block.name}: it draws random numbers, which no plan runs; set its dropout to 0"
            )
    if not 1 <= ranks <= costs.topology.ranks:
        raise InvalidArgument(f"ranks: {ranks}; the topology has {costs.topology.ranks}")
    if codecs and ranks > SIMULATED:
        raise InvalidArgument(
            f"codecs: {ranks} ranks; expected at most {SIMULATED}, whose steps are simulated"
        )
    for codec, dtype in product(codecs, {block.dtype for block in profile.blocks}):
        payload_codec(codec, dtype)
    _prepare()
    most = max(min(memory, _UNBOUND), 1) if memory is not None else _UNBOUND
    fastest = BestCosts(costs.measured, costs.topology, costs.measured_on, costs.guessed)
    tables = SearchCosts(profile, fastest, codecs)
    work = sum(block.forward + block.backward for block in profile.blocks)
    found: list[FoundModelPlan] = []
    kept = best * (8 if ranks * len(profile.blocks) <= _SMALL else 2)
    combinations = _combinations(tables, ranks, costs.topology.ranks_per_node, micro_batches)
    nearest, least = combinations[0], math.inf
    for each in combinations:
        worst = found[kept - 1].seconds if len(found) == kept else math.inf
        if each.least >= worst:
            break  # so are the following ones
        choice, solved = each.choice, solve(each.costs, each.stages, each.choice.micro_batches, most)
        if not found and solved.memory < least:
            nearest, least = each, solved.memory
        if solved.seconds < worst:
            own = np.take_along_axis(each.ways, np.array(solved.ways)[:, None], 1).ravel()
            again, shards, cut = (tuple(np.flatnonzero(own & bit).tolist()) for bit in (1, 2, 4))
            if choice.outside == "batch" and not cut and not any(tables.dealt):
                continue  # data parallelism, which has a combination of its own
            done = choice._replace(stages=solved.stages, recompute=again, sharded=shards, tensor_blocks=cut)
            found.append(FoundModelPlan(done, solved.seconds, solved.memory, profile, ranks, costs, codecs))
            found.sort(key=lambda each: each.seconds)
            del found[kept:]
    if not found:
        text = f"memory: {about(most)}; the nearest plan needs {_missing(most, int(least), nearest)}"
        raise InvalidArgument(f"{text} more on some rank")
    ordered = [_best_schedule(each, most) for each in sorted(found, key=_step)[:best]]
    topology = costs.topology
    cores = topology.placement(range(ranks)).nodes * (topology.cores or ranks)
    return SearchResult(tuple(sorted(ordered, key=_step)), work / min(ranks, cores), len(combinations))


def _step(found: FoundModelPlan) -> float:
    return found.step


def choose_codecs(proved: ProvedPlan, costs: ClusterCosts, allowed: Sequence[CodecChoice]) -> None:
    """Give each tensor between ranks the mildest codec with which a step takes about as long as with any.

    Also the sums of gradients, which have one codec together. Codecs that would make replicas differ are left
    out (`codecs.can_encode`).

    So slow links get strong codecs, and links for which the step does not wait get none: the ratio by link of
    AdaTopK (FusionLLM; Tang et al. 2024, arXiv 2410.12707), with the simulated step in place of a formula.

    Args:
        allowed: codecs that the user accepts, in any order.

    Raises:
        InvalidArgument: see `codecs.payload_codec`.
    """
    plan = proved.plan
    nodes = np.arange(plan.ranks) // costs.topology.ranks_per_node
    refused = {
        (each.tensor, number) for each in proved.transfers for number, choice in enumerate(allowed)
        if not can_encode(choice, each.made, each.needed, nodes)
    }  # fmt: skip
    usable = {
        tensor: [choice for number, choice in enumerate(allowed) if (tensor, number) not in refused]
        for tensor in sorted({each.tensor for each in proved.transfers})
    }
    if has_sums(proved):
        usable[0] = list(allowed)
    moved = [tensor for tensor, choices in usable.items() if choices]

    def choices(tensor: int) -> list[CodecChoice | None]:
        """Return the codecs, the mildest first."""
        dtype, size = plan.blocks[tensor - 1].dtype, plan.blocks[tensor - 1].output
        if not tensor:
            dtype, size = "float32", sum(block.gradients for block in plan.blocks)
        mildest = sorted(usable[tensor], key=lambda each: -transfer_codec(each, dtype).wire(size))
        return [None, *mildest]

    def step(tensor: int, choice: CodecChoice | None) -> float:
        plan.codecs.pop(tensor, None)
        if choice is not None:
            plan.codecs[tensor] = choice
        return foretell(proved, costs).step_s

    plan.codecs = {tensor: last for tensor in moved if (last := choices(tensor)[-1]) is not None}
    for tensor in moved:  # the strongest may take longer to encode than it saves
        step(tensor, min(reversed(choices(tensor)), key=lambda choice: step(tensor, choice)))
    most = (1 + SLACK) * foretell(proved, costs).step_s if moved else 0.0
    for tensor in moved:
        used = plan.codecs.get(tensor)
        step(tensor, next(each for each in choices(tensor) if each is used or step(tensor, each) <= most))


@cache
def _prepare() -> None:
    """Let one process of a host compile the kernels, where all search."""
    with preparing("searches for plans"):
        stage_search.prepare()
        events.prepare()


class _Combination(NamedTuple):
    """A choice but for its blocks, and its number of stages; `least`: no step of it takes less.

    `costs` of blocks, and `ways`, [blocks, ways], the fastest first. Bits of a way: 1 recomputed, 2 with
    parameters in shards, 4 one of the choice's `tensor_blocks`.
    """

    least: float
    choice: PlanChoice
    stages: int
    costs: BlockCosts
    ways: Ints


def _combinations(
    tables: SearchCosts, ranks: int, per_node: int, micro_batches: Sequence[int] | None
) -> list[_Combination]:
    """Return all, the most promising first; raises `InvalidArgument` if there is none."""
    found, refused = list[_Combination](), None
    for choice, stages in _choices(tables.profile, ranks, per_node, micro_batches):
        try:
            costs, ways = tables.of(choice, stages)
        except InvalidArgument as error:  # for example, a sequence shorter than its number of parts
            refused = error
            continue
        whole = float(costs.seconds.sum())
        least = whole + (choice.micro_batches - 1) * whole / stages
        found.append(_Combination(least, choice, stages, costs, ways))
    if not found:
        raise refused or InvalidArgument(
            f"ranks: {ranks}; the model has no so many stages, parts of its batch and of its parameters"
        )
    return sorted(found, key=lambda each: each.least)


def _missing(most: int, least: int, of: _Combination) -> str:
    """Return what a bound lacks for a combination that needs at least `least` bytes; sizes are rounded up."""
    hundredth, number = (1 << 20) / 100, 0
    for cells in range(min(len(of.ways) + 2, CELLS - 1) + 1):
        number = math.ceil((least * CELLS / (CELLS - cells) - most) / hundredth)
        bound = most + math.floor(number * hundredth)
        found = solve(of.costs, of.stages, of.choice.micro_batches, bound) if bound > most else None
        if found and math.isfinite(found.seconds):
            break
    return f"{number / 100:,.2f} MiB"


def _choices(
    profile: Profile, ranks: int, per_node: int, micro_batches: Sequence[int] | None
) -> Iterator[tuple[PlanChoice, int]]:
    """Yield the combinations and their numbers of stages; few parts of tensors first."""
    blocks = profile.blocks
    items = min((block.axes["batch"].parts[0] for block in blocks if "batch" in block.axes), default=1)
    all_cut = all("batch" in block.axes for block in blocks)
    inner, dealt = (
        [block.axes[axis].parts[0] for block in blocks for axis in inner_cuts(block, kinds)]
        for kinds in (OUTSIDE, ("exchange",))
    )  # what `tensor_cut` cuts, and deals among ranks that share the batch
    exchanged = [block.axes for block in blocks if inner_cuts(block, ("exchange",))]
    layers = tuple(
        index for index, block in enumerate(blocks)
        if not block.shared and "rows" not in block.axes and inner_cuts(block, ("sum",))
    )  # fmt: skip
    sequence = any("sequence" in block.axes and "heads" in block.axes for block in blocks)
    most = min(*inner, per_node) if inner else 1
    for tensor in [n for n in _divisors(ranks) if n <= most or (dealt and n <= min(dealt))]:
        own = layers if tensor <= most else ()
        for stages in [n for n in _divisors(ranks // tensor) if n <= len(blocks)]:
            data = ranks // tensor // stages
            if data > 1 and not all_cut:
                continue
            numbers = [1 << power for power in range(11)] if micro_batches is None else micro_batches
            for micro in [n for n in numbers if n * data <= items and (n == 1 or all_cut)]:
                may_share = tensor > 1 and micro * data * tensor <= items
                helds: tuple[Held, ...] = ("whole",) if data == 1 else ("whole", "optimizer")
                shares = (dealt or own) and all_cut and may_share
                outsides = [None, *(["sequence"] if tensor > 1 and sequence else [])]
                outsides = (outsides if tensor <= most else []) + (["batch"] if shares else [])
                for held in helds:
                    for outside in outsides:
                        if tensor > 1 and not may_share and not all(outside in axes for axes in exchanged):
                            continue  # they would be cut along the batch, which some rank has no item of
                        cut = own if outside == "batch" else ()
                        yield PlanChoice(data, tensor, micro, held, outside, tensor_blocks=cut), stages


def _best_schedule(found: FoundModelPlan, most: int) -> FoundModelPlan:
    """Return the stages in another schedule, or with slices of sequences, if that is faster and fits."""
    choice, profile = found.choice, found.profile
    if len(choice.stages) == 1 or found.ranks * len(profile.blocks) * choice.micro_batches > _TASKS:
        return found
    schedules: list[Schedule] = ["eager-1f1b"] if choice.recompute else ["eager-1f1b", "zero-bubble"]
    others = [choice._replace(schedule=schedule) for schedule in schedules]
    sliced = profile.sliced and choice.outside is None
    length = min(block.axes["sequence"].parts[0] for block in profile.blocks) if sliced else 1
    others += [choice._replace(slices=slices) for slices in (2, 4, 8) if slices <= length]
    best = found
    for other in others:
        made = replace(found, choice=other)
        if made.step < best.step and made.peak <= most:
            best = made
    return best


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
