"""Late ranks of a group, from the times at which ranks arrive at operations.

The delay of the last rank is the time from the median arrival of the others to its arrival. Only ranks of one
host are compared: they share a clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from mcr_plus.observe.dumps import Dump, DumpedOperation

_LATE: Final = 1.0  # seconds; one delay this long makes a rank late
_SLOW: Final = 0.01  # seconds; shorter delays do not count
_OFTEN: Final = 0.6  # share of operations in which a slow rank is the last
_ENOUGH: Final = 8  # operations; fewer show no pattern


@dataclass
class LateRank:
    """A rank that was late.

    Attributes:
        operation: the operation with its longest delay. others: the same operation on the other ranks.
        delays: seconds of each delay. of: the number of operations compared.
        is_slow: the rank was late repeatedly, not once.
    """

    rank: int
    group: str
    operation: DumpedOperation
    others: dict[int, DumpedOperation]
    delays: list[float]
    of: int
    is_slow: bool


def late_ranks(dumps: Mapping[int, Dump], name: str, away: Collection[int]) -> list[LateRank]:
    """Return the late ranks of group `name`, without the ranks in `away`."""
    there = {
        rank: dump
        for rank, dump in dumps.items()
        if name in dump.groups and dump.written_by == rank and rank not in away
    }
    if len(there) < 2 or len({dump.host for dump in there.values()}) > 1:
        return []
    operations = {rank: dump.groups[name].operations for rank, dump in there.items()}
    numbers = sorted(set.intersection(*(set(each) for each in operations.values())))
    delays: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for number in numbers:
        arrivals: dict[int, int] = {rank: each[number].issued for rank, each in operations.items()}
        last = max(arrivals, key=arrivals.__getitem__)
        others = median(arrival for rank, arrival in arrivals.items() if rank != last)
        if (delay := (arrivals[last] - others) * 1e-9) >= _SLOW:
            delays[last].append((delay, number))
    found = []
    for rank, times in delays.items():
        is_slow = len(numbers) >= _ENOUGH and len(times) >= _OFTEN * len(numbers)
        longest, number = max(times)
        if is_slow or longest >= _LATE:
            then = {other: each[number] for other, each in operations.items() if other != rank}
            seconds = [delay for delay, _ in times]
            found.append(LateRank(rank, name, operations[rank][number], then, seconds, len(numbers), is_slow))
    return found
