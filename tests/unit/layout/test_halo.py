"""Layouts with halos, and their plans executed in NumPy, against slices of a padded global tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import mcr_plus as mcr
from mcr_plus.layout import proof
from mcr_plus.layout.halo import Halo, lifted, with_halo
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.messages import LayoutExchange
from mcr_plus.layout.regions import Boxes

Array = NDArray[np.int64]
Locals = dict[int, Array]

LAYOUTS = {
    "1-D": Layout.sharded((10,), [0, 1, 2], 0),
    "rank order": Layout.sharded((10,), [2, 0, 1], 0),
    "one rank": Layout.sharded((4, 3), [0], 0),
    "uneven": Layout.sharded((9, 4), [0, 1, 2], 0, sizes=[1, 6, 2]),
    "empty slabs": Layout.sharded((4, 3), range(5), 0, sizes=[0, 2, 0, 2, 0]),
    "last dim": Layout.sharded((3, 8), [0, 1, 2, 3], 1),
    "2-D": Layout.mesh((5, 7), np.arange(6).reshape(2, 3), ["S0", "S1"]),
    "2-D, one dim whole": Layout.mesh((4, 5, 3), np.arange(4).reshape(2, 2), ["S0", "S1"]),
    "3-D": Layout.mesh((4, 5, 4), np.arange(8).reshape(2, 2, 2), ["S0", "S1", "S2"]),
    "replicas": Layout.mesh((6, 4), np.arange(4).reshape(2, 2), ["R", "S0"]),
    "bricks": Layout.boxes((4, 6), {0: [[(0, 2), (0, 6)]], 1: [[(2, 4), (0, 2)]], 2: [[(2, 4), (2, 6)]]}),
    "empty tensor": Layout.sharded((0, 3), [0, 1], 0),
    "no dimension": Layout.replicated((), [0, 1]),
}
WIDTHS = (((0,), (0,)), ((1,), (1,)), ((2, 0, 1), (0, 1, 2)), ((5,), (3,)), ((11,), (12,)))


def box_of(layout: Layout, rank: int) -> list[tuple[int, int]] | None:
    """Return the borders of a rank's box; None if it is empty."""
    pieces = layout.pieces(rank)
    if not len(pieces):
        return None
    (piece,) = pieces.tolist()
    return list(zip(layout.held.lows[piece].tolist(), layout.held.highs[piece].tolist(), strict=True))


def index_of(
    layout: Layout, rank: int, before: Sequence[int], after: Sequence[int], periodic: bool
) -> list[Array]:
    """Return the global index of every local index, in each dimension, without the library."""
    box = box_of(layout, rank)
    assert box is not None
    found = []
    for (low, high), size, left, right in zip(box, layout.shape, before, after, strict=True):
        index = np.arange(low - left, high + right)
        found.append(index % size if periodic else index[(index >= 0) & (index < size)])
    return found


def cut(values: Array, layout: Layout, rank: int) -> Array:
    box = box_of(layout, rank)
    if box is None:
        return np.zeros(layout.locals[rank], np.int64)
    found: Array = values[tuple(slice(*bounds) for bounds in box)].copy()
    return found


def view(layout: Layout, rank: int, local: Array, pieces: Array, boxes: Boxes) -> list[Array]:
    """Views of boxes in a local tensor."""
    flat = local.reshape(-1)
    extents, strides, offsets = layout.strided(rank, pieces, boxes)
    return [
        np.lib.stride_tricks.as_strided(flat[offset:], tuple(extent), tuple(8 * stride))
        for extent, stride, offset in zip(extents, strides, offsets, strict=True)
    ]


def execute(source: Layout, target: Layout, locals_: Locals) -> Locals:
    """Run the direct plan of all ranks, proved; every rank starts with values that no layout has."""
    exchange = LayoutExchange(source, target, 8)
    parts = {rank: exchange.part(rank) for rank in {*source.ranks, *target.ranks}}
    found = {rank: np.full(shape, -1, np.int64) for rank, shape in target.locals.items()}
    wires: dict[tuple[int, int], list[Array]] = {}
    for rank, part in parts.items():
        assert proof.check(part, source, target) is None
        sent = view(source, rank, locals_[rank], part.sends.pieces, part.sends.boxes)
        for peer, value in zip(part.sends.peers.tolist(), sent, strict=True):
            wires.setdefault((rank, peer), []).append(value.copy())
    for rank, part in parts.items():
        into = view(target, rank, found[rank], part.receives.pieces, part.receives.boxes)
        for peer, place in zip(part.receives.peers.tolist(), into, strict=True):
            place[...] = wires[peer, rank].pop(0)
        into = view(target, rank, found[rank], part.kept.into, part.kept.boxes)
        own = view(source, rank, locals_[rank], part.kept.pieces, part.kept.boxes)
        for place, value in zip(into, own, strict=True):
            place[...] = value
        for first, second in target.target_regions.twins:
            if target.owners[first] == rank:
                pair = [
                    view(target, rank, found[rank], np.array([each]), target.held.take(np.array([each])))[0]
                    for each in (first, second)
                ]
                pair[1][...] = pair[0]
    assert not any(wires.values())
    return found


def padded(widths: Sequence[int], dims: int) -> list[int]:
    return [widths[dim % len(widths)] for dim in range(dims)]


CASES = [
    pytest.param(layout, before, after, periodic, id=f"{name}, {before} {after} {periodic}")
    for name, layout in LAYOUTS.items()
    for before, after in WIDTHS
    for periodic in (False, True)
    # There are thousands of boxes; boxes of two dimensions are wrapped as often.
    if not (periodic and len(layout.shape) == 3 and max(*before, *after) > 2)
]


@pytest.mark.parametrize(("layout", "before", "after", "periodic"), CASES)
def test_halos_are_slices_of_the_whole_and_return_to_their_owners(
    layout: Layout, before: Sequence[int], after: Sequence[int], periodic: bool
) -> None:
    dims = len(layout.shape)
    left, right = padded(before, dims), padded(after, dims)
    target = layout.with_halo(left, right, periodic)
    values = np.arange(1, layout.volume + 1).reshape(layout.shape)
    found = execute(layout, target, {rank: cut(values, layout, rank) for rank in layout.ranks})
    random = np.random.default_rng(0)
    weights = {rank: random.integers(1, 1000, local.shape) for rank, local in found.items()}
    totals = np.zeros(layout.shape, np.int64)
    for rank, local in found.items():
        if box_of(layout, rank) is None:
            assert local.shape == layout.locals[rank]
            continue
        index = index_of(layout, rank, left, right, periodic)
        np.testing.assert_array_equal(local, values[np.ix_(*index)] if dims else values)
        np.add.at(totals, np.ix_(*index) if dims else (), weights[rank])

    halo = Halo(layout, target)
    copies, layers, _ = halo._back
    sent = execute(copies, layers, {rank: each[None] for rank, each in weights.items()})
    for rank in layout.ranks:
        sums = np.zeros(layout.locals[rank], np.int64)
        for at, own, part, _ in halo._terms(rank):
            sums[at] += sent[rank][part].reshape(sums[at].shape) if own is None else weights[rank][own]
        np.testing.assert_array_equal(sums, cut(totals, layout, rank))
    assert halo.moves == any((each >= 0).any() and len(each) for each in sent.values())


@pytest.mark.parametrize(
    ("number", "width", "orders"),
    [
        (2, 1, [[0, 1], [1, 0]]),  # two terms have the same sum in both orders: first what covers all
        (3, 4, [[0, 1, 2]] * 3),  # all ranks have a copy of every element
        (3, 2, [[0, 1], [0, 1, 2], [2, 1]]),
    ],
)
def test_copies_are_added_in_the_order_of_ranks(number: int, width: int, orders: list[list[int]]) -> None:
    """Then sums have the same bits on all replicas."""
    layout = Layout.sharded((2 * number,), range(number), 0)
    halo = Halo(layout, layout.with_halo(width, width))
    copies, layers, _ = halo._back
    ones = {rank: np.full((1, *halo.target.locals[rank]), rank) for rank in layout.ranks}
    received = execute(copies, layers, ones)
    for rank, order in enumerate(orders):
        terms = halo._terms(rank)
        found = [rank if own is not None else int(received[rank][part][0]) for _, own, part, _ in terms]
        assert found == order


@pytest.mark.parametrize("periodic", [False, True])
def test_a_halo_is_received_once_from_the_ranks_that_it_spans(periodic: bool) -> None:
    """A rank receives the elements of its halo beyond its own box, each once."""
    layout = Layout.sharded((12, 3), range(6), 0)
    exchange = LayoutExchange(layout, layout.with_halo((3, 0), (5, 0), periodic), 8)
    for rank in range(6):
        low, high = 2 * rank - 3, 2 * rank + 7
        if not periodic:
            low, high = max(low, 0), min(high, 12)
        received = exchange.part(rank).receives
        assert int(received.sizes.sum()) == 3 * (high - low - 2)
        assert set(received.peers.tolist()) == {row % 12 // 2 for row in range(low, high)} - {rank}


def test_elements_needed_several_times_are_sent_once() -> None:
    layout = Layout.sharded((4,), [0, 1], 0)
    exchange = LayoutExchange(layout, layout.with_halo(5, 6, periodic=True), 8)
    assert [int(exchange.part(rank).receives.sizes.sum()) for rank in (0, 1)] == [2, 2]


def test_lifted_layouts_have_everything_of_the_further_dimensions() -> None:
    layout = LAYOUTS["2-D"]
    found = lifted(layout, (2, 3))
    assert found.shape == (2, 3, 5, 7)
    assert found.locals == {rank: (2, 3, *shape) for rank, shape in layout.locals.items()}
    assert lifted(layout, (0, 3)).locals[0] == (0, 3, *layout.locals[0])


def test_refusals() -> None:
    layout = Layout.sharded((4, 4), [0, 1], 0)
    for before, after in ((-1, 0), (0, (1,)), ((1, 2, 3), 0), (1.5, 0), ("1", 0)):
        with pytest.raises(mcr.InvalidArgument, match="expected a whole number from 0, or 2"):
            layout.with_halo(before, after)  # type: ignore[arg-type]
    with pytest.raises(mcr.InvalidArgument, match=r"P @2 \[4, 4\] has addends"):
        Layout.mesh((4, 4), [0, 1], ["P"]).with_halo(1, 1)
    with pytest.raises(mcr.InvalidArgument, match="or a flattened one"):
        Layout.flat((4, 4), [0, 1], [(0, 8), (8, 16)]).with_halo(1, 1)
    with pytest.raises(mcr.InvalidArgument, match="rank 0 holds several"):
        Layout.boxes((4,), {0: [[(0, 1)], [(2, 4)]], 1: [[(1, 2)]]}).with_halo(1, 1)
    with pytest.raises(mcr.InvalidArgument, match="rank 0 holds several"):
        layout.with_halo(1, 1, periodic=True).with_halo(1, 1)
    with pytest.raises(mcr.InvalidArgument, match="expected a Layout"):
        with_halo("S0", 1, 1)  # type: ignore[arg-type]


def test_halos_of_halos_are_wider_halos() -> None:
    layout = LAYOUTS["3-D"]
    assert layout.with_halo(1, 0).with_halo(1, 2) == layout.with_halo(2, 2)
    assert str(layout.with_halo((1, 0, 0), 1)) == "S0,S1,S2 @2x2x2 halo (1,0,0)+1 [4, 5, 4]"


def test_combinations_of_periodic_halos_agree_with_torch() -> None:
    """All ranks together have torch's circular padding, up to the width that torch allows."""
    layout = LAYOUTS["one rank"]
    x = torch.arange(12.0).view(1, 1, 4, 3)
    for left, right in itertools.product(((1, 2), (0, 0), (4, 3)), repeat=2):
        target = layout.with_halo(left, right, periodic=True)
        found = execute(layout, target, {0: x[0, 0].numpy().astype(np.int64)})[0]
        wide = torch.nn.functional.pad(x, (left[1], right[1], left[0], right[0]), mode="circular")
        np.testing.assert_array_equal(found, wide[0, 0].numpy())
