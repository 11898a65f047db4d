"""Assign tensors to buckets; computed from plain numbers, without torch.

    by_size(entries, limit=25 << 20, first_limit=1 << 20)     # as full as the limit allows
    earliest_finish(entries, cost)                            # the partition that completes first

Entries are in the order in which they become ready. The plan depends only on entries, limits and costs: if
these are equal on all ranks, so is the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Cost = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Function from sizes in bytes to expected times of operations, in the unit of `BucketEntry.ready`."""
_SLACK: Final = 2.0  # a bucket is filled further only if it can wait for this multiple of its expected time
_SHORT: Final = 3.0  # a bucket is filled further up to this multiple of the shortest operation's time


@dataclass(frozen=True)
class BucketEntry:
    """Tensor to send. Entries of equal `like` may share a bucket; `ready` is the earliest time to send."""

    id: int
    nbytes: int
    like: Hashable = None
    ready: float = 0.0


@dataclass(frozen=True)
class Bucket:
    """Entries sent as one operation: ids, offsets and total length in bytes."""

    like: Hashable
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int


def by_size(
    entries: Sequence[BucketEntry], *, limit: int, first_limit: int | None = None, alignment: int = 1
) -> list[Bucket]:
    """Fill buckets in the order of the entries, up to `limit` bytes each; return them in fill order.

    The first bucket of each `like` holds at most `first_limit` bytes, so that sending begins early. An entry
    larger than the limit gets a bucket of its own. Every entry begins at a multiple of `alignment` bytes.
    """
    filled: list[tuple[int, list[BucketEntry]]] = []  # index of the last entry, and the entries
    opened: dict[Hashable, list[BucketEntry]] = {}
    ends: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    past_first: set[Hashable] = set()
    for index, entry in enumerate(entries):
        like = entry.like
        most = limit if first_limit is None or like in past_first else min(first_limit, limit)
        offset = aligned(ends.get(like, 0), alignment)
        if like in opened and offset + entry.nbytes > most:
            filled.append((last[like], opened.pop(like)))
            past_first.add(like)
            offset = 0
        opened.setdefault(like, []).append(entry)
        ends[like], last[like] = offset + entry.nbytes, index
    filled += [(last[like], members) for like, members in opened.items()]
    return [packed(members, alignment) for _, members in sorted(filled, key=lambda pair: pair[0])]


def earliest_finish(entries: Sequence[BucketEntry], cost: Cost, *, alignment: int = 1) -> list[Bucket]:
    """Return the partition into consecutive buckets whose last operation completes first, on one channel.

    A bucket may be sent once its last entry is ready and the previous bucket has been sent. Let f(j) be the
    earliest time at which the first j entries are complete. Then

        f(j) = min over i < j of max(f(i), ready of entry j) + cost(bytes of entries i+1 … j),

    is the exact minimum, found in O(n²), because a bucket only delays later buckets. Every operation also
    takes processor time from the computation. So short buckets that can wait are then filled with earlier
    entries, beginning with the last bucket: while a bucket takes at most three times as long as the shortest
    operation, and twice its expected time remains before the next bucket must begin.

    Raises:
        ValueError: the entries differ in `like`, or are not sorted by `ready`.
    """
    if len({entry.like for entry in entries}) > 1:
        raise ValueError("entries: expected equal `like` for all; plan each `like` by itself")
    ready = [entry.ready for entry in entries]
    if ready != sorted(ready):
        raise ValueError("entries: expected in ascending order of `ready`")
    count = len(entries)
    ends = np.concatenate([[0], np.cumsum([aligned(entry.nbytes, alignment) for entry in entries])])
    sizes = np.array([entry.nbytes for entry in entries], np.int64)
    done = np.zeros(count + 1)
    before = [0] * (count + 1)
    for j in range(1, count + 1):
        nbytes = ends[j - 1] - ends[:j] + sizes[j - 1]  # the last entry needs no padding after it
        finish = np.maximum(done[:j], ready[j - 1]) + cost(nbytes)
        before[j] = int(np.argmin(finish))
        done[j] = finish[before[j]]
    plan: list[Bucket] = []
    end, latest = count, done[count]
    short = _SHORT * cost(np.zeros(1, np.int64))[0]
    while end:
        times = cost(ends[end - 1] - ends[:end] + sizes[end - 1])
        waits = (np.maximum(done[:end], ready[end - 1]) + _SLACK * times <= latest) & (times <= short)
        begin = min(int(np.argmax(waits)), before[end]) if waits.any() else before[end]
        plan.append(packed(entries[begin:end], alignment))
        end, latest = begin, latest - times[begin]
    return plan[::-1]


def packed(entries: Sequence[BucketEntry], alignment: int) -> Bucket:
    """Return one bucket of all entries; `entries` must not be empty."""
    offsets, end = [], 0
    for entry in entries:
        offsets.append(aligned(end, alignment))
        end = offsets[-1] + entry.nbytes
    return Bucket(entries[0].like, tuple(entry.id for entry in entries), tuple(offsets), end)


def aligned(nbytes: int, alignment: int) -> int:
    """Return `nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment
