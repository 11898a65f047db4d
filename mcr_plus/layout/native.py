"""Pairs of layouts between which one native collective in each of some groups of ranks is all it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mcr_plus.layout.layout import Layout
from mcr_plus.layout.regions import Boxes, Ints, contains

NativeKind = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class Native:
    """One collective per group, of parts of equal size.

    Attributes:
        kind: of all groups.
        groups: ranks of the job, in the order of their parts; every rank that holds elements is in one.
    """

    kind: NativeKind
    groups: tuple[tuple[int, ...], ...]

    def group_of(self, rank: int) -> tuple[int, ...] | None:
        """The group of a rank, None if it takes no part."""
        return next((group for group in self.groups if rank in group), None)


def native(source: Layout, target: Layout) -> Native | None:
    """The collective that leads from `source` to `target`; None if it takes more, less or several different
    ones."""
    if source.has_gaps or len(source.owners) < 2 or not np.array_equal(source.owners, target.owners):
        return None
    if not (np.diff(source.owners) > 0).all() or source.ranks != target.ranks:
        return None  # a rank has several boxes, or none
    if not (_is_whole(source) and _is_whole(target)):
        return None
    if source.is_partial:
        if _equal(source.held, target.held):
            return _made("all_reduce", source.held, None, source)
        return _made("reduce_scatter", source.held, target.held, source)
    return _made("all_gather", target.held, source.held, source)


def _made(kind: NativeKind, outer: Boxes, inner: Boxes | None, source: Layout) -> Native | None:
    """The collective among ranks with the same outer box, whose inner ones partition it; None if they do
    not."""
    _, group = np.unique(np.column_stack(outer), axis=0, return_inverse=True)
    group = group.ravel()
    sizes = np.bincount(group)
    if sizes.max() < 2 or (source.is_partial and not _has_each_addend(group, sizes, source)):
        return None
    keys = [source.owners] if inner is None else [*inner.lows.T[::-1]]
    order = np.lexsort([*keys, group])
    if inner is not None:
        if not contains(outer, inner).all() or not (inner.volumes * sizes[group] == outer.volumes).all():
            return None
        rows = np.column_stack([group, *inner])[order]
        if (rows[1:] == rows[:-1]).all(axis=1).any():
            return None  # replicas within a group: parts would be gathered twice
    firsts = sizes.cumsum() - sizes
    ranks = source.owners[order]
    return Native(
        kind,
        tuple(tuple(ranks[first : first + size].tolist()) for first, size in zip(firsts, sizes, strict=True)),
    )


def _has_each_addend(group: Ints, sizes: Ints, source: Layout) -> bool:
    count = source.addend_count
    if not (sizes == count).all():
        return False
    order = np.lexsort((source.addends, group))
    return bool((source.addends[order].reshape(-1, count) == np.arange(count)).all())


def _is_whole(layout: Layout) -> bool:
    """Whether local tensors consist of their box alone, and boxes of an addend are equal or apart."""
    sizes = [math.prod(layout.locals[rank]) for rank in layout.owners.tolist()]
    return sizes == layout.held.volumes.tolist() and not layout.overlaps


def _equal(a: Boxes, b: Boxes) -> bool:
    return np.array_equal(a.lows, b.lows) and np.array_equal(a.highs, b.highs)
