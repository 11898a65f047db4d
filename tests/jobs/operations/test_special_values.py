"""NaN, infinities, zeros of both signs, means of integers: one meaning on all libraries and in all layers."""

from __future__ import annotations

from typing import Any, Final

import pytest
from jobs.operations import special_values
from ranks import run_ranks

from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
ALL: Final = ("mpi", "gloo", "msccl")
ENV: Final = {"GLOO_SOCKET_IFNAME": "lo"}


def _config(*backends: str, first: dict[str, Any] | None = None, **dispatch: Any) -> dict[str, Any]:
    stages = [{"select": {}}, {"dispatch": {"timeout": "60s", **dispatch}}]
    return {"version": 1, "backends": list(backends), "pipeline": [*([first] if first else []), *stages]}


HIERARCHICAL: Final = {"hierarchical": {"kinds": ["all_reduce", "reduce_scatter"], "min": 0}}
JOBS: Final[dict[str, tuple[int, dict[str, Any] | None, tuple[str | None, ...], int]]] = {
    "one rank": (1, None, (None, "local"), 1),
    "two ranks": (2, None, ALL, 1),
    "three ranks": (3, None, ALL, 1),
    "four ranks": (4, None, ALL, 1),
    "msccl's algorithms": (3, None, ("msccl:ring", "msccl:all_pairs"), 1),
    "hierarchical": (4, _config("gloo", first=HIERARCHICAL), (None,), 2),
    "hierarchical over mpi": (4, _config("mpi", first=HIERARCHICAL), (None,), 2),
    "fused": (3, _config(*ALL, first={"fuse": {"kinds": ["all_reduce"]}}), ALL, 1),
    "verified": (3, _config(*ALL, verify="every"), ALL, 1),
    "failover": (3, _config("gloo", "msccl", failover=True), ("gloo",), 1),
}


def _run(job: str, sizes: tuple[int, ...], dtypes: tuple[str, ...] = ()) -> None:
    ranks, config, backends, hosts = JOBS[job]
    args = [config, backends, sizes, hosts, dtypes]
    for result in run_ranks(special_values.walk, ranks, args=args, env=ENV, timeout=500):
        assert result.value["failures"] == [], f"rank {result.rank}: {result.value['failed']} failed"
        assert result.value["cases"] > 90 * len(backends)


@pytest.mark.long
@needs_mpi
def test_special_values_have_one_meaning_in_short() -> None:
    _run("three ranks", (1000,), ("float32", "complex64"))


@pytest.mark.long
@needs_mpi
@pytest.mark.parametrize("job", JOBS)
def test_special_values_have_one_meaning(job: str) -> None:
    _run(job, special_values.SHORT)


@pytest.mark.long
@needs_mpi
@pytest.mark.parametrize("job", ["two ranks", "three ranks", "hierarchical"])
def test_special_values_have_one_meaning_in_long_vectors(job: str) -> None:
    _run(job, (special_values.LONG,), ("float32",))


@pytest.mark.parametrize("ranks", [2, 3])
def test_other_interfaces(ranks: int) -> None:
    for result in run_ranks(
        special_values.other_interfaces, ranks, args=[(0, 7, 1000)], via="torch", env=ENV
    ):
        assert result.value["failures"] == []
