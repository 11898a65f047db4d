"""Time of a plan: its tasks and communication as a captured step, for the simulator of `bucketing`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from mcr_plus.bucketing.network import simulate
from mcr_plus.bucketing.programs import BucketPlan
from mcr_plus.bucketing.scaling import CAPTURED, ClusterCosts, Use, from_table
from mcr_plus.bucketing.simulation_result import Timeline
from mcr_plus.bucketing.step import CapturedStep, ComputeEvent, Event, IssueEvent, Role, WaitEvent
from mcr_plus.bucketing.topology import Topology
from mcr_plus.config.names import backend_name
from mcr_plus.config.schema import Config
from mcr_plus.core.kinds import Kind
from mcr_plus.errors import Unsupported
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.native import native
from mcr_plus.plans.blocks import ModelBlock
from mcr_plus.plans.codecs import compressed_sum, transfer_codec
from mcr_plus.plans.language import OUTSIDE, BlockCut, Held, PlanTask, TensorKey
from mcr_plus.plans.proof import (
    PlanTransfer,
    ProvedPlan,
    parameter_share,
    seconds_of,
    share_of,
    shared_shards,
)
from mcr_plus.plans.sums import complete, gradient_groups, in_buckets, peers, shared_groups
from mcr_plus.tables import FOLDER as BUILTIN
from mcr_plus.tables.scaling import Placement
from mcr_plus.tables.table import load_table

OVERHEAD: Final = 500e-6
"""Seconds of a rank for an operation, beyond those of the library in a loop, and to begin a pass of blocks
that run as one, through what is before them (Python 3.11, 3 GHz)."""
REDISTRIBUTION: Final = 500e-6
"""Seconds beyond those, if a redistribution or an exchange within a task takes the place of an all_reduce."""


class BestCosts(ClusterCosts):
    """Costs of the library that is fastest for each operation, as a table of the same times chooses it."""

    def use(self, kind: str, nbytes: int, to: Placement, library: str, codec: str | None = None) -> Use:
        """Return the cost and link use of the fastest library with times of the kind there."""
        uses: list[Use] = []
        names = self.libraries_at(kind, to) or [library]
        for name in names:
            # An algorithm may have been measured for other operations alone.
            with suppress(Unsupported) if uses or name != names[-1] else nullcontext():
                uses.append(super().use(kind, nbytes, to, name, codec))
        return min(uses, key=lambda use: use.cost.seconds)


def cluster_costs(topology: Topology, pipeline: Config | None = None) -> ClusterCosts:
    """Return the costs on a cluster by the tables of a configuration; without any, by those built in.

    Links of `topology` with a rate are assumed to be those where the tables were measured.
    """
    paths = [ref.resolve() for ref in pipeline.tables] if pipeline is not None else []
    allowed = pipeline.backends if pipeline is not None else None
    measured = [
        each
        for path in paths or sorted(BUILTIN.glob("*.yaml"))
        for each in from_table(load_table(path))
        if allowed is None or backend_name(each.library) in allowed
    ]
    return ClusterCosts(measured, topology, guessed=bool(topology.medium.rates))


class PlannedSum(NamedTuple):
    """Gradients that ranks add up as one operation."""

    ranks: tuple[int, ...]
    time: float
    nbytes: int
    held: Held


def foretell(
    proved: ProvedPlan, costs: ClusterCosts, overhead: float = OVERHEAD, *, gathers: bool = False
) -> Timeline:
    """Return the timeline of the passes of a step, without the optimizer's.

    `gathers`: with the gathering of parameters after it, where its state is in shards.

    Raises:
        InvalidArgument: the topology has fewer ranks than the plan.
        Unsupported: the cost of an operation is unknown.
    """
    best = BestCosts(costs.measured, costs.topology, costs.measured_on, costs.guessed)
    step = as_step(proved, overhead, gathers=gathers)
    return simulate(step, BucketPlan(library=CAPTURED), best, overhead=overhead)


def as_step(proved: ProvedPlan, overhead: float = OVERHEAD, *, gathers: bool = False) -> CapturedStep:
    """Return the passes of a plan as a captured step; see `foretell`."""
    made = _PlanStep(proved, overhead, gathers=gathers)
    roles = tuple(Role((rank,), tuple(made.events(rank))) for rank in range(proved.plan.ranks))
    return CapturedStep(
        ranks=proved.plan.ranks, nodes=1, model=proved.plan.profile.model, seconds=proved.ideal, spread=0.0,
        roles=roles,
    )  # fmt: skip


def has_sums(proved: ProvedPlan) -> bool:
    """Return whether ranks add up gradients."""
    return bool(_PlanStep(proved, 0.0, gathers=False).sums)


def operations_within(
    block: ModelBlock, cut: BlockCut, share: float, ranks: int
) -> Iterator[tuple[str, int]]:
    """Yield kind and bytes of the operations within a pass of a block that is cut in its parameters.

    Bytes as in nccl-tests. Of elements that parts exchange, each goes to one rank, and what that computes
    comes back. `share`: see `share_of`.
    """
    for name in cut.axes:
        nbytes = round(share * block.axes[name].input)
        if block.axes[name].how == "exchange":
            back = round(share * block.output)
            yield from (("all_to_all", each // ranks) for each in (nbytes, back))
        else:
            kinds = ("all_reduce",) if cut.outside is None else ("all_gather", "reduce_scatter")
            yield from ((kind, nbytes) for kind in kinds)


class _PlanStep:
    def __init__(self, proved: ProvedPlan, overhead: float, *, gathers: bool) -> None:
        self.overhead, self.gathers = overhead, gathers
        self.proved, self.plan = proved, proved.plan
        self.ids: dict[object, int] = {}

    @cached_property
    def sums(self) -> list[PlannedSum]:
        """Sums of gradients of all groups."""
        plan, times = self.plan, complete(self.proved)
        users = plan.profile.users
        keyed: dict[tuple[tuple[int, ...], Held], list[PlannedSum]] = defaultdict(list)
        for index, block in enumerate(plan.blocks):
            trained = block.gradients / max(block.parameters, 1)
            tied = {
                name: round(trained * size) for name, size in block.params.items() if len(users[name]) > 1
            }
            own = block.gradients - sum(tied.values())
            sums = [
                (ranks, [index], round(parameter_share(plan, index, ranks[0]) * own))
                for ranks in gradient_groups(plan, index, cut=True)
            ]
            for name, size in tied.items():
                sums += [(ranks, users[name], size) for ranks in shared_groups(plan, users[name])]
            for ranks, blocks, nbytes in sums:
                if len(ranks) > 1 and nbytes:
                    one = PlannedSum(ranks, max(times[each] for each in blocks), nbytes, plan.held[index])
                    keyed[ranks, one.held].append(one)
        made = [
            bucket[-1]._replace(nbytes=sum(each.nbytes for each in bucket))
            for members in keyed.values() for bucket in in_buckets(members)
        ]  # fmt: skip
        return sorted(made, key=lambda each: (each.time, each.ranks))

    def events(self, rank: int) -> Iterator[Event]:
        """Yield the events of a rank."""
        keyed: list[tuple[tuple[float, int], PlanTask | PlanTransfer | PlannedSum]]
        keyed = [*self.proved.program(rank)]
        keyed += [((one.time, 0), one) for one in self.sums if rank in one.ranks]
        waits: list[int] = []
        moving: dict[TensorKey, tuple[int, Layout]] = {}
        for _, item in sorted(keyed, key=lambda pair: pair[0]):
            if isinstance(item, PlanTransfer):
                issue = self._transfer(item)
                if rank in item.made.locals:
                    yield from self._coding(item.tensor, item.made, rank, encodes=True)
                yield issue
                if rank in item.needed.locals:
                    moving[item[:4]] = issue.id, item.needed
                else:
                    waits.append(issue.id)
            elif isinstance(item, PlannedSum):
                kind: Kind = "all_reduce" if item.held == "whole" else "reduce_scatter"
                nbytes = item.nbytes
                if (codec := self.plan.codecs.get(0)) is not None:
                    nbytes, seconds = compressed_sum(codec, kind, nbytes, len(item.ranks))
                    yield ComputeEvent("encode and decode", seconds)
                yield self._issue(kind, nbytes, item.ranks, "plan.gradients", item)
                waits.append(self.ids[item])
            else:
                if item.needs in moving:
                    number, layout = moving.pop(item.needs)
                    yield WaitEvent(number)
                    yield from self._coding(item.needs[0], layout, rank, encodes=False)
                yield from self._task(item, rank)
        for number in (*(number for number, _ in moving.values()), *waits):
            yield WaitEvent(number)
        for one in self.sums if self.gathers else ():
            if rank in one.ranks and one.held == "optimizer":
                issue = self._issue("all_gather", one.nbytes, one.ranks, "plan.parameters", (one, "gather"))
                yield issue
                yield WaitEvent(issue.id)

    def _issue(self, kind: str, nbytes: int, group: tuple[int, ...], tag: str, key: object) -> IssueEvent:
        number = self.ids.setdefault(key, len(self.ids))
        return IssueEvent(number, kind, nbytes, group, tag, dtype="float32")

    def _transfer(self, each: PlanTransfer) -> IssueEvent:
        block = self.plan.blocks[each.tensor - 1]
        item = block.output // max(int(np.prod(block.shape)), 1)
        one = native(each.made, each.needed)
        messages = "send" if len(each.ranks) == 2 and not each.made.is_partial else "all_to_all"
        kind: str = messages if one is None else one.kind
        # Bytes as in nccl-tests: all that a rank gathers, or has before.
        locals_ = (each.needed if kind in ("all_gather", "broadcast", "send") else each.made).locals
        nbytes = item * max(int(np.prod(shape)) for shape in locals_.values())
        if each.tensor in self.plan.codecs:
            nbytes = transfer_codec(self.plan.codecs[each.tensor], block.dtype).wire(nbytes)
        return self._issue(kind, nbytes, each.ranks, each.tag, each[:4])

    def _coding(self, tensor: int, layout: Layout, rank: int, *, encodes: bool) -> Iterator[Event]:
        """Yield the time to encode or decode a rank's part of a transfer."""
        if tensor in self.plan.codecs:
            codec = transfer_codec(self.plan.codecs[tensor], self.plan.blocks[tensor - 1].dtype)
            seconds = int(np.prod(layout.locals[rank])) * (codec.encode if encodes else codec.decode)
            yield ComputeEvent("encode" if encodes else "decode", seconds)

    def _task(self, task: PlanTask, rank: int) -> Iterator[Event]:
        """Yield the computation of a task, in parts between the operations within it."""
        within = (each for each in self._within(task, rank) if len(each[2]) > 1)
        inner = [self._issue(*each, (task, each[2], number)) for number, each in enumerate(within)]
        seconds = seconds_of(self.plan, self.proved.tensors, task, rank) / (len(inner) + 1)
        name = f"{task.kind}{task.micro} {self.plan.blocks[task.block].name}"
        if self._begins(task, rank):
            yield ComputeEvent(name, self.overhead)
        for issue in inner:
            # Parameters are gathered before the task computes.
            if issue.tag != "plan.parameters":
                yield ComputeEvent(name, seconds + REDISTRIBUTION * (issue.kind != "all_reduce"))
            yield issue
            yield WaitEvent(issue.id)
        gathers = sum(issue.tag == "plan.parameters" for issue in inner)
        yield ComputeEvent(name, seconds * (1 + gathers))

    def _begins(self, task: PlanTask, rank: int) -> bool:
        """Return whether a pass of the blocks that run as one begins with a task."""
        firsts, forward = self.proved.firsts, task._replace(kind="F")
        if task.kind == "F":
            return firsts[task, rank] == task
        return firsts.get((forward._replace(block=task.block + 1), rank)) != firsts[forward, rank]

    def _within(self, task: PlanTask, rank: int) -> Iterator[tuple[str, int, tuple[int, ...], str]]:
        """Yield kind, bytes, ranks and tag of the operations within a task, for which the rank waits."""
        plan, index = self.plan, task.block
        block = plan.blocks[index]
        whole = shared_shards(plan, index)
        if plan.held[index] == "parameters":
            whole += round(parameter_share(plan, index, rank) * block.parameters)
        if whole:
            group = next(ranks for ranks in gradient_groups(plan, index, cut=True) if rank in ranks)
            yield "all_gather", whole, group, "plan.parameters"
        for axis, cut in enumerate(plan.cuts[index]):
            if plan.how(index, cut) not in OUTSIDE or task.kind == "W":
                continue
            group = peers(plan, index, axis, rank)
            passes = 2 if task.kind == "B" and plan.recomputed[index] else 1
            share = share_of(self.proved.tensors, task, cut, group)
            for kind, nbytes in [*operations_within(block, cut, share, len(group))] * passes:
                yield kind, nbytes, group, "plan.sums"
