"""Codec `sign1`: the signs of values and the mean magnitude of each block of 1024; 1.03 bits a value.

This is EF-signSGD (Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019), block by block. The mean magnitude is the scale with the smallest squared error for given signs.
The error of a value is at most its magnitude plus the scale, so training needs error feedback.
"""

from __future__ import annotations

from typing import ClassVar

from mcr_plus.compression.block_codec import BlockCodec
from mcr_plus.compression.codec import PayloadCodec, Traits
from mcr_plus.kernels import sign1


class Sign1(BlockCodec):
    """Codec of 1 bit. A block with a NaN or an infinity decodes to NaN, zeros to plus or minus the scale."""

    name: ClassVar[str] = "sign1"
    kernel = sign1
    traits = Traits(alignment=sign1.BLOCK, needs_error_feedback=True, needs_triton=True)

    reduce = PayloadCodec.reduce  # the kernel module has no `reduce`

    def caution(self, feedback: str | None) -> str | None:  # noqa: ARG002, D102
        return (
            "not for gradients under Adam or AdamW: a small GPT lost 17 %; see docs/compression.md, "
            "Under Adam, for what loses less"
        )
