"""Threads of this process: those that C++ libraries have started, and blocking calls on their own ones."""

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
    """The kernel's numbers of the threads of this process; empty where there is no /proc."""
    try:
        return set(os.listdir(_TASKS))
    except OSError:
        return set()


def all_wait(numbers: Iterable[str]) -> bool:
    """Whether each of these threads waits for something, or has ended; one that could run does not."""
    return all(map(_waits, numbers))


def _waits(number: str) -> bool:
    try:
        text = (_TASKS / number / "stat").read_text()
    except OSError:
        return True
    return text.rpartition(") ")[2][0] == "S"


class Background(Generic[T]):
    """A call that may block, on a thread of its own."""

    def __init__(self, call: Callable[[], T], inside: AbstractContextManager[object]) -> None:
        """`inside`: entered by the thread around the call."""
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
        """Whether the call has returned or raised."""
        return bool(self._results) or self._error is not None

    def result(self) -> T:
        """Return what the call has returned, or raise what it has raised; only once `done`."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    def abandon(self, discard: Callable[[T], object]) -> None:
        """Pass the result to `discard`, now or, by the thread, once the call returns one."""
        self.follow(lambda: [discard(result) for result in self._results])

    def follow(self, function: Callable[[], object]) -> None:
        """Call `function`, now or, by the thread, once the call has returned or raised; once for each."""
        with self._lock:
            if not self._has_ended:
                self._after = function
                return
        function()
