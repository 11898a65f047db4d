"""Threads of this process that C++ libraries have started."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

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
