"""Rounds of an exchange: boxes of many tensors that a rank sends and receives in one operation."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mcr_plus.layout.layout import Layout
from mcr_plus.layout.messages import BoxRows
from mcr_plus.layout.regions import Boxes, Ints, meet_all, row_length, runs

if TYPE_CHECKING:
    from mcr_plus.core.message import Signature
    from mcr_plus.pipeline.stage import Issue

Locals = list["torch.Tensor | None"]
_torch: Any = torch  # its type stubs lack the operations on lists


class Strided(NamedTuple):
    """A box in a local tensor, as for `torch.as_strided`, and its offset `at` in a buffer, in elements."""

    tensor: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    at: int
    numel: int

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of its contiguous local tensor."""
        return local.as_strided(self.extents, self.strides, self.offset + local.storage_offset())

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of a buffer."""
        return buffer[self.at : self.at + self.numel].view(self.extents)


class Pairs(NamedTuple):
    """Boxes to copy: `froms[i]` to `tos[i]`."""

    froms: list[Strided]
    tos: list[Strided]

    @classmethod
    def of(cls, pairs: Sequence[tuple[Strided, Strided]]) -> Pairs:
        """Return pairs (from, to) as two lists."""
        return cls([one for one, _ in pairs], [to for _, to in pairs])

    def copy(self, before: Locals, after: Locals) -> None:
        """Copy the boxes from the local tensors `before` to the local tensors `after`."""
        if self.froms:
            copy_all(views_of(self.tos, after), views_of(self.froms, before))


@dataclass
class AddendSum:
    """Addends of one tensor in the order of reduction, each with its received boxes and its kept boxes.

    `onto`: True if the first addend may lack elements, so it is added to zeros instead of copied.
    """

    tensor: int
    op: str
    onto: bool
    addends: list[tuple[list[Strided], list[tuple[Strided, Strided]]]]


@dataclass
class Transfer:
    """Boxes that this rank sends to one peer in a round (`is_send`), or receives from it.

    `peer`: index of the peer in the group. `begin`, `end`: range of the buffer, in elements.
    """

    peer: int
    is_send: bool
    begin: int
    end: int
    boxes: list[Strided]
    bound: tuple[Signature, Issue] | None = None


@dataclass
class ExchangeRound:
    """Boxes that this rank sends and receives in one operation.

    `place`: number of the round and number of rounds in the step, such as `1 of 3`. `received`: boxes to copy
    into place; `sums`: boxes to reduce. `sent_at`, `received_at`: offset in a local tensor that holds all
    boxes contiguously and in order, so that no copy is needed; None if there is no such tensor.
    """

    place: str
    sent: list[Strided] = field(default_factory=list)
    received: list[Strided] = field(default_factory=list)
    sums: list[AddendSum] = field(default_factory=list)
    input_counts: tuple[int, ...] = ()
    output_counts: tuple[int, ...] = ()
    sent_numel: int = 0
    received_numel: int = 0
    sent_at: int | None = None
    received_at: int | None = None
    bound: dict[tuple[bool, str], tuple[Signature, Issue]] = field(default_factory=dict)
    """Bound operation, by (asynchronous, type of the device)."""
    messages: list[Transfer] = field(default_factory=list)
    """Messages of this rank, if the step consists of messages."""

    def cut_into_messages(self) -> None:
        """Fill `messages` with the receives, then the sends."""
        for is_send, counts, boxes in (
            (False, self.output_counts, self.received),
            (True, self.input_counts, self.sent),
        ):
            begin = 0
            for peer, numel in enumerate(counts):
                end = begin + numel
                if numel:
                    mine = [box for box in boxes if begin <= box.at < end]
                    self.messages.append(Transfer(peer, is_send, begin, end, mine))
                begin = end

    @property
    def packed(self) -> int:
        """Elements of the send buffer."""
        return 0 if self.sent_at is not None else self.sent_numel

    @property
    def buffered(self) -> int:
        """Elements of both buffers."""
        return self.packed + (0 if self.received_at is not None else self.received_numel)


@dataclass
class ExchangeStage:
    """A step of the plan: its rounds, and the boxes that this rank keeps (from, to).

    `targets`: layout of each tensor after the step; None if the tensor's program has fewer steps. `is_last`:
    the step writes the outputs of all tensors. `is_lossy`: a codec may be used. `is_idle`: no rank of the
    group sends data. `by_messages`: messages between pairs of ranks replace an all_to_all.
    """

    rounds: list[ExchangeRound]
    kept: Pairs
    targets: list[Layout | None]
    is_last: bool
    is_lossy: bool
    is_idle: bool
    by_messages: bool = False


def views_of(boxes: Sequence[Strided], locals_: Locals) -> list[torch.Tensor]:
    """Return boxes as views of their local tensors."""
    return [box.of(locals_[box.tensor]) for box in boxes]  # type: ignore[arg-type]


def copy_all(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy `values[i]` to `targets[i]`."""
    if len(targets) == 1:
        targets[0].copy_(values[0])
    elif targets:
        _torch._foreach_copy_(targets, values)


# -- rows of many tensors -------------------------------------------------------------------------


class RowsOf(NamedTuple):
    """Rows of one tensor, in the order of packing."""

    tensor: int
    layout: Layout
    rank: int
    rows: BoxRows
    items: list[Strided]

    @classmethod
    def of(cls, tensor: int, layout: Layout, rank: int, rows: BoxRows) -> RowsOf:
        """Return the rows of tensor number `tensor`, which has layout `layout`."""
        return cls(
            tensor, layout, rank, rows, strided(tensor, *layout.strided(rank, rows.pieces, rows.boxes))
        )

    def part(self, row: int, start: int, stop: int) -> list[Strided]:
        """Return elements `start` to `stop` of a row as boxes."""
        which, found = runs(self.rows.boxes.take(np.array([row])), np.array([start]), np.array([stop]))
        return strided(self.tensor, *self.layout.strided(self.rank, self.rows.pieces[[row]][which], found))


Item = tuple[int, int, Strided]
"""Index of the peer in the group, addend, and box."""


def cut(
    parts: Sequence[RowsOf], order: dict[int, int], begin: int, number: int, whole: dict[int, int]
) -> list[list[Item]]:
    """Return the rows of all tensors in rounds, each sorted by peer, then tensor.

    Tensors are cut into `number` rounds from `begin` on. `whole`: the rounds of tensors that are not cut.
    Sender and receiver cut a message at the same elements.
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


class Waves(NamedTuple):
    """Boxes into which a tensor is cut so that steps overlap, and the wave of each box."""

    boxes: Boxes
    wave_of: Ints

    @classmethod
    def of(cls, source: Layout, number: int) -> Waves:
        """Cut each box of a complete source into one slab per wave, so that all ranks send in every wave."""
        lows, highs = (np.repeat(side, number, axis=0) for side in source.regions.boxes)
        index = np.tile(np.arange(number), len(lows) // number)
        extents = highs - lows
        dim = extents.argmax(axis=1) if extents.shape[1] else np.zeros(len(lows), np.int64)
        at = np.arange(len(lows)), dim
        begin, extent = lows[at], extents[at]
        lows[at], highs[at] = begin + extent * index // number, begin + extent * (index + 1) // number
        keep = highs[at] > lows[at]
        return cls(Boxes(lows[keep], highs[keep]), index[keep])

    def cut(self, part: RowsOf, order: dict[int, int]) -> list[tuple[int, Item]]:
        """Cut the boxes of a tensor that a rank sends or receives; return (wave, box) pairs."""
        row, window, boxes = meet_all(part.rows.boxes, self.boxes)
        sorted_ = np.lexsort((window, row))
        row, window, boxes = row[sorted_], window[sorted_], boxes.take(sorted_)
        items = strided(part.tensor, *part.layout.strided(part.rank, part.rows.pieces[row], boxes))
        peers = part.rows.peers[row].tolist()
        return [
            (wave, (order[peer], 0, item))
            for wave, peer, item in zip(self.wave_of[window].tolist(), peers, items, strict=True)
        ]


def cut_in_waves(
    parts: Sequence[RowsOf], order: dict[int, int], waves: Sequence[Waves], number: int
) -> list[list[Item]]:
    """Return the rows of all tensors in `number` waves, each sorted by peer, then tensor.

    `waves`: of all tensors of the plan.
    """
    found: list[list[Item]] = [[] for _ in range(number)]
    for part in parts:
        for wave, item in waves[part.tensor].cut(part, order):
            found[wave].append(item)
    return [sorted(items, key=operator.itemgetter(0)) for items in found]


def strided(tensor: int, extents: Ints, strides: Ints, offsets: Ints) -> list[Strided]:
    """Return boxes of tensor number `tensor` from the results of `Layout.strided`."""
    return [
        Strided(tensor, tuple(extent), tuple(stride), offset, 0, math.prod(extent))
        for extent, stride, offset in zip(extents.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    ]


def in_one_piece(boxes: Sequence[Strided]) -> int | None:
    """Return the offset of boxes that are contiguous, in order, in one local tensor; otherwise None."""
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
