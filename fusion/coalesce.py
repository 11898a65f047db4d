"""Coalesced calls: many tensors, few operations.

Small tensors of a dtype are packed into one buffer each way; a large one goes by itself, because copying it
costs more than an operation saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from mcr_plus.fusion.space import Layout, Space, Stock, join, split
from mcr_plus.message import bucket_text

LARGE: Final = 256 << 10  # bytes of a tensor that goes by itself
_KEPT: Final = 256 << 20  # bytes of buffers that are kept
_LIMIT: Final = 25 << 20  # bytes of a buffer, whose copies should not outgrow the tensors


@dataclass
class Part:
    """One operation of a coalesced call: `source` to `target`, the same tensor if it works in place."""

    source: torch.Tensor
    target: torch.Tensor
    numels: list[int]  # of the members, in one part of the input
    outputs: list[torch.Tensor]
    layout: Layout | None = None  # none: a member by itself, with nothing to copy
    space: Space | None = None

    @property
    def call(self) -> str | None:
        """See `Signature.call`: ranks that pack other tensors may come to the same sum of sizes."""
        return None if self.layout is None else f"bucket of {bucket_text(self.numels)}"

    def finish(self) -> None:
        """Put the results where they belong."""
        if self.layout is not None:
            steps = self.layout.steps(self.numels)
            split(self.target, self.numels, self.outputs, self.layout.taken, steps)

    def release(self) -> None:
        """Let the buffers be used again."""
        if self.layout is not None and self.space is not None:
            self.layout.give_back(self.space)
            self.space = None


class Coalescer:
    """Makes few operations of many, and keeps the buffers for that."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._stock = Stock(_KEPT)
        self._layouts: dict[tuple[str, torch.dtype, torch.device, int], Layout] = {}

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are kept."""
        return self._stock.nbytes

    def parts(
        self,
        kind: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        alignments: Mapping[torch.dtype, int],
    ) -> list[Part]:
        """The operations to issue, the same on all ranks if sizes and dtypes are.

        `inputs` and `outputs` are contiguous, and the same tensors if the operation works in place.
        `alignments`: of how many elements a block of the codec is, by dtype.
        """
        larger = outputs if kind == "all_gather" else inputs
        small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        parts = []
        for index, tensor in enumerate(larger):
            if tensor.nbytes >= LARGE:
                parts.append(Part(inputs[index], outputs[index], [tensor.numel()], []))
            else:
                small.setdefault((tensor.dtype, tensor.device), []).append(index)
        for (dtype, device), members in small.items():
            alignment = alignments.get(dtype, 1)
            layout = self._layouts.get((kind, dtype, device, alignment))
            if layout is None:
                layout = Layout(kind, self._ranks, dtype, self._stock, alignment)
                self._layouts[kind, dtype, device, alignment] = layout
            for chosen in _buckets(members, larger):
                sources, targets = ([tensors[index] for index in chosen] for tensors in (inputs, outputs))
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
    layout: Layout, inputs: list[torch.Tensor], outputs: list[torch.Tensor], device: torch.device
) -> Part:
    numels = [tensor.numel() // layout.given for tensor in inputs]
    steps = layout.steps(numels)
    space = layout.take(sum(steps), device)
    source, target = layout.views(space, sum(steps))
    join(inputs, numels, source, layout.given, steps)
    return Part(source, target, numels, outputs, layout, space)
