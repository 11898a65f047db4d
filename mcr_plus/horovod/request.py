"""What a rank announces before an operation: plain data that ranks compare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, Final

import torch

from mcr_plus.errors import McrError
from mcr_plus.horovod.reducing import HorovodReduceOp
from mcr_plus.message import dtype_name


class HorovodInternalError(McrError):
    """An operation failed: ranks disagreed about it, a rank is gone, or the library gave up."""


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """An operation as one rank wants it. Those of one name, one from each rank, become an operation.

    `shapes`, `dtypes`: of its tensors, of which a grouped operation has several. `numbers`: what its kind
    needs beside them and may differ between ranks: the rows for each rank of an alltoall, the number of
    entries of a sparse allreduce; or must not, of a process set. `codec`: a codec as JSON, or nothing.
    `absent`: this rank has no gradient; it takes whatever form the others' have. `problem`: why this rank
    cannot take part.
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
    kept: bool = False  # the name will come again, so ranks may abbreviate it
    problem: str = ""

    @cached_property
    def text(self) -> str:
        """The request in one line."""
        return json.dumps(astuple(self))

    @classmethod
    def read(cls, line: str) -> Request:
        """The request that `text` was of."""
        values: list[Any] = json.loads(line)
        values[2] = tuple(values[2])
        values[3] = tuple(tuple(shape) for shape in values[3])
        values[9] = tuple(values[9])
        return cls(*values)

    @cached_property
    def compress(self) -> str | dict[str, object] | None:
        """The codec as a call's `compress`."""
        found: str | dict[str, object] | None = json.loads(self.codec) if self.codec else None
        return found

    @cached_property
    def types(self) -> tuple[torch.dtype, ...]:
        """The dtypes."""
        return tuple(getattr(torch, name) for name in self.dtypes)


def described(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """The fields of a request that tensors give."""
    return {
        "dtypes": tuple(dtype_name(tensor.dtype) for tensor in tensors),
        "shapes": tuple(tuple(tensor.shape) for tensor in tensors),
        "device": tensors[0].device.type if tensors else "cpu",
    }


# What must be equal on all ranks beside the kind, the number of tensors and their dtypes and devices.
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


def disagreement(requests: Mapping[int, Request]) -> str:
    """Why these requests, by rank, are not one operation; empty if they are."""
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


def _differing(a: Request, b: Request) -> list[tuple[str, object, object]]:
    """What differs that must not: the first is the one to show."""
    kinds = {a.kind, b.kind}
    if len(kinds) > 1 and not (b.absent and kinds == {"allreduce", "sparse"}):
        return [("the operation", a.kind, b.kind)]
    if len(a.shapes) != len(b.shapes):
        return [("the number of tensors", len(a.shapes), len(b.shapes))]
    found: list[tuple[str, object, object]] = []
    if a.device != b.device:
        found.append(("the device", a.device, b.device))
    rows = _SHAPES.get(a.kind) == "rows"
    for index, (mine, theirs) in enumerate(zip(a.shapes, b.shapes, strict=True)):
        at = f" of tensor {index}" if len(a.shapes) > 1 else ""
        if a.dtypes[index] != b.dtypes[index]:
            found.append((f"the dtype{at}", a.dtypes[index], b.dtypes[index]))
        if len(mine) != len(theirs) or (mine[1:] != theirs[1:] if rows else mine != theirs):
            beyond = " beyond the first dimension" if rows else ""
            found.append((f"the shape{at}{beyond}", list(mine), list(theirs)))
    for field in _FIELDS.get(a.kind, ()):
        mine_is, theirs_is = getattr(a, field), getattr(b, field)
        if mine_is != theirs_is:
            if field == "op":
                mine_is, theirs_is = (HorovodReduceOp(op).name.capitalize() for op in (mine_is, theirs_is))
            found.append((_WORDS[field], mine_is, theirs_is))
    return found
