"""Replace DTensor's redistributions by plans that move fewer bytes, and compute DTensor's own volumes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache, partial
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.errors import InvalidArgument, Unsupported
from mcr_plus.job.init import current, member_of
from mcr_plus.job.process import job
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.program import bound
from mcr_plus.layout.regions import Ints
from mcr_plus.layout.state import Redistribution
from mcr_plus.layout.torch_layouts import (
    check_ranks,
    decoded,
    job_ranks,
    layout_of_spec,
    layout_on,
    local_tensor,
)

_FUNCTION: Final = "redistribute_local_tensor"
_OPTIMIZE: Final = "_optimize_transform_infos"
"""Function of newer versions of torch: merges collectives along several dimensions of a flattened mesh."""
_TAKES: Final = ("local_tensor", "current_spec", "target_spec")
_OPTIONS: Final = {"async_op", "is_backward", "use_graph_based_transform", "is_explicit"}
"""Keywords of torch 2.6 to 2.15; none changes the result if the target is not partial."""
_UNKNOWN: Final = (
    AttributeError, TypeError, ValueError, RuntimeError, AssertionError, InvalidArgument, Unsupported,
)  # fmt: skip
"""Errors of torch's internals for unsupported cases, or for unexpected internals."""


class Volume(NamedTuple):
    """Number of received elements: `total` over all ranks, and `most`, the maximum of a rank."""

    total: int
    most: int


def dtensor_volume(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    source: Sequence[str | Placement],
    target: Sequence[str | Placement],
) -> Volume | None:
    """Return the volume of DTensor's own plan between two layouts on one mesh, without communication.

    Collectives count as ideal rings without padding. A rank receives the elements that it lacks in a gather,
    n - 1 times its part in a reduce_scatter over n ranks, and 2 (n - 1) / n times the tensor in an
    all_reduce.

    Args:
        shape: the shape of the global tensor.
        mesh_shape: the shape of the mesh.
        source, target: placements, of torch or as in `Layout.mesh`: `R`, `S0`, `P`, `P(max)`.

    Returns:
        Elements that all ranks receive in total, and elements that the fullest rank receives; None if this
        version of torch does not expose its plan, or does not support the redistribution.

    Raises:
        InvalidArgument: a placement is unknown, or their number differs from the mesh's number of dimensions.

    Example:
        ```python
        from mcr_plus import dtensor

        assert dtensor.dtensor_volume((8, 8), (4,), ["S0"], ["R"]) == (4 * 48, 48)
        ```
    """
    before, after = ([_placement(each) for each in side] for side in (source, target))
    if not len(before) == len(after) == len(mesh_shape):
        raise InvalidArgument(
            f"placements: expected {len(mesh_shape)}, one for each dimension of the mesh, "
            f"got {len(before)} and {len(after)}"
        )
    size = math.prod(mesh_shape)
    try:
        mesh = _mesh_without_a_job(torch.arange(size, device="cpu").view(*mesh_shape))
        meta = TensorMeta(torch.Size(shape), torch.empty(*shape, device="meta").stride(), torch.float32)
        current_spec, target_spec = (DTensorSpec(mesh, tuple(side), meta) for side in (before, after))
        return _volume_of_plan(current_spec, target_spec, np.arange(size).reshape(*mesh_shape))
    except _UNKNOWN:
        return None


@contextmanager
def planned() -> Iterator[None]:
    """Use plans of mcr_plus for DTensor's redistributions within the block if they move fewer bytes.

    This applies to `DTensor.redistribute` and its backward pass, and to redistributions inside operators. The
    plans for a pair of layouts are compared once, first by the largest volume that a rank receives or sends,
    then by the volume that all ranks together receive; DTensor's own plan is used unless it moves more
    elements, or shards are strided. It is also used for partial targets, in traced code, and for placements
    of other libraries. All ranks of a mesh must enter the block. Results equal DTensor's with two exceptions.
    Sums of floats are added in another order. Where DTensor loses or reorders rows (uneven shards gathered on
    a flattened mesh), shards are gathered along one mesh dimension after another.

    Raises:
        NotInitialized: there is no job, neither of `mcr.init` nor of the backend `mcr`.
        Unsupported: the internals of this version of torch are not supported.

    Example:
        ```python
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        from mcr_plus import dtensor

        if torch.distributed.is_initialized():  # by init_process_group("mcr")
            mesh = init_device_mesh("cpu", (2, mcr.get_world_size() // 2))
            x = distribute_tensor(torch.ones(8, 8), mesh, [Replicate(), Shard(0)])
            with dtensor.planned():
                y = x.redistribute(placements=[Shard(1), Shard(1)])
        ```
    """
    current()
    original: Any = getattr(_redistribute, _FUNCTION, None)
    if isinstance(original, _Planned):  # a block inside another
        yield
        return
    _check_internals(original)
    places = [module for module in (_redistribute, _dispatch, _api) if hasattr(module, _FUNCTION)]
    optimize = getattr(_redistribute, _OPTIMIZE, None)
    _set(places, _FUNCTION, _Planned(original))
    if optimize is not None:
        _set([_redistribute], _OPTIMIZE, partial(_merged, optimize))
    try:
        yield
    finally:
        _set(places, _FUNCTION, original)
        if optimize is not None:
            _set([_redistribute], _OPTIMIZE, optimize)


def _set(places: Sequence[ModuleType], name: str, function: Any) -> None:
    for module in places:
        setattr(module, name, function)


def _merged(optimize: Callable[..., Sequence[Any]], infos: Sequence[Any], *others: Any) -> Sequence[Any]:
    """Return torch's steps with collectives merged on flattened meshes, or unmerged if rows would be lost.

    torch pads the shards of a merged gather as if the flattened mesh had cut the dimension at once; uneven
    shards of nested cuts have other sizes (pytorch#194457). Equal on all ranks of the gather.
    """
    merged = optimize(infos, *others)
    for info in merged:
        before, _ = info.src_dst_placements
        is_gather = hasattr(info, "original_mesh_dims") and isinstance(before, Shard | _StridedShard)
        if is_gather and info.logical_shape[before.dim] % info.mesh.size():
            return infos
    return merged


def _check_internals(function: Any) -> None:
    """Raise `Unsupported` if torch's internals differ from those of the supported versions."""
    problem = None
    shared = getattr(_dispatch, _FUNCTION, None) is function
    if function is None or not shared:
        problem = f"operators do not redistribute by _redistribute.{_FUNCTION}"
    elif not hasattr(_redistribute, "_gen_transform_infos"):
        problem = "its plans are not made by _gen_transform_infos"
    else:
        parameters = _parameters(function)
        if tuple(parameters)[:3] != _TAKES or not set(parameters) <= {*_TAKES, *_OPTIONS}:
            problem = f"{_FUNCTION} takes {', '.join(parameters)}"
        elif not {"mesh", "placements", "tensor_meta"} <= set(DTensorSpec.__dataclass_fields__):
            problem = "DTensorSpec has other fields"
    if problem is not None:
        raise Unsupported(f"planned: torch {torch.__version__} is not supported: {problem}")


@cache
def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


# -- replacement of torch's function --------------------------------------------------------------


class _Choices:
    """Choices of a job: redistributions by pair of specs (None: DTensor's plan), and groups of meshes."""

    def __init__(self) -> None:
        self.moves: dict[DeviceMesh, dict[tuple[Any, Any], Redistribution | None]] = {}
        self.groups: dict[tuple[int, ...], Communicator] = {}


_MOST: Final = 1024  # maximum number of pairs of specs on a mesh whose plans are kept


class _Planned:
    """Replacement for `redistribute_local_tensor` that first tries a plan of mcr_plus."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(
        self, local_tensor: torch.Tensor, current_spec: Any, target_spec: Any, **options: Any
    ) -> torch.Tensor:
        """Redistribute as torch's function does, but by a plan of mcr_plus if the plan moves fewer bytes."""
        if self._may_plan(local_tensor, current_spec, target_spec):
            found = _moved(local_tensor, current_spec, target_spec)
            if found is not None:
                return found
        _refuse_strided(current_spec, target_spec)
        result: torch.Tensor = self.original(local_tensor, current_spec, target_spec, **options)
        return result

    def _may_plan(self, local: torch.Tensor, current_spec: Any, target_spec: Any) -> bool:
        """Return True if a plan of mcr_plus is applicable; the same on all ranks of the mesh."""
        if type(local) not in (torch.Tensor, torch.nn.Parameter, AsyncCollectiveTensor):
            return False
        if torch.compiler.is_compiling() or job.runtime is None or job.runtime.closed:
            return False
        if current_spec.mesh != target_spec.mesh or current_spec.placements == target_spec.placements:
            return False
        return (
            current_spec.tensor_meta is not None
            and current_spec.mesh.get_coordinate() is not None
            and not any(isinstance(each, Partial) for each in target_spec.placements)
        )


def _refuse_strided(current_spec: Any, target_spec: Any) -> None:
    """Raise `Unsupported` if DTensor's plan would misread strided shards; equal on all ranks."""
    before, after = current_spec.placements, target_spec.placements
    if before == after or not any(type(each) is _StridedShard for each in (*before, *after)):
        return
    sizes = current_spec.mesh.shape
    strided = [each for each in (before, after) if any(type(one) is _StridedShard for one in each)]
    if any(decoded(sizes, each) is None for each in strided):
        raise Unsupported(
            f"planned: from {before} to {after}: strided shards that encode no order of cuts, which "
            "DTensor's own plan may take for others; redistribute to Replicate first"
        )


def _moved(local: torch.Tensor, current_spec: Any, target_spec: Any) -> torch.Tensor | None:
    """Redistribute by a plan of mcr_plus; return the result, or None if DTensor's plan is as good."""
    choices: _Choices = current().attached.setdefault("DTensor", _Choices())
    moves = choices.moves.setdefault(current_spec.mesh, {})  # the same on all ranks of the mesh
    key = (current_spec, target_spec)
    if key not in moves:
        if len(moves) >= _MOST:
            moves.clear()
        moves[key] = _choose(choices, local, current_spec, target_spec)
    move = moves[key]
    if move is None:
        return None
    with torch.no_grad():
        return move({"": local_tensor(local, move.shape_of_source(""))})[""]


def _choose(
    choices: _Choices, local: torch.Tensor, current_spec: Any, target_spec: Any
) -> Redistribution | None:
    """Return a redistribution if DTensor's plan moves more, or may be wrong; otherwise None.

    The choice is the same on all ranks of the mesh. Collective over them, unless the lower bound shows that
    DTensor's plan is as good. DTensor misreads shards if a strided shard encodes no order of cuts, and on
    meshes whose ranks are not in ascending order.
    """
    try:
        # The target of an operator may lack metadata. Keep its order of shards.
        target_spec = copy(target_spec)
        target_spec.tensor_meta = current_spec.tensor_meta
        source, target = layout_of_spec(current_spec), layout_of_spec(target_spec)
        if _rounds_between(current_spec.placements, local.dtype):
            return None
        ranks = job_ranks(current_spec.mesh)
        strided = any(
            type(each) is _StridedShard for each in (*current_spec.placements, *target_spec.placements)
        )
        # torch's groups are in the order of ranks, so its gathers misplace rows on other meshes.
        mesh = current_spec.mesh.mesh
        permuted = any(bool((mesh.diff(dim=dim) < 0).any()) for dim in range(mesh.ndim))
        theirs = None if strided or permuted else _volume_of_plan(current_spec, target_spec, ranks)
    except _UNKNOWN:  # raised on all ranks alike
        return None
    if theirs is None and not (strided or permuted):
        return None
    least = bound(source, target)
    if theirs is not None and (least.fullest, least.total) >= theirs[::-1]:
        return None
    comm = _group(choices, tuple(ranks.ravel().tolist()))
    check_ranks(comm)
    move = Redistribution({"": (source, target)}, memory=None, group=comm)
    fits = local_tensor(local, source.local_shape(move.rank))
    wrong = None
    if fits is None or tuple(fits.shape) != source.local_shape(move.rank):
        wrong = f"the local tensor has shape {list(local.shape)}"
    try:
        (plan,) = move.prepare((local.dtype,), wrong, local.device)
    except (InvalidArgument, Unsupported):  # raised on all ranks alike
        return None
    if theirs is None:
        return move
    busiest = 0
    for sent, received, _, far_sent, far_received, _ in plan.loads[0].tolist():
        busiest += max(sent + far_sent, received + far_received)
    # Without sums, all ranks together receive no more than the bound.
    ours = Volume(theirs.total if source.is_partial else least.total, -(-busiest // local.dtype.itemsize))
    return move if ours[::-1] < theirs[::-1] else None


def _rounds_between(placements: Sequence[Placement], dtype: torch.dtype) -> bool:
    """Return True for integer means over several mesh dimensions, which DTensor rounds after each one."""
    means = sum(isinstance(each, Partial) and each.reduce_op == "avg" for each in placements)
    return means > 1 and not (dtype.is_floating_point or dtype.is_complex)


def _group(choices: _Choices, ranks: tuple[int, ...]) -> Communicator:
    """Return the group of a mesh's ranks. The first call opens the group, collectively over these ranks."""
    world = member_of(None)
    if sorted(ranks) == sorted(world.ranks):
        return world
    group = choices.groups.get(ranks)
    if group is None:
        name = f"layout/{','.join(map(str, ranks))}"
        group = choices.groups[ranks] = current().open_group(name, ranks)
    return group


# -- DTensor's volume -----------------------------------------------------------------------------


def _volume_of_plan(current_spec: Any, target_spec: Any, ranks: Ints) -> Volume | None:
    """Return the volume of DTensor's plan; None if the plan's form is unknown. `ranks`: the mesh."""
    infos = _redistribute._gen_transform_infos(current_spec, target_spec)
    mesh = current_spec.mesh
    optimize = getattr(_redistribute, "_optimize_transform_infos", None)
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    if optimize is not None and getattr(root, "_flatten_mapping", None):
        infos = optimize(infos, mesh, current_spec.placements, target_spec.placements)
    shape = tuple(current_spec.tensor_meta.shape)
    sizes = mesh.shape
    placements = [_without_order(each) for each in current_spec.placements]
    received = np.zeros(ranks.size, np.int64)
    for info in infos:
        axes = getattr(info, "original_mesh_dims", (info.mesh_dim,))
        number = math.prod(sizes[axis] for axis in axes)
        before, after = info.src_dst_placements
        if number == 1 or before == after:
            continue
        if isinstance(after, Partial) and not before.is_replicate():
            return None  # torch raises an error at this step
        held = _volumes(shape, ranks, placements)
        kept = list(placements)
        for axis in axes:
            placements[axis] = after
        now = _volumes(shape, ranks, placements)
        if isinstance(before, Partial):
            if type(after) is Shard:
                received += (number - 1) * now
            else:
                received += -(-2 * (number - 1) * held // number)
        elif before.is_replicate():
            continue
        elif type(before) is Shard and type(after) is Shard:
            received += now - _common(shape, ranks, kept, placements)
        else:  # shards are gathered, and possibly cut again
            for axis in axes:
                kept[axis] = Replicate()
            received += _volumes(shape, ranks, kept) - held
    return Volume(int(received.sum()), int(received.max(initial=0)))


def _without_order(placement: Placement) -> Placement:
    """Replace strided shards by plain shards; sizes are equal unless shards are uneven."""
    return placement if getattr(placement, "split_factor", None) is None else Shard(placement.dim)  # type: ignore[attr-defined]


def _state(shape: tuple[int, ...], ranks: Ints, placements: Sequence[Placement]) -> Layout:
    return layout_on(
        shape, ranks, [Replicate() if isinstance(each, Partial) else each for each in placements]
    )


def _volumes(shape: tuple[int, ...], ranks: Ints, placements: Sequence[Placement]) -> Ints:
    """Return the elements of each rank's local tensor, in the order of the mesh."""
    layout = _state(shape, ranks, placements)
    return np.array([math.prod(layout.locals[rank]) for rank in ranks.ravel().tolist()], np.int64)


def _common(shape: tuple[int, ...], ranks: Ints, a: Sequence[Placement], b: Sequence[Placement]) -> Ints:
    """Return the number of elements that each rank holds in both layouts; 0 unless each has one box."""
    found = []
    one, other = (_state(shape, ranks, each) for each in (a, b))
    for rank in ranks.ravel().tolist():
        mine, theirs = one.pieces(rank), other.pieces(rank)
        if len(mine) == len(theirs) == 1:
            low = np.maximum(one.held.lows[mine[0]], other.held.lows[theirs[0]])
            high = np.minimum(one.held.highs[mine[0]], other.held.highs[theirs[0]])
            found.append(int(np.maximum(high - low, 0).prod()))
        else:
            found.append(0)
    return np.array(found, np.int64)


def _mesh_without_a_job(ranks: torch.Tensor) -> DeviceMesh:
    """Return a mesh from the view of its first rank, without a process group."""
    alone: dict[str, Any] = {"_init_backend": False}
    if "_rank" in inspect.signature(DeviceMesh.__init__).parameters:
        return DeviceMesh("cpu", ranks, **alone, _rank=0)
    mesh: Any = DeviceMesh("xla", ranks, **alone)  # with other types, torch 2.6 needs a process group
    mesh._coordinate_on_dim = [0] * ranks.ndim
    return mesh  # type: ignore[no-any-return]


def _placement(text: str | Placement) -> Placement:
    if not isinstance(text, str):
        return text
    text = text.strip()
    if text == "R":
        return Replicate()
    if text[:1] == "S" and text[1:].isdigit():
        return Shard(int(text[1:]))
    if text == "P":
        return Partial()
    if text[:2] == "P(" and text[-1:] == ")":
        return Partial(text[2:-1])
    raise InvalidArgument(f"unknown placement {text!r}; known: R, S0, S1, …, P, P(avg), …, P(bxor)")
