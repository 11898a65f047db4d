"""Differentiable functions for Horovod's operations.

A backward operation has the name of its forward operation plus `.grad`, so ranks may issue backward
operations in different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from mcr_plus.errors import Unsupported
from mcr_plus.horovod import starting
from mcr_plus.horovod.compression import Compression
from mcr_plus.horovod.handle import Handle
from mcr_plus.horovod.reducing import Average, HorovodReduceOp, Sum
from mcr_plus.horovod.world import ProcessSet, negotiator_of

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Reduction:
    """Options of a reduction and of its backward operation."""

    op: HorovodReduceOp
    before: float = 1.0
    after: float = 1.0
    compression: Any = Compression.none

    def check_linear(self) -> None:
        """Raise `Unsupported` for reduce ops without a gradient."""
        if self.op not in (Average, Sum):
            raise Unsupported(
                f"op: {self.op.name.capitalize()} has no gradient here; only Average and Sum do"
            )


_How = tuple[Callable[..., Handle], Reduction, ProcessSet, bool]
"""What starts a reduction, its options, and if it is of many tensors."""


def _applied(function: type[Function], *arguments: object) -> Any:
    apply: Callable[..., Any] = function.apply
    return apply(*arguments)


def _needed(tensors: Any) -> bool:
    """Return True if a gradient may be needed; the tensors are validated later."""
    return torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)


def _named(name: str | None, kind: str, process_set: ProcessSet) -> str:
    return negotiator_of(process_set).auto_name(kind) if name is None else name


# -- allreduce ------------------------------------------------------------------------------------------


def reduced(
    tensors: Tensors, name: str | None, reduction: Reduction, process_set: ProcessSet, *, many: bool
) -> list[torch.Tensor]:
    """See `mcr_plus.horovod.allreduce`."""
    how = starting.reduce_async, reduction, process_set, many
    return _reducing(_Reduce, "allreduce", tensors, name, how)


def _reducing(
    function: type[Function], kind: str, tensors: Tensors, name: str | None, how: _How
) -> list[torch.Tensor]:
    if not _needed(tensors):
        return _reduce(tensors, name, how)
    return list(_applied(function, _named(name, kind, how[2]), how, *tensors))


def _reduce(tensors: Tensors, name: str | None, how: _How) -> list[torch.Tensor]:
    start, reduction, process_set, many = how
    handle = start(
        tensors, name, reduction.op, reduction.before, reduction.after, process_set,
        compression=reduction.compression, many=many,
    )  # fmt: skip
    outputs = starting.synchronize(handle)
    return outputs if many else [outputs]


class _Reducing(Function):
    @staticmethod
    def forward(ctx: Any, name: str, how: _How, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = name, *how[1:]
        return tuple(_reduce(tensors, name, how))


class _Reduce(_Reducing):
    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        name, reduction, process_set, many = ctx.call
        reduction.check_linear()
        back = reduced(list(grads), f"{name}.grad", reduction, process_set, many=many)
        return None, None, *back


# -- allgather ------------------------------------------------------------------------------------------


def gathered(
    tensors: Tensors, name: str | None, process_set: ProcessSet, *, many: bool
) -> list[torch.Tensor]:
    """See `mcr_plus.horovod.allgather`."""
    if not _needed(tensors):
        return _gather(tensors, name, process_set, many)[0]
    given_name = _named(name, "allgather", process_set)
    return list(_applied(_Gather, given_name, process_set, many, *tensors))


def _gather(
    tensors: Tensors, name: str | None, process_set: ProcessSet, many: bool
) -> tuple[list[torch.Tensor], list[int]]:
    """Return the gathered tensors, and the index of this rank's first row in each."""
    handle = starting.gather_async(tensors, name, process_set, many=many)
    outputs = starting.synchronize(handle)
    return (outputs if many else [outputs]), handle.offsets


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, process_set: ProcessSet, many: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs, offsets = _gather(tensors, name, process_set, many)
        ctx.call = name, process_set, many
        ctx.parts = [(offset, len(tensor)) for offset, tensor in zip(offsets, tensors, strict=True)]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        name, process_set, many = ctx.call
        back = reduced(list(grads), f"{name}.grad", Reduction(Average), process_set, many=many)
        own = [grad.narrow(0, *part) for grad, part in zip(back, ctx.parts, strict=True)]
        return None, None, None, *own


# -- broadcast ------------------------------------------------------------------------------------------


def sent(tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """See `mcr_plus.horovod.broadcast`."""
    if not _needed([tensor]):
        return _send(tensor, root, name, process_set)
    given_name = _named(name, "broadcast", process_set)
    return _applied(_Send, tensor, root, given_name, process_set)  # type: ignore[no-any-return]


def _send(tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    handle = starting.send_async([tensor], root, name, process_set, in_place=False)
    return starting.synchronize(handle)  # type: ignore[no-any-return]


class _Send(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root: int, name: str, process_set: ProcessSet
    ) -> torch.Tensor:
        comm = negotiator_of(process_set).comm
        ctx.call = name, process_set
        ctx.is_root = comm.ranks[comm.rank] == root
        return _send(tensor, root, name, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        name, process_set = ctx.call
        (back,) = reduced([grads[0]], f"{name}.grad", Reduction(Average), process_set, many=False)
        return (back if ctx.is_root else torch.zeros_like(back)), None, None, None


# -- alltoall -------------------------------------------------------------------------------------------


def exchanged(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange like `mcr_plus.horovod.alltoall`; always return the number of rows from each rank, too."""
    if splits is None and isinstance(tensor, torch.Tensor) and tensor.ndim:
        ranks = negotiator_of(process_set).comm.size
        if len(tensor) % ranks == 0:
            splits = [len(tensor) // ranks] * ranks
    if not _needed([tensor]):
        return _exchange(tensor, splits, name, process_set)
    given_name = _named(name, "alltoall", process_set)
    return _applied(_Exchange, tensor, splits, given_name, process_set)  # type: ignore[no-any-return]


def _exchange(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor]:
    handle = starting.alltoall_async(tensor, splits, name, process_set)
    return starting.synchronize(handle)  # type: ignore[no-any-return]


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = _exchange(tensor, splits, name, process_set)
        ctx.call, ctx.rows = (received, name, process_set), len(tensor)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        received, name, process_set = ctx.call
        back, _ = exchanged(grads[0], received, f"{name}.grad", process_set)
        if len(back) < ctx.rows:  # rows at the end were not sent
            back = torch.cat([back, back.new_zeros(ctx.rows - len(back), *back.shape[1:])])
        return back, None, None, None


# -- reducescatter --------------------------------------------------------------------------------------


def scattered(
    tensors: Tensors, name: str | None, reduction: Reduction, process_set: ProcessSet, *, many: bool
) -> list[torch.Tensor]:
    """See `mcr_plus.horovod.reducescatter`."""
    how = starting.scatter_async, reduction, process_set, many
    return _reducing(_Scatter, "reducescatter", tensors, name, how)


class _Scatter(_Reducing):
    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        name, reduction, process_set, many = ctx.call
        reduction.check_linear()
        ranks = negotiator_of(process_set).comm.size
        factor = reduction.before * reduction.after * (ranks if reduction.op == Sum else 1)
        scaled = [grad if factor == 1.0 else grad * factor for grad in grads]
        back = gathered(scaled, f"{name}.grad", process_set, many=many)
        return None, None, *back
