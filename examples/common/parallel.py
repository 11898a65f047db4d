"""Communication that gradients flow back through, over mcr_plus and over torch.distributed alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import libraries
import torch
from libraries import TransportName
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

import mcr_plus as mcr
from mcr_plus.api import autograd
from mcr_plus.parallel import expert


class Transport(libraries.Transport, Protocol):
    """What a transformer's layers need. All ranks call the same methods in one order."""

    @property
    def expert(self) -> Any:
        """`mcr.expert`, None where there is no such thing."""
        ...

    def all_to_all(self, x: Tensor, received: list[int], sent: list[int], tag: str) -> Tensor:
        """Send `sent[r]` rows of `x` to rank r; the rows that come, `received[r]` from rank r."""
        ...

    def replicate(self, x: Tensor, tag: str) -> Tensor:
        """`x` itself; its gradient is summed over the ranks."""
        ...

    def all_reduce(self, x: Tensor, tag: str) -> Tensor:
        """The sum over the ranks; its gradient is handed through."""
        ...

    def data_parallel(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """The module to call, so that gradients are averaged but for those marked `mcr_skip`."""
        ...


class McrTransport(libraries.McrTransport):
    expert = expert

    def all_to_all(self, x: Tensor, received: list[int], sent: list[int], tag: str) -> Tensor:
        return autograd.all_to_all_single(x, received, sent, tag=tag)

    def replicate(self, x: Tensor, tag: str) -> Tensor:
        return autograd.replicate(x, tag=tag)

    def all_reduce(self, x: Tensor, tag: str) -> Tensor:
        return autograd.all_reduce(x, tag=tag)

    def data_parallel(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        return mcr.wrap(model, optimizer)[0]


class TorchTransport(libraries.TorchTransport):
    expert = None

    def all_to_all(self, x: Tensor, received: list[int], sent: list[int], tag: str) -> Tensor:  # noqa: ARG002
        return _applied(_AllToAll, x, received, sent)

    def replicate(self, x: Tensor, tag: str) -> Tensor:  # noqa: ARG002
        return _applied(_Replicate, x)

    def all_reduce(self, x: Tensor, tag: str) -> Tensor:  # noqa: ARG002
        return _applied(_AllReduce, x)

    def data_parallel(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:  # noqa: ARG002
        ignored = [name for name, each in model.named_parameters() if getattr(each, "mcr_skip", False)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        return DistributedDataParallel(model, gradient_as_bucket_view=True)


def open_transport(name: TransportName, config: Path) -> Transport:
    """Join the other ranks; raises McrError when the library is not there."""
    return libraries.open_as(name, config, McrTransport, TorchTransport)


# --- torch.distributed has no such functions, or with another backward ----------------------------------


def _applied(function: type[Function], *arguments: object) -> Tensor:
    return cast("Callable[..., Tensor]", function.apply)(*arguments)


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.received, ctx.sent = received, sent
        output = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(output, x.contiguous(), received, sent)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _applied(_AllToAll, grads[0], ctx.sent, ctx.received), None, None


def _summed(x: Tensor) -> Tensor:
    output = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(output)
    return output


class _Replicate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return _summed(grads[0])


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return _summed(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return grads[0]
