"""Python's garbage collector, paused where objects are made that stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()  # a signal's handler may pause the collector, too
_paused = 0  # by so many threads or callers
_was_enabled = True


@contextmanager
def collector_paused() -> Iterator[None]:
    """Around imports and parsing, which leave no garbage. A collection walks all objects of torch: 0.1 s.

    Several threads may pause it at once: the last one that ends makes it as it was before the first.
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
