"""Redistribution on real ranks, on every library, against NumPy."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import Via, run_ranks
from redistributions import bad_calls

from mcr_plus.launch import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
LIBRARIES = ["msccl", "gloo", pytest.param("mpi", marks=needs_mpi)]


def launched(what: str, ranks: int, backend: str, timeout: float = 120) -> list[Any]:
    """What each rank found."""
    via: Via = "mpi" if backend == "mpi" else "torch"
    results = run_ranks(f"redistributions:{what}", ranks, args=[backend], via=via, timeout=timeout)
    for result in results:
        value = result.value
        assert value["failures"] == [], f"rank {result.rank}: {value['failed']} of {value['cases']} failed"
        assert value["cases"] > 0
    return [result.value for result in results]


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_layout_to_any_other(ranks: int, backend: str) -> None:
    for value in launched("everything", ranks, backend, timeout=400):
        assert value["cases"] > 400


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_plans_are_kept_and_calls_may_be_in_flight_together(ranks: int, backend: str) -> None:
    launched("calls", ranks, backend)


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_other_layouts_of_a_known_plan_are_refused_on_all_ranks(ranks: int, backend: str) -> None:
    for value in launched("other_plans", ranks, backend):
        assert value["cases"] == 4


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_state_of_many_tensors_in_one_round_and_in_many(ranks: int, backend: str) -> None:
    for value in launched("states", ranks, backend, timeout=200):
        buffers = value["buffers"]
        assert buffers["None"] == buffers["1MiB"]


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_codec_leaves_replicas_with_the_same_bits(ranks: int, backend: str) -> None:
    values = launched("codecs", ranks, backend)
    assert all(value["refused"] == values[0]["refused"] for value in values)
    assert values[0]["cases"] > 30
    for text in values[0]["refused"]:
        assert "a replica of" in text


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_bad_calls_are_refused_on_all_ranks_alike(ranks: int, backend: str) -> None:
    values = launched("refusals", ranks, backend)
    for name, _, error, says in bad_calls(ranks):
        kinds = {value["said"][name][0] for value in values}
        texts = [value["said"][name][1] for value in values]
        assert len(kinds) == 1, f"{name}: {kinds}, {texts}"
        assert kinds == {error} or (not error and kinds <= {"InvalidArgument", "Unsupported"}), (
            f"{name}: {kinds}, {texts}"
        )
        for text in texts:
            assert all(each in text for each in says), f"{name}: {text}"
