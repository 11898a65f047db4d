"""Layouts of DTensors against torch's own local tensors, of all ranks in one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dtensors import placeable, placed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import mcr_plus as mcr
from mcr_plus.layout import Layout
from mcr_plus.layout.torch_layouts import decoded, layout_of, layout_on, target_on

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
MESHES = [(2,), (3,), (2, 2), (2, 3), (4, 2)]


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[None]:
    """Be a rank of a job without other ranks."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def values(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape)


def local(layout: Layout, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of a tensor according to a layout."""
    shape = layout.local_shape(rank)
    assert shape is not None
    found = torch.full(shape, -1.0)
    for piece in layout.pieces(rank):
        low, high, place = layout.held.lows[piece], layout.held.highs[piece], layout.places[piece]
        at = tuple(slice(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True))
        to = tuple(slice(a, b) for a, b in zip(place.tolist(), (place + high - low).tolist(), strict=True))
        found[to] = whole[at]
    return found


def check(
    shape: tuple[int, ...], mesh: tuple[int, ...], all_placements: Sequence[Sequence[Placement]]
) -> None:
    """Check that layouts of torch's distributed tensors describe the places of their elements."""
    size, whole = int(np.prod(mesh)), values(*shape)
    for rank in range(size):
        with rank_of(rank, size):
            device_mesh = init_device_mesh("cpu", mesh)
            for placements in all_placements:
                tensor = placed(whole, device_mesh, placements)
                layout = Layout.of(tensor)
                assert torch.equal(local(layout, rank, whole), tensor.to_local()), (rank, placements)
                assert layout == target_on(shape, device_mesh, placements)
                layout.check_source()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", [(7, 5, 2), (4, 6, 2), (1, 0, 3)], ids=str)
def test_shards_and_replicas(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    check(shape, mesh, list(itertools.product((R, S0, S1, S2), repeat=len(mesh))))


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((2,), [_StridedShard(0, split_factor=3)]),  # no order of a mesh of one dimension
        ((3,), [_StridedShard(1, split_factor=2)]),
        ((2, 2), [_StridedShard(0, split_factor=2), S0]),
        ((2, 3), [_StridedShard(0, split_factor=3), S0]),
        ((4, 2), [_StridedShard(0, split_factor=2), S0]),
        ((2, 3), [_StridedShard(1, split_factor=2), _StridedShard(0, split_factor=2)]),
        ((2, 2), [_StridedShard(0, split_factor=3), R]),
        ((2, 2), [_StridedShard(0, split_factor=5), S0]),
    ],
    ids=str,
)
def test_strided_shards(mesh: tuple[int, ...], placements: list[Placement]) -> None:
    for shape in ((24, 12), (11, 7), (5, 4), (60, 4)):
        if placeable(shape, mesh, placements):
            check(shape, mesh, [placements])
        elif decoded(mesh, placements) is None:
            with pytest.raises(mcr.Unsupported, match=r"_StridedShard\(.* in \d shards: torch .* even"):
                layout_on(shape, np.arange(int(np.prod(mesh))).reshape(mesh), placements)


@pytest.mark.parametrize("rows", [12, 9, 7, 1])
@pytest.mark.parametrize("dim", [0, 1])
def test_fsdp2_over_tensor_parallel(rows: int, dim: int) -> None:
    """The last rank of 3 x 2 has one of 7 rows; with a list of strided indices another rank would have it."""
    whole = values(rows, rows)
    for rank in range(6):
        with rank_of(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            layer = nn.Linear(rows, rows, bias=False)
            weight = placed(whole, mesh["tp"], [Shard(dim)])
            layer.weight = nn.Parameter(weight)
            try:
                fully_shard(layer, mesh=mesh["dp"])
            except NotImplementedError:
                pytest.skip("this torch has even shards only")
            found = layer.weight
            assert isinstance(found, DTensor)
            ours, theirs = local(layout_of(found), rank, whole), found.to_local()
            assert torch.equal(ours, theirs) or ours.numel() == theirs.numel() == 0  # of any shape


@pytest.mark.parametrize(("name", "expected"), [("dp", ["S0", "R"]), ("tp", ["R", "S0"])])
def test_a_part_of_a_mesh(name: str, expected: list[str]) -> None:
    """All ranks get the layout on the whole mesh; without the mesh each gets the layout of its own part."""
    whole = values(7, 5)
    alone = set()
    for rank in range(6):
        with rank_of(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            tensor = placed(whole, mesh[name], [Shard(0)])
            found = Layout.of(tensor, mesh)
            same = Layout.mesh((7, 5), [[0, 1], [2, 3], [4, 5]], expected)
            assert torch.equal(local(found, rank, whole), tensor.to_local())
            assert torch.equal(local(same, rank, whole), tensor.to_local())
            assert set(found.ranks) == set(range(6))
            alone.add(tuple(Layout.of(tensor).ranks))
            other = DeviceMesh("cpu", torch.tensor([5, 4, 3]))
            with pytest.raises(mcr.InvalidArgument, match="is not a part of" if rank > 2 else "is not in"):
                Layout.of(tensor, other)
    assert len(alone) == (2 if name == "dp" else 3)


def test_partial_placements_and_their_names() -> None:
    ranks = np.arange(6).reshape(2, 3)
    for name in ("sum", "avg", "max", "min", "product", "band", "bor", "bxor"):
        layout = layout_on((4, 5), ranks, [Partial(name), S1])
        word = "P" if name == "sum" else f"P({name})"
        assert layout == Layout.mesh((4, 5), ranks, [word, "S1"])
        assert str(layout) == f"{word},S1 @2x3 [4, 5]"
    strided = layout_on((6, 5), ranks, [Partial(), _StridedShard(0, split_factor=2)])
    assert strided.addend_count == 2
    assert str(strided) == "P,S0/2 @2x3 [6, 5]"
    strided.check_source()
    with pytest.raises(mcr.Unsupported, match=r"placement Partial\(nor\) of a DTensor; known: Replicate"):
        layout_on((4, 5), ranks, [Partial("nor"), R])
    with pytest.raises(mcr.InvalidArgument, match=r"P and P\(max\) in one layout"):
        layout_on((4, 5), ranks, [Partial(), Partial("max")])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.ones(3), ("got a Tensor of shape (3,)", "Layout.replicated((3,), ranks)", "Layout.sharded(")),
        (nn.Linear(4, 2).weight, ("got a Parameter of shape (2, 4)", "no mesh", "model.reshard()")),
        (nn.Linear(4, 2), ("a module (Linear)", "Layout.of(p) for name, p in module.named_parameters()")),
        ("weight", ("got 'weight'", "pass a parameter")),
        (None, ("got None", "pass a parameter")),
    ],
    ids=["a tensor", "a parameter", "a module", "a name", "nothing"],
)
def test_errors_about_values_without_placements_name_the_cure(value: Any, says: tuple[str, ...]) -> None:
    for mesh in (None, "dp"):
        with pytest.raises(mcr.InvalidArgument, match="expected a DTensor, got ") as raised:
            Layout.of(value, mesh)  # type: ignore[arg-type]
        for each in says:
            assert each in str(raised.value)


def test_errors_about_meshes_name_the_cure() -> None:
    with rank_of(0, 6):
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        tensor = placed(values(6, 5), mesh["dp"], [Shard(0)])
        wrong: Any = "dp"
        with pytest.raises(
            mcr.InvalidArgument, match=r"mesh: expected a DeviceMesh, got 'dp'; pass the mesh"
        ):
            Layout.of(tensor, wrong)
        with pytest.raises(mcr.InvalidArgument, match="pass the mesh from which it was taken"):
            Layout.of(tensor, DeviceMesh("cpu", torch.tensor([0, 1])))


def test_shard_orders() -> None:
    """A dimension cut by the mesh's second dimension first is one cut by the transposed mesh."""
    ordered: dict[str, Any] = {}
    with rank_of(0, 6):
        mesh = DeviceMesh("cpu", torch.arange(6).view(2, 3))
        meta = TensorMeta(torch.Size((7, 4)), (4, 1), torch.float32)
        spec = DTensorSpec(mesh, (S0, S0), meta)
        if not hasattr(spec, "shard_order"):
            pytest.skip("this torch has no shard orders")
        (entry,) = spec.shard_order
        ordered["plain"] = layout_of(DTensor(torch.empty(2, 4), spec, requires_grad=False))
        spec = DTensorSpec(mesh, (S0, S0), meta, shard_order=(entry._replace(mesh_dims=(1, 0)),))
        ordered["other"] = layout_of(DTensor(torch.empty(2, 4), spec, requires_grad=False))
    ranks = np.arange(6).reshape(2, 3)
    assert ordered["plain"] == Layout.mesh((7, 4), ranks, ["S0", "S0"])
    assert ordered["other"] == Layout.mesh((7, 4), ranks.T, ["S0", "S0"])
    assert str(ordered["other"]) == "S0,S0 @2x3 cut by 1,0 [7, 4]"


def test_strided_shards_stand_for_orders() -> None:
    strided = _StridedShard(0, split_factor=2)
    assert decoded((4, 3, 2), [strided, strided, S0]) == [2, 0, 1]
    assert decoded((2, 2), [strided, R]) is None
    assert decoded((2, 2), [S0, S0]) is None
    assert decoded((3, 2, 2), [_StridedShard(1, split_factor=2), S0, S1]) == [2, 0, 1]
