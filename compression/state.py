"""`CompressorState`: state of a compressed operation between calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mcr_plus.compression.codec import Codec, PayloadCodec
from mcr_plus.core.work import Work
from mcr_plus.pipeline.state import StateTensor

Wires = torch.Tensor | Sequence[torch.Tensor]
"""Type of payloads: the rows of a tensor, or tensors of different lengths."""


class CompressorState:
    """Layer between an operation's values and its codec; the base class keeps no state between calls.

    Subclasses keep residuals or estimates between the calls of one operation. Values, sums and results are
    flat and contiguous, sums are float32, payloads as in `PayloadCodec`; `lo` is the offset of a part in the
    operation's values, in elements.
    """

    has_residual = False
    """True if a residual must be added to values sent uncompressed; see `add_residual`."""

    one_at_a_time = False
    """True if a call must wait until the previous call is done, because it starts from its result."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.last: Work | None = None

    @property
    def codec(self) -> PayloadCodec:
        """Codec of a scheme that moves payloads."""
        assert isinstance(self._codec, PayloadCodec)
        return self._codec

    def encode(self, values: torch.Tensor, lo: int, wire: torch.Tensor, scale: float = 1.0) -> int:  # noqa: ARG002
        """Write the payload of `scale` times a part to `wire`; return its length in elements."""
        return self.codec.encode(values if scale == 1.0 else values * scale, wire)

    def begin_call(self) -> bool:
        """Begin a call before its parts are encoded, for codecs with `keeps_received`.

        Returns True if this rank needs all values of the parts that it receives.
        """
        return False

    def end_call(self) -> None:
        """End a call after its parts have been decoded; the state may then be dropped."""

    def encode_part(self, index: int, values: torch.Tensor, wire: torch.Tensor) -> int:  # noqa: ARG002
        """Write the payload of sent part `index`, or over channel `index`; return its length in elements."""
        return self.encode(values, 0, wire)

    def anchor_part(self, index: int, wire: torch.Tensor) -> int:
        """Write all values of a part unencoded, after `encode_part`, for codecs with `keeps_received`."""
        raise NotImplementedError

    def decode_part(self, index: int, wire: torch.Tensor, out: torch.Tensor, own: int | None = None) -> None:  # noqa: ARG002
        """Decode received part `index` to `out`. `own`: index among the sent parts, if this rank sent it."""
        self.decode(wire, 0, out)

    def begin_sum(self, values: torch.Tensor, lo: int, total: torch.Tensor, scale: float) -> None:  # noqa: ARG002
        """Write `scale` times a part that stays on this rank to `total` (float32, as large as the part)."""
        torch.mul(values, scale, out=total)

    def reduce(
        self, wires: Wires, total: torch.Tensor, wire: torch.Tensor, *, skip: int, scale: float
    ) -> int:
        """Add other ranks' payloads to `total`, and encode the sum to `wire`; see `PayloadCodec.reduce`."""
        return self.codec.reduce(wires, total, wire, skip=skip, scale=scale) if total.numel() else 0

    def decode(self, wire: torch.Tensor, lo: int, out: torch.Tensor) -> None:  # noqa: ARG002
        """Write the values of a payload, a part of the result, to `out`."""
        self.codec.decode(wire, out)

    def sum_payloads(self, wires: Wires, total: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        """Write `scale` times the sum of the ranks' payloads, added in rank order, to `out`.

        `total`: float32, of the size of `out`, or `out` itself.
        """
        self.codec.sum_payloads(wires, total, scale)
        if total is not out:
            out.copy_(total)

    def begin_exchange(self, values: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        """Add the residual to `values`, in place; return the `left` of `Codec.exchange`, flat float32."""
        return None

    def add_residual(self, values: torch.Tensor) -> None:
        """Add the residual to values sent uncompressed in this call, in place."""

    @property
    def tensors(self) -> list[StateTensor]:
        """Tensors kept between calls."""
        state = self._codec.state()
        return [StateTensor(name, "shared", tensor) for name, tensor in state.items()]

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load saved tensors by name: the mean over ranks of an `own` tensor, all ranks' parts of a `shard`.

        Raises `KeyError` or `RuntimeError` if the tensors do not fit.
        """
        if tensors:
            self._codec.load_state(tensors)
