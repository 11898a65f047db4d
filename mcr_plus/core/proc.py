"""State of processes in /proc."""

from __future__ import annotations

from functools import cache
from typing import Final, Literal

State = Literal["running", "stopped", "dead"]
_LOOKS_WITHIN: Final = 0.3  # seconds between two observations of a stopped process that count in full
_OF_GRACE: Final = 0.6  # most that the time between two observations counts, as a share of the grace
_NO_CORE_FOR: Final = 5.0  # seconds that an observer may get no core; after more, it was stopped itself


@cache
def boot_id() -> str:
    """Return a text that is equal in all processes under one kernel, also in containers; may be empty."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def read_stat(pid: int | str) -> tuple[str, str] | None:
    """Return state letter and start time of a process; None without the process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name in parentheses may contain anything
    return fields[0], fields[19]


def state_of(pid: int, started: str) -> State:
    """Return the state of the process begun at `started`; another process may have its pid by now."""
    now = read_stat(pid)
    if now is None or now[1] != started or now[0] in "ZX":
        return "dead"
    return "stopped" if now[0] in "Tt" else "running"


def tracer_of(pid: int) -> int:
    """Return the process that traces and has stopped another process, such as a debugger; 0 without one."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if line.startswith(("State:", "TracerPid:")))
        return int(fields["TracerPid"]) if fields["State"].split()[0] == "t" else 0
    except (OSError, ValueError, KeyError, IndexError):
        return 0


class Stop:
    """A stop of a process, from its first to its last observation, all by one observer.

    Of the time between two observations at most 0.3 s count: the observer itself may have been stopped with
    the process, or may have had no core. After five seconds without an observation a new stop begins.
    """

    __slots__ = ("_grace", "_last", "_since")

    def __init__(self, grace: float, now: float) -> None:
        """Begin a stop at `now`; it is certain after `grace` seconds, which may be infinite."""
        self._grace, self._since, self._last = grace, now, now

    def is_certain(self, now: float) -> bool:
        """Return whether the stop is certain, at an observation that finds the process stopped."""
        gap, self._last = now - self._last, now
        uncounted = max(0.0, gap - min(_LOOKS_WITHIN, _OF_GRACE * self._grace))
        self._since = now if gap > _NO_CORE_FOR else self._since + uncounted
        return now - self._since >= self._grace


def handles(pid: int, number: int) -> bool:
    """Return whether a process catches or ignores a signal, in Python or below; false if unreadable."""
    try:
        with open(f"/proc/{pid}/status") as file:
            masks = [int(line.split()[1], 16) for line in file if line.startswith(("SigCgt:", "SigIgn:"))]
    except (OSError, ValueError):
        return False
    return any(mask >> (number - 1) & 1 for mask in masks)
