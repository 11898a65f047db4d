"""Coverage of index space by many boxes, counted in one grid and in parts of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcr_plus.errors import InvalidArgument
from mcr_plus.layout import Layout, regions
from mcr_plus.layout.regions import Boxes, cut_apart, grids


def counted(boxes: Boxes, shape: tuple[int, ...]) -> np.ndarray:
    found = np.full(shape, -1)
    for edges, grid in grids(boxes, shape):
        for at in np.ndindex(grid.shape):
            place = tuple(slice(edge[i], edge[i + 1]) for edge, i in zip(edges, at, strict=True))
            assert (found[place] == -1).all(), "parts overlap"
            found[place] = grid[at]
    return found


@given(st.data())
def test_cells_of_parts_have_the_counts_of_one_grid(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
    number = data.draw(st.integers(0, 9))
    ends = [
        [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        for _ in range(number)
    ]
    bounds = np.array(ends, np.int64).reshape(number, len(shape), 2)
    boxes = Boxes(bounds[..., 0], bounds[..., 1])
    expected = np.zeros(shape, int)
    for low, high in zip(boxes.lows, boxes.highs, strict=True):
        expected[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] += 1
    kept = regions._MOST_CELLS
    for most in (kept, 2 ** len(shape), 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(regions, "_MOST_CELLS", max(most, 2 ** len(shape)))
            assert np.array_equal(counted(boxes, shape), expected)
            which, parts = cut_apart(boxes.take(boxes.volumes > 0), shape)
            assert int(parts.volumes.sum()) == int(boxes.volumes.sum())
            cells = {tuple(map(tuple, np.stack(cell, 1).tolist())) for cell in zip(*parts, strict=True)}
            covered = sum(math.prod(high - low for low, high in cell) for cell in cells)
            assert covered == int((expected > 0).sum())
            assert len(which) == len(parts.lows)


def test_runs_of_experts_on_many_ranks_need_no_grid_of_all_borders() -> None:
    shape, ranks = (8, 4099, 14341), 2048
    volume = math.prod(shape)
    cuts = [0, *sorted(np.random.default_rng(0).integers(0, volume, ranks // 2 - 1).tolist()), volume]
    runs = list(itertools.pairwise(cuts))
    layout = Layout.flat(shape, range(ranks), [*runs, *runs])
    borders = [len(np.unique(np.stack(layout.held)[..., dim])) for dim in range(3)]
    assert math.prod(borders) > 5_000_000
    layout.check_source()
    assert not layout.overlaps
    once = layout.held.take(layout.owners < ranks // 2)
    assert regions.cover_once(once, np.zeros(3, np.int64), np.array(shape))
    lacking = Layout.flat(shape, range(ranks), [*runs[:-1], (0, 0), *runs[:-1], (0, 0)])
    with pytest.raises(InvalidArgument, match="no rank holds the elements"):
        lacking.check_source()


def test_zero_dimensional_layout_without_holder_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no rank holds the elements"):
        Layout.boxes((), {0: [], 1: []}).check_source()
