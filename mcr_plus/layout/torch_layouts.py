"""Layouts of DTensors, and redistribution of a DTensor to any mesh.

A `DeviceMesh` contains ranks of torch.distributed; a layout contains ranks of the job. Both numberings are
the same unless the first group of the backend `mcr` contained only some of torch's ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.errors import InvalidArgument, Unsupported, short
from mcr_plus.job.init import member_of
from mcr_plus.job.process import job
from mcr_plus.layout.layout import Layout, mesh_text
from mcr_plus.layout.redistribute import bound
from mcr_plus.layout.regions import Boxes, Ints, as_ints
from mcr_plus.layout.state import refuse

if TYPE_CHECKING:
    from mcr_plus.communicator.calls import Compress

Order = Sequence[int]
"""Dimensions of a mesh, in the order in which they cut the tensor."""

_REDUCTIONS: Final = {"sum": "P"} | {
    op: f"P({op})" for op in ("avg", "max", "min", "product", "band", "bor", "bxor")
}
_KEPT: Final = 1024  # maximum number of layouts cached per mesh

_known: WeakKeyDictionary[DeviceMesh, dict[Any, Layout]] = WeakKeyDictionary()


def layout_of(tensor: DTensor, mesh: DeviceMesh | None = None) -> Layout:
    """Return the layout of a `DTensor`, see `Layout.of`."""
    if not isinstance(tensor, DTensor):
        raise InvalidArgument(_not_a_dtensor(tensor))
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise InvalidArgument(
            f"mesh: expected a DeviceMesh, got {short(mesh)}; pass the mesh of which {tensor.device_mesh} is "
            "a part, as init_device_mesh returned it"
        )
    if mesh is None or mesh == tensor.device_mesh:
        return layout_of_spec(tensor._spec)
    return _layout_in(mesh, tensor._spec)


def _not_a_dtensor(value: Any) -> str:
    """Return the text of the error for a value without placements, including what to pass instead."""
    if isinstance(value, torch.nn.Module):
        return (
            f"expected a DTensor, got a module ({type(value).__name__}); pass its parameters: "
            "{name: Layout.of(p) for name, p in module.named_parameters()}"
        )
    if not isinstance(value, torch.Tensor):
        return f"expected a DTensor, got {short(value)}; pass a parameter of the model"
    shape = tuple(value.shape)
    return (
        f"expected a DTensor, got a {type(value).__name__} of shape {shape}, which has no mesh: nothing says "
        f"what other ranks hold. Where each of them holds all of it, pass Layout.replicated({shape}, ranks); "
        "where it is a slice, Layout.sharded(shape of the whole, ranks, dim). Parameters of an FSDP2 model "
        "are plain between a forward pass and its backward pass: call model.reshard() first"
    )


def _layout_in(mesh: DeviceMesh, spec: Any) -> Layout:
    """Return the layout on `mesh` of a tensor on a part of `mesh`, replicated over all equal parts."""
    axes = _axes_of(spec.mesh, mesh)
    others = [axis for axis in range(mesh.ndim) if axis not in axes]
    order = getattr(spec, "shard_order", None)
    order = _order(spec.mesh.shape, spec.placements, order)
    if getattr(spec, "use_strided_shard_as_shard_order", None) is not False:
        order = order or decoded(spec.mesh.shape, spec.placements)
    if order is not None:
        order = [*range(len(others)), *(len(others) + axis for axis in order)]
    ranks = job_ranks(mesh).transpose([*others, *axes])
    placements = [*(Replicate() for _ in others), *spec.placements]
    return layout_on(tuple(spec.tensor_meta.shape), ranks, placements, order)


def _axes_of(part: DeviceMesh, mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the dimensions of `mesh` that `part` spans; in the others, it has this rank's coordinates."""
    here = mesh.get_coordinate()
    if here is None:
        raise InvalidArgument(
            f"mesh: rank {dist.get_rank()} is not in {mesh}; make the layout on a rank of the mesh, and send "
            "it by mcr.broadcast_object"
        )
    for axes in itertools.permutations(range(mesh.ndim), part.ndim):
        others = [axis for axis in range(mesh.ndim) if axis not in axes]
        along = mesh.mesh.permute([*others, *axes])[tuple(here[axis] for axis in others)]
        if along.shape == part.mesh.shape and bool((along == part.mesh).all()):
            return axes
    raise InvalidArgument(
        f"mesh: {part}, the mesh of the tensor, is not a part of {mesh} along its dimensions; pass the mesh "
        "from which it was taken (mesh['dp']), or no mesh"
    )


def layout_of_spec(spec: Any) -> Layout:
    """Return the layout of a `DTensorSpec`."""
    order = getattr(spec, "shard_order", None)
    as_order = getattr(spec, "use_strided_shard_as_shard_order", None) is not False
    return _layout_on(spec.mesh, tuple(spec.tensor_meta.shape), tuple(spec.placements), order, as_order)


def target_on(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Layout:
    """Return DTensor's layout of a tensor of this shape on a mesh with these placements."""
    return _layout_on(mesh, tuple(shape), tuple(placements), None, True)


def _layout_on(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    shard_order: Any,
    as_order: bool,
) -> Layout:
    """Return `layout_on`, cached by mesh. `shard_order`, `as_order`: properties of the `DTensorSpec`."""
    known = _known.setdefault(mesh, {})  # keys and values must not keep the mesh alive
    key = (shape, placements, shard_order, as_order, _numbering())
    layout = known.get(key)
    if layout is None:
        order = _order(mesh.shape, placements, shard_order)
        if as_order:
            order = order or decoded(mesh.shape, placements)
        if len(known) >= _KEPT:
            known.clear()
        layout = known[key] = layout_on(shape, job_ranks(mesh), placements, order)
    return layout


def layout_on(
    shape: Sequence[int], ranks: Ints, placements: Sequence[Placement], order: Order | None = None
) -> Layout:
    """Return the layout of a tensor on a mesh of ranks of the job.

    `order`: order in which the mesh dimensions cut the tensor; None: mesh order, strided as in torch.

    Raises:
        Unsupported: a placement is not one of torch's own, or has a reduce op that torch does not have.
    """
    words = [_word(placement) for placement in placements]
    name = f"{','.join(words)} @{mesh_text(ranks)}"
    if order is not None:
        plain = [word.partition("/")[0] for word in words]
        if list(order) != list(range(ranks.ndim)):
            name += f" cut by {','.join(map(str, order))}"
        layout = Layout.mesh(shape, ranks.transpose(order), [plain[axis] for axis in order])
        return replace(layout, name=name)
    if not any("/" in word for word in words):
        return Layout.mesh(shape, ranks, words)
    return _strided(tuple(shape), ranks, placements, words, name)


def decoded(sizes: Sequence[int], placements: Sequence[Placement]) -> Order | None:
    """Return the order of cuts encoded by strided shards; None if there are none, or they encode no order.

    A strided shard with split factor f is cut after the mesh dimensions to its right, whose sizes multiply to
    f.
    """
    if not any(type(placement) is _StridedShard for placement in placements):
        return None
    cuts: dict[int, list[int]] = {}
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if type(placement) is Shard or type(placement) is _StridedShard:
            before = cuts.setdefault(placement.dim, [])
            factor = int(getattr(placement, "split_factor", 1))
            products = list(itertools.accumulate((sizes[each] for each in before), int.__mul__, initial=1))
            if factor not in products:
                return None
            before.insert(products.index(factor), axis)
    return _with_the_rest(itertools.chain.from_iterable(cuts.values()), len(placements))


def _order(sizes: Sequence[int], placements: Sequence[Placement], entries: Any) -> Order | None:
    """Return the order of cuts of a `shard_order`; None if it is the order of the mesh dimensions."""
    if not entries or any(type(placement) is _StridedShard for placement in placements):
        return None
    order = _with_the_rest((axis for entry in entries for axis in entry.mesh_dims), len(sizes))
    in_order = all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in entries)
    return None if in_order else order


def _with_the_rest(cuts: Iterator[int], dims: int) -> Order:
    first = list(cuts)
    return [*first, *(axis for axis in range(dims) if axis not in first)]


def _word(placement: Placement) -> str:
    """Return a placement as text for `Layout.mesh`; `S0/2` for a strided shard with split factor 2."""
    if type(placement) is Replicate:
        return "R"
    if type(placement) is Shard:
        return f"S{placement.dim}"
    if type(placement) is _StridedShard:
        return f"S{placement.dim}/{int(placement.split_factor)}"
    if type(placement) is Partial and placement.reduce_op in _REDUCTIONS:
        return _REDUCTIONS[placement.reduce_op]
    raise Unsupported(
        f"placement {placement!r} of a DTensor; known: Replicate, Shard, and Partial with "
        f"{', '.join(_REDUCTIONS)}; tensor.redistribute(placements=…) gives it one of these"
    )


def _strided(
    shape: tuple[int, ...], ranks: Ints, placements: Sequence[Placement], words: Sequence[str], name: str
) -> Layout:
    """Return a layout with strided shards, in which a rank may hold several boxes.

    torch itself splits a tensor of indices, so the result is correct for every torch version.
    """
    plain = Layout.mesh(shape, ranks, [word if word[0] == "P" else "R" for word in words])
    addend_of = dict(zip(plain.owners.tolist(), plain.addends.tolist(), strict=True))
    parts = [_parts(size, dim, ranks.shape, placements) for dim, size in enumerate(shape)]
    locals_: dict[int, tuple[int, ...]] = {}
    owners: list[int] = []
    bounds: list[tuple[tuple[int, int, int], ...]] = []
    for place, rank in np.ndenumerate(ranks):
        mine = [part[tuple(place[axis] for axis in axes)] for axes, part in parts]
        locals_[int(rank)] = tuple(sum(high - low for low, high, _ in found) for found in mine)
        boxes = list(itertools.product(*mine))
        owners += [int(rank)] * len(boxes)
        bounds += boxes
    lows, highs, places = (as_ints(side) for side in np.moveaxis(_array(bounds, len(shape)), 2, 0))
    addends = as_ints([addend_of.get(owner, 0) for owner in owners])
    return Layout.placed(
        tuple(shape),
        as_ints(owners),
        Boxes(lows, highs),
        places,
        locals_,
        name,
        True,
        addends=addends,
        op=plain.op,
    )


def _array(bounds: list[tuple[tuple[int, int, int], ...]], dims: int) -> Ints:
    return as_ints(bounds).reshape(len(bounds), dims, 3)


_Run = tuple[int, int, int]  # low, high, and the offset in the local tensor


def _parts(
    size: int, dim: int, mesh: tuple[int, ...], placements: Sequence[Placement]
) -> tuple[list[int], Mapping[tuple[int, ...], list[_Run]]]:
    """Return the mesh dimensions that cut a tensor dimension, and the runs of indices at each coordinate."""
    axes = [
        axis
        for axis, placement in enumerate(placements)
        if isinstance(placement, Shard | _StridedShard) and placement.dim == dim
    ]
    held: dict[tuple[int, ...], torch.Tensor] = {
        (): torch.arange(size, device="cpu").view([1] * dim + [size])
    }
    for axis in axes:
        held = {
            (*place, index): part
            for place, whole in held.items()
            for index, part in enumerate(_split(whole, dim, mesh[axis], placements[axis]))
        }
    return axes, {place: _runs(part.flatten().numpy()) for place, part in held.items()}


def _split(whole: torch.Tensor, dim: int, number: int, placement: Any) -> list[torch.Tensor]:
    try:
        parts: list[torch.Tensor]
        parts, _ = placement._split_tensor(whole, number, with_padding=False, contiguous=False)
    except AssertionError as error:  # torch 2.6 has no strided shards of different sizes
        raise Unsupported(
            f"{placement!r} of {whole.size(dim)} elements in {number} shards: torch {torch.__version__} "
            "has even strided shards only"
        ) from error
    return parts


def _runs(indices: Ints) -> list[_Run]:
    """Group indices into runs of consecutive indices."""
    if not len(indices):
        return []
    (steps,) = (np.diff(indices) != 1).nonzero()
    begins = [0, *(steps + 1).tolist()]
    ends = [*begins[1:], len(indices)]
    return [
        (int(indices[begin]), int(indices[end - 1]) + 1, begin)
        for begin, end in zip(begins, ends, strict=True)
    ]


# -- ranks ----------------------------------------------------------------------------------------


def job_ranks(mesh: DeviceMesh) -> Ints:
    """Return the ranks of a mesh in the numbering of the job.

    Raises:
        Unsupported: a rank is not in the job.
    """
    ranks = mesh.mesh.detach().cpu().numpy().astype(np.int64)
    known = _numbering()
    if known is None:
        return ranks
    numbers = {torch_rank: rank for rank, torch_rank in enumerate(known)}
    outside = [rank for rank in ranks.ravel().tolist() if rank not in numbers]
    if outside:
        raise Unsupported(
            f"mesh {short(ranks.tolist())}: rank {outside[0]} of torch.distributed is not in the job of "
            f"ranks {list(known)}"
        )
    return as_ints([numbers[rank] for rank in ranks.ravel().tolist()]).reshape(ranks.shape)


def _numbering() -> tuple[int, ...] | None:
    """Return each job rank's number in torch.distributed; None if the numberings are equal."""
    return None if job.runtime is None or job.runtime.closed else job.runtime.torch_ranks


def check_ranks(comm: Communicator) -> None:
    """Raise `Unsupported` on all ranks of a group if torch.distributed numbers any of them differently.

    The first call of a group is collective.
    """
    alike: bool | None = comm.attached.get("torch has the same ranks")
    if alike is None:
        rank, known = comm.ranks[comm.rank], _numbering()
        expected = rank if known is None else known[rank]
        differs = torch.tensor([int(dist.is_initialized() and dist.get_rank() != expected)], device="cpu")
        comm.all_reduce(differs, "MAX", compress=False, tag="redistribute")
        alike = comm.attached["torch has the same ranks"] = not differs.item()
    if not alike:
        raise Unsupported(
            "torch.distributed numbers ranks differently from the job that mcr.init has joined; use the "
            "same launcher settings for both"
        )


# -- DTensors -------------------------------------------------------------------------------------


def redistribute_dtensor(
    x: DTensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    group: Communicator | None,
    async_op: bool,
    tag: str | None,
    compress: Compress,
) -> Any:
    """Redistribute a DTensor to a mesh, possibly with other ranks; see `mcr.redistribute`.

    Ranks outside of the mesh also pass and receive a DTensor, with an empty local tensor, as in torch.
    """
    comm = member_of(group)
    if not isinstance(x, DTensor):  # before any collective: other ranks may have passed layouts
        if not isinstance(mesh, DeviceMesh):
            what = f"expected a Layout, or the mesh of the result of a DTensor, got {short(mesh)}"
            refuse(comm, InvalidArgument(f"source: {what}"))
        error = InvalidArgument(
            f"x: expected a DTensor, as the target is a mesh and placements, got {type(x).__name__}; ranks "
            "outside of its mesh pass a DTensor, too"
        )
        refuse(comm, error)
    check_ranks(comm)
    try:
        found = _pair_of(x, mesh, placements)
    except (Unsupported, InvalidArgument) as error:
        refuse(comm, error)
    source, target, target_placements = found
    rank = comm.ranks[comm.rank]
    local = local_tensor(x._local_tensor, source.local_shape(rank))
    move = bound(source, target, comm, tag, compress, x.dtype)
    if async_op:
        work = move.start({"": local})
        work.outputs = {"": _wrapped(work.outputs[""], x, mesh, target_placements)}
        return work
    return _wrapped(move({"": local})[""], x, mesh, target_placements)


def _pair_of(
    x: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[Layout, Layout, tuple[Placement, ...]]:
    """Return the layouts of a DTensor and of the result, and the placements of the result."""
    if not isinstance(mesh, DeviceMesh):
        raise InvalidArgument(f"expected a Layout or a DeviceMesh, got {short(mesh)}")
    if x.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            "the DTensor requires gradients; pass tensor.detach(), or call redistribute under torch.no_grad()"
        )
    target_placements = normalized(placements, x.ndim, mesh.ndim)
    return layout_of(x), target_on(x.shape, mesh, target_placements), target_placements


def normalized(placements: Sequence[Placement], dims: int, mesh_dims: int) -> tuple[Placement, ...]:
    """Return placements without negative dimensions.

    Raises:
        InvalidArgument: the number of placements is not that of the mesh dimensions, or the tensor lacks a
            dimension that a placement names.
    """
    if not isinstance(placements, Sequence) or len(placements) != mesh_dims:
        raise InvalidArgument(
            f"placements: expected {mesh_dims}, one for each dimension of the mesh, got {short(placements)}"
        )
    found = list(placements)
    for at, placement in enumerate(found):
        if isinstance(placement, Shard | _StridedShard):
            if not -dims <= placement.dim < dims:
                raise InvalidArgument(f"placements[{at}]: {placement} of a tensor of {dims} dimensions")
            if placement.dim < 0:
                factor = getattr(placement, "split_factor", None)
                dim = placement.dim + dims
                found[at] = Shard(dim) if factor is None else _StridedShard(dim, split_factor=factor)
    return tuple(found)


def local_tensor(local: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor | None:
    """Return the local tensor of a DTensor, complete and detached; None if this rank has no part."""
    if shape is None:
        return None
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    local = local.detach()
    # Some empty shards in torch have only one dimension.
    return local.view(shape) if local.numel() == 0 and 0 in shape else local


def _wrapped(
    local: torch.Tensor | None, like: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """Return a DTensor with the local tensor of a result."""
    if local is None:
        local = torch.empty(0, dtype=like.dtype, device=like._local_tensor.device)
    shape = torch.Size(like.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
