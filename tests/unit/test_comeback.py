"""A library that has failed is opened again; attempts that hang hold up neither operations nor later ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mcr_plus.reliability.failover import reinstate
from mcr_plus.reliability.failover.reinstate import Reinstatement


class _Channel:
    released = 0

    def release(self) -> None:
        self.released += 1


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_attempts_that_hang_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reinstate, "_FIRST_TRY", 0.0)
    monkeypatch.setattr(reinstate, "_LAST_TRY", 0.0)
    monkeypatch.setattr(reinstate, "_PATIENCE", 60.0)  # nothing below waits for a thread
    opened: list[Any] = [_Channel() for _ in range(7)]
    may_go_on = threading.Event()

    def reopen(number: int, is_given_up: Callable[[], bool]) -> Any:
        if number <= 4:
            assert may_go_on.wait(60)
            _wait_for(is_given_up)
        return opened[number]

    own = Reinstatement(reopen)
    own.after_failure()
    for _ in range(4):
        assert own._own_vote() == 1
        assert own.decided(1) is None  # all begin
        assert own._own_vote() == 0
        assert own.decided(-1) is None  # another rank cannot
    assert own._own_vote() == 0  # enough of them hang
    may_go_on.set()
    _wait_for(lambda: own._own_vote() == 1)
    own.decided(1)
    _wait_for(lambda: own._own_vote() == 1)  # open
    assert own.decided(1) is opened[5]
    own.after_failure()
    assert own._own_vote() == 1
    own.decided(1)
    own.give_up()
    late = [opened[number] for number in (1, 2, 3, 4, 6)]
    _wait_for(lambda: all(each.released == 1 for each in late))
    assert [each.released for each in opened] == [0, 1, 1, 1, 1, 0, 1]
