"""Repeated calls in compiled code and in Python alone: the same results, numbers and errors on two ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.communicator.fast_calls import fast_calls
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


class Interrupted(BaseException):
    """Raised by the handler of a signal, like `KeyboardInterrupt`."""


def interrupted() -> list[float]:
    """Interrupt rank 0 in a wait of a known call: its peer's operation is completed all the same."""
    with mcr.init({"version": 1, "backends": ["msccl"], "pipeline": [{"dispatch": {}}]}) as comm:
        x = torch.ones(4)
        for _ in range(3):
            mcr.all_reduce(x)
        if comm.rank == 0:

            def raises(*_: object) -> None:
                raise Interrupted

            signal.signal(signal.SIGALRM, raises)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
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
