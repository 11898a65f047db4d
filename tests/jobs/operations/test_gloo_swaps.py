"""Operations that gloo makes of one message each way, between two ranks; they start without a comparison."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from mismatches import outcome_of
from ranks import has_come, meet, own_rank, run_ranks, wait_for_ranks

import mcr_plus as mcr
from mcr_plus.backends.gloo.backend import GlooBackend
from mcr_plus.backends.gloo.messages import watchers
from mcr_plus.job import init as runtime

CONFIG: dict[str, Any] = {
    "version": 1,
    "backends": ["gloo"],
    "pipeline": [{"select": {}}, {"dispatch": {"timeout": "20s"}}],
}
KINDS = ("all_gather", "all_to_all", "reduce_scatter")
DEPTH = 40
LARGE = 1 << 19  # elements: more than a connection holds
RESETS = 5
GLOO_S = 0.2


def _begin() -> mcr.Communicator:
    """Return a world of ranks that take themselves for ranks of two hosts."""
    with mock.patch("mcr_plus.job.init.host_name", return_value=f"host{own_rank()}"):
        return mcr.init(CONFIG)


def _issue(comm: mcr.Communicator, kind: str, value: torch.Tensor, out: torch.Tensor) -> mcr.Work:
    calls: dict[str, Callable[..., mcr.Work | None]] = {
        "all_gather": comm.all_gather_into_tensor,
        "all_to_all": comm.all_to_all_single,
        "reduce_scatter": comm.reduce_scatter_tensor,
    }
    work = calls[kind](out, value, async_op=True)
    assert work is not None
    return work


def _made(kind: str, numel: int, rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an operation's input, output and expected result; `numel`: the elements per rank."""
    both = [torch.arange(2.0 * numel) + 1000 * each + 10 * number for each in range(2)]
    mine = slice(rank * numel, (rank + 1) * numel)
    if kind == "all_gather":
        return both[rank][:numel], torch.empty(2 * numel), torch.cat([each[:numel] for each in both])
    if kind == "all_to_all":
        return both[rank], torch.empty(2 * numel), torch.cat([each[mine] for each in both])
    return both[rank], torch.empty(numel), (both[0] + both[1])[mine]


def in_flight() -> list[str]:
    """Run on ranks: many operations of one signature at once, then all kinds, in each rank's own order."""
    comm = _begin()
    rank, wrong = comm.rank, list[str]()
    for kind in KINDS:
        for numel, depth in ((3, DEPTH), (LARGE, 4)):
            cases = [_made(kind, numel, rank, number) for number in range(depth)]
            works = [_issue(comm, kind, value, out) for value, out, _ in cases]
            for work in reversed(works):
                work.wait()
            wrong += [
                f"{kind} of {numel}, number {number}"
                for number, (_, out, expected) in enumerate(cases)
                if not torch.equal(out, expected)
            ]
    # Both ranks know the operations by now.
    crossed = [_made(kind, 3, rank, number) for number, kind in enumerate(KINDS)]
    order = range(len(KINDS)) if rank else reversed(range(len(KINDS)))
    works = [_issue(comm, KINDS[each], *crossed[each][:2]) for each in order]
    outcomes = [outcome_of(work.wait)["error"] for work in works]
    if not any(outcomes):  # a rank that has seen another operation with its number reports that
        wrong += [
            f"{kind}, crossed"
            for kind, (_, out, expected) in zip(KINDS, crossed, strict=True)
            if not torch.equal(out, expected)
        ]
    wrong += [str(error) for error in outcomes if error not in (None, "OrderMismatch")]
    mcr.reset()
    mcr.finalize()
    return wrong


def test_many_in_flight_are_matched_in_their_order() -> None:
    for result in run_ranks(in_flight, 2, via="torch"):
        assert result.value == []


def _open(most: int | None = None) -> tuple[int, int]:
    """Files and threads of this process; with `most` files, once it has no more, or 10 s have passed."""
    gc.collect()
    ends = time.monotonic() + 10
    while True:
        found = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        if most is None or found[0] <= most or time.monotonic() > ends:
            return found
        time.sleep(0.02)


def differ(kinds: list[str]) -> dict[str, Any]:
    """Run on ranks: issue different known operations, then make a new world."""
    found: dict[str, Any] = {"told": [], "open": []}
    comm = _begin()
    for _ in range(RESETS):
        for kind in KINDS:
            for _ in range(2):
                value, out, expected = _made(kind, 5, comm.rank, 0)
                _issue(comm, kind, value, out).wait()
                assert torch.equal(out, expected)
        value, out, _ = _made(kinds[comm.rank], 5, comm.rank, 0)
        work = _issue(comm, kinds[comm.rank], value, out)
        found["told"].append(outcome_of(work.wait))
        comm = mcr.reset()
        comm.barrier()
        found["open"].append(_open())
    first, _ = found["open"][0]
    found["open"].append(_open(first))
    mcr.finalize()
    return found


@pytest.mark.parametrize("kinds", [KINDS[:2], KINDS[1:], KINDS[::2]])
def test_differing_ranks_are_named_and_leave_nothing_after_a_reset(kinds: tuple[str, str]) -> None:
    for result in run_ranks(differ, 2, args=[list(kinds)], via="torch"):
        for told in result.value["told"]:
            assert told["error"] == "OrderMismatch"
            assert all(f" issued {kind} " in told["text"] for kind in kinds)
        first, *_, last = result.value["open"]
        assert last[0] <= first[0], "file descriptors"
        assert last[1] <= first[1] + 1, "threads"


def _known(comm: mcr.Communicator) -> None:
    """Have both ranks know the operations of three elements, so that they start at once."""
    for kind in KINDS:
        for number in range(2):
            value, out, _ = _made(kind, 3, comm.rank, number)
            _issue(comm, kind, value, out).wait()


def _issued(comm: mcr.Communicator, depth: int) -> list[tuple[mcr.Work, torch.Tensor, torch.Tensor]]:
    """Issue `depth` operations of each kind; return their handles, outputs and expected results."""
    cases = [(kind, *_made(kind, 3, comm.rank, number)) for number in range(depth) for kind in KINDS]
    return [(_issue(comm, kind, value, out), out, expected) for kind, value, out, expected in cases]


def waits_for_a_late_rank() -> dict[str, Any]:
    """Run on ranks: rank 0 issues many, and a receive; rank 1 comes when gloo would have given up."""
    comm = _begin()
    _known(comm)
    (gloo,) = (each for each in runtime.current().engine.backends if isinstance(each, GlooBackend))
    for channel in gloo._channels:
        channel.pg._set_default_timeout(timedelta(seconds=GLOO_S))
    received, works, issued = torch.zeros(3), list[mcr.Work](), []
    if comm.rank == 0:
        issued = _issued(comm, DEPTH)
        works.append(comm.irecv(received, 1))
        time.sleep(3 * GLOO_S)  # the test: this time has no effect
    names = [each.name for each in threading.enumerate()]
    meet("late", 2)
    if comm.rank == 1:
        issued = _issued(comm, DEPTH)
        comm.send(torch.arange(3.0), 0)
    for work in [*works, *(work for work, _, _ in issued)]:
        work.wait()
    found = {
        "equal": all(torch.equal(out, expected) for _, out, expected in issued),
        "received": received.tolist(),
        "watchers": sum(name == "mcr-gloo-watch" for name in names),
    }
    mcr.finalize()
    return found


@pytest.mark.long
def test_operations_in_flight_wait_for_a_late_rank_with_one_thread() -> None:
    early, late = run_ranks(waits_for_a_late_rank, 2, via="torch")
    assert early.value["equal"]
    assert late.value["equal"]
    assert early.value["received"] == [0.0, 1.0, 2.0]
    # One for the exchanges, one for the receive, and perhaps one that was idle but not yet known as idle.
    assert early.value["watchers"] <= 3


def loses_the_other_side() -> dict[str, Any]:
    """Run on ranks: rank 1 dies after a few of the operations that rank 0 has in flight."""
    comm = _begin()
    _known(comm)
    issued = _issued(comm, 2 if comm.rank else DEPTH)
    if comm.rank:
        wait_for_ranks("issued", 1)
        os.kill(os.getpid(), signal.SIGKILL)
    has_come("issued")
    told = [outcome_of(work.wait)["error"] for work, _, _ in issued]
    comm = mcr.shrink()
    total = torch.ones(1)
    comm.all_reduce(total)
    mcr.finalize()
    return {"told": told, "total": total.item()}


@pytest.mark.long
def test_all_in_flight_are_told_of_the_death_of_the_other_side() -> None:
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    survivor, _ = run_ranks(loses_the_other_side, 2, via="torch", check=False, env=env)
    assert survivor.value is not None, survivor.stderr
    told = survivor.value["told"]
    assert told[-1] == "PeerLost"
    assert set(told) <= {None, "PeerLost"}, told
    assert survivor.value["total"] == 1.0


def test_a_forked_child_has_watchers_of_its_own() -> None:
    first = threading.Event()
    watchers.run(first.set)
    assert first.wait(10)
    deadline = time.monotonic() + 10
    while not watchers._idle and time.monotonic() < deadline:
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        here = threading.Event()
        watchers.run(here.set)
        os._exit(0 if here.wait(10) else 1)
    assert os.waitpid(child, 0)[1] == 0
