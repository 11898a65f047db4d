"""`mcr.DistributedOptimizer` averages gradients for an optimizer, as in Horovod."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.errors import InvalidArgument
from mcr_plus.job.init import member_of
from mcr_plus.training.foreign_optimizers import watch_steps
from mcr_plus.training.parameters import compare, is_skipped, refuse_lazy, refuse_within_backward
from mcr_plus.training.reducer import Reducer, reducer_of

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class AveragedOptimizer:
    """Averages the gradients of one optimizer's parameters, see `DistributedOptimizer`."""

    def __init__(self, named: list[tuple[str, torch.nn.Parameter]], comm: Communicator) -> None:
        self.named = named
        self.trained = {id(param) for _, param in named}
        self.average(comm)

    def average(self, comm: Communicator, branch: str | None = None) -> None:
        """Average the gradients over group `comm` from now on."""
        self.comm = comm
        self.reducer = Reducer(self.named, comm, branch)
        guard = _Guard(comm)
        for _, param in self.named:
            _guards[param] = guard
        watch_steps(guard, [param for _, param in self.named], _Guard.before_other_step)

    def before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Complete a failed pass; raises `InvalidArgument` for a parameter that is not averaged."""
        refuse_within_backward(self.reducer)
        self.reducer.recover()
        self.reducer.note_step()
        known = self.trained
        if averaged_optimizers.get(optimizer) is self and any(
            id(param) not in known and param.requires_grad and not (is_skipped(param) or reducer_of(param))
            for group in optimizer.param_groups
            for param in group["params"]
        ):
            raise InvalidArgument(
                "optimizer: since mcr.DistributedOptimizer a parameter was added, replaced or unfrozen; "
                "call it again on all ranks"
            )

    def move(self, comm: Communicator, branch: str) -> None:
        """Move to a new group, see `Follower.follow`."""
        self.reducer.detach()
        self.average(comm, branch)


class _Guard:
    """Checks the steps of other optimizers while a `DistributedOptimizer` averages gradients."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def before_other_step(self, optimizer: torch.optim.Optimizer, *_: bool) -> None:
        """Raise `InvalidArgument` if the optimizer also trains parameters that are not averaged."""
        if optimizer in averaged_optimizers or self.comm.closed:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            if (reducer := reducer_of(param)) is not None:
                refuse_within_backward(reducer)
            elif param.requires_grad and param.grad is not None and not is_skipped(param):
                raise InvalidArgument(
                    f"optimizer: {type(optimizer).__name__} trains parameters of a mcr.DistributedOptimizer, "
                    f"and one of shape {list(param.shape)} that is not averaged; call "
                    "mcr.DistributedOptimizer on it too, on all ranks (`param.mcr_skip = True`: not averaged)"
                )


averaged_optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, AveragedOptimizer] = (
    weakref.WeakKeyDictionary()
)
_guards: Any = WeakIdKeyDictionary()  # by parameter


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    *,
    group: Communicator | None = None,
) -> OptimizerT:
    """Average the gradients of an optimizer's parameters over ranks; returns the same optimizer.

    The counterpart of `wrap` for an optimizer instead of a model. Programs written for Horovod, which use
    `synchronize`, `op` or `compression`, import `mcr_plus.horovod` instead: its optimizer has all of them.
    This function does not broadcast parameters; call `mcr.broadcast_parameters(model.state_dict())`.
    Gradients are averaged when `backward()` returns, so there is no `synchronize`. Errors use the
    names in `named_parameters`.
    """
    comm = member_of(group)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    params = [param for param_group in optimizer.param_groups for param in param_group["params"]]
    names = _names(named_parameters or ())
    named = [
        (names.get(id(param), f"parameter {index}"), param)
        for index, param in enumerate(params)
        if param.requires_grad and not is_skipped(param)
    ]
    refuse_lazy(named)
    compare(comm, named)
    averaged_optimizers[optimizer] = averaged = AveragedOptimizer(named, comm)
    optimizer.register_step_pre_hook(averaged.before_step)
    return optimizer


def _names(named: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[int, str]:
    pairs: Any = list(named) if isinstance(named, Iterable) and not isinstance(named, Mapping) else [named]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise InvalidArgument(
                "named_parameters: expected pairs of a name and a parameter, as model.named_parameters() has "
                f"them, got {type(named).__name__}" + (" of " + type(pair).__name__) * (pair is not named)
            )
    return {id(param): name for name, param in pairs}
