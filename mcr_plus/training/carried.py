"""The state of codecs, carried from a world into the one that replaces it."""

from __future__ import annotations

from typing import Any

import torch

from mcr_plus.pipeline.state import StateTensor, holds_tensors
from mcr_plus.runtime.runtime import Runtime
from mcr_plus.training.transfer import broadcast_state

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


def put_into(runtime: Runtime, carried: Carried, *, is_new: bool) -> None:
    """Give a new world the state of the one before; collective over all its ranks.

    Operations that some survivor has no state of begin anew, on all ranks alike. A rank that is new gets the
    same entries, with zeros: what it has not sent yet is nothing. Call it before models are wrapped for the
    new world.
    """
    comm = runtime.communicator
    answers = comm.all_gather_object(None if is_new else sorted(carried))
    known = [set(keys) for keys in answers if keys is not None]
    common = set.intersection(*known) if known else set()
    if not common:
        return
    if any(keys is None for keys in answers):
        src = next(rank for rank, keys in enumerate(answers) if keys is not None)
        state = {key: carried[key] for key in sorted(common)} if comm.rank == src else None
        received = broadcast_state(state, comm, src)
        if is_new:
            carried = {
                key: {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
                for key, tensors in received.items()
            }
    for group, stage, name in common:
        kept = runtime.restored.setdefault(group, {}).setdefault(stage, {})
        kept[name] = carried[group, stage, name]
        runtime.unmerged.add((group, stage, name))
    for communicator in runtime.communicators:
        if communicator.rank >= 0:
            communicator.pipeline.load_state()
