"""After a failure other groups continue, `mcr.reset` makes a new world, broken libraries are not called."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mismatches import outcome_of
from ranks import Via, run_ranks, wait_for_files

import mcr_plus as mcr
from mcr_plus.backends import backend_class
from mcr_plus.backends.mpi import backend as mpi
from mcr_plus.backends.mpi.contexts import Contexts
from mcr_plus.config import reader as configuration
from mcr_plus.engine.operation import BoundOperation
from mcr_plus.job.init import current
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
both = pytest.mark.parametrize("via", [pytest.param("mpi", marks=needs_mpi), "torch"])

STAGES: list[dict[str, Any]] = [
    {"fuse": {}},
    {"compress": {}},
    {"select": {}},
    {"dispatch": {"timeout": "20s"}},
]


def _sum(comm: mcr.Communicator, numel: int, **options: Any) -> list[float]:
    value = torch.arange(numel) + 10.0 * (comm.rank + 1)
    comm.all_reduce(value, **options)
    return value.tolist()


def _expected(size: int, numel: int) -> list[float]:
    return [size * index + 10.0 * size * (size + 1) / 2 for index in range(numel)]


def _open(most: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return the files and threads of this process; with `most`, once threads have had time to end."""
    gc.collect()
    ends = time.monotonic() + 5
    while True:
        found = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        if most is None or (found[0] <= most[0] and found[1] <= most[1]) or time.monotonic() > ends:
            return found
        time.sleep(0.02)


def _mistake(comm: mcr.Communicator, backend: str) -> str:
    """Let the last rank send another size, both known to all; return each rank's error."""
    for numel in (3, 5):
        assert _sum(comm, numel, backend=backend) == _expected(comm.size, numel)
    told = outcome_of(lambda: _sum(comm, 5 if comm.rank == comm.size - 1 else 3, backend=backend))
    return str(told["error"])


def carry_on(libraries: list[str]) -> dict[str, Any]:
    """Run on ranks: a group fails, then the world fails, and there is a new world."""
    found: dict[str, Any] = {"told": []}
    world = mcr.init({"version": 1, "backends": libraries, "pipeline": STAGES})
    size = world.size
    for backend in libraries:
        group, other = mcr.new_group(list(range(size))), mcr.new_group(list(range(size))[::-1])
        found["told"].append(_mistake(group, backend))
        assert _sum(other, 7, backend=backend) == _expected(size, 7)
        assert _sum(world, 7) == _expected(size, 7)
    kept = world.persistent("barrier")
    for backend in libraries:
        world = mcr.world()
        left = world.all_reduce(torch.ones(1 << 16), async_op=True, backend=backend)  # no wait
        assert left is not None
        found["told"].append(_mistake(world, backend))
        fresh = mcr.reset()
        assert fresh is mcr.world()
        assert _sum(fresh, 4, backend=backend) == _expected(size, 4)
        assert _sum(mcr.new_group(list(range(size))), 9) == _expected(size, 9)
        assert outcome_of(lambda old=world: _sum(old, 3))["error"] == "NotInitialized"  # type: ignore[misc]
    assert outcome_of(kept)["error"] == "NotInitialized"
    open_ones = []
    for _ in range(8):  # also where nothing has failed
        mcr.reset()
        assert _sum(mcr.world(), 2) == _expected(size, 2)
        open_ones.append(_open())
    found["open"] = [open_ones[1], _open(open_ones[1])]
    mcr.finalize()
    found["after the end"] = outcome_of(mcr.reset)["error"]
    return found


@pytest.mark.short("2-torch")
@both
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_job_continues_after_failures_and_resets(via: Via, ranks: int) -> None:
    libraries = ["msccl", "mpi", "gloo"] if via == "mpi" else ["msccl", "gloo"]
    for result in run_ranks(carry_on, ranks, args=[libraries], via=via, timeout=120, teardown=True):
        assert result.value["told"] == ["OrderMismatch"] * (2 * len(libraries))
        assert result.value["after the end"] == "NotInitialized"
        first, last = result.value["open"]
        assert last[0] <= first[0] + 3, "file descriptors"
        assert last[1] <= first[1] + 1, "threads"


def alone() -> None:
    mcr.init()
    x = torch.ones(3)
    mcr.all_reduce(x)
    comm = mcr.reset()
    comm.all_reduce(x)
    assert x.tolist() == [1.0, 1.0, 1.0]
    mcr.finalize()


def test_a_job_of_one_rank_may_be_reset() -> None:
    run_ranks(alone, 1, via="torch")


def remedies() -> list[str]:
    """Run on ranks; return the errors of operations of a failed group, by the ways to continue."""
    world = mcr.init({"version": 1, "backends": ["gloo"], "pipeline": STAGES})
    found = []
    for group in (mcr.new_group([1, 0]), world.branch(), world):
        assert _mistake(group, "gloo") == "OrderMismatch"
        found.append(str(outcome_of(group.barrier)["text"]))
    mcr.reset()
    mcr.finalize()
    dist.init_process_group("mcr", pg_options={"version": 1, "backends": ["gloo"], "pipeline": STAGES})
    with pytest.raises(mcr.OrderMismatch):
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
    found.append(str(outcome_of(dist.barrier)["text"]))
    dist.destroy_process_group()
    return found


def test_operations_after_a_failure_name_the_remedy() -> None:
    fresh = "mcr.reset() makes a fresh world"
    expected = [
        f"(close it on its ranks and make another with mcr.new_group, or {fresh}): operation #",
        f"({fresh}): operation #",
        f"({fresh}): operation #",
        "(destroy the process group and make a new one): operation #",
    ]
    for result in run_ranks(remedies, 2, via="torch", timeout=90):
        for told, wanted in zip(result.value, expected, strict=True):
            assert wanted in told


def truncated() -> dict[str, Any]:
    """Run on ranks: MPI reports a truncation in one group, while an operation of another is in flight."""
    from mpi4py import MPI

    world = mcr.init({"version": 1, "backends": ["mpi", "gloo"], "pipeline": STAGES})
    group, other = (mcr.new_group([0, 1]) for _ in range(2))
    for _ in range(3):
        assert _sum(group, 3, backend="mpi") == _sum(world, 3, backend="gloo") == _expected(2, 3)
    kept = other.persistent("all_reduce", torch.ones(3), backend="mpi")
    kept()
    kept()
    pending = other.irecv(torch.zeros(4), 1 - other.rank, backend="mpi")
    broken = group.all_reduce(torch.ones(3), async_op=True, backend="mpi", tag="broken")
    assert broken is not None
    broken.wait()
    bound: list[BoundOperation] = [
        each
        for each in world._runtime.engine.bound
        if each.signature.tag == "broken" and each.signature.group == group.name
    ]

    def fail(message: object) -> Any:
        raise MPI.Exception(MPI.ERR_TRUNCATE)

    for each in bound:
        each.start = fail
    asked = [0]
    probe = pending.poll  # type: ignore[attr-defined]

    def counted() -> bool:
        asked[0] += 1
        return bool(probe())

    pending.poll = counted  # type: ignore[attr-defined]

    def issue_and_wait() -> None:
        work = group.all_reduce(torch.ones(3), async_op=True, backend="mpi", tag="broken")
        assert work is not None
        work.wait()

    told = outcome_of(issue_and_wait)
    before = asked[0]
    found = {
        "broken": told,
        "in flight": outcome_of(pending.wait),
        "persistent": outcome_of(kept),
        "later": outcome_of(lambda: _sum(world, 3, backend="mpi")),
        "polls": asked[0] - before,
    }
    found["fresh"] = outcome_of(mcr.reset)
    mcr.init({"version": 1, "backends": ["gloo"], "pipeline": STAGES})
    assert _sum(mcr.world(), 3) == _expected(2, 3)
    return found  # mpirun ends all ranks when the first has left without MPI_Finalize: they meet before


@needs_mpi
def test_mpi_is_not_called_again_after_a_truncation() -> None:
    for result in run_ranks(truncated, 2, timeout=120, check=False):
        found = result.value
        assert found["broken"]["error"] == "BackendError"
        for name in ("broken", "in flight", "later", "fresh"):
            assert found[name]["error"] in ("BackendError", "BackendUnavailable"), name
        for name in ("in flight", "persistent", "later", "fresh"):
            assert "MPI is not used any more in this process" in found[name]["text"], name
        assert found["polls"] == 0


def _counted(group: mcr.Communicator, calls: list[str]) -> None:
    """Note every call that hands an operation bound by `group` from here on to MPI."""
    channel: Any = group.opened.runtime.channels["mpi"].channel
    bind, bind_persistent = channel.bind, channel.bind_persistent

    def counted(signature: Any) -> Any:
        start = bind(signature)

        def begin(message: Any) -> Any:
            calls.append("start")
            return start(message)

        return begin

    class Request:
        def __init__(self, request: Any) -> None:
            self.request = request

        def begin(self) -> None:
            calls.append("begin")
            self.request.begin()

        def test(self) -> bool:
            calls.append("test")
            return bool(self.request.test())

    def counted_request(*arguments: Any) -> Any:
        request = bind_persistent(*arguments)
        return None if request is None else Request(request)

    vars(channel).update(bind=counted, bind_persistent=counted_request)


def known_to_other_groups() -> dict[str, Any]:
    """Run on ranks: MPI breaks while groups that have done operations often have nothing in flight."""
    world = mcr.init({"version": 1, "backends": ["mpi", "gloo"], "pipeline": STAGES})
    broken, *others = (mcr.new_group([0, 1]) for _ in range(4))
    calls: list[str] = []
    for group in others:
        _counted(group, calls)
    synchronous, persistent, message = others
    kept = persistent.persistent("all_reduce", value := torch.ones(3), backend="mpi")
    peer = 1 - world.rank

    def send_and_receive() -> None:
        sent = message.isend(torch.ones(2), peer, backend="mpi")
        message.recv(torch.zeros(2), peer, backend="mpi")
        sent.wait()

    for _ in range(4):
        assert _sum(synchronous, 3, backend="mpi") == _expected(2, 3)
        kept()
        send_and_receive()
        assert _asynchronous(broken)["error"] is None
    assert value.tolist() == [16.0] * 3
    assert len(calls) > 10
    found: dict[str, Any] = {"broken": _break_mpi(broken)}
    before = len(calls)
    found["synchronous"] = outcome_of(lambda: _sum(synchronous, 3, backend="mpi"))
    found["persistent"] = outcome_of(kept)
    found["message"] = outcome_of(send_and_receive)
    found["again"] = outcome_of(lambda: _sum(synchronous, 3, backend="mpi"))
    found["calls"] = len(calls) - before
    assert _sum(world, 3, backend="gloo") == _expected(2, 3)
    return found


@pytest.mark.long
@needs_mpi
def test_operations_bound_before_an_mpi_failure_do_not_call_mpi_in_any_group() -> None:
    for result in run_ranks(known_to_other_groups, 2, timeout=120, check=False):
        found = result.value
        assert found is not None, result.stderr
        assert found["broken"]["error"] == "BackendError"
        for name in ("synchronous", "persistent", "message", "again"):
            assert found[name]["error"] == "BackendError", name
            assert "MPI is not used any more in this process" in found[name]["text"], (name, found[name])
        assert found["calls"] == 0


def resets(mistake: str) -> dict[str, Any]:
    """Run on ranks: many worlds, each with its own signatures; `mistake`: the library on which one fails."""
    from mpi4py import MPI

    world = mcr.init({"version": 1, "backends": ["mpi", "gloo"], "pipeline": STAGES})
    size = world.size
    contexts, rooms, handles, signatures = [], [], [], []
    for number in range(30 if mistake != "mpi" else 8):
        left = mcr.new_group(list(range(size)))
        groups = [world, left, mcr.new_group(list(range(size))[::-1]), mcr.new_group([0, 1])]
        for group in groups:
            for numel in range(1, 8):
                for _ in range(3):
                    assert group.rank < 0 or _sum(group, numel, backend="mpi") == _expected(group.size, numel)
        channels: list[Any] = [
            each.runtime.channels["mpi"].channel for each in current().groups if each.runtime.channels
        ]
        if number % 2:
            with left:  # by each rank for itself
                pass
        if mistake:
            assert _mistake(world, mistake) == "OrderMismatch"
        signatures.append(sum(len(channel.contexts.own) for channel in channels))
        world = mcr.reset()
        another = MPI.COMM_SELF.Dup()
        handles.append(another.py2f())
        another.Free()
        contexts.append(Contexts.unreserved)
        rooms.append(world.opened.runtime.channels["mpi"].channel.contexts.limit)  # type: ignore[attr-defined]
        gc.collect()
    mcr.finalize()
    return {"contexts": contexts, "rooms": rooms, "handles": handles, "signatures": signatures}


@pytest.mark.long
@needs_mpi
@pytest.mark.parametrize(("ranks", "mistake"), [(2, ""), (3, ""), (2, "gloo")])
def test_reset_frees_mpi_communicators(ranks: int, mistake: str) -> None:
    for result in run_ranks(resets, ranks, args=[mistake], timeout=150):
        found = result.value
        assert min(found["signatures"]) >= 7
        assert set(found["contexts"]) == {1024 - 192}
        assert set(found["rooms"]) == {192}
        assert found["handles"][-1] <= found["handles"][2], "communicators of MPI itself"


@pytest.mark.long
@needs_mpi
def test_reset_after_an_mpi_failure_keeps_the_contexts_of_signatures() -> None:
    for result in run_ranks(resets, 2, args=["mpi"], timeout=150):
        found = result.value
        for number, left in enumerate(found["contexts"]):
            # A world costs at most the contexts of its own group: other groups had nothing in flight.
            assert left >= 1024 - 192 - 10 * (number + 1), found
        assert found["rooms"][-1] == 192


def failed_inits(libraries: list[str], broken: str, times: int) -> list[tuple[int, int]]:
    """Run jobs that cannot begin, because a library makes no group; return files and threads after each."""
    stages = [*STAGES[:-1], {"dispatch": {"timeout": "20s", "progress": "thread"}}]
    found = []
    for number in range(times):
        with mock.patch.object(
            backend_class(broken), "open", side_effect=mcr.BackendUnavailable("not today")
        ):
            if number % 2:
                mcr.init({"version": 1, "backends": ["msccl"], "pipeline": STAGES})
                told = outcome_of(lambda: _reset_with(libraries, stages))
            else:
                told = outcome_of(lambda: mcr.init({"version": 1, "backends": libraries, "pipeline": stages}))
        assert told["error"] == "BackendUnavailable", told
        assert "not today" in told["text"]
        found.append(_open())
    found.append(_open(found[3]))
    comm = mcr.init({"version": 1, "backends": libraries, "pipeline": stages})
    for library in libraries:
        assert _sum(comm, 3, backend=library) == _expected(comm.size, 3)
    mcr.finalize()
    return found


def _reset_with(libraries: list[str], stages: list[dict[str, Any]]) -> None:
    """A reset to a configuration that has become impossible."""
    runtime = current()
    runtime.loaded = configuration.load({"version": 1, "backends": libraries, "pipeline": stages})
    mcr.reset()


@pytest.mark.long
@pytest.mark.parametrize(
    ("via", "libraries", "broken"),
    [
        pytest.param("mpi", ["gloo", "mpi"], "mpi", marks=needs_mpi),
        pytest.param("mpi", ["mpi", "gloo"], "gloo", marks=needs_mpi),
        ("torch", ["msccl", "gloo"], "gloo"),
    ],
)
def test_inits_that_fail_leave_nothing_open(via: Via, libraries: list[str], broken: str) -> None:
    for result in run_ranks(failed_inits, 2, args=[libraries, broken, 12], via=via, timeout=120):
        early, late = result.value[3], result.value[-1]
        assert late[0] <= early[0] + 2, f"files: {result.value}"
        assert late[1] <= early[1] + 1, f"threads: {result.value}"


def too_late(folder: str) -> dict[str, Any]:
    """Run on ranks: rank 1 does not come to reset in time, and then all call init."""
    world = mcr.init({"version": 1, "backends": ["gloo"], "pipeline": STAGES}, timeout=2.0)
    given_up = Path(folder, "given_up")
    if world.rank == 1:
        wait_for_files(given_up)
    found = {"reset": outcome_of(mcr.reset)}
    given_up.touch()
    found |= {
        "barrier": outcome_of(mcr.barrier),
        "old": outcome_of(world.barrier),
        "again": outcome_of(mcr.reset),
    }
    world = mcr.init({"version": 1, "backends": ["gloo"], "pipeline": STAGES}, timeout=20.0)
    assert _sum(world, 3) == _expected(2, 3)
    mcr.finalize()
    found["finalized"] = outcome_of(mcr.barrier)
    return found


@pytest.mark.long
@both
def test_failed_reset_names_the_remedy(tmp_path: Path, via: Via) -> None:
    for result in run_ranks(too_late, 2, args=[str(tmp_path)], via=via):
        found = result.value
        told = "ranks [1] did not call reset within 2 s"
        assert found["reset"]["error"] == "LaunchError"
        assert found["reset"]["text"] == (
            f"reset: {told}. The old world is closed; to go on, let all ranks call mcr.init"
        )
        for name in ("barrier", "again"):
            assert found[name]["error"] == "NotInitialized"
            assert found[name]["text"] == f"reset has failed ({told}); call mcr.init again to join a job"
        assert found["old"]["error"] == "NotInitialized"
        assert found["finalized"]["text"] == "finalize has been called; call mcr.init again to join a job"


class _Forbidden:
    """A replacement of MPI's objects in a process that must not call MPI."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"MPI has been called: {name}")


def _never() -> Any:
    raise AssertionError("MPI has been asked for")


def _forbid_mpi(world: mcr.Communicator, used: list[mcr.Communicator]) -> None:
    setattr(mpi, "load_mpi", _never)  # noqa: B010 (a module's own import)
    running = current()
    for backend in running.libraries.backends.values():
        if backend.name == "mpi":
            vars(backend).update(_comm=_Forbidden(), _probe=_Forbidden(), _own_probe=_Forbidden())
    for opened in running.groups:
        channel: Any = opened.runtime.channels["mpi"].channel
        own = dict.fromkeys(channel.contexts.own, _Forbidden())
        vars(channel).update(_comm=_Forbidden(), _messages=_Forbidden())
        vars(channel.contexts).update(own=own, _shared=_Forbidden(), _comm=_Forbidden(), _mpi=_Forbidden())
        vars(channel._requests).update(_requests=[_Forbidden()], _mpi=_Forbidden())
        vars(channel.collectives).update(_mpi=_Forbidden())
    del used[:]


def _break_mpi(group: mcr.Communicator) -> Any:
    """MPI reports a truncation in an operation that `group` has done before."""
    from mpi4py import MPI

    def fail(message: object) -> Any:
        raise MPI.Exception(MPI.ERR_TRUNCATE)

    for each in list(group._runtime.engine.bound):
        if each.signature.group == group.name and each.signature.async_op:
            each.start = fail
    return _asynchronous(group)


def _asynchronous(group: mcr.Communicator) -> dict[str, Any]:
    def run() -> None:
        work = group.all_reduce(torch.ones(3), async_op=True, backend="mpi", tag="broken")
        assert work is not None
        work.wait()

    return outcome_of(run)


def switched_off(broken_on: list[int], hierarchical: bool) -> dict[str, Any]:
    """Run on ranks: MPI breaks on some of them, and the program continues with groups."""
    stages = STAGES[:1] + [{"hierarchical": {"ranks_per_node": 2}}] * hierarchical + STAGES[1:]
    world = mcr.init({"version": 1, "pipeline": stages})
    size, everybody = world.size, list(range(world.size))
    groups = [mcr.new_group(everybody) for _ in range(5)]
    broken, closed, dropped, healthy, apart = groups
    for group in groups:
        for _ in range(3):
            assert _sum(group, 3, backend="mpi") == _expected(size, 3)
    for _ in range(3):
        assert _asynchronous(broken)["error"] is None
    found: dict[str, Any] = {}
    if world.rank in broken_on:
        found["broken"] = _break_mpi(broken)
        _forbid_mpi(world, groups)
    else:
        del groups[:]
        found["broken"] = _asynchronous(broken)
    closed.close()
    del dropped
    gc.collect()
    fresh = mcr.new_group(everybody)
    found["libraries"] = list(fresh.opened.runtime.channels)
    found["sum"] = _sum(fresh, 5) == _expected(size, 5)
    assert not hierarchical or len(fresh.opened.parts) > 1
    found["parts"] = sorted({name for part in fresh.opened.parts for name in part.runtime.channels})
    found["branch"] = list(fresh.branch().opened.runtime.channels)
    found["named"] = outcome_of(lambda: _sum(fresh, 3, backend="mpi"))
    whole = [rank for rank in everybody if rank not in broken_on]
    inside = mcr.new_group(whole or everybody)
    if inside.rank >= 0 and len(whole) > 1:
        assert _sum(inside, 3, backend="mpi") == [
            len(whole) * index + 10.0 * sum(rank + 1 for rank in range(len(whole))) for index in range(3)
        ]
    if inside.rank >= 0:
        inside.close()
    found["new signature"] = outcome_of(lambda: healthy.all_reduce(torch.ones(4).half(), backend="mpi"))
    found["persistent"] = outcome_of(lambda: apart.persistent("all_reduce", torch.ones(3), backend="mpi")())
    assert _sum(world, 7) == _expected(size, 7)
    fresh.close()
    found["reset"] = mcr.reset().size
    found["after"] = mcr.get_backends()
    assert _sum(mcr.world(), 4) == _expected(size, 4)
    mcr.finalize()
    mcr.init({"version": 1, "pipeline": STAGES})
    assert _sum(mcr.world(), 4) == _expected(size, 4)
    return found


@pytest.mark.long
@needs_mpi
@pytest.mark.parametrize(
    ("ranks", "broken_on", "hierarchical"),
    [(2, [0], False), (2, [0, 1], False), (3, [2], False), (4, [0], True)],
)
def test_groups_opened_after_an_mpi_failure_use_other_libraries(
    ranks: int, broken_on: list[int], hierarchical: bool
) -> None:
    results = run_ranks(switched_off, ranks, args=[broken_on, hierarchical], timeout=150, check=False)
    for result in results:
        found = result.value
        assert found is not None, result.stderr
        assert found["broken"]["error"] == "BackendError"
        assert found["libraries"] == found["branch"] == ["msccl", "gloo"]
        assert set(found["parts"]) <= {"msccl", "gloo", "local"}
        assert found["sum"]
        assert found["named"]["error"] == "Unsupported", found["named"]
        for name in ("new signature", "persistent"):
            assert found[name]["error"] == "BackendError"
            assert "MPI is not used any more in this process" in found[name]["text"], (name, found[name])
        assert found["reset"] == ranks
        assert found["after"] == ["msccl", "gloo"]
