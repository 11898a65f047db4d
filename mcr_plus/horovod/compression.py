"""How tensors travel: Horovod's `Compression`, over the codecs."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import torch

from mcr_plus.errors import InvalidArgument


class Compressor:
    """Changes a tensor before it is reduced, and back. Programs may bring their own.

    Those here leave it to a codec of the pipeline; `compress` and `decompress` show what it does.
    """

    codec: ClassVar[str] = ""  # as JSON, a name or a mapping

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What travels, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG004 - Horovod's signature
        """What arrives."""
        return tensor


class NoneCompressor(Compressor):
    """As the pipeline's configuration says: by default, as it is."""


class FP16Compressor(Compressor):
    """float16 between ranks: the codec `fp16`."""

    codec = '"fp16"'

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Wide floats become narrow; other tensors stay as they are."""
        return _narrowed(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The dtype from before."""
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """bfloat16 between ranks: the codec `bf16`."""

    codec = '"bf16"'

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Wide floats become narrow; other tensors stay as they are."""
        return _narrowed(tensor, torch.bfloat16)


def _narrowed(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype]:
    wide = tensor.dtype in (torch.float32, torch.float64)
    return (tensor.to(dtype) if wide else tensor), tensor.dtype


class Compression:
    """What to pass as `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

    @staticmethod
    def codec(name: str, **options: object) -> type[Compressor]:
        """A codec of the pipeline by its name, with its options: `Compression.codec("topk", ratio=0.01)`.

        Also of what becomes of its losses: `error_feedback=True`. Each named tensor then travels by itself.
        """
        if not isinstance(name, str):
            raise InvalidArgument(f"name: expected a codec's name, got {name!r}")
        text = json.dumps({"codec": name, **options} if options else name, sort_keys=True)
        return type(f"{name}_compressor", (Compressor,), {"codec": text})


def codec_of(compression: Any) -> str | None:
    """The codec of a compressor, as JSON; None for a program's own, which changes tensors itself."""
    if isinstance(compression, type) and issubclass(compression, Compressor):
        # A subclass of one of ours that changes tensors itself is the program's own.
        if compression.codec or compression.compress is Compressor.compress:
            return compression.codec
        return None
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise InvalidArgument(
            f"compression: expected hvd.Compression.none, .fp16, .bf16 or .codec(…), got {compression!r}"
        )
    return None
