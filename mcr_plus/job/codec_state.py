"""The state of codecs, carried from a world into the one that replaces it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcr_plus.communicator.transfer import broadcast_state
from mcr_plus.job.runtime import Runtime
from mcr_plus.pipeline.state import StateTensor, holds_tensors

Key = tuple[str, str, str]
"""Group, stage, and name of the operation."""
Carried = dict[Key, dict[str, torch.Tensor]]
"""By operation and name, the tensors of this rank."""


def taken_from(runtime: Runtime) -> Carried:
    """Return what this rank has of the state between calls, such as its residuals; local.

    Of operations whose state is nothing but residuals of each rank. Others begin anew: what ranks share
    (estimates of a sum, counters) still contains the lost ranks, or differs where a failed pass has changed
    it on some ranks, and parts that a rank sums for the others have other borders in another world.
    """
    carried: Carried = {}
    for group, stage, name in runtime.unmerged:
        value = runtime.restored.get(group, {}).get(stage, {}).get(name)
        if holds_tensors(value):
            carried[group, stage, name] = dict(value or {})
    for opened in runtime.groups:
        for (stage, name), value in opened.pipeline.state().items() if opened.group.rank >= 0 else ():
            tensors = _own(value)
            if tensors is not None:
                carried[opened.name, stage, name] = tensors
    return carried


def _own(value: Any) -> dict[str, torch.Tensor] | None:
    if not isinstance(value, list) or not all(isinstance(each, StateTensor) for each in value):
        return None
    if any(each.role != "own" for each in value):
        return None
    return {each.name: each.tensor.detach().clone() for each in value} or None


def put_into(
    runtime: Runtime,
    carried: Carried,
    answers: Sequence[Sequence[Key] | None],
    ranks: Mapping[str, Sequence[int]],
) -> None:
    """Give a new world the state of the one before; collective over all its ranks.

    Operations that some survivor of their group has no state of begin anew, on all ranks alike. A rank that
    is new gets the same entries, with zeros: what it has not sent yet is nothing. Call it before models are
    wrapped for the new world, and groups opened.

    Args:
        carried: see `taken_from`.
        answers: by rank, the keys of that; None for ranks that are new.
        ranks: group → its ranks; all of them for groups that are not in it.
    """
    comm = runtime.communicator
    known = [None if keys is None else set(keys) for keys in answers]
    common = set()
    for key in set[Key]().union(*filter(None, known)):
        having = [known[rank] for rank in ranks.get(key[0], comm.ranks)]
        if all(keys is None or key in keys for keys in having) and any(having):
            common.add(key)
    if None in known and common:
        src = next(rank for rank, keys in enumerate(known) if keys is not None)
        shared = sorted(common & (known[src] or set()))
        received = broadcast_state([carried[key] for key in shared] if comm.rank == src else None, comm, src)
        if known[comm.rank] is None:
            zeros = [{name: torch.zeros_like(each) for name, each in state.items()} for state in received]
            carried = dict(zip(shared, zeros, strict=True))
    for group, stage, name in common & carried.keys():
        if comm.rank in ranks.get(group, comm.ranks):
            kept = runtime.restored.setdefault(group, {}).setdefault(stage, {})
            kept[name] = carried[group, stage, name]
            runtime.unmerged.add((group, stage, name))
    for communicator in runtime.communicators:
        if communicator.rank >= 0:
            communicator.pipeline.load_state()
