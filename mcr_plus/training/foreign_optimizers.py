"""Hooks on steps of optimizers that were not passed to `mcr.wrap`, `mcr.local` or Horovod's API."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

Before = Callable[[Any, torch.optim.Optimizer, bool, bool], None]


class _WatchedOptimizer(NamedTuple):
    params: Callable[[], Iterable[torch.Tensor]]
    before: Before


_watched: weakref.WeakKeyDictionary[object, _WatchedOptimizer] = weakref.WeakKeyDictionary()
_Owners = weakref.WeakKeyDictionary[Any, list[torch.Tensor]]
# For each optimizer: number of parameters at its last comparison with the models, and the owners of its
# parameters, with the parameters of each owner.
_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, _Owners]]
_known = weakref.WeakKeyDictionary()


def watch_steps(owner: object, of: torch.nn.Module | Sequence[torch.Tensor], before: Before) -> None:
    """Call `before` ahead of each step of an optimizer of these parameters, while `owner` lives.

    `before` receives `owner`, the optimizer, and two flags. The first says that this is the optimizer's first
    such step, or that its number of parameters has changed; the second, that the step has a closure. Modules
    and parameters are held weakly.
    """
    if isinstance(of, torch.nn.Module):
        _watched[owner] = _WatchedOptimizer(partial(_parameters, weakref.ref(of)), before)
    else:
        _watched[owner] = _WatchedOptimizer(partial(_alive, [weakref.ref(param) for param in of]), before)
    _known.clear()
    _register()


def _parameters(model: weakref.ref[torch.nn.Module]) -> Iterable[torch.Tensor]:
    found = model()
    return () if found is None else found.parameters()


def _alive(params: list[weakref.ref[torch.Tensor]]) -> Iterable[torch.Tensor]:
    return (param for ref in params if (param := ref()) is not None)


@cache
def _register() -> None:
    # A compiled step breaks its graph here anyway.
    hook: Any = torch.compiler.disable(_before_step)
    register_optimizer_step_pre_hook(hook)


def count_parameters(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of parameters of an optimizer."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a step has a closure, given the arguments of its hooks (first the optimizer)."""
    return any(callable(each) for each in (*args[1:], *kwargs.values()))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    count = count_parameters(optimizer)
    known = _known.get(optimizer)
    is_new = known is None or known[0] != count
    owners = _owners_of(optimizer) if known is None or is_new else known[1]
    for owner, params in list(owners.items()):
        if any(param.requires_grad for param in params):  # may be frozen for this step
            _watched[owner].before(owner, optimizer, is_new, has_closure(args, kwargs))
    if is_new:  # after the hooks, because a refused step may be tried again
        _known[optimizer] = count, owners


def _owners_of(optimizer: torch.optim.Optimizer) -> _Owners:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    owners = [owner for ref in _watched.keyrefs() if (owner := ref()) is not None]  # threads may add some
    found: _Owners = weakref.WeakKeyDictionary()
    for owner in owners:
        params = _watched[owner].params()
        shared = [param for param in params if id(param) in held and not getattr(param, "mcr_skip", False)]
        if shared:
            found[owner] = shared
    return found
