"""Request that a rank announces before an operation, and the comparison of ranks' requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, Final

import torch

from mcr_plus.core.kinds import dtype_name
from mcr_plus.errors import McrError
from mcr_plus.horovod.reducing import HorovodReduceOp


class HorovodInternalError(McrError):
    """An operation failed: the ranks' requests differ, a rank has exited, or a library failed."""


Shape = tuple[int, ...]


@dataclass(frozen=True)
class OperationRequest:
    """Request of one rank for an operation. Requests of the same name, one per rank, form an operation.

    `shapes`, `dtypes`: shapes and dtypes of the tensors; a grouped operation has several. `numbers`: further
    data of the kind: the rows for each rank of an alltoall or the entries of a sparse allreduce, which may
    differ between ranks; or the ranks of a process set, which must be equal. `codec`: a codec as JSON, or the
    empty string. `absent`: True if this rank has no gradient and adapts to the other ranks' requests.
    `problem`: the error that prevents this rank from participating, or the empty string.
    """

    name: str
    kind: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    device: str = "cpu"
    op: int = 0
    root: int = -1
    before: float = 1.0
    after: float = 1.0
    numbers: tuple[int, ...] = ()
    codec: str = ""
    tag: str | None = None
    absent: bool = False
    recurring: bool = False  # True if the name may recur, so ranks abbreviate the request by a number
    problem: str = ""

    @cached_property
    def text(self) -> str:
        """Request as one line of JSON."""
        return json.dumps(astuple(self))

    @classmethod
    def read(cls, line: str) -> OperationRequest:
        """Return the request read from a line of `text`."""
        values: list[Any] = json.loads(line)
        values[2] = tuple(values[2])
        values[3] = tuple(tuple(shape) for shape in values[3])
        values[9] = tuple(values[9])
        return cls(*values)

    @cached_property
    def compress(self) -> str | dict[str, object] | None:
        """Codec as a value for the argument `compress`."""
        compress: str | dict[str, object] | None = json.loads(self.codec) if self.codec else None
        return compress

    @cached_property
    def types(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the tensors."""
        return tuple(getattr(torch, name) for name in self.dtypes)


def described(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Return the fields of a request that describe its tensors."""
    return {
        "dtypes": tuple(dtype_name(tensor.dtype) for tensor in tensors),
        "shapes": tuple(tuple(tensor.shape) for tensor in tensors),
        "device": tensors[0].device.type if tensors else "cpu",
    }


# Fields that must be equal on all ranks, besides the kind, the number of tensors, their dtypes and devices.
_SHAPES: Final = {
    "allreduce": "shapes", "sparse": "shapes", "broadcast": "shapes", "reducescatter": "shapes",
    "allgather": "rows", "alltoall": "rows",
}  # fmt: skip
_FIELDS: Final = {
    "allreduce": ("op", "before", "after", "codec", "tag"),
    "reducescatter": ("op", "before", "after", "codec"),
    "sparse": ("op",),
    "broadcast": ("root",),
    "add_process_set": ("numbers",),
    "remove_process_set": ("numbers",),
}
_WORDS: Final = {
    "op": "the reduce op", "before": "prescale_factor", "after": "postscale_factor", "codec": "compression",
    "root": "root_rank", "numbers": "the ranks of the process set", "tag": "the tag",
}  # fmt: skip


def disagreement(requests: Mapping[int, OperationRequest]) -> str:
    """Return the error text for mismatched requests, by rank; empty if they match."""
    for rank, request in requests.items():
        if request.problem:
            return f"{request.kind} '{request.name}': rank {rank} cannot take part: {request.problem}"
    present = {rank: request for rank, request in requests.items() if not request.absent} or requests
    first_rank, first = next(iter(present.items()))
    for rank, request in requests.items():
        for what, here, there in _differing(first, request):
            return (
                f"{first.kind} '{first.name}': {what} differs: {here} on rank {first_rank}, {there} on rank "
                f"{rank}"
            )
    return ""


def _differing(a: OperationRequest, b: OperationRequest) -> list[tuple[str, object, object]]:
    """Return the mismatched properties as (name, value of a, value of b)."""
    kinds = {a.kind, b.kind}
    if len(kinds) > 1 and not (b.absent and kinds == {"allreduce", "sparse"}):
        return [("the operation", a.kind, b.kind)]
    if len(a.shapes) != len(b.shapes):
        return [("the number of tensors", len(a.shapes), len(b.shapes))]
    differences: list[tuple[str, object, object]] = []
    if a.device != b.device:
        differences.append(("the device", a.device, b.device))
    rows = _SHAPES.get(a.kind) == "rows"
    for index, (one, other) in enumerate(zip(a.shapes, b.shapes, strict=True)):
        at = f" of tensor {index}" if len(a.shapes) > 1 else ""
        if a.dtypes[index] != b.dtypes[index]:
            differences.append((f"the dtype{at}", a.dtypes[index], b.dtypes[index]))
        if len(one) != len(other) or (one[1:] != other[1:] if rows else one != other):
            beyond = " beyond the first dimension" if rows else ""
            differences.append((f"the shape{at}{beyond}", list(one), list(other)))
    for field in _FIELDS.get(a.kind, ()):
        values = getattr(a, field), getattr(b, field)
        if values[0] != values[1]:
            shown = [HorovodReduceOp(op).name.capitalize() for op in values] if field == "op" else values
            differences.append((_WORDS[field], shown[0], shown[1]))
    return differences
