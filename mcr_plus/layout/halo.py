"""Layouts of overlapping boxes, such as slabs with a halo, and the exchange of halos.

The forward exchange is an ordinary redistribution whose target is a layout of overlapping boxes. The backward
exchange sums the copies of each element (their gradients) on the ranks that own it. The copies do not form
complete addends, and the number of copies differs between elements. So each copied box becomes a *layer* of a
tensor
with one more dimension: a redistribution sends every rank the layers of its own elements. The rank adds them
in the order of the layers, i.e. of the ranks that hold the copies. So sums have the same bits in every run
and on all replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mcr_plus.core.units import whole_number, whole_numbers
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.redistribute import bound
from mcr_plus.layout.regions import Boxes, Ints, as_ints, meet_all

if TYPE_CHECKING:
    from mcr_plus.communicator.calls import CallOptions
    from mcr_plus.communicator.communicator import Communicator
    from mcr_plus.layout.state import RedistributionWork

Widths = int | Sequence[int]
HALF = (torch.float16, torch.bfloat16)


# -- layouts --------------------------------------------------------------------------------------


def with_halo(layout: Layout, before: Widths, after: Widths, periodic: bool = False) -> Layout:
    """Return the layout with a halo, see `Layout.with_halo`."""
    check_single(layout, "with_halo")
    wide = [_widths(each, what, len(layout.shape)) for each, what in ((before, "before"), (after, "after"))]
    boxes = Boxes(layout.held.lows - wide[0], layout.held.highs + wide[1])
    words = f"{_said(wide[0])}+{_said(wide[1])}{' periodic' if periodic else ''}"
    return windows(layout, layout.owners, boxes, periodic, f"{layout.name} halo {words}")


def windows(layout: Layout, owners: Ints, boxes: Boxes, periodic: bool, name: str) -> Layout:
    """Return the layout in which `owners[i]` holds `boxes[i]`; boxes may extend beyond the tensor.

    Without `periodic`, boxes are clipped to the tensor. With it, the tensor repeats in every dimension, as
    often as necessary, and a local tensor consists of several boxes. The other ranks of `layout` hold no
    elements; their local tensors keep the shapes that they have in `layout`.
    """
    shape = as_ints(layout.shape)
    locals_ = dict(layout.locals)
    if not periodic:
        lows = np.minimum(np.maximum(boxes.lows, 0), shape)
        boxes = Boxes(lows, np.maximum(np.minimum(boxes.highs, shape), lows))
        which, held, places = np.arange(len(owners)), boxes, np.zeros_like(boxes.lows)
    else:
        which, held, places = _wrapped(boxes, shape)
    extents = boxes.highs - boxes.lows
    locals_.update(zip(owners.tolist(), map(tuple, extents.tolist()), strict=True))
    return Layout.placed(layout.shape, owners[which], held, places, locals_, name)


def _wrapped(boxes: Boxes, shape: Ints) -> tuple[Ints, Boxes, Ints]:
    """Cut boxes of an infinitely repeated tensor of `shape` into parts within one copy.

    Returns, for each part, the index of the box, the bounds in the tensor, and the offset in the box. Any two
    parts of one box are equal or disjoint.
    """
    number, dims = boxes.lows.shape
    none = np.zeros((0, dims), np.int64)
    parts: list[tuple[Ints, Ints, Ints, Ints]] = [(np.zeros(0, np.int64), none, none, none)]
    if number and shape.all():
        edges = _edges(boxes, shape)
        first, last = (boxes.lows // shape).min(axis=0), ((boxes.highs - 1) // shape).max(axis=0)
        turns = product(*(range(low, high + 1) for low, high in zip(first, last, strict=True)))
        cells = list(product(*(range(3 if each else 1) for each in (edges[1] < shape).any(axis=0))))
        for turn, cell in product(turns, cells):
            begin, dim = as_ints(turn) * shape, np.arange(dims)
            at = as_ints(cell)
            lows = np.maximum(boxes.lows, begin + edges[at, :, dim].T)
            highs = np.minimum(boxes.highs, begin + edges[at + 1, :, dim].T)
            (hit,) = (lows < highs).all(axis=1).nonzero()
            parts.append((hit, lows[hit] - begin, highs[hit] - begin, lows[hit] - boxes.lows[hit]))
    which, lows, highs, places = (np.concatenate(each) for each in zip(*parts, strict=True))
    return which, Boxes(lows, highs), places


def _edges(boxes: Boxes, shape: Ints) -> Ints:
    """Return the cuts of each dimension of the tensor for each box, [4, boxes, dims], with 0 and the size.

    A box that contains an element twice is cut at its start and end; other boxes need no cut. Parts with
    the same elements are then equal, and sent once.
    """
    twice = boxes.highs - boxes.lows > shape
    ends = np.sort(np.stack([boxes.lows % shape, boxes.highs % shape]), axis=0)
    full = np.broadcast_to(shape, boxes.lows.shape)
    return np.stack([np.zeros_like(full), *np.where(twice, ends, full), full])


@lru_cache(maxsize=256)
def lifted(layout: Layout, sizes: tuple[int, ...]) -> Layout:
    """Return the layout with added leading dimensions of `sizes`, not divided between ranks."""
    front = np.broadcast_to(as_ints(sizes), (len(layout.owners), len(sizes)))
    zeros = np.zeros_like(front)
    boxes = Boxes(
        np.concatenate([zeros, layout.held.lows], axis=1), np.concatenate([front, layout.held.highs], axis=1)
    )
    places = np.concatenate([zeros, layout.places], axis=1)
    locals_ = {rank: (*sizes, *shape) for rank, shape in layout.locals.items()}
    return Layout.placed(
        (*sizes, *layout.shape), layout.owners, boxes, places, locals_, layout.name, layout.known_good
    )


def check_single(layout: Layout, what: str) -> None:
    """Raise `InvalidArgument` if a rank of the layout holds several boxes, a flattened box or an addend."""
    if not isinstance(layout, Layout):
        raise InvalidArgument(f"{what}: expected a Layout, got {short(layout)}")
    if layout.is_partial:
        raise InvalidArgument(f"{what}: {layout} has addends; redistribute it to complete values first")
    twice = layout.owners[1:][layout.owners[1:] == layout.owners[:-1]]
    if len(twice) or layout.packed or layout.inside is not None:
        who = f"rank {int(twice[0])}" if len(twice) else "a rank"
        raise InvalidArgument(
            f"{what}: expected a layout in which every rank holds one box as a tensor of {len(layout.shape)} "
            f"dimensions; in {layout} {who} holds several boxes, or a flattened one"
        )


def one_per_dim(given: Any, dims: int) -> tuple[int, ...] | None:
    """Return one integer per dimension, given one for all or one for each; None if `given` is neither."""
    one = whole_number(given)
    found = whole_numbers(given) if one is None else [one] * dims
    return tuple(found) if found is not None and len(found) == dims else None


def _widths(given: Widths, what: str, dims: int) -> Ints:
    found = one_per_dim(given, dims)
    if found is None or min(found, default=0) < 0:
        raise InvalidArgument(
            f"{what}: expected a whole number from 0, or {dims}, one for each dimension; got {short(given)}"
        )
    return as_ints(found).reshape(dims)


def _said(widths: Ints) -> str:
    found = widths.tolist()
    return str(found[0]) if len(set(found)) == 1 else f"({','.join(map(str, found))})"


# -- exchanges ------------------------------------------------------------------------------------


class _Term(NamedTuple):
    """A term in the sum of this rank's gradient: copies of its own, or received copies.

    `at`: indices in the gradient. `own`: indices in the rank's own copies, None for a received term.
    `received`: range in the received elements. `is_all`: the term covers all elements that the rank owns.
    """

    at: tuple[slice, ...]
    own: tuple[slice, ...] | None
    received: slice
    is_all: bool = False


class Halo:
    """Exchange between a layout with one box per rank and a layout of overlapping boxes.

    Attributes:
        source: layout of the elements that each rank owns.
        target: layout of the elements that each rank needs.
        moves: True if any rank needs elements that it does not own; the same on all ranks.
    """

    def __init__(self, source: Layout, target: Layout) -> None:
        self.source = source
        self.target = target
        layer, owner, common = meet_all(target.held, source.held)
        self._layer, self._owner, self._common = layer, owner, common
        self._remote = target.owners[layer] != source.owners[owner]
        self.moves = bool(self._remote.any())

    @cached_property
    def _back(self) -> tuple[Layout, Layout, Ints]:
        """Return both layouts of the backward exchange, and the order of boxes in `layers` among overlaps.

        `copies`: layout of the target's boxes as layers. `layers`: layout of other ranks' copies of each
        rank's elements.
        """
        source, target = self.source, self.target
        shape = (len(target.owners), *source.shape)
        number = np.arange(len(target.owners))

        def layered(boxes: Boxes, layers: Ints) -> Boxes:
            return Boxes(np.column_stack([layers, boxes.lows]), np.column_stack([layers + 1, boxes.highs]))

        copies = Layout.placed(
            shape, target.owners, layered(target.held, number),
            np.column_stack([np.zeros_like(number), target.places]),
            {rank: (1, *local) for rank, local in target.locals.items()}, "copies", True,
        )  # fmt: skip
        (remote,) = self._remote.nonzero()
        owners = source.owners[self._owner[remote]]
        order = remote[np.lexsort((self._layer[remote], owners))]
        boxes = layered(self._common.take(order), self._layer[order])
        owners = source.owners[self._owner[order]]
        # Outside of its box, a layer has no holder and is not needed.
        layers = Layout.packed_boxes(
            shape, source.ranks, owners, boxes, "layers", "SUM", known_good=not source.overlaps
        )
        return copies, layers, order

    def _terms(self, rank: int) -> list[_Term]:
        """Return the terms that a rank adds, in the order of the layers.

        If no element has more than two terms, the order does not matter, and a term that covers all elements
        comes first: a copy of it replaces the zeros.
        """
        source, target = self.source, self.target
        order = self._back[2]
        mine = order[source.owners[self._owner[order]] == rank]
        sizes = self._common.take(mine).volumes
        ends = dict(zip(mine.tolist(), sizes.cumsum().tolist(), strict=True))
        found: list[_Term] = []
        others: list[int] = []
        (every,) = (source.owners[self._owner] == rank).nonzero()
        for index in every[np.argsort(self._layer[every], kind="stable")].tolist():
            low, high = self._common.lows[index], self._common.highs[index]
            at = _slices(low, high, source.held.lows[self._owner[index]], 0)
            layer, end = int(self._layer[index]), ends.get(index)
            if end is None:
                own = _slices(low, high, target.held.lows[layer], target.places[layer])
                local = source.locals[rank]
                found.append(_Term(at, own, slice(0), tuple(each.stop - each.start for each in at) == local))
            else:
                found.append(_Term(at, None, slice(end - int(np.prod(high - low)), end)))
            if not found[-1].is_all:
                others.append(index)
        common = self._common.take(as_ints(others))
        apart = meet_all(common, common)[0].size == len(others)  # each box overlaps only itself
        if apart and len(others) == len(found) - 1:  # at most two addends of any element
            found.sort(key=lambda term: not term.is_all)
        return found

    @cached_property
    def _terms_of(self) -> dict[int, list[_Term]]:
        return {}

    def start(self, x: torch.Tensor, comm: Communicator, options: CallOptions) -> RedistributionWork:
        """Start sending halos. `output` of the completed handle is the local tensor in the target."""
        move = bound(self.source, self.target, comm, options.get("tag"), options.get("compress"))
        return move.start({"": x.detach()})  # in a Function's forward, `x` still requires gradients

    def run(self, x: torch.Tensor, comm: Communicator, options: CallOptions) -> torch.Tensor:
        """Exchange halos: take the local tensor in the source, and return the local tensor in the target."""
        move = bound(self.source, self.target, comm, options.get("tag"), options.get("compress"))
        output = move({"": x.detach()})[""]
        assert output is not None  # every rank has a part
        return output

    def start_back(self, y: torch.Tensor, comm: Communicator, options: CallOptions) -> Returning:
        """Start sending copies back to the owners of their elements; the handle's `wait` returns the sums.

        `y`: the local tensor in the target; it must not be changed before `wait` returns.
        """
        work = None
        if self.moves:
            copies, layers, _ = self._back
            move = bound(copies, layers, comm, options.get("tag"), options.get("compress"))
            work = move.start({"": y.unsqueeze(0)})
        rank = comm.ranks[comm.rank]
        if rank not in self._terms_of:
            self._terms_of[rank] = self._terms(rank)
        return Returning(y, work, self._terms_of[rank], self.source.locals[rank])


class Returning:
    """Handle of a pending return of copies to the owners of their elements."""

    def __init__(
        self,
        y: torch.Tensor,
        work: RedistributionWork | None,
        terms: Sequence[_Term],
        shape: tuple[int, ...],
    ) -> None:
        self._y = y
        self._work = work
        self._terms = terms
        self._shape = shape

    def wait(self) -> torch.Tensor:
        """Wait, and return the sum of the copies of each element that this rank owns; 0 without copies."""
        y, received = self._y, self._y
        if self._work is not None:
            self._work.wait()
            output = self._work.output
            assert output is not None
            received = output
        half = y.dtype in HALF and len(self._terms) > 2  # summed in float32 and rounded once
        terms = self._terms
        first = terms[0].own if terms and terms[0].is_all and not half else None
        if first is not None:
            found = y[first].clone(memory_format=torch.contiguous_format)
            terms = terms[1:]
        else:
            found = torch.zeros(self._shape, dtype=torch.float32 if half else y.dtype, device=y.device)
        for at, own, part, _ in terms:
            into = found[at]
            into += received[part].view(into.shape) if own is None else y[own]
        return found.to(y.dtype)


def _slices(low: Ints, high: Ints, base: Ints, place: Ints | int) -> tuple[slice, ...]:
    return tuple(map(slice, (low - base + place).tolist(), (high - base + place).tolist()))


def halo(layout: Layout, before: Widths, after: Widths, periodic: bool) -> Halo:
    """Return the halo exchange of a layout, cached."""
    if not isinstance(layout, Layout):
        raise InvalidArgument(f"layout: expected a Layout, got {short(layout)}")
    wide = (tuple(each) if isinstance(each, Iterable) else each for each in (before, after))
    return _halo(layout, *wide, bool(periodic))


@lru_cache(maxsize=256, typed=True)
def _halo(layout: Layout, before: Any, after: Any, periodic: bool) -> Halo:
    return Halo(layout, with_halo(layout, before, after, periodic))
