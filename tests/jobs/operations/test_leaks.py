"""Resources of a process: groups and jobs that have ended release them."""

from __future__ import annotations

import gc
import os
import resource

import pytest
import torch
import torch.distributed as dist
from ranks import Via, run_ranks

import mcr_plus as mcr
from mcr_plus.engine import group_runtime
from mcr_plus.job.process import job
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

GLOO = {"version": 1, "backends": ["gloo"]}
needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs MPI")
ROUNDS = 12
FIRST = 3  # rounds after which everything is there that stays for the life of the process
SPARE = 2  # threads that watch messages, and files that torch opens at any time


def held() -> tuple[int, int]:
    """Return the numbers of open files and of threads of this process."""
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
    dist.all_reduce(values[1], group=group, async_op=True)  # no wait
    assert values[0][0] == 2
    assert values[3][0] == 1


def groups(config: dict[str, object] | None) -> list[tuple[int, int]]:
    """Run on ranks: make a group, use it, destroy it, again and again."""
    dist.init_process_group("mcr", pg_options=config)
    found = []
    for _ in range(ROUNDS):
        group = dist.new_group([0, 1])
        assert isinstance(group, dist.ProcessGroup)
        exchange(group)
        dist.destroy_process_group(group)
        found.append(held())
    exchange(None)  # the remaining groups still work
    dist.destroy_process_group()
    return found


def jobs_of_torch(config: dict[str, object] | None) -> list[tuple[int, int]]:
    """Run on ranks: join a job through torch.distributed and leave it, again and again."""
    found = []
    for _ in range(ROUNDS):
        dist.init_process_group("mcr", pg_options=config)
        exchange(None)
        dist.destroy_process_group()
        found.append(held())
    return found


def jobs_of_ours(config: dict[str, object] | None) -> list[tuple[int, int]]:
    """Run the same on ranks by `mcr.init`, with a group inside."""
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


@pytest.mark.long
def test_jobs_that_have_ended() -> None:
    for target in (jobs_of_torch, jobs_of_ours):
        check([result.value for result in run_ranks(target, 2, args=[GLOO], via="torch")])


def dropped(rounds: int) -> dict[str, object]:
    """Run on ranks: groups and wrapped models that the program drops, at another time on each rank."""
    comm = mcr.init({"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "20s"}}]})
    running = job.runtime
    assert running is not None
    value = torch.ones(3)
    circles: list[list[object]] = []

    def use(group: mcr.Communicator) -> None:
        for backend in mcr.get_backends():
            group.all_reduce(value.fill_(1.0), backend=backend)
            assert value[0] == group.size

    def in_a_group(group: mcr.Communicator | None) -> None:
        assert group is not None
        use(group)
        group.all_reduce(torch.ones(100_003), async_op=True)  # no wait
        circle: list[object] = [group]
        circle.append(circle)  # freed by the garbage collector, when it likes to
        circles[:] = [circle]

    def in_layouts() -> None:
        group = mcr.new_group([1, 0])
        rows, columns = (mcr.Layout.sharded((4, 6), [0, 1], dim) for dim in (0, 1))
        x = torch.ones(rows.local_shape(comm.rank) or ())
        for target in (columns, mcr.Layout.replicated((4, 6), [0, 1])):  # by an exchange, and by a collective
            mcr.redistribute(x, rows, target, group=group)
        in_a_group(group)

    def in_a_model() -> None:
        model = torch.nn.Linear(5, 3)
        wrapped = mcr.wrap(model, torch.optim.SGD(model.parameters(), 0.1))
        model(torch.ones(2, 5)).sum().backward()
        wrapped[1].step()

    found: dict[str, object] = {}
    turns = {
        "new_group": lambda: in_a_group(mcr.new_group([1, 0])),
        "split": lambda: in_a_group(comm.split(0)),
        "alone": lambda: in_a_group(comm.split(comm.rank)),
        "branch": lambda: in_a_group(comm.branch()),
        "redistribute": in_layouts,
        "wrap": in_a_model,
    }
    for name, turn in turns.items():
        counts = []
        for number in range(rounds):
            turn()
            if (number + comm.rank) % 3 == 0:
                gc.collect()
            counts.append([*held(), len(running.groups)])
        found[name] = counts

    closed = mcr.new_group([0, 1])
    rows, whole = mcr.Layout.sharded((4, 6), [0, 1], 0), mcr.Layout.replicated((4, 6), [0, 1])
    move = mcr.redistribution({"w": (rows, whole)}, group=closed)
    move({"w": torch.ones(2, 6)})
    closed.close()
    with pytest.raises(mcr.NotInitialized, match="is closed"):
        move({"w": torch.ones(2, 6)})

    kept, given = [mcr.new_group([0, 1])], mcr.new_group([0, 1])
    names = [kept[0].name, given.name]
    run = given.persistent("all_reduce", value)  # the last reference to the group
    del given
    if comm.rank == 0:
        kept.clear()  # rank 1 keeps its own
    circles.clear()
    gc.collect()
    comm.branch().barrier()
    run()
    found["open"] = [name in [each.name for each in running.groups] for name in names]
    del run
    kept.clear()
    gc.collect()
    comm.branch().barrier()
    found["closed"] = [name in [each.name for each in running.groups] for name in names]
    left = mcr.new_group([0, 1])
    left.barrier()
    running.leave(left)  # each rank for itself, as torch's groups are
    waiting = len(running.idle_channels)
    comm.branch().barrier()
    found["left"] = [waiting == ("mpi" in mcr.get_backends()), not running.idle_channels]
    mcr.finalize()
    return found


@pytest.mark.long
@pytest.mark.parametrize("via", [pytest.param("mpi", marks=needs_mpi), "torch"])
@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(1000, marks=pytest.mark.slow)])
def test_dropped_groups_and_models(via: Via, rounds: int) -> None:
    for rank, result in enumerate(run_ranks(dropped, 2, args=[rounds], via=via, timeout=240 + 2 * rounds)):
        found = result.value
        assert found.pop("open") == [True, True]
        assert found.pop("closed") == [False, False]
        assert found.pop("left") == [True, True]
        for name, counts in found.items():
            # One more object may wait for the garbage collector now.
            flat = [late <= early + 2 * SPARE for early, late in zip(counts[FIRST], counts[-1], strict=True)]
            assert all(flat), f"rank {rank}, {name}: files, threads, groups in turn: {counts}"


def limited() -> dict[str, object]:
    """Run on ranks: rank 1 may open a few files only."""
    comm = mcr.init({"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "20s"}}]})
    hard = len(os.listdir("/proc/self/fd")) + (50 if comm.rank else 1000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 20, hard))
    groups: list[mcr.Communicator] = []

    def open_many() -> None:
        while len(groups) < 60:
            groups.append(mcr.new_group([0, 1]))

    with pytest.raises(mcr.BackendError) as raised:
        open_many()
    opened = len(groups)
    with pytest.raises(mcr.BackendError, match="split"):
        comm.split(0)
    alone = comm.split(comm.rank)  # needs none
    groups.pop().close()
    again = mcr.new_group([0, 1])
    again.all_reduce(value := torch.ones(5))
    groups.clear()
    gc.collect()
    several = [mcr.new_group([0, 1]) for _ in range(2)]  # the dropped groups make room
    for each in several:
        each.all_reduce(value)
    comm.all_reduce(value)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    mcr.finalize()
    return {"error": str(raised.value), "opened": opened, "value": value.tolist(), "raised": soft == hard,
            "alone": alone is not None}  # fmt: skip


def test_new_groups_are_refused_on_all_ranks_if_one_lacks_file_descriptors() -> None:
    results = [result.value for result in run_ranks(limited, 2, via="torch")]
    for found in results:
        assert "rank 1 has too few file descriptors left" in found["error"]
        assert "group.close()" in found["error"]
        assert "ulimit -n" in found["error"]
        assert found["value"] == [16.0] * 5
        assert found["alone"]
    assert results[0]["opened"] == results[1]["opened"] > 3
    assert [found["raised"] for found in results] == [False, True]  # where the soft limit was reached


def many_signatures() -> dict[str, object]:
    """Run on ranks: more signatures than groups remember, with other strides on other ranks."""
    pytest.MonkeyPatch().setattr(group_runtime, "SIGNATURES", 16)
    pipeline = [{"fuse": {}}, {"compress": {}}, {"select": {}}, {"dispatch": {"timeout": "20s"}}]
    comm = mcr.init({"version": 1, "pipeline": pipeline})
    group = mcr.new_group([1, 0])
    rank, peer = comm.rank, 1 - comm.rank
    run = group.persistent("all_reduce", steady := torch.ones(3))
    feedback = {"codec": "topk", "ratio": 0.005, "error_feedback": True}
    held_back = group.all_reduce(bucket := torch.full((7,), float(rank)), async_op=True, tag="held back")
    most = 0
    for number in range(100):
        own = torch.full((3, 2) if rank else (2, 3), float(rank + number))
        group.all_reduce(own.T if rank else own, tag=f"step {number}")
        assert own[0, 0] == 2 * number + 1
        values = torch.zeros(200)
        values[number], values[150] = 1.0, 0.01
        group.all_reduce(values, compress=feedback, tag="kept")  # the larger one; the rest is left for later
        late = [torch.ones(1 + (number * 3 + part) % 41) for part in range(2)]
        works = [group.all_reduce(each, async_op=True) for each in late]
        group.all_reduce(hot := torch.ones(5), "MAX")
        message = torch.full((2,), float(number))
        if number % 2 == rank:
            group.send(message, peer, label=f"message {number}")
        else:
            group.recv(message.zero_(), peer, label=f"message {number}")
            assert message[0] == number
        for work in works:
            assert work is not None
            work.wait()
        assert all(bool((each == 2).all()) for each in late)
        assert hot[0] == 1
        if number == 50:
            run()
        opened = group.opened
        most = max(most, len(opened.chains), len(opened.messages), len(opened.runtime.operations) // 4)
    run()
    assert held_back is not None
    held_back.wait()
    rest = torch.zeros(200)
    group.all_reduce(rest, compress=feedback, tag="kept")
    chains = comm.all_gather_object([each.describe() for each in group.opened.chains])
    mcr.finalize()
    return {
        "steady": steady.tolist(), "bucket": bucket[0].item(), "rest": rest[150].item(), "most": most,
        "alike": chains[0] == chains[1],
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("via", [pytest.param("mpi", marks=needs_mpi), "torch"])
def test_signatures_are_bounded(via: Via) -> None:
    for result in run_ranks(many_signatures, 2, via=via):
        found = result.value
        assert found["steady"] == [4.0] * 3
        assert found["bucket"] == 1
        assert found["rest"] == pytest.approx(2.0, rel=1e-3)  # of all calls, not of the latest alone
        assert found["most"] <= 17
        assert found["alike"]
