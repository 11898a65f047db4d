"""Every operation on every backend against float64 oracles: one launch per number of ranks and launcher."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from typing import Final

import pytest
import reference
import torch
from jobs.operations import conformance
from jobs.operations.behaviour import LIVES, SECTIONS
from ranks import RankResult, RanksFailed, run_ranks

from mcr_plus.core.kinds import ARITHMETIC, REDUCE_OPS, REDUCIBLE
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
GROUPS: Final = ("world", "reversed", "overlapping", "split")

# Under torchrun, calls are in Python alone, as without the compiled ones.
# Launcher, ranks, the backends that calls name (None lets the pipeline decide), and the tables to walk.
LAUNCHES: Final = {
    "one rank": ("torch", 1, (None, "local"), ("some types", "some shapes")),
    "one rank, every type": ("torch", 1, (None, "local"), ("types", "shapes")),
    "two ranks": ("mpi", 2, (None, "mpi", "gloo", "msccl"), ("some shapes",)),
    "two ranks, every type": ("mpi", 2, (None, "mpi", "gloo", "msccl"), ("types", "shapes")),
    "three ranks": ("mpi", 3, ("mpi", "gloo", "msccl"), ("types", "shapes")),
    "two ranks without mpi": ("torch", 2, ("gloo", "msccl"), ("shapes",)),
}
CELLS: Final = [
    pytest.param(launch, section, marks=needs_mpi if via == "mpi" else ())
    for launch, (via, _, _, tables) in LAUNCHES.items()
    for section in (*SECTIONS, *LIVES, *tables)
]
# The fewest cases that each rank must have run, per backend named: a table must not shrink unseen.
FLOORS: Final = {
    "rough sums": 36,
    "compressed": 132,
    "messages": 20,
    "objects": 1,
    "barriers": 4,
    "persistent": 384,
    "arrays": 20,
    "special tensors": 12,
    "overlapping": 6,
    "handles": 32,
    "dropped": 2,
    "groups": 3,
    "beside torch": 4,
    "again": 5,
    "types": 2500,
    "some types": 480,
    "shapes": 960,
    "some shapes": 480,
}


@cache
def launched(launch: str) -> list[RankResult] | RanksFailed:
    """Return the findings of a launch's ranks, or their failures; each launch runs once."""
    via, ranks, backends, tables = LAUNCHES[launch]
    with tempfile.TemporaryDirectory(prefix="mcr-test-") as folder:
        try:
            return run_ranks(
                "jobs.operations.behaviour:examine",
                ranks,
                args=[backends, tables, folder],
                via=via,  # type: ignore[arg-type]
                env={"GLOO_SOCKET_IFNAME": "lo"} | dict.fromkeys(["MCR_FAST_CALLS"] * (via == "torch"), "0"),
                timeout=480,  # three ranks on two busy cores
                teardown=True,
            )
        except RanksFailed as failure:
            return failure


def examined(launch: str) -> list[RankResult]:
    """Return the findings of a launch's ranks."""
    results = launched(launch)
    if isinstance(results, RanksFailed):
        raise results
    return results


@pytest.mark.short("one rank-", "two ranks-")
@pytest.mark.parametrize(("launch", "section"), CELLS)
def test_conforms(launch: str, section: str) -> None:
    backends = LAUNCHES[launch][2]
    # Without a name only the world runs: the pipeline chooses one of the named libraries.
    named = sum(backend is not None for backend in backends)
    for result in examined(launch):
        report = result.value[section]
        assert report["failures"] == [], f"rank {result.rank}: {report['failed']} of {report['cases']} failed"
        assert report["cases"] >= FLOORS[section] * named, (
            f"rank {result.rank} ran only {report['cases']} cases"
        )


def test_the_table_has_every_operation_backend_type_mode_and_group() -> None:
    backends = (None, "mpi", "gloo")
    cases = list(conformance.every_type(backends, GROUPS))
    found = {(c.name, c.op, c.dtype, c.backend, c.async_op, c.group) for c in cases}
    kinds = len(conformance.REDUCTIONS) * len(conformance.PAIRS) + len(conformance.MOVES) * len(ARITHMETIC)
    assert len(cases) == len(found) == kinds * 2 * (2 * len(GROUPS) + 1)
    assert {(c.op, c.dtype) for c in cases if c.op} == {(op, d) for op in REDUCE_OPS for d in REDUCIBLE[op]}
    for name in conformance.OPERATIONS:
        assert {c.shape for c in cases if c.name == name and c.backend} == set(conformance.SHAPES), name


def test_some_types_are_every_operation_type_and_mode_and_every_operation_in_every_group() -> None:
    groups = ("world", "reversed")
    cases = list(conformance.some_types((None, "local"), groups))
    cells = {(c.name, c.op, c.dtype, c.backend) for c in conformance.every_type((None, "local"), groups)}
    assert len(cases) == len(cells) == len({(c.name, c.op, c.dtype, c.backend) for c in cases})
    of_local = [c for c in cases if c.backend == "local"]
    ways = {(mode, group) for mode in (False, True) for group in groups}
    for name in conformance.OPERATIONS:
        assert {(c.async_op, c.group) for c in of_local if c.name == name} == ways, name
    for dtype in ARITHMETIC:
        assert {(c.async_op, c.group) for c in of_local if c.dtype == dtype} == ways, dtype


def test_the_table_has_every_operation_in_every_shape() -> None:
    cases = list(conformance.every_shape(("mpi", "gloo"), GROUPS))
    found = {(c.name, c.shape, c.backend, c.async_op, c.group) for c in cases}
    assert len(found) == len(conformance.OPERATIONS) * len(conformance.SHAPES) * 2 * 2 * len(GROUPS)
    assert len(cases) == 2 * len(found)
    some = list(conformance.some_shapes(("mpi", "gloo", None), ("world", "reversed")))
    of_cells = {(c.name, c.shape, c.backend) for c in some}
    assert len(some) == 2 * len(of_cells) == 2 * len(conformance.OPERATIONS) * len(conformance.SHAPES) * 3
    for backend in ("mpi", "gloo"):
        of_backend = [c for c in some if c.backend == backend]
        ways = {(mode, group) for mode in (False, True) for group in ("world", "reversed")}
        for name in conformance.OPERATIONS:
            assert {(c.async_op, c.group) for c in of_backend if c.name == name} == ways
        for shape in conformance.SHAPES:
            assert {(c.async_op, c.group) for c in of_backend if c.shape == shape} == ways


@pytest.mark.parametrize("dtype", ARITHMETIC)
def test_inputs_differ_between_ranks_and_salts(dtype: torch.dtype) -> None:
    """Swapped ranks, or the last operation's result, must not pass."""
    seen: Sequence[bytes] = [
        reference.inputs(dtype, rank, (40,), salt).tobytes() for rank in range(4) for salt in range(4)
    ]
    assert len(set(seen)) == len(seen)
    exact = torch.tensor(reference.inputs(dtype, 1, (1000,)), dtype=dtype)
    assert reference.difference(exact, reference.inputs(dtype, 1, (1000,))) is None


def test_comparison_detects_wrong_values_shapes_and_nan() -> None:
    expected = reference.inputs(torch.float32, 0, (3, 2))
    right = torch.tensor(expected, dtype=torch.float32)
    wrong = right.clone()
    wrong[2, 1] += 0.25
    assert reference.difference(right, expected) is None
    assert "at (2, 1)" in (reference.difference(wrong, expected) or "")
    assert "shape" in (reference.difference(right.view(-1), expected) or "")
    assert reference.difference(wrong, expected, 0.25) is None
    wrong[0, 0] = float("nan")
    assert "nan" in (reference.difference(wrong, expected, 0.25) or "")
