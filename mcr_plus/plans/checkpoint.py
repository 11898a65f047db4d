"""Checkpoints of plans: one plain state dict out of the parts of all ranks, and back into any plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcr_plus.errors import InvalidArgument
from mcr_plus.job.init import get_world_size, world
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.state import redistribution

if TYPE_CHECKING:
    from mcr_plus.plans.run import ParallelModel

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

    Buffers are those of rank `to`, and the optimizer's state is not included.
    """
    own = parallel.parameters()
    mine = {name: (*boxes_of(param), str(param.dtype)) for name, param in own.items()}
    everyone: Any = world().all_gather_object(mine) if get_world_size() > 1 else [mine]
    holders: dict[str, dict[int, list[Bounds]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, theirs in enumerate(everyone):
        for name, (shape, boxes, _) in theirs.items():
            holders.setdefault(name, {})[rank] = boxes
            shapes[name] = shape
    # All shards of ZeRO-3 are gathered at once: a checkpoint needs the memory of the rank's whole blocks.
    for bucket in parallel.buckets:
        if bucket.held == "parameters":
            bucket.gather()
    specs = {
        name: (Layout.boxes(shapes[name], holders[name]), Layout.replicated(shapes[name], [to]))
        for name in sorted(holders)
    }
    local = {
        name: _packed(param).reshape(specs[name][0].locals[parallel.rank]) for name, param in own.items()
    }
    found = redistribution(specs, tag="plan.checkpoint")(local)
    for bucket in parallel.buckets:
        bucket.drop()
    if parallel.rank != to:
        return {}
    whole = {name: value for name, value in found.items() if value is not None}
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
            raise InvalidArgument(f"state: {name}: expected shape {list(shape)}, {got}")
    for bucket in parallel.buckets:
        if bucket.held == "parameters":
            bucket.gather()
    with torch.no_grad():
        for name, param in own.items():
            parts = [state[name][tuple(slice(*bound) for bound in box)] for box in boxes_of(param)[1]]
            dim = param.mcr_cut[1].dim if len(parts) > 1 else 0  # type: ignore[attr-defined]
            param.copy_(parts[0] if len(parts) == 1 else torch.cat(parts, dim))
        for bucket in parallel.buckets:
            bucket.keep()


def _packed(param: nn.Parameter) -> Tensor:
    """Return the boxes of a parameter one after another, each in row-major order."""
    cut = getattr(param, "mcr_cut", (None, None))[1]
    parts = [param.detach()] if cut is None else param.detach().chunk(cut.sections, cut.dim)
    return torch.cat([part.flatten() for part in parts])
