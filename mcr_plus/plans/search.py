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
from mcr_plus.bucketing.scaling import CAPTURED, ClusterCosts
from mcr_plus.bucketing.simulation_result import Timeline
from mcr_plus.core.units import about
from mcr_plus.errors import InvalidArgument
from mcr_plus.kernels.compiling import preparing
from mcr_plus.plans import stage_search
from mcr_plus.plans.blocks import Profile
from mcr_plus.plans.codecs import CodecChoice, can_encode, payload_codec, transfer_codec
from mcr_plus.plans.foretell import OVERHEAD, BestCosts, foretell
from mcr_plus.plans.language import OUTSIDE, Held, PlanTask
from mcr_plus.plans.memory import RankMemory, memory_of
from mcr_plus.plans.named import Schedule, hybrid, mesh
from mcr_plus.plans.proof import ProvedPlan, prove, seconds_of, share_of
from mcr_plus.plans.stage_search import CELLS, BlockCosts, Floats, Ints, solve
from mcr_plus.plans.tensors import PlanTensors
from mcr_plus.tables.scaling import Placement

SIMULATED: Final = 64
"""Most ranks of plans that are simulated in full."""
SLACK: Final = 0.05
"""Part of a step that a milder codec may take longer."""
_TASKS: Final = 1 << 13
"""Most forward passes of plans for which schedules are compared."""
_SMALL: Final = 1 << 6
"""Most blocks of all ranks of which more plans are simulated, as the model leaves out what overlaps."""
_DEALT: Final = ("experts", "tables")
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
    sharded: tuple[int, ...] = ()
    tensor_blocks: tuple[int, ...] = ()
    schedule: Schedule = "1f1b"
    slices: int = 1

    def __str__(self) -> str:
        parts = [f"data {self.data}", f"tensor {self.tensor}", f"stages {len(self.stages)}"]
        parts.append(f"micro-batches {self.micro_batches}")
        parts += [f"{self.held} in shards"] if self.held != "whole" else []
        parts += [f"{self.outside} in parts between"] if self.outside else []
        parts += [f"{len(self.tensor_blocks)} blocks with parameters in parts"] if self.tensor_blocks else []
        parts += [f"{len(self.recompute)} blocks recomputed"] if self.recompute else []
        parts += [f"{len(self.sharded)} with parameters in shards"] if self.sharded else []
        parts += [f"{self.slices} slices"] if self.slices > 1 else []
        parts += [self.schedule] if self.schedule != "1f1b" else []
        return ", ".join(parts)


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
        codecs: allowed for tensors between stages of up to 64 ranks; see `choose_codecs`.

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
    tables = _Tables(profile, fastest, codecs)
    work = sum(block.forward + block.backward for block in profile.blocks)
    found: list[FoundModelPlan] = []
    tried = 0
    kept = best * (8 if ranks * len(profile.blocks) <= _SMALL else 2)
    nearest: tuple[int, BlockCosts, int, int] | None = None
    refused: InvalidArgument | None = None
    for choice, stages in _choices(profile, ranks, costs.topology.ranks_per_node, micro_batches):
        worst = found[kept - 1].seconds if len(found) == kept else math.inf
        try:
            of_blocks, ways = tables.of(choice, stages)
        except InvalidArgument as error:  # for example, a sequence shorter than its number of parts
            refused = error
            continue
        tried += 1
        solved = solve(of_blocks, stages, choice.micro_batches, most, worst)
        if not found and (nearest is None or solved.memory < nearest[0]):
            nearest = solved.memory, of_blocks, stages, choice.micro_batches
        if solved.seconds < worst:
            own = np.take_along_axis(ways, np.array(solved.ways)[:, None], 1).ravel()
            again, shards, cut = (tuple(np.flatnonzero(own & bit).tolist()) for bit in (1, 2, 4))
            done = choice._replace(stages=solved.stages, recompute=again, sharded=shards, tensor_blocks=cut)
            found.append(FoundModelPlan(done, solved.seconds, solved.memory, profile, ranks, costs, codecs))
            found.sort(key=lambda each: each.seconds)
            del found[kept:]
    if nearest is None:
        raise refused or InvalidArgument(
            f"ranks: {ranks}; the model has no so many stages, parts of its batch and of its parameters"
        )
    if not found:
        text = f"memory: {about(most)}; the nearest plan needs {_missing(most, *nearest)} more on some rank"
        raise InvalidArgument(text)
    ordered = [_best_schedule(each, most) for each in sorted(found, key=_step)[:best]]
    topology = costs.topology
    cores = topology.placement(range(ranks)).nodes * (topology.cores or ranks)
    return SearchResult(tuple(sorted(ordered, key=_step)), work / min(ranks, cores), tried)


def _step(found: FoundModelPlan) -> float:
    return found.step


def choose_codecs(proved: ProvedPlan, costs: ClusterCosts, allowed: Sequence[CodecChoice]) -> None:
    """Give each tensor between ranks the mildest codec with which a step takes about as long as with any.

    Codecs that would make replicas differ are left out (`codecs.can_encode`).

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
    moved = [tensor for tensor, choices in usable.items() if choices]

    def choices(tensor: int) -> list[CodecChoice | None]:
        """Return the codecs, the mildest first."""
        dtype, size = plan.blocks[tensor - 1].dtype, plan.blocks[tensor - 1].output
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
    dealt = [
        axis.parts[0] for block in blocks for axis in block.axes.values() if axis.how == "exchange"
    ]  # what `tensor_cut` deals among ranks that share the batch
    layers = tuple(
        index
        for index, block in enumerate(blocks)
        if not block.shared
        and "rows" not in block.axes
        and any(axis.how == "sum" for axis in block.axes.values())
    )  # whose parameters it can cut among them
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
                helds: tuple[Held, ...] = ("whole",) if data == 1 else ("whole", "optimizer")
                shares = (dealt or own) and all_cut and tensor > 1 and micro * data * tensor <= items
                outsides = [None, *(["sequence"] if tensor > 1 and sequence else [])]
                outsides = (outsides if tensor <= most else []) + (["batch"] if shares else [])
                for held in helds:
                    for outside in outsides:
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


class _Measured(NamedTuple):
    """Times and bytes of each block on one rank, for one micro-batch; `again`: of its forward pass.

    `within`: bytes of the sums within blocks, [blocks, sums].
    """

    seconds: Floats
    again: Floats
    kept: Ints
    input: Ints
    parameters: Ints
    gradients: Ints
    state: Ints
    transient: Ints
    transient_again: Ints
    output: Ints
    within: Ints


class _Tables:
    """Costs of blocks by combination; those of one micro-batch depend on its share of the batch alone."""

    def __init__(self, profile: Profile, costs: BestCosts, codecs: Sequence[CodecChoice]) -> None:
        self.profile, self.costs, self.codecs = profile, costs, codecs
        self.dealt = [not block.axes.keys().isdisjoint(_DEALT) for block in profile.blocks]
        self._known: dict[object, _Measured] = {}

    def of(self, choice: PlanChoice, stages: int) -> tuple[BlockCosts, Ints]:
        """Return the costs of all blocks, and the ways of each, the fastest first.

        Bits of a way: 1 recomputed, 2 with parameters in shards, 4 one of the choice's `tensor_blocks`.
        """
        every = choice.data * choice.tensor
        ways = {0: (), 4: choice.tensor_blocks} if choice.tensor_blocks else {0: ()}
        found = []
        for cut in ways.values():
            key = choice.tensor, choice.data * choice.micro_batches, choice.outside, cut
            if key not in self._known:
                self._known[key] = self._measured(*key)
            measured = self._known[key]
            found.append(self._in_ways(choice, stages, cut, measured))
        seconds, kept, fixed, transient = (np.concatenate(each, axis=1) for each in zip(*found, strict=True))
        order = np.argsort(seconds, axis=1, kind="stable")
        seconds, kept, fixed, transient = (
            np.take_along_axis(each, order, 1) for each in (seconds, kept, fixed, transient)
        )
        for each in (kept, fixed, transient):  # a way that a block has not is no way to save memory
            np.copyto(each, each[:, :1], where=np.isinf(seconds))
        output = measured.output
        sends = np.zeros((len(seconds), stages))
        alike: dict[Placement, Floats] = {}
        for stage in range(stages - 1):
            pair = stage * every, (stage + 1) * every
            place = self.costs.topology.placement(pair)
            if place not in alike:
                alike[place] = np.array([self._sent(index, int(n), pair) for index, n in enumerate(output)])
            sends[:, stage] = alike[place]
        extra = seconds - seconds[:, :1]
        costs = BlockCosts(seconds[:, 0], extra, kept, fixed, transient, output, measured.input, sends)
        return costs, np.arange(8)[[bits + way for bits in ways for way in range(4)]][order]

    def _in_ways(
        self, choice: PlanChoice, stages: int, cut: tuple[int, ...], one: _Measured
    ) -> tuple[Floats, Ints, Ints, Ints]:
        """Return seconds and bytes of each block in four ways; seconds are infinite where it has one not."""
        data, tensor, micro, held, outside = choice[:5]
        # Ranks with the same parameters; of the first stage, as those of other stages lie alike.
        whole = [outside == "batch" and not dealt and n not in cut for n, dealt in enumerate(self.dealt)]
        alike = [range(0, data * tensor, 1 if each else tensor) for each in whole]
        sums, gathers = (
            np.array([self._time(kind, int(n), group) for n, group in zip(sizes, alike, strict=True)])
            for kind, sizes in (
                ("all_reduce" if held == "whole" else "reduce_scatter", one.gradients),
                ("all_gather", one.parameters),
            )
        )
        if held == "optimizer":  # after its step, the ranks gather the parameters
            sums = sums + gathers
        shared = [stages > 1 and bool(block.shared) for block in self.profile.blocks]
        holders = np.array([len(group) for group in alike])
        # Shards of a block that shares parameters with one on other ranks are no choice.
        shards = np.where((holders < 2) | shared, np.inf, 2 * gathers)
        inner = self._within(one.within, range(tensor), outside)
        times = one.seconds + inner + sums / (micro + stages - 1)
        again = times + one.again + inner / 2
        fixed = one.gradients + one.parameters + one.state // (1 if held == "whole" else holders)
        split = one.gradients + (one.parameters + one.state) // holders
        transients = one.transient, one.transient_again
        return (
            np.stack([times, again, times + shards, again + shards], axis=1),
            np.stack([one.kept, one.input] * 2, axis=1),
            np.stack([fixed, fixed, split, split], axis=1),
            np.stack([*transients, *(each + one.parameters for each in transients)], axis=1),
        )

    def _sent(self, block: int, nbytes: int, pair: Sequence[int]) -> float:
        """Return the seconds of a block's output and its gradient, with the fastest codec."""
        found, dtype = [self._time("send", nbytes, pair)], self.profile.blocks[block].dtype
        for codec in (transfer_codec(choice, dtype) for choice in self.codecs if nbytes):
            coding = nbytes // codec.itemsize * (codec.encode + codec.decode)
            found.append(coding + self._time("send", codec.wire(nbytes), pair))
        return 2 * min(found)

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

    def _measured(
        self, tensor: int, pieces: int, outside: str | None, tensor_blocks: tuple[int, ...]
    ) -> _Measured:
        """Return times and bytes of blocks on one of `tensor` ranks, for the largest of `pieces` of a batch.

        The last parts are the largest.
        """
        plan, whole = (
            mesh(
                self.profile, tensor, tensor=tensor, micro_batches=number, outside=outside,
                tensor_blocks=tensor_blocks,
            )[0]
            for number in (pieces, 1)  # one has fewer places to look at
        )  # fmt: skip
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
            transient = one.transient(backward) + one.gradient(backward)
            fixed = held.fixed([index])
            rows.append((sum(both), both[0], kept, input_, *fixed, transient, transient + kept, output))
            for cut in plan.cuts[index]:
                for name in cut.axes if plan.how(index, cut) in ("sum", "exchange") else ():
                    share = share_of(proved.tensors, forward, cut, range(tensor))
                    within[index, axes.index(name)] = round(share * block.axes[name].input)
        seconds, again, *sizes = zip(*rows, strict=True)
        times = np.array(seconds), np.array(again)
        return _Measured._make([*times, *(np.array(each, np.int64) for each in sizes), within])
