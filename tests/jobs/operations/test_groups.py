"""Groups that have failed, are left, or used by several threads; handles without a wait."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Via, meet, run_ranks, wait_for_files

import mcr_plus as mcr
from mcr_plus.config import reader as configuration
from mcr_plus.job.process import job
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

both = pytest.mark.parametrize(
    "via",
    [pytest.param("mpi", marks=pytest.mark.skipif(not mpi_usable(), reason="needs MPI")), "torch"],
)


def joined(timeout: str = "20s", *stages: dict[str, Any], **more: Any) -> mcr.Communicator:
    pipeline = [*stages, {"select": {}}, {"dispatch": {"timeout": timeout}}]
    return mcr.init({"version": 1, "pipeline": pipeline, **more})


def in_a_thread(function: Callable[[], object]) -> BaseException | None:
    """Return the error of a call in another thread."""
    found: list[BaseException | None] = [None]

    def run() -> None:
        try:
            function()
        except BaseException as error:
            found[0] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def asked(done: str) -> list[Any]:
    """Run on ranks: rank 1 issues nothing until rank 0 is done."""
    comm = joined("2s")
    comm.barrier()
    if comm.rank == 1:
        wait_for_files(Path(done))
        os._exit(0)
    began = time.monotonic()
    work = comm.all_reduce(torch.ones(100_000), async_op=True)
    assert work is not None
    while not work.is_completed() and time.monotonic() - began < 45:
        time.sleep(0.001)
    seconds = time.monotonic() - began
    Path(done).touch()
    return [seconds, type(work.exception()).__name__, str(work.exception())]


@pytest.mark.long
def test_polling_without_wait_reports_a_missing_peer(tmp_path: Path) -> None:
    done = str(tmp_path / "done")
    seconds, error, text = run_ranks(asked, 2, args=[done], via="torch", check=False)[0].value
    assert error == "CommTimeout"
    assert "missing ranks: [1]" in text
    assert 1.9 < seconds < 40


def asked_of_the_dead() -> list[Any]:
    comm = joined("90s")
    meet("before a death", comm.size)
    if comm.rank == 1:
        os._exit(9)
    began = time.monotonic()
    work = comm.all_reduce(torch.ones(100_000), async_op=True)
    assert work is not None
    while not work.is_completed() and time.monotonic() - began < 45:
        time.sleep(0.001)
    return [time.monotonic() - began, str(work.exception())]


def test_polling_without_wait_reports_a_dead_peer() -> None:
    seconds, text = run_ranks(asked_of_the_dead, 2, via="torch", check=False)[0].value
    assert "rank 1 has died" in text
    assert seconds < 40


def failed() -> list[str]:
    comm = joined()
    with pytest.raises(mcr.OrderMismatch):
        comm.all_reduce(torch.ones(4 + comm.rank))

    def use() -> None:
        comm.take_over()
        comm.all_reduce(torch.ones(4))

    return [str(in_a_thread(use)), str(in_a_thread(use))]


def test_failed_group_stays_unusable_after_take_over_by_another_thread() -> None:
    for result in run_ranks(failed, 2, via="torch", check=False):
        assert all("cannot be used after it has failed" in text for text in result.value)


def from_a_forked_thread() -> list[Any]:
    """A thread of a forked child must not touch the parent's memory."""
    comm = joined()
    comm.all_reduce(torch.ones(4))
    if comm.rank == 0:
        child = os.fork()
        if child == 0:

            def use() -> None:
                comm.take_over()
                comm.all_reduce(torch.full((4,), 100.0))

            os._exit(0 if isinstance(in_a_thread(use), mcr.NotInitialized) else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    else:
        code = 0
    value = torch.ones(4)
    comm.all_reduce(value)
    mcr.finalize()
    return [code, value.tolist()]


@pytest.mark.filterwarnings("ignore")
def test_a_thread_of_a_forked_child_is_refused() -> None:
    for result in run_ranks(from_a_forked_thread, 2, via="torch"):
        assert result.value == [0, [2.0] * 4]


def left() -> list[Any]:
    """A group is left while one of its operations is in flight, and another group has failed."""
    comm = joined()
    broken, late, whole = (mcr.new_group([0, 1]) for _ in range(3))
    for group in (broken, late, whole):
        group.all_reduce(torch.ones(4))
    with pytest.raises(mcr.OrderMismatch):
        broken.all_reduce(torch.ones(4 + comm.rank))
    if comm.rank == 0:
        abandoned = late.all_reduce(torch.ones(4), async_op=True)  # no other rank issues it
        assert abandoned is not None
        late._runtime.leave(late, clean=False)
        with pytest.raises(mcr.BackendError, match="was left with operations in flight"):
            abandoned.wait()
        comm.barrier()
    else:
        comm.barrier()  # if this rank had left first, rank 0 would be told that
        late._runtime.leave(late, clean=False)
    large = torch.ones(3_000_000)
    work = whole.all_reduce(large, async_op=True)
    assert work is not None
    whole._runtime.leave(whole)  # waits for it
    done = work.is_completed()
    value = torch.ones(3)
    comm.all_reduce(value)
    return [done, bool((large == 2).all()), value.tolist()]


@both
def test_leaving_a_group_does_not_affect_other_groups(via: Via) -> None:
    for result in run_ranks(left, 2, via=via, check=False):
        assert result.value == [True, True, [2.0] * 3]


def held_back() -> list[Any]:
    comm = joined("20s", {"fuse": {"bucket": "1MiB"}})
    value = torch.ones(4)
    work = comm.all_reduce(value, async_op=True)
    assert work is not None
    refused = in_a_thread(work.wait)
    work.wait()
    mcr.finalize()
    return [type(refused).__name__, value.tolist()]


def test_pending_buckets_survive_a_wait_in_a_wrong_thread() -> None:
    for result in run_ranks(held_back, 2, via="torch"):
        assert result.value == ["OrderMismatch", [2.0] * 4]


def of_its_own() -> float:
    """A group has a codec of its own: small tensors next to large ones keep their values."""
    joined()
    assert job.runtime is not None
    stages: list[dict[str, Any]] = [{"compress": {}}, {"select": {}}, {"dispatch": {}}]
    rules = [{"match": {"kind": "all_reduce"}, "compress": {"codec": "int8_block"}}]
    own = configuration.load({"version": 1, "pipeline": stages, "rules": rules})
    group = job.runtime.open_group("mine", (0, 1), own)
    tensors = [torch.linspace(-1, 1, 100) * scale for scale in (1.0, 1e4, 1.0, 1e4)]
    wanted = [2 * tensor for tensor in tensors]
    group.all_reduce_coalesced(tensors)
    mcr.finalize()
    errors = [(x - y).abs().max() / y.abs().max() for x, y in zip(tensors, wanted, strict=True)]
    return max(float(error) for error in errors)


def test_coalesced_tensors_are_aligned_to_the_codec_of_their_group() -> None:
    for result in run_ranks(of_its_own, 2, via="torch"):
        assert result.value < 0.02


def messages_beside(backend: str) -> list[str]:
    """One thread sends and receives while another reduces."""
    comm = joined(backends=[backend])
    other, found, count = 1 - comm.rank, list[str](), 1500

    def talk() -> None:
        value = torch.zeros(2)
        for turn in range(count):
            if comm.rank == 0:
                comm.send(torch.full((2,), float(turn)), other)
            else:
                comm.recv(value, other)
                if value[0] != turn:
                    found.append(f"message {turn}: {value.tolist()}")

    def run() -> None:
        error = None
        try:
            talk()
        except Exception as raised:
            error = raised
        if error is not None:
            found.append(repr(error))

    thread = threading.Thread(target=run)
    thread.start()
    for turn in range(count):
        value = torch.ones(4)
        comm.all_reduce(value)
        if value[0] != 2:
            found.append(f"sum {turn}: {value.tolist()}")
    thread.join()
    mcr.finalize()
    return found


@pytest.mark.short("torch-msccl")
@pytest.mark.parametrize(("via", "backend"), [("torch", "msccl"), ("torch", "gloo"), ("mpi", "mpi")])
def test_messages_of_one_thread_beside_collectives_of_another(via: Via, backend: str) -> None:
    if via == "mpi" and not mpi_usable():
        pytest.skip("needs MPI")
    for result in run_ranks(messages_beside, 2, args=[backend], via=via):
        assert result.value == []


def refused(use: Callable[[], object]) -> list[str]:
    """The error that a use raises: its class and its words."""
    try:
        use()
    except mcr.McrError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def closed_by_hand() -> dict[str, Any]:
    """Close groups by name and at the end of a block; the job and other groups continue."""
    comm, x = joined(), torch.ones(3)
    with mcr.new_group([1, 0]) as group:
        value = torch.full((5,), float(comm.rank))
        run = mcr.persistent("all_reduce", torch.ones(2))
        own = group.persistent("all_reduce", torch.ones(2))
        own()
        group.all_reduce(value)
        large = torch.ones(1_000_003)
        late = group.all_reduce(large, async_op=True)  # waited for by the end of the block
        message = group.isend(torch.ones(4), 1) if comm.rank == 0 else group.irecv(torch.ones(4), 0)
    other, alone = mcr.new_group([0, 1]), mcr.new_group([1])
    branch = other.branch()
    half = comm.split(comm.rank)
    assert half is not None
    uses: dict[str, Callable[[], object]] = {
        "known": lambda: group.all_reduce(torch.ones(5)),
        "new": lambda: group.broadcast(x, 0),
        "persistent": own,
        "split": lambda: group.split(0),
        "branch": lambda: group.branch(),
        "flush": lambda: group.flush(),
    }
    found = {name: refused(use) for name, use in uses.items()}
    for each in (group, group, alone, half, half, other):
        each.close()
    branch.all_reduce(x)  # a group of its own
    with pytest.raises(ZeroDivisionError), branch:
        raise ZeroDivisionError
    found["after an exception"] = refused(lambda: branch.all_reduce(x))
    mismatched = mcr.new_group([0, 1])
    found["alone"] = refused(mismatched.close if comm.rank else lambda: mismatched.all_reduce(x))
    left = mcr.new_group([0, 1])
    run()
    comm.all_reduce(x)
    still = [left.name, mcr.is_initialized()]
    comm.close()
    return {
        "errors": found,
        "values": [value.tolist(), large[-1].item(), x[0].item()],
        "done": [late is not None and late.is_completed(), message.is_completed()],
        "jobs": [*still, mcr.is_initialized()],
    }


@both
def test_a_closed_group_is_closed_alone(via: Via) -> None:
    for result in run_ranks(closed_by_hand, 2, via=via, check=False):
        found = result.value
        errors = found["errors"]
        for name in ("known", "new", "persistent", "split", "branch", "flush"):
            assert errors[name][0] == "NotInitialized", name
            assert "group 'group1' is closed" in errors[name][1]
        assert errors["after an exception"][0] == "NotInitialized"
        assert errors["alone"][0] == "OrderMismatch"
        assert "tag=close" in errors["alone"][1]
        assert found["values"] == [[1.0] * 5, 2.0, 4.0]
        assert found["done"] == [True, True]
        assert found["jobs"][1:] == [True, False]
