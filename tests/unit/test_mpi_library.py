"""What is set before MPI is initialised."""

from __future__ import annotations

import os

import pytest

from mcr_plus.rendezvous import mpi_library

VARIABLE = "OMPI_MCA_threads_pthreads_yield_strategy"


@pytest.mark.parametrize(
    ("ranks", "given", "expected"),
    [(2, None, None), (3, None, "nanosleep"), (3, "sched_yield", "sched_yield")],
)
def test_ranks_that_share_cores_sleep_in_open_mpi(
    monkeypatch: pytest.MonkeyPatch, ranks: int, given: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(mpi_library, "cores", lambda: 2)
    for name, value in {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": f"{ranks}",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": f"{ranks}",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(VARIABLE, given or "")  # so that it is restored
    if given is None:
        monkeypatch.delenv(VARIABLE)
    mpi_library._have_idle_ranks_sleep()
    assert os.environ.get(VARIABLE) == expected
