"""Leftovers of programs, distinguished from short-lived objects of other programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

_LIMIT_S = 5.0
_NAP_S = 0.05


def lasting(look: Callable[[], Iterable[str]]) -> list[str]:
    """Return the names that every check in five seconds sees; at once if a check sees none of them.

    For names that the whole machine shares, such as files in shared memory: those of a job that runs beside
    the test come and go, but leftovers stay.
    """
    left = set(look())
    deadline = time.monotonic() + _LIMIT_S
    while left and time.monotonic() < deadline:
        time.sleep(_NAP_S)
        left &= set(look())
    return sorted(left)
