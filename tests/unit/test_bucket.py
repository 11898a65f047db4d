"""Plans of buckets: their properties, and the least finish time compared with all partitions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiers import examples

from mcr_plus.fusion.bucket import Bucket, BucketEntry, Cost, by_size, earliest_finish
from mcr_plus.training.bucket_plan import default_limits

K = 1024

sizes = st.integers(0, 100)
lists = st.lists(st.tuples(sizes, st.sampled_from(["a", "b"])), max_size=30)


def entries_of(spec: Sequence[tuple[int, str]]) -> list[BucketEntry]:
    return [BucketEntry(100 + index, nbytes, like) for index, (nbytes, like) in enumerate(spec)]


def check_layout(plan: Sequence[Bucket], entries: Sequence[BucketEntry], alignment: int) -> None:
    """Every entry is in one bucket of its `like`, in order, at an aligned place, and overlaps nothing."""
    by_id = {entry.id: entry for entry in entries}
    assert sorted(member for bucket in plan for member in bucket.members) == sorted(by_id)
    for like in {entry.like for entry in entries}:
        order = [member for bucket in plan if bucket.like == like for member in bucket.members]
        assert order == [entry.id for entry in entries if entry.like == like]
    for bucket in plan:
        own = [by_id[member] for member in bucket.members]
        assert own
        assert {entry.like for entry in own} == {bucket.like}
        assert bucket.offsets[0] == 0
        ends = [offset + entry.nbytes for offset, entry in zip(bucket.offsets, own, strict=True)]
        assert bucket.nbytes == ends[-1]
        for end, offset in zip(ends, bucket.offsets[1:], strict=False):
            assert offset % alignment == 0
            assert 0 <= offset - end < alignment


@given(lists, st.integers(1, 200), st.integers(1, 200) | st.none(), st.sampled_from([1, 8, 64]))
def test_buckets_by_size(
    spec: list[tuple[int, str]], limit: int, first_limit: int | None, alignment: int
) -> None:
    entries = entries_of(spec)
    plan = by_size(entries, limit=limit, first_limit=first_limit, alignment=alignment)
    check_layout(plan, entries, alignment)
    place = {entry.id: index for index, entry in enumerate(entries)}
    lasts = [place[bucket.members[-1]] for bucket in plan]
    assert lasts == sorted(lasts)
    by_id = {entry.id: entry for entry in entries}
    for like in ("a", "b"):
        own = [bucket for bucket in plan if bucket.like == like]
        for index, bucket in enumerate(own):
            most = limit if index or first_limit is None else min(limit, first_limit)
            assert bucket.nbytes <= most or len(bucket.members) == 1
            if index + 1 < len(own):  # it was full: the next entry would not have fitted
                following = by_id[own[index + 1].members[0]].nbytes
                start = -(-bucket.nbytes // alignment) * alignment
                assert start + following > most


def test_by_hand() -> None:
    entries = [
        BucketEntry(1, 40, "a"),
        BucketEntry(2, 10, "b"),
        BucketEntry(3, 30, "a"),
        BucketEntry(4, 90, "a"),
        BucketEntry(5, 8, "a"),
    ]
    assert by_size(entries, limit=64, first_limit=40, alignment=8) == [
        Bucket("a", (1,), (0,), 40),
        Bucket("b", (2,), (0,), 10),
        Bucket("a", (3,), (0,), 30),
        Bucket("a", (4,), (0,), 90),
        Bucket("a", (5,), (0,), 8),
    ]
    assert by_size(entries, limit=K, alignment=16) == [
        Bucket("b", (2,), (0,), 10),
        Bucket("a", (1, 3, 4, 5), (0, 48, 80, 176), 184),
    ]
    assert by_size([], limit=1) == []


# -- the least finish time ------------------------------------------------------------------------


def partitions(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every way of cutting `count` entries into consecutive buckets."""
    for cuts in range(count):
        for inner in combinations(range(1, count), cuts):
            yield list(pairwise((0, *inner, count)))


def finish_time(
    entries: Sequence[BucketEntry], parts: Sequence[tuple[int, int]], cost: Sequence[float]
) -> float:
    """Return the time when the last operation of a partition is done, by definition."""
    clock = 0.0
    for begin, end in parts:
        clock = max(clock, max(entry.ready for entry in entries[begin:end]))
        clock += cost[sum(entry.nbytes for entry in entries[begin:end])]
    return clock


def parts_of(plan: Sequence[Bucket]) -> list[tuple[int, int]]:
    ends = np.cumsum([0, *(len(bucket.members) for bucket in plan)]).tolist()
    return list(pairwise(ends))


timed = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=12)


@given(timed, st.data())
@settings(max_examples=examples(150))
def test_no_partition_is_done_earlier(spec: list[tuple[int, int]], data: st.DataObject) -> None:
    """Plans equal brute force's for any cost, monotone or not."""
    ready = sorted(at for _, at in spec)
    entries = [
        BucketEntry(i, nbytes, None, at) for i, ((nbytes, _), at) in enumerate(zip(spec, ready, strict=True))
    ]
    most = sum(entry.nbytes for entry in entries) + 1
    cost = data.draw(st.lists(st.integers(0, 20), min_size=most, max_size=most))
    table = np.array(cost, np.float64)
    plan = earliest_finish(entries, lambda nbytes: table[nbytes])
    check_layout(plan, entries, 1)
    best = min(finish_time(entries, parts, cost) for parts in partitions(len(entries)))
    assert finish_time(entries, parts_of(plan), cost) == best


def hockney(latency: float, per_byte: float) -> Cost:
    def cost(nbytes: NDArray[np.int64]) -> NDArray[np.float64]:
        return latency + per_byte * nbytes.astype(np.float64)

    return cost


def test_gradients_ready_together_share_a_bucket_and_the_last_ones_do_not() -> None:
    together = [BucketEntry(i, 100) for i in range(5)]
    assert len(earliest_finish(together, hockney(10.0, 0.01))) == 1
    apart = [BucketEntry(i, 100, None, 1000.0 * i) for i in range(5)]
    plan = earliest_finish(apart, hockney(10.0, 0.01))
    assert [bucket.members for bucket in plan] == [(0, 1, 2, 3), (4,)]  # the first four can wait


def test_a_bucket_is_filled_while_twice_its_time_passes_before_the_next_one() -> None:
    """An operation takes about 10 units; 19 or 21 pass between the last two entries."""
    for wait, parts in ((19.0, [(0,), (1,), (2,)]), (21.0, [(0, 1), (2,)])):
        entries = [BucketEntry(i, 1, None, at) for i, at in enumerate((0.0, 12.0, 12.0 + wait))]
        plan = earliest_finish(entries, hockney(10.0, 1e-3))
        assert [bucket.members for bucket in plan] == parts


@given(timed, st.sampled_from([1, 4, 64]))
def test_alignment_of_the_earliest_finish(spec: list[tuple[int, int]], alignment: int) -> None:
    entries = [BucketEntry(i, nbytes, "x", 0.0) for i, (nbytes, _) in enumerate(spec)]
    seen: set[int] = set()

    def cost(nbytes: NDArray[np.int64]) -> NDArray[np.float64]:
        seen.update(nbytes.tolist())
        return 1.0 + nbytes.astype(np.float64)

    plan = earliest_finish(entries, cost, alignment=alignment)
    check_layout(plan, entries, alignment)
    assert all(bucket.nbytes in seen for bucket in plan)  # the priced sizes are sent


def test_500_tensors_do_not_take_minutes() -> None:
    """A search that is cubic in the tensors would take minutes."""
    random = np.random.default_rng(0)
    ready = np.sort(random.uniform(0, 1e4, 500))
    entries = [BucketEntry(i, int(random.integers(1, 1 << 22)), None, float(ready[i])) for i in range(500)]
    began = time.perf_counter()
    earliest_finish(entries, hockney(20.0, 1e-4))
    assert time.perf_counter() - began < 20


def test_invalid_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="equal `like`"):
        earliest_finish([BucketEntry(0, 1, "a"), BucketEntry(1, 1, "b")], hockney(1.0, 1.0))
    with pytest.raises(ValueError, match="order"):
        earliest_finish([BucketEntry(0, 1, None, 2.0), BucketEntry(1, 1, None, 1.0)], hockney(1.0, 1.0))
    assert earliest_finish([], hockney(1.0, 1.0)) == []


@pytest.mark.parametrize(
    ("ranks", "mib", "limit"),
    [((0, 1), 12, 25), ((0, 2), 12, 3), ((0, 1, 2, 3), 12, 3), ((0, 2), 2, 1), ((0, 2), 400, 25)],
)
def test_gradients_between_hosts_have_several_buckets(ranks: tuple[int, ...], mib: int, limit: int) -> None:
    comm: Any = SimpleNamespace(hosts=("a", "a", "b", "b"), ranks=ranks)
    params = [torch.empty(1 << 17, device="meta")] * (2 * mib)
    assert default_limits(comm, params).bucket == limit << 20
