"""Differentiable redistributions and halo exchanges; see `mcr_plus.autograd`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import torch
from torch.autograd import Function

from mcr_plus.api.autograd import Route, applied
from mcr_plus.communicator.calls import Compress
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.job.init import member_of
from mcr_plus.layout.addends import as_addends, as_source, whole
from mcr_plus.layout.halo import Halo, Widths, halo
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.redistribute import redistribute as _redistributed
from mcr_plus.layout.state import refuse

Replicas = Literal["same", "sum"]


def redistribute(
    x: torch.Tensor | None,
    source: Layout,
    target: Layout,
    replicas: Replicas = "same",
    *,
    group: Communicator | None = None,
    tag: str | None = None,
    compress: Compress = None,
) -> torch.Tensor:
    """Redistribute `x` to another layout like `mcr.redistribute`, and the gradient back.

    The same planner plans the backward redistribution, which is the transpose of the forward one. Every
    replica and every addend of a source element gets the whole gradient (for means, divided by the number of
    addends). The gradient of elements that are not in the target is 0.

    Args:
        x: this rank's local tensor in `source`. A rank without a part in `source` passes None, or an empty
            tensor of shape [0]. Pass the empty result of an earlier redistribution so that both run backward
            in order. If some rank has no part in `source` or `target`, the dtype of the first call applies to
            all calls.
        source, target: layouts of the same global shape; addends of `source`, if any, are summed or
            averaged, and `target` has complete values.
        replicas: meaning of the gradients of a target's replicas. `same`: later computation is the same on
            all replicas, as in `all_reduce` and DTensor, so gradients are equal and one is taken. `sum`:
            later computation differs, as in `all_gather`, so gradients are summed. Overlaps of boxes, for
            example halos, count as replicas.
        group, tag, compress: as in `mcr.redistribute`, for the backward pass too.

    Returns:
        The local tensor in `target`, with its local shape and the dtype of `x`. A rank without a part gets
        an empty tensor of shape [0]. All ranks of the group must run backward through their result: for an
        empty tensor `y`, `y.square().sum()` is 0 and may be a loss (`y.sum()` too, but it has no gradients of
        gradients). If gradients are enabled, a rank that passes None assumes that other ranks' inputs require
        gradients.

    Raises:
        InvalidArgument: as in `mcr.redistribute`, and if `target` is partial or `replicas` unknown.
        Unsupported: `source` has addends of a maximum, minimum or product.

    Example:
        ```python
        ranks = range(mcr.get_world_size())
        rows, all_rows = mcr.Layout.sharded((4, 2), ranks, 0), mcr.Layout.replicated((4, 2), ranks)
        x = torch.ones(rows.local_shape(mcr.get_rank()), requires_grad=True)
        y = autograd.redistribute(x, rows, all_rows)
        y.sum().backward()
        assert y.shape == (4, 2)
        assert x.grad.unique().tolist() == [1.0]  # "sum" would give 1.0 for each rank
        ```
    """
    comm = member_of(group)
    try:
        _check(x, source, target, replicas)
        moves = _moves(source, target, replicas)
    except Unsupported as error:
        refuse(comm, error)
    passes = _Passes(moves, _NEXT[replicas], comm, tag, compress)
    has_part = comm.ranks[comm.rank] in source.locals
    given = x is not None and (has_part or x.shape != (0,))
    if x is None:
        x = torch.empty(
            0, requires_grad=torch.is_grad_enabled(), device="cpu"
        )  # so that this rank has a backward pass, too
    return applied(_Redistribute, x, passes, 0, given)


def _check(x: Any, source: Any, target: Any, replicas: Any) -> None:
    if x is not None and not isinstance(x, torch.Tensor):
        raise InvalidArgument(f"x: expected a torch.Tensor or None, got {type(x).__name__}")
    if replicas not in ("same", "sum"):
        raise InvalidArgument(f"replicas: expected 'same' or 'sum', got {replicas!r}")
    for name, layout in (("source", source), ("target", target)):
        if not isinstance(layout, Layout):
            raise InvalidArgument(f"{name}: expected a Layout, got {type(layout).__name__}")


def halo_exchange(
    x: torch.Tensor,
    layout: Layout,
    before: Widths,
    after: Widths,
    periodic: bool = False,
    *,
    group: Communicator | None = None,
    tag: str | None = None,
) -> torch.Tensor:
    """Return `x` with a halo: elements around this rank's box, from the ranks that hold them.

    The backward pass returns the gradients of all copies of an element to the ranks that hold the element,
    which sum them in rank order. So results are bit-reproducible. If several ranks hold an element, each gets
    the whole sum.

    Args:
        x: this rank's local tensor in `layout`, of any dtype and strides.
        layout: a layout in which every rank of the group holds one box, possibly empty.
        before, after, periodic: as in `Layout.with_halo`.
        group: the ranks of `layout`. tag: tag of the operations, `redistribute` if None.

    Returns:
        The local tensor in `layout.with_halo(before, after, periodic)`.

    Raises:
        InvalidArgument: as in `Layout.with_halo` and `mcr.redistribute`, and if the group has other ranks
            than the layout.

    Example:
        ```python
        layout = mcr.Layout.sharded((4,), range(mcr.get_world_size()), 0)
        x = torch.ones(layout.local_shape(mcr.get_rank()), requires_grad=True)
        y = autograd.halo_exchange(x, layout, 1, 1)  # of shape [3] on each of two ranks
        y.sum().backward()
        assert sorted(x.grad.tolist()) == [1.0, 2.0]  # the neighbour has a copy of one element
        ```
    """
    comm = member_of(group)
    try:
        if not isinstance(x, torch.Tensor):
            raise InvalidArgument(f"x: expected a torch.Tensor, got {type(x).__name__}")
        found = halo(layout, before, after, periodic)
        check_ranks(comm, layout, "halo_exchange")
    except Unsupported as error:
        refuse(comm, error)
    return with_halo(x, found, comm, tag)


def with_halo(x: torch.Tensor, found: Halo, comm: Communicator, tag: str | None) -> torch.Tensor:
    """Return `x` with the halo of an exchange."""
    return applied(_HaloExchange, x, found, Route(comm, {"tag": tag}))


def check_ranks(comm: Communicator, layout: Layout, what: str) -> None:
    """Raise unless layout and group have the same ranks: a rank without a part has no backward pass."""
    if set(comm.ranks) != set(layout.ranks):
        raise InvalidArgument(
            f"{what}: the ranks of {layout}, {list(layout.ranks)}, are not those of group '{comm.name}', "
            f"{list(comm.ranks)}"
        )


class _ScaledMove(NamedTuple):
    """A redistribution, and a factor `scale` for its result."""

    source: Layout
    target: Layout
    scale: float = 1.0


_NEXT: Final = {"same": (1, 0), "sum": (1, 2, 1)}
"""For each move of `_moves`, the number of the move in its backward pass."""


@lru_cache(maxsize=256)
def _moves(source: Layout, target: Layout, replicas: Replicas) -> tuple[_ScaledMove, ...]:
    """Return the moves of the value, of the gradient, and of the second-order gradient if it differs."""
    if target.is_partial:
        raise InvalidArgument(f"target {target}: values cannot be divided into addends")
    if source.is_partial and source.op not in ("SUM", "AVG"):
        raise Unsupported(f"source {source}: gradients of {source.op}")
    scale = 1 / source.addend_count if source.op == "AVG" else 1.0
    forward, back = _ScaledMove(source, target), whole(source)
    if replicas == "same":
        return forward, _ScaledMove(as_source(target), back, scale)
    return forward, _ScaledMove(as_addends(target), back, scale), _ScaledMove(as_addends(back), target, scale)


@dataclass(frozen=True)
class _Passes:
    """Moves of a call and of its backward passes."""

    moves: Sequence[_ScaledMove]
    next: Sequence[int]
    comm: Communicator
    tag: str | None
    compress: Compress


class _Redistribute(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passes: _Passes, number: int, given: bool) -> torch.Tensor:
        ctx.passes, ctx.number = passes, number
        move = passes.moves[number]
        local = x if given else None
        output: torch.Tensor | None = _redistributed(
            local, move.source, move.target, group=passes.comm, tag=passes.tag, compress=passes.compress
        )
        if output is None:
            return x.new_empty(0)
        return output if move.scale == 1 else output.mul_(move.scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        passes: _Passes = ctx.passes
        number = passes.next[ctx.number]
        given = passes.comm.ranks[passes.comm.rank] in passes.moves[number].source.locals
        return applied(_Redistribute, grads[0], passes, number, given), None, None, None


class _HaloExchange(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, found: Halo, route: Route) -> torch.Tensor:
        ctx.found, ctx.route = found, route
        return found.run(x, route.comm, route.options)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return applied(_HaloReturn, grads[0], ctx.found, ctx.route), None, None


class _HaloReturn(Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, found: Halo, route: Route) -> torch.Tensor:
        ctx.found, ctx.route = found, route
        return found.start_back(y, route.comm, route.options).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return applied(_HaloExchange, grads[0], ctx.found, ctx.route), None, None
