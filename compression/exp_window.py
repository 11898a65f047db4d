"""Codec `exp_window`: lossless; exponents as 3 bits relative to the block's largest, other bits unchanged.

Gradients of a block have similar exponents. Other lossless codecs of floats (Hershcovitch et al., "ZipNN",
2024; Zhang et al., "DFloat11", 2025) therefore code exponents by frequency. A window of fixed width is nearly
as good, needs no histogram, and suits vector code. Gaussian values take 0.85 of float32, 0.70 of bfloat16.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from mcr_plus.compression.codec import PayloadCodec, Traits
from mcr_plus.errors import Unsupported
from mcr_plus.kernels import exp_window


class ExpWindow(PayloadCodec):
    """Codec that restores all bits, including NaN and negative zero. Payloads name the dtype of the values.

    Supports only the CPU.
    """

    name: ClassVar[str] = "exp_window"
    traits = Traits(
        lossless=True,
        cpu_only=True,
        fixed_rate=False,
        dtypes=(torch.float32, torch.bfloat16),
        alignment=exp_window.BLOCK,
        min_numel=2 * exp_window.BLOCK,  # even a short block takes the space of a full block's codes
    )

    def wire_numel(self, numel: int) -> int:
        """Return the maximum for float32; bfloat16 takes half."""
        return exp_window.most_nbytes(numel, torch.float32)

    def _is_native(self, dtype: torch.dtype) -> bool:
        return dtype in self.traits.dtypes

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> int:
        _check(values)
        return exp_window.encode(values, wire)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        _check(out)
        dtype = exp_window.dtype_of(wire)
        if dtype is out.dtype:
            exp_window.decode(wire, out)
        else:
            values = torch.empty(out.numel(), dtype=dtype, device="cpu")
            exp_window.decode(wire, values)
            out.copy_(values)

    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        _check(total)
        exp_window.accumulate(wire, total, scale)


def _check(values: torch.Tensor) -> None:
    if values.is_cuda:
        raise Unsupported("codec exp_window: tensors on CUDA; it has kernels for the CPU only")
