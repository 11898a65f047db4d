"""Rebuild the state of a sharded model from the remaining shards after ranks are lost (`mcr.fsdp_state`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.transfer import STATE, broadcast_tensors
from mcr_plus.core.units import whole_number
from mcr_plus.errors import BackendError, InvalidArgument, Unsupported
from mcr_plus.job.init import member_of
from mcr_plus.training.parameters import check_elastic

_WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, checkpointing
Name = tuple[str, ...]
"""`model` and the tensor's name, or `optimizer`, the parameter's name and the name of the entry."""


class ShardPiece(NamedTuple):
    """One rank's piece of a tensor: its place in the whole tensor, and the shape of the whole."""

    name: Name
    whole: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """Slices of the whole tensor that the piece covers."""
        return tuple(slice(at, at + size) for at, size in zip(self.offset, self.shape, strict=True))


class RankShards(NamedTuple):
    """Shards and other state of one rank.

    Attributes:
        plain: values that are not tensors.
        groups: `param_groups` of the optimizer, with names of parameters; None without an optimizer.
        problem: the reason why the rank cannot take part; empty if it can.
    """

    step: int
    pieces: tuple[ShardPiece, ...] = ()
    plain: Mapping[Name, Any] = {}
    groups: list[dict[str, Any]] | None = None
    problem: str = ""


Offer = tuple[RankShards, Sequence[torch.Tensor]]
"""Shards that a rank can give, and their values, by piece."""


def fsdp_state(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None = None, *, step: int = 0
) -> dict[str, Any]:
    """Rebuild the state of an FSDP2 model from the remaining shards after ranks are lost.

    Collective over all remaining ranks, after `mcr.shrink_group` or `reconfigure`. With hybrid sharding,
    every replica of the model has a copy of each shard, so a shard survives if any of its ranks does. Without
    replicas, a shard is lost with its rank. The process groups of the old model no longer exist in either
    case: build a new model, shard it over a mesh of the remaining ranks, and load the state with torch's
    `set_model_state_dict` and `set_optimizer_state_dict`.

    Args:
        model: sharded by `fully_shard`; its passes may have failed. None on a rank without a part of it,
            such as a newcomer.
        optimizer: the optimizer of the model's parameters, on all ranks with a model or on none.
        step: number of optimizer steps that this rank has completed. If some ranks have not completed the
            last step, the latest step with a full set of shards is used.

    Returns `model` and `optimizer`, as torch's `get_model_state_dict` and `get_optimizer_state_dict` do with
    full tensors on the CPU (`optimizer` is None without one), and `step`. All ranks get all of it.

    Raises:
        BackendError: shards have been lost with all their copies. The message names one; load a checkpoint.
        InvalidArgument: on all ranks, if a rank passed a wrong type, or an optimizer of other parameters.

    Example:
        ```python
        except mcr.PeerLost as lost:
            mcr.shrink_group(list(lost.ranks))
            state = mcr.fsdp_state(model, optimizer, step=step)
            model = mcr.fsdp(fully_shard(build()))  # of as many ranks as there are
            set_model_state_dict(model, state["model"], options=StateDictOptions(full_state_dict=True))
        ```
    """
    comm = member_of(None)
    tensors: list[torch.Tensor] = []
    mine = shards_of(model, optimizer, step, tensors)
    return rebuilt_state(comm, [(mine, tensors)])


def rebuilt_state(comm: Communicator, offers: Sequence[Offer]) -> dict[str, Any]:
    """Return the full state of the latest step of which the ranks' `offers` have all shards; collective.

    Returns and raises what `fsdp_state` does. A rank may offer several steps, and shards of lost ranks.
    """
    answers: list[list[RankShards]] = comm.all_gather_object([shards for shards, _ in offers])
    for rank, offered in enumerate(answers):
        for shards in offered:
            if shards.problem:
                raise InvalidArgument(f"fsdp_state: rank {rank}: {shards.problem}")
    latest, sources = _sources(answers)
    own = {
        piece: tensor
        for shards, tensors in offers
        if shards.step == latest
        for piece, tensor in zip(shards.pieces, tensors, strict=True)
    }
    first = next(shards for offered in answers for shards in offered if shards.step == latest)
    return _received(comm, own, first, sources)


def shards_of(model: object, optimizer: object, step: object, tensors: list[torch.Tensor]) -> RankShards:
    """Return this rank's shards and other state, or the problem; appends its pieces to `tensors`."""
    try:
        return _had(model, optimizer, step, tensors)
    except InvalidArgument as error:
        return RankShards(-1, problem=str(error))


def _had(model: object, optimizer: object, step: object, tensors: list[torch.Tensor]) -> RankShards:
    """Return this rank's shards and other state; appends its pieces to `tensors`."""
    if model is None:
        return RankShards(-1)
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(f"model: expected a torch.nn.Module or None, got {type(model).__name__}")
    if (number := whole_number(step)) is None or number < 0:
        raise InvalidArgument(f"step: expected a number, got {step!r}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if optimizer is not None:
        check_elastic(optimizer)
    pieces, plain = list[ShardPiece](), dict[Name, Any]()
    values: list[tuple[Name, Any]] = [
        (("model", _clean(name)), value) for name, value in model.state_dict().items()
    ]
    names: dict[torch.Tensor, str] = {}
    for called, param in model.named_parameters():  # state_dict() has sharded them again
        names[param] = _clean(called)
    groups = None
    if optimizer is not None:
        if not all(param in names for group in optimizer.param_groups for param in group["params"]):
            raise InvalidArgument("optimizer: has parameters that the model does not have")
        groups = [
            {**group, "params": [names[param] for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        states: Mapping[Any, dict[str, Any]] = optimizer.state
        for param, state in states.items():
            values += [(("optimizer", names[param], key), value) for key, value in state.items()]
    for name, value in values:
        if isinstance(value, torch.Tensor):
            piece, local = _piece(name, value)
            pieces.append(piece)
            tensors.append(local)
        else:
            plain[name] = value
    return RankShards(number, tuple(pieces), plain, groups)


def _piece(name: Name, value: torch.Tensor) -> tuple[ShardPiece, torch.Tensor]:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole = tuple(value.shape)
    if not isinstance(value, DTensor):
        return ShardPiece(name, whole, value.dtype, (0,) * value.dim(), whole), value.detach()
    shape, offset = compute_local_shape_and_global_offset(whole, value.device_mesh, value.placements)
    local: torch.Tensor = value.to_local().detach()
    if tuple(local.shape) != tuple(shape):
        raise Unsupported(f"fsdp_state: '{name[1]}': placements {value.placements} with uneven shards")
    if 0 in shape:
        offset = (0,) * len(shape)
    return ShardPiece(name, whole, value.dtype, tuple(offset), tuple(shape)), local


def _clean(name: str) -> str:
    for each in _WRAPPERS:
        name = name.replace(each, "")
    return name


def _sources(answers: Sequence[Sequence[RankShards]]) -> tuple[int, dict[ShardPiece, int]]:
    """Return the latest complete step and, for each of its pieces, the first rank that has the piece."""
    problem = "no rank that is left has a part of the model"
    offered = [(rank, shards) for rank, several in enumerate(answers) for shards in several]
    for step in sorted({shards.step for _, shards in offered if shards.step >= 0}, reverse=True):
        sources: dict[ShardPiece, int] = {}
        for rank, shards in offered:
            for piece in shards.pieces if shards.step == step else ():
                sources.setdefault(piece, rank)
        missing = list(_missing(sources))
        if not missing:
            return step, sources
        name, count, total = missing[0]
        problem = (
            f"of step {step}, shards of {len(missing)} tensors were on lost ranks alone, such as "
            f"{total - count} of the {total} elements of '{name[1]}'"
        )
    raise BackendError(
        f"fsdp_state: {problem}. Only a mesh with replicas (hybrid sharding) keeps every shard on several "
        "ranks; shard a new model over the ranks that are left, and load a checkpoint into it"
    )


def _missing(pieces: Mapping[ShardPiece, int]) -> Iterator[tuple[Name, int, int]]:
    """Yield tensors with missing elements: name, number of elements present, and number of all elements."""
    counts: dict[tuple[Name, tuple[int, ...]], int] = {}
    for piece in pieces:  # pieces of one mesh are equal or disjoint
        counts[piece.name, piece.whole] = counts.get((piece.name, piece.whole), 0) + math.prod(piece.shape)
    for (name, whole), count in counts.items():
        if count < math.prod(whole):
            yield name, count, math.prod(whole)


def _received(
    comm: Communicator,
    own: Mapping[ShardPiece, torch.Tensor],
    first: RankShards,
    sources: Mapping[ShardPiece, int],
) -> dict[str, Any]:
    """Return the full state, on all ranks. `first`: one rank's state of the step, for plain values."""
    full: dict[Name, Any] = {}
    for src in dict.fromkeys(sources.values()):
        pieces = [piece for piece, rank in sources.items() if rank == src and 0 not in piece.shape]
        sent = [
            own[piece].cpu()
            if src == comm.rank
            else torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
            for piece in pieces
        ]
        broadcast_tensors(sent, comm, comm.ranks[src], tag=STATE)
        for piece, values in zip(pieces, sent, strict=True):
            whole = full.setdefault(piece.name, torch.empty(piece.whole, dtype=piece.dtype, device="cpu"))
            whole[piece.box] = values
    for piece in sources:  # tensors without elements: nothing was sent for them
        full.setdefault(piece.name, torch.empty(piece.whole, dtype=piece.dtype, device="cpu"))
    full.update(first.plain)
    state: dict[str, Any] = {"model": {}, "optimizer": None, "step": first.step}
    if first.groups is not None:
        state["optimizer"] = {"state": {}, "param_groups": first.groups}
    for name, value in full.items():
        if name[0] == "model":
            state["model"][name[1]] = value
        else:
            state["optimizer"]["state"].setdefault(name[1], {})[name[2]] = value
    return state
