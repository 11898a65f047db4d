"""Two ranks with CUDA tensors: host libraries through pinned memory, codecs, streams, training, and NCCL."""

from __future__ import annotations

from functools import cache
from typing import Final

import pytest
import torch
from jobs.devices import gpu_jobs
from ranks import RankResult, RanksFailed, run_ranks

from mcr_plus.backends.nccl.abi import load
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LIBRARIES: Final = ("gloo", "msccl", "mpi", "nccl")


def _missing(library: str) -> str | None:
    """Return the reason why two ranks on this machine cannot use a library."""
    if library == "mpi" and not mpi_usable():
        return "needs mpi4py and an MPI launcher"
    if library == "nccl" and torch.cuda.device_count() < 2 and load().version < (2, 30):
        return f"one GPU, and NCCL {load().version_text} takes one rank per GPU; 2.30 takes more"
    return None


@cache
def launched(library: str, launch: str) -> list[RankResult]:
    """Launch all parts; return their output."""
    settings = {"MCR_TEST_DEVICE": "cuda", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    try:
        return run_ranks(
            gpu_jobs.reports,
            2,
            args=[library, launch],
            via="mpi" if mpi_usable() else "torch",
            env=settings | {"GLOO_SOCKET_IFNAME": "lo"},
            timeout=200,
        )
    except RanksFailed as failure:  # some parts may have ended well
        return failure.results


@pytest.mark.parametrize(
    ("launch", "part"), [(launch, part) for launch, parts in gpu_jobs.PARTS.items() for part in parts]
)
@pytest.mark.parametrize("library", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in LIBRARIES])
def test_two_ranks(library: str, launch: str, part: str) -> None:
    if reason := _missing(library):
        pytest.skip(reason)
    if part in gpu_jobs.LACKING.get(library, ()):
        pytest.skip(f"{library} lacks what it needs")
    gpu_jobs.check_part(launched(library, launch), part)
