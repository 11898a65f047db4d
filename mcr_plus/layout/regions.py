"""Boxes of index space: overlaps, runs of flattened boxes, and coverage, vectorised over many boxes.

A box is half-open in every dimension: `low[d] <= i[d] < high[d]`. Many boxes are two arrays of int64, `lows`
and `highs`, of shape [n, dims]. A tensor of 0 dimensions has one element: boxes of shape [n, 0] have volume
1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_MOST_CELLS: Final = 1 << 20
_ROWS: Final = 64
"""A cut of a box may be moved by this part of a share, so that it falls between rows and stays one box."""


class Boxes(NamedTuple):
    """Many boxes of the same number of dimensions."""

    lows: Ints
    highs: Ints

    @property
    def volumes(self) -> Ints:
        """Elements of each box."""
        return volumes(self.lows, self.highs)

    def take(self, which: Ints | Flags) -> Boxes:
        """Some of the boxes, by index or mask."""
        return Boxes(self.lows[which], self.highs[which])


def as_ints(values: Any) -> Ints:
    """An array of int64."""
    return np.asarray(values, dtype=np.int64)


def volumes(lows: Ints, highs: Ints) -> Ints:
    """Elements of each box; 0 where a box is empty in any dimension."""
    found: Ints = np.maximum(highs - lows, 0).prod(axis=-1, dtype=np.int64)
    return found


def meet(low: Ints, high: Ints, boxes: Boxes) -> tuple[Ints, Boxes]:
    """The overlaps of one box with many: the indices of those that it meets, and the boxes in common."""
    lows, highs = np.maximum(boxes.lows, low), np.minimum(boxes.highs, high)
    (which,) = (lows < highs).all(axis=1).nonzero()
    return which, Boxes(lows[which], highs[which])


def meet_all(a: Boxes, b: Boxes) -> tuple[Ints, Ints, Boxes]:
    """The overlaps of every box of `a` with every one of `b`: both indices, and the boxes in common.

    Ordered by the index in `a`, then in `b`. Takes O(len(a) · len(b) · dims).
    """
    hit = np.ones((len(a.lows), len(b.lows)), bool)
    for dim in range(a.lows.shape[1]):
        hit &= a.lows[:, None, dim] < b.highs[None, :, dim]
        hit &= b.lows[None, :, dim] < a.highs[:, None, dim]
    i, j = hit.nonzero()
    return i, j, Boxes(np.maximum(a.lows[i], b.lows[j]), np.minimum(a.highs[i], b.highs[j]))


def contains(outer: Boxes, inner: Boxes) -> Flags:
    """Whether each box of `outer` contains the box of `inner` with the same index."""
    within = (outer.lows <= inner.lows) & (inner.highs <= outer.highs)
    return np.asarray(within.all(axis=1), bool)


def row_length(boxes: Boxes, share: Ints) -> Ints:
    """The largest number of consecutive elements of each flattened box that may be the unit of its cuts.

    A product of its trailing extents, at most 1/64 of `share` (elements between two cuts); 1 where only
    elements are as small.
    """
    extents = boxes.highs - boxes.lows
    unit = np.ones(len(extents), np.int64)
    inner = unit.copy()
    for dim in range(extents.shape[1] - 1, 0, -1):
        inner = inner * extents[:, dim]
        unit = np.where(inner * _ROWS <= share, inner, unit)
    return unit


def runs(boxes: Boxes, starts: Ints, stops: Ints) -> tuple[Ints, Boxes]:
    """Runs of flattened boxes as boxes: elements `starts[i]` to `stops[i]` of box i in row-major order.

    Returns the index of the run that each box belongs to, and the boxes: at most 2 · dims - 1 of a run, in
    the order of its elements; none of an empty run.
    """
    extents = boxes.highs - boxes.lows
    number, dims = extents.shape
    if dims == 0:
        (which,) = (starts < stops).nonzero()
        return which, boxes.take(which)
    inner = np.ones((number, dims), np.int64)  # elements of a step in each dimension
    for dim in range(dims - 2, -1, -1):
        inner[:, dim] = inner[:, dim + 1] * extents[:, dim + 1]
    parts: list[tuple[Ints, Ints, Ints, Ints]] = []  # which, order, lows, highs
    start, stop = starts.copy(), stops.copy()
    head: list[tuple[int, Ints, Ints]] = []
    tail: list[tuple[int, Ints, Ints]] = []
    for dim in range(dims - 1, 0, -1):  # what does not fill a step of the dimension outside of this one
        outer = np.maximum(inner[:, dim - 1], 1)
        up, down = -(-start // outer) * outer, stop // outer * outer
        inside = up > down  # in one step of the outer dimension: all that is left
        head.append((dim, start, np.where(inside, stop, up)))
        tail.append((dim, np.where(inside, stop, down), stop))
        start, stop = np.where(inside, stop, up), np.where(inside, stop, down)
    pieces = [*head, (0, start, stop), *reversed(tail)]
    for place, (dim, begin, end) in enumerate(pieces):
        (which,) = (begin < end).nonzero()
        if len(which):
            at, step = begin[which], np.maximum(inner[which, dim], 1)
            lows = _coordinates(at, inner[which], extents[which])
            highs = lows + 1
            lows[:, dim + 1 :] = 0
            highs[:, dim + 1 :] = extents[which, dim + 1 :]
            highs[:, dim] = lows[:, dim] + (end[which] - at) // step
            parts.append((which, np.full(len(which), place), lows, highs))
    if not parts:
        return np.zeros(0, np.int64), Boxes(boxes.lows[:0], boxes.highs[:0])
    which, order, lows, highs = (np.concatenate(part) for part in zip(*parts, strict=True))
    sort = np.lexsort((order, which))
    which = which[sort]
    base = boxes.lows[which]
    return which, Boxes(lows[sort] + base, highs[sort] + base)


def _coordinates(at: Ints, inner: Ints, extents: Ints) -> Ints:
    return at[:, None] // np.maximum(inner, 1) % np.maximum(extents, 1)


def grids(boxes: Boxes, shape: tuple[int, ...]) -> Iterator[tuple[list[Ints], NDArray[np.int32]]]:
    """How many boxes cover each cell of the grid that their borders make: the grid's borders, and the counts.

    The borders of each dimension include 0 and its size. The boxes must lie inside `shape`. Where the grid
    would be large it comes in parts, each with the borders of the boxes in that part alone: one grid of the
    runs of a flattened tensor on n ranks has O(n ** dims) cells.
    """
    none = np.zeros(len(shape), np.int64)
    parts = [(boxes, none, as_ints(shape))]
    while parts:
        some, low, high = parts.pop()
        edges = [
            np.unique(np.concatenate([[low[dim], high[dim]], some.lows[:, dim], some.highs[:, dim]]))
            for dim in range(len(shape))
        ]
        if math.prod(len(edge) for edge in edges) <= _MOST_CELLS:
            yield edges, _counts(some, edges)
            continue
        dim = max(range(len(shape)), key=lambda each: len(edges[each]))
        middle = int(edges[dim][len(edges[dim]) // 2])
        for side in (0, 1):  # the upper half goes on the pile first
            lower, upper = low.copy(), high.copy()
            (lower if side == 0 else upper)[dim] = middle
            _, inside = meet(lower, upper, some)
            parts.append((inside, lower, upper))


def _counts(boxes: Boxes, edges: list[Ints]) -> NDArray[np.int32]:
    dims = len(edges)
    if not dims:  # one element, which every box has
        return np.array(len(boxes.lows), np.int32)
    grid = np.zeros([len(edge) for edge in edges], np.int32)
    lows = [np.searchsorted(edges[dim], boxes.lows[:, dim]) for dim in range(dims)]
    highs = [np.searchsorted(edges[dim], boxes.highs[:, dim]) for dim in range(dims)]
    for corner in range(1 << dims):  # differences at the corners, whose running sums are the counts
        at = tuple(highs[dim] if corner >> dim & 1 else lows[dim] for dim in range(dims))
        np.add.at(grid, at, -1 if corner.bit_count() % 2 else 1)
    for dim in range(dims):
        np.cumsum(grid, axis=dim, out=grid)
    return grid[tuple(slice(0, len(edge) - 1) for edge in edges)]


def cover_once(boxes: Boxes, low: Ints, high: Ints) -> bool:
    """Whether boxes cover the box from `low` to `high` exactly: each of its elements once, and nothing
    else.
    """
    inside = ((boxes.lows >= low) & (boxes.highs <= high)).all()
    if not inside or int(boxes.volumes.sum()) != int(volumes(low, high)):
        return False
    if len(boxes.lows) < 2:
        return True
    inside_ = Boxes(boxes.lows - low, boxes.highs - low)
    return all((grid == 1).all() for _, grid in grids(inside_, tuple((high - low).tolist())))


class Regions:
    """The different boxes of a layout, each with its addend and the ranks that have it.

    Attributes:
        boxes, addends: of each region.
        members, starts: the ranks of region i are `members[starts[i] : starts[i + 1]]`, ascending.
        pieces: of each member the index of the box that contains the region, in the lists it was made of.
        twins: pairs of equal boxes of a rank, which stand for one member: (index of it, index of the other).
    """

    def __init__(self, boxes: Boxes, addends: Ints, owners: Ints, pieces: Ints | None = None) -> None:
        """Group boxes by their borders and addend; `owners`: the rank of each. `pieces`: 0, 1, … if None."""
        pieces = np.arange(len(owners)) if pieces is None else pieces
        keys = np.column_stack([addends, *boxes, owners])
        order = np.lexsort(keys.T[::-1])
        keys, pieces = keys[order], pieces[order]
        new = np.ones(len(keys), bool)
        new[1:] = (keys[1:, :-1] != keys[:-1, :-1]).any(axis=1)
        kept = new.copy()
        kept[1:] |= keys[1:, -1] != keys[:-1, -1]
        self.twins: list[tuple[int, int]] = []
        if not kept.all():
            of = np.maximum.accumulate(np.where(kept, np.arange(len(keys)), 0))
            self.twins = list(zip(pieces[of[~kept]].tolist(), pieces[~kept].tolist(), strict=True))
        (firsts,) = new[kept].nonzero()
        self.members: Ints = keys[kept, -1]
        self.pieces: Ints = pieces[kept]
        self.starts: Ints = np.append(firsts, len(self.members))
        chosen = order[kept][firsts]
        self.boxes = boxes.take(chosen)
        self.addends: Ints = addends[chosen]

    @cached_property
    def counts(self) -> Ints:
        """How many ranks have each region."""
        return np.diff(self.starts)

    @cached_property
    def region_of_member(self) -> Ints:
        """The region that each entry of `members` belongs to."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def _base(self) -> int:
        return int(self.members.max(initial=0)) + 1

    @cached_property
    def _keys(self) -> Ints:
        return self.region_of_member * self._base + self.members

    def of_rank(self, rank: int) -> tuple[Ints, Ints]:
        """The regions that a rank has, and its boxes that contain them."""
        (at,) = (self.members == rank).nonzero()
        return self.region_of_member[at], self.pieces[at]

    def find(self, regions: Ints, ranks: Ints) -> Ints:
        """The index in `members` of the rank of each region, which has it."""
        return np.searchsorted(self._keys, regions * self._base + ranks)

    def has(self, regions: Ints, ranks: Ints) -> Flags:
        """Whether each region has the rank with the same index."""
        if not len(self.members):
            return np.zeros(len(regions), bool)
        at = np.minimum(self.find(regions, ranks), len(self._keys) - 1)
        found: Flags = (self._keys[at] == regions * self._base + ranks) & (ranks < self._base)
        return found

    def entries(self, regions: Ints) -> tuple[Ints, Ints]:
        """For every member of each of `regions`: the index in `regions`, and the rank."""
        number = self.counts[regions]
        which = np.repeat(np.arange(len(regions)), number)
        begins = number.cumsum() - number
        at = np.arange(len(which)) - begins[which] + self.starts[regions][which]
        return which, self.members[at]


def cut_apart(boxes: Boxes, shape: tuple[int, ...]) -> tuple[Ints, Boxes]:
    """Cut boxes where they overlap in part, so that any two are equal or apart.

    Returns for each result the index of the box that it is a part of, and the results.
    """
    everything = np.arange(len(boxes.lows))
    different = np.unique(np.column_stack(boxes), axis=0)
    dims = len(shape)
    parts = list(grids(Boxes(different[:, :dims], different[:, dims:]), shape))
    if all((grid <= 1).all() for _, grid in parts):
        return everything, boxes
    found = [_covered_cells(edges, grid) for edges, grid in parts]
    lows, highs = (np.concatenate(side) for side in zip(*found, strict=True))
    which, _, common = meet_all(boxes, Boxes(lows, highs))
    return which, common


def _covered_cells(edges: list[Ints], grid: NDArray[np.int32]) -> Boxes:
    """The cells of a grid that some box covers."""
    cells = np.argwhere(grid > 0)
    lows = np.stack([edge[cells[:, dim]] for dim, edge in enumerate(edges)], axis=1)
    highs = np.stack([edge[cells[:, dim] + 1] for dim, edge in enumerate(edges)], axis=1)
    return Boxes(lows, highs)
