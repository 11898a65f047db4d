"""int8_block: blocks of 256 values as signed bytes times a float32 scale; a quarter of float32.

The block-wise symmetric quantisation of 8-bit optimizers (Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", ICLR 2022) and of QuickReduce's and EQuARX's all_reduces. The error of a value is at most
1/254 of its block's largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from mcr_plus.compression.codec import PayloadCodec, Traits
from mcr_plus.kernels import int8_block


class Int8Block(PayloadCodec):
    """A block with a NaN or an infinity decodes to NaN."""

    name: ClassVar[str] = "int8_block"
    traits = Traits(alignment=int8_block.BLOCK)

    def wire_numel(self, numel: int) -> int:  # noqa: D102
        return int8_block.nbytes(numel)

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        int8_block.encode(values, wire)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        int8_block.decode(wire, out)

    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        int8_block.accumulate(wire, total, scale)

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
        int8_block.reduce(wires, skip, total, wire, scale)
        return self.wire_numel(total.numel())
