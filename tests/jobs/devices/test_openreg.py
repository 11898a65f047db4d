"""Two ranks with tensors on torch's simulated accelerator, through host libraries.

`make test-openreg` runs this; it is skipped where `torch_openreg` is not installed (docs/gpu.md).
"""

from __future__ import annotations

from functools import cache
from typing import Final

import pytest
from jobs.devices import gpu_jobs, openreg, openreg_jobs
from ranks import RankResult, RanksFailed, run_ranks

from mcr_plus.rendezvous.mpi_launcher import mpi_usable

_MISSING: Final = openreg.missing()
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

LIBRARIES: Final = ("gloo", "msccl", "mpi")


@cache
def launched(library: str, launch: str) -> list[RankResult]:
    """Launch all parts; return their output."""
    try:
        return run_ranks(
            openreg_jobs.reports,
            2,
            args=[library, launch],
            via="mpi" if mpi_usable() else "torch",
            env={"MCR_TEST_DEVICE": "openreg", "GLOO_SOCKET_IFNAME": "lo"},
            timeout=300,
        )
    except RanksFailed as failure:  # some parts may have ended well
        return failure.results


@pytest.mark.parametrize(
    ("launch", "part"), [(launch, part) for launch, parts in openreg_jobs.PARTS.items() for part in parts]
)
@pytest.mark.parametrize("library", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in LIBRARIES])
def test_two_ranks(library: str, launch: str, part: str) -> None:
    if library == "mpi" and not mpi_usable():
        pytest.skip("needs mpi4py and an MPI launcher")
    gpu_jobs.check_part(launched(library, launch), part)
