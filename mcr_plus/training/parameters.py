"""Select the parameters whose gradients are averaged, and check that all ranks have the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.communicator.transfer import broadcast_tensors
from mcr_plus.errors import InvalidArgument
from mcr_plus.job.init import member_of
from mcr_plus.training.reducer import Reducer, reducer_of


def check_elastic(optimizer: torch.optim.Optimizer) -> None:
    """Raise `InvalidArgument` if a rank has states of an optimizer that no other rank has."""
    if getattr(optimizer, "has_states_of_rank", False):
        raise InvalidArgument(
            "optimizer: the states of mcr.owned are on their owners alone, and are lost with them; expected "
            "another optimizer, or a checkpoint that is loaded after a loss"
        )


def broadcast_parameters(
    params: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    root_rank: int = 0,
    *,
    group: Communicator | None = None,
) -> None:
    """Copy tensors (a `state_dict()` or `named_parameters()`) from rank `root_rank` to all, in place.

    Collective over the group. Tensors with the same dtype and device are sent together, uncompressed.

    Args:
        params: pairs of a name and a tensor, or a mapping; shapes, dtypes and order are equal on all ranks.
            Values other than tensors are ignored. For a module, its `state_dict()` is used.
        root_rank: a rank of the whole job.
        group: the participating ranks; None is the whole job.

    Raises:
        InvalidArgument: `root_rank` is not in the group, or `params` has another type.
        OrderMismatch: ranks passed tensors of different sizes or dtypes.

    Example:
        ```python
        model = torch.nn.Linear(4, 2)  # its initial values are random
        mcr.broadcast_parameters(model.state_dict())
        values = model.weight.detach().clone()
        mcr.all_reduce(values, mcr.MAX)
        assert values.equal(model.weight)  # those of rank 0 everywhere
        ```
    """
    if isinstance(params, torch.nn.Module):
        params = params.state_dict()
    pairs: Any = params.items() if isinstance(params, Mapping) else params
    items: list[Any] = (
        [pairs] if isinstance(pairs, torch.Tensor) or not isinstance(pairs, Iterable) else list(pairs)
    )
    are_pairs = all(isinstance(item, tuple) and len(item) == 2 for item in items)
    tensors = [tensor for _, tensor in items if isinstance(tensor, torch.Tensor)] if are_pairs else []
    if items and not tensors:
        kinds = dict.fromkeys(type(each).__name__ for each in (params, items[0]))
        raise InvalidArgument(
            "params: expected a module, its state_dict() or its named_parameters(), got "
            + (f"a {type(params).__name__} without tensors" if are_pairs else " of ".join(kinds))
        )
    refuse_lazy(items)
    broadcast_tensors(tensors, member_of(group), root_rank)


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters whose gradients are averaged; a shared parameter is listed once."""
    return [
        (name, param)
        for name, param in model.named_parameters()
        if param.requires_grad and not is_skipped(param)
    ]


def unaveraged(named: Iterable[tuple[str, torch.nn.Parameter]]) -> str | None:
    """Return the name of the first trained parameter whose gradient is not averaged; None if all are."""
    return next((name for name, param in named if param.requires_grad and reducer_of(param) is None), None)


def refuse_lazy(named: Iterable[tuple[str, object]]) -> None:
    """Raise `InvalidArgument` if a parameter or buffer of a lazy module has no values yet."""
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor) and is_lazy(tensor):
            raise InvalidArgument(
                f"model: '{name}' of a lazy module has no shape yet; run a forward pass on all ranks first"
            )


def is_skipped(tensor: torch.Tensor) -> bool:
    """Return whether a parameter or buffer is excluded from communication by `param.mcr_skip = True`."""
    return bool(getattr(tensor, "mcr_skip", False))


def compare(comm: Communicator, named: Sequence[tuple[str, torch.nn.Parameter]], *options: str) -> None:
    """Raise `InvalidArgument` on every rank unless all ranks have the same parameters and options."""
    own = [*options, *(f"{name}: {list(param.shape)} of {param.dtype}" for name, param in named)]
    phrase = comm.opened.group.named
    for rank, other in enumerate(comm.all_gather_object(own)):
        if other != own:
            pairs = zip([*own, *["nothing"] * len(other)], [*other, *["nothing"] * len(own)], strict=False)
            here, there = next((a, b) for a, b in pairs if a != b)
            raise InvalidArgument(
                f"model: {phrase(rank)} has other parameters; the first difference is '{there}' there and "
                f"'{here}' on {phrase(comm.rank)}"
            )


def refuse_within_backward(reducer: Reducer) -> None:
    """Raise `InvalidArgument` if a backward pass whose gradients are being averaged is in progress."""
    if reducer.active and torch._C._current_graph_task_id() != -1:
        raise InvalidArgument(
            "optimizer.step: called within the backward pass, before its gradients are averaged; "
            "step once backward() has returned"
        )
