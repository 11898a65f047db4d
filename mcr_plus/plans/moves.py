"""Groups of a plan, and communication within its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mcr_plus.api import autograd
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.job.init import new_group
from mcr_plus.layout.autograd import redistribute
from mcr_plus.layout.layout import Layout
from mcr_plus.plans.cutting import Move, same
from mcr_plus.plans.proof import EXCHANGES, ProvedPlan
from mcr_plus.plans.slices import PastSlices
from mcr_plus.plans.sums import gradient_groups, peers, shared_groups

Comms = Mapping[tuple[int, ...], Communicator]


def moves(
    proved: ProvedPlan, block: int, axis: int, rank: int, comms: Comms, past: PastSlices
) -> tuple[Move, Move]:
    """Return the communication of the input of a rank's parts, and of the sum of their outputs.

    `past`: it knows the present pass, as micro-batches may have other sizes.
    """
    plan, cut = proved.plan, proved.plan.cuts[block][axis]
    ranks = peers(plan, block, axis, rank)
    if plan.how(block, cut) == "columns" or len(ranks) == 1:
        return same, same
    comm, tag = comms[ranks], "plan.sums"
    if cut.outside is None:
        enter, leave = autograd.replicate, autograd.all_reduce
        return partial(enter, group=comm, tag=tag), partial(leave, group=comm, tag=tag)
    dim = plan.blocks[block].axes[cut.outside].dims[0]
    inputs = {
        at: proved.tensors.end(block, "input", *at)
        for at in product(range(plan.micro_batches), range(plan.slices))
    }  # fmt: skip
    sizes = {at: tuple(each.locals[rank][dim] for rank in ranks) for at, each in inputs.items()}
    gather, add = (_AlongDim(ranks, dim, sizes, past, comm, tag, sums=sums) for sums in (False, True))
    return gather, add


class PlanGroups(NamedTuple):
    """Groups by their ranks: within tasks, of transfers, and of gradients.

    They are apart, because a rank that runs several blocks as one issues what is between them later.
    """

    tasks: Comms
    transfers: Comms
    gradients: Comms


def open_groups(proved: ProvedPlan) -> PlanGroups:
    """Open the groups of a plan, in one order on all ranks."""
    plan = proved.plan
    tasks, gradients = set[tuple[int, ...]](), set[tuple[int, ...]]()
    for block, cuts in enumerate(plan.cuts):
        for cut in (False, True):
            gradients.update(gradient_groups(plan, block, cut=cut))
        for axis, cut_ in enumerate(cuts):
            if plan.how(block, cut_) in EXCHANGES:
                tasks |= {peers(plan, block, axis, rank) for rank in np.unique(plan.places[block]).tolist()}
    for blocks in plan.profile.users.values():
        gradients.update(shared_groups(plan, blocks) if len(blocks) > 1 else ())
    each = (tasks, {transfer.ranks for transfer in proved.transfers}, gradients)
    opened = [{ranks: new_group(ranks) for ranks in sorted(some) if len(ranks) > 1} for some in each]
    return PlanGroups(*opened)


class _AlongDim:
    """Gathers the parts of ranks along a dimension, or with `sums` adds up addends of all, and cuts them."""

    def __init__(
        self, ranks: tuple[int, ...], dim: int, sizes: Mapping[tuple[int, int], tuple[int, ...]],
        past: PastSlices, comm: Communicator, tag: str, *, sums: bool,
    ) -> None:  # fmt: skip
        self.ranks, self.dim, self.sizes, self.past, self.sums = ranks, dim, sizes, past, sums
        self._redistribute = partial(redistribute, replicas="sum", group=comm, tag=tag)
        self._known: dict[object, tuple[Layout, Layout]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        shape, sizes = tuple(x.shape), self.sizes[self.past.now.micro, self.past.now.slice]
        key = shape, sizes
        if key not in self._known:
            whole = (*shape[: self.dim], sum(sizes), *shape[self.dim + 1 :])
            parts = Layout.sharded(whole, self.ranks, self.dim, sizes)
            all_ = Layout.mesh(whole, self.ranks, ["P" if self.sums else "R"])
            self._known[key] = (all_, parts) if self.sums else (parts, all_)
        return self._redistribute(x, *self._known[key])
