"""int2_block: blocks of 128 values as 2 bits and two bfloat16 levels; 2.25 bits a value.

A sign and one of two magnitudes: the quantiser of four levels of Max, "Quantizing for Minimum Distortion",
1960, with its threshold where it has the least error for Gaussian blocks and its levels at the means of what
they stand for (Lloyd, "Least Squares Quantization in PCM", 1982). Rounding is to nearest and so biased; a
Gaussian block keeps about 12 % of its energy as the error, to be fed back by error feedback.
"""

from __future__ import annotations

from typing import ClassVar

from mcr_plus.compression.block_codec import BlockCodec
from mcr_plus.compression.codec import Traits
from mcr_plus.kernels import int2_block


class Int2Block(BlockCodec):
    """A block with a NaN or an infinity decodes to NaN. A zero decodes to plus or minus a level."""

    name: ClassVar[str] = "int2_block"
    kernel = int2_block
    traits = Traits(alignment=int2_block.BLOCK, needs_error_feedback=True, needs_triton=True)
