"""Codec `int4_block`: blocks of 32 values as 4 bits times a bfloat16 scale; 4.5 bits a value.

This is the block-wise quantisation of gradients in ZeRO++ (Wang et al., "ZeRO++: Extremely Efficient
Collective Communication for Giant Model Training", 2023) and of QuickReduce. The error of a value is at most
1/13.8 of the block's largest value. With `hadamard: true` blocks are first rotated, which spreads the
outliers of heavy-tailed values, as in SDP4Bit (Jia et al., NeurIPS 2024); the bound then holds for the
rotated values.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from mcr_plus.compression.block_codec import BlockCodec
from mcr_plus.compression.codec import CodecOptions, Traits
from mcr_plus.kernels import int4_block, int4_block_rest


class Int4BlockOptions(CodecOptions):
    """Options of `int4_block`. `hadamard`: True to rotate each block by a Walsh-Hadamard transform first."""

    hadamard: bool = False


class Int4Block(BlockCodec):
    """Codec of 4 bits. A block with a NaN or an infinity decodes to NaN."""

    Options = Int4BlockOptions
    name: ClassVar[str] = "int4_block"
    kernel = int4_block
    traits = Traits(alignment=int4_block.BLOCK, needs_error_feedback=True, needs_triton=True)

    def __init__(self, options: Int4BlockOptions | None = None) -> None:
        super().__init__(options)
        self.arguments = ((options or Int4BlockOptions()).hadamard,)

    def encode_rest(  # noqa: D102
        self, values: torch.Tensor, decay: float, rest: torch.Tensor, wire: torch.Tensor
    ) -> int:
        (hadamard,) = self.arguments
        fits = values.dtype is torch.float32 and values.is_contiguous() and not values.is_cuda
        if hadamard or not fits or not values.numel():
            return super().encode_rest(values, decay, rest, wire)
        room = self.wire_numel(values.numel())
        self._check(values, wire, room)
        int4_block_rest.encode_rest(values, decay, rest, wire[:room])
        return room
