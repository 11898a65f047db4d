"""Codec `int8_block`: blocks of 256 values as signed bytes times a float32 scale; a quarter of float32.

This is the block-wise symmetric quantisation of 8-bit optimizers (Dettmers et al., "8-bit Optimizers via
Block-wise Quantization", ICLR 2022) and of QuickReduce's and EQuARX's all_reduces. The error of a value is at
most 1/254 of the block's largest value.
"""

from __future__ import annotations

from typing import ClassVar

from mcr_plus.compression.block_codec import BlockCodec
from mcr_plus.compression.codec import Traits
from mcr_plus.kernels import int8_block


class Int8Block(BlockCodec):
    """Codec of 8 bits. A block with a NaN or an infinity decodes to NaN."""

    name: ClassVar[str] = "int8_block"
    kernel = int8_block
    traits = Traits(alignment=int8_block.BLOCK, needs_triton=True)
