"""Give whole matrices of a sharded model to one rank each (`mcr.owned`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.tensor import DTensor

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.core.units import about, parse_size
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.job.init import member_of
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.torch_layouts import job_ranks
from mcr_plus.owners.balance import Cost, assign, cost_function
from mcr_plus.owners.matrices import MemoryPlan, OwnedMatrix, plan_memory
from mcr_plus.owners.optimizer import OwnedOptimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NAMED: Final = 8  # maximum number of parameters that an error lists
_Named = list[tuple[str, torch.nn.Parameter]]


class OwnedMatrices:
    """Matrices of a model with their owners, and what is left over: the result of `mcr.owned`.

    Attributes:
        matrices: in the order of the model.
        others: parameters of the model that are no matrices, for another optimizer; empty if `mcr.owned` was
            called with parameters.
        memory: rounds and memory.
    """

    def __init__(
        self,
        matrices: Sequence[OwnedMatrix],
        others: Sequence[torch.nn.Parameter],
        memory: MemoryPlan,
        comm: Communicator,
    ) -> None:
        self.matrices = matrices
        self.others = others
        self.memory = memory
        self._comm = comm
        self._optimizer: OwnedOptimizer | None = None

    def optimizer(self, kind: Callable[..., torch.optim.Optimizer], **options: Any) -> OwnedOptimizer:
        """Return an optimizer of the model's parameters, each step of which runs on whole matrices.

        Collective. `kind(parameters, **options)` is called on each rank with the whole matrices that the
        rank owns, once for each round: `torch.optim.Muon` or any class with its interface, which updates
        each parameter from its own gradient and state. It never sees shards, so it needs no change.

        Raises:
            InvalidArgument: there is an optimizer of these matrices already.
        """
        if self._optimizer is not None:
            raise InvalidArgument("optimizer: these matrices have an optimizer; call mcr.owned again")
        self._optimizer = OwnedOptimizer(self.matrices, self.memory, self._comm, kind, options)
        return self._optimizer

    def reduced(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Start to move gradients that are complete, see `mcr.fsdp(owned=)`."""
        if self._optimizer is not None:
            self._optimizer.reduced(parameters)

    def describe(self) -> str:
        """Return a description: matrices, work and bytes of each rank, rounds and memory."""
        total = sum(each.cost for each in self.matrices) or 1.0
        lines = []
        for rank in sorted({rank for each in self.matrices for rank in each.layout.ranks}):
            own = [each for each in self.matrices if each.owner == rank]
            lines.append(
                f"rank {rank}: {len(own)} matrices, {about(sum(each.nbytes for each in own))}, "
                f"{sum(each.cost for each in own) / total:.1%} of the work"
            )
        plan = self.memory
        weights = (
            f"{about(plan.kept)} of whole weights kept"
            if plan.keeps_weights
            else ("weights gathered in every step, as they do not fit into memory=")
        )
        lines.append(
            f"{len(plan.rounds)} rounds, {plan.ahead} ahead; at most {about(plan.nbytes)} on a rank: "
            f"{weights}, {about(plan.slot)} of whole tensors and {about(plan.buffers)} of buffers for a round"
        )
        return "\n".join(lines)

    __str__ = describe


def owned(
    parameters: torch.nn.Module | Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]],
    mesh: DeviceMesh | None = None,
    *,
    cost: str | Cost = "muon",
    memory: int | str | None = "256MiB",
    group: Communicator | None = None,
) -> OwnedMatrices:
    """Give each matrix of a sharded model to one rank, for optimizers that need it whole.

    Muon, SOAP, Shampoo and Dion compute an update from a whole matrix, of which a rank has a shard. With
    `owned(model).optimizer(torch.optim.Muon, lr=0.02)`, a step moves the shards of each gradient to the
    owner of the matrix, updates whole matrices there, and moves the shards of the result back. Every matrix
    is updated once, and no rank has more than its own. Exchanges of some matrices overlap with the updates of
    others, and with the backward pass by `mcr.fsdp(model, owned=owned)`.

    Args:
        parameters: a model: its two-dimensional parameters, without those of `torch.nn.Embedding`; or the
            matrices, with or without names. They are parameters of FSDP2, tensor parallelism or both
            (DTensors, with uneven and empty shards), or equal on all ranks, as in DDP and with `mcr.wrap`.
        mesh: the mesh of which the parameters' meshes are parts, on which they are equal otherwise. None:
            each DTensor's own mesh, and the group for parameters that are no DTensors.
        cost: work for a matrix, by which owners are chosen: "muon", the operations of its Newton-Schulz
            iterations, or a function of the shape (rows, columns).
        memory: bound of the memory that a step needs on any rank, beside the optimizer's state and work
            space. If the whole weights of the owner do not fit, they are gathered in every step, which sends
            half as many bytes again. None: no bound.
        group: the ranks that hold the parameters; None: the ranks of the mesh, if it has one dimension, or
            the whole job.

    Returns:
        The matrices with their owners; `optimizer` makes the optimizer, `others` are the model's other
        parameters, and `describe` shows who owns what.

    Raises:
        InvalidArgument: a parameter is no matrix, is given twice, needs more than `memory`, or lies outside
            the group; there is none; `cost` is neither.

    Example:
        ```python
        model = torch.nn.Linear(8, 4, bias=False)  # equal on all ranks
        owned = mcr.owned(model)
        optimizer = owned.optimizer(torch.optim.Muon, lr=0.02)
        model, optimizer = mcr.wrap(model, optimizer)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        ```
    """
    price = cost_function(cost)
    named, others = _chosen(parameters)
    limit = None if memory is None else _size(memory)
    layouts = [_layout(parameter, mesh, group) for _, parameter in named]
    comm = _communicator(group, mesh, [parameter for _, parameter in named], layouts)
    costs = [_priced(price, name, parameter) for name, parameter in named]
    owners = assign(costs, [layout.ranks for layout in layouts])
    matrices = [
        OwnedMatrix(name, parameter, layout, cost, owner, _is_whole(layout))
        for (name, parameter), layout, cost, owner in zip(named, layouts, costs, owners, strict=True)
    ]
    return OwnedMatrices(matrices, others, plan_memory(matrices, limit), comm)


def _chosen(parameters: Any) -> tuple[_Named, list[torch.nn.Parameter]]:
    """Return the matrices with their names, and the model's other parameters; raises `InvalidArgument`."""
    if isinstance(parameters, torch.nn.Module):
        return _of_model(parameters)
    if isinstance(parameters, (torch.Tensor, str, Mapping)) or not isinstance(parameters, Iterable):
        raise InvalidArgument(f"parameters: expected a model or its matrices, got {short(parameters)}")
    named: Any = [
        each if isinstance(each, tuple) and len(each) == 2 else (f"matrix {index}", each)
        for index, each in enumerate(parameters)
    ]
    if not named:
        raise InvalidArgument("parameters: there are none")
    wrong = [
        f"{name} is {_what(each)}"
        for name, each in named
        if not (isinstance(each, torch.Tensor) and each.ndim == 2 and each.requires_grad)
    ]
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise InvalidArgument(
            f"parameters: expected matrices that require gradients; {', '.join(wrong[:_NAMED])}{more}. "
            "Train them by another optimizer"
        )
    names = Counter(name for name, _ in named)
    tensors = Counter(id(parameter) for _, parameter in named)
    twice = [name for name, each in named if names[name] > 1 or tensors[id(each)] > 1]
    if twice:
        raise InvalidArgument(f"parameters: {short(twice)}: a name or a parameter is given twice")
    return named, []


def _of_model(model: torch.nn.Module) -> tuple[_Named, list[torch.nn.Parameter]]:
    """Return the matrices of a model with their names, and its other parameters."""
    embedded = {
        id(each)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
        for each in module.parameters(recurse=False)
    }
    trained = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    named = [pair for pair in trained if pair[1].ndim == 2 and id(pair[1]) not in embedded]
    kept = {id(parameter) for _, parameter in named}
    if not named:
        raise InvalidArgument("parameters: the model has no matrices that require gradients")
    return named, [parameter for _, parameter in trained if id(parameter) not in kept]


def _what(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return short(value)
    return f"of shape {list(value.shape)}" + ("" if value.requires_grad else " without requires_grad")


def _layout(parameter: torch.Tensor, mesh: DeviceMesh | None, group: Communicator | None) -> Layout:
    if isinstance(parameter, DTensor):
        return Layout.of(parameter, mesh)
    if mesh is None:
        return Layout.replicated(tuple(parameter.shape), member_of(group).ranks)
    return Layout.replicated(tuple(parameter.shape), job_ranks(mesh).ravel().tolist())


def _communicator(
    group: Communicator | None,
    mesh: DeviceMesh | None,
    parameters: Sequence[torch.nn.Parameter],
    layouts: Sequence[Layout],
) -> Communicator:
    """Return the group whose ranks hold the parameters; raises `InvalidArgument` if it cannot tell."""
    from mcr_plus.torch_backend.process_group import McrProcessGroup

    holders = {rank for layout in layouts for rank in layout.ranks}
    comm = member_of(group)
    if group is not None or holders == set(comm.ranks):
        if holders <= set(comm.ranks):
            return comm
        outside = sorted(holders - set(comm.ranks))
        raise InvalidArgument(
            f"group: ranks {short(outside)} hold parameters and are not in group '{comm.name}'"
        )
    meshes = (
        {each.device_mesh for each in parameters if isinstance(each, DTensor)} if mesh is None else {mesh}
    )
    for each in meshes:
        if len(meshes) == 1 and each.ndim == 1:
            torch_group: Any = each.get_group()
            if isinstance(torch_group, McrProcessGroup):
                return torch_group.communicator
    raise InvalidArgument(
        f"group: the parameters are on ranks {short(sorted(holders))}, a part of the job; pass group=, or "
        "mesh= with one dimension and a group of backend 'mcr'"
    )


def _priced(price: Cost, name: str, parameter: torch.Tensor) -> float:
    rows, columns = parameter.shape
    found = price((rows, columns))
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < float("inf"):
        raise InvalidArgument(f"cost: expected a number from 0 on for {name}, got {short(found)}")
    return float(found)


def _is_whole(layout: Layout) -> bool:
    return all(layout.local_shape(rank) == layout.shape for rank in layout.ranks)


def _size(memory: int | str) -> int:
    try:
        return parse_size(memory)
    except ValueError as error:
        raise InvalidArgument(f"memory: {error}") from None
