"""Blocks that a rank runs as one, with one graph of autograd."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from mcr_plus.plans.language import ModelPlan, PlanTask

if TYPE_CHECKING:
    from mcr_plus.plans.proof import ProvedPlan


def joined_blocks(proved: ProvedPlan, rank: int) -> dict[PlanTask, tuple[int, int]]:
    """Return the first and last block of the graph of each task of this rank.

    Neighbours run as one if they follow each other in every pass, and the tensor between them stays.
    """
    firsts = {task: first for (task, one), first in proved.firsts.items() if one == rank}
    last = {first: task.block for task, first in firsts.items()}  # in the order of the passes
    return {
        task._replace(kind=kind): (first.block, last[first])
        for task, first in firsts.items() for kind in proved.plan.kinds(task.block)
    }  # fmt: skip


def first_tasks(proved: ProvedPlan) -> dict[tuple[PlanTask, int], PlanTask]:
    """Return the task with which the graph of each forward pass begins, by task and rank.

    Ranks that exchange data within a task join it alike, at the same time: a rank that waits for another one
    in the middle of a graph has not begun the transfers in between, for which that one may wait.
    """
    plan = proved.plan
    pairs = [set(pairwise(plan.order_of(rank))) for rank in range(plan.ranks)]
    runs = {(run.task, rank): run for run in proved.runs for rank in run.ranks}
    found: dict[tuple[PlanTask, int], PlanTask] = {}

    def joins(before: PlanTask, task: PlanTask, ranks: set[int]) -> bool:
        if not all((before, rank) in found and (task, rank) in runs for rank in ranks):
            return False
        kinds, back = plan.kinds(task.block), task._replace(kind="B")
        starts = {runs[found[before, rank], rank].start for rank in ranks}
        backs = {runs[back, rank].start for rank in ranks if "B" in kinds}
        alike = len(starts) == 1 and len(backs) < 2 and _is_one(proved, before, task)
        return alike and all(_follow(plan, before, task, pairs[rank]) for rank in ranks)

    for run in proved.runs:
        if run.task.kind != "F":
            continue
        before = run.task._replace(block=run.task.block - 1)
        earlier = (runs[before, rank].ranks for rank in run.ranks if (before, rank) in runs)
        as_one = joins(before, run.task, set(run.ranks).union(*earlier))
        for rank in run.ranks:
            found[run.task, rank] = found[before, rank] if as_one else run.task
    return found


def _follow(
    plan: ModelPlan, before: PlanTask, after: PlanTask, pairs: set[tuple[PlanTask, PlanTask]]
) -> bool:
    for kind in plan.kinds(after.block):
        one, two = before._replace(kind=kind), after._replace(kind=kind)
        if ((one, two) if kind == "F" else (two, one)) not in pairs:
            return False
    return True


def _is_one(proved: ProvedPlan, before: PlanTask, after: PlanTask) -> bool:
    plan, both = proved.plan, (before.block, after.block)
    if plan.kinds(before.block) != plan.kinds(after.block):
        return False
    if any(plan.recomputed[block] or plan.held[block] == "parameters" for block in both):
        return False
    values = proved.tensors.values(after.block, after.micro, after.slice)
    gradients = proved.tensors.gradients(after.block, after.micro, after.slice)
    return values.made == values.needed and not gradients.made.is_partial
