"""Jobs with failing libraries: programs of ranks for tests/jobs/reliability/test_failover.py."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from typing import Any, NamedTuple

import mpi4py
import pytest
import torch
from ranks import has_come, meet, wait_for_ranks
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import mcr_plus as mcr
from mcr_plus.backends.base import Poll, Start
from mcr_plus.cli.main import app
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.sockets import shut_down
from mcr_plus.job.init import current
from mcr_plus.reliability.failover import channel as failover
from mcr_plus.reliability.failover import kept_operations, notices, reinstate
from mcr_plus.reliability.failover.kept_operations import KeptOperations

KINDS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all", "reduce", "all_to_all_v")


def config(*backends: str, **options: Any) -> dict[str, Any]:
    """Return a pipeline with failover."""
    dispatch = {"failover": True, "timeout": "20s", **options}
    return {"version": 1, "backends": list(backends), "pipeline": [{"select": {}}, {"dispatch": dispatch}]}


def channel_of(name: str) -> failover.FailoverChannel:
    """Return the library of the group of all ranks, with its second one."""
    slot = current().communicator.opened.runtime.channels[name]
    assert isinstance(slot.channel, failover.FailoverChannel)
    return slot.channel


def _failovers() -> list[failover.FailoverChannel]:
    return [each for each in current().engine.wrappers if isinstance(each, failover.FailoverChannel)]


def break_connections(name: str, channel: failover.FailoverChannel | None = None) -> None:
    """Tear gloo's connections; elsewhere let the library raise."""
    channel = channel or channel_of(name)
    if name == "gloo":
        shut_down(channel._own._connections)  # type: ignore[attr-defined]
        return
    with current().engine.lock:
        channel.fail("injected", "injected" if name == "mpi" else "")


def values(rank: int, number: int, size: int) -> torch.Tensor:
    """Return the input of a rank; sums of inputs are exact in any order."""
    return torch.arange(size, dtype=torch.float64) * ((rank * 7 + number) % 5 + 1) + rank * 1000 + number


class Operation(NamedTuple):
    """An asynchronous operation, the tensor of its result, and the expected result, or None."""

    work: mcr.Work
    found: torch.Tensor
    expected: torch.Tensor | None


def issued(comm: mcr.Communicator, kind: str, number: int, size: int, root: int, library: str) -> Operation:
    """Issue an operation of up to `size` elements per rank."""
    rank, ranks = comm.rank, comm.size
    inputs = [values(each, number, size) for each in range(ranks)]
    longer = [values(each, number, size * ranks) for each in range(ranks)]
    part = slice(rank * size, (rank + 1) * size)
    mine, work = inputs[rank].clone(), None
    expected: torch.Tensor | None = torch.stack(inputs).sum(0)
    if kind == "all_reduce":
        work, found = comm.all_reduce(mine, async_op=True, backend=library), mine
    elif kind == "broadcast":
        work, found, expected = comm.broadcast(mine, root, async_op=True, backend=library), mine, inputs[root]
    elif kind == "reduce":
        work, found = comm.reduce(mine, root, async_op=True, backend=library), mine
        expected = expected if rank == root else None
    elif kind == "all_gather":
        found, expected = torch.empty(size * ranks, dtype=torch.float64), torch.cat(inputs)
        work = comm.all_gather_into_tensor(found, mine, async_op=True, backend=library)
    elif kind == "reduce_scatter":
        found, expected = torch.empty(size, dtype=torch.float64), torch.stack(longer).sum(0)[part]
        work = comm.reduce_scatter_tensor(found, longer[rank], async_op=True, backend=library)
    else:
        found, expected = (
            torch.empty(size * ranks, dtype=torch.float64),
            torch.cat([each[part] for each in longer]),
        )
        even = [size] * ranks if kind == "all_to_all_v" else None
        work = comm.all_to_all_single(found, longer[rank], even, even, async_op=True, backend=library)
    assert work is not None
    return Operation(work, found, expected)


def random_operations(backends: list[str], seed: int, operations: int, rate: float) -> dict[str, Any]:
    """Run random operations, several in flight, with a library that breaks on a random rank.

    Runs this many operations, and as many again until the library has failed twice; MPI fails once.
    As soon as an operation is complete, the program changes its result and continues; inputs stay unless the
    operation works in place.
    """
    try_at_once(0.1)
    if "mpi" in backends:  # mpi4py would call it at the end of the process, which may crash
        vars(mpi4py.rc).update(finalize=False)
    shared, wrong = random.Random(seed), []
    libraries: set[str] = set()
    with mcr.init(config(*backends)) as comm:
        channel, own = channel_of(backends[0]), random.Random(f"{seed} {comm.rank}")
        pending: list[Operation] = []
        breakers: list[threading.Thread] = []
        for number in itertools.count():
            is_last = (number + 1) % operations == 0
            kind, size = shared.choice(KINDS), shared.choice([1, 7, 100, 3000, 40_000])
            root, victim = shared.randrange(comm.size), shared.randrange(comm.size)
            if shared.random() < rate and victim == comm.rank and not channel.moved:
                breakers.append(threading.Timer(own.random() * 0.004, break_connections, [backends[0]]))
                breakers[-1].start()
            pending.append(issued(comm, kind, number, size, root, backends[0]))
            if shared.random() < 0.3 or is_last:
                wrong += [kind for kind in map(completed, pending) if kind]
                libraries |= {each.work.info.backend for each in pending}
                for each in pending if own.random() < 0.7 else ():
                    each.found.mul_(3)
                pending.clear()
            if own.random() < 0.05:
                time.sleep(own.random() * 0.01)
            if is_last and (backends[0] == "mpi" or has_moved(comm, channel, backends[1])):
                break
        for breaker in breakers:
            breaker.join()
    return {"wrong": wrong, "moves": channel._round, "libraries": sorted(libraries)}


_PATIENCE = 60.0  # seconds for a library to come back and break again
_BEGAN = time.monotonic()


def has_moved(comm: mcr.Communicator, channel: failover.FailoverChannel, library: str) -> bool:
    """Return whether the library has failed twice, or has had enough time; the same on all ranks."""
    said = torch.tensor([channel._round > 1, time.monotonic() < _BEGAN + _PATIENCE], dtype=torch.int64)
    comm.all_reduce(said, "MIN", backend=library)
    return bool(said[0]) or not said[1]


def completed(operation: Operation) -> str:
    """Wait for an operation; return its description if its result is wrong."""
    operation.work.wait()
    is_right = operation.expected is None or torch.equal(operation.found, operation.expected)
    return "" if is_right else str(operation.work.info)


def try_at_once(seconds: float) -> None:
    """Let libraries come back so soon."""
    for name in ("_FIRST_TRY", "_LAST_TRY"):
        setattr(reinstate, name, seconds)


def that_says_what_it_did(backends: list[str]) -> dict[str, Any]:
    """The library breaks between two operations."""
    with mcr.init(config(*backends)) as comm:
        first = comm.all_reduce(torch.ones(4), async_op=True, backend=backends[0])
        assert first is not None
        first.wait()
        comm.barrier(backend=backends[1])  # rank 0 has its result, too
        if comm.rank == 1:
            break_connections(backends[0])
        tensor = torch.full((4,), 1.0 + comm.rank)
        second = comm.all_reduce(tensor, async_op=True, backend=backends[0])
        assert second is not None
        second.wait()
        infos = [(work.info.backend, work.info.instead_of, work.info.sequence) for work in (first, second)]
        said = [each for each in json.loads(doctor("--json"))["off"] if each["pid"] == os.getpid()]
        table = doctor()
    left = [each for each in notices.running() if each.pid == os.getpid()]
    return {"infos": infos, "sum": tensor.tolist(), "off": said, "left": len(left), "table": table}


def messages_after_its_return(backends: list[str]) -> dict[str, Any]:
    """A message before the library breaks, and one once it is back."""
    try_at_once(0.02)
    received = []
    library, other = backends
    with mcr.init(config(*backends)) as comm:
        channel, ends = channel_of(library), time.monotonic() + _PATIENCE
        for number in range(2):
            message = torch.full((3,), 10.0 * number + comm.rank)
            (comm.recv if comm.rank else comm.send)(message, 1 - comm.rank, backend=library)
            received.append(float(message[2]))
            comm.barrier(backend=other)
            if comm.rank and not number:
                break_connections(library)
            is_back = torch.tensor(number)
            while not is_back and time.monotonic() < ends:
                is_back = torch.tensor(int(channel._generation > 0))
                comm.all_reduce(is_back, "MIN", backend=library)
    return {"received": received}


def doctor(*words: str) -> str:
    """Return the output of `mcr-plus doctor` in this process."""
    return CliRunner().invoke(app(), ["doctor", *words], env={"COLUMNS": "300"}).stdout


def never_done(start: Start) -> Start:
    """Make an operation without its last message."""

    def begun(message: Message) -> Poll:
        start(message)
        return lambda: False

    return begun


def with_changed_inputs(backends: list[str]) -> dict[str, Any]:
    """Rank 0 has its result and changes input and output, while another rank still waits for its result."""
    with mcr.init(config(*backends)) as comm:
        if comm.rank:
            bind = channel_of(backends[0])._own.bind
            channel_of(backends[0])._own.bind = lambda signature: never_done(bind(signature))  # type: ignore[method-assign]
        sent = torch.full((2,), 1.0 + comm.rank)
        received = torch.empty(2)
        library = backends[0]
        work = comm.all_to_all_single(received, sent, async_op=True, backend=library)
        assert work is not None
        if comm.rank == 0:
            work.wait()
            sent.zero_()
            received.zero_()
        comm.barrier(backend=backends[1])
        if comm.rank == 1:
            break_connections(backends[0])
        with pytest.raises(mcr.BackendError) as caught:
            (work.wait if comm.rank else comm.barrier)()
        with pytest.raises(mcr.BackendError):
            comm.all_to_all_single(received, sent, backend=library)
        return {"error": str(caught.value)}


def with_one_tensor(backends: list[str], changes: str) -> dict[str, Any]:
    """Rank 0 has its result and uses the tensor again, while another rank has not got it yet."""
    with mcr.init(config(*backends)) as comm:
        channel, library = channel_of(backends[0]), backends[0]
        tensor, other = torch.full((1000,), 1.0 + comm.rank), torch.full((1000,), 777.0)
        if comm.rank:
            bind = channel._own.bind
            channel._own.bind = lambda signature: never_done(bind(signature))  # type: ignore[method-assign]
        first = comm.all_reduce(tensor, async_op=True, backend=library)
        assert first is not None
        if comm.rank == 0:
            first.wait()
            if changes == "data":
                tensor.data.mul_(100)
        if changes == "broadcast":
            comm.broadcast(other if comm.rank else tensor, 1, backend=backends[1])
        comm.barrier(backend=backends[1])
        if comm.rank == 1:
            break_connections(library)
        last = torch.ones(3)
        comm.all_reduce(last, backend=library)
        if comm.rank:
            first.wait()
        return {"found": tensor[:2].tolist(), "last": last.tolist()}


def through_the_pipeline(backends: list[str], codec: str | None) -> dict[str, Any]:
    """Train a wrapped model with fused and compressed buckets; a library breaks whenever it is back."""
    try_at_once(0.05)
    stages = [
        {"fuse": {"bucket": "1KiB", "first_bucket": "1KiB"}},
        *([{"compress": {"codec": codec, "error_feedback": False}}] if codec else []),
        {"select": {}},
        {"dispatch": {"failover": True, "timeout": "20s"}},
    ]

    def trained(steps: int | None) -> tuple[list[float], int, int]:
        """Return the parameters after some steps; None: train until the library has broken twice."""
        breakers: list[threading.Timer] = []
        with mcr.init({"version": 1, "backends": backends, "pipeline": stages}) as comm:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 10))
            model, optimizer = mcr.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            # The communicator of the model's own group, the last opened one.
            failovers = _failovers()
            *_, channel = [each for each in failovers if each.slot.backend.name == backends[0]]
            random_ = torch.Generator().manual_seed(comm.rank)
            step = 0
            for step in itertools.count():
                is_checked = steps is None and step % 200 == 199
                if step == steps or (is_checked and has_moved(comm, channel, backends[1])):
                    break
                if steps is None and comm.rank == step % comm.size and not channel.moved:
                    breakers.append(threading.Timer(0.001, break_connections, [backends[0], channel]))
                    breakers[-1].start()
                optimizer.zero_grad()
                model(torch.randn(8, 40, generator=random_)).square().mean().backward()
                optimizer.step()
            for breaker in breakers:
                breaker.join()
            sums = [float(param.detach().double().sum()) for param in model.parameters()]
            return sums, channel._round, step

    disturbed, moves, steps = trained(None)
    undisturbed, _, _ = trained(steps)
    return {"undisturbed": undisturbed, "disturbed": disturbed, "moves": moves}


def after_a_death(backends: list[str], victim: int) -> dict[str, Any]:
    """A rank's death is no failure of a library."""
    comm = mcr.init(config(*backends, timeout="90s"))
    tensor = torch.ones(1000)
    comm.all_reduce(tensor, backend=backends[0])
    meet("before a death", comm.size)
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in range(1000):
            comm.all_reduce(tensor, backend=backends[0])
    except mcr.PeerLost as lost:
        return {"lost": list(lost.ranks), "seconds": time.monotonic() - began}
    return {"lost": [], "seconds": time.monotonic() - began}


PASSES = 6
_LATE = 3  # the pass that rank 1 does not complete before the library breaks


class _Weighted(torch.nn.Module):
    """A model with gradients equal to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(1003))
        self.second = torch.nn.Parameter(torch.zeros(7, 11))

    def forward(self, number: int, rank: int) -> torch.Tensor:
        return sum(
            ((each * gradient_of(each, number, rank)).sum() for each in self.parameters()), torch.zeros(())
        )


def gradient_of(param: torch.Tensor, number: int, rank: int) -> torch.Tensor:
    """Return the gradient of a parameter in a pass; means over up to eight ranks are exact."""
    return 8.0 * values(rank, number, param.numel()).view(param.shape).float()


def _with_hook(way: str) -> tuple[torch.nn.Module, Any]:
    """Return a model and its optimizer, by one of our ways to average gradients."""
    model: torch.nn.Module = _Weighted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if way.startswith("wrap"):
        return mcr.wrap(model, optimizer)
    model = DistributedDataParallel(model, gradient_as_bucket_view="views" in way, bucket_cap_mb=0.001)
    model.register_comm_hook(mcr.DDPState(), mcr.ddp_hook)
    return model, optimizer


def ahead_by_a_pass(backends: list[str], way: str) -> dict[str, Any]:
    """Rank 0 has the means of a pass, changes them and sends the next one's; then the library fails.

    The rest has not completed that pass, and no copy of the gradients was made. There are more gradients than
    may be kept in memory of failover's own.
    """
    stages = [
        {"fuse": {"bucket": "1KiB", "first_bucket": "1KiB"}},
        {"select": {}},
        {"dispatch": {"failover": True, "timeout": "20s"}},
    ]
    copied: list[int] = []
    with (
        mcr.init({"version": 1, "backends": backends, "pipeline": stages}) as comm,
        pytest.MonkeyPatch.context() as patch,
    ):
        if way.startswith("DDP"):
            torch.distributed.init_process_group("mcr")
        model, optimizer = _with_hook(way)
        channel = [each for each in _failovers() if each.slot.backend.name == backends[0]][-1]
        if way.startswith("DDP"):
            channel = channel_of(backends[0])
        is_late, bind, copy = [False], channel._own.bind, KeptOperations.copied

        def late(signature: Signature) -> Start:
            start = bind(signature)

            def begun(message: Message) -> Poll:
                poll = start(message)
                return (lambda: False) if is_late[0] else poll

            return begun

        def noted(kept: KeptOperations, tensor: torch.Tensor) -> torch.Tensor | bytes:
            copied.append(tensor.nbytes)
            return copy(kept, tensor)

        patch.setattr(channel._own, "bind", late)
        patch.setattr(kept_operations, "_MOST_BYTES", 1024)
        patch.setattr(KeptOperations, "copied", noted)
        wrong: list[tuple[int, str]] = []
        for number in range(PASSES):
            optimizer.zero_grad(set_to_none="zeroed" not in way)
            is_late[0] = number == _LATE and comm.rank > 0
            if is_late[0]:
                threading.Thread(target=_break_once_ahead, args=[channel]).start()
            elif number == _LATE + 1:
                has_come("the next pass")
            model(number, comm.rank).backward()
            for name, param in model.named_parameters():
                expected = torch.stack([gradient_of(param, number, rank) for rank in range(comm.size)]).mean(
                    0
                )
                assert param.grad is not None
                if not torch.equal(param.grad, expected):
                    wrong.append((number, name))
                param.grad.mul_(3.0)
        if way.startswith("DDP"):
            torch.distributed.destroy_process_group()
        return {"wrong": wrong, "moves": channel._round, "copied": sum(each > 256 for each in copied)}


def _break_once_ahead(channel: failover.FailoverChannel) -> None:
    """Break the library once rank 0 is in the next pass and has sent a part of it."""
    wait_for_ranks("the next pass", 1)
    time.sleep(0.1)
    break_connections("any", channel)


def persistent(backends: list[str]) -> dict[str, Any]:
    """Return the sums of a persistent operation that runs three times, by both of its ways."""
    sums = []
    with mcr.init(config(*backends)) as comm:
        value = torch.ones(1)
        operation = comm.persistent("all_reduce", value)
        for is_started in (False, False, True):
            if is_started:
                operation.start().wait()
            else:
                operation()
            sums.append(float(value))
    return {"sums": sums}
