"""Layouts whose addends are taken as something else: as they are, and those of gradients, which lead back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mcr_plus.layout.layout import Layout
from mcr_plus.layout.regions import cut_apart, grids


def whole(layout: Layout) -> Layout:
    """The same boxes in the same local tensors, all with complete values: an addend's gradient is the sum's.

    Addends become replicas.
    """
    if not layout.is_partial and layout.op == "SUM" and not layout.has_gaps:
        return layout
    return replace(
        layout,
        addends=np.zeros_like(layout.addends),
        op="SUM",
        known_good=layout.known_good and not layout.has_gaps,
        has_gaps=False,
    )


def to_itself(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """The pair that is planned: from addends to the same addends, every rank keeps its box as it is."""
    if not target.is_partial or source != target:
        return source, target
    boxes = whole(source)
    return boxes, boxes


def as_source(layout: Layout) -> Layout:
    """The same layout of complete values, of which elements that no rank holds are 0."""
    layout = whole(layout)
    if layout.known_good or layout.volume == 0:
        return layout
    has_gaps = any((grid == 0).any() for _, grid in grids(layout.held, layout.shape))
    return replace(layout, has_gaps=True) if has_gaps else layout


def as_addends(layout: Layout) -> Layout:
    """The same local tensors, in which every copy of an element is an addend of its own.

    Boxes that overlap are cut. The copies of an element are numbered by rank; where elements have different
    numbers of copies, or none, the layout has gaps.
    """
    layout = whole(layout)
    if layout.volume == 0 or not len(layout.owners):
        return as_source(layout)
    which = np.arange(len(layout.owners))
    boxes = layout.held
    if not layout.known_good:
        which, boxes = cut_apart(layout.held, layout.shape)
    keys = np.column_stack(boxes)
    order = np.lexsort([which, *keys.T[::-1]])  # pieces are sorted by rank
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(keys[order], axis=0) != 0).any(axis=1)
    (firsts,) = new.nonzero()
    copies = np.diff(np.append(firsts, len(order)))
    addends = np.empty(len(order), np.int64)
    addends[order] = np.arange(len(order)) - np.repeat(firsts, copies)
    missing = int(boxes.volumes[order[firsts]].sum()) != layout.volume
    has_gaps = missing or bool((copies != copies[0]).any())
    if len(which) == len(layout.owners):  # nothing was cut
        return replace(layout, addends=addends, known_good=True, has_gaps=has_gaps)
    return replace(
        layout,
        owners=layout.owners[which],
        held=boxes,
        addends=addends,
        places=np.zeros_like(boxes.lows),
        known_good=True,
        inside=(layout, which),
        has_gaps=has_gaps,
    )
