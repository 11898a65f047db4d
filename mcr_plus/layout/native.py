"""Find redistributions that are a single native collective in each of several groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import torch

from mcr_plus.layout.layout import Layout
from mcr_plus.layout.regions import Boxes, Ints, as_ints, contains

if TYPE_CHECKING:
    from mcr_plus.communicator.communicator import Communicator

GROUPS: Final = "groups of layouts"
"""Key of the groups that a communicator has opened for native collectives."""
_MOST_GROUPS: Final = 32  # partitions of a communicator; they stay open until it is closed
NativeKind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]


@dataclass(frozen=True)
class NativeCollective:
    """One collective per group, with parts of equal size.

    Attributes:
        kind: kind of the collective, the same in all groups.
        groups: members of each group, as ranks of the job, in the order of their parts. Every rank that holds
            elements is in a group; a group of one rank only copies. In a broadcast, ranks ascend.
        repeats: True if several groups compute the same elements, as in a mesh with replicas along another
            dimension.
    """

    kind: NativeKind
    groups: tuple[tuple[int, ...], ...]
    repeats: bool = False

    def group_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the group of a rank; None if the rank is in none."""
        return next((group for group in self.groups if rank in group), None)


def root_of(group: Sequence[int], source: Layout) -> int:
    """Return the root of a broadcast: the only rank of the group that holds elements of the source."""
    return next(rank for rank in group if len(source.pieces(rank)))


def native(source: Layout, target: Layout) -> NativeCollective | None:
    """Return the collective that redistributes `source` to `target`; None if it takes several, or none."""
    same = np.array_equal(source.owners, target.owners)
    if source.has_gaps or not len(source.owners) or not (same or len(source.owners) < len(target.owners)):
        return None  # a broadcast has fewer holders than receivers
    if not all((np.diff(each.owners) > 0).all() and _is_whole(each) for each in (source, target)):
        return None  # a rank has several boxes
    if not same:
        return None if source.is_partial else _broadcast(source, target)
    if len(source.owners) < 2 or source.ranks != target.ranks:
        return None  # a rank has no box
    if source.is_partial:
        if _equal(source.held, target.held):
            return _made("all_reduce", source.held, None, source)
        return _made("reduce_scatter", source.held, target.held, source)
    return _made("all_gather", target.held, source.held, source)


class Room:
    """Budget for the native collectives of a call: buffer bytes and open groups, the same on all ranks.

    `memory`: the limit in bytes; None: no limit. `used`: bytes of the chosen collectives.
    """

    def __init__(self, comm: Communicator, memory: int | None) -> None:
        self._left = math.inf if memory is None else memory
        self.used = 0
        self._whole = (comm.ranks,)
        self._open = {*comm.attached.get(GROUPS, ())}

    def has(self, one: NativeCollective, source: Layout, target: Layout, itemsize: int) -> bool:
        """Return True if a collective fits into the remaining budget."""
        opens = one.groups != self._whole and one.groups not in self._open
        if opens and len(self._open) >= _MOST_GROUPS:
            return False
        largest = max(source.volume, target.volume) * itemsize
        return largest <= self._left or packed_volume(one, source, target) * itemsize <= self._left

    def take(self, one: NativeCollective, source: Layout, target: Layout, itemsize: int) -> None:
        """Subtract the groups and the buffer of a chosen collective from the budget."""
        if one.groups != self._whole:
            self._open.add(one.groups)
        if self._left < math.inf:
            nbytes = packed_volume(one, source, target) * itemsize
            self._left -= nbytes
            self.used += nbytes


def packed_volume(one: NativeCollective, source: Layout, target: Layout) -> int:
    """Return the number of elements of the largest packing buffer of a rank.

    0 if each part is contiguous in the whole.
    """
    if one.kind in ("all_reduce", "broadcast") or not source.shape:
        return 0
    members = as_ints([rank for group in one.groups if len(group) > 1 for rank in group])
    at = np.searchsorted(source.owners, members)  # each rank has one box in both
    outer, inner = target.held.take(at), source.held.take(at)
    if one.kind == "reduce_scatter":
        outer, inner = inner, outer
    extents, whole = inner.highs - inner.lows, outer.highs - outer.lows
    # A box is contiguous if, for some dimension, earlier ones have one index and later ones all indices.
    single = np.ones(extents.shape, bool)
    single[:, 1:] = np.logical_and.accumulate(extents == 1, axis=1)[:, :-1]
    full = np.ones(extents.shape, bool)
    full[:, :-1] = np.logical_and.accumulate((extents == whole)[:, ::-1], axis=1)[:, ::-1][:, 1:]
    apart = ~(single & full).any(axis=1)
    return int(outer.volumes[apart].max(initial=0))


def _made(kind: NativeKind, outer: Boxes, inner: Boxes | None, source: Layout) -> NativeCollective | None:
    """Return the collective among ranks with equal outer boxes; None if inner boxes do not partition them.

    If several ranks hold the same part, the first holders of all parts form one group, the second holders
    another.
    """
    group = _classes(*outer)
    if np.bincount(group).max() < 2:
        return None
    copy = _places(_classes(group, source.addends) if inner is None else _classes(group, *inner))
    group = _classes(group, copy)
    sizes = np.bincount(group)
    if sizes.max() < 2 or (source.is_partial and not _has_each_addend(group, sizes, source)):
        return None
    if inner is not None and not (
        contains(outer, inner).all() and (inner.volumes * sizes[group] == outer.volumes).all()
    ):
        return None
    keys = [source.owners] if inner is None else [*inner.lows.T[::-1]]
    ranks = source.owners[np.lexsort([*keys, group])]
    firsts = sizes.cumsum() - sizes
    return NativeCollective(
        kind,
        tuple(tuple(ranks[first : first + size].tolist()) for first, size in zip(firsts, sizes, strict=True)),
        bool(copy.any()),
    )


def _broadcast(source: Layout, target: Layout) -> NativeCollective | None:
    """Return broadcasts in disjoint groups, each from the only holder of a box to the ranks that need it."""
    boxes = (np.concatenate(both) for both in zip(source.held, target.held, strict=True))
    box_of = _classes(*boxes)
    held, needed = box_of[: len(source.owners)], box_of[len(source.owners) :]
    if len(np.unique(held)) < len(held) or not np.array_equal(np.unique(held), np.unique(needed)):
        return None  # a box has several holders or other borders, or is not needed
    groups = [
        tuple(np.union1d(source.owners[held == box], target.owners[needed == box]).tolist()) for box in held
    ]
    sizes = [len(group) for group in groups]
    if max(sizes) < 3 or sum(sizes) > len(np.union1d(source.owners, target.owners)):
        return None  # single messages suffice, or a rank would be in two groups
    return NativeCollective("broadcast", tuple(sorted(groups)))


def _classes(*columns: Ints) -> Ints:
    """Return the class of each row, from 0 on, in lexicographic order; equal rows have the same class."""
    rows = np.column_stack([np.zeros(len(columns[0]), np.int64), *columns])
    order = np.lexsort(rows.T[::-1])  # several times as fast as np.unique on rows
    new = (np.diff(rows[order], axis=0) != 0).any(axis=1)
    found = np.zeros(len(rows), np.int64)
    found[order[1:]] = new.cumsum()
    return found


def _places(classes: Ints) -> Ints:
    """Return, for each entry, the number of earlier entries of the same class."""
    sizes = np.bincount(classes)
    order = np.argsort(classes, kind="stable")
    found = np.empty(len(classes), np.int64)
    found[order] = np.arange(len(classes)) - np.repeat(sizes.cumsum() - sizes, sizes)
    return found


def keeps_bits(one: NativeCollective, source: Layout, dtype: torch.dtype) -> bool:
    """Return True if replicas get the same bits regardless of the order of reduction in each group."""
    if one.kind == "all_gather" or not one.repeats:
        return True
    if not (dtype.is_floating_point or dtype.is_complex):
        return True
    # The order of two addends does not matter, except for zeros of both signs and parts of complex products.
    return source.addend_count == 2 and (
        source.op in ("SUM", "AVG") or (source.op == "PRODUCT" and not dtype.is_complex)
    )


def may_reduce(one: NativeCollective, source: Layout, dtype: torch.dtype) -> bool:
    """Return True if a collective's result equals that of exchanges, except for the order of addends.

    Libraries round every partial sum of float16 and bfloat16; exchanges add in float32 and round once.
    """
    is_half = dtype in (torch.float16, torch.bfloat16)
    if is_half and (source.op == "AVG" or (source.op in ("SUM", "PRODUCT") and source.addend_count > 2)):
        return not source.is_partial
    return keeps_bits(one, source, dtype)


def _has_each_addend(group: Ints, sizes: Ints, source: Layout) -> bool:
    count = source.addend_count
    if not (sizes == count).all():
        return False
    order = np.lexsort((source.addends, group))
    return bool((source.addends[order].reshape(-1, count) == np.arange(count)).all())


def _is_whole(layout: Layout) -> bool:
    """Return True if each local tensor is a single box, and boxes of an addend are equal or disjoint."""
    sizes = [math.prod(layout.locals[rank]) for rank in layout.owners.tolist()]
    return sizes == layout.held.volumes.tolist() and not layout.overlaps


def _equal(a: Boxes, b: Boxes) -> bool:
    return np.array_equal(a.lows, b.lows) and np.array_equal(a.highs, b.highs)
