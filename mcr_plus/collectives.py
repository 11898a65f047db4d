"""Operations on a group as functions; `group=None` is the whole job. See `Communicator` for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mcr_plus import runtime
from mcr_plus.communicator import Communicator, Compress, P2POp
from mcr_plus.dispatch.work import Work
from mcr_plus.message import ReduceOp
from mcr_plus.observe.record import Log, recording
from mcr_plus.rerun import PersistentOp
from mcr_plus.runtime import member_of as _of


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """Reduce `tensor` (any shape) over all ranks, in place; all ranks get the same bits."""
    return _of(group).all_reduce(tensor, op, async_op, backend=backend, compress=compress, tag=tag)


def broadcast(
    tensor: torch.Tensor,
    src: int,
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """Copy `tensor` of rank `src` into that of every rank."""
    return _of(group).broadcast(tensor, src, async_op, backend=backend, compress=compress, tag=tag)


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """Reduce `tensor` over all ranks into that of rank `dst`; the others keep theirs."""
    return _of(group).reduce(tensor, dst, op, async_op, backend=backend, compress=compress, tag=tag)


def all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """Gather every rank's `tensor` into `tensor_list`, all of the same size; see `all_gather_v` otherwise."""
    return _of(group).all_gather(tensor_list, tensor, async_op, backend=backend, compress=compress, tag=tag)


def all_gather_into_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """Gather every rank's `input` of n elements into `output` of size × n elements, in rank order."""
    return _of(group).all_gather_into_tensor(
        output, input, async_op, backend=backend, compress=compress, tag=tag
    )


def all_gather_v(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """As `all_gather`, with sizes that differ along dim 0; `tensor_list[r]` has the size of rank r's."""
    return _of(group).all_gather_v(tensor_list, tensor, async_op, backend=backend, compress=compress, tag=tag)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """Reduce `input_list[r]` over ranks into `output` of rank r, all of the same size."""
    return _of(group).reduce_scatter(
        output, input_list, op, async_op, backend=backend, compress=compress, tag=tag
    )


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """Reduce `input` of size × n elements over ranks; rank r gets part r in `output` of n elements."""
    return _of(group).reduce_scatter_tensor(
        output, input, op, async_op, backend=backend, compress=compress, tag=tag
    )


def reduce_scatter_v(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """As `reduce_scatter`, with sizes that differ along dim 0; `input_list[r]` fits rank r's output."""
    return _of(group).reduce_scatter_v(
        output, input_list, op, async_op, backend=backend, compress=compress, tag=tag
    )


def all_to_all(
    output_list: Sequence[torch.Tensor],
    input_list: Sequence[torch.Tensor],
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """Send `input_list[r]` to rank r and receive from it into `output_list[r]`; sizes may differ."""
    return _of(group).all_to_all(
        output_list, input_list, async_op, backend=backend, compress=compress, tag=tag
    )


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """Send part r of `input` to rank r and receive its part for us into `output`, in rank order."""
    return _of(group).all_to_all_single(
        output,
        input,
        output_split_sizes,
        input_split_sizes,
        async_op,
        backend=backend,
        compress=compress,
        tag=tag,
    )


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int = 0,
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """Gather every rank's `tensor`, all of one size, into `gather_list` of rank `dst` (None elsewhere)."""
    return _of(group).gather(tensor, gather_list, dst, async_op, backend=backend, compress=compress, tag=tag)


def gather_v(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int = 0,
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """As `gather`, with sizes that differ along dim 0."""
    return _of(group).gather_v(
        tensor, gather_list, dst, async_op, backend=backend, compress=compress, tag=tag
    )


def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """Send `scatter_list[r]` of rank `src` (None elsewhere) into `tensor` of rank r, all of the same size."""
    return _of(group).scatter(
        tensor, scatter_list, src, async_op, backend=backend, compress=compress, tag=tag
    )


def scatter_v(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """As `scatter`, with sizes that differ along dim 0."""
    return _of(group).scatter_v(
        tensor, scatter_list, src, async_op, backend=backend, compress=compress, tag=tag
    )


def barrier(
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    tag: str | None = None,
) -> Work | None:
    """Return once every rank has called it."""
    return _of(group).barrier(async_op, backend=backend, tag=tag)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """`all_reduce` of each tensor, in flight together; one handle."""
    return _of(group).all_reduce_coalesced(tensors, op, async_op, backend=backend, compress=compress, tag=tag)


def all_gather_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """`all_gather_into_tensor` of each pair, in flight together; one handle."""
    return _of(group).all_gather_coalesced(
        outputs, inputs, async_op, backend=backend, compress=compress, tag=tag
    )


def reduce_scatter_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
) -> Work | None:
    """`reduce_scatter_tensor` of each pair, in flight together; one handle."""
    return _of(group).reduce_scatter_coalesced(
        outputs, inputs, op, async_op, backend=backend, compress=compress, tag=tag
    )


def send(
    tensor: torch.Tensor,
    dst: int,
    tag: int = 0,
    *,
    group: Communicator | None = None,
    backend: str | None = None,
    compress: Compress = None,
    label: str | None = None,
) -> None:
    """Send `tensor` to rank `dst`; returns when it may be changed again."""
    _of(group).send(tensor, dst, tag, backend=backend, compress=compress, label=label)


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    tag: int = 0,
    *,
    group: Communicator | None = None,
    backend: str | None = None,
    compress: Compress = None,
    label: str | None = None,
) -> None:
    """Receive into `tensor` from rank `src`, or from whoever sends first with this `tag`."""
    _of(group).recv(tensor, src, tag, backend=backend, compress=compress, label=label)


def isend(
    tensor: torch.Tensor,
    dst: int,
    tag: int = 0,
    *,
    group: Communicator | None = None,
    backend: str | None = None,
    compress: Compress = None,
    label: str | None = None,
) -> Work:
    """Start a send. `tag` must equal the receiver's; `label` is the name that rules and logs show."""
    return _of(group).isend(tensor, dst, tag, backend=backend, compress=compress, label=label)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    tag: int = 0,
    *,
    group: Communicator | None = None,
    backend: str | None = None,
    compress: Compress = None,
    label: str | None = None,
) -> Work:
    """Start a receive; `Work.source_rank()` says whom it came from."""
    return _of(group).irecv(tensor, src, tag, backend=backend, compress=compress, label=label)


def batch_isend_irecv(p2p_ops: Sequence[P2POp], group: Communicator | None = None) -> list[Work]:
    """Start all sends and receives of a batch, in any order that peers may also use."""
    return _of(group).batch_isend_irecv(p2p_ops)


def broadcast_object(obj: Any, src: int, group: Communicator | None = None) -> Any:
    """The object of rank `src`, on every rank. Pickled: between the ranks of one's own job only."""
    return _of(group).broadcast_object(obj, src)


def all_gather_object(obj: Any, group: Communicator | None = None, *, tag: str | None = None) -> list[Any]:
    """Every rank's object, in rank order. Pickled: between the ranks of one's own job only."""
    return _of(group).all_gather_object(obj, tag=tag)


def persistent(kind: str, *tensors: Any, group: Communicator | None = None, **options: Any) -> PersistentOp:
    """Bind an operation to its tensors once: `op()` runs it, `op.start()` returns a `Work`."""
    return _of(group).persistent(kind, *tensors, **options)


def flush(group: Communicator | None = None) -> None:
    """Send what the fuse stage holds back. Every rank of the group must call it at the same place."""
    _of(group).flush()


@contextmanager
def record() -> Iterator[Log]:
    """Record the operations of this process that are issued and end inside the block.

    Nothing is synchronised for it, so the program runs as it does without.
    """
    current = runtime.current()
    with recording(current.engine, current.world.rank) as log:
        yield log
