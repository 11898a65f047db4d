"""Layouts for convolution and pooling: each rank's output, needed input, and output that needs no halo."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mcr_plus.errors import InvalidArgument
from mcr_plus.layout.halo import windows
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.regions import Boxes, Ints, as_ints

Range = tuple[int, int]


class Window(NamedTuple):
    """Window of the input that an output element reads, in each spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    circular: bool

    @property
    def reach(self) -> Ints:
        """Extent of the window: number of elements from the first to the last."""
        return as_ints(self.dilation) * (as_ints(self.kernel) - 1) + 1

    def reads(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the range of the input, including padding, that a range of the output reads."""
        stride, left = as_ints(self.stride), as_ints(self.left)
        return low * stride - left, (high - 1) * stride - left + self.reach

    def output(self, layout: Layout) -> Layout:
        """Return the layout of the output: each element belongs to the owner of the middle of its window."""
        size, stride = as_ints(layout.shape), as_ints(self.stride)
        left = as_ints(self.left)
        total = (size + left + as_ints(self.right) - self.reach) // stride + 1
        if (total < 1).any():
            raise InvalidArgument(
                f"the kernel reads {self.reach.tolist()} elements, more than {layout} has, padding included"
            )

        def of(borders: Ints) -> Ints:
            middle = -((-2 * (borders + left) + self.reach - 1) // (2 * stride))  # rounded up
            inner = np.clip(middle, 0, total)
            return np.where(borders == 0, 0, np.where(borders == size, total, inner))

        boxes = Boxes(of(layout.held.lows), of(layout.held.highs))
        return of_boxes(layout, total, boxes)

    def needs(self, layout: Layout, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the range of the input that a range of the output needs, without padding.

        With circular padding it extends beyond the tensor's bounds, except in dimensions that no rank cuts.
        """
        size = as_ints(layout.shape)
        first, last = self.reads(low, high)
        if not self.circular:
            return np.maximum(first, 0), np.minimum(last, size)
        all_of_it = ((layout.held.lows == 0) & (layout.held.highs == size)).all(axis=0)
        return np.where(all_of_it, 0, first), np.where(all_of_it, size, last)

    def target(self, layout: Layout, output: Layout) -> Layout:
        """Return the layout in which each rank holds the input that its box of the output needs."""
        boxes = Boxes(*self.needs(layout, *output.held))
        return windows(layout, output.owners, boxes, self.circular, f"{layout.name} halo")


def of_boxes(layout: Layout, shape: Ints, boxes: Boxes) -> Layout:
    """Return a layout of other boxes on the same ranks; ranks without a box get no box."""
    locals_ = {rank: (0,) * len(shape) for rank in layout.ranks}
    extents = boxes.highs - boxes.lows
    locals_.update(zip(layout.owners.tolist(), map(tuple, extents.tolist()), strict=True))
    size = tuple(shape.tolist())
    return Layout.placed(
        size, layout.owners, boxes, np.zeros_like(boxes.lows), locals_, layout.name, layout.known_good
    )


def box_of(layout: Layout, rank: int) -> list[Range] | None:
    """Return the bounds of a rank's box; None without a box."""
    pieces = layout.pieces(rank)
    if not len(pieces):
        return None
    lows, highs = (part[pieces[0]].tolist() for part in layout.held)
    return list(zip(lows, highs, strict=True))


class Strip(NamedTuple):
    """A box of this rank's output: slices `at` in the output, and the input that it `reads`, with padding."""

    at: tuple[slice, ...]
    reads: tuple[Range, ...]


class StencilPart(NamedTuple):
    """This rank's share of a convolution.

    Attributes:
        inner: part of the output that reads only elements of this rank; None if there is none.
        outer: rest of the output.
        whole: whole output.
        own, needed: range of the input that the rank owns, and range that it needs; in circular dimensions,
            ranges extend beyond the tensor's bounds.
    """

    inner: Strip | None
    outer: tuple[Strip, ...]
    whole: Strip
    own: tuple[Range, ...]
    needed: tuple[Range, ...]


def part_of(window: Window, layout: Layout, output: Layout, rank: int) -> StencilPart | None:
    """Return the share of a rank; None if it has no output."""
    out, own = box_of(output, rank), box_of(layout, rank)
    if out is None or own is None:
        return None
    low, high = (as_ints([bound[side] for bound in out]) for side in (0, 1))
    size = as_ints(layout.shape)
    begin, end = (as_ints([bound[side] for bound in own]) for side in (0, 1))
    # Beyond the tensor's bounds no other rank's data is needed: padding, or elements of this rank.
    alone = (begin == 0) & (end == size)
    free = alone if window.circular else np.ones(len(out), bool)
    stride, left = as_ints(window.stride), as_ints(window.left)
    first = np.where(free & (begin == 0), low, -((-begin - left) // stride))
    last = np.where(free & (end == size), high, (end + left - window.reach) // stride + 1)
    first, last = np.clip(first, low, high), np.clip(last, low, high)

    def strip(lows: Ints, highs: Ints) -> Strip:
        at = tuple(map(slice, (lows - low).tolist(), (highs - low).tolist()))
        return Strip(at, _pairs(*window.reads(lows, highs)))

    whole = strip(low, high)
    needed = window.needs(layout, low, high)
    inner, outer = (strip(first, last), []) if (first < last).all() else (None, [whole])
    if inner is not None:
        lows, highs = low.copy(), high.copy()
        for dim in range(len(out)):  # the rest before and after the inner part
            for side_low, side_high in ((lows[dim], first[dim]), (last[dim], highs[dim])):
                if side_low < side_high:
                    begins, ends = lows.copy(), highs.copy()
                    begins[dim], ends[dim] = side_low, side_high
                    outer.append(strip(begins, ends))
            lows[dim], highs[dim] = first[dim], last[dim]
    return StencilPart(inner, tuple(outer), whole, tuple(own), _pairs(*needed))


def _pairs(lows: Ints, highs: Ints) -> tuple[Range, ...]:
    return tuple(zip(lows.tolist(), highs.tolist(), strict=True))
