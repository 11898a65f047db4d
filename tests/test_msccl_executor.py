"""The executor of algorithms and the direct collectives, on real ranks."""

from __future__ import annotations

import os
from pathlib import Path

import msccl_jobs as jobs
import pytest
from ranks import run_ranks

from mcr_plus.backends.msccl import arena

SHARED = Path("/dev/shm")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_results(ranks: int) -> None:
    for result in run_ranks(jobs.exam, ranks, via="torch", timeout=240):
        assert result.value == []
    assert jobs.leftovers() == []


def test_killed_ranks_leave_nothing_behind() -> None:
    (result,) = run_ranks(jobs.killed, 1, args=[25], via="torch", timeout=120)
    assert result.value == []


def test_memory_that_is_not_there_is_an_error_on_all_ranks() -> None:
    first, second = run_ranks(jobs.too_large, 2, via="torch")
    assert first.value == second.value
    assert "rank 0" in first.value[0]
    assert "enlarge /dev/shm" in first.value[0]


def test_only_files_of_the_dead_are_removed() -> None:
    start, here = arena._start_of(os.getpid()), f"mcr-msccl-{os.getuid()}-{arena._namespace()}"
    names = {
        "alive": f"{here}-{os.getpid()}-{start}-1",
        "reused": f"{here}-{os.getpid()}-{start + 1}-1",
        "elsewhere": f"mcr-msccl-{os.getuid()}-1-{os.getpid()}-1-1",
    }
    try:
        for name in names.values():
            (SHARED / name).touch()
        arena.remove_stale()
        assert {key for key, name in names.items() if (SHARED / name).exists()} == {"alive", "elsewhere"}
    finally:
        for name in names.values():
            (SHARED / name).unlink(missing_ok=True)
