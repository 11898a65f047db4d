"""The job's store holds keys of present objects, and none of past ones."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from mismatches import outcome_of
from ranks import Via, has_come, meet, own_rank, run_ranks, stop_until, wait_for_ranks
from torch_features import needs_list_keys

import mcr_plus as mcr
from mcr_plus.board.base import pad
from mcr_plus.board.shared import SharedBoard
from mcr_plus.board.store import _FEW, _TEXT_PLACES, _TEXT_SETS, StoreBoard
from mcr_plus.core.c10d import HashStore, TCPStore
from mcr_plus.core.group import Group
from mcr_plus.core.job_store import GroupStore, JobStore
from mcr_plus.job import epoch_change
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
DECIDED = re.compile(r"/(leaving|outcome|attempt0/decision|handles|decision|training)$")
"""Keys of a world that stay when it is replaced."""
EARLY = 10  # groups after which every key is there that stays

SETTINGS: dict[str, Any] = {
    "version": 1,
    "pipeline": [{"select": {}}, {"dispatch": {"timeout": "20s"}}],
}


def _keys(comm: mcr.Communicator) -> list[str]:
    """Return all keys of the store below the job's key."""
    store: Any = comm._runtime.world.store
    while hasattr(store, "inner") or hasattr(store, "underlying_store"):
        store = store.inner if hasattr(store, "inner") else store.underlying_store
    return sorted(store.list_keys())


def _use(group: mcr.Communicator, step: int) -> None:
    """Run operations by every library, with a new tag."""
    for backend in mcr.get_backends():
        value = torch.arange(5.0) + group.rank
        group.all_reduce(value, backend=backend, tag=f"step {step}")
        size = group.size
        assert value.tolist() == [size * n + size * (size - 1) / 2 for n in range(5)]


def groups(hosts: bool, rounds: int) -> dict[str, Any]:
    """Run on ranks: groups that end in every way, on one host or as on several."""
    host = f"host{own_rank()}" if hosts else "host"
    with mock.patch("mcr_plus.job.init.host_name", return_value=host):
        comm = mcr.init(SETTINGS)
    everybody = list(range(comm.size))
    assert isinstance(comm.opened.state.board, StoreBoard if hosts else SharedBoard)
    mcr.barrier()
    found: dict[str, Any] = {"world": [key for key in _keys(comm) if "board/world" in key]}
    counts = []
    for number in range(rounds):
        closed, left, dropped = (mcr.new_group(everybody[::-1]) for _ in range(3))
        with mcr.record():  # ranks of several hosts publish their arrivals at its end
            for group in (closed, left, dropped):
                _use(group, number)
        if number % 10 == 0:
            failing = mcr.new_group(everybody)
            wrong = outcome_of(lambda f=failing: f.barrier() if f.rank else _use(f, 0))  # type: ignore[misc]
            assert wrong["error"] == "OrderMismatch"
            failing.close()
        closed.close()
        with left:  # each rank for itself
            pass
        del dropped, group
        gc.collect()
        mcr.new_group(everybody).close()  # dropped objects are closed here
        mcr.barrier()
        # The rows of the job's own group have slots; each time more of them are used, up to a bound.
        counts.append(len([key for key in _keys(comm) if "/board/world/" not in key]))
        mcr.barrier()
    found["counts"] = counts
    found["last"] = _keys(comm)
    mcr.finalize()
    return found


@pytest.mark.long
@needs_list_keys
@pytest.mark.parametrize(
    ("via", "hosts", "rounds"),
    [pytest.param("mpi", False, 25, marks=needs_mpi), ("torch", False, 60), ("torch", True, 60)],
)
def test_groups_that_are_closed_leave_no_keys(via: Via, hosts: bool, rounds: int) -> None:
    for result in run_ranks(groups, 2, args=[hosts, rounds], via=via, timeout=120):
        counts = result.value["counts"]
        assert counts[-1] <= counts[EARLY], result.value["last"]
        rows = [key for key in result.value["world"] if key.endswith("row")]
        assert len(rows) == (2 if hosts else 0), rows


def inside(rounds: int) -> list[int]:
    """Run on ranks: groups with groups inside them, for the hierarchical stage."""
    stages = [{"hierarchical": {"ranks_per_node": 2}}, *SETTINGS["pipeline"]]
    comm = mcr.init({**SETTINGS, "backends": ["gloo"], "pipeline": stages})
    counts = []
    for number in range(rounds):
        group = comm.branch()
        assert len(group.opened.parts) > 1
        _use(group, number)
        group.close()
        mcr.barrier()
        counts.append(len(_keys(comm)))
        mcr.barrier()
    mcr.finalize()
    return counts


@pytest.mark.long
@needs_list_keys
def test_groups_inside_of_groups_leave_no_keys() -> None:
    for result in run_ranks(inside, 4, args=[6], via="torch", timeout=120):
        assert result.value[-1] <= result.value[2], result.value


def arrivals(how: str) -> dict[str, list[str]]:
    """Run on ranks of two hosts; return their keys for `log.stragglers()` before and after a world.

    Rank 2 dies with `shrink`, and a rank of each host with `one of each host`.
    """
    host = f"host{own_rank() // 2}"
    with mock.patch("mcr_plus.job.init.host_name", return_value=host):
        comm = mcr.init({**SETTINGS, "backends": ["gloo"]})
    launchers = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def noted() -> list[str]:
        return sorted(key for key in launchers.list_keys() if "/noted" in key)

    pair = mcr.new_group([2, 1])
    with mcr.record() as log:
        for _ in range(3):
            comm.barrier()
        if pair.rank >= 0:
            pair.all_reduce(torch.ones(8))
    log.stragglers()
    comm.barrier()
    before = noted()
    comm.barrier()
    if comm.rank in {"shrink": (2,), "one of each host": (0, 3)}.get(how, ()):
        comm.all_reduce(torch.ones(8))
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "finalize":
        own = comm.rank
        mcr.finalize()  # others may end later
        return {"before": before, "after": [key for key in noted() if f"board/world/{own}/noted" in key]}
    if how == "reconfigure":
        handles = comm.all_gather_object(mcr.reconfigure_handle())
        mcr.reconfigure("again", handles)
    else:
        with suppress(mcr.PeerLost):
            while True:
                comm.all_reduce(torch.ones(8))
        mcr.shrink()
    mcr.barrier()
    after = noted()
    mcr.barrier()
    mcr.finalize()
    return {"before": before, "after": after}


@needs_list_keys
@pytest.mark.parametrize(
    ("how", "left"),
    [
        ("shrink", [0, 1, 3]),
        ("one of each host", [1, 2]),
        ("reconfigure", [0, 1, 2, 3]),
        ("finalize", [0, 1, 2, 3]),
    ],
)
def test_arrivals_do_not_stay_in_the_store(how: str, left: list[int]) -> None:
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MCR_MIN_RANKS": "1"}  # the store is the launcher's
    results = run_ranks(arrivals, 4, args=[how], via="torch", env=env, check=False, timeout=120)
    for rank in left:
        value = results[rank].value
        assert value is not None, results[rank].stderr
        # One part per rank of the world and of the pair, and its description.
        assert len(value["before"]) == 2 * (4 + 2), value
        assert value["after"] == []


def declared_lost() -> dict[str, Any]:
    """Run on ranks: rank 3, which was stopped, leaves the old world before the others clear it."""
    rank = own_rank()
    with mock.patch("mcr_plus.job.init.host_name", return_value=f"host{rank // 2}"):
        comm = mcr.init({**SETTINGS, "backends": ["gloo"]})
    launchers = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

    def noted() -> list[str]:
        return sorted(key.partition("board/")[2] for key in launchers.list_keys() if "/noted" in key)

    with mcr.record():
        comm.barrier()
    meet("published", 4)
    if rank == 3:
        stop_until("removes", 3, "CONT")
        with pytest.raises(mcr.Revoked):
            mcr.shrink()
        has_come("has gone")
        return {}
    found: dict[str, Any] = {}
    remove = epoch_change.remove_arrivals

    def removes(*args: Any) -> None:
        meet("removes", 3)
        wait_for_ranks("has gone", 1)
        found["before"] = noted()
        meet("has looked", 3)
        remove(*args)

    with suppress(mcr.PeerLost):
        while True:
            comm.all_reduce(torch.ones(8))
    with mock.patch.object(epoch_change, "remove_arrivals", removes):
        mcr.shrink()
    mcr.barrier()
    found["after"] = noted()
    mcr.barrier()
    mcr.finalize()
    return found


@needs_list_keys
def test_a_lost_rank_removes_no_arrivals_that_others_may_read() -> None:
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MCR_MIN_RANKS": "1"}
    results = run_ranks(declared_lost, 4, via="torch", env=env, timeout=120)
    for result in results[:3]:
        assert [key for key in result.value["before"] if key == "world/3/noted"], result.value
        assert result.value["after"] == []


def worlds(how: str, hosts: bool, rounds: int) -> list[list[str]]:
    """Run on ranks; return the store's keys after each change of the world, without the decisions."""
    found = []
    host = f"host{own_rank() // 2}" if hosts else "host"
    with mock.patch("mcr_plus.job.init.host_name", return_value=host):
        comm = mcr.init({**SETTINGS, "backends": ["gloo"]})
        for number in range(rounds):
            with mcr.record():
                comm.all_reduce(torch.ones(8))
            comm.barrier()
            if how == "reconfigure":
                comm = mcr.reconfigure(f"attempt {number}", comm.all_gather_object(mcr.reconfigure_handle()))
            elif how == "shrink":
                comm = mcr.shrink()
            else:
                if comm.rank == comm.size - 1:
                    comm.all_reduce(torch.ones(8))
                    os.kill(os.getpid(), signal.SIGKILL)
                with suppress(mcr.PeerLost):
                    while True:
                        comm.all_reduce(torch.ones(8))
                comm = mcr.shrink(min_ranks=1)
            for thread in threading.enumerate():
                if thread.name == epoch_change.REMOVES:
                    thread.join()
            comm.barrier()
            found.append([key for key in _keys(comm) if not DECIDED.search(key)])
            comm.barrier()
        mcr.finalize()
    return found


@needs_list_keys
@pytest.mark.parametrize(
    ("how", "hosts", "rounds", "ranks"),
    [
        ("shrink", True, 5, 3),
        ("reconfigure", False, 5, 3),
        ("reconfigure", True, 5, 3),
        ("death", True, 3, 5),
    ],
)
@pytest.mark.parametrize("keeps", ["launcher", "ranks"])
def test_worlds_that_are_replaced_leave_only_what_was_decided(
    how: str, hosts: bool, rounds: int, ranks: int, keeps: str
) -> None:
    env = {"TORCHELASTIC_USE_AGENT_STORE": str(keeps == "launcher"), "MCR_MIN_RANKS": "1"}
    results = run_ranks(worlds, ranks, args=[how, hosts, rounds], via="torch", env=env, check=False)
    for result in results[: ranks - rounds if how == "death" else ranks]:
        assert result.value is not None, result.stderr
        _, second, *later = result.value
        for keys in later:
            assert len(keys) <= len(second), sorted(set(keys) - set(second))


def test_the_last_rank_removes_the_keys_of_all() -> None:
    root = HashStore()
    root.set("of another", "1")
    members = [GroupStore(JobStore(root), Group("g", (4, 7, 9), rank)) for rank in range(3)]
    for rank, member in enumerate(members):
        member.set(f"row/{rank}", b"\x00\xff")
        member.add("counter", 1)
    for member in members[:2]:
        member.leave()
        assert members[2].get("row/0") == b"\x00\xff"  # for whoever comes late
        assert members[2].add("counter", 0) == 3
    members[2].leave()
    assert root.num_keys() == 1


@pytest.mark.parametrize("ranks", [2, _FEW + 1])
def test_descriptions_in_the_store_are_bounded(ranks: int) -> None:
    root = HashStore()
    boards = [StoreBoard(root, Group("g", tuple(range(ranks)), rank)) for rank in range(ranks)]

    def post(first: int, last: int) -> int:
        for sequence in range(first, last):
            for board in boards:
                board.counter[0] = sequence
                board.post(sequence, sequence * 2654435761 % (1 << 32), pad(f"step {sequence}"))
            digest = sequence * 2654435761 % (1 << 32)
            assert boards[1].text(0, sequence, digest) == f"step {sequence}"
        return root.num_keys()

    stored = _TEXT_SETS * _TEXT_PLACES
    kept = post(1, 2 * stored)
    assert post(2 * stored, 3 * stored) <= kept
    assert boards[0].text(1, 5, 5 * 2654435761 % (1 << 32)) == ""  # another one has its place


def test_descriptions_of_operations_in_flight_do_not_take_each_others_place() -> None:
    root = HashStore()
    writer, reader = (StoreBoard(root, Group("g", (0, 1), rank)) for rank in range(2))
    digests = [7 + turn * _TEXT_SETS for turn in range(_TEXT_PLACES + 1)]
    for sequence, digest in enumerate(digests[:-1], 1):
        writer.post(sequence, digest, pad(f"step {digest}"))
    assert [reader.text(0, 1, digest) for digest in digests] == [
        *(f"step {each}" for each in digests[:-1]),
        "",
    ]
    writer.post(len(digests), digests[-1], pad("latest"))
    assert [reader.text(0, 1, digest) for digest in digests] == [
        "", *(f"step {each}" for each in digests[1:-1]), "latest",
    ]  # fmt: skip
    writer.post(len(digests) + 1, digests[0], pad("again"))
    assert reader.text(0, 1, digests[0]) == "again"
