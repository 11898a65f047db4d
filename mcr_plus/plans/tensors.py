"""Tensors between the tasks of a plan, as layouts: what each rank makes and needs of each.

Between blocks k-1 and k lies the tensor x[k] of every micro-batch and slice, with a gradient of the same
shape. The cuts of a block say which box each part needs of its input and makes of its output, and the reverse
for gradients. A sum within a block (`sum`) is added up there, so that its parts have the whole. A part of a
block that is cut along columns has an addend of the input's gradient. Where maker and user of a tensor
differ, it is redistributed.
"""

from __future__ import annotations

from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from mcr_plus.errors import InvalidArgument
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.regions import Boxes, Ints, as_ints
from mcr_plus.plans.language import ALONG_DATA, BlockCut, ModelPlan

End = Literal["input", "output"]
Bounds = tuple[int, int]


class Ends(NamedTuple):
    """Layouts of a tensor: of the ranks that make it, and of those that need it."""

    made: Layout
    needed: Layout


class PlanTensors:
    """Layouts of all tensors of a plan; equal ones are one object.

    Raises:
        InvalidArgument: a part has no elements, or the sizes of a block's input and output do not fit.
    """

    def __init__(self, plan: ModelPlan) -> None:
        self.plan = plan
        self._known: dict[object, Layout] = {}

    def values(self, tensor: int, micro: int, slice_: int) -> Ends:
        """Return the layouts of x[tensor], made by block `tensor - 1` and needed by block `tensor`."""
        return Ends(self.end(tensor - 1, "output", micro, slice_), self.end(tensor, "input", micro, slice_))

    def gradients(self, tensor: int, micro: int, slice_: int) -> Ends:
        """Return the layouts of the gradient of x[tensor], made by block `tensor`."""
        made = self.end(tensor, "input", micro, slice_, gradient=True)
        return Ends(made, self.end(tensor - 1, "output", micro, slice_))

    def end(self, block: int, end: End, micro: int, slice_: int, *, gradient: bool = False) -> Layout:
        """Return the layout of a block's input or output, or of the gradient that it makes of its input."""
        places = self.plan.places[block][micro, slice_]
        low, high = self._whole(block + (end == "output"), micro, slice_)
        shape = tuple((high - low).tolist())
        key = (block, end, gradient, shape, places.tobytes())
        if key not in self._known:
            self._known[key] = self._layout(block, end, shape, places, gradient)
        return self._known[key]

    def rows(self, block: int, micro: int, slice_: int, rank: int) -> Bounds:
        """Return the rows of the whole batch that a rank's part of a task needs."""
        box = self.box(block, "input", micro, slice_, rank)
        low, _ = self._whole(block, micro, slice_)
        return (int(low[0]) + box[0][0], int(low[0]) + box[0][1]) if box else (0, 0)

    def box(self, block: int, end: End, micro: int, slice_: int, rank: int) -> list[Bounds]:
        """Return the box of a rank in a block's input or output, relative to the micro-batch and slice."""
        layout = self.end(block, end, micro, slice_)
        (piece,) = layout.pieces(rank).tolist()
        return list(zip(layout.held.lows[piece].tolist(), layout.held.highs[piece].tolist(), strict=True))

    def share(self, block: int, micro: int, slice_: int, rank: int) -> float:
        """Return the share of a rank in the elements of a block's whole input."""
        sizes = [high - low for low, high in self.box(block, "input", micro, slice_, rank)]
        return float(np.prod(sizes) / np.prod(self.whole_shape(block)))

    def whole_shape(self, tensor: int) -> tuple[int, ...]:
        """Return the shape of x[tensor] of the whole batch."""
        profile = self.plan.profile
        return profile.blocks[tensor - 1].shape if tensor else profile.input

    def _whole(self, tensor: int, micro: int, slice_: int) -> tuple[Ints, Ints]:
        """Return the box of a micro-batch and slice in x[tensor] of the whole batch."""
        shape, plan = self.whole_shape(tensor), self.plan
        low, high = np.zeros(len(shape), np.int64), as_ints(shape)
        for axis, number, parts in (
            ("batch", micro, plan.micro_batches), ("sequence", slice_, plan.slices)
        ):  # fmt: skip
            for dim in self._dims(max(tensor - 1, 0), axis) if parts > 1 else ():
                if dim < len(shape):  # a loss has no dimensions
                    low[dim], high[dim] = self._part(tensor, dim, (0, shape[dim]), parts, number)
                    if axis == "sequence":
                        unit = shape[dim] // plan.slice_ends[-1]
                        ends = (0, *plan.slice_ends)[number : number + 2]
                        low[dim], high[dim] = (unit * end for end in ends)
        return low, high

    def _dims(self, block: int, axis: str) -> tuple[int, ...]:
        axes = self.plan.blocks[block].axes
        return axes[axis].dims if axis in axes else ()

    def _layout(self, block: int, end: End, shape: tuple[int, ...], places: Ints, gradient: bool) -> Layout:
        cuts, name = self.plan.cuts[block], self.plan.blocks[block].name
        boxes: dict[int, list[Bounds]] = {}  # around all of a rank's parts
        columns: dict[int, tuple[int, ...]] = {}
        for at in product(*map(range, places.shape)):
            rank = int(places[at])
            if rank < 0:
                continue
            box: list[Bounds] = [(0, size) for size in shape]
            of_columns = [0]
            for cut, number in zip(cuts, at, strict=True):
                if self.plan.how(block, cut) == "columns":
                    of_columns.append(number)
                    if end == "output":
                        box[-1] = part_of(box[-1], cut.parts, number)
                for dim in self._cut_dims(block, cut):
                    if dim < len(box):
                        tensor = block + (end == "output")
                        box[dim] = self._part(tensor, dim, box[dim], cut.parts, number)
            if any(low == high for low, high in box):
                raise InvalidArgument(f"{name} on rank {rank}: a part without elements: {box} of {shape}")
            columns.setdefault(rank, tuple(of_columns))  # its first ones
            pairs = zip(box, boxes.get(rank, box), strict=True)
            boxes[rank] = [(min(one[0], other[0]), max(one[1], other[1])) for one, other in pairs]
        bounds = as_ints(list(boxes.values())).reshape(len(boxes), len(shape), 2)
        held = Boxes(bounds[..., 0], bounds[..., 1])
        owners, addends = list(boxes), np.zeros(len(boxes), np.int64)
        if gradient:
            kinds = sorted(set(columns.values()))
            addends = as_ints([kinds.index(columns[rank]) for rank in owners])
        extents = dict(zip(owners, map(tuple, (held.highs - held.lows).tolist()), strict=True))
        return Layout.placed(
            shape, as_ints(owners), held, np.zeros_like(held.lows), extents, name, addends=addends
        )  # fmt: skip

    def _part(self, tensor: int, dim: int, bounds: Bounds, parts: int, number: int) -> Bounds:
        """Return part `number` of bounds along a dimension, whole items of the model's input."""
        size, given = self.whole_shape(tensor)[dim], self.plan.profile.input
        items = given[dim] if dim < min(len(given), 2) else size
        if size % items:
            name = self.plan.blocks[max(tensor - 1, 0)].name
            raise InvalidArgument(f"{name}: its output has {size} items along dimension {dim}, not {items}")
        unit = size // items
        low, high = part_of((bounds[0] // unit, bounds[1] // unit), parts, number)
        return low * unit, high * unit

    def _cut_dims(self, block: int, cut: BlockCut) -> tuple[int, ...]:
        """Return the dimensions of input and output along which a cut divides both."""
        names = (*cut.axes, *([cut.outside] if cut.outside else []))
        axes = self.plan.blocks[block].axes
        return tuple(dim for name in names if axes[name].how in ALONG_DATA for dim in axes[name].dims[:1])


def part_of(bounds: Bounds, parts: int, number: int) -> Bounds:
    """Return part `number` of a range cut into `parts`, whose sizes differ by at most 1."""
    low, high = bounds
    return low + number * (high - low) // parts, low + (number + 1) * (high - low) // parts
