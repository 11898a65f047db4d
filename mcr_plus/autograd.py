"""Collectives that gradients flow back through.

    from mcr_plus import autograd

    rows = autograd.all_to_all_single(x, received, sent, tag="dispatch")
    loss(experts(rows)).backward()  # the gradient of x takes the same way back

Every function takes a tensor and returns another; neither inputs nor gradients are changed in place. A
backward pass communicates where its forward pass did, so all ranks of the group must run both: a rank whose
input needs no gradient, or that does not use what it received, leaves its peers waiting.

Each backward operation is one of these functions again, so gradients of gradients work too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd import Function

from mcr_plus.communicator import Communicator, Compress
from mcr_plus.errors import InvalidArgument
from mcr_plus.runtime import member_of

__all__ = ["all_gather", "all_reduce", "all_to_all_single", "reduce_scatter", "replicate"]


def all_to_all_single(
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    group: Communicator | None = None,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> torch.Tensor:
    """Send part r of `input` to rank r; returns the parts that the ranks sent here, in rank order.

    `input` has shape [n, ...] and the result [m, ...]. Parts are runs of dim 0: `input_split_sizes[r]` rows
    go to rank r (n in all) and `output_split_sizes[r]` rows come from it (m in all), 0 included. Without
    split sizes parts are equal, m = n, and n must divide by the number of ranks. Every rank passes both
    or none does.

    Backward is the same exchange with the splits swapped: row gradients return to where the rows came
    from. As in expert parallelism (Lepikhin et al. 2020, arXiv 2006.16668).
    """
    _check_rows(input)
    if (output_split_sizes is None) != (input_split_sizes is None):
        raise InvalidArgument("output_split_sizes, input_split_sizes: expected both or neither")
    received, sent = _sizes(output_split_sizes, "output"), _sizes(input_split_sizes, "input")
    return _applied(_AllToAll, input, _Way(member_of(group), backend, compress, tag), received, sent)


def replicate(
    x: torch.Tensor,
    *,
    group: Communicator | None = None,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> torch.Tensor:
    """Return `x` as it is; backward sums its gradient over the ranks.

    Any shape, the same on all ranks. Put it where a tensor that is equal on all ranks enters computations
    that differ between them, each of which contributes to its gradient. This is f of Megatron-LM (Shoeybi
    et al. 2019, arXiv 1909.08053), the conjugate of `all_reduce`.
    """
    return _applied(_Replicate, x, _Way(member_of(group), backend, compress, tag))


def all_reduce(
    x: torch.Tensor,
    *,
    group: Communicator | None = None,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> torch.Tensor:
    """Return the sum of `x` over the ranks; backward hands the gradient through as it is.

    Any shape, the same on all ranks. The gradient is right if what follows is the same on all ranks, so that
    every rank has the gradient of the one loss already. This is g of Megatron-LM (Shoeybi et al. 2019, arXiv
    1909.08053), the conjugate of `replicate`.
    """
    return _applied(_AllReduce, x, _Way(member_of(group), backend, compress, tag))


def all_gather(
    x: torch.Tensor,
    *,
    group: Communicator | None = None,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> torch.Tensor:
    """Return every rank's `x` of shape [n, ...], one after the other along dim 0: [ranks * n, ...].

    Shapes are equal on all ranks. Backward is `reduce_scatter`: the gradient of this rank's part, summed over
    the ranks that have used it, for a loss that is the sum of all ranks' losses. As in sequence parallelism
    (Korthikanti et al. 2022, arXiv 2205.05198).
    """
    _check_rows(x)
    return _applied(_AllGather, x, _Way(member_of(group), backend, compress, tag))


def reduce_scatter(
    x: torch.Tensor,
    *,
    group: Communicator | None = None,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> torch.Tensor:
    """Sum `x` of shape [ranks * n, ...] over the ranks; rank r gets part r along dim 0: [n, ...].

    Shapes are equal on all ranks. Backward is `all_gather`: every rank's gradient of its part, put together,
    for a loss that is the sum of all ranks' losses. As in sequence parallelism (Korthikanti et al. 2022,
    arXiv 2205.05198).
    """
    _check_rows(x)
    comm = member_of(group)
    if len(x) % comm.size:
        raise InvalidArgument(f"x: dim 0 is {len(x)}, which does not divide by {comm.size} ranks")
    return _applied(_ReduceScatter, x, _Way(comm, backend, compress, tag))


@dataclass(frozen=True)
class _Way:
    """How a call travels, forth and back."""

    comm: Communicator
    backend: str | None
    compress: Compress
    tag: str | None

    @property
    def options(self) -> dict[str, Any]:
        return {"backend": self.backend, "compress": self.compress, "tag": self.tag}


def _applied(function: type[Function], *arguments: object) -> torch.Tensor:
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
        ctx: Any, x: torch.Tensor, way: _Way, received: list[int] | None, sent: list[int] | None
    ) -> torch.Tensor:
        ctx.way, ctx.received, ctx.sent = way, received, sent
        output = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:])
        way.comm.all_to_all_single(output, x, received, sent, **way.options)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _applied(_AllToAll, grads[0], ctx.way, ctx.sent, ctx.received), None, None, None


class _Replicate(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _applied(_AllReduce, grads[0], ctx.way), None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        output = x.clone(memory_format=torch.contiguous_format)
        way.comm.all_reduce(output, **way.options)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _applied(_Replicate, grads[0], ctx.way), None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        output = x.new_empty(way.comm.size * len(x), *x.shape[1:])
        way.comm.all_gather_into_tensor(output, x, **way.options)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _applied(_ReduceScatter, grads[0], ctx.way), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        output = x.new_empty(len(x) // way.comm.size, *x.shape[1:])
        way.comm.reduce_scatter_tensor(output, x, **way.options)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _applied(_AllGather, grads[0], ctx.way), None
