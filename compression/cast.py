"""bf16 and fp16: values rounded to a narrower float.

Additive: a library may sum the encoded values. The hooks of DDP and Horovod do the same. With
`rounding: stochastic` the mean of many roundings is the value (Gupta et al., "Deep Learning with Limited
Numerical Precision", ICML 2015).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from mcr_plus.compression.codec import PayloadCodec, Traits


class Cast(PayloadCodec):
    """A codec whose payload is the values in a narrower float.

    Rounds to nearest even; out-of-range values become infinite and NaN stays NaN, so an overflow remains
    visible.
    """

    traits = Traits(additive=True, elementwise=True, dtypes=(torch.float32, torch.float64))

    def wire_numel(self, numel: int) -> int:  # noqa: D102
        return numel

    def _is_native(self, dtype: torch.dtype) -> bool:  # noqa: ARG002 - torch converts them all
        return True

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        wire.copy_(values)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(wire[: out.numel()])

    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        total.add_(wire[: total.numel()], alpha=scale)


class Bf16(Cast):
    """8 bits of mantissa, the range of float32."""

    name: ClassVar[str] = "bf16"
    wire_dtype = torch.bfloat16


class Fp16(Cast):
    """11 bits of mantissa, up to 65504."""

    name: ClassVar[str] = "fp16"
    wire_dtype = torch.float16
