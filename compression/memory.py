"""What lies between an operation's values and its codec: nothing, or what earlier calls have left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from mcr_plus.compression.codec import Codec, PayloadCodec
from mcr_plus.dispatch.work import Work

Wires = torch.Tensor | Sequence[torch.Tensor]
"""Payloads: the rows of a tensor, or tensors of different lengths."""


@dataclass(frozen=True)
class Kept:
    """A tensor that outlives a call, and what it is to the other ranks.

    `own`: every rank has another; what matters is their mean over ranks. `shard`: of the part of the values
    that this rank sums; the parts lie end to end in the order of ranks. `shared`: equal on all ranks.
    """

    name: str
    role: Literal["own", "shard", "shared"]
    tensor: torch.Tensor


class Memory:
    """Hands values to the codec and what comes back to the operation, and remembers nothing.

    Subclasses keep state between the calls of one operation. They work on flat contiguous tensors; `lo` is
    where a part begins among the operation's values.
    """

    holds = False
    """Whether there is anything to add to values that travel uncompressed; see `settle`."""

    one_at_a_time = False
    """Whether a call may begin only when the one before it is done, because it starts from its result."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.last: Work | None = None

    @property
    def codec(self) -> PayloadCodec:
        """The codec, for compositions of payloads."""
        assert isinstance(self._codec, PayloadCodec)
        return self._codec

    def send(self, values: torch.Tensor, lo: int, wire: torch.Tensor, scale: float = 1.0) -> int:  # noqa: ARG002
        """Write the payload of `scale` times a part to `wire`; returns its length in elements."""
        return self.codec.encode(values if scale == 1.0 else values * scale, wire)

    def keep(self, values: torch.Tensor, lo: int, total: torch.Tensor, scale: float) -> None:  # noqa: ARG002
        """Begin a sum with `scale` times a part that need not travel."""
        torch.mul(values, scale, out=total)

    def reduce(
        self, wires: Wires, total: torch.Tensor, wire: torch.Tensor, *, skip: int, scale: float
    ) -> int:
        """Add what came from others to `total`, and write its payload; see `PayloadCodec.reduce`."""
        return self.codec.reduce(wires, total, wire, skip=skip, scale=scale) if total.numel() else 0

    def receive(self, wire: torch.Tensor, lo: int, out: torch.Tensor) -> None:  # noqa: ARG002
        """Put what the payload of a part of the result stands for in its place."""
        self.codec.decode(wire, out)

    def gathered(self, wires: Wires, total: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        """Put `scale` times the sum of the ranks' payloads, in their order, into `out`.

        `total`: float32, of the size of `out`, or `out` itself.
        """
        if scale == 1.0:  # one pass less than adding to zeros
            self.codec.decode(wires[0], total)
            wires = wires[1:]
        else:
            total.zero_()
        for wire in wires:
            self.codec.decode_accumulate(wire, total, scale)
        if total is not out:
            out.copy_(total)

    def offer(self, values: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        """Before an exchange of an additive codec: complete `values`; returns `left` for it."""
        return None

    def settle(self, values: torch.Tensor) -> None:
        """Complete values that travel uncompressed this time."""

    @property
    def kept(self) -> list[Kept]:
        """What outlives a call."""
        state = self._codec.state()
        return [Kept(name, "shared", tensor) for name, tensor in state.items()]

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Take back what was kept: of `own` the mean over ranks, of `shard` the parts of all ranks."""
        if kept:
            self._codec.load_state(kept)
