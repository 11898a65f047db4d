"""Repeated calls in compiled code and in Python alone: the same results, numbers and errors on two ranks."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.communicator import operations, prepared
from mcr_plus.communicator.fast_calls import fast_calls
from mcr_plus.core.message import Message
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

SIZES = (1, 2, 3, 255, 1000, 16_384, 16_385, 40_001)
ROUNDS = 6


def _values(rank: int, size: int, turn: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng((rank, size, turn)).integers(-50, 50, size).astype(np.float64)


def _failures(comm: mcr.Communicator) -> list[str]:
    """Run every kind in every size several times, on new and on the same tensors; compare with NumPy."""
    failures, peer = list[str](), 1 - comm.rank
    kept = {size: torch.empty(size, dtype=torch.float64) for size in SIZES}
    for turn in range(ROUNDS):
        for size in SIZES:
            mine, theirs = _values(comm.rank, size, turn), _values(peer, size, turn)
            both = [mine, theirs] if comm.rank == 0 else [theirs, mine]
            x = kept[size] if turn % 2 else torch.empty(size, dtype=torch.float64)
            found: dict[str, Any] = {}
            x.copy_(torch.from_numpy(mine))
            mcr.all_reduce(x)
            found["all_reduce"] = x.numpy(), both[0] + both[1]
            y = torch.from_numpy(mine.astype(np.float32))
            mcr.all_reduce(y, op=mcr.MAX)
            found["max"] = y.numpy(), np.maximum(*both)
            z = torch.from_numpy(mine.copy())
            mcr.broadcast(z, turn % 2)
            found["broadcast"] = z.numpy(), both[turn % 2]
            gathered = torch.empty(2 * size, dtype=torch.float64)
            mcr.all_gather_into_tensor(gathered, torch.from_numpy(mine))
            found["all_gather"] = gathered.numpy(), np.concatenate(both)
            wide = torch.from_numpy(np.concatenate((mine, -mine)))
            part = torch.empty(size, dtype=torch.float64)
            mcr.reduce_scatter_tensor(part, wide)
            found["reduce_scatter"] = part.numpy(), (both[0] + both[1]) * (-1) ** comm.rank
            target = torch.empty_like(wide)
            mcr.all_to_all_single(target, wide)
            found["all_to_all"] = target.numpy(), np.concatenate(both) * (-1) ** comm.rank
            mcr.all_to_all_single(wide, wide)  # in place
            found["in place"] = wide.numpy(), np.concatenate(both) * (-1) ** comm.rank
            root = torch.from_numpy(mine.copy())
            mcr.reduce(root, 1)
            if comm.rank == 1:
                found["reduce"] = root.numpy(), both[0] + both[1]
            # Lists: neighbours in memory, whose calls compiled code repeats, or apart; and one that changes.
            space = torch.empty(2 * size, dtype=torch.float64)
            parts = list(space.chunk(2)) if turn % 3 else [torch.empty_like(each) for each in space.chunk(2)]
            mcr.all_gather(parts, torch.from_numpy(mine))
            found["all_gather of a list"] = torch.cat(parts).numpy(), np.concatenate(both)
            mcr.all_gather(parts, parts[comm.rank].copy_(torch.from_numpy(-mine)))
            found["all_gather of a list in place"] = torch.cat(parts).numpy(), -np.concatenate(both)
            own = torch.empty(size, dtype=torch.float64)
            mcr.reduce_scatter(own, [torch.from_numpy(mine), torch.from_numpy(-mine)])
            found["reduce_scatter of a list"] = own.numpy().copy(), (both[0] + both[1]) * (-1) ** comm.rank
            is_root = comm.rank == turn % 2
            mcr.gather(torch.from_numpy(mine), parts if is_root else None, turn % 2)
            if is_root:
                found["gather"] = torch.cat(parts).numpy(), np.concatenate(both)
                parts.reverse()
                space.copy_(torch.from_numpy(np.concatenate((mine, -mine))))
            mcr.scatter(own, list(space.chunk(2)) if is_root else None, turn % 2)
            found["scatter"] = own.numpy(), both[turn % 2] * (-1) ** comm.rank
            mcr.barrier(backend="msccl")
            failures += [
                f"{name} of {size} in turn {turn}"
                for name, (result, expected) in found.items()
                if not np.array_equal(result, expected)
            ]
    return failures


def everything() -> dict[str, Any]:
    """Operations, their numbers beside a recording, errors, other threads and a late peer."""
    with mcr.init({"version": 1, "backends": ["msccl", "gloo"], "pipeline": [{"dispatch": {}}]}) as comm:
        answer: dict[str, Any] = {"compiled": fast_calls() is not None, "failures": _failures(comm)}
        before = comm.state.sequence
        x = torch.ones(3)
        for _ in range(5):
            mcr.all_reduce(x)
        answer["numbered"] = comm.state.sequence - before, comm.state.board.counter[0] - before
        answer["remembered"] = [each[0] - before for each in list(comm.state.ring)[-5:]]
        with mcr.record() as log:
            for _ in range(3):
                mcr.all_reduce(x, mcr.MAX)
        answer["recorded"] = len(log.records)
        op = mcr.persistent("all_reduce", x)
        x.fill_(comm.rank + 1)
        for _ in range(4):
            op()
            if comm.rank:
                time.sleep(0.01)  # the peer waits in Python
        answer["persistent"] = x.tolist()
        errors: list[str] = []

        def elsewhere() -> None:
            try:
                mcr.all_reduce(x)
            except mcr.McrError as error:
                errors.append(type(error).__name__)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        answer["elsewhere"] = errors
        try:
            mcr.all_reduce(torch.ones(3)) if comm.rank else mcr.all_reduce(torch.ones(3), mcr.MAX)
        except mcr.OrderMismatch as error:
            answer["mismatch"] = "SUM" in str(error) and "MAX" in str(error)
        comm = mcr.reset()
        mcr.all_reduce(x.fill_(1))
        answer["after"] = x.tolist()
    return answer


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "Python"])
def test_both_ways_agree(compiled: bool) -> None:
    if compiled and fast_calls() is None:
        pytest.skip("the extension is not built, or torch has no exchange API")
    for result in run_ranks(everything, 2, via="torch", env={"MCR_FAST_CALLS": str(int(compiled))}):
        found = result.value
        assert found["compiled"] == compiled
        assert found["failures"] == []
        assert found["numbered"] == [5, 5]
        assert found["remembered"] == [1, 2, 3, 4, 5]
        assert found["recorded"] == 3
        assert found["persistent"] == [24.0] * 3
        assert found["elsewhere"] == ["OrderMismatch"]
        assert found["mismatch"]
        assert found["after"] == [2.0] * 3


def _traffic(comm: mcr.Communicator, seed: int) -> list[str]:
    """Run one schedule of messages on all ranks, each in any form; compare with NumPy."""
    chance, own = random.Random(seed), random.Random((seed, comm.rank).__hash__())
    failures, waiting = list[str](), list[tuple[mcr.Work, Any]]()
    for number in range(400):
        source, target = chance.sample(range(comm.size), 2)
        size, tag = chance.choice((1, 7, 1000, 4080, 4081, 33_000, 262_145)), chance.choice((0, 5))
        if chance.random() < 0.05:
            mcr.barrier(backend="msccl")
        value = _values(source, size, number).astype(np.float32)
        if comm.rank == source:
            sent = torch.from_numpy(value)
            if own.random() < 0.7:
                mcr.send(sent, target, tag)
                sent.fill_(-1)  # a send that has returned no longer needs it
            else:
                waiting.append((mcr.isend(sent, target, tag), sent))
        elif comm.rank == target:
            found, how = torch.empty(size), own.random()
            if how < 0.6:
                mcr.recv(found, source, tag)
            else:
                peer = None if how > 0.95 and comm.size == 2 else source
                mcr.irecv(found, peer, tag).wait()
            if not np.array_equal(found.numpy(), value):
                failures.append(f"message {number}: {size} from {source} to {target}")
    for work, _ in waiting:
        work.wait()
    return failures


def messages() -> dict[str, Any]:
    """Messages of the default pipeline: in a schedule, remembered, recorded, mismatched and interrupted."""
    with mcr.init({"version": 1, "backends": ["msccl"], "pipeline": [{"dispatch": {}}]}) as comm:
        answer: dict[str, Any] = {"failures": [each for seed in range(4) for each in _traffic(comm, seed)]}
        mcr.barrier()
        ring, x = [(comm.rank + step) % comm.size for step in (1, -1)], torch.ones(5)
        before = comm.state.sequence
        for turn in range(4):
            if turn == 3:
                with mcr.record() as log:
                    _around(comm, ring, x)
                answer["recorded"] = sorted(each.kind for each in log.records)
            else:
                _around(comm, ring, x)
        answer["numbered"] = comm.state.sequence - before
        last = [(each[0], each[1], each[2].kind) for each in list(comm.state.messages)[-2:]]
        answer["remembered"] = sorted(last, key=str) == sorted(
            [(ring[0], 3, "send"), (ring[1], 3, "recv")], key=str
        )
        made: list[Any] = []
        prepared.Message = lambda *given, **more: made.append(given) or Message(*given, **more)  # type: ignore
        for _ in range(20):
            mcr.send(x, 1, 3) if comm.rank == 0 else mcr.recv(x, 0, 3) if comm.rank == 1 else None
        prepared.Message = Message  # type: ignore[attr-defined]
        answer["in Python"] = len(made)
        mcr.barrier()
        if comm.rank == 0:
            _interrupt_in(0.2)
            with pytest.raises(Interrupted):
                mcr.recv(x, 1, 3)
            _around(comm, ring, torch.ones(5))
        else:
            time.sleep(1.5 if comm.rank == 1 else 0)
            if comm.rank == 1:
                mcr.send(x.fill_(7), 0, 3)
            _around(comm, ring, torch.ones(5))
        mcr.barrier()
        comm.progress()
        answer["late"] = x.tolist()
        if comm.rank == 0:
            mcr.send(torch.ones(6), 1, 3)
        elif comm.rank == 1:
            with pytest.raises(mcr.OrderMismatch, match="float32"):
                mcr.recv(torch.ones(5), 0, 3)
    return answer


def _around(comm: mcr.Communicator, ring: list[int], x: torch.Tensor) -> None:
    """Send `x` to the next rank of a ring, and receive it from the previous one."""
    after, before = ring
    if comm.rank % 2 == 0:
        mcr.send(x, after, 3)
        mcr.recv(x, before, 3)
    else:
        kept = x.clone()
        mcr.recv(x, before, 3)
        mcr.send(kept, after, 3)


@pytest.mark.short("compiled-2")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "Python"])
def test_messages_in_both_ways(ranks: int, compiled: bool) -> None:
    if compiled and fast_calls() is None:
        pytest.skip("the extension is not built, or torch has no exchange API")
    results = run_ranks(messages, ranks, via="torch", env={"MCR_FAST_CALLS": str(int(compiled))})
    for result in results:
        found = result.value
        assert found["failures"] == []
        assert found["recorded"] == ["recv", "send"]
        assert found["numbered"] == 0
        assert found["remembered"]
    assert results[0].value["late"] == [7.0] * 5
    assert results[0].value["in Python"] == (0 if compiled else 20)


def many_tags() -> list[Any]:
    """Use each tag once: plans are forgotten, and messages arrive all the same."""
    operations.PLANS = 50  # type: ignore[misc]
    with mcr.init({"version": 1, "backends": ["msccl"], "pipeline": [{"dispatch": {}}]}) as comm:
        peer, most, wrong = 1 - comm.rank, 0, list[int]()
        for tag in range(400):
            found, sent = torch.empty(2, 3), torch.full((3,), float(tag + comm.rank))
            ops = [mcr.P2POp(mcr.isend, sent, peer, tag=tag), mcr.P2POp(mcr.irecv, found[0], peer, tag=tag)]
            works = mcr.batch_isend_irecv(ops)
            mcr.recv(found[1], peer, tag) if comm.rank else mcr.send(sent, peer, tag)
            for work in works:
                work.wait()
            if found[: 1 + comm.rank].ne(tag + peer).any():
                wrong.append(tag)
            most = max(most, len(comm.opened.plans))
        return [most <= 60, wrong]


def test_plans_of_messages_are_forgotten() -> None:
    for result in run_ranks(many_tags, 2, via="torch"):
        assert result.value == [True, []]


def beside_another_thread(progress: str) -> list[str]:
    """Repeat messages in one group while another thread waits in another one, which moves all messages."""
    stages = [{"dispatch": {"progress": progress}}]
    with mcr.init({"version": 1, "backends": ["msccl"], "pipeline": stages}, timeout=20.0) as comm:
        other, failures, me, ends = comm.branch(), list[str](), comm.rank, threading.Event()

        def beside() -> None:
            other.take_over()
            ended = torch.zeros(1)
            while ended.item() < 2:
                work = other.all_reduce(ended.fill_(ends.is_set()), async_op=True)
                assert work is not None
                work.wait()

        thread = threading.Thread(target=beside)
        thread.start()
        for turn in range(1500):
            size = (1, 5, 3000, 40_000, 200_000)[turn % 5]
            value, found = _values(0, size, turn).astype(np.float32), torch.empty(size)
            if me == 0:
                mcr.send(torch.from_numpy(value), 1, 3)
            mcr.recv(found, 1 - me, 3)
            if me == 1:
                mcr.send(found.clone(), 0, 3)
            if not np.array_equal(found.numpy(), value):
                failures.append(f"message {turn} of {size}")
        ends.set()
        thread.join()
        return failures


@pytest.mark.long
@pytest.mark.parametrize("progress", ["caller", "thread"])
def test_messages_beside_another_thread(progress: str) -> None:
    for result in run_ranks(beside_another_thread, 2, args=[progress], via="torch"):
        assert result.value == []


def _interrupt_in(seconds: float) -> None:
    def raises(*_: object) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, raises)
    signal.setitimer(signal.ITIMER_REAL, seconds)


class Interrupted(BaseException):
    """Raised by the handler of a signal, like `KeyboardInterrupt`."""


def interrupted() -> list[float]:
    """Interrupt rank 0 in a wait of a known call: its peer's operation is completed all the same."""
    with mcr.init({"version": 1, "backends": ["msccl"], "pipeline": [{"dispatch": {}}]}) as comm:
        x = torch.ones(4)
        for _ in range(3):
            mcr.all_reduce(x)
        if comm.rank == 0:
            _interrupt_in(0.3)
            with pytest.raises(Interrupted):
                mcr.all_reduce(x)
        else:
            time.sleep(2)  # rank 0 may be late
            mcr.all_reduce(x)
        y = torch.full((4,), float(comm.rank))
        mcr.all_reduce(y)
        return [*x.tolist(), *y.tolist()]


def test_an_interrupted_call_leaves_no_peer_behind() -> None:
    for result in run_ranks(interrupted, 2, via="torch"):
        assert result.value == [16.0] * 4 + [1.0] * 4


def killed() -> str:
    """Kill rank 1 between known calls; rank 0 must get an error, not wait."""
    comm = mcr.init({"version": 1, "backends": ["msccl"], "pipeline": [{"dispatch": {}}]})
    x = torch.ones(4)
    for _ in range(50):
        mcr.all_reduce(x, mcr.MAX)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            mcr.all_reduce(x, mcr.MAX)
    except mcr.PeerLost as error:
        return str(error)


def test_a_killed_peer_ends_a_known_call() -> None:
    first = run_ranks(killed, 2, via="torch", check=False)[0]
    assert "rank 1" in first.value


def compared_persistent() -> list[bool]:
    """Return whether each call of a persistent request of MPI is compared under `check: every`."""
    stages = [{"select": {}}, {"dispatch": {"check": "every"}}]
    with mcr.init({"version": 1, "backends": ["mpi"], "pipeline": stages}) as comm:
        op = mcr.persistent("all_reduce", torch.ones(4))
        for _ in range(3):
            op()
        bound = comm.opened.runtime.engine.bound
        return [each.compared for each in bound if each.text.startswith(b"persistent")]


@pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
def test_persistent_requests_are_compared_at_every_call() -> None:
    for result in run_ranks(compared_persistent, 2):
        assert result.value
        assert all(result.value)
