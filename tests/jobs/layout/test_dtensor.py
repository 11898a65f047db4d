"""DTensors on real ranks: moved to other meshes, and redistributed by our plans inside DTensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dtensors import placeable, placed
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _dispatch,
    _redistribute,
    distribute_tensor,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import mcr_plus as mcr
from mcr_plus import dtensor
from mcr_plus.layout import Layout, planned
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
SHAPE = (7, 6)


def values(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


@contextmanager
def job() -> Iterator[None]:
    config: Any = {"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "60s"}}]}
    dist.init_process_group("mcr", pg_options=config)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed(mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, int] = SHAPE) -> DTensor:
    """Return the values, with addends that sum to them where placements are partial."""
    complete = [R if each.is_partial() else each for each in placements]
    found = placed(values(*shape), mesh, complete)
    counts = [mesh.size(at) for at, each in enumerate(placements) if each.is_partial()]
    if not counts:
        return found
    local, coordinate = found.to_local(), mesh.get_coordinate()
    if coordinate is not None:
        first = all(at == 0 for at, each in zip(coordinate, placements, strict=True) if each.is_partial())
        rest = math.prod(counts) - 1
        local = local - 3 * rest if first else torch.full_like(local, 3)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=found.shape, stride=found.stride()
    )


def check_moves(meshes: dict[str, DeviceMesh], every: bool) -> None:
    """Move tensors from every mesh to every other, and compare them with torch's own placement.

    Without `every`, test one pair of placements for each pair of meshes: each mesh has every placement as
    source and as target.
    """
    strided = _StridedShard(0, split_factor=2)
    one: list[list[Placement]] = [[R], [S0], [S1], [P], [strided]]
    two: list[list[Placement]] = [
        [S0, S1],
        [S0, S0],
        [R, S1],
        [P, S0],
        [_StridedShard(0, split_factor=2), S0],
    ]
    shape = SHAPE if placeable(SHAPE, [2], [strided]) else (12, 6)
    sides = {name: (two if mesh.ndim == 2 else one) for name, mesh in meshes.items()}
    for turn, ((a, before), (b, after)) in enumerate(itertools.product(meshes.items(), repeat=2)):
        pairs = list(zip(sides[a], sides[b][1:] + sides[b][:1], strict=True))
        at = sum(divmod(turn, len(meshes))) % len(pairs)
        for source, target in pairs if every else pairs[at : at + 1]:
            if any(each.is_partial() for each in target):
                target = [R] * after.ndim
            x = distributed(before, source, shape)
            y = mcr.redistribute(x, after, target)
            expected = placed(values(*shape), after, target)
            assert isinstance(y, DTensor)
            assert (y.device_mesh, y.placements, y.shape) == (after, tuple(target), expected.shape)
            assert y.stride() == expected.stride()
            assert torch.equal(y.to_local(), expected.to_local()), (a, source, b, target)


def check_arguments(mesh: DeviceMesh, other: DeviceMesh) -> None:
    x = distributed(mesh, [S0, R])
    work = mcr.redistribute(x, other, [Shard(-1)], async_op=True, tag="moved")
    work.wait()
    assert torch.equal(work.output.to_local(), placed(values(*SHAPE), other, [S1]).to_local())
    for placements in ([P, R], [P, P], [S0, P], [Partial("avg"), S1]):
        # Addends that do not change; their sum would be another tensor.
        some = DTensor.from_local(torch.full((2, 3), 1.0 + mesh.get_rank()), mesh, placements)
        same = mcr.redistribute(some, mesh, placements)
        assert same.placements == tuple(placements)
        assert torch.equal(same.to_local(), some.to_local())
    leaf = x.detach().requires_grad_()
    with torch.no_grad():
        assert not mcr.redistribute(leaf, other, [S0]).requires_grad
    wrong: list[tuple[Any, str]] = [
        ((leaf, other, [S0]), "requires gradients"),
        ((x, other, [S0, S0]), "expected 1, one for each dimension"),
        ((x, other, [Shard(2)]), "of a tensor of 2 dimensions"),
        ((x, mesh, [P, R]), "cannot be divided into addends"),
        ((torch.ones(2), mesh, [R, R]), "expected a DTensor"),
        ((x, "mesh", [R]), "expected a Layout or a DeviceMesh"),
    ]
    for arguments, word in wrong:
        with pytest.raises(mcr.InvalidArgument, match=word):
            mcr.redistribute(*arguments)
    right: Any = (x, other, [S0])
    for arguments, word in wrong:  # on some ranks alone, which others are told
        fine = dist.get_rank() == 0
        with pytest.raises(mcr.InvalidArgument, match=word if not fine else rf"{word}.*\(on ranks 1, 2, 3\)"):
            mcr.redistribute(*(right if fine else arguments), tag=word)
    one, last = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [3])
    for dtype in (torch.float64, torch.float32, torch.float64):
        y = mcr.redistribute(distribute_tensor(values(*SHAPE).to(dtype), one, [S0]), last, [R])
        assert y.dtype is dtype
        assert last.get_coordinate() is None or torch.equal(y.to_local(), values(*SHAPE).to(dtype))


def moved_by_us(function: Any) -> tuple[Any, int]:
    """Return a function's result and the number of operations of this library that it has issued."""
    with mcr.record() as log:
        result = function()
    return result, sum(each.tag == "redistribute" for each in log.records)


def check_planned(mesh: DeviceMesh, shape: tuple[int, int], pairs: Sequence[str] = ()) -> list[str]:
    """Check that our plans keep the results of DTensor's redistributions; return the pairs with such plans.

    `pairs`: pairs in the returned form; if empty, all pairs.
    """
    everything = list(itertools.product((R, S0, S1), repeat=2))
    taken = []
    for source, target in itertools.product([*everything, (P, S0), (P, P)], everything):
        words = f"{_words(source)} -> {_words(target)}"
        if pairs and words not in pairs:
            continue
        x = distributed(mesh, source, shape)
        expected = x.redistribute(placements=target)
        with dtensor.planned():
            y = x.redistribute(placements=target)  # compares and plans
            y, ours = moved_by_us(lambda: x.redistribute(placements=target))  # noqa: B023
        assert y.placements == expected.placements
        assert torch.equal(y.to_local(), expected.to_local()), (source, target)
        if ours:
            taken.append(words)
    return taken


def _words(placements: Sequence[Placement]) -> str:
    return ",".join("P" if each.is_partial() else str(each) for each in placements)


def check_plans_that_are_not_known(mesh: DeviceMesh) -> None:
    """If the bytes of DTensor's plan cannot be counted, as in another torch, DTensor's plan stays."""
    for columns, error in enumerate((AttributeError, RuntimeError, TypeError), 20):
        x = distributed(mesh, [R, S0], (24, columns))
        with pytest.MonkeyPatch.context() as patch, dtensor.planned():
            patch.setattr(planned, "_volume_of_plan", Mock(side_effect=error("no such plan")))
            y, ours = moved_by_us(lambda: x.redistribute(placements=[S1, S1]))  # noqa: B023
        assert ours == 0
        assert torch.equal(y.full_tensor(), values(24, columns))


def check_orders_of_shards(mesh: DeviceMesh) -> None:
    """Our plans keep the target's order of shards, which torch's internals pass on."""
    if "shard_order" not in DTensorSpec.__dataclass_fields__:  # an older torch
        return
    tensor = distributed(mesh, (Shard(1), Shard(1)), (8, 8))
    meta = tensor._spec.tensor_meta
    placements = (Shard(0), Shard(0))
    (usual,) = DTensorSpec(mesh, placements, meta).shard_order
    target = DTensorSpec(mesh, placements, meta, shard_order=(usual._replace(mesh_dims=(1, 0)),))

    def moved() -> torch.Tensor:
        return _redistribute.redistribute_local_tensor(tensor.to_local(), tensor._spec, target)

    expected = moved()
    with dtensor.planned():
        for _ in range(2):
            assert torch.equal(moved(), expected)


def check_gradients(mesh: DeviceMesh) -> None:
    found = []
    for ours in (False, True):
        x: Any = distributed(mesh, [R, S0]).detach().requires_grad_()
        weight: Any = distributed(mesh, [S1, S1]).detach().requires_grad_()
        other: Any = distributed(mesh, [S0, R])  # torch 2.6 fails if a gradient has its placements already
        with dtensor.planned() if ours else torch.enable_grad():
            product: Any = x.redistribute(placements=[S1, S1]) * weight
            z: Any = product.redistribute(placements=[R, R]) @ other.t()
            z.to_local().square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        results: list[Any] = [x.grad, weight.grad, z]
        found.append([each.full_tensor() for each in results])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)


def check_fsdp_and_tensor_parallel(mesh: DeviceMesh, pair: DeviceMesh) -> None:
    """The state of a model of FSDP2 over tensor parallel, moved to a tensor-parallel pair of ranks."""
    torch.manual_seed(3)
    inner = 10 if placeable(SHAPE, [2], [_StridedShard(0, split_factor=2)]) else 12
    model = nn.Sequential(nn.Linear(6, inner), nn.ReLU(), nn.Linear(inner, 7), nn.LayerNorm(7)).double()
    for param in model.parameters():
        nn.init.normal_(param)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    to = {"0.weight": S0, "0.bias": S0, "2.weight": S1, "2.bias": R}
    specs, state = {}, {}
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        state[name] = value.to_local().detach()
        if name not in to:  # parameters of the LayerNorm, which lies on this rank's part of the mesh
            specs[name] = (Layout.of(value, mesh), Layout.replicated(value.shape, pair.mesh.tolist()))
            continue
        with torch.no_grad():
            alone = mcr.redistribute(value, pair, [to[name]])
        expected = placed(whole[name], pair, [to[name]]).to_local()
        assert torch.equal(alone.to_local(), expected), name
        specs[name] = (Layout.of(value, mesh), Layout.of(alone))
    with pytest.raises(mcr.InvalidArgument, match=r"pass its to_local\(\)"), torch.no_grad():
        mcr.redistribution(specs)(dict(model.state_dict()))
    found = mcr.redistribution(specs)(state)  # all in one exchange
    for name, local in found.items():
        expected = placed(whole[name], pair, [to.get(name, R)]).to_local()
        assert expected.numel() == 0 if local is None else torch.equal(local, expected)


TAKEN = ("R,S(0) -> S(1),S(1)", "S(0),S(0) -> R,S(0)", "R,S(0) -> S(0),R", "P,P -> R,R")
LEFT = ("R,S(0) -> R,R", "S(0),R -> S(1),R", "R,R -> S(0),S(1)", "P,P -> S(0),S(1)")
"""Redistributions of large tensors by plans of ours, and by those of DTensor, which move no more."""


def four_ranks(every: bool) -> list[str]:
    with job():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        meshes = {
            "2x2": mesh,
            "back": DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]])),
            "pair": DeviceMesh("cpu", [1, 0]),
            "others": DeviceMesh("cpu", [2, 3]),
            "three": DeviceMesh("cpu", [3, 0, 1]),
        }
        check_moves(meshes, every)
        check_arguments(mesh, meshes["three"])
        check_orders_of_shards(mesh)
        taken = check_planned(mesh, (255, 263), () if every else (*TAKEN, *LEFT))
        check_plans_that_are_not_known(mesh)
        check_gradients(mesh)
        check_fsdp_and_tensor_parallel(mesh, meshes["others"])
    return taken


@pytest.mark.short("some pairs")
@needs_mpi
@pytest.mark.parametrize("every", [False, True], ids=["some pairs", "every pair"])
def test_redistribution_between_meshes_and_within_planned(every: bool) -> None:
    results = run_ranks(four_ranks, 4, args=[every], timeout=240)
    taken = results[0].value
    assert all(result.value == taken for result in results)
    assert len(taken) >= 33 if every else len(taken) == len(TAKEN)  # of 99, or of 8
    assert set(TAKEN) <= set(taken)
    assert set(LEFT).isdisjoint(taken)


def to_partial(mesh: DeviceMesh) -> bool:
    """Return whether torch lets programs redistribute to partial placements; 2.6 does not."""
    try:
        distributed(mesh, [P] * mesh.ndim).redistribute(placements=[P] * mesh.ndim)
    except RuntimeError:
        return False
    return True


def flattened(sizes: tuple[int, ...], step: int) -> tuple[int, int]:
    """Compare all placements of small uneven tensors on a flattened mesh with `placed`.

    torch itself loses rows there. Tests every `step`th pair; returns the numbers of right and of refused
    pairs.
    """
    shape, names = (9, 5) if len(sizes) > 2 else (5, 3), "abc"[: len(sizes)]
    right = refused = 0
    with job():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names))
        for number in range(2, len(sizes) + 1):
            for some in itertools.combinations(names, number):
                if "".join(some) in names and hasattr(mesh, "_flatten"):
                    mesh[some]._flatten("".join(some))
        kinds = [R, S0, S1, P]
        if placeable(shape, [2], [_StridedShard(0, split_factor=2)]):
            kinds.append(_StridedShard(0, split_factor=2))
        partial_targets = to_partial(mesh)
        pairs = [
            (source, target)
            for source, target in itertools.product(itertools.product(kinds, repeat=len(sizes)), repeat=2)
            if partial_targets or P not in target
            # torch cannot make addends, nor strided shards in the last dimension of a mesh
            if all(old.is_partial() for old, new in zip(source, target, strict=True) if new.is_partial())
            and not any(type(each[-1]) is _StridedShard for each in (source, target))
        ]
        lost = ((S0,) * len(sizes), (R,) * len(sizes))
        for source, target in [lost, *pairs[::step]]:
            x, said = distributed(mesh, source, shape), ""
            with dtensor.planned():
                try:
                    y = x.redistribute(placements=target).to_local()
                except mcr.Unsupported as error:
                    y, said = None, str(error)
            if y is None:
                refused += 1
                assert "strided shards that encode no order" in said, (source, target)
                assert any(each.is_partial() for each in target)
                continue
            partial = [at for at, each in enumerate(target) if each.is_partial()]
            for at in partial:
                dist.all_reduce(y := y.contiguous(), group=mesh.get_group(at))
            expected = placed(values(*shape), mesh, [R if each.is_partial() else each for each in target])
            found = y.view(expected.to_local().shape) if y.numel() == 0 else y
            assert torch.equal(found, expected.to_local()), (source, target)
            right += 1
    return right, refused


@pytest.mark.long
@needs_mpi
@pytest.mark.parametrize(
    ("sizes", "step"),
    [((2, 2), 13), ((2, 2), 1), ((2, 2, 2), 29)],
    ids=["some pairs", "every pair", "three dimensions"],
)
def test_uneven_shards_on_flattened_meshes_within_planned(sizes: tuple[int, ...], step: int) -> None:
    results = run_ranks(flattened, math.prod(sizes), args=[sizes, step], timeout=400)
    for result in results:
        right, refused = result.value
        assert right >= max(10, 9 * refused)


def on_permuted_meshes() -> None:
    """Redistribute on meshes with ranks in another order; torch joins rows in the order of ranks."""
    whole = torch.arange(16.0).view(4, 4)
    with job():
        for ranks in ([3, 1, 0, 2], [[3, 1], [0, 2]]):
            mesh = DeviceMesh("cpu", ranks)
            at = (mesh.mesh.flatten() == dist.get_rank()).nonzero().item()
            x = DTensor.from_local(whole[at : at + 1], mesh, [S0] * mesh.ndim, run_check=False)
            with dtensor.planned():
                rows = x.redistribute(placements=[R] * mesh.ndim).to_local()
                columns = x.redistribute(placements=[S1] * mesh.ndim).to_local()
            assert rows.equal(whole)
            assert columns.equal(whole[:, at : at + 1])


@needs_mpi
def test_permuted_meshes_within_planned() -> None:
    run_ranks(on_permuted_meshes, 4)


def small_tensors() -> list[str]:
    with job():
        return check_planned(init_device_mesh("cpu", (2, 2)), SHAPE)


@pytest.mark.long
@needs_mpi
def test_redistribution_of_small_tensors_within_planned() -> None:
    results = run_ranks(small_tensors, 4, timeout=240)
    assert all(result.value == results[0].value for result in results)
    assert len(results[0].value) >= 20  # of 99; pieces of small tensors are not shared among senders


def beside_gloo() -> None:
    """Test a job of mcr.init next to process groups of gloo, and one with a part of torch's ranks."""
    whole = values(*SHAPE)
    dist.init_process_group("gloo")
    mesh = DeviceMesh("cpu", [0, 1, 2])
    with mcr.init():
        x = distribute_tensor(whole, mesh, [S0])
        y = mcr.redistribute(x, mesh, [S1])
        assert torch.equal(y.to_local(), x.redistribute(placements=[S1]).to_local())
    part: Any = dist.new_group([1, 2], backend="mcr")
    pair = DeviceMesh("cpu", [2, 1])
    if dist.get_rank():
        dist.barrier(part)
        x = placed(whole, pair, [S0])
        assert Layout.of(x) == Layout.sharded(SHAPE, [1, 0], 0)  # ranks of the job
        y = mcr.redistribute(x, pair, [R])
        assert torch.equal(y.to_local(), whole)
        x = placed(whole, mesh, [S0])
        with pytest.raises(mcr.Unsupported, match=r"rank 0 of torch\.distributed is not in the job"):
            Layout.of(x)
        dist.destroy_process_group(part)
    dist.destroy_process_group()


def test_ranks_of_torch_and_of_the_job() -> None:
    run_ranks(beside_gloo, 3, via="torch")


BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}


def bitwise() -> None:
    with job():
        rank, mesh, other = dist.get_rank(), init_device_mesh("cpu", (3,)), DeviceMesh("cpu", [2, 0])
        kinds: list[Any] = [np.bool_, np.uint8, np.int64]
        for kind, (op, reduce) in itertools.product(kinds, BITWISE.items()):
            chance = np.random.default_rng(7)
            most = 2 if kind is np.bool_ else 99
            parts: Any = [chance.integers(0, most, SHAPE).astype(kind) for _ in range(3)]
            expected = torch.from_numpy(reduce.reduce(parts))
            x = DTensor.from_local(torch.from_numpy(parts[rank]), mesh, [Partial(op)], run_check=False)
            for on, to in itertools.product((mesh, other), (R, S0, S1)):
                y = mcr.redistribute(x, on, [to])
                whole = placed(expected, on, [to])
                assert on.get_coordinate() is None or torch.equal(y.to_local(), whole.to_local()), (kind, op)
        for dtype in (torch.float32, torch.complex64, torch.uint16):
            some = DTensor.from_local(torch.ones(SHAPE, dtype=dtype), mesh, [Partial("bor")], run_check=False)
            with pytest.raises(mcr.InvalidArgument, match=f"source P.bor. .*: BOR of {dtype}"):
                mcr.redistribute(some, mesh, [R])
        norm = torch.linalg.vector_norm(distribute_tensor(values(*SHAPE), mesh, [S0]))
        with pytest.raises(
            mcr.Unsupported, match=r"NormPartial.*; known: .* band, bor, bxor; tensor\.redist"
        ):
            mcr.redistribute(norm, mesh, [R])


def test_bitwise_addends_are_reduced_as_numpy_does() -> None:
    run_ranks(bitwise, 3)


def alone() -> str:
    with pytest.raises(mcr.NotInitialized), dtensor.planned():
        pass
    original = dtensor_redistribute()
    with mcr.init():
        with dtensor.planned():
            assert dtensor_redistribute() is not original
            with dtensor.planned():  # of no effect
                pass
            assert dtensor_redistribute() is not original
        assert dtensor_redistribute() is original
        _redistribute.redistribute_local_tensor = alone  # type: ignore[assignment]
        with pytest.raises(mcr.Unsupported) as caught, dtensor.planned():
            pass
    return str(caught.value)


def dtensor_redistribute() -> Any:
    return vars(_dispatch)["redistribute_local_tensor"]


def test_planned_refuses_an_unsupported_torch() -> None:
    (result,) = run_ranks(alone, 1, via="torch")
    assert result.value.startswith(f"planned: torch {torch.__version__} is not supported: operators do not")
