"""Operations on a group, as functions. `Communicator` has them as methods, without the argument `group`.

Names, argument order and in-place semantics are those of `torch.distributed`. Common arguments:

- `group`: the `Communicator` whose ranks take part; None is the whole job. All ranks of a group issue the
  same operations in the same order, from one thread. `src` and `dst` are ranks of the whole job, also in a
  sub-group; lists have one entry per member, in group order.
- `async_op`: False returns None once the result may be used. True returns a `Work` at once, and the result
  may be used after its `wait()`. Every rank of the group passes the same value.
- `backend`: the library's name, such as "mpi"; None leaves the choice to the pipeline.
- `compress`: None leaves the choice to the pipeline, False turns compression off, "int8_block" or
  `{"codec": "topk", "ratio": 0.01}` names a codec of the floating-point payload.
- `tag`: a free name such as "moe.dispatch", which rules match and logs show. `send` and `recv` call this
  name `label`; their `tag` is an integer that must be equal on both sides.

Functions with `**options` take `backend`, `compress`, `tag` and, if they reduce, `sums` as keywords.

Tensors are torch tensors on the CPU or a CUDA device, or arrays of other libraries (NumPy, CuPy; by DLPack or
`__cuda_array_interface__`), used without a copy. On a GPU, an operation runs after the work on the stream
that its arrays state (with CuPy, the current stream), and before later work on the stream stated at its
`wait()`. If arrays state no stream, the host waits for the operation. Tensors and arrays may be strided,
empty or 0-dimensional; outputs that are not contiguous cost a copy. Dtypes: float64, float32, float16,
bfloat16, int8, int16, int32, int64, uint8, bool, complex64, complex128. All tensors of a call have one dtype
and one device, and the dtype is the same on all ranks. Gradients need `mcr_plus.autograd`.

Inputs may be changed, and outputs read, once a synchronous call has returned or the `Work` has been waited
for. Until then, neither may be touched. An input that shares memory with an output is allowed.

Errors that every operation can raise, in the call or from the `wait()` of its `Work`:

- `NotInitialized`: there is no job, or the group is closed.
- `InvalidArgument`: an argument that no backend could take. Nothing has been sent.
- `Unsupported`: no support for the dtype, layout, device, backend or codec; or this rank is not in the group.
- `OrderMismatch`: ranks of the group issued different operations; the text names both.
- `CommTimeout`: the deadline (`dispatch: {timeout: ...}`) has passed; the text names the ranks of the job
  that are missing.
- `BackendError`: the library failed; `PeerLost`: ranks have died, are stopped or are out of reach.
"""

# Long because each operation has a function with documentation and an example.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mcr_plus.communicator.calls import CallOptions, Compress, MessageOptions, Unpack
from mcr_plus.communicator.communicator import Communicator, P2POp
from mcr_plus.core.kinds import ReduceOp, Sums
from mcr_plus.core.work import Work
from mcr_plus.job.init import member_of as _of
from mcr_plus.job.process import job

if TYPE_CHECKING:
    from mcr_plus.communicator.persistent import PersistentOp


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    compress: Compress = None,
    tag: str | None = None,
    sums: Sums | None = None,
) -> Work | None:
    """Reduce `tensor` over the ranks of the group, in place; all ranks get the same bits.

    Args:
        tensor: any shape, the same on all ranks; input and output.
        op: the reduction, `mcr.SUM` by default. AVG takes all dtypes but bool, and rounds integers towards
            zero; MIN and MAX take all but complex dtypes, and give NaN where any rank has NaN; BAND, BOR and
            BXOR take integers and bool. On bool, SUM and MAX are OR, PRODUCT and MIN are AND.
            The names of torch.distributed work too.

    Raises:
        Unsupported: `op` is not defined on the dtype.
        InvalidArgument: `op` is unknown; or elements of `tensor` share memory, as after `expand`.

    Example:
        ```python
        x = torch.full((4,), float(mcr.get_rank()))
        mcr.all_reduce(x)
        assert x.tolist() == [1.0] * 4  # 0 + 1

        work = mcr.all_reduce(x, mcr.MAX, async_op=True)
        ...  # x may not be touched here
        work.wait()
        ```
    """
    # Here and below `_of(None)` without a call, and no empty keywords: much of a small call is Python.
    comm = (job.communicator or _of(None)) if group is None else _of(group)
    return comm.all_reduce(tensor, op, async_op, backend=backend, compress=compress, tag=tag, sums=sums)


def broadcast(
    tensor: torch.Tensor,
    src: int,
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Copy `tensor` of rank `src` into `tensor` of every other rank.

    Args:
        tensor: any shape, the same on all ranks; input on `src`, output elsewhere.
        src: a rank of the whole job.

    Raises:
        InvalidArgument: `src` is not in the group; or elements of `tensor` share memory.

    Example:
        ```python
        x = torch.arange(3.0) if mcr.get_rank() == 0 else torch.empty(3)
        mcr.broadcast(x, 0)
        assert x.tolist() == [0.0, 1.0, 2.0]
        ```
    """
    if options:
        return _of(group).broadcast(tensor, src, async_op, **options)
    comm = (job.communicator or _of(None)) if group is None else _of(group)
    return comm.broadcast(tensor, src, async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Reduce `tensor` over the ranks into `tensor` of rank `dst`; other ranks keep their values.

    Args:
        tensor: any shape, the same on all ranks; input, and on `dst` output.
        dst: a rank of the whole job.
        op: as in `all_reduce`.

    Raises:
        Unsupported: `op` is not defined on the dtype.
        InvalidArgument: `dst` is not in the group, or `op` is unknown.

    Example:
        ```python
        x = torch.full((2,), 1 + mcr.get_rank())
        mcr.reduce(x, 0, mcr.PRODUCT)
        assert x.tolist() == [2, 2]  # 1 × 2 on rank 0, and rank 1 has kept its 2
        ```
    """
    if options:
        return _of(group).reduce(tensor, dst, op, async_op, **options)
    comm = (job.communicator or _of(None)) if group is None else _of(group)
    return comm.reduce(tensor, dst, op, async_op)


def all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Gather every rank's `tensor` into the tensors of `tensor_list`.

    Args:
        tensor_list: one tensor per rank, each of as many elements as `tensor`; entry r receives the tensor of
            group rank r. Consecutive views of one tensor save a copy.
        tensor: any shape, with the same number of elements on all ranks; `all_gather_v` takes other sizes.

    Raises:
        InvalidArgument: the length of the list, or the size, dtype or device of an entry does not fit.

    Example:
        ```python
        x = torch.full((2,), float(mcr.get_rank()))
        parts = [torch.empty(2) for _ in range(mcr.get_world_size())]
        mcr.all_gather(parts, x)
        assert [part.tolist() for part in parts] == [[0.0, 0.0], [1.0, 1.0]]
        ```
    """
    return _of(group).all_gather(tensor_list, tensor, async_op, **options)


def all_gather_into_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Gather every rank's `input` of n elements into `output` of ranks × n elements, in group order.

    Args:
        output: shape [ranks * n, ...], or any other shape with as many elements.
        input: shape [n, ...], the same on all ranks. It may be this rank's part of `output`.

    Raises:
        InvalidArgument: the sizes, dtypes or devices do not fit.

    Example:
        ```python
        x = torch.full((2, 3), float(mcr.get_rank()))
        whole = torch.empty(4, 3)
        mcr.all_gather_into_tensor(whole, x)
        assert whole[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
        ```
    """
    if options:
        return _of(group).all_gather_into_tensor(output, input, async_op, **options)
    comm = (job.communicator or _of(None)) if group is None else _of(group)
    return comm.all_gather_into_tensor(output, input, async_op)


def all_gather_v(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Gather tensors as `all_gather` does, with sizes that may differ along dim 0.

    Args:
        tensor_list: one tensor per rank; entry r has shape [n_r, ...].
        tensor: shape [n_r, ...] on group rank r, with equal trailing dimensions. n_r may be 0.

    Raises:
        InvalidArgument: the length of the list, or the size of this rank's entry does not fit.
        OrderMismatch: two ranks disagree about the size of a part.

    Example:
        ```python
        rank = mcr.get_rank()
        parts = [torch.empty(1, 2), torch.empty(3, 2)]
        mcr.all_gather_v(parts, torch.full((1 + 2 * rank, 2), float(rank)))
        assert [part.sum().item() for part in parts] == [0.0, 6.0]
        ```
    """
    return _of(group).all_gather_v(tensor_list, tensor, async_op, **options)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Reduce `input_list[r]` over the ranks into `output` of group rank r.

    Args:
        output: any shape, with the same number of elements on all ranks.
        input_list: one tensor per rank, each as large as `output`. Consecutive views of one tensor save a
            copy.
        op: as in `all_reduce`.

    Raises:
        Unsupported: `op` is not defined on the dtype.
        InvalidArgument: the length of the list, or the size, dtype or device of an entry does not fit.

    Example:
        ```python
        y = torch.empty(2)
        mcr.reduce_scatter(y, [torch.zeros(2), torch.ones(2)])
        assert y.tolist() == [2.0 * mcr.get_rank()] * 2
        ```
    """
    return _of(group).reduce_scatter(output, input_list, op, async_op, **options)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Reduce `input` over the ranks; group rank r gets part r of the result in `output`.

    Args:
        output: shape [n, ...], the same on all ranks. It may be this rank's part of `input`.
        input: shape [ranks * n, ...], or any other shape with as many elements.
        op: as in `all_reduce`.

    Raises:
        Unsupported: `op` is not defined on the dtype.
        InvalidArgument: the sizes, dtypes or devices do not fit.

    Example:
        ```python
        y = torch.empty(2)
        mcr.reduce_scatter_tensor(y, torch.arange(4.0), mcr.AVG)
        assert y.tolist() == ([0.0, 1.0] if mcr.get_rank() == 0 else [2.0, 3.0])
        ```
    """
    if options:
        return _of(group).reduce_scatter_tensor(output, input, op, async_op, **options)
    comm = (job.communicator or _of(None)) if group is None else _of(group)
    return comm.reduce_scatter_tensor(output, input, op, async_op)


def reduce_scatter_v(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Reduce and scatter as `reduce_scatter` does, with sizes that may differ along dim 0.

    Args:
        output: shape [n_r, ...] on group rank r, with equal trailing dimensions. n_r may be 0.
        input_list: one tensor per rank; entry r has shape [n_r, ...].
        op: as in `all_reduce`.

    Raises:
        Unsupported: `op` is not defined on the dtype.
        InvalidArgument: the length of the list, or the size of this rank's entry does not fit.
        OrderMismatch: two ranks disagree about the size of a part.

    Example:
        ```python
        y = torch.empty(1 + 2 * mcr.get_rank())
        mcr.reduce_scatter_v(y, [torch.ones(1), torch.ones(3)])
        assert y.tolist() == [2.0] * len(y)
        ```
    """
    return _of(group).reduce_scatter_v(output, input_list, op, async_op, **options)


def all_to_all(
    output_list: Sequence[torch.Tensor],
    input_list: Sequence[torch.Tensor],
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Send `input_list[r]` to group rank r and receive from it into `output_list[r]`.

    Args:
        output_list: one tensor per rank, of any shape, also empty; `output_list[r]` has as many elements as
            rank r sends to this rank. Consecutive views of one tensor save a copy.
        input_list: the tensors to send, likewise.

    Raises:
        InvalidArgument: the length of a list, or the dtype or device of an entry does not fit.
        OrderMismatch: a rank sends a different number of elements than its receiver expects.

    Example:
        ```python
        rank = mcr.get_rank()
        received = [torch.empty(1), torch.empty(1)]
        mcr.all_to_all(received, [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])])
        assert [part.item() for part in received] == [rank, 10.0 + rank]
        ```
    """
    return _of(group).all_to_all(output_list, input_list, async_op, **options)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Send part r of `input` to group rank r and receive the ranks' parts into `output`, in group order.

    Args:
        output: shape [m, ...].
        input: shape [n, ...]. Parts are consecutive rows along dim 0.
        output_split_sizes: number of rows from each rank, m in all, 0 allowed. None: equal parts, and dim 0
            must be divisible by the number of ranks.
        input_split_sizes: number of rows for each rank, n in all. Either every rank passes split sizes, or
            none.

    Raises:
        InvalidArgument: the split sizes do not sum to dim 0, dim 0 is not divisible, or the trailing
            dimensions, dtypes or devices do not fit.
        OrderMismatch: a rank sends a different number of rows than its receiver expects.

    Example:
        ```python
        rank = mcr.get_rank()
        rows = torch.full((3, 2), float(rank))  # rank r sends one row to rank 0, two to rank 1
        received = torch.empty(2 + 2 * rank, 2)
        mcr.all_to_all_single(received, rows, [1 + rank] * 2, [1, 2])
        assert received[:, 0].tolist() == [0.0] * (1 + rank) + [1.0] * (1 + rank)
        ```
    """
    if options:
        sizes = output_split_sizes, input_split_sizes
        return _of(group).all_to_all_single(output, input, *sizes, async_op, **options)
    comm = (job.communicator or _of(None)) if group is None else _of(group)
    return comm.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int = 0,
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Gather every rank's `tensor` into `gather_list` of rank `dst`.

    Args:
        tensor: any shape, with the same number of elements on all ranks.
        gather_list: on `dst` one tensor per rank, each of as many elements as `tensor`; None elsewhere.
        dst: a rank of the whole job.

    Raises:
        InvalidArgument: `dst` is not in the group; the list is missing on `dst`, given elsewhere, or does not
            fit.

    Example:
        ```python
        rank = mcr.get_rank()
        parts = [torch.empty(2), torch.empty(2)] if rank == 0 else None
        mcr.gather(torch.full((2,), float(rank)), parts, dst=0)
        assert parts is None or parts[1].tolist() == [1.0, 1.0]
        ```
    """
    return _of(group).gather(tensor, gather_list, dst, async_op, **options)


def gather_v(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int = 0,
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Gather tensors as `gather` does, with sizes that may differ along dim 0.

    Args:
        tensor: shape [n_r, ...] on group rank r, with equal trailing dimensions. n_r may be 0.
        gather_list: on `dst` one tensor per rank; entry r has shape [n_r, ...]. None elsewhere.
        dst: a rank of the whole job.

    Raises:
        InvalidArgument: `dst` is not in the group; the list is missing on `dst`, given elsewhere, or does not
            fit.
        OrderMismatch: a rank sends a different number of elements than `dst` expects.

    Example:
        ```python
        rank = mcr.get_rank()
        parts = [torch.empty(1), torch.empty(2)] if rank == 0 else None
        mcr.gather_v(torch.full((1 + rank,), float(rank)), parts, dst=0)
        assert parts is None or parts[1].tolist() == [1.0, 1.0]
        ```
    """
    return _of(group).gather_v(tensor, gather_list, dst, async_op, **options)


def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Send `scatter_list[r]` of rank `src` into `tensor` of group rank r.

    Args:
        tensor: any shape, with the same number of elements on all ranks.
        scatter_list: on `src` one tensor per rank, each of as many elements as `tensor`; None elsewhere.
        src: a rank of the whole job.

    Raises:
        InvalidArgument: `src` is not in the group; the list is missing on `src`, given elsewhere, or does not
            fit.

    Example:
        ```python
        x, rank = torch.empty(2), mcr.get_rank()
        mcr.scatter(x, [torch.zeros(2), torch.ones(2)] if rank == 0 else None, src=0)
        assert x.tolist() == [float(rank)] * 2
        ```
    """
    return _of(group).scatter(tensor, scatter_list, src, async_op, **options)


def scatter_v(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Scatter tensors as `scatter` does, with sizes that may differ along dim 0.

    Args:
        tensor: shape [n_r, ...] on group rank r, with equal trailing dimensions. n_r may be 0.
        scatter_list: on `src` one tensor per rank; entry r has shape [n_r, ...]. None elsewhere.
        src: a rank of the whole job.

    Raises:
        InvalidArgument: `src` is not in the group; the list is missing on `src`, given elsewhere, or does not
            fit.
        OrderMismatch: a rank expects a different number of elements than `src` sends.

    Example:
        ```python
        rank = mcr.get_rank()
        x = torch.empty(1 + rank)
        mcr.scatter_v(x, [torch.zeros(1), torch.ones(2)] if rank == 0 else None, src=0)
        assert x.tolist() == [float(rank)] * (1 + rank)
        ```
    """
    return _of(group).scatter_v(tensor, scatter_list, src, async_op, **options)


def barrier(
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    backend: str | None = None,
    tag: str | None = None,
) -> Work | None:
    """Wait until every rank of the group has called `barrier`. No tensor of any shape or dtype moves.

    Operations in flight need not be complete afterwards.

    Raises:
        CommTimeout: a rank has not called it within the deadline; the text names the rank.

    Example:
        ```python
        mcr.barrier()
        work = mcr.barrier(async_op=True)
        work.wait()
        ```
    """
    comm = (job.communicator or _of(None)) if group is None else _of(group)
    return comm.barrier(async_op, backend=backend, tag=tag)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Run `all_reduce` on each tensor, all in flight together, with one handle.

    Args:
        tensors: any shapes and dtypes, each tensor once, the same list on all ranks; input and output. Small
            tensors of one dtype are packed into one operation of the library.
        op: as in `all_reduce`, for all tensors.

    Raises:
        Unsupported: `op` is not defined on a dtype. Nothing has been sent.
        InvalidArgument: `tensors` is not a list, or elements of a tensor share memory.

    Example:
        ```python
        gradients = [torch.ones(3), torch.ones(2, 2, dtype=torch.float64)]
        mcr.all_reduce_coalesced(gradients, mcr.AVG)
        assert all((gradient == 1).all() for gradient in gradients)
        ```
    """
    return _of(group).all_reduce_coalesced(tensors, op, async_op, **options)


def all_gather_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Run `all_gather_into_tensor` on each pair, all in flight together, with one handle.

    Args:
        outputs: tensors of ranks × n elements.
        inputs: as many tensors, of n elements each; n and the dtype may differ between pairs but not between
            ranks. Small tensors of one dtype are packed into one operation of the library.

    Raises:
        InvalidArgument: the lists have different lengths, or a pair does not fit. Nothing has been sent.

    Example:
        ```python
        shards = [torch.full((n,), float(mcr.get_rank())) for n in (1, 2)]
        wholes = [torch.empty(2 * len(shard)) for shard in shards]
        mcr.all_gather_coalesced(wholes, shards)
        assert wholes[1].tolist() == [0.0, 0.0, 1.0, 1.0]
        ```
    """
    return _of(group).all_gather_coalesced(outputs, inputs, async_op, **options)


def reduce_scatter_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    op: ReduceOp = "SUM",
    group: Communicator | None = None,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Work | None:
    """Run `reduce_scatter_tensor` on each pair, all in flight together, with one handle.

    Args:
        outputs: tensors of n elements; n and the dtype may differ between pairs but not between ranks.
        inputs: as many tensors, of ranks × n elements each. Small tensors of one dtype are packed into one
            operation of the library.
        op: as in `all_reduce`, for all tensors.

    Raises:
        Unsupported: `op` is not defined on a dtype. Nothing has been sent.
        InvalidArgument: the lists have different lengths, or a pair does not fit.

    Example:
        ```python
        wholes = [torch.ones(2), torch.ones(4)]
        shards = [torch.empty(1), torch.empty(2)]
        mcr.reduce_scatter_coalesced(shards, wholes)
        assert shards[1].tolist() == [2.0, 2.0]
        ```
    """
    return _of(group).reduce_scatter_coalesced(outputs, inputs, op, async_op, **options)


def send(
    tensor: torch.Tensor,
    dst: int,
    tag: int = 0,
    *,
    group: Communicator | None = None,
    **options: Unpack[MessageOptions],
) -> None:
    """Send `tensor` to rank `dst`; return once `tensor` may be changed, which can be before it is received.

    Args:
        tensor: any shape and dtype; the receiver's tensor has as many elements and the same dtype.
        dst: a rank of the whole job.
        tag: from 0 to 2²⁴ - 1; a receive matches sends of the same tag, in the order of the sends.

    Raises:
        InvalidArgument: `dst` is not in the group, or `tag` is out of range.

    Example:
        ```python
        x = torch.arange(3)
        if mcr.get_rank() == 0:
            mcr.send(x, 1, tag=7)
        else:
            mcr.recv(x, 0, tag=7)
        ```
    """
    if options:
        return _of(group).send(tensor, dst, tag, **options)
    comm = (job.communicator or _of(None)) if group is None else _of(group)
    return comm.send(tensor, dst, tag)


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    tag: int = 0,
    *,
    group: Communicator | None = None,
    **options: Unpack[MessageOptions],
) -> None:
    """Receive into `tensor` from rank `src`; return when `tensor` holds the message.

    Args:
        tensor: any shape, of as many elements and the same dtype as the sender's; output.
        src: a rank of the whole job; None receives the first message with this `tag` from any rank, and the
            `Work` of `irecv` names its sender.
        tag: from 0 to 2²⁴ - 1; equal to the sender's.

    Raises:
        InvalidArgument: `src` is not in the group, `tag` is out of range, or elements of `tensor` share
            memory.
        OrderMismatch: the message has a different size or dtype than `tensor`.

    Example:
        ```python
        x = torch.full((2,), float(mcr.get_rank()))
        if mcr.get_rank() == 0:
            mcr.recv(x)  # from any rank
            assert x.tolist() == [1.0, 1.0]
        else:
            mcr.send(x, 0)
        ```
    """
    if options:
        return _of(group).recv(tensor, src, tag, **options)
    comm = (job.communicator or _of(None)) if group is None else _of(group)
    return comm.recv(tensor, src, tag)


def isend(
    tensor: torch.Tensor,
    dst: int,
    tag: int = 0,
    *,
    group: Communicator | None = None,
    **options: Unpack[MessageOptions],
) -> Work:
    """Start a `send`. `tensor` may be changed after the `wait()` of the returned `Work`.

    Args:
        tensor: any shape and dtype; the receiver's tensor has as many elements and the same dtype.
        dst: a rank of the whole job.
        tag: from 0 to 2²⁴ - 1; equal to the receiver's.

    Raises:
        InvalidArgument: `dst` is not in the group, or `tag` is out of range.

    Example:
        ```python
        rank = mcr.get_rank()
        x, y = torch.full((2,), float(rank)), torch.empty(2)
        works = [mcr.isend(x, 1 - rank), mcr.irecv(y, 1 - rank)]
        for work in works:
            work.wait()
        assert y.tolist() == [1.0 - rank] * 2
        ```
    """
    if options:
        return _of(group).isend(tensor, dst, tag, **options)
    comm = (job.communicator or _of(None)) if group is None else _of(group)
    return comm.isend(tensor, dst, tag)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    tag: int = 0,
    *,
    group: Communicator | None = None,
    **options: Unpack[MessageOptions],
) -> Work:
    """Start a `recv`. `tensor` holds the message after the `wait()` of the returned `Work`.

    Args:
        tensor: any shape, of as many elements and the same dtype as the sender's; output.
        src: a rank of the whole job; None receives the first message with this `tag` from any rank, and
            `Work.source_rank()` returns its sender after `wait()`.
        tag: from 0 to 2²⁴ - 1; equal to the sender's.

    Raises:
        InvalidArgument: `src` is not in the group, `tag` is out of range, or elements of `tensor` share
            memory.
        OrderMismatch: the message has a different size or dtype than `tensor`.

    Example:
        ```python
        x = torch.zeros(1)
        if mcr.get_rank() == 0:
            work = mcr.irecv(x)
            work.wait()
            assert work.source_rank() == 1
        else:
            mcr.send(x, 0)
        ```
    """
    if options:
        return _of(group).irecv(tensor, src, tag, **options)
    comm = (job.communicator or _of(None)) if group is None else _of(group)
    return comm.irecv(tensor, src, tag)


def batch_isend_irecv(p2p_ops: Sequence[P2POp], group: Communicator | None = None) -> list[Work]:
    """Start several sends and receives; peers may list their operations of the batch in another order.

    Args:
        p2p_ops: entries `P2POp(mcr.isend or mcr.irecv, tensor, peer, group=None, tag=0)`, with tensors of any
            shape and dtype that `isend` and `irecv` take.

    Returns:
        One `Work` per entry. All entries are checked before the first is started.

    Raises:
        InvalidArgument: an entry is no `P2POp`, or its peer, tag or tensor cannot be used. Nothing has been
            sent.

    Example:
        ```python
        rank = mcr.get_rank()
        x, y = torch.full((2,), float(rank)), torch.empty(2)
        pair = [mcr.P2POp(mcr.isend, x, 1 - rank), mcr.P2POp(mcr.irecv, y, 1 - rank)]
        for work in mcr.batch_isend_irecv(pair):
            work.wait()
        assert y.tolist() == [1.0 - rank] * 2
        ```
    """
    return _of(group).batch_isend_irecv(p2p_ops)


def broadcast_object(obj: Any, src: int, group: Communicator | None = None) -> Any:
    """Return the object of rank `src` on every rank.

    Args:
        obj: anything that pickle takes; tensors keep shape, dtype and device. Only the object of `src` is
            used; `src` gets its own object back.
        src: a rank of the whole job.

    Objects are signed with a secret of the job, and unpickled only if the sender's signature is valid.

    Raises:
        InvalidArgument: `src` is not in the group.
        BackendError: the object was not signed by rank `src`.

    Example:
        ```python
        found = mcr.broadcast_object({"lr": 0.1} if mcr.get_rank() == 0 else None, 0)
        assert found == {"lr": 0.1}
        ```
    """
    return _of(group).broadcast_object(obj, src)


def all_gather_object(obj: Any, group: Communicator | None = None, *, tag: str | None = None) -> list[Any]:
    """Return every rank's object, in group order.

    Args:
        obj: anything that pickle takes, of any size; tensors keep shape, dtype and device.

    Objects are signed with a secret of the job, and unpickled only if the sender's signature is valid.

    Raises:
        BackendError: an object was not signed by its rank.

    Example:
        ```python
        assert mcr.all_gather_object(mcr.get_rank()) == [0, 1]
        ```
    """
    return _of(group).all_gather_object(obj, tag=tag)


def persistent(kind: str, *tensors: Any, group: Communicator | None = None, **options: Any) -> PersistentOp:
    """Bind an operation to its tensors once: `op()` runs it, `op.start()` returns a `Work`.

    The call itself and every run are collective. The tensors must keep their memory; each run reads their
    current values. A `Work` must be waited for before the next run. After the world has changed
    (`mcr.shrink`), the next run binds the operation to the group's successor.

    Args:
        kind: "all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor",
            "all_to_all_single" or "barrier".
        tensors: the operation's own positional arguments; tensors are contiguous, of the shapes and dtypes
            that the operation takes.
        options: its keywords, without `async_op`.

    Raises:
        InvalidArgument: `kind` has no persistent form, a tensor is not contiguous, or the last run is in
            flight; after ranks were lost, the tensors do not fit the new number of ranks, or the root is
            lost.

    Example:
        ```python
        x = torch.zeros(3)
        op = mcr.persistent("all_reduce", x, op=mcr.SUM)
        for step in range(2):
            x.fill_(step)
            op()
            assert x.tolist() == [2.0 * step] * 3
        ```
    """
    return _of(group).persistent(kind, *tensors, **options)


def flush(group: Communicator | None = None) -> None:
    """Send the pending buckets of the fuse stage. Collective: all ranks call it at the same place.

    Buckets hold asynchronous operations of any shape and dtype; without the stage, this does nothing.
    Waiting for an operation sends its bucket, too.

    Raises:
        NotInitialized: there is no job, or the group is closed.

    Example:
        ```python
        tensors = [torch.ones(8) for _ in range(4)]
        works = [mcr.all_reduce(x, async_op=True) for x in tensors]
        mcr.flush()  # all are in flight now
        for work in works:
            work.wait()
        ```
    """
    _of(group).flush()
