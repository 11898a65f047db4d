"""Waits for libraries with threads of their own: when a rank blocks in the library, and for how long."""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from mcr_plus.backends.base import BlockingPoll, Poll
from mcr_plus.backends.gloo.operations import _Started
from mcr_plus.engine.backoff import pause_wait
from mcr_plus.engine.channel_wrapper import SteppedPoll
from mcr_plus.engine.engine import Engine
from mcr_plus.rendezvous.processes import Peers
from mcr_plus.waiting.policy import Pause, WaitStrategy


@pytest.mark.parametrize("seconds", [1e-9, 0.002, 0.02])
def test_a_wait_for_gloo_is_bounded_and_raises_nothing(seconds: float) -> None:
    limits: list[timedelta] = []

    def wait(limit: timedelta) -> None:
        limits.append(limit)
        raise RuntimeError("Operation timed out!")

    work = SimpleNamespace(wait=wait, is_completed=lambda: False)
    poll = _Started(work, set(), None)
    poll.block(seconds)
    assert not poll()
    (limit,) = limits
    assert timedelta(milliseconds=1) <= limit <= timedelta(seconds=max(seconds, 1e-3))


class Blocking(BlockingPoll):
    def __init__(self) -> None:
        self.limits: list[float] = []

    def __call__(self) -> bool:
        return False

    def block(self, seconds: float) -> None:
        self.limits.append(seconds)


def operation(
    poll: Any, *, polled: bool, after: Any = None, done: bool = False, rings: bool = False,
    ranks: tuple[int, ...] = (0, 1),
) -> Any:  # fmt: skip
    return SimpleNamespace(
        poll=poll,
        is_done=done,
        message=SimpleNamespace(after=after),
        operation=SimpleNamespace(
            polled=polled,
            on_stream=False,
            rings=rings,
            state=SimpleNamespace(group=SimpleNamespace(ranks=ranks)),
        ),
    )


def engine_of(policy: Any, *others: Any) -> Any:
    waiting = WaitStrategy(policy)
    return SimpleNamespace(
        waiting=waiting, unordered=[], wrappers=[], blocked=[], in_flight=list(others),
        lock=threading.RLock(), try_poll=lambda work: False, progress=lambda: None,
    )  # fmt: skip


def another(*, done: bool) -> Any:
    return SimpleNamespace(probe=lambda: done)


@pytest.mark.parametrize(
    ("other", "blocks"),
    [
        (operation(Blocking(), polled=False), True),
        (operation(lambda: False, polled=True, done=True), True),
        (operation(None, polled=True, after=another(done=False)), True),
        (operation(None, polled=True, after=another(done=True)), False),
        (operation(None, polled=True), False),
        (operation(lambda: False, polled=True), False),
        (operation(lambda: False, polled=True, rings=True), False),  # for a sleep on the bell alone
    ],
)
def test_a_library_wakes_the_thread_unless_something_else_needs_its_polls(other: Any, blocks: bool) -> None:
    for policy in ("auto", "sleep", "yield", "spin"):
        poll = Blocking()
        work = operation(poll, polled=False)
        engine = engine_of(policy, other, work)
        pause = Pause(engine.waiting, False, False, (0, 1))
        pause_wait(engine, work, pause, time.monotonic(), 0.0)
        pause_wait(engine, work, pause, time.monotonic(), 30.0)
        assert bool(poll.limits) == (blocks and policy in ("auto", "sleep"))
        assert all(0 < limit < 0.1 for limit in poll.limits)
        engine.waiting.close()


class Stepped(SteppedPoll):
    def __init__(self, current: Poll | None) -> None:
        self._current = current

    @property
    def current(self) -> Poll | None:
        return self._current

    def __call__(self) -> bool:
        return False


@pytest.mark.parametrize(("needs_polls", "is_blocking"), [(False, True), (True, True), (False, False)])
def test_a_verified_operation_waits_in_the_library_of_its_step(needs_polls: bool, is_blocking: bool) -> None:
    step = Blocking()
    poll = Stepped(step if is_blocking else None)
    work = operation(poll, polled=False)
    engine, asked = engine_of("auto", work), list[Any]()

    def needs(beside: Any) -> bool:
        asked.append(beside)
        return needs_polls

    engine.wrappers.append(SimpleNamespace(needs_polls=needs))
    pause_wait(engine, work, Pause(engine.waiting, False, False, (0, 1)), time.monotonic(), 0.0)
    assert bool(step.limits) == (is_blocking and not needs_polls)
    assert asked == [poll] * is_blocking
    engine.waiting.close()


class Bells:
    """Bells of a rank, which sleep for no time."""

    wanted = (0,)

    def __init__(self) -> None:
        self.armed, self.slept = [], list[float]()  # type: ignore[var-annotated]

    def arm(self, ranks: tuple[int, ...]) -> None:
        self.armed.append(ranks)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def set_calm(self, calm: bool) -> None: ...

    def asleep(self) -> int:
        return 0


def naps(
    waited: float, *others: Any, rings: bool = True, policy: Any = "auto", work: Any = None
) -> list[float]:
    """Sleeps on the bell in a wait for ranks 0 and 1, on a host without other work."""
    engine, bells = engine_of(policy, *others), Bells()
    work = work or operation(lambda: False, polled=True)
    engine.waiting.bells = bells
    pause = Pause(engine.waiting, True, rings, (0, 1))
    with mock.patch.object(engine.waiting, "check_load"):
        for _ in range(20):
            pause_wait(engine, work, pause, time.monotonic(), waited)
    assert bells.armed == [(0, 1)] * len(bells.slept)
    engine.waiting.close()
    return bells.slept


def test_a_long_wait_sleeps_on_the_bell_also_where_there_is_no_other_work() -> None:
    assert naps(0.0005) == []
    assert naps(0.1, policy="spin") == naps(0.1, policy="yield") == []
    assert naps(0.1)[0] <= 1e-3
    assert naps(0.1)[-1] == 0.01
    # Nobody rings: the end is noticed late by at most half of this on average.
    assert max(naps(0.1, rings=False)) == 0.1 / 128


def test_operations_for_which_no_peer_rings_keep_naps_short() -> None:
    for rings, ranks, longest in ((True, (0, 2), 200e-6), (False, (0, 1), 200e-6), (True, (0, 1), 0.01)):
        other = operation(lambda: False, polled=True, rings=rings, ranks=ranks)
        assert max(naps(0.1, other)) == longest
    # Its peers ring once it runs, but not for the end of the operation before it.
    follows = operation(None, polled=True, rings=True, after=another(done=False))
    assert max(naps(0.1, follows)) == max(naps(0.1, work=follows)) == 200e-6


def test_what_is_deferred_starts_while_a_wait_blocks_in_a_library() -> None:
    """A program that waits starts it itself, unless it sleeps for long, in its wait or in one of a thread."""
    engine = Engine(Peers(0, ("host",), None, 1.0), wait="auto", oversubscribed=False)
    started: list[Any] = []
    before = SimpleNamespace(probe=lambda: True, exception=lambda: None)
    work = operation(None, polled=False, after=before)
    vars(work.operation).update(
        deferred=False, burst=range(1), prepare=lambda _: None, start=started.append,
        state=SimpleNamespace(blocked_channels=1, refresh=lambda: None),
    )  # fmt: skip
    work.position, work.finish = None, None
    engine.blocked.append(cast("Any", SimpleNamespace(pending=deque([work]))))
    engine.waits.append(cast("Any", SimpleNamespace()))
    engine.progressed = time.monotonic() + 10.0
    assert engine.start_pending()
    assert not started
    engine.progressed = time.monotonic() - 0.01
    assert not engine.start_pending()
    assert started == [work.message]
    engine.waiting.close()
