"""Codecs `bf16` and `fp16`: round values to a narrower float.

These codecs are additive: a library may sum the encoded values, as with the hooks of DDP and Horovod. With
`rounding: stochastic` the mean of many roundings equals the value (Gupta et al., "Deep Learning with Limited
Numerical Precision", ICML 2015).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

import torch

from mcr_plus.compression.codec import CodecOptions, PayloadCodec, Traits
from mcr_plus.kernels import cast

_CHUNK: Final = 1 << 17
"""Elements converted at a time."""


class CastOptions(CodecOptions):
    """Options of bf16 and fp16.

    Attributes:
        rounding: `nearest` (even) or `stochastic`: up or down at random, so that the mean is the value.
        seed: the seed of stochastic rounding.
    """

    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0


class Cast(PayloadCodec):
    """Codec that sends values as narrower floats.

    Out-of-range values become infinite and NaN stays NaN, so an overflow remains visible.

    The random numbers of stochastic rounding depend on seed, rank, key of `enter`, number of earlier payloads
    and element; float64 is first rounded to the nearest float32.
    """

    Options = CastOptions
    options: CastOptions

    def __init__(self, options: CastOptions | None = None) -> None:
        super().__init__(options)
        self._stochastic = self.options.rounding == "stochastic"
        traits = Traits(additive=True, elementwise=True, dtypes=(torch.float32, torch.float64))
        self.traits = dataclasses.replace(traits, unbiased=self._stochastic, needs_triton=self._stochastic)
        self._rank, self._key = 0, ""
        self._step = 0

    def enter(self, rank: int, key: str) -> None:  # noqa: D102
        self._rank, self._key = rank, key

    def state(self) -> dict[str, torch.Tensor]:
        """Return the number of written payloads, if rounding is stochastic."""
        return {"step": torch.tensor(self._step, device="cpu")} if self._stochastic else {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:  # noqa: D102
        if self._stochastic:
            self._step = int(state["step"])

    def wire_numel(self, numel: int) -> int:  # noqa: D102
        return numel

    def _is_native(self, dtype: torch.dtype) -> bool:  # noqa: ARG002 - torch converts them all
        return True

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        if self._stochastic:
            name = (self.name, self.options.seed, self._rank, self._key, self._step)
            cast.encode(values.to(torch.float32), wire, *name)
            self._step += 1
        else:
            wire.copy_(values)

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(wire[: out.numel()])

    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        if total.is_cuda:
            total.add_(wire[: total.numel()], alpha=scale)
            return
        # On the CPU, converting chunks in cache before adding is six times faster than torch's mixed add.
        for part, encoded in zip(total.split(_CHUNK), wire[: total.numel()].split(_CHUNK), strict=True):
            part.add_(encoded.to(torch.float32), alpha=scale)


class Bf16(Cast):
    """Codec `bf16`: 8 bits of mantissa, the range of float32."""

    name: ClassVar[str] = "bf16"
    wire_dtype = torch.bfloat16


class Fp16(Cast):
    """Codec `fp16`: 11 bits of mantissa, up to 65504."""

    name: ClassVar[str] = "fp16"
    wire_dtype = torch.float16
