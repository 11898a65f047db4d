"""Clock differences between hosts, computed from operations that all of their ranks completed together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

TOGETHER: Final = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Kinds that complete on no rank before all ranks have issued them. Vector forms are excluded: their sizes
may be zero on some ranks.
"""

Key = tuple[str, int, str, int]
"""Key of one operation on all its ranks: group, sequence, kind, bytes."""


@dataclass(frozen=True)
class Clock:
    """The clock of a host: add `shift_us` to its times; the sum is off by at most `error_us`.

    `error_us` is None if the error has no bound. `by` names the evidence for the shift.
    """

    shift_us: float
    error_us: float | None
    by: str


class ClockDifference(NamedTuple):
    """Bounds of the difference between two clocks, `least` and `most`, in µs; `by` names the evidence."""

    least: float
    most: float
    by: str


@dataclass(frozen=True)
class Span:
    """An operation on the ranks of one host: the last issue and the first completion, in microseconds."""

    issued: float
    done: float

    def joined(self, other: Span) -> Span:
        """Return the span of both operations together."""
        return Span(max(self.issued, other.issued), min(self.done, other.done))


def spans(operations: Iterable[tuple[Key, Span]]) -> dict[Key, Span]:
    """Return the operations of one host; the spans of one operation on several ranks are joined."""
    found: dict[Key, Span] = {}
    for key, span in operations:
        other = found.get(key)
        found[key] = span if other is None else span.joined(other)
    return found


def align(hosts: Mapping[str, Mapping[Key, Span]], times_of_day: Mapping[str, float]) -> dict[str, Clock]:
    """Return the clocks of all hosts relative to the first host.

    No rank completes an operation of `TOGETHER` before all ranks have issued it. So each operation bounds the
    difference of two clocks from below and from above; the gap that remains between the bounds is the error.
    A host without common operations is placed by its time of day. All clocks are assumed to run at the same
    rate.

    Args:
        hosts: the operations of each host, in microseconds of its clock.
        times_of_day: the time of day of each host, in microseconds, at 0 of its clock.
    """
    placed = place(list(hosts), lambda there, here: _difference(hosts[there], hosts[here]))
    first = next(iter(hosts))
    for host in hosts:
        if host not in placed:
            placed[host] = Clock(times_of_day[host] - times_of_day[first], None, "time of day")
    return placed


def place(hosts: Sequence[str], difference: Callable[[str, str], ClockDifference | None]) -> dict[str, Clock]:
    """Return the clocks of hosts relative to the first host, each along the path with the least error.

    `difference(there, here)` returns the bounds for two hosts, or None if nothing relates them. Hosts without
    a path to the first host are left out.
    """
    first, *others = hosts
    placed = {first: Clock(0.0, 0.0, "the clock of the first host")}
    while others:
        found = [
            (_through(placed[via], known), host)
            for host in others
            for via in placed
            if (known := difference(via, host)) is not None
        ]
        if not found:
            break
        clock, host = min(found, key=lambda each: each[0].error_us or 0.0)
        placed[host] = clock
        others.remove(host)
    return placed


def _through(known: Clock, difference: ClockDifference) -> Clock:
    least, most, by = difference
    if least > most:
        by += ", which contradict each other: clocks of unlike speed"
    return Clock(known.shift_us + (least + most) / 2, (known.error_us or 0.0) + abs(most - least) / 2, by)


def _difference(there: Mapping[Key, Span], here: Mapping[Key, Span]) -> ClockDifference | None:
    """Return the bounds given by the operations that two hosts have in common; None without any."""
    common = there.keys() & here.keys()
    if not common:
        return None
    least = max(there[key].issued - here[key].done for key in common)
    most = min(there[key].done - here[key].issued for key in common)
    return ClockDifference(least, most, f"{len(common)} operations")
