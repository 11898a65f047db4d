"""Horovod's operations: synchronous or with handles, in place or not, single or grouped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mcr_plus.horovod import gradients
from mcr_plus.horovod.compression import Compression
from mcr_plus.horovod.handle import Handle
from mcr_plus.horovod.reducing import Average, reduce_op_of
from mcr_plus.horovod.request import OperationRequest
from mcr_plus.horovod.starting import gather_async, reduce_async, scatter_async, send_async, synchronize
from mcr_plus.horovod.world import ProcessSet, current, global_process_set, negotiator_of

Tensors = Sequence[torch.Tensor]


# -- allreduce ------------------------------------------------------------------------------------------


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an allreduce; the result is a new tensor, and `tensor` is not changed."""
    reduce_op = reduce_op_of(op, average)
    return reduce_async([tensor], name, reduce_op, prescale_factor, postscale_factor, process_set)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce over ranks, into a new tensor; differentiable.

    The shape is arbitrary, but equal on all ranks. `op` is Average by default; an average of integers is the
    sum divided by the number of ranks, rounded towards zero. `prescale_factor` and `postscale_factor`
    multiply before and after the reduction. Entries of sparse tensors are gathered into a sparse result.
    """
    reduction = gradients.Reduction(reduce_op_of(op, average), prescale_factor, postscale_factor, compression)
    return gradients.reduced([tensor], name, reduction, process_set, many=False)[0]


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an allreduce in place."""
    reduce_op = reduce_op_of(op, average)
    return reduce_async(
        [tensor], name, reduce_op, prescale_factor, postscale_factor, process_set, in_place=True
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce over ranks, in place."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start allreduces of several tensors as one named operation; the result is a list of new tensors."""
    reduce_op = reduce_op_of(op, average)
    return reduce_async(tensors, name, reduce_op, prescale_factor, postscale_factor, process_set, many=True)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Run `allreduce` on several tensors as one operation; differentiable."""
    reduction = gradients.Reduction(reduce_op_of(op, average), prescale_factor, postscale_factor, compression)
    return gradients.reduced(tensors, name, reduction, process_set, many=True)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start allreduces of several tensors as one operation, in place."""
    reduce_op = reduce_op_of(op, average)
    return reduce_async(
        tensors, name, reduce_op, prescale_factor, postscale_factor, process_set, many=True, in_place=True
    )


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Run `allreduce_` on several tensors as one operation."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return synchronize(handle)  # type: ignore[no-any-return]


# -- other operations -----------------------------------------------------------------------------------


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an allgather."""
    return gather_async([tensor], name, process_set, many=False)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the ranks' tensors along dim 0; sizes of dim 0 may differ. Differentiable."""
    return gradients.gathered([tensor], name, process_set, many=False)[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start allgathers of several tensors as one operation; the result is a list."""
    return gather_async(tensors, name, process_set, many=True)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Run `allgather` on several tensors as one operation; differentiable."""
    return gradients.gathered(tensors, name, process_set, many=True)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a broadcast; the result is a new tensor."""
    return send_async([tensor], root_rank, name, process_set, in_place=False)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return a copy of the tensor of rank `root_rank` (of the whole job); differentiable."""
    return gradients.sent(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a broadcast in place."""
    return send_async([tensor], root_rank, name, process_set, in_place=True)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Copy the tensor of rank `root_rank` (of the whole job) into the tensor of every rank."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to each rank and receive rows from each, in rank order; differentiable.

    `splits[r]` rows go to rank r; None sends equal numbers. Returns the received rows and, if `splits` was
    given, the number of rows from each rank.
    """
    output, received = gradients.exchanged(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reducescatter."""
    return scatter_async(
        [tensor], name, reduce_op_of(op), prescale_factor, postscale_factor, process_set,
        compression=Compression.none, many=False,
    )  # fmt: skip


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce over ranks and keep this rank's rows; differentiable.

    Rows are distributed in rank order; the first ranks get the remainder, one row each.
    """
    reduction = gradients.Reduction(reduce_op_of(op), prescale_factor, postscale_factor, compression)
    return gradients.scattered([tensor], name, reduction, process_set, many=False)[0]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start reducescatters of several tensors as one operation; the result is a list."""
    return scatter_async(
        tensors, name, reduce_op_of(op), prescale_factor, postscale_factor, process_set,
        compression=Compression.none, many=True,
    )  # fmt: skip


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Run `reducescatter` on several tensors as one operation; differentiable."""
    reduction = gradients.Reduction(reduce_op_of(op), prescale_factor, postscale_factor, compression)
    return gradients.scattered(tensors, name, reduction, process_set, many=True)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has called `barrier`."""
    negotiator = negotiator_of(process_set)
    name = negotiator.auto_name("barrier")
    negotiator.check_name(name)
    synchronize(negotiator.enqueue(Handle(negotiator, OperationRequest(name, "barrier"), [])))


def join(device: int = -1) -> int:  # noqa: ARG001 - the tensors' own device is used
    """Announce that this rank has no more data, and wait until all ranks join; return the last one.

    Meanwhile this rank contributes neutral elements to the other ranks' allreduces: zeros to sums and
    averages. Averages still divide by the number of all ranks. Other operations of the whole job raise an
    error.
    """
    everyone = current().everyone
    everyone.check_name("join")
    everyone.joined = True
    everyone.negotiations.wait(everyone, lambda: not everyone.joined, "join")
    return everyone.last_joined
