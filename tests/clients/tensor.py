"""Distributed tensors, tensor parallel layers, meshes, and compiled collectives."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist
from clients.job import STEPS, WIDTH, Client, batch, loss_of, main, network, train
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def redistributed() -> list[float]:
    """Every placement into every other, uneven ones too."""
    everybody = mesh()
    whole = torch.arange(15.0).reshape(5, 3)
    found = []
    for before in (Shard(0), Shard(1), Replicate()):
        for after in (Shard(0), Shard(1), Replicate()):
            moved = distribute_tensor(whole, everybody, [before]).redistribute(placements=[after])
            found += [moved.to_local().sum().item(), moved.full_tensor().max().item()]
    for after in (Shard(0), Shard(1), Replicate()):
        parts = DTensor.from_local(whole * (1 + dist.get_rank()), everybody, [Partial()])
        found.append(parts.redistribute(placements=[after]).to_local().sum().item())
    return found


def matrices() -> list[float]:
    """A product of sharded matrices, and its gradients."""
    everybody = mesh()
    left = distribute_tensor(torch.randn(8, WIDTH, requires_grad=True), everybody, [Shard(1)])
    right = distribute_tensor(torch.randn(WIDTH, 8, requires_grad=True), everybody, [Shard(0)])
    total = (left @ right).relu().sum()
    total.backward()
    assert isinstance(total, DTensor)
    return [total.full_tensor().item()]


def parallel() -> list[float]:
    """Megatron's two layers; every rank sees the same batches."""
    model = parallelize_module(network(), mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        dist.broadcast(inputs, 0)
        dist.broadcast(targets, 0)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sequence() -> list[float]:
    """Train the same layers between a norm and an output that are sharded along the sequence."""
    layers = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    model = parallelize_module(nn.Sequential(*layers), mesh(), plan)
    return train(model)


def meshes() -> list[float]:
    """Test groups of a mesh with names, and of a part of the mesh."""
    both = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("outer", "inner"))
    found = []
    for name in ("outer", "inner"):
        values = torch.full((3,), 1.0 + dist.get_rank())
        dist.all_reduce(values, group=both.get_group(name))
        found.append(values.sum().item())
    flat = both["outer", "inner"]._flatten("flat")
    values = torch.full((3,), 1.0 + dist.get_rank())
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=flat.get_group())
    return [*found, values.sum().item()]


def compiled() -> list[float]:
    group = dist.group.WORLD
    assert group is not None
    size = dist.get_world_size()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(values: Tensor) -> Tensor:
        total = functional.all_reduce(values, "sum", group)
        parts = functional.reduce_scatter_tensor(total * values, "sum", 0, group)
        back = functional.all_gather_tensor(parts, 0, group)
        swapped = functional.all_to_all_single(back + values, None, None, group)
        (one,) = functional.all_reduce_coalesced([swapped], "max", group)
        return one / size

    return [step(batch(index)[0]).square().sum().item() for index in range(STEPS)]


def compiled_ddp() -> list[float]:
    model = DistributedDataParallel(network())
    forward = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for index in range(STEPS):
        loss = loss_of(forward, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


CLIENTS: Final[dict[str, Client]] = {
    "dtensor": redistributed,
    "dtensor_matmul": matrices,
    "tensor_parallel": parallel,
    "sequence_parallel": sequence,
    "mesh": meshes,
    "compile": compiled,
    "compile_ddp": compiled_ddp,
}

if __name__ == "__main__":
    main(CLIENTS)
