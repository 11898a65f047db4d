"""Broadcast and all_gather of whole states and pickled objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.transfer import outline, rebuilt
from mcr_plus.errors import BackendError, InvalidArgument
from mcr_plus.horovod.request import HorovodInternalError
from mcr_plus.horovod.starting import gather_async, send_async, synchronize
from mcr_plus.horovod.world import ProcessSet, global_process_set, negotiator_of


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the tensors of rank `root_rank` into the tensors of all ranks, in place.

    `params`: a `state_dict()`, `named_parameters()`, `parameters()`, or a list of tensors.
    """
    if isinstance(params, Mapping):
        items = [(str(name), params[name]) for name in sorted(params)]
    elif isinstance(params, Iterable) and not isinstance(params, (torch.Tensor, str)):
        items = [item if isinstance(item, tuple) else (str(n), item) for n, item in enumerate(params)]
    else:
        raise InvalidArgument(f"params: expected a mapping or a list, got {type(params).__name__}")
    for name, tensor in items:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"params: '{name}' is a {type(tensor).__name__}; expected tensors")
    # One operation per device, because tensors of an operation must be on one device.
    for device in dict.fromkeys(tensor.device for _, tensor in items):
        tensors = [tensor for _, tensor in items if tensor.device == device]
        synchronize(send_async(tensors, root_rank, None, process_set, in_place=True, many=True))


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank `root_rank` on every rank; pickled, for trusted jobs only."""
    comm = negotiator_of(process_set).comm
    if root_rank not in comm.ranks:
        raise InvalidArgument(f"root_rank: expected one of the ranks {list(comm.ranks)}, got {root_rank!r}")
    is_root = comm.ranks[comm.rank] == root_rank
    # A gather with rows on the root only needs no prior exchange of the size.
    payload = comm.opened.objects.pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    title = None if name is None else f"broadcast_object.{name}"
    received = synchronize(gather_async([payload], title, process_set, many=False))
    return obj if is_root else _unpickled(comm, received, comm.ranks.index(root_rank))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's object, in rank order. Pickled, for trusted jobs only."""
    comm = negotiator_of(process_set).comm
    payload = comm.opened.objects.pickled(obj)
    length = torch.tensor([payload.numel()], device="cpu")
    title = None if name is None else f"allgather_object.{name}"
    lengths, payloads = synchronize(gather_async([length, payload], title, process_set, many=True))
    parts = payloads.split(lengths.tolist())
    return [_unpickled(comm, part, rank) for rank, part in enumerate(parts)]


def _unpickled(comm: Communicator, payload: torch.Tensor, rank: int) -> Any:
    try:
        return comm.opened.objects.unpickled(payload, rank)
    except BackendError as error:
        raise HorovodInternalError(str(error)) from error


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Broadcast the optimizer state and options of rank `root_rank`.

    If an optimizer has no state, parameters without a gradient get zero gradients, as in Horovod, except
    parameters with sparse gradients (of `SparseAdam`, or sparse embeddings of `model`). Raises
    `InvalidArgument` (a `ValueError`) for L-BFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgument("optimizer: the state of torch.optim.LBFGS cannot be broadcast")
    comm = negotiator_of(global_process_set).comm
    state = optimizer.state_dict()
    if not state["state"] and not isinstance(optimizer, torch.optim.SparseAdam):
        _fill_gradients(optimizer, _sparse_of(model))
    tensors: list[torch.Tensor] = []
    plain = broadcast_object(outline(state, tensors), root_rank)
    if comm.ranks[comm.rank] == root_rank:
        if tensors:
            broadcast_parameters(tensors, root_rank)
        return
    received: list[torch.Tensor] = []
    state = rebuilt(plain, received)
    if received:
        broadcast_parameters(received, root_rank)
    optimizer.load_state_dict(state)


def _sparse_of(model: torch.nn.Module | None) -> set[int]:
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = [] if model is None else list(model.modules())
    return {id(module.weight) for module in modules if isinstance(module, embeddings) and module.sparse}


def _fill_gradients(optimizer: torch.optim.Optimizer, sparse: set[int]) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and param.grad is None and id(param) not in sparse:
                param.grad = torch.zeros_like(param)
