"""Codec `powersgd`: gradient matrices as products of two thin matrices, by one step of power iteration.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019. A matrix M of n × m becomes P (n × r) and Q (m × r):

    P = sum over ranks of M Q      with Q of the previous call, a good start
    P = P with orthonormal columns
    Q = sum over ranks of Mᵀ P     result: P Qᵀ, the sum of all M projected onto the columns of P

Both sums are native all_reduces of float32. Tensors with fewer than two dimensions, and matrices too small
for a gain, are sent unencoded in the first sum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from mcr_plus.compression.codec import AdditiveRound, Codec, CodecOptions, Traits
from mcr_plus.kernels import powersgd


class PowerSGDOptions(CodecOptions):
    """Options of `powersgd`."""

    rank: int = Field(4, ge=1)
    """Columns of P and Q; fewer for matrices with fewer rows or columns."""
    seed: int = Field(0, ge=0)
    """Seed of the first Q, combined with the key of `enter` and the shape."""
    min_rate: float = Field(2.0, ge=0)
    """Smallest compression rate: a matrix n × m is sent unencoded if n m / (r (n + m)) is less."""


@dataclass(frozen=True)
class _Batch:
    """Matrices of equal shape at equal distances in the values, processed by one call without a copy."""

    rows: int
    columns: int
    rank: int
    offset: int
    stride: int
    count: int

    @property
    def key(self) -> str:
        return f"{self.offset}:{self.rows}x{self.columns}"


@dataclass(frozen=True)
class _Layout:
    """Compressed tensors of a list, and uncompressed ranges [start, end) of the values."""

    batches: tuple[_Batch, ...]
    plain: tuple[tuple[int, int], ...]

    @property
    def lefts(self) -> list[int]:
        return [batch.count * batch.rank * batch.rows for batch in self.batches]

    @property
    def rights(self) -> list[int]:
        return [batch.count * batch.rank * batch.columns for batch in self.batches]


class PowerSGD(Codec):
    """Low-rank codec. A matrix with NaN or infinity on any rank becomes NaN on all; then Q is drawn again.

    State saved with other shapes or another `rank` is not used: the iteration starts again.
    """

    name: ClassVar[str] = "powersgd"
    Options = PowerSGDOptions
    options: PowerSGDOptions
    traits = Traits(additive=True, needs_error_feedback=True, kinds=frozenset({"all_reduce"}))

    def __init__(self, options: PowerSGDOptions | None = None) -> None:
        super().__init__(options)
        self._key = ""
        self._rights: dict[str, torch.Tensor] = {}
        self._layouts: dict[tuple[tuple[int, ...], ...], _Layout] = {}
        self._random: dict[tuple[int, int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def caution(self, feedback: str | None) -> str | None:  # noqa: ARG002, D102
        return (
            "not for gradients under Adam or AdamW: a small GPT lost 6.8 % at rank 4 (1/15 of the bytes) and "
            "1.2 % at rank 16 (1/4); see docs/compression.md, Under Adam, for what loses less"
        )

    def enter(self, rank: int, key: str) -> None:  # noqa: ARG002, D102
        self._key = key
        self._random.clear()

    def state(self) -> dict[str, torch.Tensor]:  # noqa: D102
        return dict(self._rights)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:  # noqa: D102
        self._rights = dict(state)

    def refusal(self, shapes: Sequence[tuple[int, ...]]) -> str | None:  # noqa: D102
        if self._layout(shapes).batches:
            return None
        shown = ", ".join(map(str, shapes[:3])) + (", …" if len(shapes) > 3 else "")
        if all(len(shape) < 2 for shape in shapes):
            return f"codec {self.name} is for matrices, and none of the shapes {shown} has two dimensions"
        rank, rate = self.options.rank, self.options.min_rate
        return f"factors of rank {rank} make none of the shapes {shown} {rate:g} times smaller (min_rate)"

    def rounds(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> tuple[AdditiveRound, ...]:  # noqa: ARG002, D102
        layout = self._layout(shapes)
        plain = sum(end - start for start, end in layout.plain)
        first = AdditiveRound(torch.float32, sum(layout.lefts) + plain)
        return (first, AdditiveRound(torch.float32, sum(layout.rights))) if layout.batches else (first,)

    def exchange(  # noqa: D102
        self,
        values: torch.Tensor,
        shapes: Sequence[tuple[int, ...]],
        wires: Sequence[torch.Tensor],
        ranks: int,  # noqa: ARG002
        left: torch.Tensor | None,
    ) -> Iterator[None]:
        layout = self._layout(shapes)
        flat = values.to(torch.float32)
        plain = [end - start for start, end in layout.plain]
        parts = wires[0].split([*layout.lefts, *plain])
        lefts = [
            part.view(batch.count, batch.rank, batch.rows)
            for batch, part in zip(layout.batches, parts, strict=False)
        ]
        rest = list(zip(layout.plain, parts[len(lefts) :], strict=True))
        for batch, p in zip(layout.batches, lefts, strict=True):
            powersgd.find_left(flat, batch.offset, batch.stride, self._warm(batch, flat.device), p)
        for (start, end), part in rest:
            part.copy_(flat[start:end])
            if left is not None:
                left[start:end] -= part
        yield
        if layout.batches:
            rights = [
                part.view(batch.count, batch.rank, batch.columns)
                for batch, part in zip(layout.batches, wires[1].split(layout.rights), strict=True)
            ]
            factors = list(zip(layout.batches, lefts, rights, strict=True))
            for batch, p, q in factors:
                _, spare = self._drawn(batch, flat.device)
                powersgd.orthonormalise(p, spare)
                powersgd.find_right(flat, batch.offset, batch.stride, p, q)
                if left is not None:
                    powersgd.expand(p, q, left, batch.offset, batch.stride, factor=-1.0, add=True)
            yield
            for batch, p, q in factors:
                powersgd.expand(p, q, flat, batch.offset, batch.stride)
                self._rights[batch.key] = q.clone()
        for (start, end), part in rest:
            flat[start:end] = part
        if flat is not values:
            values.copy_(flat)

    def _layout(self, shapes: Sequence[tuple[int, ...]]) -> _Layout:
        key = tuple(shapes)
        if key not in self._layouts:
            self._layouts[key] = _layout(key, self.options)
        return self._layouts[key]

    def _warm(self, batch: _Batch, device: torch.device) -> torch.Tensor:
        """Return Qᵀ of the previous call, with rows scaled so that P does not overflow or underflow."""
        first, _ = self._drawn(batch, device)
        shape = (batch.count, batch.rank, batch.columns)
        earlier = self._rights.get(batch.key)
        if earlier is None or earlier.shape != shape:
            return first.expand(shape).contiguous()
        earlier = earlier.to(device)
        largest = earlier.abs().amax(2, keepdim=True)
        finite = largest.isfinite().all(1, keepdim=True)  # also false for NaN
        return torch.where(finite, earlier / largest.where(largest > 0, 1.0), first)

    def _drawn(self, batch: _Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first Qᵀ, and spare rows for zero rows of P; equal on all ranks and devices."""
        which = (batch.rows, batch.columns, device)
        if which not in self._random:
            text = f"{self.options.seed} {batch.rows}x{batch.columns} {self._key}"
            key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
            random = np.random.Generator(np.random.Philox(key=key))
            # uniform: unlike logarithms and sines, exact on any processor
            first, spare = (
                torch.from_numpy(random.random((batch.rank, size), np.float32) * 2 - 1).to(device)
                for size in (batch.columns, batch.rows)
            )
            self._random[which] = first, spare
        return self._random[which]


def _layout(shapes: tuple[tuple[int, ...], ...], options: PowerSGDOptions) -> _Layout:
    offsets: dict[tuple[int, int], list[int]] = {}
    plain: list[tuple[int, int]] = []
    end = 0
    for shape in shapes:
        start, end = end, end + math.prod(shape)
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        if len(shape) > 1 and _pays(rows, columns, options):
            offsets.setdefault((rows, columns), []).append(start)
        elif plain and plain[-1][1] == start:
            plain[-1] = plain[-1][0], end
        else:
            plain.append((start, end))
    batches = [
        _Batch(rows, columns, min(options.rank, rows, columns), run[0], stride, len(run))
        for (rows, columns), found in offsets.items()
        for run, stride in _runs(found, rows * columns)
    ]
    return _Layout(tuple(batches), tuple(plain))


def _pays(rows: int, columns: int, options: PowerSGDOptions) -> bool:
    rank = min(options.rank, rows, columns)
    return rank > 0 and rows * columns >= options.min_rate * rank * (rows + columns)


def _runs(offsets: Sequence[int], size: int) -> Iterator[tuple[Sequence[int], int]]:
    """Split offsets into runs of equal distance; yield run and distance (`size` for a run of one)."""
    at = 0
    while at < len(offsets):
        end = at + 1
        stride = offsets[end] - offsets[at] if end < len(offsets) else size
        while end < len(offsets) and offsets[end] - offsets[end - 1] == stride:
            end += 1
        yield offsets[at:end], stride
        at = end
