"""Every dtype that has no reductions moves through every library and interface, as bytes."""

from __future__ import annotations

from typing import Any, Final

import pytest
from jobs.operations import moved_dtypes
from ranks import run_ranks

from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
ALL: Final = ("mpi", "gloo", "msccl")
ENV: Final = {"GLOO_SOCKET_IFNAME": "lo"}
KINDS: Final = ["broadcast", "all_gather", "all_to_all"]


def _config(*first: dict[str, Any], **dispatch: Any) -> dict[str, Any]:
    stages = [*first, {"select": {}}, {"dispatch": {"timeout": "60s", **dispatch}}]
    return {"version": 1, "backends": list(ALL), "pipeline": stages}


JOBS: Final[dict[str, tuple[int, dict[str, Any] | None, tuple[str | None, ...], int]]] = {
    "three ranks": (3, None, ALL, 1),
    "one rank": (1, None, (None, "local"), 1),
    "two ranks": (2, None, ALL, 1),
    "hierarchical": (4, _config({"hierarchical": {"kinds": KINDS, "min": 0}}), (None, "gloo"), 2),
    "verified": (3, _config(verify="every"), ALL, 1),
    "failover": (2, _config(failover=True), ("gloo",), 1),
    "compressed": (2, _config({"compress": {"codec": "delta"}}), ("gloo",), 1),
}


def _run(job: str, sizes: tuple[int, ...]) -> None:
    ranks, config, backends, hosts = JOBS[job]
    for result in run_ranks(
        moved_dtypes.walk, ranks, args=[config, backends, sizes, hosts], env=ENV, timeout=400
    ):
        assert result.value["failures"] == [], f"rank {result.rank}: {result.value['failed']} failed"
        assert result.value["cases"] > 200


@pytest.mark.long
@needs_mpi
def test_moved_dtypes_are_transferred_in_every_job() -> None:
    _run("three ranks", (7,))


@pytest.mark.long
@needs_mpi
@pytest.mark.parametrize("job", JOBS)
def test_moved_dtypes_are_transferred_in_all_sizes_and_layers(job: str) -> None:
    _run(job, (0, 1, 5003))


@pytest.mark.parametrize("ranks", [2, 3])
def test_moved_dtypes_are_transferred_by_torch_distributed(ranks: int) -> None:
    for result in run_ranks(moved_dtypes.by_torch, ranks, via="torch", env=ENV):
        assert result.value["failures"] == []


@pytest.mark.long
@needs_mpi
@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("kind", ["broadcast", "message"])
def test_dtypes_of_the_same_size_are_told_apart(backend: str, kind: str) -> None:
    texts = [result.value for result in run_ranks(moved_dtypes.mismatches, 2, args=[backend, kind], env=ENV)]
    assert "float8_e4m3fn" in texts[1]
    assert "float8_e5m2" in texts[1]
