"""A process as /proc shows it."""

from __future__ import annotations

from typing import Literal

State = Literal["running", "stopped", "dead"]


def read_stat(pid: int | str) -> tuple[str, str] | None:
    """State letter and start time of a process, or None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name in parentheses may contain anything
    return fields[0], fields[19]


def state_of(pid: int, started: str) -> State:
    """The state of the process that has begun at `started`; another one may have its number by now."""
    now = read_stat(pid)
    if now is None or now[1] != started or now[0] in "ZX":
        return "dead"
    return "stopped" if now[0] in "Tt" else "running"


def handles(pid: int, number: int) -> bool:
    """Whether a process catches or ignores a signal, in Python or below it; false if that cannot be read."""
    try:
        with open(f"/proc/{pid}/status") as file:
            masks = [int(line.split()[1], 16) for line in file if line.startswith(("SigCgt:", "SigIgn:"))]
    except (OSError, ValueError):
        return False
    return any(mask >> (number - 1) & 1 for mask in masks)
