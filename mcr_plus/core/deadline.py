"""Timeouts, and the time left of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from numbers import Real
from time import monotonic, sleep
from typing import TypeVar

from mcr_plus.errors import InvalidArgument, short

T = TypeVar("T")


def check_timeout(timeout: object) -> None:
    """Raise `InvalidArgument` unless `timeout` is a number of seconds or a timedelta."""
    if not isinstance(timeout, (Real, timedelta)) or timeout != timeout:
        raise InvalidArgument(f"timeout: expected seconds, a timedelta or None, got {short(timeout)}")


def check_wait(timeout: float | timedelta | None) -> None:
    """Raise `InvalidArgument` unless `timeout` is a valid wait: -1 does not mean forever."""
    check_timeout(0 if timeout is None else timeout)
    if timeout is not None and timeout < (timedelta(0) if isinstance(timeout, timedelta) else 0):  # type: ignore[operator]
        raise InvalidArgument(f"timeout: {timeout} is negative; None waits until the operation is done")


class Deadline:
    """The end of a timeout that begins now, in seconds or as a timedelta; with None it never passes."""

    __slots__ = ("_at",)

    def __init__(self, timeout: float | timedelta | None) -> None:
        if timeout is None:
            self._at = math.inf
            return
        check_timeout(timeout)
        self._at = monotonic() + (timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)

    def left(self) -> float | None:
        """Return the seconds left, at least 0.0, as an argument of `wait`; None without a timeout."""
        return None if self._at == math.inf else max(0.0, self._at - monotonic())

    def passed(self) -> bool:
        """Return whether the time is up."""
        return monotonic() >= self._at


def until(check: Callable[[], T], deadline: Deadline, nap: float) -> T:
    """Call `check` every `nap` seconds until it returns a true value or the deadline passes.

    Returns its last value.
    """
    while not (found := check()) and not deadline.passed():
        sleep(nap)
    return found
