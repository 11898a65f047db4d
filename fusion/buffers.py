"""Buffers for fused operations of one kind, and copies into and out of the buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from mcr_plus.core import streams
from mcr_plus.core.kinds import collective


@dataclass
class BufferBudget:
    """Bytes of allocated buffers, and the limit above which returned buffers are freed."""

    limit: int
    nbytes: int = 0


class BucketLayout:
    """Memory layout of a bucket of operations of one kind on `ranks` ranks, with a pool of buffers.

    `input_parts`, `output_parts`: number of parts of a rank's input and output. `in_place`: True if both are
    the same memory. `alignment`: alignment of each member in elements; gaps are zeros. `budget`: counts the
    bytes of allocated buffers of all layouts, and bounds the pool.
    """

    def __init__(
        self, kind: str, ranks: int, dtype: torch.dtype, budget: BufferBudget, alignment: int = 1
    ) -> None:
        self.alignment = alignment
        row = collective(kind)
        self.input_parts, self.output_parts = row.parts(ranks)
        self.in_place = row.in_place
        self.kind, self.dtype = kind, dtype
        self._budget = budget
        self._buffers: list[BucketBuffer] = []

    @property
    def share(self) -> float:
        """Memory of a bucket relative to its payload, which is the larger of input and output."""
        return (
            1.0
            if self.in_place
            else (self.input_parts + self.output_parts) / max(self.input_parts, self.output_parts)
        )

    def shape(self, numel: int) -> tuple[int]:
        """Return the shape in the signature of one operation on `numel` elements per part."""
        return (numel * (self.output_parts if self.kind == "reduce_scatter" else self.input_parts),)

    def numel(self, numel: int) -> int:
        """Return the payload, in elements, of one operation on `numel` elements per part."""
        return numel * max(self.input_parts, self.output_parts)

    def steps(self, numels: Sequence[int]) -> Sequence[int]:
        """Return the distances between consecutive members, in elements."""
        alignment = self.alignment
        return numels if alignment == 1 else [-(-numel // alignment) * alignment for numel in numels]

    def take(self, numel: int, device: torch.device) -> BucketBuffer:
        """Return a buffer for `numel` elements per part, from the pool if one is large enough, else new."""
        for index, buffer in enumerate(self._buffers):
            if buffer.numel >= numel:
                streams.follow(buffer.used, device)
                return self._buffers.pop(index)
        for buffer in self._buffers:  # too small, so freed
            self._budget.nbytes -= buffer.nbytes
        self._buffers.clear()
        with torch.inference_mode(False):  # inference tensors cannot be written outside of inference mode
            buffer = BucketBuffer(self, 1 << (numel - 1).bit_length(), device)
        self._budget.nbytes += buffer.nbytes
        return buffer

    def views(self, buffer: BucketBuffer, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return input and output of an operation on `numel` elements per part; one tensor if in place."""
        source = buffer.source[: self.input_parts * numel]
        return source, source if self.in_place else buffer.target[: self.output_parts * numel]

    def give_back(self, buffer: BucketBuffer) -> None:
        """Return a buffer to the pool, or free it if the budget is exceeded.

        On a device, the current stream must be ordered after the last use of the buffer.
        """
        buffer.used = streams.recorded(buffer.source.device)
        if self._budget.nbytes <= self._budget.limit:
            self._buffers.append(buffer)
        else:
            self._budget.nbytes -= buffer.nbytes


class BucketBuffer:
    """Flat input and output of a bucket; the same tensor if the operation works in place.

    `used`: device event recorded after the last use, because the next use may be on another stream.
    """

    __slots__ = ("nbytes", "numel", "source", "target", "used")

    def __init__(self, layout: BucketLayout, numel: int, device: torch.device) -> None:
        self.numel = numel
        self.used: streams.Event | None = None
        self.source = torch.empty(layout.input_parts * numel, dtype=layout.dtype, device=device)
        self.target = self.source
        self.nbytes = self.source.nbytes
        if not layout.in_place:
            self.target = torch.empty(layout.output_parts * numel, dtype=layout.dtype, device=device)
            self.nbytes += self.target.nbytes


@cache
def _pack() -> ModuleType:
    """Return the module of host copies, imported on first use because it loads a compiler."""
    from mcr_plus.kernels import pack

    pack.prepare()
    return pack


def prepare(device: str) -> None:
    """Compile the kernels of `join` and `split` before an operation's deadline begins."""
    if device == "cpu":
        _pack()


def join(
    tensors: Sequence[torch.Tensor], numels: Sequence[int], out: torch.Tensor, rows: int, steps: Sequence[int]
) -> None:
    """Concatenate part r of every tensor, of `numels` elements each, into part r of `out`.

    `steps`: distances between consecutive tensors, in elements; gaps are zeroed.
    """
    if out.is_cpu:
        _pack().join(tensors, numels, out, rows, steps)
        return
    parts = [tensor.view(rows, -1) for tensor in tensors]
    if steps is not numels:
        gaps = [step - numel for step, numel in zip(steps, numels, strict=True)]
        parts = [torch.nn.functional.pad(part, (0, gap)) for part, gap in zip(parts, gaps, strict=True)]
    torch.cat(parts, 1, out=out.view(rows, -1))


def split(
    whole: torch.Tensor,
    numels: Sequence[int],
    outputs: Sequence[torch.Tensor],
    rows: int,
    steps: Sequence[int],
) -> None:
    """Split part r of `whole` into part r of every output: the reverse of `join`."""
    if whole.is_cpu:
        _pack().split(whole, numels, outputs, rows, steps)
        return
    with torch.inference_mode():  # else outputs created in inference mode cannot be written
        parts = [tensor.view(rows, -1) for tensor in outputs]
        if steps is numels:
            torch.split_with_sizes_copy(whole.view(rows, -1), list(numels), 1, out=parts)
            return
        for part, padded in zip(parts, whole.view(rows, -1).split(list(steps), 1), strict=True):
            part.copy_(padded[:, : part.shape[1]])
