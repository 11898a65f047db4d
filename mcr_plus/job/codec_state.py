"""The state of codecs, carried from a world into its replacement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcr_plus.communicator.transfer import broadcast_state
from mcr_plus.job.runtime import Runtime
from mcr_plus.pipeline.state import StateTensor, holds_tensors

Key = tuple[str, str, str]
"""Group, stage, and operation name."""
Carried = dict[Key, dict[str, torch.Tensor]]
"""This rank's tensors, by operation and tensor name."""


def taken_from(runtime: Runtime) -> Carried:
    """Return this rank's codec state between calls, such as residuals; local.

    Only operations whose state consists of each rank's residuals are included. Others start anew. State that
    ranks share (estimates of a sum, counters) still contains the lost ranks' part, or differs where a failed
    pass has changed it on some ranks; and the parts that a rank sums for others have other boundaries in
    another world.
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
    """Put codec state of the previous world into a new one; collective over all its ranks.

    Operations for which a survivor of their group has no state start anew, on all ranks alike. A new rank
    gets the same entries, with zeros: it has no values left to send. Call this before models are wrapped for
    the new world, and groups opened.

    Args:
        carried: see `taken_from`.
        answers: the keys of `carried` by rank; None for new ranks.
        ranks: group → its ranks; groups that are not in it have all ranks.
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
