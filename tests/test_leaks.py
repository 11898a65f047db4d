"""What a process holds of the system: groups and jobs that have ended give it back."""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed as dist
from ranks import run_ranks

import mcr_plus as mcr

GLOO = {"version": 1, "backends": ["gloo"]}
ROUNDS = 12
FIRST = 3  # rounds after which everything is there that stays for the life of the process
SPARE = 2  # threads that watch messages, and what torch opens when it likes to


def held() -> tuple[int, int]:
    """How many files this process has open, and how many threads run in it."""
    gc.collect()  # a closed job is a circle of objects
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def exchange(group: dist.ProcessGroup | None) -> None:
    """Use a group of two: by collectives of several kinds, and by messages."""
    rank = dist.get_rank()
    values = [torch.ones(5000) for _ in range(4)]
    dist.all_reduce(values[0], group=group)
    dist.broadcast(values[1], 0, group=group)
    message = dist.isend(values[2], 1 - rank, group=group)
    assert message is not None
    dist.recv(values[3], 1 - rank, group=group)
    message.wait()
    dist.all_reduce(values[1], group=group, async_op=True)  # nobody waits for it
    assert values[0][0] == 2
    assert values[3][0] == 1


def groups(config: dict[str, object] | None) -> list[tuple[int, int]]:
    """Runs on ranks: make a group, use it, destroy it, again and again."""
    dist.init_process_group("mcr", pg_options=config)
    found = []
    for _ in range(ROUNDS):
        group = dist.new_group([0, 1])
        assert isinstance(group, dist.ProcessGroup)
        exchange(group)
        dist.destroy_process_group(group)
        found.append(held())
    exchange(None)  # those that are left work on
    dist.destroy_process_group()
    return found


def jobs_of_torch(config: dict[str, object] | None) -> list[tuple[int, int]]:
    """Runs on ranks: join a job through torch.distributed and leave it, again and again."""
    found = []
    for _ in range(ROUNDS):
        dist.init_process_group("mcr", pg_options=config)
        exchange(None)
        dist.destroy_process_group()
        found.append(held())
    return found


def jobs_of_ours(config: dict[str, object] | None) -> list[tuple[int, int]]:
    """Runs on ranks: the same by `mcr.init`, with a group inside."""
    found = []
    for _ in range(ROUNDS):
        with mcr.init(config) as comm:
            value = torch.ones(5000)
            comm.all_reduce(value)
            mcr.new_group([1, 0]).all_reduce(value)
            assert value[0] == 4
        found.append(held())
    return found


def check(counts: list[list[list[int]]]) -> None:
    for rank, found in enumerate(counts):
        for what, early, late in zip(("files", "threads"), found[FIRST], found[-1], strict=True):
            assert late <= early + SPARE, f"rank {rank}: {what} in turn: {found}"


def test_destroyed_groups() -> None:
    for config in (GLOO, None):
        check([result.value for result in run_ranks(groups, 2, args=[config], via="torch")])


def test_jobs_that_have_ended() -> None:
    for target in (jobs_of_torch, jobs_of_ours):
        check([result.value for result in run_ranks(target, 2, args=[GLOO], via="torch")])
