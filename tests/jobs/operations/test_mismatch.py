"""Ranks that do different things are told so, on every rank, instead of getting garbage or waiting.

A corpus of faulty programs and their correct twins: every fault must be found, nothing else reported.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from mismatches import CASES, Group, outcome_of, try_case
from ranks import Via, own_rank, run_ranks

import mcr_plus as mcr
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

DEADLINE_S = 10.0
START_LIMIT_S = 180.0

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")
both = pytest.mark.parametrize("via", [pytest.param("mpi", marks=needs_mpi), "torch"])


def configuration(check: str = "first", deadline: float = DEADLINE_S) -> dict[str, Any]:
    return {
        "version": 1,
        "pipeline": [
            {"compress": {}},
            {"select": {}},
            {"dispatch": {"timeout": f"{deadline}s", "check": check}},
        ],
    }


def libraries(via: str) -> list[str]:
    return ["msccl", "mpi", "gloo"] if via == "mpi" else ["msccl", "gloo"]


# -- on ranks -------------------------------------------------------------------------------------


def corpus(via: str, check: str, before: int) -> list[dict[str, Any]]:
    """Run on ranks: every case on every library, in a group of all and in one of two ranks."""
    mcr.init(configuration(check), backends=libraries(via))
    size = mcr.get_world_size()
    members = [list(range(size))] + ([[size - 1, 0]] if size > 2 else [])
    runs = [
        (name, backend, mcr.new_group(ranks))
        for name in cases_for(via)
        for backend in libraries(via)
        for ranks in members
    ]
    return [
        result
        for name, backend, group in runs
        for result in try_case(name, backend, group, before=before, twins=name in _APART)
    ]


def cases_for(via: str) -> list[str]:
    return [name for name in CASES if via == "mpi" or name != "backend"]


# In these cases the good program is bound before the fault even in the corpus of first binds.
_APART = ("size", "tag", "reduce op")


def other_groups() -> dict[str, Any]:
    """Run on ranks: new_group with other ranks, or in another order, on the last rank."""
    mcr.init(configuration())
    size, last = mcr.get_world_size(), mcr.get_rank() == mcr.get_world_size() - 1
    good = list(range(size))
    return {
        "twin": outcome_of(lambda: mcr.new_group(good)),
        "ranks": outcome_of(lambda: mcr.new_group(good[:-1] if last else good)),
        "order": outcome_of(lambda: mcr.new_group(good[::-1] if last else good)),
        "still works": outcome_of(lambda: mcr.new_group(good).barrier()),
    }


def other_configuration() -> dict[str, Any]:
    """Run on ranks: the configuration of the last rank has another deadline."""
    deadline = 20.0 if own_rank() == 1 else 10.0
    return outcome_of(lambda: mcr.init(configuration(deadline=deadline)))


# -- tests ----------------------------------------------------------------------------------------


@pytest.mark.short("torch-2-first-0")
@pytest.mark.parametrize(
    ("via", "ranks", "check", "before"),
    [
        pytest.param("mpi", 3, "first", 0, marks=needs_mpi),
        pytest.param("mpi", 3, "first", 8, marks=needs_mpi),
        pytest.param("mpi", 2, "every", 1, marks=needs_mpi),
        ("torch", 2, "first", 0),
        ("torch", 3, "first", 8),
        pytest.param("mpi", 2, "first", 1000, marks=[needs_mpi, pytest.mark.slow]),
        pytest.param("mpi", 3, "first", 1000, marks=[needs_mpi, pytest.mark.slow]),
    ],
)
def test_every_mismatch_is_found_and_nothing_else(via: Via, ranks: int, check: str, before: int) -> None:
    limit = START_LIMIT_S + 2 * before  # 1,000 calls of every program before each case take minutes
    results = run_ranks(corpus, ranks, args=[via, check, before], via=via, timeout=limit)
    assert [result.returncode for result in results] == [0] * ranks
    outcomes = [outcome for result in results for outcome in result.value]
    false_alarms = [outcome for outcome in outcomes if outcome["twin"] and outcome["error"]]
    assert false_alarms == []
    faults = [outcome for outcome in outcomes if not outcome["twin"]]
    per_case = len(libraries(via)) * (ranks + (2 if ranks > 2 else 0))
    assert len(faults) == per_case * len(cases_for(via))
    assert [fault for fault in faults if fault["error"] != "OrderMismatch"] == []
    assert [fault for fault in faults if fault["seconds"] > DEADLINE_S] == []
    assert [fault for fault in faults if not _names_all(fault)] == []
    assert [fault for fault in faults if fault["again"] != "BackendError"] == []


def _names_all(fault: dict[str, Any]) -> bool:
    """The message has two ranks, the calls of both, the operation's number and the group."""
    text = fault["text"]
    words = CASES[fault["case"].split("/")[0]].words
    named = set(re.findall(r"rank (\d+)", text))
    return (
        len(named) >= 2
        and re.search(r"#\d+ of group '\w+'", text) is not None
        and all(re.search(word, text) for word in words)
    )


@both
def test_new_group_with_other_ranks(via: Via) -> None:
    for result in run_ranks(other_groups, 3, via=via, timeout=START_LIMIT_S):
        kinds = {name: outcome["error"] for name, outcome in result.value.items()}
        assert kinds == {
            "twin": None,
            "ranks": "OrderMismatch",
            "order": "OrderMismatch",
            "still works": None,
        }
        text = result.value["ranks"]["text"]
        assert "[0, 1, 2]" in text
        assert "[0, 1]" in text
        assert "rank 2" in text


@both
def test_configuration_that_differs_between_ranks(via: Via) -> None:
    for result in run_ranks(other_configuration, 2, via=via, timeout=START_LIMIT_S):
        assert result.value["error"] == "ConfigError"
        assert "differs between ranks: rank 0 and ranks [1]" in result.value["text"]


# -- misuse that other libraries answer with garbage ------------------------------------------------


def threads(via: str) -> dict[str, Any]:
    """Run two threads on one group, then two threads with a group each."""
    mcr.init(configuration(), backends=libraries(via))
    found = {}
    for backend in libraries(via):
        everyone = list(range(mcr.get_world_size()))
        shared, others = mcr.new_group(everyone), [mcr.new_group(everyone) for _ in range(2)]
        handed_over = mcr.new_group(everyone)
        found[backend] = {
            "one group": _in_threads([shared, shared], backend),
            "one group, taken over by one": _in_threads([handed_over, handed_over], backend, owners={0}),
            "a group each": _in_threads(others, backend, owners={0, 1}),
        }
    return found


def _in_threads(groups: list[Group], backend: str, owners: set[int] = frozenset()) -> list[dict[str, Any]]:  # type: ignore[assignment]
    counts: list[dict[str, Any]] = [{"right": 0, "wrong": 0, "refused": 0} for _ in groups]
    # The next thread may use a group once its owner has ended, so every thread stays until all are done.
    ready, done = threading.Barrier(len(groups)), threading.Barrier(len(groups))

    def work(index: int) -> None:
        group = groups[index]
        if index in owners:
            group.take_over()
        ready.wait()
        for step in range(200):
            value = torch.full((4,), float(1000 * index + step))
            try:
                group.all_reduce(value, backend=backend)
            except (mcr.OrderMismatch, mcr.BackendError):
                counts[index]["refused"] += 1
            except Exception as error:
                counts[index]["failed"] = str(error)
                break
            else:
                right = bool((value == group.size * (1000 * index + step)).all())
                counts[index]["right" if right else "wrong"] += 1
        done.wait()

    running = [threading.Thread(target=work, args=(index,)) for index in range(len(groups))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return counts


@both
def test_two_threads(via: Via) -> None:
    refused, right = {"right": 0, "wrong": 0, "refused": 200}, {"right": 200, "wrong": 0, "refused": 0}
    for result in run_ranks(threads, 2, args=[via], via=via, timeout=START_LIMIT_S):
        for found in result.value.values():
            assert found["one group"] == [refused, refused]
            assert found["one group, taken over by one"] == [right, refused]
            assert found["a group each"] == [right, right]


MESSAGES = {
    "twin": (8, 8, torch.float32),
    "longer": (8, 4, torch.float32),
    "much longer": (1 << 20, 4, torch.float32),
    "shorter": (4, 8, torch.float32),
    "dtype": (4, 4, torch.int32),
}


def messages(via: str) -> dict[str, Any]:
    """Run on ranks: sends and receives that do not fit, and some that do."""
    mcr.init(configuration(), backends=libraries(via))
    runs = [
        (f"{backend}/{name}/{source}", mcr.new_group([0, 1]), backend, name, source)
        for backend in libraries(via)
        for name in MESSAGES
        for source in (0, None)
    ]
    return {
        label: outcome_of(partial(_exchange, group, backend, name, source))
        for label, group, backend, name, source in runs
    }


def _exchange(group: Group, backend: str, name: str, source: int | None) -> None:
    sent, received, dtype = MESSAGES[name]
    if group.rank == 0:
        group.send(torch.ones(sent), 1, backend=backend)
    else:
        group.recv(torch.zeros(received, dtype=dtype), source, backend=backend)


@pytest.mark.long
@both
def test_messages_that_do_not_fit(via: Via) -> None:
    sender, receiver = run_ranks(messages, 2, args=[via], via=via, timeout=START_LIMIT_S)
    for name, outcome in receiver.value.items():
        assert outcome["error"] == (None if "twin" in name else "OrderMismatch"), (name, outcome)
        if "twin" not in name:
            assert "rank 0 issued send float32[" in outcome["text"], name
            assert "rank 1 issued recv " in outcome["text"], name
        if "shorter" in name:
            assert "a message must fill its receive" in outcome["text"], name
    for name, outcome in sender.value.items():
        # A short message may have been on its way before the receiver looked at it.
        assert outcome["error"] in (None, *["OrderMismatch"] * ("twin" not in name)), (name, outcome)


def fork(via: str) -> dict[str, Any]:
    """Run on ranks: a forked child tries the parent's communicator; then the parent continues."""
    group = mcr.init(configuration(), backends=libraries(via))
    value = torch.ones(4)
    group.all_reduce(value)
    bound = group.persistent("all_reduce", value)
    large = torch.ones(1 << 20)
    pending = group.all_reduce(large, async_op=True)
    assert pending is not None
    attempts: dict[str, Callable[[], object]] = {
        "function": lambda: mcr.all_reduce(torch.ones(4)),
        "method": lambda: group.all_reduce(torch.ones(4)),
        "persistent": bound,
        "handle": pending.wait,
        "message": lambda: group.isend(torch.ones(4), 0),
        "new group": lambda: mcr.new_group([0]),
        "finalize": mcr.finalize,
        "block": lambda: group.__exit__(None, None, None),
    }
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writer, "w") as pipe:
            for name, attempt in attempts.items():
                outcome = outcome_of(attempt)
                print(name, outcome["error"], outcome["text"], sep="|", file=pipe)
        sys.exit()  # through the whole end of an interpreter, which must not hang or touch the job
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = [line.split("|", 2) for line in pipe.read().splitlines()]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    pending.wait()
    assert (large == 2).all()
    group.all_reduce(value)
    return {"told": told, "code": code, "value": value[0].item()}


@pytest.mark.long
@both
@pytest.mark.filterwarnings("ignore")
def test_forked_child_is_refused(via: Via) -> None:
    for result in run_ranks(fork, 2, args=[via], via=via, timeout=START_LIMIT_S):
        for name, error, text in result.value["told"]:
            assert (name, error) == (name, "None" if name == "block" else "NotInitialized"), text
        assert any("belongs to the parent process" in text for _, _, text in result.value["told"])
        assert result.value["code"] == 0
        assert result.value["value"] == 4.0


TAGS = [letter * 144 + "last" for letter in "ab"]  # descriptions of just as many bytes as the board keeps


def heard_of() -> dict[str, Any]:
    """Run on 4 ranks: two issue different operations, one waits for them, and the last for that rank."""
    comm = mcr.init({**configuration(), "backends": ["gloo"]})

    def run() -> None:
        if comm.rank in (0, 3):
            comm.recv(torch.zeros(4), 1 if comm.rank == 0 else 0)
        else:
            comm.all_reduce(torch.ones(4), tag=TAGS[comm.rank - 1])

    return outcome_of(run)


def test_relayed_mismatch_has_both_operations() -> None:
    for result in run_ranks(heard_of, 4, via="torch", check=False):
        assert result.value["error"] == "OrderMismatch"
        for tag in TAGS:
            assert f" issued all_reduce SUM float32[4] tag={tag} backend=gloo" in result.value["text"]
        assert "in the same order" in result.value["text"]
