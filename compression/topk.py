"""topk: the values of largest magnitude and their places; the others wait.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; Lin et al., "Deep
Gradient Compression", ICLR 2018. Training needs error feedback, which keeps unsent values for later steps.
Sums over many ranks gather all payloads, so they pay only while ranks × ratio is small.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field

from mcr_plus.compression.codec import CodecOptions, PayloadCodec, Traits
from mcr_plus.kernels import topk


class TopKOptions(CodecOptions):
    """Options of topk.

    Attributes:
        ratio: of the values that are sent, rounded up; at least one is.
        values: the dtype in which they travel. Their places take 2 bytes each, and every 65536 values 4 more.
    """

    ratio: float = Field(default=0.01, ge=1e-6, le=1)
    values: Literal["float32", "bf16"] = "float32"


class TopK(PayloadCodec):
    """Infinities and NaN are larger than all else, so they are sent, and stay visible."""

    Options = TopKOptions
    options: TopKOptions
    name: ClassVar[str] = "topk"
    traits = Traits(sparse=True, needs_error_feedback=True)

    def __init__(self, options: TopKOptions | None = None) -> None:
        super().__init__(options)
        self._dtype = torch.float32 if self.options.values == "float32" else torch.bfloat16

    def sent(self, numel: int) -> int:
        """How many of `numel` values are sent."""
        return min(numel, max(1, math.ceil(self.options.ratio * numel)))

    def clear(self, wire: torch.Tensor, values: torch.Tensor) -> None:
        """Set the values that a payload holds to zero in `values`: float32, flat and contiguous.

        The momentum factor masking of Deep Gradient Compression.
        """
        if values.numel():
            topk.clear(wire, values, self.sent(values.numel()), self._dtype)

    def wire_numel(self, numel: int) -> int:  # noqa: D102
        return topk.nbytes(numel, self.sent(numel), self._dtype)

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        topk.encode(values, wire, self.sent(values.numel()), self._dtype)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        topk.decode(wire, out, self.sent(out.numel()), self._dtype)

    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        topk.accumulate(wire, total, scale, self.sent(total.numel()), self._dtype)
