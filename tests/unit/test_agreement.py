"""Ranks with the same operations never seem to differ, however late messages come.

Ranks are threads, each with an engine and a board of its own. Their libraries complete operations after some
polls, whatever the others do, so ranks drift apart as far as the comparison of signatures permits. Some
operations start after others, and some pass a gate of their library, which pairs the actions of ranks. Every
request to the store may be held up.
"""

from __future__ import annotations

import mmap
import random
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcr_plus.backends.base import Poll
from mcr_plus.board import store as store_board
from mcr_plus.board.base import GroupBoard
from mcr_plus.board.shared import SharedBoard
from mcr_plus.board.store import StoreBoard
from mcr_plus.core.c10d import HashStore
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.work import Work
from mcr_plus.engine.engine import Engine
from mcr_plus.engine.group_state import BackendChannel, GroupState
from mcr_plus.engine.operation import BoundOperation
from mcr_plus.errors import McrError, OperationsDiffer
from mcr_plus.pipeline.stage import Issue
from mcr_plus.rendezvous.processes import Peers

MakeBoard = Callable[[Group, random.Random], GroupBoard]
_NEW = 0.7  # of the operations have a signature that was never there before
_WINDOW = 24  # asynchronous operations in flight
_BURST = 300  # the same where a rank runs far ahead: more than a ring of any board holds
_DEPENDS = 0.2  # of the operations start after an earlier one
_ENDS = 0.3  # of the looks at a started operation find it done
_HELD_UP = 0.05  # of the requests
_LONGEST_S = 300e-6


class Slow:
    """A store that may hold up requests."""

    def __init__(self, store: HashStore, chance: random.Random) -> None:
        self._store, self._chance = store, chance

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._store, name)

        def ask(*args: Any) -> Any:
            if self._chance.random() < _HELD_UP:
                time.sleep(self._chance.random() * _LONGEST_S)
            return request(*args)

        return ask


def across_hosts() -> MakeBoard:
    store = HashStore()
    return lambda group, chance: StoreBoard(Slow(store, chance), group)  # type: ignore[arg-type]


def on_one_host() -> MakeBoard:
    memory = mmap.mmap(-1, 1 << 22)
    return lambda group, _: SharedBoard(memory, group)


class Gate:
    """A library's gate, like MPI's: for the first two operations of a signature, or for all.

    Like collectives of a communicator, its n-th action is paired with the n-th action of every other rank. It
    takes a while now and then.
    """

    again = True

    def __init__(self, library: Library, digest: int) -> None:
        self._library, self._digest = library, digest
        self._passed = 0
        self.every = bool(digest % 2)

    def __call__(self, message: Message) -> Poll | None:
        self._passed += 1
        self.again = self._passed < 2
        chance = self._library.chance
        number = self._library.ask(self._digest)
        if chance.random() < 0.3:
            return None
        return lambda: self._library.has_met(number) and chance.random() < 0.2


class Library:
    """The channel of a library with gates. `asked`: the requests of all ranks, in order."""

    def __init__(self, rank: int, chance: random.Random, asked: list[list[int]]) -> None:
        self._rank, self.chance, self._asked = rank, chance, asked

    def ask(self, digest: int) -> int:
        self._asked[self._rank].append(digest)
        return len(self._asked[self._rank]) - 1

    def has_met(self, number: int) -> bool:
        """Return whether all ranks have made this many requests; raise if the requests differ."""
        if any(len(theirs) <= number for theirs in self._asked):
            return False
        if len({theirs[number] for theirs in self._asked}) > 1:
            raise OperationsDiffer("another rank has asked for another operation", explained=True)
        return True

    def gate(self, signature: Signature, digest: int) -> Gate:
        return Gate(self, digest)


class Rank:
    """One rank: issues the program of a seed and notes its errors."""

    def __init__(
        self,
        make: MakeBoard,
        rank: int,
        size: int,
        steps: int,
        seed: int,
        differs: int | None,
        window: int,
        asked: list[list[int]],
    ) -> None:
        self.group = Group("world", tuple(range(size)), rank)
        self.asynchronous = 0.5 if window == _WINDOW else 0.995
        self.steps, self.seed, self.differs, self.window = steps, seed, differs, window
        self.own = random.Random(seed * 100 + rank)  # local choices: delays, and times of waits
        self.library = Library(rank, self.own, asked)
        self.board = make(self.group, self.own)
        self.board.first_check = self.board.check_every = 0.0  # peers' rows are read at every poll
        self.error: BaseException | None = None
        self.issued = 0

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.error = error

    def _run(self) -> None:
        peers = Peers(self.group.rank, ("host",) * self.group.size, None, 1.0)
        engine = Engine(peers, wait="yield", oversubscribed=False)
        nobody: Any = None
        idle: Any = SimpleNamespace(withdraw=lambda: None)
        state, channel = GroupState(self.group, self.board), BackendChannel(nobody, idle)
        program = random.Random(self.seed)  # choices of all ranks
        known: list[Issue] = []
        waiting: list[Work] = []
        latest: Work | None = None  # of the asynchronous ones
        for step in range(self.steps):
            is_new = program.random() < _NEW or not known
            every, is_async, choice, depends = (
                program.random() < 0.2,
                program.random() < self.asynchronous,
                program.random(),
                program.random() < _DEPENDS,
            )
            if is_new:
                tag = f"{step}" if step != self.differs or self.group.rank else "another"
                gates = self.library if choice < 0.5 else None
                known.append(self._operation(engine, state, channel, tag, is_async, every, gates))
            issue = known[-1] if is_new else known[int(choice * len(known))]
            assert issue.operation is not None
            signature = issue.operation.signature
            work = issue(Message(signature, (), (), after=latest if depends else None))
            self.issued += 1
            if signature.async_op:
                latest = work
                waiting.append(work)
            else:
                work.wait()
            while waiting and (len(waiting) > self.window or self.own.random() < 2 / self.window):
                waiting.pop(self.own.randrange(len(waiting))).wait()
        for work in waiting:
            work.wait()

    def _operation(
        self,
        engine: Engine,
        state: GroupState,
        backend_channel: BackendChannel,
        tag: str,
        is_async: bool,
        every: bool,
        channel: Any,
    ) -> Issue:
        signature = Signature(
            "all_reduce", torch.float32, (4,), 16, "world", state.group.size,
            reduce_op="SUM", tag=tag, backend="soon", async_op=is_async,
        )  # fmt: skip

        def start(message: Message) -> Poll:
            return lambda: self.own.random() < _ENDS

        return BoundOperation(
            signature, start, engine, state, backend_channel, channel=channel, on_stream=False, spins=1,
            burst=range(1), timeout=60.0, compare_every=every,
        ).bind()  # fmt: skip


def run(
    make: MakeBoard, size: int, steps: int, seed: int, differs: int | None = None, window: int = _WINDOW
) -> list[Rank]:
    asked: list[list[int]] = [[] for _ in range(size)]
    ranks = [Rank(make, rank, size, steps, seed, differs, window, asked) for rank in range(size)]
    threads = [threading.Thread(target=rank.run) for rank in ranks]
    # A rank that waits for another would keep the interpreter's lock for the rest of an interval of 5 ms.
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if differs is None:
        assert all(theirs == asked[0] for theirs in asked), "what gates were asked for"
    return ranks


PLACES = pytest.mark.parametrize("place", [across_hosts, on_one_host])


@pytest.mark.short("2-700")
@PLACES
@pytest.mark.parametrize(("size", "steps"), [(2, 700), (3, 600), (4, 600)])  # more than RING
def test_no_false_alarm(place: Callable[[], MakeBoard], size: int, steps: int) -> None:
    for rank in run(place(), size, steps, seed=size):
        assert (rank.error, rank.issued) == (None, steps)


@pytest.mark.short("across_hosts")
@PLACES
def test_no_false_alarm_where_a_rank_issues_far_ahead(place: Callable[[], MakeBoard]) -> None:
    for rank in run(place(), 2, 1500, seed=5, window=_BURST):
        assert (rank.error, rank.issued) == (None, 1500)


@pytest.mark.slow  # minutes: 100,000 operations of the group on each kind of board, ranks not counted
@PLACES
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("held_up", [_HELD_UP, 1.0])
def test_no_false_alarm_in_many(
    place: Callable[[], MakeBoard], size: int, held_up: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "_HELD_UP", held_up)
    for seed in range(4):
        steps = 100_000 // (2 * 3 * 4) + 1
        for rank in run(place(), size, steps, seed=seed):
            assert (rank.error, rank.issued) == (None, steps)


@pytest.mark.long
@PLACES
def test_no_false_alarm_with_many_ranks_that_count_votes(
    place: Callable[[], MakeBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_board, "_FEW", 1)
    for rank in run(place(), 4, 200, seed=9):
        assert (rank.error, rank.issued) == (None, 200)


@PLACES
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_detect_the_differing_operation(place: Callable[[], MakeBoard], size: int) -> None:
    differs = _first_new_after(150, size)
    for rank in run(place(), size, 300, seed=size, differs=differs):
        assert isinstance(rank.error, McrError), rank.error
        assert f"operation #{differs + 1} of group 'world'" in str(rank.error)


def _first_new_after(step: int, seed: int) -> int:
    """Return the first step from this one on with a new signature, in the program of a seed."""
    program = random.Random(seed)
    for number in range(step + 100):
        is_new = program.random() < _NEW or number == 0
        for _ in range(4):
            program.random()
        if is_new and number >= step:
            return number
    raise AssertionError("no new signature")
