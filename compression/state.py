"""State of a compressed operation between calls: none here; residuals or estimates in the subclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mcr_plus.compression.codec import Codec, PayloadCodec
from mcr_plus.core.work import Work
from mcr_plus.pipeline.state import StateTensor

Wires = torch.Tensor | Sequence[torch.Tensor]
"""Payloads: the rows of a tensor, or tensors of different lengths."""


class CompressorState:
    """Stands between an operation's values and its codec, and keeps nothing between calls.

    Subclasses keep state between the calls of one operation. Values, sums and results are flat and
    contiguous, sums float32, payloads as in `PayloadCodec`; `lo` is where a part begins among the operation's
    values, in elements.
    """

    has_residual = False
    """Whether a residual is to be added to values that travel uncompressed; see `add_residual`."""

    one_at_a_time = False
    """Whether a call may begin only when the one before it is done, because it starts from its result."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.last: Work | None = None

    @property
    def codec(self) -> PayloadCodec:
        """The codec, for schemes of payloads."""
        assert isinstance(self._codec, PayloadCodec)
        return self._codec

    def encode(self, values: torch.Tensor, lo: int, wire: torch.Tensor, scale: float = 1.0) -> int:  # noqa: ARG002
        """Write the payload of `scale` times a part to `wire`; returns its length in elements."""
        return self.codec.encode(values if scale == 1.0 else values * scale, wire)

    def begin_call(self) -> bool:
        """Before the parts of a call are encoded, for codecs with `keeps_received`.

        Returns whether this rank needs all values of what it receives.
        """
        return False

    def end_call(self) -> None:
        """After the parts of a call have been decoded; its state may then be dropped."""

    def encode_part(self, index: int, values: torch.Tensor, wire: torch.Tensor) -> int:  # noqa: ARG002
        """Write the payload of part `index` of what this rank sends; returns its length in elements."""
        return self.encode(values, 0, wire)

    def anchor_part(self, index: int, wire: torch.Tensor) -> int:
        """After `encode_part`: write all values of the part as they are, for codecs with `keeps_received`."""
        raise NotImplementedError

    def decode_part(self, index: int, wire: torch.Tensor, out: torch.Tensor, own: int | None = None) -> None:  # noqa: ARG002
        """Write part `index` of what this rank receives; `own`: the part that it has sent itself, if so."""
        self.decode(wire, 0, out)

    def begin_sum(self, values: torch.Tensor, lo: int, total: torch.Tensor, scale: float) -> None:  # noqa: ARG002
        """Write `scale` times a part that need not travel to `total`, float32 and of its size."""
        torch.mul(values, scale, out=total)

    def reduce(
        self, wires: Wires, total: torch.Tensor, wire: torch.Tensor, *, skip: int, scale: float
    ) -> int:
        """Add other ranks' payloads to `total`, and write its payload; see `PayloadCodec.reduce`."""
        return self.codec.reduce(wires, total, wire, skip=skip, scale=scale) if total.numel() else 0

    def decode(self, wire: torch.Tensor, lo: int, out: torch.Tensor) -> None:  # noqa: ARG002
        """Write the values of a payload, a part of the result, to `out`."""
        self.codec.decode(wire, out)

    def sum_payloads(self, wires: Wires, total: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        """Write `scale` times the sum of the ranks' payloads, in their order, to `out`.

        `total`: float32, of the size of `out`, or `out` itself.
        """
        self.codec.sum_payloads(wires, total, scale)
        if total is not out:
            out.copy_(total)

    def begin_exchange(self, values: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        """Add the residual to `values`, in place; returns the `left` of `Codec.exchange`, flat float32."""
        return None

    def add_residual(self, values: torch.Tensor) -> None:
        """Add the residual to values that travel uncompressed this time, in place."""

    @property
    def tensors(self) -> list[StateTensor]:
        """The tensors that outlive a call."""
        state = self._codec.state()
        return [StateTensor(name, "shared", tensor) for name, tensor in state.items()]

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take saved tensors back, by name: of `own` the mean over ranks, of `shard` the parts of all ranks.

        Raises `KeyError` or `RuntimeError` where they do not fit.
        """
        if tensors:
            self._codec.load_state(tensors)
