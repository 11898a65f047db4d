"""Operations that gloo makes of one message each way, between two ranks; they start without a comparison."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mismatches import outcome_of
from ranks import run_ranks

import mcr_plus as mcr

CONFIG: dict[str, Any] = {
    "version": 1,
    "backends": ["gloo"],
    "pipeline": [{"select": {}}, {"dispatch": {"timeout": "20s"}}],
}
KINDS = ("all_gather", "all_to_all", "reduce_scatter")
DEPTH = 40
LARGE = 1 << 19  # elements: more than a connection holds
RESETS = 5


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
    """Input and output of an operation, `numel` elements from and for each rank, and what it is to be."""
    both = [torch.arange(2.0 * numel) + 1000 * each + 10 * number for each in range(2)]
    mine = slice(rank * numel, (rank + 1) * numel)
    if kind == "all_gather":
        return both[rank][:numel], torch.empty(2 * numel), torch.cat([each[:numel] for each in both])
    if kind == "all_to_all":
        return both[rank], torch.empty(2 * numel), torch.cat([each[mine] for each in both])
    return both[rank], torch.empty(numel), (both[0] + both[1])[mine]


def in_flight() -> list[str]:
    """Runs on ranks: many of one signature at once, then all kinds, which each rank issues in its order."""
    comm = mcr.init(CONFIG)
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
    # They are known to both ranks by now.
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
    """Runs on ranks: they issue operations that differ, and both are known to them; then a fresh world."""
    found: dict[str, Any] = {"told": [], "open": []}
    comm = mcr.init(CONFIG)
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
def test_those_that_differ_are_named_and_leave_nothing_after_a_reset(kinds: tuple[str, str]) -> None:
    for result in run_ranks(differ, 2, args=[list(kinds)], via="torch"):
        for told in result.value["told"]:
            assert told["error"] == "OrderMismatch"
            assert all(f" issued {kind} " in told["text"] for kind in kinds)
        first, *_, last = result.value["open"]
        assert last[0] <= first[0], "file descriptors"
        assert last[1] <= first[1] + 1, "threads"
