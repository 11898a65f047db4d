"""Ranks in the errors of groups with permuted or partial members: always ranks of the job."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Via, meet, run_ranks

import mcr_plus as mcr
from mcr_plus.core.group import Group
from mcr_plus.launch import mpi_usable

Call = Callable[[mcr.Communicator, int], object]
VICTIM = 0  # of the job: the last member of both groups


def _late(comm: mcr.Communicator, rank: int) -> None:
    if rank != VICTIM:
        comm.all_reduce(torch.ones(3))


def _receive(comm: mcr.Communicator, rank: int) -> None:
    if rank == 2:
        comm.recv(torch.ones(3), src=VICTIM)


def _sizes(comm: mcr.Communicator, rank: int) -> None:
    comm.all_reduce(torch.ones(3 + (rank == VICTIM)))


def _counts(comm: mcr.Communicator, rank: int) -> None:
    """Rank 0 sends one row more to rank 2 than that expects."""
    sends = [1 + (rank == VICTIM and other == 2) for other in comm.ranks]
    receives = [1] * comm.size
    out, given = torch.zeros(sum(receives), 2), torch.zeros(sum(sends), 2)
    comm.all_to_all_single(out, given, receives, sends)


def _messages(comm: mcr.Communicator, rank: int) -> None:
    if rank == VICTIM:
        comm.send(torch.ones(5), dst=2)
    elif rank == 2:
        comm.recv(torch.ones(3), src=VICTIM)


def _roots(comm: mcr.Communicator, rank: int) -> None:
    comm.broadcast(torch.ones(3), src=VICTIM if rank == VICTIM else 2)


def _close(comm: mcr.Communicator, rank: int) -> None:
    if rank == VICTIM:
        comm.close()
    else:
        comm.all_reduce(torch.ones(3))


CASES: dict[str, Call] = {
    "timeout": _late,
    "receive": _receive,
    "sizes": _sizes,
    "counts": _counts,
    "messages": _messages,
    "roots": _roots,
    "close": _close,
}


def failing(backend: str, via: str) -> dict[str, list[Any]]:
    """Return the errors of this rank: kind, text, missing and lost ranks."""
    pipeline = [{"select": {}}, {"dispatch": {"timeout": "1s"}}]
    world = mcr.init({"version": 1, "backends": [backend], "pipeline": pipeline})
    said: dict[str, list[Any]] = {}

    def note(name: str, members: list[int], call: Call) -> None:
        comm = mcr.new_group(members)
        if world.rank in comm.ranks:
            comm.all_reduce(torch.ones(3))
            try:
                call(comm, world.rank)
            except mcr.McrError as error:
                ranks = [list(getattr(error, each, ())) for each in ("missing", "ranks")]
                said[f"{name} {members}"] = [type(error).__name__, str(error), *ranks]

    for members in ([2, 1, 0], [2, 0]):
        for name, call in CASES.items():
            note(name, members, call)
            meet(f"{name}{len(members)}", world.size)
    if via == "torch":
        note("death", [2, 1, 0], lambda comm, rank: os._exit(9) if rank == VICTIM else _late(comm, rank))
    return said


def _ranks_in(text: str) -> set[int]:
    """The ranks that a text names, each of which it must call one of the job."""
    lists = re.findall(r"ranks of the job: \[([\d, ]+)\]", text)
    named = re.findall(r"rank (\d+)(?: of the job|: last issued)", text)
    assert len(named) + len(lists) == len(re.findall(r"ranks?\b(?! of | must)", text)) + len(lists), text
    return {int(rank) for rank in named} | {int(rank) for each in lists for rank in each.split(", ")}


def _check(name: str, kind: str, text: str, missing: list[int], lost: list[int]) -> None:
    named = _ranks_in(text)
    if name in ("timeout", "receive"):
        assert (kind, missing, named) == ("CommTimeout", [VICTIM], {VICTIM}), text
    elif name == "death":
        assert (kind, lost, named) == ("PeerLost", [VICTIM], {VICTIM}), text
    else:
        assert kind == "OrderMismatch", text
    issued = re.findall(r"rank (\d) of the job issued (.*?)(?:; |\. |$)", text)
    for rank, operation in issued:  # what only this rank of the job has issued
        strange = {"sizes": "float32[4]", "messages": "send", "roots": "root=0", "close": "tag=close"}[name]
        assert (strange in operation) == (int(rank) == VICTIM), text
    if name in ("sizes", "messages", "roots", "close"):
        assert len(issued) == 2, text
    if name == "counts":
        assert re.search("rank 0 of the job sends 4 elements to rank 2 of the job|different numbers", text), (
            text
        )


@pytest.mark.parametrize(
    ("backend", "via"),
    [
        ("msccl", "torch"),
        ("gloo", "torch"),
        pytest.param("mpi", "mpi", marks=pytest.mark.skipif(not mpi_usable(), reason="needs MPI")),
    ],
)
def test_every_rank_in_an_error_is_of_the_job(backend: str, via: Via) -> None:
    results = run_ranks(failing, 3, args=[backend, via], via=via, check=False)
    for result in results:
        if via == "torch" and result.rank == VICTIM:
            continue
        assert result.value is not None, result.stderr
        for name, error in result.value.items():
            _check(name.partition(" ")[0], *error)
    expected = {f"{name} {members}" for name in CASES for members in ([2, 1, 0], [2, 0])}
    assert set(results[2].value) >= expected
    assert ("death [2, 1, 0]" in results[1].value) == (via == "torch")


def test_ranks_are_named_as_ranks_of_the_job() -> None:
    assert Group("world", (0, 1, 2), 1).named(2) == "rank 2"
    assert Group("group1", (0, 1), 1).named(0, 1) == "ranks 0, 1"
    assert Group("group1", (2, 0), 1).named(0, 1) == "ranks 2, 0 of the job"
    assert Group("group1", (1, 2), 0).named(0) == "rank 1 of the job"
