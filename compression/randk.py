"""Codec `randk`: send values at random positions, equal on all ranks, so that a library can sum them.

Stich et al., "Sparsified SGD with Memory", NeurIPS 2018; Konečný et al., "Federated Learning: Strategies for
Improving Communication Efficiency", 2016 (rescaled, unbiased). Positions are drawn, not sent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field

from mcr_plus.compression.codec import AdditiveRound, Codec, CodecOptions, Traits
from mcr_plus.kernels import counter, randk


class RandKOptions(CodecOptions):
    """Options of randk.

    Attributes:
        ratio: share of the values to send, rounded up to at least one value.
        seed: seed of the positions; equal on all ranks.
        rescale: True to multiply decoded values by n / k. The mean over many steps is then the value itself,
            but the variance is large. Without rescaling, training needs error feedback.
    """

    ratio: float = Field(default=0.01, ge=1e-6, le=1)
    seed: int = 0
    rescale: bool = False


class RandK(Codec):
    """Codec of random positions. It has no payloads, because sent values are meaningless without the step.

    The step, the number of earlier calls of `exchange`, is equal on all ranks and the only state. A NaN or
    an infinity becomes visible in the step that sends its position; until then error feedback keeps it.
    """

    Options = RandKOptions
    options: RandKOptions
    name: ClassVar[str] = "randk"

    def __init__(self, options: RandKOptions | None = None) -> None:
        super().__init__(options)
        rescale = self.options.rescale
        self.traits = dataclasses.replace(
            Traits(additive=True, sparse=True, kinds=frozenset({"all_reduce"})),
            unbiased=rescale,
            needs_error_feedback=not rescale,
        )
        self._key = ""
        self._step = 0

    def sent(self, numel: int) -> int:
        """Return the number of values sent of `numel`."""
        return min(numel, max(1, math.ceil(self.options.ratio * numel)))

    def enter(self, rank: int, key: str) -> None:  # noqa: D102, ARG002 - all ranks draw the same
        self._key = key

    def state(self) -> dict[str, torch.Tensor]:  # noqa: D102
        return {"step": torch.tensor(self._step, device="cpu")}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:  # noqa: D102
        self._step = int(state["step"])

    def rounds(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> tuple[AdditiveRound, ...]:  # noqa: ARG002, D102
        return (AdditiveRound(torch.float32, self.sent(sum(map(math.prod, shapes)))),)

    def exchange(  # noqa: D102
        self,
        values: torch.Tensor,
        shapes: Sequence[tuple[int, ...]],  # noqa: ARG002 - concatenated, they are encoded as one
        wires: Sequence[torch.Tensor],
        ranks: int,  # noqa: ARG002
        left: torch.Tensor | None,
    ) -> Iterator[None]:
        (wire,) = wires
        at = self._positions(self._step, values)
        self._step += 1
        factor = values.numel() / max(1, at.numel()) if self.options.rescale else 1.0
        wire.copy_(values.index_select(0, at))
        if left is not None:
            left.scatter_add_(0, at, wire * -factor)
        yield
        values.zero_()
        values.scatter_(0, at, (wire * factor).to(values.dtype))

    def _positions(self, step: int, values: torch.Tensor) -> torch.Tensor:
        key = counter.key_of("randk", self.options.seed, self._key, step)
        return randk.positions(values.numel(), self.sent(values.numel()), key, values.device)
