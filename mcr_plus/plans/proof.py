"""Proof of a plan before anything runs: tasks, tensors, order.

Every part of every task has a rank; each rank runs its tasks once, in an order that waits for no later task
of any rank; and every rank gets each element of its inputs once, by the proof of `layout`. The order found is
one of all tasks and transfers of all ranks: each rank issues its own in this order, so groups of ranks agree
on theirs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, product
from typing import Any, Final, NamedTuple

import numpy as np

from mcr_plus.errors import InvalidArgument, expect
from mcr_plus.layout import proof as layout_proof
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.program import exchanges
from mcr_plus.layout.regions import Boxes, as_ints, contains, grids, meet
from mcr_plus.plans.blocks import ModelBlock
from mcr_plus.plans.joining import first_tasks
from mcr_plus.plans.language import ALONG_DATA, BlockCut, Kind, ModelPlan, PlanTask, TensorKey
from mcr_plus.plans.sums import shared_groups
from mcr_plus.plans.tensors import Ends, PlanTensors, part_of

EXCHANGES: Final = ("sum", "exchange", "gather", "halo")
"""Cuts with which the parts of a task exchange data within it."""
_BEFORE: Final[dict[Kind, tuple[Kind, ...]]] = {"F": (), "B": ("F",), "W": ("B",)}
_LEAST: Final = 1e-9  # seconds of a task, so that it ends after it begins
_INPUTS: Final = 0.70  # of a backward pass, for the gradients of inputs alone
_WEIGHTS: Final = 0.53  # and of weights: a quarter more for both, because gradients between them are kept


class TaskRun(NamedTuple):
    """A task on the ranks that run it together, which exchange data within it; seconds in the ideal order.

    `start`, `end`: without communication.
    """

    task: PlanTask
    ranks: tuple[int, ...]
    start: float
    end: float


class PlanTransfer(NamedTuple):
    """A tensor of one micro-batch and slice, moved between the tasks that make it and those that need it.

    `tensor`: its number; `gradient`: the gradient of it; `time`: when it is made, in the order of `TaskRun`.
    """

    tensor: int
    micro: int
    slice: int
    gradient: bool
    made: Layout
    needed: Layout
    time: float

    @property
    def tag(self) -> str:
        """Tag of its operations."""
        return "plan.backward" if self.gradient else "plan.forward"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that make or need it."""
        return tuple(sorted({*self.made.ranks, *self.needed.ranks}))


@dataclass(frozen=True)
class ProvedPlan:
    """A plan that is right, and the order of its tasks and transfers on all ranks."""

    plan: ModelPlan
    tensors: PlanTensors
    runs: tuple[TaskRun, ...]
    transfers: tuple[PlanTransfer, ...]

    @cached_property
    def ideal(self) -> float:
        """Seconds of the passes without communication."""
        return max(run.end for run in self.runs)

    @cached_property
    def firsts(self) -> dict[tuple[PlanTask, int], PlanTask]:
        """The task with which each forward pass runs as one; see `joining`."""
        return first_tasks(self)

    def program(self, rank: int) -> list[tuple[tuple[float, int], PlanTask | PlanTransfer]]:
        """Return the tasks and transfers of a rank in the order of all ranks, by (time, 1 for a task)."""
        found: list[tuple[tuple[float, int], PlanTask | PlanTransfer]] = [
            ((each.time, 0), each) for each in self.transfers
            if rank in each.made.locals or rank in each.needed.locals
        ]  # fmt: skip
        found += [((run.start, 1), run.task) for run in self.runs if rank in run.ranks]
        return sorted(found, key=lambda pair: pair[0])  # stable: equal ones stay in the order of all ranks


def prove(plan: ModelPlan) -> ProvedPlan:
    """Return the plan with its order.

    Raises:
        InvalidArgument: the plan is wrong; the text names the task, the rank, and what is missing.
    """
    expect("plan", plan, ModelPlan)
    check_tasks(plan)
    tensors = PlanTensors(plan)
    _check_tensors(plan, tensors)
    runs = _Order(plan, tensors).sorted()
    return ProvedPlan(plan, tensors, runs, tuple(_transfers(plan, tensors, runs)))


# -- tasks --------------------------------------------------------------------------------------------------


def check_tasks(plan: ModelPlan) -> None:
    """Raise `InvalidArgument` unless every part has a rank, and every rank an order of its tasks."""
    for block, places in enumerate(plan.places):
        absent = np.argwhere((places < 0) | (places >= plan.ranks))
        if len(absent):
            micro, slice_, *part = absent[0].tolist()
            rank = int(places[tuple(absent[0])])
            what = f"is on rank {rank}" if rank >= 0 else "has no rank"
            where = f", part {tuple(part)}" if part else ""
            raise InvalidArgument(f"{PlanTask(block, micro, slice_, 'F')}{where} {what}")
        _check_parts(plan, block)
    _check_shared(plan)
    for rank in range(plan.ranks):
        own, order = plan.tasks_of(rank), plan.order_of(rank)
        for task, times in Counter(order).items():
            if task not in own:
                raise InvalidArgument(f"rank {rank}: {task} is in its order, but not on this rank")
            if times > 1:
                raise InvalidArgument(f"rank {rank}: {task} is {times} times in its order")
        if missing := own.difference(order):
            raise InvalidArgument(f"rank {rank}: {min(missing)} is not in its order")
    every = {task for rank in range(plan.ranks) for task in plan.tasks_of(rank)} if plan.befores else set()
    for each in [task for pair in plan.befores for task in pair]:
        if each not in every:
            raise InvalidArgument(f"before: {each} is no task of the plan")


def _check_parts(plan: ModelPlan, block: int) -> None:
    """Raise unless a rank's parts are neighbours, and of parameters the same ones in all its tasks.

    Ranks have the same parts of parameters, or different ones: then their gradients can be added up.
    """
    cuts = plan.cuts[block]
    places = plan.places[block].reshape(-1, *plan.parts(block))
    at = np.indices(places.shape).reshape(places.ndim, -1)
    keys: Any = (slice(None), at[0], places.ravel())
    lows = np.full((len(cuts), len(places), plan.ranks), places.size)
    highs = np.zeros_like(lows)
    counts = np.zeros_like(lows, shape=(1, len(places), plan.ranks))
    np.minimum.at(lows, keys, at[1:])
    np.maximum.at(highs, keys, at[1:] + 1)
    np.add.at(counts, keys, 1)
    own = counts[0] > 0

    def refuse(where: np.ndarray, what: str) -> None:
        for task, rank in np.argwhere(where)[:1].tolist():
            micro, slice_ = divmod(task, plan.slices)
            raise InvalidArgument(f"{PlanTask(block, micro, slice_, 'F')} on rank {rank}: {what}")

    refuse(own & (counts[0] != (highs - lows).prod(axis=0)), "its parts are no neighbours, which form a box")
    copies = [axis for axis, cut in enumerate(cuts) if not cut.axes]
    if copies and plan.blocks[block].random:
        name = plan.blocks[block].name
        raise InvalidArgument(f"{name}: it draws random numbers, which its replicas would not draw alike")
    refuse(own & (highs - lows > 1)[copies].any(axis=0), "it has two replicas")
    if plan.held[block] == "parameters":
        refuse(~own & own.any(axis=0), "it has no part, but its shard of the parameters is needed")
    keyed = [axis for axis, cut in enumerate(cuts) if plan.how(block, cut) not in ALONG_DATA]
    bounds = np.concatenate([lows[keyed], highs[keyed]])
    ranks = np.flatnonzero(own.any(axis=0))
    firsts = bounds[:, own.argmax(axis=0), np.arange(plan.ranks)]
    refuse(
        own & (bounds != firsts[:, None]).any(axis=0), "its parts of the parameters differ from task to task"
    )
    kinds = np.unique(firsts[:, ranks].T, axis=0) if keyed else np.zeros((1, 0), np.int64)
    low, high = np.split(kinds, 2, axis=1)
    if (high - low).prod(axis=1).sum() > np.prod([cuts[axis].parts for axis in keyed]):
        below = high > low[:, None]
        meet = (below & below.swapaxes(0, 1)).all(axis=2) & ~np.eye(len(kinds), dtype=bool)
        of_kind = (firsts.T[:, None] == kinds).all(axis=2)
        one, two = of_kind.argmax(axis=0)[np.argwhere(meet)[0]].tolist()
        text = f"some of its parts of the parameters, but not all, are on rank {two}, too"
        refuse(own & (np.arange(plan.ranks) == one), text)


def _check_shared(plan: ModelPlan) -> None:
    for name, blocks in plan.profile.users.items():
        for ranks in shared_groups(plan, blocks) if len(blocks) > 1 else ():
            for block in blocks if plan.held[blocks[0]] == "parameters" else []:
                if absent := set(ranks).difference(plan.places[block].ravel().tolist()):
                    raise InvalidArgument(
                        f"{plan.blocks[block].name}: its {name} is in shards, one of them on rank "
                        f"{min(absent)}, which has no part of it; hold it whole"
                    )


# -- tensors ------------------------------------------------------------------------------------------------


def _check_tensors(plan: ModelPlan, tensors: PlanTensors) -> None:
    proved: set[Ends] = set()
    for tensor, micro, slice_, gradient in _all_tensors(plan):
        ends = (tensors.gradients if gradient else tensors.values)(tensor, micro, slice_)
        if ends in proved:
            continue
        proved.add(ends)
        task = PlanTask(tensor - gradient, micro, slice_, "B" if gradient else "F")
        for rank in ends.needed.ranks:
            if missing := _missing(ends.made, ends.needed, rank):
                what = "gradient of output" if gradient else "input"
                raise InvalidArgument(f"{task} on rank {rank}: {missing} of its {what} is made by no task")
        if wrong := _unproved(ends.made, ends.needed):
            raise InvalidArgument(f"{task}: {wrong}")
    ends_of = (0, len(plan.blocks) - 1)  # their outer ends are tensors of no other block
    for block, micro, slice_ in product(ends_of, range(plan.micro_batches), range(plan.slices)):
        tensors.end(block, "input", micro, slice_)


def _all_tensors(plan: ModelPlan) -> Iterator[TensorKey]:
    counts = range(1, len(plan.blocks)), range(plan.micro_batches), range(plan.slices)
    for tensor, micro, slice_ in product(*counts):
        yield tensor, micro, slice_, False
        if not plan.blocks[tensor - 1].detached:
            yield tensor, micro, slice_, True


def _missing(made: Layout, needed: Layout, rank: int) -> str | None:
    """Return the box of a rank of which some element is in no box of some addend; None if there is none."""
    for piece in needed.pieces(rank).tolist():
        low, high = needed.held.lows[piece], needed.held.highs[piece]
        for addend in range(made.addend_count):
            _, (lows, highs) = meet(low, high, made.held.take(made.addends == addend))
            if not all(count.all() for _, count in grids(Boxes(lows - low, highs - low), tuple(high - low))):
                return f"box {list(zip(low.tolist(), high.tolist(), strict=True))}"
    return None


def _unproved(made: Layout, needed: Layout) -> str | None:
    """Return the error in the direct exchange between two layouts; None if it is proved."""
    ranks = as_ints(sorted({*made.ranks, *needed.ranks}))
    direct = exchanges(made, needed, 4)[0].steps[0]
    parts = [direct.part(rank) for rank in ranks.tolist()]
    wrong = (layout_proof.check(part, made, needed) for part in parts)
    return next(filter(None, wrong), None) or layout_proof.unlike(parts, ranks)


@lru_cache(maxsize=1024)
def is_local(ends: Ends) -> bool:
    """Return whether every rank that needs a part of a tensor has made it."""
    made, needed = ends
    if made.is_partial:
        return False
    for rank in needed.ranks:
        own, pieces = made.pieces(rank), needed.pieces(rank)
        if not len(own) or not all(contains(made.held.take(own[:1]), needed.held.take(pieces))):
            return False
    return True


# -- order --------------------------------------------------------------------------------------------------


class _Order:
    """Graph of runs: a run waits for its rank's last one, for its inputs, and for what the plan says."""

    def __init__(self, plan: ModelPlan, tensors: PlanTensors) -> None:
        self.plan, self.tensors = plan, tensors
        self.runs: list[tuple[PlanTask, tuple[int, ...]]] = []
        self.of: dict[PlanTask, dict[int, int]] = defaultdict(dict)
        counts = len(plan.blocks), plan.micro_batches, plan.slices
        for block, micro, slice_ in product(*map(range, counts)):
            for ranks in _together(plan, block, micro, slice_):
                for kind in plan.kinds(block):
                    task = PlanTask(block, micro, slice_, kind)
                    self.of[task].update(dict.fromkeys(ranks, len(self.runs)))
                    self.runs.append((task, ranks))
        self.befores = [set[int]() for _ in self.runs]
        for rank in range(plan.ranks):
            for first, second in pairwise(plan.order_of(rank)):
                self.befores[self.of[second][rank]].add(self.of[first][rank])
        for number, (task, ranks) in enumerate(self.runs):
            self.befores[number].update(self._inputs(task, ranks))
        for first, second in plan.befores:
            for number in self.of[second].values():
                self.befores[number].update(self.of[first].values())

    def _inputs(self, task: PlanTask, ranks: tuple[int, ...]) -> Iterator[int]:
        """Yield the runs that make what a run needs."""
        block, micro, slice_, kind = task
        near = [task._replace(kind=before) for before in _BEFORE[kind]]
        sequence = self.plan.blocks[block].axes.get("sequence")
        if sequence is not None and sequence.how == "gather" and kind != "W":
            other = slice_ + (1 if kind == "B" else -1)
            near += [task._replace(slice=other)] if 0 <= other < self.plan.slices else []
        last = block == len(self.plan.blocks) - 1
        if block and kind == "F":
            maker, ends = task._replace(block=block - 1), self.tensors.values(block, micro, slice_)
        elif kind == "B" and not last:
            maker, ends = task._replace(block=block + 1), self.tensors.gradients(block + 1, micro, slice_)
        else:
            maker, ends = None, None
        if maker is not None and ends is not None:
            if is_local(ends):
                near.append(maker)
            else:
                yield from self.of[maker].values()
        for each in near:
            if absent := set(ranks).difference(self.of[each]):
                raise InvalidArgument(f"{task} on rank {min(absent)}: it needs {each}, which is elsewhere")
            yield from (self.of[each][rank] for rank in ranks)

    def sorted(self) -> tuple[TaskRun, ...]:
        """Return the runs by their starts without communication. Raises `InvalidArgument` for a circle."""
        graph = TopologicalSorter[int](dict.fromkeys(range(len(self.runs)), ()))
        for number, befores in enumerate(self.befores):
            graph.add(number, *befores)
        found: list[TaskRun] = []
        ends = [0.0] * len(self.runs)
        try:
            for number in graph.static_order():
                task, ranks = self.runs[number]
                start = max((ends[before] for before in self.befores[number]), default=0.0)
                seconds = max(seconds_of(self.plan, self.tensors, task, rank) for rank in ranks)
                ends[number] = start + max(seconds, _LEAST)
                found.append(TaskRun(task, ranks, start, ends[number]))
        except CycleError as error:  # each is before the next one, and the last is the first
            circle = [self.runs[number] for number in error.args[1][:0:-1]]
            names = [f"{task} on rank {ranks[0]}" for task, ranks in circle[:4]]
            more = ", …" if len(circle) > 4 else ""
            text = f"order: tasks wait for each other: {' for '.join(names)}{more}"
            raise InvalidArgument(text) from None
        return tuple(sorted(found, key=lambda run: run.start))  # stable: equal ones stay in this order


def _together(plan: ModelPlan, block: int, micro: int, slice_: int) -> list[tuple[int, ...]]:
    """Return the groups of ranks that run a task together, because they exchange data within it."""
    places = plan.places[block][micro, slice_]
    axes = [
        axis for axis, cut in enumerate(plan.cuts[block])
        if plan.how(block, cut) in EXCHANGES
        or (plan.held[block] == "parameters" and plan.how(block, cut) in ALONG_DATA)
    ]  # fmt: skip
    rows = np.moveaxis(places, axes, range(places.ndim - len(axes), places.ndim))
    groups: list[set[int]] = []
    for row in rows.reshape(-1, int(np.prod([places.shape[axis] for axis in axes]))):
        own = set(row.tolist())
        for other in [each for each in groups if each & own]:
            groups.remove(other)
            own |= other
        groups.append(own)
    return [tuple(sorted(each)) for each in groups]


def _transfers(plan: ModelPlan, tensors: PlanTensors, runs: Sequence[TaskRun]) -> Iterator[PlanTransfer]:
    ends: dict[PlanTask, float] = defaultdict(float)
    for run in runs:
        ends[run.task] = max(ends[run.task], run.end)
    for tensor, micro, slice_, gradient in _all_tensors(plan):
        both = (tensors.gradients if gradient else tensors.values)(tensor, micro, slice_)
        if not is_local(both):
            maker = PlanTask(tensor - 1 + gradient, micro, slice_, "B" if gradient else "F")
            yield PlanTransfer(tensor, micro, slice_, gradient, *both, ends[maker])


def share_of(tensors: PlanTensors, task: PlanTask, cut: BlockCut, group: Sequence[int]) -> float:
    """Return the share in a block's whole input of what a group of ranks sums or exchanges for a cut.

    The same on all of them: each has all of it, or, if the input is cut `outside`, they have it together.
    """
    ranks = group if cut.outside else group[:1]
    return sum(tensors.share(task.block, task.micro, task.slice, rank) for rank in ranks)


def work_share(plan: ModelPlan, tensors: PlanTensors, task: PlanTask, rank: int) -> float:
    """Return the share of a rank's parts of a task in the block's pass over the whole batch."""
    share = tensors.share(task.block, task.micro, task.slice, rank)
    return share * parameter_share(plan, task.block, rank, outside=False)


def shared_shards(plan: ModelPlan, block: int) -> int:
    """Return the bytes of parameters in shards that a block uses, and an earlier block holds."""
    one, users = plan.blocks[block], plan.profile.users
    firsts = ((name, users[name][0]) for name in one.names - one.params.keys())
    return sum(plan.blocks[at].params[name] for name, at in firsts if plan.held[at] == "parameters")


def parameter_share(plan: ModelPlan, block: int, rank: int, *, outside: bool = True) -> float:
    """Return the share of a block's parameters that a rank's parts use.

    `outside`: count also cuts that divide input and output.
    """
    share = 1.0
    for cut, own in own_parts(plan, block, rank):
        if plan.how(block, cut) not in (*ALONG_DATA, "replicas") and (outside or cut.outside is None):
            share *= max(share_along(plan.blocks[block], name, cut, own) for name in cut.axes)
    return share


def own_parts(plan: ModelPlan, block: int, rank: int) -> list[tuple[BlockCut, list[int]]]:
    """Return the cuts of a block, and the numbers of the parts along each that a rank has."""
    if not plan.cuts[block]:
        return []
    at = np.argwhere(plan.places[block] == rank)
    return [(cut, np.unique(at[:, 2 + axis]).tolist()) for axis, cut in enumerate(plan.cuts[block])]


def share_along(block: ModelBlock, name: str, cut: BlockCut, parts: Sequence[int]) -> float:
    """Return the share of some parts of a cut in an axis of parameters, whose units need not divide."""
    units = block.axes[name].parts[0]
    bounds = (part_of((0, units), cut.parts, number) for number in parts)
    return sum(high - low for low, high in bounds) / units


def seconds_of(plan: ModelPlan, tensors: PlanTensors, task: PlanTask, rank: int) -> float:
    """Return the seconds of a rank's parts of a task.

    In proportion to their sizes; what is beside the modules that a cut of parameters divides, all ranks
    compute.
    """
    block, share = plan.blocks[task.block], tensors.share(task.block, task.micro, task.slice, rank)
    params, turns = float(block.parameters), 0
    for cut, own in own_parts(plan, task.block, rank):
        how = plan.how(task.block, cut)
        if how in (*ALONG_DATA, "replicas"):
            continue
        axes = [block.axes[name] for name in cut.axes]
        left = [1 - share_along(block, name, cut, own) for name in cut.axes]
        params -= sum(axis.params * part for axis, part in zip(axes, left, strict=True))
        if cut.outside is None:
            work = sum(axis.work * part for axis, part in zip(axes, left, strict=True))
            share *= 1 - work / max(sum(axis.work for axis in axes), 1.0)
        if how == "sum" and len(own) > 1:  # one after another, each again for its backward pass
            turns += len(own) * len(cut.axes)
    forward = block.forward_fixed + (block.forward - block.forward_fixed) * share
    forward += turns * plan.profile.turn / 2
    if task.kind == "F":
        return forward
    backward = block.backward_fixed + (block.backward - block.backward_fixed) * share
    backward += block.accumulate * params / max(block.parameters, 1)
    again = forward if task.kind == "B" and (plan.recomputed[task.block] or turns) else 0.0
    if not plan.split[task.block]:
        return again + backward
    if all(rank in places for places in plan.places[: task.block]):  # no gradient goes further back
        return again if task.kind == "B" else backward
    return again + (_INPUTS if task.kind == "B" else _WEIGHTS) * backward
