"""sign1: the signs of values and the mean magnitude of each block of 1024; 1.03 bits a value.

EF-signSGD (Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019), block by block. The mean magnitude is the scale with the smallest squared error for given
signs. The error of a value is at most its magnitude plus the scale, so it needs error feedback.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from mcr_plus.compression.codec import PayloadCodec, Traits
from mcr_plus.kernels import sign1


class Sign1(PayloadCodec):
    """A block with a NaN or an infinity decodes to NaN. Zeros decode to plus or minus the scale."""

    name: ClassVar[str] = "sign1"
    traits = Traits(alignment=sign1.BLOCK, needs_error_feedback=True)

    def wire_numel(self, numel: int) -> int:  # noqa: D102
        return sign1.nbytes(numel)

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        sign1.encode(values, wire)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        sign1.decode(wire, out)

    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        sign1.accumulate(wire, total, scale)
