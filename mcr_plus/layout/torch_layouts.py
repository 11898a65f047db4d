"""Layouts of `DTensor`s, and `mcr.redistribute` between any two of them.

Shards are those that torch's own placements make of an index, so each version's semantics hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from mcr_plus.core.work import JointWork, Work
from mcr_plus.errors import InvalidArgument, Unsupported, short
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.regions import Boxes, Ints

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from mcr_plus.communicator.calls import Compress
    from mcr_plus.communicator.communicator import Communicator

_REDUCE: Final = {"sum": "P", "avg": "P(avg)", "max": "P(max)", "min": "P(min)", "product": "P(product)"}


class DTensorWork(JointWork):
    """The handle of an asynchronous redistribution of a `DTensor`; `output` is complete once it is done."""

    __slots__ = ("output",)

    output: DTensor


def layout_of(tensor: Any) -> Layout:
    """See `Layout.of`."""
    if not isinstance(tensor, DTensor):
        raise InvalidArgument(f"expected a DTensor, got {type(tensor).__name__}")
    spec = tensor._spec
    order = getattr(spec, "shard_order", None)
    return layout_on(tuple(tensor.shape), tensor.device_mesh, tensor.placements, order)


def layout_on(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement], order: Any = None
) -> Layout:
    """The layout of a tensor with placements on a mesh, whose ranks are those of the job.

    `order`: which dimensions of the mesh shard each one of the tensor first, as `DTensorSpec.shard_order`;
    None: from left to right.

    Raises:
        InvalidArgument: there are not as many placements as dimensions of the mesh.
        Unsupported: a placement is none of torch's own, or a partial one has another reduce op.
    """
    ranks = mesh.mesh.cpu().numpy().astype(np.int64)
    if len(placements) != ranks.ndim:
        raise InvalidArgument(
            f"placements: expected {ranks.ndim}, one for each dimension of the mesh, got {short(list(placements))}"
        )
    names = [_name(placement, len(shape)) for placement in placements]
    axes = _axes(order, ranks.ndim)
    if axes == list(range(ranks.ndim)) and all(name is not None for name in names):
        return Layout.mesh(shape, ranks, [str(name) for name in names])
    return _by_index(shape, ranks, placements, names, axes)


def _name(placement: Placement, dims: int) -> str | None:
    """A placement as `Layout.mesh` takes it; None for shards of another kind than `Shard`."""
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Partial):
        if type(placement) is not Partial or placement.reduce_op not in _REDUCE:
            raise Unsupported(f"placement {placement}; known reduce ops: {', '.join(_REDUCE)}")
        return _REDUCE[placement.reduce_op]
    if type(placement) is Shard:
        return f"S{placement.dim % max(dims, 1)}"
    if hasattr(placement, "split_factor"):
        return None
    raise Unsupported(f"placement {placement}; known: Replicate, Shard, _StridedShard, Partial")


def _axes(order: Any, count: int) -> list[int]:
    """The dimensions of a mesh in the order in which they shard; those of different tensor dimensions are
    apart."""
    listed = [axis for entry in order or () for axis in entry.mesh_dims]
    if all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in order or ()):
        return list(range(count))
    return [*listed, *(axis for axis in range(count) if axis not in listed)]


def _by_index(
    shape: tuple[int, ...],
    ranks: Ints,
    placements: Sequence[Placement],
    names: Sequence[str | None],
    axes: Sequence[int],
) -> Layout:
    """A layout from the indices that torch's placements leave on each rank; local tensors may be of several
    boxes."""
    addends = Layout.mesh(
        (1,), ranks, [name if name is not None and name[0] == "P" else "R" for name in names]
    )
    found: list[tuple[int, int, Boxes, Ints, tuple[int, ...]]] = []
    for place in np.ndindex(*ranks.shape):
        rank = int(ranks[place])
        index = [torch.arange(size) for size in shape]
        for axis in axes:
            placement = placements[axis]
            if names[axis] is None or str(names[axis]).startswith("S"):
                dim = placement.dim % len(shape)  # type: ignore[attr-defined]
                line = index[dim].view([-1 if at == dim else 1 for at in range(len(shape))])
                parts, _ = placement._split_tensor(  # type: ignore[attr-defined]
                    line, ranks.shape[axis], with_padding=False, contiguous=False
                )
                index[dim] = parts[place[axis]].reshape(-1)
        boxes, places = _boxes([each.numpy() for each in index])
        addend = int(addends.addends[addends.pieces(rank)[0]])
        found.append((rank, addend, boxes, places, tuple(len(each) for each in index)))
    text = f"{','.join(map(str, placements))} @{'x'.join(map(str, ranks.shape))}"
    return Layout.placed(shape, found, addends.op, text)


def _boxes(index: Sequence[Ints]) -> tuple[Boxes, Ints]:
    """The boxes of which a product of indices consists, and where each begins in the local tensor."""
    spans = []
    for each in index:
        breaks = np.flatnonzero(np.diff(each) != 1) + 1
        firsts = np.append(0, breaks) if len(each) else np.zeros(0, np.int64)
        lasts = np.append(breaks, len(each)) if len(each) else firsts
        spans.append(
            [(int(each[a]), int(each[b - 1]) + 1, int(a)) for a, b in zip(firsts, lasts, strict=True)]
        )
    grids = [list(combination) for combination in np.ndindex(*map(len, spans))]
    chosen = [[spans[dim][at] for dim, at in enumerate(each)] for each in grids]
    rows = np.array(chosen, np.int64).reshape(len(chosen), len(index), 3)
    return Boxes(rows[:, :, 0], rows[:, :, 1]), rows[:, :, 2]


def redistribute_dtensor(
    x: Any,
    mesh: Any,
    placements: Any,
    *,
    group: Communicator | None,
    async_op: bool,
    tag: str | None,
    compress: Compress,
) -> DTensor | Work:
    """See `mcr.redistribute`: a `DTensor` on another mesh, or with other placements."""
    from torch.distributed.device_mesh import DeviceMesh

    from mcr_plus.layout.redistribute import bound

    if not isinstance(mesh, DeviceMesh):
        raise InvalidArgument(
            f"source: expected a Layout, or the mesh of the result for a DTensor; got {short(mesh)}"
        )
    source = layout_of(x)
    shape = tuple(x.shape)
    target = layout_on(shape, mesh, placements)
    move = bound(source, target, group, tag, compress)
    local = x.to_local() if move.rank in source.locals else None
    work = move.start({"": local})
    output = work.output
    if output is None:
        output = torch.empty(0, dtype=x.dtype)
    strides = tuple(torch.empty(shape, device="meta").stride())
    result = DTensor.from_local(output, mesh, placements, run_check=False, shape=x.shape, stride=strides)
    if not async_op:
        work.wait()
        return result
    handle = DTensorWork([work], "redistribute", nbytes=work.nbytes, tag=tag)
    handle.output = result
    return handle
