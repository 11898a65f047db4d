"""Codec `topk`: send the values of largest magnitude and their positions; other values wait.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; Lin et al., "Deep
Gradient Compression", ICLR 2018. Training needs error feedback, which keeps unsent values for later steps.
Sums over many ranks gather all payloads, so the codec pays off only if ranks × ratio is small.

With `chunk` the largest values of every chunk are sent, as in SparseLoCo (Sarfi et al., "Communication
Efficient LLM Pre-training with SparseLoCo", 2025: 64 of 4096, in 2 bits), and positions take fewer bits; see
`mcr_plus.kernels.topk_records`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import torch
from pydantic import Field, model_validator

from mcr_plus.compression.codec import CodecOptions, PayloadCodec, Traits
from mcr_plus.kernels import topk, topk_chunks, topk_records


class TopKOptions(CodecOptions):
    """Options of topk.

    Attributes:
        ratio: share of the values to send (with `chunk`, of each chunk); at least one value is sent.
        values: format of the sent values: floats, or 4 or 2 bits with two bfloat16 levels per chunk.
        chunk: number of values among which the largest are chosen; None takes the whole tensor. Without it,
            positions take 2 bytes each, and 4 more per 65536 values; in chunks of 4096, positions at ratio
            1.56 % take 1 byte each.
    """

    ratio: float = Field(default=0.01, ge=1e-6, le=1)
    values: Literal["float32", "bf16", "int4", "int2"] = "float32"
    chunk: int | None = Field(default=None, ge=64, le=topk_records.LARGEST)

    @model_validator(mode="after")
    def _has_levels(self) -> TopKOptions:
        if self.chunk is None and self.values in ("int4", "int2"):
            raise ValueError(f"values: {self.values} needs chunk, such as chunk: 4096, for its levels")
        return self


_INSTEAD: Final = (
    "use int4_block with error feedback (7 times fewer bytes), preset adam (21 times) or outer steps "
    "(mcr.local, some hundred times); see docs/compression.md, Under Adam"
)
_BITS: Final = {"float32": 32, "bf16": 16, "int4": 4, "int2": 2}


class TopK(PayloadCodec):
    """Codec of largest values. Infinities and NaN count as largest, so they are sent and stay visible.

    With 4 or 2 bits, all sent values of a chunk with infinity or NaN decode to NaN.
    """

    Options = TopKOptions
    options: TopKOptions
    name: ClassVar[str] = "topk"
    traits = Traits(sparse=True, needs_error_feedback=True)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "adam": {
            "ratio": 0.18,
            "values": "int4",
            "chunk": 4096,
            "error_feedback": True,
            "exempt": {"max_ndim": 1},
        },
        "outer": {"ratio": 1 / 8, "values": "int2", "chunk": 4096, "error_feedback": True},
    }
    """Presets: for Adam with less momentum, 21 times fewer bytes; for outer steps, see docs/local-sgd.md."""

    def __init__(self, options: TopKOptions | None = None) -> None:
        super().__init__(options)
        ratio, chunk, values = self.options.ratio, self.options.chunk, self.options.values
        self._dtype = torch.bfloat16 if values == "bf16" else torch.float32
        self._chunking = None if chunk is None else topk_records.Chunking(chunk, ratio, _BITS[values])
        self._kernel: Any = topk if chunk is None else topk_chunks

    def caution(self, feedback: str | None) -> str | None:  # noqa: D102
        adam = TopKOptions(**{key: self.presets["adam"][key] for key in TopKOptions.model_fields})
        if self.options == adam and feedback == "error_feedback":
            return (
                "preset adam is for Adam or AdamW with betas=(0.5, …): a small GPT ended at -1.7, -1.6 and "
                "+1.1 % of loss with three seeds, and lost 3.6 % in its first 300 steps with betas=(0.9, …); "
                "see docs/compression.md, Under Adam"
            )
        if feedback == "momentum_correction":
            return (
                "not for gradients of every step under Adam or AdamW, which divide by the mean squares of "
                "gradients and not of velocities: a small GPT lost 1.4, 5.4 and 10.9 % with three seeds at "
                f"ratio 0.18; {_INSTEAD}"
            )
        return (
            "not for gradients of every step under Adam or AdamW: a small GPT lost 23 % at ratio 0.01 and "
            f"3.5 % at 0.1 with error feedback; {_INSTEAD}"
        )

    def sent(self, numel: int) -> int:
        """Return how many of `numel` values are sent."""
        if self._chunking is not None:
            return self._chunking.sent(numel)
        return min(numel, max(1, math.ceil(self.options.ratio * numel)))

    def clear(self, wire: torch.Tensor, values: torch.Tensor) -> None:
        """Zero the elements of `values` that a payload holds; `values` are float32, flat and contiguous.

        This is the momentum factor masking of Deep Gradient Compression.
        """
        if values.numel():
            self._kernel.clear(wire, values, *self._arguments(values.numel()))

    def encode_rest(  # noqa: D102
        self, values: torch.Tensor, decay: float, rest: torch.Tensor, wire: torch.Tensor
    ) -> int:
        fits = values.dtype is torch.float32 and values.is_contiguous() and not values.is_cuda
        if self._chunking is None or not fits or not values.numel():
            return super().encode_rest(values, decay, rest, wire)
        room = self.wire_numel(values.numel())
        self._check(values, wire, room)
        topk_chunks.encode_rest(values, decay, rest, wire[:room], self._chunking)
        return room

    def sum_payloads(  # noqa: D102
        self, wires: torch.Tensor | Sequence[torch.Tensor], total: torch.Tensor, scale: float
    ) -> None:
        one_block = isinstance(wires, torch.Tensor) and wires.is_contiguous() and not wires.is_cuda
        if self._chunking is None or not one_block or not total.numel():
            super().sum_payloads(wires, total, scale)
        else:
            assert isinstance(wires, torch.Tensor)
            topk_chunks.sum_payloads(wires, total, scale, self._chunking)

    def wire_numel(self, numel: int) -> int:  # noqa: D102
        if self._chunking is not None:
            return topk_records.nbytes(numel, self._chunking)
        return topk.nbytes(numel, self.sent(numel), self._dtype)

    def _encode(self, values: torch.Tensor, wire: torch.Tensor) -> None:
        self._kernel.encode(values, wire, *self._arguments(values.numel()))

    def _decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        self._kernel.decode(wire, out, *self._arguments(out.numel()))

    def _accumulate(self, wire: torch.Tensor, total: torch.Tensor, scale: float) -> None:
        self._kernel.accumulate(wire, total, scale, *self._arguments(total.numel()))

    def _arguments(self, numel: int) -> tuple[Any, ...]:
        """Return the last arguments of the kernels."""
        return (self.sent(numel), self._dtype) if self._chunking is None else (self._chunking,)
