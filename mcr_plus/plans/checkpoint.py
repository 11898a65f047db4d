"""Checkpoints of plans: one plain state dict out of the parts of all ranks, and back into any plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.job.init import world
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.state import redistribution

if TYPE_CHECKING:
    from mcr_plus.plans.run import ParallelModel
    from mcr_plus.plans.sums import GradientBucket

Bounds = list[tuple[int, int]]


def boxes_of(param: nn.Parameter) -> tuple[tuple[int, ...], list[Bounds]]:
    """Return the shape of a parameter before it was cut, and the boxes of it that this one has, in order."""
    shape, cut, parts, count = getattr(param, "mcr_cut", (tuple(param.shape), None, (0, 1), 1))
    whole: Bounds = [(0, size) for size in shape]
    if cut is None:
        return shape, [whole]
    unit = shape[cut.dim] // cut.sections // count
    found = []
    for section in range(cut.sections):
        box = whole.copy()
        box[cut.dim] = tuple(unit * (section * count + part) for part in parts)
        found.append(box)
    return shape, found


def state_dict(parallel: ParallelModel, to: int = 0) -> dict[str, Tensor]:
    """Return the parameters of the whole model by name on rank `to`, and nothing on the others; collective.

    Buffers are those of rank `to`; for the optimizer see `optimizer_state_dict`.
    """
    # All shards of ZeRO-3 are gathered at once: a checkpoint needs the memory of the rank's whole blocks.
    for bucket in parallel.buckets:
        if bucket.held == "parameters":
            bucket.gather(exact=True)
    whole = _whole(parallel, parallel.parameters(), to)
    for bucket in parallel.buckets:
        bucket.drop()
    if parallel.rank != to:
        return {}
    whole |= {name: whole[first] for name, first in parallel.aliases.items()}
    for path, value in parallel.module.named_buffers(remove_duplicate=False):
        cut = next((cut for cut in parallel.cut if path.startswith(f"{cut}.inner.")), None)
        name = path if cut is None else cut + path[len(f"{cut}.inner") :]
        whole |= {name: value.detach().clone()} if name in parallel.persistent else {}
    return whole


def load_state_dict(parallel: ParallelModel, state: Mapping[str, Tensor]) -> None:
    """Set this rank's parts from the parameters of the whole model; every rank passes those that it has.

    Raises:
        InvalidArgument: a parameter is missing, or has another shape; nothing has changed then.
    """
    own = parallel.parameters()
    for name, param in own.items():
        shape = boxes_of(param)[0]
        if name not in state or tuple(state[name].shape) != shape:
            got = f"got {list(state[name].shape)}" if name in state else "it is missing"
            got += "" if state else ", as on ranks other than 0 without `mcr.broadcast_object`"
            raise InvalidArgument(f"state: {name}: expected shape {list(shape)}, {got}")
    for bucket in parallel.buckets:
        if bucket.held == "parameters":
            bucket.gather()
    with torch.no_grad():
        for name, param in own.items():
            param.copy_(_own(param, state[name]))
        for bucket in parallel.buckets:
            bucket.keep()


def optimizer_state_dict(parallel: ParallelModel, to: int = 0) -> dict[str, Any]:
    """Return the optimizer's state of the whole model on rank `to`, and nothing on the others; collective.

    It has torch's form with names, `{"state": {name: {"step": …, "exp_avg": …}}, "param_groups": …}`, that of
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.

    Raises:
        Unsupported: on all ranks: part of the state has neither the parameter's shape nor is a scalar.
    """
    scalars: dict[str, dict[str, Any]] = {}
    tensors: dict[str, list[tuple[GradientBucket, Tensor, list[str]]]] = {}
    wrong = ""
    for bucket, own, names in _optimized(parallel):
        for key, value in parallel.optimizer.state.get(own, {}).items():
            if _is_part(key, value, own.shape):
                tensors.setdefault(key, []).append((bucket, value, names))
            elif _is_scalar(value):
                for name in names:
                    scalars.setdefault(name, {})[key] = deepcopy(value)
            else:
                wrong = f"optimizer: {key} of {names[0]} has neither the parameter's shape nor is a scalar"
    gathered = world().all_gather_object((set(tensors), scalars, wrong))
    if refused := next((theirs for *_, theirs in gathered if theirs), None):
        raise Unsupported(refused)
    state = {name: values for _, theirs, _ in gathered for name, values in theirs.items()}
    for key in sorted(set().union(*(theirs for theirs, *_ in gathered))):  # whole ones of one kind at a time
        local: dict[str, Tensor] = {}
        for bucket, value, names in tensors.get(key, []):
            parts = [value] if bucket.held == "whole" else bucket.whole(value)
            local |= zip(names, parts, strict=True)
        for name, value in _whole(parallel, local, to).items():
            state.setdefault(name, {})[key] = value
    groups = zip(parallel.optimizer.param_groups, parallel.group_names, strict=True)
    found = {"state": state, "param_groups": [{**group, "params": list(names)} for group, names in groups]}
    return found if parallel.rank == to else {}


def load_optimizer_state_dict(parallel: ParallelModel, state: Mapping[str, Any]) -> None:
    """Set this rank's parts of the optimizer's state from that of the whole model, which every rank passes.

    A parameter without state begins anew.

    Raises:
        InvalidArgument: groups or shapes differ, or scalars of parameters that share a shard; nothing has
            changed then.
    """
    groups, given = state.get("param_groups", []), state.get("state", {})
    group_of = {name: number for number, group in enumerate(groups) for name in group["params"]}
    expected = {name: number for number, names in enumerate(parallel.group_names) for name in names}
    new: dict[Tensor, dict[str, Any]] = {}
    for bucket, own, names in _optimized(parallel):
        if moved := next((name for name in names if group_of.get(name) != expected[name]), None):
            raise InvalidArgument(f"state: expected {moved} in param_groups[{expected[moved]}], by its name")
        params = [parallel.parameters()[name] for name in names]
        each: list[Mapping[str, Any]] = [given.get(name, {}) for name in names]
        for key in dict.fromkeys(key for known in each for key in known):
            values: list[Any] = [known.get(key) for known in each]
            pairs = list(zip(params, values, strict=True))
            if all(_is_part(key, value, boxes_of(param)[0]) for param, value in pairs):
                parts = [_own(param, value) for param, value in pairs]
                is_whole = bucket.held == "whole"
                part = parts[0].to(own.device, copy=True) if is_whole else bucket.shard_of(parts)
                new.setdefault(own, {})[key] = part
            elif all(_is_scalar(value) and value == values[0] for value in values):
                new.setdefault(own, {})[key] = deepcopy(values[0])
            else:
                what = f"{key} of {', '.join(names)}"
                raise InvalidArgument(f"state: {what}: expected the parameter's shape, or equal scalars")
    parallel.optimizer.state.clear()
    parallel.optimizer.state.update(new)
    for group, other in zip(parallel.optimizer.param_groups, groups, strict=False):
        group.update({key: deepcopy(value) for key, value in other.items() if key != "params"})


def _optimized(parallel: ParallelModel) -> Iterator[tuple[GradientBucket, nn.Parameter, list[str]]]:
    """Yield the parameters of the optimizer with their buckets, and the names of the model's in each."""
    names = {id(param): name for name, param in parallel.parameters().items()}
    for bucket in parallel.buckets:
        for own in bucket.optimized:
            params = [own] if bucket.held == "whole" else bucket.params
            yield bucket, own, [names[id(param)] for param in params]


def _is_part(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Return whether a value of a state has an element for each of a parameter."""
    return key != "step" and isinstance(value, Tensor) and tuple(value.shape) == tuple(shape)


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


def _whole(parallel: ParallelModel, local: Mapping[str, Tensor], to: int) -> dict[str, Tensor]:
    """Return on rank `to` whole tensors by the names of parameters; ranks have parts as of these."""
    params = parallel.parameters()
    holders: dict[str, dict[int, list[Bounds]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    own = {name: boxes_of(params[name]) for name in local}
    for rank, theirs in enumerate(world().all_gather_object(own)):
        for name, (shape, boxes) in theirs.items():
            holders.setdefault(name, {})[rank] = boxes
            shapes[name] = shape
    specs = {
        name: (Layout.boxes(shapes[name], holders[name]), Layout.replicated(shapes[name], [to]))
        for name in sorted(holders)
    }
    packed = {
        name: _packed(params[name], value).reshape(specs[name][0].locals[parallel.rank])
        for name, value in local.items()
    }
    found = redistribution(specs, tag="plan.checkpoint", compress=False)(packed)
    return {name: value for name, value in found.items() if value is not None}


def _own(param: nn.Parameter, whole: Tensor) -> Tensor:
    """Return the part of a whole tensor that a parameter has of the whole parameter."""
    boxes = boxes_of(param)[1]
    parts = [whole[tuple(slice(*bound) for bound in box)] for box in boxes]
    return parts[0] if len(parts) == 1 else torch.cat(parts, param.mcr_cut[1].dim)  # type: ignore[attr-defined]


def _packed(param: nn.Parameter, value: Tensor) -> Tensor:
    """Return the boxes of a parameter, or its state, one after another, each in row-major order."""
    cut = getattr(param, "mcr_cut", (None, None))[1]
    parts = [value.detach()] if cut is None else value.detach().chunk(cut.sections, cut.dim)
    return torch.cat([part.flatten() for part in parts])
