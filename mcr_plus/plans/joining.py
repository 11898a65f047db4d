"""Blocks that a rank runs as one, with one graph of autograd."""

from __future__ import annotations

from itertools import pairwise

from mcr_plus.plans.language import PlanTask
from mcr_plus.plans.proof import ProvedPlan


def joined_blocks(proved: ProvedPlan, rank: int) -> dict[PlanTask, tuple[int, int]]:
    """Return the first and last block of the graph of each task of this rank.

    Neighbours run as one if they follow each other in every pass, and the tensor between them stays.
    """
    plan, order = proved.plan, proved.plan.order_of(rank)
    pairs = set(pairwise(order))
    first: dict[PlanTask, PlanTask] = {}
    last: dict[PlanTask, int] = {}
    for task in order:
        if task.kind == "F":
            before = task._replace(block=task.block - 1)
            joins = before in first and _is_one(proved, before, task, pairs)
            first[task] = first[before] if joins else task
            last[first[task]] = task.block
    return {
        task._replace(kind=kind): (begin.block, last[begin])
        for task, begin in first.items() for kind in plan.kinds(task.block)
    }  # fmt: skip


def _is_one(
    proved: ProvedPlan, before: PlanTask, after: PlanTask, pairs: set[tuple[PlanTask, PlanTask]]
) -> bool:
    plan, both = proved.plan, (before.block, after.block)
    if plan.kinds(before.block) != plan.kinds(after.block):
        return False
    if any(plan.recomputed[block] or plan.held[block] == "parameters" for block in both):
        return False
    for kind in plan.kinds(after.block):
        one, two = before._replace(kind=kind), after._replace(kind=kind)
        if ((one, two) if kind == "F" else (two, one)) not in pairs:
            return False
    values = proved.tensors.values(after.block, after.micro, after.slice)
    gradients = proved.tensors.gradients(after.block, after.micro, after.slice)
    return values.made == values.needed and not gradients.made.is_partial
