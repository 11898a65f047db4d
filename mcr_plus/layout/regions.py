"""Boxes in index space: overlaps, runs of flattened boxes, and coverage, vectorised over many boxes.

A box is half-open in every dimension: `low[d] <= i[d] < high[d]`. n boxes are two int64 arrays, `lows` and
`highs`, of shape [n, dims]. A tensor of 0 dimensions has one element: boxes of shape [n, 0] have volume 1.
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
"""Fraction of a share (1/64) by which a cut may move to fall between rows, which leaves fewer boxes."""


class Boxes(NamedTuple):
    """Many boxes of the same number of dimensions."""

    lows: Ints
    highs: Ints

    @property
    def volumes(self) -> Ints:
        """Number of elements of each box."""
        return volumes(self.lows, self.highs)

    def take(self, which: Ints | Flags) -> Boxes:
        """Return some of the boxes, by index or mask."""
        return Boxes(self.lows[which], self.highs[which])


def as_ints(values: Any) -> Ints:
    """Return the values as an int64 array."""
    return np.asarray(values, dtype=np.int64)


def volumes(lows: Ints, highs: Ints) -> Ints:
    """Return the number of elements of each box; 0 where a box is empty in any dimension."""
    found: Ints = np.maximum(highs - lows, 0).prod(axis=-1, dtype=np.int64)
    return found


def meet(low: Ints, high: Ints, boxes: Boxes) -> tuple[Ints, Boxes]:
    """Return the overlaps of one box with many: indices of the overlapped boxes, and the overlaps."""
    lows, highs = np.maximum(boxes.lows, low), np.minimum(boxes.highs, high)
    (which,) = (lows < highs).all(axis=1).nonzero()
    return which, Boxes(lows[which], highs[which])


def meet_all(a: Boxes, b: Boxes) -> tuple[Ints, Ints, Boxes]:
    """Return the overlaps of all boxes of `a` with all of `b`: both indices, and the overlaps.

    Sorted by the index in `a`, then in `b`. Takes O(len(a) · len(b) · dims).
    """
    hit = np.ones((len(a.lows), len(b.lows)), bool)
    for dim in range(a.lows.shape[1]):
        hit &= a.lows[:, None, dim] < b.highs[None, :, dim]
        hit &= b.lows[None, :, dim] < a.highs[:, None, dim]
    i, j = hit.nonzero()
    return i, j, Boxes(np.maximum(a.lows[i], b.lows[j]), np.minimum(a.highs[i], b.highs[j]))


def contains(outer: Boxes, inner: Boxes) -> Flags:
    """Return a mask: `outer[i]` contains `inner[i]`."""
    within = (outer.lows <= inner.lows) & (inner.highs <= outer.highs)
    return np.asarray(within.all(axis=1), bool)


def row_length(boxes: Boxes, share: Ints) -> Ints:
    """Return the unit of cuts of each flattened box: the largest suitable number of consecutive elements.

    The unit is a product of trailing extents, at most 1/64 of `share` (elements between two cuts), or 1 if
    all such products are larger.
    """
    extents = boxes.highs - boxes.lows
    unit = np.ones(len(extents), np.int64)
    inner = unit.copy()
    for dim in range(extents.shape[1] - 1, 0, -1):
        inner = inner * extents[:, dim]
        unit = np.where(inner * _ROWS <= share, inner, unit)
    return unit


def runs(boxes: Boxes, starts: Ints, stops: Ints) -> tuple[Ints, Boxes]:
    """Return runs of flattened boxes as boxes: elements `starts[i]` to `stops[i]` of box i, row-major.

    Returns the boxes, and the index of the run of each. A run has at most 2 · dims - 1 boxes, in the order of
    its elements; an empty run has none.
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
    for dim in range(dims - 1, 0, -1):  # partial steps of the next outer dimension
        outer = np.maximum(inner[:, dim - 1], 1)
        up, down = -(-start // outer) * outer, stop // outer * outer
        inside = up > down  # the whole run lies in one step of the outer dimension
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
    """Count the boxes that cover each cell of the grid of their bounds; yields coordinates and counts.

    The coordinates of each dimension include 0 and its size. The boxes must lie inside `shape`. A large grid
    is yielded in parts, each computed from the boxes in that part only. A single grid would have O(n ** dims)
    cells for the runs of a flattened tensor on n ranks.
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
        for side in (0, 1):  # the upper half is pushed first
            lower, upper = low.copy(), high.copy()
            (lower if side == 0 else upper)[dim] = middle
            _, inside = meet(lower, upper, some)
            parts.append((inside, lower, upper))


def _counts(boxes: Boxes, edges: list[Ints]) -> NDArray[np.int32]:
    dims = len(edges)
    if not dims:  # one element, which every box contains
        return np.array(len(boxes.lows), np.int32)
    grid = np.zeros([len(edge) for edge in edges], np.int32)
    lows = [np.searchsorted(edges[dim], boxes.lows[:, dim]) for dim in range(dims)]
    highs = [np.searchsorted(edges[dim], boxes.highs[:, dim]) for dim in range(dims)]
    for corner in range(1 << dims):  # the counts are cumulative sums of differences at the corners
        at = tuple(highs[dim] if corner >> dim & 1 else lows[dim] for dim in range(dims))
        np.add.at(grid, at, -1 if corner.bit_count() % 2 else 1)
    for dim in range(dims):
        np.cumsum(grid, axis=dim, out=grid)
    return grid[tuple(slice(0, len(edge) - 1) for edge in edges)]


def cover_once(boxes: Boxes, low: Ints, high: Ints) -> bool:
    """Return True if boxes cover exactly the box from `low` to `high`, each element once."""
    inside = ((boxes.lows >= low) & (boxes.highs <= high)).all()
    if not inside or int(boxes.volumes.sum()) != int(volumes(low, high)):
        return False
    if len(boxes.lows) < 2:
        return True
    inside_ = Boxes(boxes.lows - low, boxes.highs - low)
    return all((grid == 1).all() for _, grid in grids(inside_, tuple((high - low).tolist())))


class Regions:
    """Distinct boxes of a layout, each with its addend and the ranks that hold it.

    Attributes:
        boxes, addends: box and addend of each region.
        members, starts: the ranks of region i are `members[starts[i] : starts[i + 1]]`, ascending.
        pieces: for each member, the index of the box that contains the region, in the constructor's
            arguments.
        twins: pairs of equal boxes of one rank, which count as one member: (index of its box, index of the
            duplicate).
    """

    def __init__(self, boxes: Boxes, addends: Ints, owners: Ints, pieces: Ints | None = None) -> None:
        """Group boxes by bounds and addend. `owners`: the rank of each box. `pieces`: None for 0, 1, …"""
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
        """Number of ranks that hold each region."""
        return np.diff(self.starts)

    @cached_property
    def region_of_member(self) -> Ints:
        """Index of the region of each entry of `members`."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def _base(self) -> int:
        return int(self.members.max(initial=0)) + 1

    @cached_property
    def _keys(self) -> Ints:
        return self.region_of_member * self._base + self.members

    def of_rank(self, rank: int) -> tuple[Ints, Ints]:
        """Return the regions that a rank holds, and the indices of its boxes that contain them."""
        (at,) = (self.members == rank).nonzero()
        return self.region_of_member[at], self.pieces[at]

    def find(self, regions: Ints, ranks: Ints) -> Ints:
        """Return the index in `members` of rank `ranks[i]` in region `regions[i]`, which it must hold."""
        return np.searchsorted(self._keys, regions * self._base + ranks)

    def has(self, regions: Ints, ranks: Ints) -> Flags:
        """Return a mask: `ranks[i]` holds region `regions[i]`."""
        if not len(self.members):
            return np.zeros(len(regions), bool)
        at = np.minimum(self.find(regions, ranks), len(self._keys) - 1)
        found: Flags = (self._keys[at] == regions * self._base + ranks) & (ranks < self._base)
        return found

    def entries(self, regions: Ints) -> tuple[Ints, Ints]:
        """Return the members of all `regions`, as (index in `regions`, rank)."""
        number = self.counts[regions]
        which = np.repeat(np.arange(len(regions)), number)
        begins = number.cumsum() - number
        at = np.arange(len(which)) - begins[which] + self.starts[regions][which]
        return which, self.members[at]


def cut_apart(boxes: Boxes, shape: tuple[int, ...]) -> tuple[Ints, Boxes]:
    """Cut boxes where they overlap in part, so that any two are equal or disjoint.

    Returns the index of the original box of each resulting box, and the resulting boxes.
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
    """Return the cells of a grid that are covered by at least one box."""
    cells = np.argwhere(grid > 0)
    lows = np.stack([edge[cells[:, dim]] for dim, edge in enumerate(edges)], axis=1)
    highs = np.stack([edge[cells[:, dim] + 1] for dim, edge in enumerate(edges)], axis=1)
    return Boxes(lows, highs)
