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
from mcr_plus import expert
from mcr_plus.core.group import Group
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

Call = Callable[[mcr.Communicator, int], object]
VICTIM = 0  # of the job: the last member of both groups


def _late(comm: mcr.Communicator, rank: int) -> None:
    if rank != VICTIM:
        comm.all_reduce(torch.ones(3))


def _receive(comm: mcr.Communicator, rank: int) -> None:
    if rank == 2:
        comm.recv(torch.ones(3), src=VICTIM)


def _receive_any(comm: mcr.Communicator, rank: int) -> None:
    if rank == 2:
        comm.recv(torch.ones(3), src=None)


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
    "anyone": _receive_any,
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
    """Return the ranks that a text names; it must call each a rank of the job."""
    lists = re.findall(r"ranks of the job: \[([\d, ]+)\]", text)
    named = re.findall(r"rank (\d+)(?: of the job|: last issued)", text)
    assert len(named) + len(lists) == len(re.findall(r"ranks?\b(?! of | must)", text)) + len(lists), text
    return {int(rank) for rank in named} | {int(rank) for each in lists for rank in each.split(", ")}


def _check(name: str, kind: str, text: str, missing: list[int], lost: list[int]) -> None:
    if name == "anyone":
        assert (kind, missing) == ("CommTimeout", []), text
        assert text.endswith("(its timeout is 1 s); no rank has sent a message for it")
        return
    named = _ranks_in(text)
    if name in ("timeout", "receive"):
        assert (kind, missing, named) == ("CommTimeout", [VICTIM], {VICTIM}), text
    elif name == "death":
        assert (kind, lost, named) == ("PeerLost", [VICTIM], {VICTIM}), text
    else:
        assert kind == "OrderMismatch", text
    issued = re.findall(r"rank (\d) of the job issued (.*?)(?:; |\. |$)", text)
    for rank, operation in issued:  # operations that only this rank of the job has issued
        strange = {"sizes": "float32[4]", "messages": "send", "roots": "root=0", "close": "tag=close"}[name]
        assert (strange in operation) == (int(rank) == VICTIM), text
    if name in ("sizes", "messages", "roots", "close"):
        assert len(issued) == 2, text
    if name == "counts":
        assert re.search("rank 0 of the job sends 4 elements to rank 2 of the job|different numbers", text), (
            text
        )


@pytest.mark.long
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


def _linear(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2 + (rank == VICTIM), 2)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def _local(comm: mcr.Communicator, rank: int) -> None:
    model = torch.nn.Linear(2, 2)
    mcr.local(model, torch.optim.SGD(model.parameters(), 0.1), every=2 + (rank == VICTIM), group=comm)


def _redistribute(comm: mcr.Communicator, rank: int) -> None:
    x = torch.zeros(2, dtype=torch.float64 if rank == VICTIM else torch.float32)
    there = mcr.Layout.replicated([4], list(comm.ranks)) if rank == VICTIM else None
    source = mcr.Layout.sharded([4], list(comm.ranks), 0)
    mcr.redistribute(x, source, there or mcr.Layout.sharded([4], list(comm.ranks)[::-1], 0), group=comm)


ARGUMENTS: dict[str, Call] = {
    "wrap": lambda comm, rank: mcr.wrap(*_linear(rank), group=comm),
    "local": _local,
    "sync": lambda comm, rank: mcr.sync({"w": torch.zeros(2 + (rank == VICTIM))}, src=2, group=comm),
    "sync src": lambda comm, rank: mcr.sync({"w": torch.zeros(2)}, src=rank, group=comm),
    "sync several": lambda comm, rank: mcr.sync(
        {"w": torch.zeros(2 + (rank == VICTIM))}, src=[2, 0], group=comm
    ),
    "dispatch": lambda comm, rank: expert.dispatch(
        torch.zeros(1, 2 + (rank == VICTIM)), torch.zeros(1, 1, dtype=torch.int64), experts=2, group=comm
    ),
    "scatter": lambda comm, rank: comm.scatter(torch.zeros(1), [torch.zeros(1)] * comm.size, 4 - rank - 2),
    "redistribute": _redistribute,
}


def wrong_arguments() -> dict[str, str]:
    """Run on ranks; return the errors of each about different arguments in a group of ranks 2 and 0."""
    world = mcr.init({"version": 1, "backends": ["gloo"]})
    said: dict[str, str] = {}
    comm = mcr.new_group([2, 0])
    for name, call in ARGUMENTS.items():
        if world.rank in comm.ranks:
            try:
                call(comm, world.rank)
            except mcr.McrError as error:
                said[name] = str(error)
        meet(name, world.size)
    return said


def test_ranks_in_errors_about_arguments_are_of_the_job() -> None:
    results = run_ranks(wrong_arguments, 3, via="torch")
    for name in ARGUMENTS:
        texts = [results[rank].value[name] for rank in (0, 2) if name in results[rank].value]
        ranks = [re.findall(r"ranks? \d(?:(?: and|,) \d)?( of the job)?", text) for text in texts]
        assert ranks and all(named and all(named) for named in ranks), (name, texts)  # noqa: PT018


def test_ranks_are_named_as_ranks_of_the_job() -> None:
    assert Group("world", (0, 1, 2), 1).named(2) == "rank 2"
    assert Group("group1", (0, 1), 1).named(0, 1) == "ranks 0, 1"
    assert Group("group1", (2, 0), 1).named(0, 1) == "ranks 2, 0 of the job"
    assert Group("group1", (1, 2), 0).named(0) == "rank 1 of the job"
