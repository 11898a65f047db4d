"""Save and load the state of stages, such as residuals of codecs, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.errors import InvalidArgument
from mcr_plus.job.init import current
from mcr_plus.job.process import job
from mcr_plus.job.runtime import Runtime
from mcr_plus.pipeline.state import StateTensor, holds_tensors

_VERSION: Final = 1
_KEYS: Final = {
    "compress": "codecs",
    "select": "tuner",
    "plan": "plans",
}  # other stages are saved under "stages"


def state_dict() -> dict[str, Any]:
    """Return the state that the pipeline keeps between calls. Collective over all ranks.

    `codecs`: group → operation → name → tensor, such as residuals. `tuner`: group → operation → the results
    of online refinement (`select: {online: true}`), valid for jobs whose operations have the same candidates.
    `plans`: group → model → the buckets that a trial of `fuse: {plan: auto}` has chosen. A job that loads
    them before its first backward pass uses them if the model and the numbers of ranks, nodes and ranks per
    node are the same; otherwise it plans again. Models with cuts chosen in the job
    (`mcr.compile(cuts="auto")`) are not saved, so each job searches again. `stages`: stage → group → the
    state of other stages.

    Every rank gets the same state, as CPU tensors, so that one rank can save it. Tensors that differ between
    ranks, such as residuals, are averaged, because later steps depend only on their mean. So the state is as
    large as one rank's share and fits any number of ranks. No operation may be in flight.

    Raises:
        NotInitialized: there is no job.

    Example:
        ```python
        saved = mcr.state_dict()  # on every rank; `torch.save` on one
        mcr.load_state_dict(saved)
        ```
    """
    runtime = current()
    mine: dict[str, dict[str, dict[str, Any]]] = {}  # stage → group → entry
    for group, stages in runtime.restored.items():
        for stage, entries in stages.items():
            if entries:
                mine.setdefault(stage, {})[group] = dict(entries)
    for comm in runtime.communicators:
        for (stage, entry), value in sorted(comm.pipeline.state().items()) if comm.rank >= 0 else ():
            mine.setdefault(stage, {}).setdefault(comm.name, {})[entry] = _merged(comm, value)
    _merge_carried(runtime, mine)
    everything: dict[str, dict[str, Any]] = {stage: {} for stage in _KEYS}
    for theirs in runtime.communicator.all_gather_object(mine) if _differ(runtime) else [mine]:
        for stage, groups in theirs.items():
            everything.setdefault(stage, {}).update(groups)  # equal on all members of a group
    known = {key: everything.pop(stage) for stage, key in _KEYS.items()}
    return {"version": _VERSION, **known, "stages": everything}


def _merge_carried(runtime: Runtime, mine: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Merge state entries carried over from the previous world, where each rank kept its own values.

    All ranks have the same entries. Entries used by operations since are already merged and stay unchanged.
    """
    for comm in runtime.communicators:
        for group, stage, entry in sorted(runtime.unmerged):
            value = mine.get(stage, {}).get(group, {}).get(entry, ())
            if group == comm.name and comm.rank >= 0 and holds_tensors(value):
                own = [StateTensor(name, "own", tensor) for name, tensor in sorted(dict(value).items())]
                mine[stage][group][entry] = _merged(comm, own)


def _differ(runtime: Runtime) -> bool:
    """Return True, on all ranks, if any rank has a group of fewer ranks than the world."""
    differ = any(each.group.size != runtime.world.size for each in runtime.groups)
    return any(runtime.communicator.all_gather_object(differ))


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Load the result of `state_dict`, on every rank; it also applies to later groups and operations.

    The state of an operation is looked up by its kind, dtype, shape, tag and codec, and by the parameters of
    a bucket; entries without a matching operation are kept. Results of online refinement apply only to
    operations that have not been issued before.

    Args:
        state: the result of `state_dict`, in this job or another; its tensors are copied, not kept.

    Raises:
        InvalidArgument: `state` is anything else.

    Example:
        ```python
        mcr.load_state_dict(mcr.state_dict())
        ```
    """
    if not isinstance(state, Mapping) or not _is_valid(state):
        raise InvalidArgument("state: expected what mcr.state_dict() returned")
    runtime = current()
    named = {stage: state.get(key, {}) for stage, key in _KEYS.items()}
    for stage, groups in {**named, **state.get("stages", {})}.items():
        for group, entries in groups.items():
            runtime.restored.setdefault(group, {}).setdefault(stage, {}).update(entries)
    for comm in runtime.communicators:
        if comm.rank >= 0:
            comm.pipeline.load_state()


def _is_valid(state: Mapping[str, Any]) -> bool:
    def is_choice(entry: object) -> bool:
        return isinstance(entry, Mapping) and "choice" in entry

    def is_plan(entry: object) -> bool:
        return all(hook.accepts("plan", entry) for hook in job.hooks)

    def is_group(entries: object) -> bool:
        return isinstance(entries, Mapping)

    return (
        state.get("version") == _VERSION
        and _all_are(state.get("codecs"), lambda group: _all_are(group, holds_tensors))
        and _all_are(state.get("tuner", {}), lambda group: _all_are(group, is_choice))
        and _all_are(state.get("plans", {}), lambda group: _all_are(group, is_plan))
        and _all_are(state.get("stages", {}), lambda stage: _all_are(stage, is_group))
    )


def _all_are(values: object, check: Callable[[object], bool]) -> bool:
    return isinstance(values, Mapping) and all(map(check, values.values()))


def _merged(comm: Communicator, value: Any) -> Any:
    """Return an entry of a stage's state, merged over the ranks."""
    if isinstance(value, list) and all(isinstance(each, StateTensor) for each in value):
        return {each.name: _shared(comm, each) for each in value}
    return value


def _shared(comm: Communicator, state: StateTensor) -> torch.Tensor:
    tensor = state.tensor.detach().clone()
    if state.role == "own":
        comm.all_reduce(tensor, "AVG", compress=False)
    elif state.role == "shard":
        counts = comm.all_gather_object(tensor.numel())
        parts = [torch.empty(count, dtype=tensor.dtype, device=tensor.device) for count in counts]
        comm.all_gather_v(parts, tensor, compress=False)
        tensor = torch.cat(parts)
    return tensor.cpu()
