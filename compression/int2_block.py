"""Codec `int2_block`: blocks of 128 values as 2 bits and two bfloat16 levels; 2.25 bits a value.

A value becomes a sign and one of two magnitudes. This is the four-level quantiser of Max, "Quantizing for
Minimum Distortion", 1960, with the threshold of minimum error for Gaussian blocks, and levels at the means of
the values that they represent (Lloyd, "Least Squares Quantization in PCM", 1982). Rounding is to nearest and
therefore biased. The error of a Gaussian block has about 12 % of the block's energy, so training needs error
feedback.
"""

from __future__ import annotations

from typing import ClassVar

from mcr_plus.compression.block_codec import BlockCodec
from mcr_plus.compression.codec import Traits
from mcr_plus.kernels import int2_block


class Int2Block(BlockCodec):
    """Codec of 2 bits. A block with a NaN or an infinity decodes to NaN, a zero to plus or minus a level."""

    name: ClassVar[str] = "int2_block"
    kernel = int2_block
    traits = Traits(alignment=int2_block.BLOCK, needs_error_feedback=True, needs_triton=True)
