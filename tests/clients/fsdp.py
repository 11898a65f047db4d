"""Fully sharded models of both generations, and their checkpoints."""

from __future__ import annotations

import tempfile
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from clients.job import STEPS, Client, loss_of, main, network, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard


def sharded(**options: Any) -> nn.Module:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def plain(**options: Any) -> list[float]:
    return train(sharded(**options))


def mixed() -> list[float]:
    return plain(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def clipped() -> list[float]:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.full_tensor().item()]  # type: ignore[attr-defined]
    return losses


def flat() -> list[float]:
    return train(FullyShardedDataParallel(network(), device_id=torch.device("cpu")))


def flat_clipped() -> list[float]:
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        losses += [loss.item(), model.clip_grad_norm_(0.1).item()]
        model.zero_grad()
    return losses


def hybrid() -> list[float]:
    """Shard among pairs of ranks, replicate among the pairs."""
    return plain(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


def checkpoint(in_background: bool = False) -> list[float]:
    """Save a state, spoil it, load it, and continue."""
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = train(model, optimizer, steps=2)
    folder = [tempfile.mkdtemp(prefix="mcr-client-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "checkpoint"
    state = _state(model, optimizer)
    if in_background:
        saved = async_save(state, checkpoint_id=path)
        assert isinstance(saved, Future)
        saved.result()
    else:
        save(state, checkpoint_id=path)
    train(model, optimizer, steps=1)
    state = _state(model, optimizer)
    load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return losses + train(model, optimizer)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


CLIENTS: Final[dict[str, Client]] = {
    "fsdp2": plain,
    "fsdp2_mixed": mixed,
    "fsdp2_clipped": clipped,
    "fsdp1": flat,
    "fsdp1_clipped": flat_clipped,
    "checkpoint": checkpoint,
    "async_checkpoint": partial(checkpoint, in_background=True),
    "hsdp": hybrid,
}

if __name__ == "__main__":
    main(CLIENTS)
