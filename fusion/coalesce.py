"""Pack the tensors of a coalesced call into few operations.

Small tensors of a dtype are packed into one input and one output buffer. A large tensor is sent by itself,
because copying it would cost more than a separate operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from mcr_plus.core.message import bucket_text
from mcr_plus.fusion.buffers import BucketBuffer, BucketLayout, BufferBudget, join, split

LARGE: Final = 256 << 10  # bytes from which a tensor is sent by itself
_POOLED: Final = 256 << 20  # limit of the pool's buffers in bytes
_LIMIT: Final = 25 << 20  # limit of one buffer in bytes


@dataclass
class CoalescedPart:
    """Operation of a coalesced call; `source` and `target` are one tensor if the operation works in place."""

    source: torch.Tensor
    target: torch.Tensor
    numels: list[int]  # elements of each member, in one part of the input
    outputs: list[torch.Tensor]
    layout: BucketLayout | None = None  # None for a single tensor, sent without a copy
    buffer: BucketBuffer | None = None

    @property
    def call(self) -> str | None:
        """See `Signature.call`; ranks compare it, as buckets of different tensors may have equal sizes."""
        return None if self.layout is None else f"bucket of {bucket_text(self.numels)}"

    def finish(self) -> None:
        """Copy the results into the members' outputs."""
        if self.layout is not None:
            steps = self.layout.steps(self.numels)
            split(self.target, self.numels, self.outputs, self.layout.output_parts, steps)

    def release(self) -> None:
        """Return the buffer to its layout's pool."""
        if self.layout is not None and self.buffer is not None:
            self.layout.give_back(self.buffer)
            self.buffer = None


class Coalescer:
    """Packs a call's tensors into few operations; owns the buffers."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._budget = BufferBudget(_POOLED)
        self._layouts: dict[tuple[str, torch.dtype, torch.device, int], BucketLayout] = {}

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the allocated buffers."""
        return self._budget.nbytes

    def parts(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        alignments: Mapping[torch.dtype, int],
    ) -> list[CoalescedPart]:
        """Return the operations to issue, which are equal on all ranks if sizes and dtypes are equal.

        `inputs` and `outputs` are contiguous; they are the same tensors if the operation works in place.
        `alignments`: elements per codec block, by dtype.
        """
        larger = outputs if kind == "all_gather" else inputs
        small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        parts = []
        for index, tensor in enumerate(larger):
            if tensor.nbytes >= LARGE:
                parts.append(CoalescedPart(inputs[index], outputs[index], [tensor.numel()], []))
            else:
                small.setdefault((tensor.dtype, tensor.device), []).append(index)
        for (dtype, device), members in small.items():
            alignment = alignments.get(dtype, 1)
            layout = self._layouts.get((kind, dtype, device, alignment))
            if layout is None:
                layout = BucketLayout(kind, self._ranks, dtype, self._budget, alignment)
                self._layouts[kind, dtype, device, alignment] = layout
            for bucket in _buckets(members, larger):
                sources, targets = ([tensors[index] for index in bucket] for tensors in (inputs, outputs))
                parts.append(_packed(layout, sources, targets, device))
        return parts


def _buckets(members: list[int], tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    room = _LIMIT
    for index in members:
        nbytes = tensors[index].nbytes
        if nbytes > room:
            buckets.append([])
            room = _LIMIT
        buckets[-1].append(index)
        room -= nbytes
    return buckets


def _packed(
    layout: BucketLayout, inputs: list[torch.Tensor], outputs: list[torch.Tensor], device: torch.device
) -> CoalescedPart:
    numels = [tensor.numel() // layout.input_parts for tensor in inputs]
    steps = layout.steps(numels)
    buffer = layout.take(sum(steps), device)
    source, target = layout.views(buffer, sum(steps))
    join(inputs, numels, source, layout.input_parts, steps)
    return CoalescedPart(source, target, numels, outputs, layout, buffer)
