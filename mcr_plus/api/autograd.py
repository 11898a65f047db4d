"""Differentiable collectives.

    from mcr_plus import autograd

    rows = autograd.all_to_all_single(x, received, sent, tag="dispatch")
    loss(experts(rows)).backward()  # the gradient of x takes the reverse exchange

Every function takes a tensor of any dtype and returns a tensor of the same dtype; floating-point and complex
tensors have gradients. Neither inputs nor gradients are changed in place, and an input may be changed as soon
as the function has returned. `group`, `backend`, `compress`, `tag` and the errors are the same as in
`mcr_plus.api.collectives`, and apply to the backward pass too.

The backward pass communicates too, so all ranks of the group must run it. If a rank needs no gradient for its
input, or does not use the result, its peers wait for it.

Each backward operation is again a function of this module, so gradients of gradients work too.
"""

# Long because each operation has a documented function and a backward pass.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd import Function

from mcr_plus.communicator.calls import CallOptions, Unpack, check_options
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.errors import InvalidArgument
from mcr_plus.job.init import member_of

__all__ = [
    "all_gather", "all_reduce", "all_to_all_single", "reduce_scatter", "replicate",
]  # fmt: skip


def all_to_all_single(
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    group: Communicator | None = None,
    **options: Unpack[CallOptions],
) -> torch.Tensor:
    """Send part r of `input` to rank r; return the parts received from the ranks, in rank order.

    `input` has shape [n, ...] and the result [m, ...]. Parts are consecutive rows along dim 0:
    `input_split_sizes[r]` rows go to rank r (n in all) and `output_split_sizes[r]` rows come from it (m in
    all); 0 is allowed. Without split sizes parts are equal, m = n, and n must be divisible by the number of
    ranks. Either every rank passes both, or no rank does.

    The backward pass is the same exchange with the splits swapped: it returns each row's gradient to the rank
    that sent the row. Used in expert parallelism (Lepikhin et al. 2020, arXiv 2006.16668).

    Raises:
        InvalidArgument: `input` has no dimension or is no torch tensor, split sizes do not sum to dim 0, only
            one list of them is given, or dim 0 is not divisible.

    Example:
        ```python
        x = torch.ones(4, 3, requires_grad=True)
        y = autograd.all_to_all_single(x)  # shape [4, 3]: two rows of each rank
        (y * mcr.get_rank()).sum().backward()
        assert x.grad[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
        ```
    """
    _check_rows(input)
    if (output_split_sizes is None) != (input_split_sizes is None):
        raise InvalidArgument("output_split_sizes, input_split_sizes: expected both or neither")
    received, sent = _sizes(output_split_sizes, "output"), _sizes(input_split_sizes, "input")
    return applied(_AllToAll, input, Route(member_of(group), options), received, sent)


def replicate(
    x: torch.Tensor, *, group: Communicator | None = None, **options: Unpack[CallOptions]
) -> torch.Tensor:
    """Return `x` unchanged; the backward pass sums its gradient over the ranks.

    Any shape, the same on all ranks. Use it on a tensor that is equal on all ranks and that each rank uses in
    a different part of the computation. This is f of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053), the
    conjugate of `all_reduce`.

    Raises:
        NotInitialized: there is no job, or the group is closed.

    Example:
        ```python
        x = torch.ones(2, requires_grad=True)
        (autograd.replicate(x) * (1 + mcr.get_rank())).sum().backward()
        assert x.grad.tolist() == [3.0, 3.0]  # 1 + 2
        ```
    """
    return applied(_Replicate, x, Route(member_of(group), options))


def all_reduce(
    x: torch.Tensor, *, group: Communicator | None = None, **options: Unpack[CallOptions]
) -> torch.Tensor:
    """Return the sum of `x` over the ranks; the backward pass returns the gradient unchanged.

    Any shape, the same on all ranks. The gradient is right if all ranks compute the same from the result, so
    that every rank has the gradient of the common loss. This is g of Megatron-LM (Shoeybi et al. 2019, arXiv
    1909.08053), the conjugate of `replicate`.

    Raises:
        NotInitialized: there is no job, or the group is closed.

    Example:
        ```python
        x = torch.ones(2, requires_grad=True)
        y = autograd.all_reduce(x)
        y.sum().backward()
        assert y.tolist() == [2.0, 2.0]
        assert x.grad.tolist() == [1.0, 1.0]
        ```
    """
    return applied(_AllReduce, x, Route(member_of(group), options))


def all_gather(
    x: torch.Tensor, *, group: Communicator | None = None, **options: Unpack[CallOptions]
) -> torch.Tensor:
    """Return every rank's `x` of shape [n, ...], concatenated along dim 0: [ranks * n, ...].

    Shapes are equal on all ranks. The backward pass is `reduce_scatter`: it sums the gradients of this
    rank's part over the ranks, for a loss that is the sum of all ranks' losses. Used in sequence parallelism
    (Korthikanti et al. 2022, arXiv 2205.05198).

    Raises:
        InvalidArgument: `x` has no dimension or is no torch tensor.

    Example:
        ```python
        x = torch.ones(1, 3, requires_grad=True)
        y = autograd.all_gather(x)
        y.sum().backward()
        assert list(y.shape) == [2, 3]
        assert x.grad.tolist() == [[2.0, 2.0, 2.0]]  # used on two ranks
        ```
    """
    _check_rows(x)
    return applied(_AllGather, x, Route(member_of(group), options))


def reduce_scatter(
    x: torch.Tensor, *, group: Communicator | None = None, **options: Unpack[CallOptions]
) -> torch.Tensor:
    """Sum `x` of shape [ranks * n, ...] over the ranks; rank r gets part r along dim 0: [n, ...].

    Shapes are equal on all ranks. The backward pass is `all_gather`: it concatenates every rank's
    gradient of its part, for a loss that is the sum of all ranks' losses. Used in sequence parallelism
    (Korthikanti et al. 2022, arXiv 2205.05198).

    Raises:
        InvalidArgument: `x` has no dimension or is no torch tensor, or dim 0 is not divisible by the ranks.

    Example:
        ```python
        x = torch.ones(4, requires_grad=True)
        y = autograd.reduce_scatter(x)
        (y * mcr.get_rank()).sum().backward()
        assert y.tolist() == [2.0, 2.0]
        assert x.grad.tolist() == [0.0, 0.0, 1.0, 1.0]
        ```
    """
    _check_rows(x)
    comm = member_of(group)
    if len(x) % comm.size:
        raise InvalidArgument(f"x: dim 0 is {len(x)}, not divisible by {comm.size} ranks")
    return applied(_ReduceScatter, x, Route(comm, options))


@dataclass(frozen=True)
class Route:
    """Group and options of a call, used by its forward and backward pass."""

    comm: Communicator
    options: CallOptions

    def __post_init__(self) -> None:
        check_options("all_reduce", None, self.options)


def applied(function: type[Function], *arguments: object) -> torch.Tensor:
    """Return the result of an autograd function."""
    apply = cast("Callable[..., torch.Tensor]", function.apply)
    return apply(*arguments)


def _check_rows(x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument(f"expected a torch.Tensor, got {type(x).__name__}")
    if not x.ndim:
        raise InvalidArgument("expected a tensor of at least one dimension, got one of none")


def _sizes(sizes: Sequence[int] | None, name: str) -> list[int] | None:
    if sizes is None:
        return None
    if any(size < 0 for size in sizes):
        raise InvalidArgument(f"{name}_split_sizes: expected integers from 0, got {list(sizes)}")
    return list(sizes)


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, route: Route, received: list[int] | None, sent: list[int] | None
    ) -> torch.Tensor:
        ctx.route, ctx.received, ctx.sent = route, received, sent
        output = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:])
        route.comm.all_to_all_single(output, x, received, sent, **route.options)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return applied(_AllToAll, grads[0], ctx.route, ctx.sent, ctx.received), None, None, None


class _Replicate(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return applied(_AllReduce, grads[0], ctx.route), None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        output = x.clone(memory_format=torch.contiguous_format)
        route.comm.all_reduce(output, **route.options)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return applied(_Replicate, grads[0], ctx.route), None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        output = x.new_empty(route.comm.size * len(x), *x.shape[1:])
        route.comm.all_gather_into_tensor(output, x, **route.options)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return applied(_ReduceScatter, grads[0], ctx.route), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        output = x.new_empty(len(x) // route.comm.size, *x.shape[1:])
        route.comm.reduce_scatter_tensor(output, x, **route.options)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return applied(_AllGather, grads[0], ctx.route), None
