"""Differences between the clocks of hosts, from operations that all of their ranks completed together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

TOGETHER: Final = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Kinds that complete nowhere before all ranks have issued them. Sizes that differ between ranks may be zero,
so vector forms are not among them."""

Key = tuple[str, int, str, int]
"""Of one operation on all its ranks: group, sequence, kind, bytes."""


@dataclass(frozen=True)
class Clock:
    """The clock of a host: `shift_us` is added to its times; `error_us` is the most that these are then off.

    `error_us` is None where nothing bounds it. `by`: what the shift follows from.
    """

    shift_us: float
    error_us: float | None
    by: str


class ClockDifference(NamedTuple):
    """What is known of one clock less another one: between `least` and `most` µs, `by` what."""

    least: float
    most: float
    by: str


@dataclass(frozen=True)
class Span:
    """An operation on the ranks of one host: the last issue and the first completion, in microseconds."""

    issued: float
    done: float

    def joined(self, other: Span) -> Span:
        """Both together."""
        return Span(max(self.issued, other.issued), min(self.done, other.done))


def spans(operations: Iterable[tuple[Key, Span]]) -> dict[Key, Span]:
    """The operations of one host, those of several ranks joined."""
    found: dict[Key, Span] = {}
    for key, span in operations:
        other = found.get(key)
        found[key] = span if other is None else span.joined(other)
    return found


def align(hosts: Mapping[str, Mapping[Key, Span]], times_of_day: Mapping[str, float]) -> dict[str, Clock]:
    """The clocks of all hosts as seen from the first one.

    No rank completes an operation of `TOGETHER` before all have issued it. So each one gives a lowest and a
    highest difference of two clocks; what is left between all of these is the error. A host without common
    operations is placed by its time of day. Clocks are taken to run at one speed.

    Args:
        hosts: of each host its operations, in microseconds of its clock.
        times_of_day: of each host the time of day, in microseconds, at 0 of its clock.
    """
    placed = place(list(hosts), lambda there, here: _difference(hosts[there], hosts[here]))
    first = next(iter(hosts))
    for host in hosts:
        if host not in placed:
            placed[host] = Clock(times_of_day[host] - times_of_day[first], None, "time of day")
    return placed


def place(hosts: Sequence[str], difference: Callable[[str, str], ClockDifference | None]) -> dict[str, Clock]:
    """The clocks of hosts as seen from the first one, each by way of the one with the least error.

    `difference(there, here)`: what is known of two of them; None for nothing. Hosts that nothing connects
    with the first one are left out.
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
    """By the operations that two hosts have in common; None without any."""
    common = there.keys() & here.keys()
    if not common:
        return None
    least = max(there[key].issued - here[key].done for key in common)
    most = min(there[key].done - here[key].issued for key in common)
    return ClockDifference(least, most, f"{len(common)} operations")


def unplaced(clocks: Mapping[str, Clock]) -> Sequence[str]:
    """The hosts whose clocks nothing bounds."""
    return [host for host, clock in clocks.items() if clock.error_us is None]
