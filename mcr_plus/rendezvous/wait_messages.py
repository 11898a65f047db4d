"""Log lines while a rank waits for others to arrive, which may take minutes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

_FIRST: Final = 10.0  # s before the first line; then twice as long each time
_SHOWN: Final = 16  # most ranks in a line
_log = logging.getLogger("mcr_plus")


@contextmanager
def logged_waiting(text: Callable[[], str]) -> Iterator[None]:
    """Log the missing ranks now and then, from a thread: the wait itself may be in C++."""
    ended, began = threading.Event(), time.monotonic()

    def run() -> None:
        due = _FIRST
        while not ended.wait(began + due - time.monotonic()):
            line = text()
            if ended.is_set():  # it may have waited for a store that another thread uses
                return
            _log.warning("%s, for %.0f s so far", line, time.monotonic() - began)
            due *= 2

    thread = threading.Thread(target=run, name="mcr_plus waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def some_ranks(ranks: Sequence[int]) -> str:
    """Return the names of ranks, at most the first `_SHOWN`."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"
