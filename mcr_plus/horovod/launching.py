"""Issue agreed operations on a communicator, in the same order on all ranks.

All decisions depend only on the requests of all ranks, so all ranks issue the same operations. No function of
this module waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from mcr_plus.communicator.calls import Compress
from mcr_plus.communicator.communicator import Communicator
from mcr_plus.compression.options import CompressOptions
from mcr_plus.core.kinds import ReduceOp
from mcr_plus.core.work import Work
from mcr_plus.errors import McrError
from mcr_plus.horovod.handle import Handle
from mcr_plus.horovod.negotiation import Agreed
from mcr_plus.horovod.reducing import Average, issued_op, neutral, scale_
from mcr_plus.horovod.request import HorovodInternalError, OperationRequest

_CASTS: Final = (
    "",
    '"fp16"',
    '"bf16"',
)  # elementwise codecs: encoding a bucket equals encoding its members


def launch(comm: Communicator, agreed: Sequence[Agreed]) -> None:
    """Issue operations in the given order; allreduces that are ready together are fused."""
    reductions = _Reductions(comm)
    for operation in agreed:
        if operation.problem:
            if operation.handle is not None:
                operation.handle.fail(HorovodInternalError(operation.problem))
            continue
        kind = next(iter(operation.requests.values())).kind
        if any(request.kind == "sparse" for request in operation.requests.values()):
            kind = "sparse"
        try:
            if kind == "allreduce":
                reductions.add(operation)
            else:
                _OTHERS[kind](comm, operation)
        except McrError as error:  # raised on all ranks, before any communication
            if operation.handle is not None:
                operation.handle.fail(error)
    reductions.issue()


def rows_of(rows: int, ranks: int) -> list[int]:
    """Return the rows of a reducescatter for each rank; the first ranks get the remainder, one row each."""
    quotient, remainder = divmod(rows, ranks)
    return [quotient + (rank < remainder) for rank in range(ranks)]


# -- allreduce ------------------------------------------------------------------------------------------


@dataclass
class _LaunchedBucket:
    """Tensors to send in one operation."""

    op: ReduceOp
    compress: Compress
    tag: str | None
    name: str = ""  # name of the only member if a codec must encode it separately; otherwise empty
    tensors: list[torch.Tensor] = field(default_factory=list)


class _Reductions:
    """Allreduces of a round."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        options = comm.stage_options("compress")
        plain = not isinstance(options, CompressOptions) or options.codec == "none"
        ruled = any(
            isinstance(override.options, CompressOptions)
            for rule in comm.config.rules
            for override in rule.overrides
        )
        self._together = plain and not ruled
        self._buckets: dict[tuple[Any, ...], _LaunchedBucket] = {}
        self._handles: list[tuple[Handle, list[tuple[Any, ...]], Callable[[], Any]]] = []

    def add(self, agreed: Agreed) -> None:
        """Put an operation's tensors into buckets; a rank without the operation adds neutral elements.

        If no rank has a gradient, the result is zero for every op.
        """
        request = next(iter(agreed.requests.values()))
        handle = agreed.handle
        if handle is None:
            outputs = [
                neutral(request.op, shape, dtype, request.device)
                for shape, dtype in zip(request.shapes, request.types, strict=True)
            ]
        else:
            outputs = [
                tensor.detach()
                if handle.in_place
                else tensor.detach().clone(memory_format=torch.contiguous_format)
                for tensor in handle.tensors
            ]
        has_values = any(not other.absent for other in agreed.requests.values())
        if handle is not None and handle.request.absent and has_values:
            for output in outputs:
                output.copy_(neutral(request.op, tuple(output.shape), output.dtype, request.device))
        keys, factors = [], []
        for index, output in enumerate(outputs):
            op, before, after = issued_op(
                request.op, output.dtype, request.before, request.after, self._comm.size
            )
            if handle is not None:
                scale_(output, before)
            factors.append(after)
            keys.append(self._placed(request, index, output, op))
        if handle is not None:
            given = handle.tensors

            def finish() -> list[torch.Tensor]:
                for output, after in zip(outputs, factors, strict=True):
                    scale_(output, after)
                return given if handle.in_place else outputs

            self._handles.append((handle, keys, finish))

    def _placed(
        self, request: OperationRequest, index: int, output: torch.Tensor, op: ReduceOp
    ) -> tuple[Any, ...]:
        codec = request.codec if output.is_floating_point() else ""
        name = "" if self._together and codec in _CASTS else f"{request.name}.{index}"
        key = (op, codec, request.tag, output.device, name)
        bucket = self._buckets.get(key)
        if bucket is None:
            compress = request.compress if codec else None
            bucket = self._buckets[key] = _LaunchedBucket(op, compress, request.tag, name)
        bucket.tensors.append(output)
        return key

    def issue(self) -> None:
        """Issue the buckets, and start the handles."""
        results: dict[tuple[Any, ...], Work | McrError] = {}
        for key, bucket in self._buckets.items():
            results[key] = self._attempt(bucket)
        for handle, keys, finish in self._handles:
            own = [results[key] for key in dict.fromkeys(keys)]
            failure = next((result for result in own if isinstance(result, McrError)), None)
            if failure is not None:
                handle.fail(failure)
            else:
                handle.start([result for result in own if isinstance(result, Work)], finish)

    def _attempt(self, bucket: _LaunchedBucket) -> Work | McrError:
        try:
            return self._start(bucket)
        except McrError as error:  # raised on all ranks, before any communication
            return error

    def _start(self, bucket: _LaunchedBucket) -> Work:
        if bucket.name and bucket.tensors[0].is_contiguous():
            only = bucket.tensors[0]
            return self._comm.send_bucket(
                only.view(-1), bucket.op, members=1, compress=bucket.compress, tag=bucket.tag,
                parts=(tuple(only.shape),), key=bucket.name,
            )  # fmt: skip
        work = self._comm.all_reduce_coalesced(
            bucket.tensors, bucket.op, async_op=True, compress=bucket.compress, tag=bucket.tag
        )
        assert work is not None
        return work


# -- other kinds: each rank that has not joined has a handle --------------------------------------------


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _started(work: Work | None) -> Work:
    assert work is not None
    return work


def _allgather(comm: Communicator, agreed: Agreed) -> None:
    handle = agreed.handle
    assert handle is not None
    works, outputs = [], []
    for index, tensor in enumerate(handle.tensors):
        sizes = [request.shapes[index][0] for request in agreed.requests.values()]
        handle.offsets.append(sum(sizes[: comm.rank]))
        work, output = _gathered(comm, tensor, sizes)
        works.append(work)
        outputs.append(output)
    handle.start(works, lambda: outputs)


def _gathered(comm: Communicator, tensor: torch.Tensor, sizes: list[int]) -> tuple[Work, torch.Tensor]:
    """Gather the rows of all ranks; rank r has `sizes[r]` rows."""
    tensor = tensor.detach()
    output = tensor.new_empty(sum(sizes), *tensor.shape[1:])
    compress = None if tensor.is_floating_point() else False
    if len(set(sizes)) == 1:
        work = comm.all_gather_into_tensor(output, tensor, async_op=True, compress=compress)
    else:
        work = comm.all_gather_v(list(output.split(sizes)), tensor, async_op=True, compress=compress)
    return _started(work), output


def _sparse(comm: Communicator, agreed: Agreed) -> None:
    """Gather the entries of all ranks, and sum entries of equal indices."""
    request = next(request for request in agreed.requests.values() if request.kind == "sparse")
    handle, shape, dtype = agreed.handle, request.shapes[0], request.types[0]
    counts = [
        agreed.requests[rank].numbers[0] if rank in agreed.requests and agreed.requests[rank].numbers else 0
        for rank in comm.ranks
    ]
    dims = request.numbers[1]
    device = torch.device(request.device)
    indices = torch.empty(0, dims, dtype=torch.int64, device=device)
    values = torch.empty(0, *shape[dims:], dtype=dtype, device=device)
    if handle is not None and handle.request.kind == "sparse":
        own = handle.tensors[0]
        indices, values = own.indices().t().contiguous(), own.values()
    work_i, all_indices = _gathered(comm, indices, counts)
    work_v, all_values = _gathered(comm, values, counts)
    if handle is None:
        return

    def finish() -> list[torch.Tensor]:
        if request.op == Average:
            scale_(all_values, 1.0 / comm.size)
        total = torch.sparse_coo_tensor(all_indices.t(), all_values, shape, check_invariants=True)
        return [total.coalesce()]

    handle.start([work_i, work_v], finish)


def _broadcast(comm: Communicator, agreed: Agreed) -> None:
    """Broadcast the tensors of each dtype and device as one operation, uncompressed."""
    handle = agreed.handle
    assert handle is not None
    root = handle.request.root
    targets = [tensor.detach() for tensor in handle.tensors]
    if not handle.in_place:
        targets = [_copy(target) for target in targets]
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for target in targets:
        alike.setdefault((target.dtype, target.device), []).append(target)
    works, packed = [], []
    for members in alike.values():
        flat = members[0]
        if len(members) > 1:
            flat = torch.cat([member.reshape(-1) for member in members])
            packed.append((flat, members))
        works.append(_started(comm.broadcast(flat, root, async_op=True, compress=False)))
    outputs = handle.tensors if handle.in_place else targets

    def finish() -> list[torch.Tensor]:
        for flat, members in packed:
            pieces = flat.split([member.numel() for member in members])
            for member, piece in zip(members, pieces, strict=True):
                member.copy_(piece.view(member.shape))
        return outputs

    handle.start(works, finish)


def _alltoall(comm: Communicator, agreed: Agreed) -> None:
    handle = agreed.handle
    assert handle is not None
    tensor = handle.tensors[0].detach()
    sent = list(handle.request.numbers)
    received = [request.numbers[comm.rank] for request in agreed.requests.values()]
    output = tensor.new_empty(sum(received), *tensor.shape[1:])
    source = tensor[: sum(sent)]
    compress = None if tensor.is_floating_point() else False
    work = comm.all_to_all_single(output, source, received, sent, async_op=True, compress=compress)
    handle.start([_started(work)], lambda: (output, received))


def _reducescatter(comm: Communicator, agreed: Agreed) -> None:
    handle = agreed.handle
    assert handle is not None
    request = handle.request
    works, outputs, factors = [], [], []
    for tensor in handle.tensors:
        op, before, after = issued_op(request.op, tensor.dtype, request.before, request.after, comm.size)
        source = tensor.detach()
        if before != 1.0:
            source = source.clone()
            scale_(source, before)
        rows = rows_of(len(source), comm.size)
        output = source.new_empty(rows[comm.rank], *source.shape[1:])
        compress = request.compress if source.is_floating_point() else False
        if len(set(rows)) == 1:
            work = comm.reduce_scatter_tensor(output, source, op, async_op=True, compress=compress)
        else:
            parts = list(source.split(rows))
            work = comm.reduce_scatter_v(output, parts, op, async_op=True, compress=compress)
        works.append(_started(work))
        outputs.append(output)
        factors.append(after)

    def finish() -> list[torch.Tensor]:
        for output, after in zip(outputs, factors, strict=True):
            scale_(output, after)
        return outputs

    handle.start(works, finish)


def _barrier(_comm: Communicator, agreed: Agreed) -> None:
    if agreed.handle is not None:
        agreed.handle.start([], lambda: None)


_OTHERS: Final[dict[str, Callable[[Communicator, Agreed], None]]] = {
    "allgather": _allgather,
    "sparse": _sparse,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "barrier": _barrier,
}
