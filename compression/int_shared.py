"""Codec `int_shared`: integers with scales shared by all ranks, which any library can sum.

The ranks first agree on the largest magnitude of each block of 256 values (a MAX all_reduce of 1/256 of the
tensor), then sum integers with these scales exactly. Each value is sent as one code, whatever the number of
ranks, so the library's own all_reduce (also in the network) can sum the codes. This is the homomorphic
compression of THC (Li et al., "THC: Accelerating Distributed Deep Learning Using Tensor Homomorphic
Compression", NSDI 2024) and of Global-QSGD (Xin et al., 2023), without their transforms.

The sum over W ranks must fit the lane of a code, so a code is at most (2^(bits - 1) - 1) / W: with 8 bits,
127 for one rank and 15 for 8 ranks. The error of a rank's value is at most its block's largest magnitude on
any rank, divided by twice the largest code. If codes would use less than half the bits (at most 7, or 127
with 16 bits), lanes are twice as wide: 8 bits suffice for up to 18 ranks, 16 bits for up to 258.

Lanes are packed into int32 words, because few libraries sum 16-bit integers, or 8-bit integers without
saturation. Small tensors are sent unencoded: for them two operations take longer than one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import torch

from mcr_plus.compression.codec import AdditiveRound, Codec, CodecOptions, Traits
from mcr_plus.kernels import int_shared

_FINEST = 2**20  # maximum number of levels: with more, float32 may not separate neighbouring codes


class IntSharedOptions(CodecOptions):
    """Options of `int_shared`."""

    bits: Literal[8, 16] = 8
    """Bits of a code and of the sum of codes; doubled if many ranks would leave too few levels."""


class IntShared(Codec):
    """Codec of integers. A block with a NaN or an infinity on any rank decodes to NaN on all ranks."""

    name: ClassVar[str] = "int_shared"
    Options = IntSharedOptions
    options: IntSharedOptions
    traits = Traits(
        additive=True,
        alignment=int_shared.BLOCK,
        min_numel=1024,
        kinds=frozenset({"all_reduce"}),
        needs_triton=True,
    )

    def grid(self, ranks: int) -> tuple[int, int]:
        """Return the largest code of one rank, and the number of codes in a 32-bit word."""
        bits: int = self.options.bits
        fewest = 2 ** (bits // 2 - 1) - 1
        while bits < 32 and _levels(bits, ranks) < fewest:
            bits *= 2
        return _levels(bits, ranks), 32 // bits

    def rounds(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> tuple[AdditiveRound, ...]:  # noqa: D102
        numel = sum(map(math.prod, shapes))
        _, lanes = self.grid(ranks)
        return (
            AdditiveRound(torch.float32, int_shared.blocks_of(numel), "MAX"),
            AdditiveRound(torch.int32, int_shared.words_of(numel, lanes)),
        )

    def exchange(  # noqa: D102
        self,
        values: torch.Tensor,
        shapes: Sequence[tuple[int, ...]],  # noqa: ARG002 - concatenated, they are encoded as one
        wires: Sequence[torch.Tensor],
        ranks: int,
        left: torch.Tensor | None,
    ) -> Iterator[None]:
        amax, words = wires
        levels, lanes = self.grid(ranks)
        flat = values.to(torch.float32)
        int_shared.amax(flat, amax)
        yield
        int_shared.encode(flat, amax, words, levels, lanes)
        if left is not None:
            int_shared.accumulate(amax, words, left, levels, lanes, -1.0)
        yield
        int_shared.decode(amax, words, flat, levels, lanes)
        if flat is not values:
            values.copy_(flat)


def _levels(bits: int, ranks: int) -> int:
    return min(((1 << (bits - 1)) - 1) // ranks, _FINEST)
