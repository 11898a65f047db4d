"""bf16 and fp16: values rounded to nearest even in a narrower float.

Additive: a library may sum the encoded values. The hooks of DDP and Horovod do the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cast:
    """A codec whose wire format is a narrower float.

    `encode` and `decode` work elementwise on tensors of equal shape; out-of-range values become infinite
    and NaN stays NaN, so an overflow remains visible.
    """

    name: str
    wire_dtype: torch.dtype
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    additive: bool = True

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Round `values` into `out` of `wire_dtype`."""
        out.copy_(values)

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Widen `payload` into `out`."""
        out.copy_(payload)


bf16 = Cast("bf16", torch.bfloat16)
fp16 = Cast("fp16", torch.float16)
