"""Conversions between layouts of addends and layouts of complete values, for plans and for gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mcr_plus.layout.layout import Layout
from mcr_plus.layout.regions import cut_apart, grids


def whole(layout: Layout) -> Layout:
    """Return the layout with the same boxes and local tensors, and complete values.

    Addends become replicas. The gradient of addends has this layout: it equals the gradient of the sum.
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
    """Return the pair of layouts to plan for: the given pair, unless both are the same layout of addends.

    In that case values are treated as complete, so every rank keeps its boxes and nothing is reduced.
    """
    if not target.is_partial or source != target:
        return source, target
    boxes = whole(source)
    return boxes, boxes


def as_source(layout: Layout) -> Layout:
    """Return the same layout with complete values, for use as a source; elements that no rank holds are 0."""
    layout = whole(layout)
    if layout.known_good or layout.volume == 0:
        return layout
    has_gaps = any((grid == 0).any() for _, grid in grids(layout.held, layout.shape))
    return replace(layout, has_gaps=True) if has_gaps else layout


def as_addends(layout: Layout) -> Layout:
    """Return the layout with the same local tensors, in which every copy of an element is a separate addend.

    Overlapping boxes are cut. The copies of an element are numbered by rank; if elements have different
    numbers of copies, or none, the layout is marked `has_gaps`.
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
    if len(which) == len(layout.owners):  # no box was cut
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
