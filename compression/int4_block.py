"""int4_block: blocks of 32 values as 4 bits times a bfloat16 scale; 4.5 bits a value.

The block-wise quantisation of ZeRO++'s gradients (Wang et al., "ZeRO++: Extremely Efficient Collective
Communication for Giant Model Training", 2023) and of QuickReduce. The error of a value is at most
1/13.8 of its block's largest. With `hadamard: true` blocks are rotated first, which spreads outliers:
for heavy tails, as in SDP4Bit (Jia et al., NeurIPS 2024); the bound then holds for the rotated values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from mcr_plus.compression.codec import CodecOptions, PayloadCodec, Traits
from mcr_plus.kernels import int4_block


class Int4Block(PayloadCodec):
    """A block with a NaN or an infinity decodes to NaN."""

    class Options(CodecOptions):
        """`hadamard`: whether each block is rotated by a Walsh-Hadamard transform first."""

        hadamard: bool = False

    name: ClassVar[str] = "int4_block"
    traits = Traits(alignment=int4_block.BLOCK, needs_error_feedback=True)

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self._hadamard = (options or self.Options()).hadamard

    def wire_numel(self, numel: int) -> int:  # noqa: D102
        return int4_block.nbytes(numel)

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        int4_block.encode(values, wire, self._hadamard)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        int4_block.decode(wire, out, self._hadamard)

    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        int4_block.accumulate(wire, total, scale, self._hadamard)

    def reduce(  # noqa: D102
        self,
        wires: torch.Tensor | Sequence[torch.Tensor],
        total: torch.Tensor,
        wire: torch.Tensor,
        *,
        skip: int,
        scale: float = 1.0,
    ) -> int:
        assert isinstance(wires, torch.Tensor)
        int4_block.reduce(wires, skip, total, wire, scale, self._hadamard)
        return self.wire_numel(total.numel())
