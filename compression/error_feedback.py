"""`error_feedback`: add the error of a codec to the values of the next call.

Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes", ICML 2019. The rank that sums a part keeps the error of
encoding the sum again, as in Tang et al., "DoubleSqueeze", ICML 2019.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mcr_plus.compression.codec import Codec, drop_unless_finite
from mcr_plus.compression.state import CompressorState, Wires
from mcr_plus.pipeline.state import StateTensor


class ErrorFeedback(CompressorState):
    """Residuals of an operation's `numel` values, and of the sums of this rank's part.

    Operations that move values keep a residual for each peer and tag instead; it is not saved.

    `decay`: factor applied to residuals before use. `unit`: the number of ranks summed; saved residuals of
    sums are divided by it, so that another number of ranks can load them. A non-finite residual, caused by a
    non-finite gradient, is dropped, so that one bad step does not spoil all later steps.
    """

    def __init__(
        self, codec: Codec, numel: int, device: torch.device, decay: float = 1.0, unit: float = 1.0
    ) -> None:
        super().__init__(codec)
        self._decay, self._unit = decay, unit
        self._residual = torch.zeros(numel, dtype=torch.float32, device=device)
        self._parts: dict[int, torch.Tensor] = {}  # residuals of messages by channel
        self._shard: torch.Tensor | None = None
        self._summed: tuple[int, int] | None = None  # start and end of a part without residual

    def encode(self, values: torch.Tensor, lo: int, wire: torch.Tensor, scale: float = 1.0) -> int:  # noqa: D102
        self.has_residual = True
        if self._summed is not None and lo < self._summed[1] and self._summed[0] < lo + values.numel():
            self._summed = None
        if scale == 1.0:
            residual = self._residual[lo : lo + values.numel()]
            return self.codec.encode_rest(self._fed(values, lo), self._decay, residual, wire)
        residual = self._completed(values, lo)
        written = self.codec.encode(residual * scale, wire)
        self.codec.decode_accumulate(wire[:written], residual, -1 / scale)
        drop_unless_finite(residual)
        return written

    def encode_part(self, index: int, values: torch.Tensor, wire: torch.Tensor) -> int:  # noqa: D102
        residual = self._parts.get(index)
        if residual is None or residual.numel() < values.numel():
            longer = torch.zeros_like(values, dtype=torch.float32)
            if residual is not None:  # micro-batches differ in rows
                longer[: residual.numel()] = residual
            residual = self._parts[index] = longer
        return self.codec.encode_rest(values, self._decay, residual[: values.numel()], wire)

    def begin_sum(self, values: torch.Tensor, lo: int, total: torch.Tensor, scale: float) -> None:  # noqa: D102
        part = (lo, lo + values.numel())
        if self._summed == part:  # without a residual from the last call, two passes over memory are saved
            torch.mul(self._fed(values, lo).float(), scale, out=total)
            return
        residual = self._completed(values, lo)
        torch.mul(residual, scale, out=total)
        residual.zero_()
        self._summed = part

    def reduce(  # noqa: D102
        self, wires: Wires, total: torch.Tensor, wire: torch.Tensor, *, skip: int, scale: float
    ) -> int:
        shard = self._shard
        if shard is None:
            shard = self._shard = torch.zeros_like(total)
        if not total.numel():
            return 0
        total.add_(shard, alpha=self._decay)
        written = self.codec.reduce(wires, total, wire, skip=skip, scale=scale)
        shard.copy_(total)
        self.codec.decode_accumulate(wire[:written], shard, -1.0)
        drop_unless_finite(shard)
        return written

    def begin_exchange(self, values: torch.Tensor) -> torch.Tensor | None:  # noqa: D102
        drop_unless_finite(self._residual)  # left by the last exchange
        self.has_residual, self._summed = True, None
        residual = self._completed(values, 0)
        values.copy_(residual)
        return residual

    def add_residual(self, values: torch.Tensor) -> None:  # noqa: D102
        residual = self._completed(values, 0)
        self._summed = None
        values.copy_(residual)
        residual.sub_(values)  # the rounding error of the dtype
        drop_unless_finite(residual)
        self.has_residual = values.dtype not in (torch.float32, torch.float64)

    @property
    def tensors(self) -> list[StateTensor]:  # noqa: D102
        shard = [] if self._shard is None else [StateTensor("shard", "shard", self._shard / self._unit)]
        own = [StateTensor("residual", "own", self._residual)] if self._residual.numel() else []
        return [*super().tensors, *own, *shard]

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: D102
        rest = dict(tensors)
        if self._residual.numel():  # of messages, none is saved
            self._residual.copy_(rest.pop("residual"))
        self._summed, self._shard, shards = None, None, rest.pop("shard", None)
        if shards is not None:  # residuals of sums: every rank adds its share to its next values
            self._residual.add_(shards.to(self._residual.device))
        self.has_residual = True
        super().restore(rest)

    def _completed(self, values: torch.Tensor, lo: int) -> torch.Tensor:
        """Add values to the residual of a part, and return the residual."""
        residual = self._residual[lo : lo + values.numel()]
        if self._decay != 1.0:
            residual.mul_(self._decay)
        return residual.add_(self._fed(values, lo))

    def _fed(self, values: torch.Tensor, lo: int) -> torch.Tensor:  # noqa: ARG002
        """Return the values to add to the residual of a part."""
        return values


class MomentumCorrection(ErrorFeedback):
    """`momentum_correction`: error feedback of velocities instead of gradients, for sparse codecs.

    The accumulated and sent value is velocity = momentum × velocity + values. The velocity of an element
    restarts when the element has been sent (momentum factor masking). Lin et al., "Deep Gradient
    Compression", ICLR 2018. The optimizer must not use momentum itself.
    """

    def __init__(
        self, codec: Codec, numel: int, device: torch.device, momentum: float, unit: float = 1.0
    ) -> None:
        super().__init__(codec, numel, device, unit=unit)
        self._momentum = momentum
        self._velocity = torch.zeros_like(self._residual)

    def encode(self, values: torch.Tensor, lo: int, wire: torch.Tensor, scale: float = 1.0) -> int:  # noqa: D102
        written = super().encode(values, lo, wire, scale)
        self.codec.clear(wire[:written], self._velocity[lo : lo + values.numel()])
        return written

    def _fed(self, values: torch.Tensor, lo: int) -> torch.Tensor:
        velocity = self._velocity[lo : lo + values.numel()].mul_(self._momentum).add_(values)
        drop_unless_finite(velocity)
        return velocity

    @property
    def tensors(self) -> list[StateTensor]:  # noqa: D102
        return [*super().tensors, StateTensor("velocity", "own", self._velocity)]

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: D102
        rest = dict(tensors)
        self._velocity.copy_(rest.pop("velocity"))
        super().restore(rest)
