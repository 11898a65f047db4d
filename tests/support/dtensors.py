"""DTensors created without communication, in all versions of torch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return `whole`, which is equal on all ranks, as a DTensor."""
    if "src_data_rank" in inspect.signature(distribute_tensor).parameters:
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    coordinate, local = mesh.get_coordinate(), whole  # torch 2.6
    for at, placement in enumerate(placements):
        if isinstance(placement, Shard) and coordinate is not None:
            parts, _ = placement._split_tensor(local, mesh.size(at), with_padding=False, contiguous=True)
            local = parts[coordinate[at]]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def placeable(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Return False for strided shards of different sizes, which torch 2.6 does not have."""
    local = torch.empty(*shape, device="meta")
    for size, placement in zip(mesh, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            try:
                parts, _ = placement._split_tensor(local, size, with_padding=False, contiguous=False)
            except AssertionError:
                return False
            local = parts[0]
    return True
