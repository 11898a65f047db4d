"""Rounds of an exchange: the boxes of many tensors that a rank sends and receives in one operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mcr_plus.layout.layout import Layout
from mcr_plus.layout.messages import Rows
from mcr_plus.layout.regions import Ints, row_length, runs

if TYPE_CHECKING:
    from mcr_plus.core.message import Signature
    from mcr_plus.pipeline.stage import Issue

Locals = list["torch.Tensor | None"]
_torch: Any = torch  # whose type stubs do not have the operations on lists


class Strided(NamedTuple):
    """A box in a local tensor, as `torch.as_strided` takes it, and its place in a buffer, in elements."""

    tensor: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    at: int
    numel: int

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The box as a view of its contiguous local tensor."""
        return local.as_strided(self.extents, self.strides, self.offset + local.storage_offset())

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """The box as a view of a buffer."""
        return buffer[self.at : self.at + self.numel].view(self.extents)


class Pairs(NamedTuple):
    """Boxes that are copied to others, from the same index to the same."""

    froms: list[Strided]
    tos: list[Strided]

    @classmethod
    def of(cls, pairs: Sequence[tuple[Strided, Strided]]) -> Pairs:
        """Pairs (from, to) as two lists."""
        return cls([one for one, _ in pairs], [to for _, to in pairs])

    def copy(self, before: Locals, after: Locals) -> None:
        """Copy those of the local tensors `before` to those of `after`."""
        if self.froms:
            copy_all(views_of(self.tos, after), views_of(self.froms, before))


@dataclass
class Sum:
    """The addends of one tensor, in the order in which they are reduced: received boxes, and kept ones.

    `onto`: whether they are added to what is there, zeros, because the first may lack elements.
    """

    tensor: int
    op: str
    onto: bool
    addends: list[tuple[list[Strided], list[tuple[Strided, Strided]]]]


@dataclass
class Round:
    """What this rank sends and receives in one operation.

    `received`: boxes that are copied into place; `sums`: those that are reduced. `sent_at`, `received_at`:
    where all of it lies in one piece of a single local tensor, in the order of the buffer, so that no copy is
    needed; None elsewhere.
    """

    sent: list[Strided] = field(default_factory=list)
    received: list[Strided] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    input_counts: tuple[int, ...] = ()
    output_counts: tuple[int, ...] = ()
    sent_numel: int = 0
    received_numel: int = 0
    sent_at: int | None = None
    received_at: int | None = None
    bound: dict[tuple[bool, str], tuple[Signature, Issue]] = field(default_factory=dict)
    """The operation, by whether it is asynchronous and the type of the device."""

    @property
    def packed(self) -> int:
        """Elements of the buffer that is sent."""
        return 0 if self.sent_at is not None else self.sent_numel

    @property
    def buffered(self) -> int:
        """Elements of both buffers."""
        return self.packed + (0 if self.received_at is not None else self.received_numel)


@dataclass
class Stage:
    """One step of the plan: its rounds, and what this rank keeps (from, to).

    `targets`: of each tensor the layout that the step leads to, None where it has no such step. `is_last`: it
    leads to the outputs, of all tensors. `is_idle`: no rank of the group sends anything.
    """

    rounds: list[Round]
    kept: Pairs
    targets: list[Layout | None]
    is_last: bool
    is_lossy: bool
    is_idle: bool


def views_of(boxes: Sequence[Strided], locals_: Locals) -> list[torch.Tensor]:
    """Boxes as views of the local tensors that they lie in."""
    return [box.of(locals_[box.tensor]) for box in boxes]  # type: ignore[arg-type]


def copy_all(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each of `values` to the tensor of `targets` with the same index."""
    if len(targets) == 1:
        targets[0].copy_(values[0])
    elif targets:
        _torch._foreach_copy_(targets, values)


# -- rows of many tensors -------------------------------------------------------------------------


class RowsOf(NamedTuple):
    """The rows of one tensor, in the order of packing."""

    tensor: int
    layout: Layout
    rank: int
    rows: Rows
    items: list[Strided]

    @classmethod
    def of(cls, tensor: int, layout: Layout, rank: int, rows: Rows) -> RowsOf:
        """Rows of tensor number `tensor`, which has this layout."""
        return cls(
            tensor, layout, rank, rows, strided(tensor, *layout.strided(rank, rows.pieces, rows.boxes))
        )

    def part(self, row: int, start: int, stop: int) -> list[Strided]:
        """A run of the elements of a row."""
        which, found = runs(self.rows.boxes.take(np.array([row])), np.array([start]), np.array([stop]))
        return strided(self.tensor, *self.layout.strided(self.rank, self.rows.pieces[[row]][which], found))


Item = tuple[int, int, Strided]
"""The peer's index in the group, the addend, and the box."""


def cut(
    parts: Sequence[RowsOf], order: dict[int, int], begin: int, number: int, whole: dict[int, int]
) -> list[list[Item]]:
    """The rows of all tensors in rounds, of which `number` from `begin` on are for those that are cut; each
    sorted by peer, then tensor.

    What goes to one peer is cut into rounds alike by sender and receiver. `whole`: the rounds of tensors
    that are not cut.
    """
    entries = sorted(
        (order[peer], at, row)
        for at, rows in enumerate(parts)
        for row, peer in enumerate(rows.rows.peers.tolist())
    )
    found: list[list[Item]] = [[] for _ in range(begin + number)]
    totals: dict[int, int] = {}
    for peer, at, row in entries:
        if parts[at].tensor not in whole:
            totals[peer] = totals.get(peer, 0) + parts[at].items[row].numel
    done = dict.fromkeys(totals, 0)
    for peer, at, row in entries:
        rows, item, addend = parts[at], parts[at].items[row], int(parts[at].rows.addends[row])
        if rows.tensor in whole or number == 1:
            found[whole.get(rows.tensor, begin)].append((peer, addend, item))
            continue
        total, before = totals[peer], done[peer]
        done[peer] += item.numel
        first = before * number // total
        last = min((before + item.numel - 1) * number // total, number - 1)
        unit = int(row_length(rows.rows.boxes.take(np.array([row])), np.array([max(1, total // number)]))[0])
        start = 0
        for index in range(first, last + 1):
            stop = item.numel
            if index < last:
                stop = max(start, (total * (index + 1) // number - before) // unit * unit)
            if stop > start:
                found[begin + index] += [(peer, addend, part) for part in rows.part(row, start, stop)]
            start = stop
    return found


def strided(tensor: int, extents: Ints, strides: Ints, offsets: Ints) -> list[Strided]:
    """Boxes as `Layout.strided` returns them, of tensor number `tensor`."""
    return [
        Strided(tensor, tuple(extent), tuple(stride), offset, 0, math.prod(extent))
        for extent, stride, offset in zip(extents.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    ]


def in_one_piece(boxes: Sequence[Strided]) -> int | None:
    """Where boxes begin that lie in one local tensor end to end in their order; None if they do not."""
    if not boxes:
        return 0
    at = begin = boxes[0].offset
    for box in boxes:
        if box.tensor != boxes[0].tensor or box.offset != at or not _is_contiguous(box):
            return None
        at += box.numel
    return begin


def _is_contiguous(box: Strided) -> bool:
    step = 1
    for extent, stride in zip(reversed(box.extents), reversed(box.strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True
