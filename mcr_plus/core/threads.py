"""Threads of this process: threads started by C++ libraries, and threads for blocking calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

_TASKS = Path("/proc/self/task")


def threads() -> set[str]:
    """Return the kernel's ids of this process's threads; empty without /proc."""
    try:
        return set(os.listdir(_TASKS))
    except OSError:
        return set()


def all_wait(numbers: Iterable[str]) -> bool:
    """Return whether each of these threads is waiting or has ended; a runnable thread does not wait."""
    return all(map(_waits, numbers))


def _waits(number: str) -> bool:
    try:
        text = (_TASKS / number / "stat").read_text()
    except OSError:
        return True
    return text.rpartition(") ")[2][0] == "S"


class Background(Generic[T]):
    """A call that may block, in a separate thread."""

    def __init__(self, call: Callable[[], T], inside: AbstractContextManager[object]) -> None:
        """Start the call; the thread enters `inside` around it."""
        self._call = call
        self._inside = inside
        self._lock = threading.Lock()
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._has_ended = False
        self._after: Callable[[], object] | None = None
        threading.Thread(target=self._run, name="mcr background", daemon=True).start()

    def _run(self) -> None:
        try:
            with self._inside:
                self._results.append(self._call())
        except BaseException as error:  # raised by `result`
            self._error = error
        with self._lock:
            self._has_ended = True
            after = self._after
        if after is not None:
            after()

    @property
    def done(self) -> bool:
        """True if the call has returned or raised."""
        return bool(self._results) or self._error is not None

    def result(self) -> T:
        """Return the call's result or raise its exception; only once `done`."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    def abandon(self, discard: Callable[[T], object]) -> None:
        """Pass the result to `discard`, now, or in the thread once the call returns."""
        self.follow(lambda: [discard(result) for result in self._results])

    def follow(self, function: Callable[[], object]) -> None:
        """Call `function` once: now, or in the thread once the call has returned or raised."""
        with self._lock:
            if not self._has_ended:
                self._after = function
                return
        function()
