"""Layouts: the boxes of a global tensor that each rank holds, and their positions in its local tensor.

Long because it is one class, half of it constructors.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from mcr_plus.core.units import whole_number
from mcr_plus.errors import InvalidArgument, short
from mcr_plus.layout.regions import Boxes, Ints, Regions, as_ints, cut_apart, grids, runs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Op = Literal["SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR"]
_OPS: Final[Mapping[str, Op]] = {
    "P": "SUM", "P(sum)": "SUM", "P(avg)": "AVG", "P(max)": "MAX", "P(min)": "MIN", "P(product)": "PRODUCT",
    "P(band)": "BAND", "P(bor)": "BOR", "P(bxor)": "BXOR",
}  # fmt: skip
_NAMED: Final = 8  # maximum number of ranks of a mesh in the name of a layout
_PLACEMENTS: Final = (
    "R (replicated), S0, S1, … (sharded along a dimension), P (an addend of a sum), P(avg), P(max), P(min), "
    "P(product), P(band), P(bor), P(bxor)"
)
Box = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Layout:
    """The boxes of a global tensor that each rank holds, and the addend to which each box belongs.

    An element that several ranks hold in the same addend is replicated; the value of an element is the
    reduction (`op`) of its addends. Layouts are made by the class methods; they are immutable, comparable and
    hashable. A layout describes all ranks, and every rank makes the same layout. Rank numbers are ranks of
    the whole job.

    Attributes:
        shape: shape of the global tensor.
        owners, held, addends: for each box, the rank that holds it, its bounds, and the index of its addend.
            Sorted by rank, without empty boxes.
        places: for each box, its first coordinates in the rank's local tensor; one coordinate in `packed`
            layouts.
        locals: shape of each rank's local tensor, including empty ones.
        packed: True if local tensors have one dimension and contain the boxes one after another, each in
            row-major order.
        op: reduction of the addends.
        name: printed form, such as `S0,R @2x4`.
        has_gaps: True if addends may lack elements. The value of an element is then the reduction of the
            addends that contain it, and 0 if none does. For sources only, such as gradients (`addends.py`).
    """

    shape: tuple[int, ...]
    owners: Ints
    held: Boxes
    addends: Ints
    places: Ints
    locals: Mapping[int, tuple[int, ...]]
    packed: bool = False
    op: Op = "SUM"
    name: str = ""
    known_good: bool = field(default=False, repr=False)
    """True if the construction rules out gaps and overlaps, so that neither is checked."""
    inside: tuple[Layout, Ints] | None = field(default=None, repr=False)
    """Layout whose local tensors contain the boxes, and for each box the index of the enclosing box."""
    has_gaps: bool = False

    # -- construction -----------------------------------------------------------------------------

    @classmethod
    def replicated(cls, shape: Sequence[int], ranks: Sequence[int]) -> Layout:
        """Return the layout in which every rank holds the whole tensor."""
        return cls.mesh(shape, ranks, ["R"])

    @classmethod
    def sharded(
        cls, shape: Sequence[int], ranks: Sequence[int], dim: int, sizes: Sequence[int] | None = None
    ) -> Layout:
        """Return the layout in which rank i of `ranks` holds slice i along `dim`, of size `sizes[i]`.

        Without `sizes`, slices have ceil(n / ranks) indices, as in `torch.chunk`; the last ones may be
        smaller or empty.

        Raises:
            InvalidArgument: `dim` is not a dimension of the tensor, or `sizes` do not sum to its size.
        """
        shape = _shape(shape)
        if sizes is None:
            return cls.mesh(shape, ranks, [f"S{_dim(dim, shape)}"])
        members = _mesh(ranks).ravel()
        dim = _dim(dim, shape)
        widths = as_ints([_whole(size, f"sizes[{index}]") for index, size in enumerate(sizes)])
        if len(widths) != len(members) or int(widths.sum()) != shape[dim]:
            raise InvalidArgument(
                f"sizes: expected {len(members)} sizes, one for each rank, that sum to {shape[dim]}, "
                f"the size of dimension {dim}; got {short(list(sizes))}"
            )
        ends = widths.cumsum()
        boxes = _whole_boxes(shape, len(members))
        boxes.lows[:, dim], boxes.highs[:, dim] = ends - widths, ends
        name = f"S{dim}({','.join(map(str, widths.tolist()))}) @{mesh_text(members)}"
        return cls._of_one_box(shape, members, boxes, np.zeros(len(members), np.int64), "SUM", name)

    @classmethod
    def mesh(cls, shape: Sequence[int], ranks: Any, placements: Sequence[str]) -> Layout:
        """Return the layout of a mesh of ranks with one placement per mesh dimension, as in a `DTensor`.

        Args:
            shape: the shape of the global tensor.
            ranks: an array of ranks (nested lists, NumPy, torch) with one dimension per placement, in shard
                order.
            placements: for each mesh dimension, `R` (replicas), `S<dim>` (shards as in `torch.chunk`), or
                `P` (addends of a sum), `P(avg)`, `P(max)`, `P(min)`, `P(product)`, `P(band)`, `P(bor)`,
                `P(bxor)`. If several mesh dimensions shard the same dimension of the tensor, each cuts the
                shards of the previous one.

        Raises:
            InvalidArgument: a rank appears twice, a placement is unknown, there is not one placement for each
                mesh dimension, or reduce ops are mixed.
        """
        shape, mesh = _shape(shape), _mesh(ranks)
        if isinstance(placements, str):
            placements = placements.split(",")
        if mesh.ndim != len(placements):
            raise InvalidArgument(
                f"placements: expected {mesh.ndim}, one for each dimension of the mesh, "
                f"got {short(list(placements))}"
            )
        boxes = _whole_boxes(shape, mesh.size)
        lows, highs = (part.reshape(*mesh.shape, len(shape)) for part in boxes)
        addends = np.zeros(mesh.shape, np.int64)
        ops: dict[Op, str] = {}
        for axis, placement in enumerate(placements):
            index = np.arange(mesh.shape[axis]).reshape([-1 if a == axis else 1 for a in range(mesh.ndim)])
            text = str(placement).strip()
            if text in _OPS:
                addends = addends * mesh.shape[axis] + index
                ops[_OPS[text]] = text
            elif re.fullmatch(r"S\d+", text):
                dim = _dim(int(text[1:]), shape)
                size = highs[..., dim] - lows[..., dim]
                chunk = -(-size // mesh.shape[axis])
                begin = lows[..., dim] + np.minimum(chunk * index, size)
                highs[..., dim] = np.minimum(begin + chunk, highs[..., dim])
                lows[..., dim] = begin
            elif text != "R":
                raise InvalidArgument(
                    f"placements[{axis}]: unknown placement {placement!r}; known: {_PLACEMENTS}"
                )
        if len(ops) > 1:
            raise InvalidArgument(
                f"placements: {' and '.join(ops.values())} in one layout; one reduce op reduces all addends"
            )
        name = f"{','.join(map(str, placements))} @{mesh_text(mesh)}"
        boxes = Boxes(*(part.reshape(mesh.size, len(shape)) for part in (lows, highs)))
        op: Op = next(iter(ops)) if ops else "SUM"
        return cls._of_one_box(shape, mesh.ravel(), boxes, addends.ravel(), op, name)

    @classmethod
    def flat(
        cls, shape: Sequence[int], ranks: Sequence[int], ranges: Sequence[Any], name: str = ""
    ) -> Layout:
        """Return the layout in which each rank holds ranges of the flattened tensor, as in FSDP1 and ZeRO.

        `ranges[i]`: the (start, stop) range of `ranks[i]`, or a list of ranges, in elements in row-major
        order. A local tensor has one dimension and contains the rank's ranges one after another.

        Raises:
            InvalidArgument: a range does not lie inside the tensor.
        """
        shape, members = _shape(shape), _mesh(ranks).ravel()
        if len(ranges) != len(members):
            raise InvalidArgument(
                f"ranges: expected {len(members)}, one for each rank, got {len(ranges)}: {short(ranges)}"
            )
        total = math.prod(shape)
        owners, starts, stops = [], [], []
        for rank, listed in zip(members.tolist(), ranges, strict=True):
            several = len(listed) == 0 or not np.isscalar(listed[0])
            for run in listed if several else [listed]:
                start, stop = _pair(run, f"ranges: rank {rank}")
                if not 0 <= start <= stop <= total:
                    raise InvalidArgument(
                        f"ranges: rank {rank}: ({start}, {stop}) is not in the tensor of {total} elements"
                    )
                owners.append(rank)
                starts.append(start)
                stops.append(stop)
        which, boxes = runs(_whole_boxes(shape, len(owners)), as_ints(starts), as_ints(stops))
        order = np.lexsort((stops, starts))
        ordered = Boxes(as_ints(starts)[order, None], as_ints(stops)[order, None])
        apart = bool((ordered.lows[1:] >= ordered.highs[:-1]).all()) and int(ordered.volumes.sum()) == total
        return cls._packed(
            shape, members, as_ints(owners)[which], boxes, name or f"flat @{len(members)}", known_good=apart
        )

    @classmethod
    def boxes(cls, shape: Sequence[int], boxes: Mapping[int, Sequence[Box]]) -> Layout:
        """Return a layout of arbitrary boxes, `{rank: [box, …]}`; a box is a (low, high) per dimension.

        Boxes of different ranks may overlap. If every rank has one box, a local tensor has the shape of its
        box. Otherwise local tensors have one dimension and contain the boxes one after another, each in
        row-major order.

        Raises:
            InvalidArgument: a box does not lie inside the tensor.
        """
        shape = _shape(shape)
        members = _mesh(list(boxes)).ravel()
        owners, lows, highs = [], [], []
        for rank, listed in boxes.items():
            if not isinstance(listed, (list, tuple)):
                raise InvalidArgument(f"boxes: rank {rank}: expected a list of boxes, got {short(listed)}")
            for number, box in enumerate(listed):
                bounds = _bounds(box, f"boxes: rank {rank}, box {number}")
                low, high = bounds[:, 0], bounds[:, 1]
                if (
                    len(bounds) != len(shape)
                    or not ((low >= 0) & (low <= high) & (high <= as_ints(shape))).all()
                ):
                    raise InvalidArgument(
                        f"boxes: rank {rank}, box {number}: {short(box)} is not in the tensor "
                        f"of shape {list(shape)}"
                    )
                owners.append(rank)
                lows.append(low)
                highs.append(high)
        dims = len(shape)
        found = Boxes(as_ints(lows).reshape(len(lows), dims), as_ints(highs).reshape(len(lows), dims))
        single = all(len(listed) == 1 for listed in boxes.values())
        name = f"boxes @{len(members)}"
        if single:
            none = np.zeros(len(owners), np.int64)
            return cls._of_one_box(shape, as_ints(owners), found, none, "SUM", name, known_good=False)
        return cls._packed(shape, members, as_ints(owners), found, name)

    @classmethod
    def of(cls, tensor: DTensor, mesh: DeviceMesh | None = None) -> Layout:
        """Return the layout of a `DTensor`, with partial, uneven and strided shards and any shard order.

        Args:
            tensor: a tensor on a mesh that contains this rank.
            mesh: a mesh of which the tensor's mesh is a part (some of its dimensions). The tensor is assumed
                to be equal on all such parts: for example a LayerNorm that FSDP2 shards over `mesh["dp"]` in
                a model that is tensor parallel over `mesh["tp"]`. None: the layout contains only the tensor's
                own mesh, and differs between ranks of different parts.

        Raises:
            InvalidArgument: `tensor` is not a `DTensor`, or its mesh is not a part of `mesh`.
            Unsupported: a placement is not one of torch's own.
        """
        from mcr_plus.layout.torch_layouts import layout_of  # DTensor takes a second to import

        return layout_of(tensor, mesh)

    @classmethod
    def _of_one_box(
        cls,
        shape: tuple[int, ...],
        owners: Ints,
        boxes: Boxes,
        addends: Ints,
        op: Op,
        name: str,
        *,
        known_good: bool = True,
    ) -> Layout:
        """Return the layout in which the local tensor of each of `owners` is one box."""
        extents = np.maximum(boxes.highs - boxes.lows, 0)
        locals_ = dict(zip(owners.tolist(), map(tuple, extents.tolist()), strict=True))
        return cls._sorted(
            shape, owners, boxes, addends, np.zeros_like(boxes.lows), locals_, False, op, name, known_good
        )

    @classmethod
    def placed(
        cls,
        shape: tuple[int, ...],
        owners: Ints,
        boxes: Boxes,
        places: Ints,
        locals_: Mapping[int, tuple[int, ...]],
        name: str,
        known_good: bool = False,
        *,
        addends: Ints | None = None,
        op: Op = "SUM",
    ) -> Layout:
        """Return the layout of boxes at `places` in local tensors with as many dimensions as the tensor.

        `locals_`: the shape of each rank's local tensor. `addends`: the addend of each box; None: complete
        values. A rank may hold several boxes. `known_good`: skip checks; boxes of an addend are equal or
        disjoint, and leave no gap that matters.
        """
        addends = np.zeros(len(owners), np.int64) if addends is None else addends
        return cls._sorted(shape, owners, boxes, addends, places, locals_, False, op, name, known_good)

    @classmethod
    def packed_boxes(
        cls,
        shape: tuple[int, ...],
        members: Sequence[int],
        owners: Ints,
        boxes: Boxes,
        name: str,
        op: Op,
        *,
        known_good: bool = True,
    ) -> Layout:
        """Return the layout of boxes packed, each in row-major order, into one-dimensional local tensors.

        `known_good`: as in `placed`.
        """
        return cls._packed(shape, as_ints(members), owners, boxes, name, op, known_good=known_good)

    @classmethod
    def part_of(cls, layout: Layout, owners: Ints, boxes: Boxes, pieces: Ints, name: str) -> Layout:
        """Return the layout of boxes that lie inside the boxes of another layout, in the same local tensors.

        `pieces`: for each box, the index of the box of `layout` that contains it.
        """
        order = np.argsort(owners, kind="stable")
        owners, boxes, pieces = owners[order], boxes.take(order), pieces[order]
        none = np.zeros(len(owners), np.int64)
        return cls(
            layout.shape, owners, boxes, none, np.zeros_like(boxes.lows), layout.locals, layout.packed,
            layout.op, name, True, (layout, pieces),
        )  # fmt: skip

    @classmethod
    def _packed(
        cls,
        shape: tuple[int, ...],
        members: Ints,
        owners: Ints,
        boxes: Boxes,
        name: str,
        op: Op = "SUM",
        *,
        known_good: bool = False,
    ) -> Layout:
        """Return the layout of boxes packed one after another into one-dimensional local tensors."""
        order = np.argsort(owners, kind="stable")
        owners, boxes = owners[order], boxes.take(order)
        sizes = boxes.volumes
        ends = sizes.cumsum()
        ranks, first = np.unique(owners, return_index=True)
        before = (ends - sizes)[first]
        at = (ends - sizes) - np.repeat(before, np.diff([*first.tolist(), len(owners)]))
        locals_ = {int(rank): (0,) for rank in members}
        totals = np.add.reduceat(sizes, first) if len(first) else sizes
        locals_.update((int(rank), (int(total),)) for rank, total in zip(ranks, totals, strict=True))
        none = np.zeros(len(owners), np.int64)
        return cls._sorted(shape, owners, boxes, none, at[:, None], locals_, True, op, name, known_good)

    @classmethod
    def _sorted(
        cls,
        shape: tuple[int, ...],
        owners: Ints,
        boxes: Boxes,
        addends: Ints,
        places: Ints,
        locals_: Mapping[int, tuple[int, ...]],
        flat: bool,
        op: Op,
        name: str,
        known_good: bool,
    ) -> Layout:
        keep = boxes.volumes > 0
        order = np.argsort(owners[keep], kind="stable")
        return cls(
            shape, owners[keep][order], boxes.take(keep).take(order), addends[keep][order],
            places[keep][order], locals_, flat, op, name, known_good,
        )  # fmt: skip

    def with_halo(
        self, before: int | Sequence[int], after: int | Sequence[int], periodic: bool = False
    ) -> Layout:
        """Return the layout with every rank's box extended by a halo: a target whose boxes overlap.

        Args:
            before, after: elements by which each box grows towards lower and higher indices: one number for
                all dimensions, or one for each. A halo may be wider than a neighbour's box, and then comes
                from several ranks. Empty boxes stay empty.
            periodic: True: the tensor repeats beyond its bounds, as often as necessary, so every local tensor
                grows by before + after. False: boxes are clipped at the tensor's bounds, and local tensors
                are smaller there.

        Raises:
            InvalidArgument: a rank holds several boxes, a flattened box, or an addend; or a width is not an
                integer >= 0.

        Example:
            ```python
            rows = mcr.Layout.sharded((6, 4), [0, 1], 0)
            assert rows.with_halo((1, 0), (1, 0)).locals == {0: (4, 4), 1: (4, 4)}
            assert rows.with_halo((1, 0), (1, 0), periodic=True).locals == {0: (5, 4), 1: (5, 4)}
            ```
        """
        from mcr_plus.layout.halo import with_halo  # halo.py imports this module

        return with_halo(self, before, after, periodic)

    # -- properties -------------------------------------------------------------------------------

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a part, possibly an empty one, in ascending order."""
        return tuple(sorted(self.locals))

    @cached_property
    def volume(self) -> int:
        """Number of elements of the global tensor."""
        return math.prod(self.shape)

    @cached_property
    def addend_count(self) -> int:
        """Number of addends; 1 for complete values."""
        return int(self.addends.max(initial=0)) + 1

    @property
    def is_partial(self) -> bool:
        """True if values are reductions of several addends."""
        return self.addend_count > 1

    @cached_property
    def has_replicas(self) -> bool:
        """True if several ranks hold the same element of the same addend."""
        return bool((self.regions.counts > 1).any())

    def pieces(self, rank: int) -> Ints:
        """Return the indices of a rank's boxes."""
        begin, end = np.searchsorted(self.owners, [rank, rank + 1])
        return np.arange(begin, end)

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """Return the shape of a rank's local tensor; None if the rank has no part in the layout."""
        return self.locals.get(rank)

    def strided(self, rank: int, pieces: Ints, boxes: Boxes) -> tuple[Ints, Ints, Ints]:
        """Locate boxes in the contiguous local tensor of a rank. `pieces`: index of the box around each.

        Returns the extents and the strides, both [n, dims], and the offsets [n], all in elements, as
        `torch.as_strided` takes them.
        """
        if self.inside is not None:
            layout, parents = self.inside
            return layout.strided(rank, parents[pieces], boxes)
        if not len(pieces):
            return boxes.lows, boxes.lows, pieces
        bases = self.held.lows[pieces]
        extents = boxes.highs - boxes.lows
        if self.packed:
            strides = _strides(self.held.highs[pieces] - bases)
            offsets = self.places[pieces, 0] + ((boxes.lows - bases) * strides).sum(axis=1)
        else:
            strides = np.broadcast_to(_strides(as_ints(self.locals[rank])[None, :]), extents.shape)
            offsets = ((boxes.lows - bases + self.places[pieces]) * strides).sum(axis=1)
        return extents, strides, offsets

    @cached_property
    def regions(self) -> Regions:
        """Regions of the layout as a source: any two regions of an addend are disjoint."""
        if self.known_good:
            return Regions(self.held, self.addends, self.owners)
        parts = []
        for addend in range(self.addend_count):
            (own,) = (self.addends == addend).nonzero()
            which, boxes = cut_apart(self.held.take(own), self.shape)
            parts.append((own[which], boxes))
        pieces = np.concatenate([pieces for pieces, _ in parts])
        lows, highs = (np.concatenate([boxes[side] for _, boxes in parts]) for side in (0, 1))
        return Regions(Boxes(lows, highs), self.addends[pieces], self.owners[pieces], pieces)

    @cached_property
    def target_regions(self) -> Regions:
        """Regions of the layout as a target; they may overlap."""
        return Regions(self.held, np.zeros_like(self.addends), self.owners)

    @cached_property
    def overlaps(self) -> bool:
        """True if regions overlap, for example because of a halo."""
        if self.known_good:
            return False
        return any((grid > 1).any() for _, grid in grids(self.target_regions.boxes, self.shape))

    @cached_property
    def digest(self) -> bytes:
        """Hash of the content, 16 bytes, equal on all ranks for equal layouts."""
        text = repr((self.shape, self.packed, self.op, self.has_gaps, sorted(self.locals.items())))
        found = hashlib.blake2b(text.encode(), digest_size=16)
        for part in (self.owners, *self.held, self.addends, self.places):
            found.update(np.ascontiguousarray(part).tobytes())
        if self.inside is not None:
            found.update(self.inside[0].digest + self.inside[1].tobytes())
        return found.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"

    def __repr__(self) -> str:
        return f"<Layout {self}>"

    # -- checks -----------------------------------------------------------------------------------

    def check_source(self) -> None:
        """Raise `InvalidArgument` unless, for each addend, some rank holds every element.

        Layouts with `known_good` or `has_gaps` pass unchecked.
        """
        if self.known_good or self.has_gaps or self.volume == 0:
            return
        for addend in range(self.addend_count):
            for edges, grid in grids(self.held.take(self.addends == addend), self.shape):
                gaps = np.argwhere(grid == 0)
                if not len(gaps):
                    continue
                box = [
                    (int(edge[at]), int(edge[at + 1]))
                    for edge, at in zip(edges, gaps[0].tolist(), strict=True)
                ]
                of = f" of addend {addend}" if self.is_partial else ""
                raise InvalidArgument(f"source {self}: no rank holds the elements in {box}{of}")


def _whole_boxes(shape: tuple[int, ...], number: int) -> Boxes:
    lows = np.zeros((number, len(shape)), np.int64)
    return Boxes(lows, np.repeat(as_ints(shape)[None, :], number, axis=0))


def _strides(extents: Ints) -> Ints:
    """Return the strides of contiguous tensors with these extents, both [n, dims]."""
    strides = np.ones_like(extents)
    for dim in range(extents.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * extents[:, dim + 1]
    return strides


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    if isinstance(shape, int):
        raise InvalidArgument(f"shape: expected the size of each dimension, such as ({shape},), got {shape}")
    return tuple(_whole(size, f"shape[{dim}]") for dim, size in enumerate(shape))


def _whole(value: Any, what: str) -> int:
    number = whole_number(value)
    if number is None or number < 0:
        raise InvalidArgument(f"{what}: expected a whole number, 0 or more, got {value!r}")
    return number


def _dim(dim: Any, shape: Sequence[int]) -> int:
    number = whole_number(dim)
    if number is None:
        raise InvalidArgument(f"dim: expected an integer, got {dim!r}")
    if not -len(shape) <= number < len(shape):
        count = f"{len(shape)} dimension{'s' * (len(shape) != 1)}"
        raise InvalidArgument(f"dimension {number} is out of range for shape {list(shape)} ({count})")
    return number % len(shape)


def mesh_text(ranks: Ints) -> str:
    """Return the extents of a mesh, with its ranks if they are not 0, 1, …: `2x4`, `2x4+8`, `4(0,1,3,2)`."""
    extents = "x".join(map(str, ranks.shape))
    order = ranks.ravel()
    first = int(order[0])
    if (order == np.arange(len(order)) + first).all():
        return f"{extents}+{first}" if first else extents
    some = ",".join(map(str, order[:_NAMED].tolist()))
    return f"{extents}({some}{',…' * (len(order) > _NAMED)})"


def _bounds(box: Any, where: str) -> Ints:
    """Return the bounds (low, high) of each dimension of a box, [dims, 2]."""
    try:
        bounds = list(box)
    except TypeError:
        raise InvalidArgument(
            f"{where}: expected a (low, high) for each dimension, got {short(box)}"
        ) from None
    return as_ints([_pair(bound, where) for bound in bounds]).reshape(len(bounds), 2)


def _pair(bound: Any, where: str) -> tuple[int, int]:
    """Return the bounds (low, high) as two integers."""
    try:
        low, high = bound
        found = int(low), int(high)
    except (TypeError, ValueError):
        raise InvalidArgument(f"{where}: expected a (low, high), got {short(bound)}") from None
    if found != (low, high):
        raise InvalidArgument(f"{where}: expected whole numbers, got {short(bound)}")
    return found


def _mesh(ranks: Any) -> Ints:
    mesh = np.asarray(ranks)
    if mesh.ndim == 0 and mesh.dtype.kind in "iu":
        # Both readings are plausible: a count in other libraries, a rank in NumPy.
        raise InvalidArgument(
            f"ranks: expected a sequence of ranks, got {short(ranks)}; pass range({mesh}) if it is a number "
            f"of ranks, [{mesh}] if it is a rank"
        )
    if mesh.size == 0 or mesh.dtype.kind not in "iu":
        raise InvalidArgument(f"ranks: expected an array of ranks, got {short(ranks)}")
    found, times = np.unique(mesh, return_counts=True)
    if (times > 1).any():
        raise InvalidArgument(f"ranks: rank {int(found[times > 1][0])} appears twice in {short(ranks)}")
    if int(found[0]) < 0:
        raise InvalidArgument(f"ranks: {int(found[0])} is not a rank")
    return mesh.astype(np.int64)
