"""Horovod's operations: by name, synchronous or as handles, in place or not, alone or in groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mcr_plus.horovod import gradients
from mcr_plus.horovod.compression import Compression
from mcr_plus.horovod.handle import Handle
from mcr_plus.horovod.reducing import Average, chosen_op
from mcr_plus.horovod.request import Request
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
    """Start an allreduce; the result is a new tensor, `tensor` stays as it is."""
    chosen = chosen_op(op, average)
    return reduce_async([tensor], name, chosen, prescale_factor, postscale_factor, process_set)


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
    """Reduce over ranks, into a new tensor; gradients flow back through it.

    Any shape, the same on all ranks. `op` is Average by default; an average of integers is their sum divided
    and rounded towards zero. `prescale_factor`, `postscale_factor` multiply before and after. A sparse tensor
    gives a sparse one, its entries gathered.
    """
    way = gradients.Reduction(chosen_op(op, average), prescale_factor, postscale_factor, compression)
    return gradients.reduced([tensor], name, way, process_set, many=False)[0]


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
    chosen = chosen_op(op, average)
    return reduce_async([tensor], name, chosen, prescale_factor, postscale_factor, process_set, in_place=True)


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
    """Start allreduces that are one operation, of one name; the result is a list of new tensors."""
    chosen = chosen_op(op, average)
    return reduce_async(tensors, name, chosen, prescale_factor, postscale_factor, process_set, many=True)


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
    """`allreduce` of several tensors as one operation; gradients flow back."""
    way = gradients.Reduction(chosen_op(op, average), prescale_factor, postscale_factor, compression)
    return gradients.reduced(tensors, name, way, process_set, many=True)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start allreduces that are one operation, in place."""
    chosen = chosen_op(op, average)
    return reduce_async(
        tensors, name, chosen, prescale_factor, postscale_factor, process_set, many=True, in_place=True
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
    """`allreduce_` of several tensors as one operation."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return synchronize(handle)  # type: ignore[no-any-return]


# -- the others -----------------------------------------------------------------------------------------


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an allgather."""
    return gather_async([tensor], name, process_set, many=False)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The ranks' tensors one after the other along dim 0, in which they may differ; gradients flow back."""
    return gradients.gathered([tensor], name, process_set, many=False)[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start allgathers that are one operation; the result is a list."""
    return gather_async(tensors, name, process_set, many=True)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """`allgather` of several tensors as one operation; gradients flow back."""
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
    """The tensor of rank `root_rank` (of the whole job), as a new one; gradients flow back to it."""
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
    """Copy the tensor of rank `root_rank` (of the whole job) into that of every rank."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to each rank and receive theirs, in rank order; gradients flow back.

    `splits[r]` rows go to rank r, equally many without. Returns what was received and, if `splits` was given,
    how many rows came from each rank.
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
        [tensor], name, chosen_op(op), prescale_factor, postscale_factor, process_set,
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
    """Reduce over ranks and keep this rank's rows; gradients flow back.

    Rows are dealt out in rank order; where they do not divide, the first ranks get one more.
    """
    way = gradients.Reduction(chosen_op(op), prescale_factor, postscale_factor, compression)
    return gradients.scattered([tensor], name, way, process_set, many=False)[0]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start reducescatters that are one operation; the result is a list."""
    return scatter_async(
        tensors, name, chosen_op(op), prescale_factor, postscale_factor, process_set,
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
    """`reducescatter` of several tensors as one operation; gradients flow back."""
    way = gradients.Reduction(chosen_op(op), prescale_factor, postscale_factor, compression)
    return gradients.scattered(tensors, name, way, process_set, many=True)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the set has called it."""
    negotiator = negotiator_of(process_set)
    name = negotiator.auto_name("barrier")
    negotiator.check_name(name)
    synchronize(negotiator.enqueue(Handle(negotiator, Request(name, "barrier"), [])))


def join(device: int = -1) -> int:  # noqa: ARG001 - the tensors' own is used
    """Say that this rank has no more data, and return once all ranks have; returns the last one's rank.

    Until then it takes part in the other ranks' allreduces with what changes no result: zeros in sums and
    averages (which still divide by all ranks). Other operations of the whole job are an error there.
    """
    everyone = current().everyone
    everyone.check_name("join")
    everyone.joined = True
    everyone.parley.wait(everyone, lambda: not everyone.joined, "join")
    return everyone.last_joined
