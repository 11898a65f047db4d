"""Which tensors travel together: plans over plain numbers, made without torch.

    by_size(entries, limit=25 << 20, first_limit=1 << 20)     # as full as the limit allows
    earliest_finish(entries, cost)                            # the partition that is done first

Entries are given in the order in which they become ready. All ranks must plan from the same entries, limits
and costs, and then get the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Cost = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Expected time of one operation, for each of several sizes in bytes, in the unit of `Entry.ready`."""


@dataclass(frozen=True)
class Entry:
    """A tensor to send. Only entries of equal `like` may share a bucket; `ready` is when it may be sent."""

    id: int
    nbytes: int
    like: Hashable = None
    ready: float = 0.0


@dataclass(frozen=True)
class Bucket:
    """Entries that travel together: their ids, where each begins (in bytes), and the whole length."""

    like: Hashable
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int


def by_size(
    entries: Sequence[Entry], *, limit: int, first_limit: int | None = None, alignment: int = 1
) -> list[Bucket]:
    """Fill buckets in the order of the entries, up to `limit` bytes each; in the order in which they fill.

    The first bucket of each likeness holds at most `first_limit`, so that sending begins early. An entry that
    is larger than the limit has a bucket to itself. Every entry begins at a multiple of `alignment` bytes.
    """
    filled: list[tuple[int, list[Entry]]] = []  # and the place of the last entry
    opened: dict[Hashable, list[Entry]] = {}
    ends: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    begun: set[Hashable] = set()
    for place, entry in enumerate(entries):
        like = entry.like
        most = limit if first_limit is None or like in begun else min(first_limit, limit)
        offset = aligned(ends.get(like, 0), alignment)
        if like in opened and offset + entry.nbytes > most:
            filled.append((last[like], opened.pop(like)))
            begun.add(like)
            offset = 0
        opened.setdefault(like, []).append(entry)
        ends[like], last[like] = offset + entry.nbytes, place
    filled += [(last[like], own) for like, own in opened.items()]
    return [packed(own, alignment) for _, own in sorted(filled, key=lambda each: each[0])]


def earliest_finish(entries: Sequence[Entry], cost: Cost, *, alignment: int = 1) -> list[Bucket]:
    """The partition into consecutive buckets whose last operation is done first, on one channel.

    A bucket may be sent once its last entry is ready and the one before it has been sent. With f(j) the least
    time at which the first j entries are done,

        f(j) = min over i < j of max(f(i), ready of entry j) + cost(bytes of entries i+1 … j),

    which is the exact minimum in O(n²), because a bucket only delays those behind it. Of equal ones the plan
    with the larger last bucket is taken. `entries` are alike, and their `ready` never falls; ValueError
    otherwise.
    """
    if len({entry.like for entry in entries}) > 1:
        raise ValueError("entries: expected all of one likeness; plan each by itself")
    ready = [entry.ready for entry in entries]
    if ready != sorted(ready):
        raise ValueError("entries: expected in the order in which they are ready")
    count = len(entries)
    ends = np.concatenate([[0], np.cumsum([aligned(entry.nbytes, alignment) for entry in entries])])
    sizes = np.array([entry.nbytes for entry in entries], np.int64)
    done = np.zeros(count + 1)
    before = [0] * (count + 1)
    for j in range(1, count + 1):
        nbytes = ends[j - 1] - ends[:j] + sizes[j - 1]  # the last entry needs no padding behind it
        finish = np.maximum(done[:j], ready[j - 1]) + cost(nbytes)
        before[j] = int(np.argmin(finish))
        done[j] = finish[before[j]]
    plan: list[Bucket] = []
    end = count
    while end:
        plan.append(packed(entries[before[end] : end], alignment))
        end = before[end]
    return plan[::-1]


def packed(entries: Sequence[Entry], alignment: int) -> Bucket:
    """One bucket of all entries, at least one."""
    offsets, end = [], 0
    for entry in entries:
        offsets.append(aligned(end, alignment))
        end = offsets[-1] + entry.nbytes
    return Bucket(entries[0].like, tuple(entry.id for entry in entries), tuple(offsets), end)


def aligned(nbytes: int, alignment: int) -> int:
    """The next multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment
