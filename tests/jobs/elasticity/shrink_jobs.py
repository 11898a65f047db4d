"""Programs of ranks that lose some of them and go on, for tests/jobs/elasticity/test_shrink.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import wait_for_files

import mcr_plus as mcr
from mcr_plus.core.c10d import TCPStore
from mcr_plus.job import epoch_change, init
from mcr_plus.job.members import EpochWatch
from mcr_plus.membership.rules import Proposal
from mcr_plus.rendezvous.arrivals import have_trained


def _begin(backends: list[str] | None, **dispatch: Any) -> mcr.Communicator:
    torch.set_num_threads(1)
    options = {"timeout": "30s", **dispatch}
    config = {"version": 1, "pipeline": [{"fuse": {}}, {"select": {}}, {"dispatch": options}]}
    return mcr.init(config, backends=backends)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_beside(comm: mcr.Communicator) -> None:
    """Die once all others are in `_wait_for_loss`: what they did before is done on all of them."""
    comm.all_reduce(torch.ones(8))
    _die()


def _wait_for_loss(comm: mcr.Communicator) -> mcr.PeerLost:
    try:
        while True:
            comm.all_reduce(torch.ones(8))
    except mcr.PeerLost as lost:
        return lost


def _error(call: Callable[[], Any]) -> str:
    """The kind and the text of the error that a call raises; empty if it raises none."""
    try:
        call()
    except mcr.McrError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def messages_in_flight(backend: str, folder: str) -> dict[str, Any]:
    """Rank 0 has sent three messages to rank 1, of which one is received, and one is on its way; rank 2 dies.

    The ranks that are left find out which have come, and send the others again.
    """
    old = _begin([backend])
    messages = [torch.full((5,), 10.0 + number) for number in range(3)]
    buffers = [torch.zeros(5) for _ in messages]
    old.barrier()
    works = []
    issued = [Path(folder, f"issued.{rank}") for rank in (0, 1)]
    if old.rank == 0:
        works = [old.isend(each, 1) for each in messages]
        works[0].wait()
    elif old.rank == 1:
        old.recv(buffers[0], 0)
        works = [old.irecv(buffers[1], 0)]
    else:
        wait_for_files(*issued)
        _die()
    issued[old.rank].touch()
    wait_for_files(*issued)
    time.sleep(1.0)  # the second message has arrived, and nobody has looked
    _wait_for_loss(old)
    comm = mcr.shrink()
    told = [_error(work.wait).partition(":")[0] for work in works]
    received = {0: 1 + (told == [""])} if old.rank == 1 else {}
    known = dict(comm.all_gather_object((old.rank, received)))
    begin, rank_1 = known[1][0], sorted(known).index(1)
    if old.rank == 0:
        for each in messages[begin:]:
            comm.send(each, rank_1)
    else:
        for each in buffers[begin:]:
            comm.recv(each, 0)
    comm.barrier()
    mcr.finalize()
    return {"told": told, "received": begin, "values": [each[0].item() for each in buffers]}


def after_a_death(backends: list[str] | None, victim: int) -> dict[str, Any]:
    """What survivors have after one of four ranks has died: ranks, sums, errors of old handles, gradients."""
    comm = _begin(backends)
    rank = comm.rank
    pair = mcr.new_group([0, 2, 3] if victim != 0 else [3, 2, 1])
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mcr.wrap(model, optimizer)
    model(torch.full((1, 3), 1.0 + rank)).sum().backward()
    weight = model.weight.detach().clone()
    if rank == victim:
        _die_beside(comm)
    lost = _wait_for_loss(comm)
    new = mcr.shrink()
    x = torch.full((5,), 1.0 + 10 * rank)
    mcr.all_reduce(x)
    optimizer.zero_grad()
    model(torch.full((1, 3), 1.0 + rank)).sum().backward()
    assert model.weight.grad is not None
    calls: dict[str, Callable[[], Any]] = {
        "world": lambda: comm.all_reduce(x),
        "group": lambda: pair.all_reduce(x),
    }
    errors = {name: _error(call).partition(":")[0] for name, call in calls.items()}
    result = {
        "old": rank,
        "lost": list(lost.ranks),
        "rank": new.rank,
        "size": mcr.get_world_size(),
        "is_world": new is mcr.world(),
        "sum": x.tolist(),
        "gradient": model.weight.grad.unique().tolist(),
        "unchanged": bool(model.weight.detach().equal(weight)),
        "errors": errors,
    }
    mcr.finalize()
    return result


def of_a_group() -> dict[str, Any]:
    """The survivors of a group in another order, of which one member has died."""
    comm = _begin(["gloo"])
    rank = comm.rank
    group = mcr.new_group([3, 1, 0])
    if rank == 1:
        _die_beside(comm)
    _wait_for_loss(comm)
    left = mcr.shrink(group)
    x = torch.tensor([float(rank)])
    if left.rank >= 0:
        left.broadcast(x, left.ranks[0])
    result = {"ranks": list(left.ranks), "rank": left.rank, "value": x.item(), "world": mcr.get_world_size()}
    mcr.finalize()
    return result


def on_some_ranks_only(folder: str) -> dict[str, Any]:
    """Rank 0 comes late: the others are refused, and so is it; then all call it again."""
    comm = _begin(["gloo"])
    rank = comm.rank
    if rank == 2:
        _die_beside(comm)
    _wait_for_loss(comm)
    if rank == 0:
        wait_for_files(*(Path(folder, f"refused.{each}") for each in (1, 3)))
    else:  # together: each of them waits for the other one no longer than for rank 0
        Path(folder, f"lost.{rank}").touch()
        wait_for_files(*(Path(folder, f"lost.{each}") for each in (1, 3)))
    began, first = time.monotonic(), ""
    try:
        mcr.shrink(timeout="500ms" if rank else "60s")
    except mcr.CommTimeout as error:
        first = str(error)
    waited = time.monotonic() - began
    Path(folder, f"refused.{rank}").touch()
    new = mcr.shrink()
    x = torch.ones(3)
    new.all_reduce(x)
    mcr.finalize()
    return {"first": first, "waited": waited, "sum": x.tolist(), "rank": new.rank}


def refused_during_a_build(folder: str) -> dict[str, Any]:
    """Rank 0 tries to leave the new world, and is refused, while rank 1 has not seen that it is complete."""
    comm = _begin(["gloo"])
    rank, refused = comm.rank, Path(folder, "refused")
    if rank == 2:
        _die_beside(comm)
    _wait_for_loss(comm)
    seen: list[str] = []
    usual, watches = vars(epoch_change)["exchange"], list[EpochWatch]()
    if rank == 1:

        class Watch(EpochWatch):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                watches.append(self)

        def late(store: Any, own: int, size: int, what: str, *rest: Any) -> list[str]:
            texts: list[str] = usual(store, own, size, what, *rest)
            if what == "made":
                while not refused.exists():
                    time.sleep(0.01)
                error = watches[-1].error()
                assert error is not None
                seen.append(str(error))
                raise error
            return texts

        setattr(epoch_change, "exchange", late)  # noqa: B010 - mypy takes it for a name of another module
        setattr(epoch_change, "EpochWatch", Watch)  # noqa: B010 - as above
    world, _ = epoch_change.leave_epoch(init.current(), Proposal(), 10, "shrink")
    error = ""
    if rank == 0:
        error = _error(lambda: epoch_change.leave_epoch(world, Proposal(), 0.3, "shrink"))
        refused.touch()
    x = torch.ones(3)
    world.communicator.all_reduce(x)
    if rank == 1:
        setattr(epoch_change, "exchange", usual)  # noqa: B010
        error = _error(mcr.shrink)  # the attempt that rank 0 has begun
    later = mcr.shrink()
    y = torch.ones(3)
    later.all_reduce(y)
    fresh = mcr.reset()  # another build with the same number
    z = torch.ones(3)
    fresh.all_reduce(z)
    mcr.finalize()
    return {"refused": error, "seen": seen, "sums": [x.tolist(), y.tolist(), z.tolist()]}


def with_wrong_arguments() -> dict[str, Any]:
    """Arguments that are wrong on one rank are refused on all, and the old world stays as it is."""
    comm = _begin(["gloo"])
    rank = comm.rank
    wrong: list[dict[str, Any]] = [
        {"dead": [1]} if rank == 0 else {},
        {"dead": [rank]} if rank == 2 else {},
        {"dead": [7]} if rank == 1 else {},
        {"dead": 1} if rank == 0 else {},
        {"min_ranks": 4} if rank == 1 else {},
        {"min_ranks": 0} if rank == 0 else {},
        {"timeout": "soon"},
    ]
    texts = [_error(partial(mcr.shrink, **arguments)) for arguments in wrong]
    group = mcr.new_group([0, 1, 2])
    x = torch.ones(2)
    group.all_reduce(x)
    new = mcr.shrink()  # nobody is lost: the same ranks
    y = torch.ones(2)
    new.all_reduce(y)
    mcr.finalize()
    return {"texts": texts, "before": x.tolist(), "after": y.tolist(), "size": new.size}


def with_a_stopped_rank(folder: str) -> dict[str, Any]:
    """Rank 1 is stopped, and declared lost; when it runs again it finds out, and ends."""
    comm = _begin(["gloo"])
    rank = comm.rank
    Path(folder, f"pid.{rank}").write_text(str(os.getpid()))
    if rank == 1:
        try:
            _wait_for_loss(comm)
            mcr.shrink()
        except mcr.McrError as error:
            return {"error": type(error).__name__, "text": str(error)}
        return {"error": None}
    if rank == 0:
        comm.all_reduce(torch.ones(8))  # the others are in `_wait_for_loss`
        os.kill(int(Path(folder, "pid.1").read_text()), signal.SIGSTOP)
    lost = _wait_for_loss(comm)
    new = mcr.shrink()
    if new.rank == 0:
        os.kill(int(Path(folder, "pid.1").read_text()), signal.SIGCONT)
    x = torch.full((2,), 1.0 + rank)
    new.all_reduce(x)
    mcr.finalize()
    return {"error": None, "lost": list(lost.ranks), "seen": lost.seen, "sum": x.tolist(), "size": new.size}


def with_a_death_meanwhile(when: str) -> dict[str, Any]:
    """Rank 3 dies first; rank 1 dies while the others make the world without rank 3."""
    comm = _begin(["gloo"])
    rank = comm.rank
    if rank == 3:
        _die_beside(comm)
    _wait_for_loss(comm)
    if rank == 1:
        if when == "proposed":
            roster = init.current().roster
            assert roster is not None
            roster.root = _DiesAfter(roster.root, "proposal")  # type: ignore[assignment]
        else:
            init.begin = lambda *_, **__: _die()  # type: ignore[assignment]
    began = time.monotonic()
    new = mcr.shrink()
    x = torch.full((2,), 1.0 + rank)
    new.all_reduce(x)
    seconds = time.monotonic() - began
    mcr.finalize()
    return {"rank": new.rank, "sum": x.tolist(), "seconds": seconds}


class _DiesAfter:
    """A store whose process dies once it has written a key with a word in it."""

    def __init__(self, store: Any, word: str) -> None:
        self._store, self._word = store, word

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        if self._word in key:
            _die()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def verdict(folder: str, backend: str, seed: int) -> dict[str, Any]:
    """Which operations are done, by the survivors of a death at a random moment, and their results."""
    comm = _begin([backend])
    rank = comm.rank
    generator = torch.Generator().manual_seed(seed)
    dies_at = int(torch.randint(3, 40, (), generator=generator))
    victim = int(torch.randint(comm.size, (), generator=generator))
    pending: list[tuple[int, torch.Tensor, Any]] = []
    results: dict[int, list[float]] = {}
    with suppress(mcr.PeerLost):
        for number in range(200):
            x = torch.full((64,), float(number + rank))
            work = comm.all_reduce(x, async_op=True)
            if rank == victim and number == dies_at:
                _die()
            pending.append((number, x, work))
            if len(pending) > 4:
                pending.pop(0)[2].wait()
    before = comm
    new = mcr.shrink()
    numbers = {}
    for number, x, work in pending:
        numbers[number] = work.info.sequence
        results[number] = x.unique().tolist()
    done = before.done
    mcr.finalize()
    return {"done": done, "numbers": numbers, "results": results, "size": new.size, "victim": victim}


def with_residuals() -> dict[str, Any]:
    """The residuals of error feedback before and after a shrink."""
    torch.set_num_threads(1)
    compress = {"codec": "topk", "ratio": 0.1, "error_feedback": True}
    stages = [{"compress": compress}, {"select": {}}, {"dispatch": {"timeout": "30s"}}]
    comm = mcr.init({"version": 1, "pipeline": stages}, backends=["gloo"])
    rank = comm.rank
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        comm.all_reduce(torch.randn(5000, generator=generator), "AVG", tag="a")
    ((own,),) = [
        [each.tensor.clone() for each in value]
        for (stage, _), value in comm.pipeline.state().items()
        if stage == "compress"
    ]
    if rank == 1:
        comm.barrier()  # the others are in the block below
        _die()
    with suppress(mcr.PeerLost):
        while True:
            comm.barrier()
    new = mcr.shrink()
    entries = mcr.state_dict()["codecs"]["world"]
    ((after,),) = [list(tensors.values()) for tensors in entries.values()]
    x = torch.randn(5000, generator=generator)
    new.all_reduce(x, "AVG", tag="a")
    later = new.pipeline.state()
    ((kept,),) = [
        [each.tensor for each in value] for (stage, _), value in later.items() if stage == "compress"
    ]
    mcr.finalize()
    return {
        "own": own.double().tolist(),
        "merged": after.double().tolist(),
        "sent": x.double().tolist(),
        "kept": kept.double().tolist(),
    }


def after_a_reset() -> dict[str, Any]:
    """Rank 0 dies after `mcr.reset` and a shrink: the sum of those that are left, and the keepers."""
    comm = _begin(["gloo"])
    rank, before = comm.rank, _keepers()
    comm = mcr.reset()
    comm.all_reduce(torch.ones(3))
    comm = mcr.shrink()
    if rank == 0:
        _die_beside(comm)
    _wait_for_loss(comm)
    new = mcr.shrink()
    x = torch.full((2,), 1.0 + rank)
    new.all_reduce(x)
    after = _keepers()
    mcr.finalize()
    ends = time.monotonic() + 30
    while rank == 2 and set(after) & set(_keepers()) and time.monotonic() < ends:
        time.sleep(0.01)
    return {"sum": x.tolist(), "rank": new.rank, "before": before, "after": after, "left": _keepers()}


def _keepers() -> list[int]:
    """The keepers of this job, by its launcher's variables, which they inherit."""
    job, found = os.environ["PMIX_NAMESPACE"], []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            words, variables = ((place / name).read_bytes() for name in ("cmdline", "environ"))
            if b"mcr_plus.hosts.key_replica" in words and f"PMIX_NAMESPACE={job}".encode() in variables:
                found.append(int(place.name))
    return sorted(found)


def many_times(count: int) -> dict[str, Any]:
    """File descriptors and threads before and after many epochs."""
    _begin(None)
    seen = []
    for number in range(count):
        x = torch.ones(100)
        work = mcr.world().all_reduce(x, async_op=True)
        assert work is not None
        if number % 2:
            work.wait()  # in half of them the operation is left
        mcr.shrink()
        seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    mcr.finalize()
    return {"seen": seen}


def told_to_a_supervisor(call: str) -> list[bool]:
    """Whether ranks count as training for a supervisor, before and after they go on in another world."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    comm = _begin(["gloo"])
    told = [have_trained(store)]
    handles = comm.all_gather_object(mcr.reconfigure_handle())
    if call == "reconfigure":
        mcr.reconfigure("again", handles)
    else:
        if comm.rank == comm.size - 1:
            _die_beside(comm)
        _wait_for_loss(comm)
        mcr.shrink()
    return [*told, have_trained(store)]
