"""What codecs and online refinement keep between calls, saved and taken back by any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeGuard

import torch

from mcr_plus.communicator import Communicator
from mcr_plus.compression.memory import Kept
from mcr_plus.compression.stage import CompressStage, Owner
from mcr_plus.errors import InvalidArgument
from mcr_plus.runtime import Runtime, current
from mcr_plus.selection.stage import SelectStage

_VERSION: Final = 1
State = dict[str, dict[str, dict[str, torch.Tensor]]]
"""Group → what it is for → name → tensor."""


def state_dict() -> dict[str, Any]:
    """What the pipeline keeps between calls. Collective over all ranks.

    `codecs`: residuals and the like. `tuner`: what online refinement (`select: {online: true}`) has
    found out, for jobs in which the same operations have the same candidates. Every rank gets the same,
    as CPU tensors, so that one rank can save it. Of what differs between ranks, such as residuals, it
    holds the mean, because their mean is all that the next steps depend on: so it is as large as one
    rank's share and fits any number of ranks. Nothing may be in flight.
    """
    runtime = current()
    mine: State = {group: dict(kept) for group, kept in runtime.restored.items() if kept}
    found = {group: dict(kept) for group, kept in runtime.found.items() if kept}
    for comm in runtime.communicators:
        if comm.rank < 0:
            continue
        for stage in comm.stages:
            if isinstance(stage, SelectStage) and stage.found:
                found[comm.name] = stage.found
        for name, owner in sorted(_owners(comm)):
            if owner.restored:  # nobody has asked for it since it was loaded
                mine.setdefault(comm.name, {})[name] = owner.restored
            elif owner.known is not None and owner.known.kept:
                kept = {each.name: _shared(comm, each) for each in owner.known.kept}
                mine.setdefault(comm.name, {})[name] = kept
    codecs: State = {}
    tuner: dict[str, Any] = {}
    ours = (mine, found)
    for theirs, learnt in runtime.communicator.all_gather_object(ours) if _differ(runtime) else [ours]:
        codecs.update(theirs)  # the members of a group all have the same of it
        tuner.update(learnt)
    return {"version": _VERSION, "codecs": codecs, "tuner": tuner}


def _differ(runtime: Runtime) -> bool:
    """Whether ranks know different groups; one that is left over on some ranks alone counts on all."""
    differ = any(each.group.size != runtime.world.size for each in runtime.groups)
    return any(runtime.communicator.all_gather_object(differ))


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Take back what `state_dict` gave, on every rank; for groups and operations that come later too.

    What an operation had kept is found by its kind, dtype, shape, tag and codec, and by the parameters of a
    bucket; what is not asked for is left alone. What was found out about libraries holds for operations
    that are issued for the first time from now on. Raises `InvalidArgument` for anything but a state.
    """
    codecs = state.get("codecs") if isinstance(state, Mapping) else None
    if not _is_state(codecs) or state.get("version") != _VERSION or not _is_found(state.get("tuner", {})):
        raise InvalidArgument("state: expected what mcr.state_dict() returned")
    runtime = current()
    for group, kept in codecs.items():
        runtime.restored.setdefault(group, {}).update(kept)
    for group, learnt in state.get("tuner", {}).items():
        runtime.found.setdefault(group, {}).update(learnt)
    for comm in runtime.communicators:
        if comm.rank >= 0:
            for name, owner in _owners(comm):
                found = runtime.restored.get(comm.name, {}).pop(name, None)
                if found is not None:
                    owner.restore(found)


def _is_state(codecs: object) -> TypeGuard[State]:
    """Whether this is group → operation → name → tensor."""

    def tensors(kept: object) -> bool:
        return _all_are(kept, lambda each: isinstance(each, torch.Tensor))

    return _all_are(codecs, lambda group: _all_are(group, tensors))


def _is_found(tuner: object) -> bool:
    """Whether this is group → operation → choice and the rest."""
    return _all_are(
        tuner, lambda group: _all_are(group, lambda each: isinstance(each, Mapping) and "choice" in each)
    )


def _all_are(values: object, check: Callable[[object], bool]) -> bool:
    return isinstance(values, Mapping) and all(map(check, values.values()))


def _owners(comm: Communicator) -> Iterator[tuple[str, Owner]]:
    for stage in comm.stages:
        if isinstance(stage, CompressStage):
            yield from stage.owners.items()


def _shared(comm: Communicator, kept: Kept) -> torch.Tensor:
    """A tensor as all ranks together have it."""
    tensor = kept.tensor.detach().clone()
    if kept.role == "own":
        comm.all_reduce(tensor, "AVG", compress=False)
    elif kept.role == "shard":
        counts = comm.all_gather_object(tensor.numel())
        parts = [torch.empty(count, dtype=tensor.dtype, device=tensor.device) for count in counts]
        comm.all_gather_v(parts, tensor, compress=False)
        tensor = torch.cat(parts)
    return tensor.cpu()
