"""Horovod's `Compression`, implemented by the pipeline's codecs."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import torch

from mcr_plus.errors import InvalidArgument


class Compressor:
    """Converts a tensor before the reduction, and back afterwards. Programs may pass their own compressors.

    Compressors of this module select a codec of the pipeline; `compress` and `decompress` apply the same
    conversion to one tensor.
    """

    codec: ClassVar[str] = ""  # as JSON, a name or a mapping

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and the context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG004 - Horovod's signature
        """Return the received tensor in its original form."""
        return tensor


class NoneCompressor(Compressor):
    """Compressor that uses the codec of the pipeline's configuration (by default none)."""


class FP16Compressor(Compressor):
    """Compressor that sends float16: the codec `fp16`."""

    codec = '"fp16"'

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Convert float32 and float64; other tensors are returned unchanged."""
        return _narrowed(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Convert back to the original dtype."""
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Compressor that sends bfloat16: the codec `bf16`."""

    codec = '"bf16"'

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Convert float32 and float64; other tensors are returned unchanged."""
        return _narrowed(tensor, torch.bfloat16)


def _narrowed(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype]:
    wide = tensor.dtype in (torch.float32, torch.float64)
    return (tensor.to(dtype) if wide else tensor), tensor.dtype


class Compression:
    """Values for the argument `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

    @staticmethod
    def codec(name: str, **options: object) -> type[Compressor]:
        """Return a compressor for a codec of the pipeline: `Compression.codec("topk", ratio=0.01)`.

        Options of error feedback are accepted too, as `error_feedback=True`; each named tensor is then sent
        separately.
        """
        if not isinstance(name, str):
            raise InvalidArgument(f"name: expected a codec's name, got {name!r}")
        text = json.dumps({"codec": name, **options} if options else name, sort_keys=True)
        return type(f"{name}_compressor", (Compressor,), {"codec": text})


def codec_of(compression: Any) -> str | None:
    """Return a compressor's codec as JSON; None for a program's own compressor, which converts tensors."""
    if isinstance(compression, type) and issubclass(compression, Compressor):
        # A program's subclass of `Compressor` with its own `compress` converts tensors itself.
        if compression.codec or compression.compress is Compressor.compress:
            return compression.codec
        return None
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise InvalidArgument(
            f"compression: expected hvd.Compression.none, .fp16, .bf16 or .codec(…), got {compression!r}"
        )
    return None
