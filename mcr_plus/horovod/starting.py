"""Start operations: check the arguments, and announce a named request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mcr_plus.core.units import whole_numbers
from mcr_plus.errors import InvalidArgument
from mcr_plus.horovod.compression import Compression, codec_of
from mcr_plus.horovod.handle import Handle
from mcr_plus.horovod.negotiation import Negotiator
from mcr_plus.horovod.reducing import Average, Sum, reduce_op_of
from mcr_plus.horovod.request import OperationRequest, described
from mcr_plus.horovod.world import ProcessSet, current, global_process_set, negotiator_of

Tensors = Sequence[torch.Tensor]


def _start(
    process_set: ProcessSet,
    kind: str,
    name: str | None,
    tensors: Tensors,
    fill: Callable[[Negotiator], dict[str, Any]],
    *,
    in_place: bool = False,
    result: Callable[[Any], Any] | None = None,
    many: bool = False,
) -> Handle:
    """Announce an operation. `fill` returns the other fields of its request besides name, kind and tensors.

    An invalid argument raises an error here and, through the request, on all other ranks, so no rank hangs.
    """
    negotiator = negotiator_of(process_set)
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"name: expected a string or None, got {name!r}")
    is_named = name is not None
    name = negotiator.auto_name(kind) if name is None else name
    negotiator.check_name(name)
    try:
        values = _checked(tensors)
        request = OperationRequest(
            name, kind, recurring=is_named, **{**described(values), **fill(negotiator)}
        )
    except (ValueError, RuntimeError) as error:
        negotiator.enqueue(Handle(negotiator, OperationRequest(name, kind, problem=str(error)), []))
        raise

    def finish(outputs: Any) -> Any:
        value = outputs if many else outputs[0]
        return value if result is None else result(value)

    return negotiator.enqueue(Handle(negotiator, request, values, in_place=in_place, result=finish))


def _checked(tensors: Tensors) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise InvalidArgument(f"tensors: expected a list of tensors, got {type(tensors).__name__}")
    if not tensors:
        raise InvalidArgument("tensors: expected at least one")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"tensor: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device != tensors[0].device:
            raise InvalidArgument(f"tensors: on {tensors[0].device} and on {tensor.device}; one is expected")
    return list(tensors)


def _rows(tensors: Tensors, what: str) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and not tensor.ndim:
            raise InvalidArgument(f"{what}: expected a tensor of at least one dimension, got a scalar")


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result: a tensor, or a list for a grouped operation.

    Raises `HorovodInternalError` if the ranks' requests do not match (the job can continue) or if a rank has
    left.
    """
    return current().negotiations.synchronize(handle)


def poll(handle: Handle) -> bool:
    """Return True if an operation is complete, so that `synchronize` would not wait."""
    return current().negotiations.poll(handle)


def reduce_async(
    tensors: Tensors,
    name: str | None,
    op: int,
    before: float,
    after: float,
    process_set: ProcessSet,
    *,
    compression: Any = Compression.none,
    in_place: bool = False,
    many: bool = False,
    tag: str | None = None,
    absent: bool = False,
) -> Handle:
    """Start an allreduce of one or several tensors. `absent`: see `OperationRequest`."""
    if not many and isinstance(tensors[0], torch.Tensor) and tensors[0].is_sparse:
        return sparse_allreduce_async(tensors[0], name, op, process_set)
    codec = codec_of(compression)
    result: Callable[[Any], Any] | None = None
    if codec is None:
        # With the program's own compressor, reduce its output, then decompress the result.
        given = list(tensors)
        pairs = [compression.compress(tensor) for tensor in given]
        tensors = [packed for packed, _ in pairs]

        def restored(outputs: Any) -> Any:
            values = [
                compression.decompress(output, ctx)
                for output, (_, ctx) in zip(outputs if many else [outputs], pairs, strict=True)
            ]
            if in_place:
                for target, value in zip(given, values, strict=True):
                    target.detach().copy_(value)
                values = given
            return values if many else values[0]

        result = restored
    fields = {"op": int(op), "before": float(before), "after": float(after), "codec": codec or ""}
    return _start(
        process_set, "allreduce", name, tensors, lambda _: {**fields, "tag": tag, "absent": absent},
        in_place=in_place, result=result, many=many,
    )  # fmt: skip


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an allreduce of a COO tensor: gather all entries, then reduce entries of equal indices.

    Calling the handle returns the result, a coalesced COO tensor.
    """
    reduce_op = reduce_op_of(op)
    if not isinstance(tensor, torch.Tensor) or not tensor.is_sparse:
        raise InvalidArgument("tensor: expected a sparse COO tensor")
    if reduce_op not in (Average, Sum):
        raise InvalidArgument(f"op: {reduce_op.name.capitalize()} of sparse tensors; expected Average or Sum")
    entries = tensor.detach().coalesce()
    numbers = (entries.values().shape[0], entries.sparse_dim())
    return _start(
        process_set, "sparse", name, [entries], lambda _: {"op": int(reduce_op), "numbers": numbers}
    )


def gather_async(
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    *,
    many: bool,
    result: Callable[[Any], Any] | None = None,
) -> Handle:
    """Start an allgather of one or several tensors."""

    def fill(_: Negotiator) -> dict[str, Any]:
        _rows(tensors, "allgather")
        return {}

    return _start(process_set, "allgather", name, tensors, fill, many=many, result=result)


def send_async(
    tensors: Tensors,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool,
    many: bool = False,
) -> Handle:
    """Start a broadcast of one or several tensors."""

    def fill(negotiator: Negotiator) -> dict[str, Any]:
        if root_rank not in negotiator.comm.ranks:
            raise InvalidArgument(
                f"root_rank: expected one of the ranks {list(negotiator.comm.ranks)}, got {root_rank!r}"
            )
        return {"root": int(root_rank)}

    return _start(process_set, "broadcast", name, tensors, fill, in_place=in_place, many=many)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an alltoall; the handle returns the result of `alltoall`."""

    def fill(negotiator: Negotiator) -> dict[str, Any]:
        _rows([tensor], "alltoall")
        return {"numbers": _splits(splits, len(tensor), negotiator.comm.size)}

    def result(outputs: tuple[torch.Tensor, list[int]]) -> Any:
        output, received = outputs
        if splits is None:
            return output
        like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
        return output, torch.tensor(received, dtype=like.dtype, device=like.device)

    return _start(process_set, "alltoall", name, [tensor], fill, many=True, result=result)


def _splits(splits: torch.Tensor | Sequence[int] | None, rows: int, ranks: int) -> tuple[int, ...]:
    if splits is None:
        if rows % ranks:
            raise InvalidArgument(f"tensor: dim 0 is {rows}, not divisible by {ranks} ranks; pass splits")
        return (rows // ranks,) * ranks
    if isinstance(splits, torch.Tensor):
        if splits.dtype.is_floating_point or splits.dtype.is_complex or splits.dtype is torch.bool:
            raise InvalidArgument(f"splits: expected integers, got {splits.dtype}")
        sizes = splits.flatten().tolist()
    else:
        sizes = list(splits)
    numbers = whole_numbers(sizes)
    if numbers is None or any(number < 0 for number in numbers) or len(numbers) != ranks:
        raise InvalidArgument(f"splits: expected {ranks} integers from 0, one per rank, got {sizes}")
    if sum(numbers) > rows:
        raise InvalidArgument(f"splits: {numbers} sum to {sum(numbers)}, more than dim 0 of tensor ({rows})")
    return tuple(numbers)


def scatter_async(
    tensors: Tensors,
    name: str | None,
    op: int,
    before: float,
    after: float,
    process_set: ProcessSet,
    *,
    compression: Any,
    many: bool,
) -> Handle:
    """Start a reducescatter of one or several tensors."""
    codec = codec_of(compression)
    if codec is None:
        raise InvalidArgument(
            "compression: reducescatter takes hvd.Compression.none, .fp16, .bf16, .codec(…)"
        )

    def fill(_: Negotiator) -> dict[str, Any]:
        _rows(tensors, "reducescatter")
        return {"op": int(op), "before": float(before), "after": float(after), "codec": codec}

    return _start(process_set, "reducescatter", name, tensors, fill, many=many)
