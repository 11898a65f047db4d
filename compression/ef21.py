"""`ef21`: send changes since the last call; receivers add them up.

Richtárik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
Feedback", NeurIPS 2021; both directions, as in Fatkhullin et al., "EF21 with Bells & Whistles", 2021.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mcr_plus.compression.codec import Codec
from mcr_plus.compression.state import CompressorState, Wires
from mcr_plus.pipeline.state import StateTensor


class Ef21(CompressorState):
    """Estimates of this rank's values, of the sum of its part, and of the result on all ranks.

    `unit`: the number of ranks summed in the result; the saved result is divided by it.

    In an all_reduce, the result is the sum of the estimates, which improve with each call if values change
    little.
    """

    one_at_a_time = True

    def __init__(self, codec: Codec, numel: int, device: torch.device, unit: float = 1.0) -> None:
        super().__init__(codec)
        self._unit = unit
        self._mine = torch.zeros(numel, dtype=torch.float32, device=device)
        self._result = torch.zeros_like(self._mine)
        self._shard: torch.Tensor | None = None
        self._lo = 0

    def encode(self, values: torch.Tensor, lo: int, wire: torch.Tensor, scale: float = 1.0) -> int:  # noqa: D102
        mine = self._mine[lo : lo + values.numel()]
        written = self.codec.encode((values - mine).mul_(scale), wire)
        self.codec.decode_accumulate(wire[:written], mine, 1 / scale)
        return written

    def begin_sum(self, values: torch.Tensor, lo: int, total: torch.Tensor, scale: float) -> None:  # noqa: D102
        self._lo = lo
        mine = self._mine[lo : lo + values.numel()]
        torch.sub(values, mine, out=total).mul_(scale)
        mine.copy_(values)

    def reduce(  # noqa: D102
        self, wires: Wires, total: torch.Tensor, wire: torch.Tensor, *, skip: int, scale: float
    ) -> int:
        result = self._result[self._lo : self._lo + total.numel()]
        if self._shard is None:
            self._shard = result.clone()
        if not total.numel():
            return 0
        for row, each in enumerate(wires):
            if row != skip:
                self.codec.decode_accumulate(each, total, scale)
        self._shard.add_(total)
        return self.codec.encode(self._shard - result, wire)

    def decode(self, wire: torch.Tensor, lo: int, out: torch.Tensor) -> None:  # noqa: D102
        result = self._result[lo : lo + out.numel()]
        self.codec.decode_accumulate(wire, result)
        out.copy_(result)
        self._reset_non_finite(lo, result)

    def sum_payloads(self, wires: Wires, total: torch.Tensor, out: torch.Tensor, scale: float) -> None:  # noqa: D102, ARG002
        for wire in wires:
            self.codec.decode_accumulate(wire, self._result, scale)
        out.copy_(self._result)
        self._reset_non_finite(0, self._result)

    def _reset_non_finite(self, lo: int, result: torch.Tensor) -> None:
        """Reset non-finite elements; the result is equal on all ranks, and so are the reset elements."""
        if not result.is_cuda and torch.isfinite(result.sum()):
            return
        bad = ~torch.isfinite(result)
        parts = [result, self._mine[lo : lo + result.numel()]]
        if self._shard is not None and lo == self._lo and self._shard.numel() == result.numel():
            parts.append(self._shard)
        for part in parts:
            part.masked_fill_(bad, 0.0)

    @property
    def tensors(self) -> list[StateTensor]:  # noqa: D102
        shard = [] if self._shard is None else [StateTensor("shard", "shard", self._shard / self._unit)]
        return [
            *super().tensors,
            StateTensor("estimate", "own", self._mine),
            StateTensor("result", "shared", self._result / self._unit),
            *shard,
        ]

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: D102
        rest = dict(tensors)
        self._mine.copy_(rest.pop("estimate"))
        result = rest.pop("result")
        self._shard, shards = None, rest.pop("shard", None)  # the result approaches their sum
        torch.mul((result if shards is None else shards).to(self._mine.device), self._unit, out=self._result)
        super().restore(rest)
