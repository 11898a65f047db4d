"""What programs have left behind, told apart from what other programs have for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

_LIMIT_S = 5.0
_NAP_S = 0.05


def lasting(look: Callable[[], Iterable[str]]) -> list[str]:
    """Return what every look of five seconds sees; at once when a look sees none of it.

    For names that the whole machine shares, such as files in shared memory: those of a job that
    runs beside the test come and go, and what has been left behind stays.
    """
    left = set(look())
    deadline = time.monotonic() + _LIMIT_S
    while left and time.monotonic() < deadline:
        time.sleep(_NAP_S)
        left &= set(look())
    return sorted(left)
