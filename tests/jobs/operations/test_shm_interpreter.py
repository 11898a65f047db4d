"""The executor of algorithms and the direct collectives, on real ranks."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msccl_jobs as jobs
import numpy as np
import pytest
from ranks import own_rank, run_ranks
from torch.distributed import DistNetworkError

from mcr_plus.backends.shm import interpreter_kernels as words
from mcr_plus.backends.shm import segment
from mcr_plus.backends.shm.interpreter import Interpreter
from mcr_plus.core.c10d import HashStore
from mcr_plus.core.group import Group
from mcr_plus.core.job_store import JobStore
from mcr_plus.errors import BackendUnavailable, LaunchError, PeerLost
from mcr_plus.msccl.algorithm import (
    OPERATIONS,
    RECEIVES,
    SENDS,
    AlgorithmStep,
    Chunks,
    RankProgram,
    ThreadBlock,
)

SHARED = Path("/dev/shm")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_results(ranks: int) -> None:
    for result in run_ranks(jobs.exam, ranks, via="torch", timeout=240):
        assert result.value == []
    assert jobs.left_behind() == []


def test_every_operation_has_a_number_and_flags_for_receiving_and_sending() -> None:
    assert sorted(words.NUMBERS) == sorted(OPERATIONS)
    assert len(set(words.NUMBERS.values())) == len(OPERATIONS)
    steps = [AlgorithmStep(operation, Chunks("i", 0), Chunks("o", 0)) for operation in OPERATIONS]
    program = RankProgram(1, 1, 0, (ThreadBlock(1, 1, 0, tuple(steps)),))
    state = np.zeros(words.HEAD + words.BLOCK + len(steps) * words.STEP, np.int64)
    of_two: Any = SimpleNamespace(_segment=SimpleNamespace(shape=jobs.small(2), base=0, rank=0), _skip=0)
    Interpreter._write_program(of_two, state, program)
    written = state[words.HEAD + words.BLOCK :].reshape(-1, words.STEP)
    for operation, row in zip(OPERATIONS, written, strict=True):
        assert row[words.OPERATION] == words.NUMBERS[operation]
        assert (row[words.TAKES], row[words.PUTS]) == (operation in RECEIVES, operation in SENDS)


@pytest.mark.long
def test_killed_ranks_leave_nothing_behind() -> None:
    (result,) = run_ranks(jobs.killed, 1, args=[25], via="torch", timeout=120)
    assert result.value == []


def test_missing_memory_is_an_error_on_all_ranks() -> None:
    first, second = run_ranks(jobs.too_large, 2, via="torch")
    assert first.value == second.value
    assert "rank 0" in first.value[0]
    assert "enlarge /dev/shm" in first.value[0]


def test_only_files_of_the_dead_are_removed() -> None:
    start, here = segment._start_of(os.getpid()), f"mcr-msccl-{os.getuid()}-{segment._namespace()}"
    names = {
        "alive": f"{here}-{os.getpid()}-{start}-1",
        "reused": f"{here}-{os.getpid()}-{start + 1}-1",
        "elsewhere": f"mcr-msccl-{os.getuid()}-1-{os.getpid()}-1-1",
    }
    try:
        for name in names.values():
            (SHARED / name).touch()
        segment.remove_stale()
        assert {key for key, name in names.items() if (SHARED / name).exists()} == {"alive", "elsewhere"}
    finally:
        for name in names.values():
            (SHARED / name).unlink(missing_ok=True)


def dying(when: str) -> str:
    """Kill one of three ranks while memory is opened; return the errors of the others."""
    me = own_rank()
    create, kept = segment._create, segment._map
    print(os.getpid(), flush=True)
    store = jobs.connect()
    store.set(f"started/{me}", "1")
    store.wait([f"started/{rank}" for rank in range(3)])  # so that none is late

    def create_and_die(nbytes: int) -> Any:
        create(nbytes)
        os.kill(os.getpid(), signal.SIGKILL)

    def map_and_die(path: Path, nbytes: int) -> Any:
        kept(path, nbytes)
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "made":
        segment._create = create_and_die
    elif me == 1:
        segment._map = map_and_die
    with pytest.raises(LaunchError) as told:
        segment.open_segment(store, Group("of-three", (4, 5, 6), me), jobs.small(3), 1.5)
    return str(told.value)


@pytest.mark.long
@pytest.mark.parametrize(("when", "victim"), [("made", 0), ("mapped", 1)])
def test_a_rank_that_dies_while_memory_is_opened_is_named(when: str, victim: int) -> None:
    results = run_ranks(dying, 3, args=[when], via="torch", check=False)
    for result in results:
        if result.rank == victim:
            assert result.returncode == -signal.SIGKILL
        else:
            assert result.value is not None, result.stderr
            waited = re.fullmatch(
                r"group 'of-three': memory of backend msccl was not open after (\d\.\d) s "
                rf"without rank {4 + victim} of the job",
                result.value,
            )
            assert waited is not None, result.value
            assert 1.5 <= float(waited[1]) < 15
    left = [path.name for path in SHARED.glob("mcr-msccl-*")]
    assert not [name for name in left if any(f"-{int(result.stdout)}-" in name for result in results)]


def no_such_size(slot: int, only: int | None) -> str:
    """Use an impossible file size on all ranks, or too small an address space on one rank."""
    me = own_rank()

    def fail(path: Path, nbytes: int) -> Any:
        raise OverflowError("memory mapped size must be positive")

    if me == only:
        segment._map = fail
    with pytest.raises(BackendUnavailable) as told:
        segment.open_segment(jobs.connect(), Group("g", (0, 1), me), segment.Shape(2, slot=slot), 60)
    assert not list(SHARED.glob(f"mcr-msccl-*-{os.getpid()}-*"))
    return str(told.value)


@pytest.mark.parametrize(
    ("slot", "only", "rank"),
    [(1 << 62, None, 0), (1 << 10, 1, 1)],
    ids=["larger than any file", "more than a rank can map"],
)
def test_impossible_sizes_are_an_error_on_all_ranks(slot: int, only: int | None, rank: int) -> None:
    first, second = run_ranks(no_such_size, 2, args=[slot, only], via="torch")
    assert first.value == second.value
    assert f"rank {rank}: " in first.value
    assert "enlarge /dev/shm" in first.value


class Gone:
    """A store with a server that dies after some requests."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._store: Any = HashStore()

    def __getattr__(self, name: str) -> Any:
        self._answers -= 1
        if self._answers < 0:
            raise DistNetworkError("Connection reset by peer")
        return getattr(self._store, name)


@pytest.mark.parametrize("answers", range(3))
def test_memory_is_freed_with_the_store(answers: int) -> None:
    store: Any = Gone(answers)
    with pytest.raises(LaunchError, match=r"^group 'g': memory of backend msccl: the job's store does not"):
        segment.open_segment(store, Group("g", (0, 1), 0), jobs.small(2), 0.1)
    assert not list(SHARED.glob(f"mcr-msccl-*-{os.getpid()}-*"))


def test_a_lost_rank_is_not_late() -> None:
    def lost() -> PeerLost:
        return PeerLost("rank 1: process has died", [1], seen="process has died")

    store = JobStore(HashStore(), timeout=60.0, lost=lost)
    with pytest.raises(PeerLost):
        segment.open_segment(store, Group("g", (0, 1), 0), jobs.small(2), 60)
    assert not list(SHARED.glob(f"mcr-msccl-*-{os.getpid()}-*"))
