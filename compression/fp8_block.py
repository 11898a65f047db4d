"""Codec `fp8_block`: blocks of values as 8-bit floats times a shared scale; a quarter of float32.

The scaling is that of Micikevicius et al. ("FP8 Formats for Deep Learning", 2022), per block instead of per
tensor.
With `scale: float32` blocks have 256 values; with `scale: e8m0` they have 32, and the payload holds
MXFP8 of the OCP Microscaling Formats specification, v1.0. The error of a value is at most 1/16 of the value
with e4m3, 1/8 with e5m2, or a tiny part of the block's largest value. MXFP8 clips at the largest code, which
is an error of up to 1/8 of the value.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from mcr_plus.compression.block_codec import BlockCodec
from mcr_plus.compression.codec import CodecOptions, Traits
from mcr_plus.kernels import fp8_block


class Fp8BlockOptions(CodecOptions):
    """Options of `fp8_block`. `format`: e4m3 for precision, e5m2 for range. `scale`: format of the scales."""

    format: Literal["e4m3", "e5m2"] = "e4m3"
    scale: Literal["float32", "e8m0"] = "float32"


class Fp8Block(BlockCodec):
    """Codec of 8-bit floats. A block with a NaN or an infinity decodes to NaN."""

    Options = Fp8BlockOptions
    name: ClassVar[str] = "fp8_block"
    kernel = fp8_block

    def __init__(self, options: Fp8BlockOptions | None = None) -> None:
        super().__init__(options)
        chosen = options or Fp8BlockOptions()
        self._scale: fp8_block.Scale = chosen.scale
        self.arguments = (fp8_block.FORMATS[chosen.format], chosen.scale)
        self.traits = Traits(alignment=fp8_block.block_of(chosen.scale), needs_triton=True)

    def wire_numel(self, numel: int) -> int:  # noqa: D102
        return fp8_block.nbytes(numel, self._scale)
