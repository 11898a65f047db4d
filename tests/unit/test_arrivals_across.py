"""Late ranks of groups across hosts: clocks that differ are compared, by heartbeats and by operations.

Jobs are simulated with known delays and known differences of clocks; their boards share a store.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from mcr_plus.board.base import Failure
from mcr_plus.board.operation_notes import KEPT, PART, NotedParts, packed, unpacked
from mcr_plus.board.store import StoreBoard
from mcr_plus.core.c10d import HashStore
from mcr_plus.core.group import Group
from mcr_plus.core.job_store import JobStore
from mcr_plus.observe import cross_host_stragglers
from mcr_plus.observe.cross_host_stragglers import AcrossHosts, Compared
from mcr_plus.observe.stragglers import ArrivalCollector, Stragglers

TRANSIT: Final = 200e-6
"""The most that a message takes, in seconds; the least is half of that."""


class Job:
    """Ranks of one group. `places`: their hosts. `others`: how many ranks of the job are not in the group."""

    def __init__(self, places: str, seed: int, *, beats: bool = True, others: int = 0) -> None:
        self.chance = random.Random(seed)
        self.places = places
        self.offsets = {host: self.chance.uniform(-1e4, 1e4) for host in places}
        self.ranks = tuple(range(others, others + len(places)))
        self.away: set[int] = set()  # whose processes do not answer
        store = HashStore()
        processes = [SimpleNamespace(place="elsewhere")] * others
        processes += [SimpleNamespace(place=host) for host in places]
        lowest = {host: others + places.index(host) for host in places}
        self.logs: list[tuple[AcrossHosts, Any]] = []
        self.arrivals: list[ArrivalCollector] = []
        for at, host in enumerate(places):
            group = Group("g", self.ranks, at)
            board = StoreBoard(store, group)
            state: Any = SimpleNamespace(group=group, board=board, closed=False, failure=None, revoked="")
            clocks = {
                lowest[other]: self.offsets[host] - self.offsets[other] + self._transit()
                for other in self.offsets
                if other != host and beats
            }
            peers = SimpleNamespace(
                processes=processes,
                clocks=lambda clocks=clocks: clocks,
                is_away=lambda rank: rank in self.away,
                store_is_lost=lambda: False,
            )
            engine: Any = SimpleNamespace(peers=peers, progress_once=lambda: False)
            across = AcrossHosts(engine)
            self.logs.append((across, state))
            self.arrivals.append(ArrivalCollector(across))

    def _transit(self) -> float:
        return self.chance.uniform(TRANSIT / 2, TRANSIT)

    def run(self, steps: int, late: dict[int, float], first: int = 1) -> float:
        """Steps that end with an operation in which all wait for the last; returns how long it took."""
        size = len(self.places)
        now, waited = [100.0] * size, [0.0] * size
        for number in range(first, first + steps):
            issued = [
                each + 0.05 + late.get(at, 0.0) + abs(self.chance.gauss(0, 0.001))
                for at, each in enumerate(now)
            ]
            for at, (across, state) in enumerate(self.logs):
                done = max(issued) + self._transit()
                offset = self.offsets[self.places[at]]
                times = issued[at] + offset, waited[at], done + offset
                across.note(state, number, times)
                signature: Any = SimpleNamespace(kind="all_reduce", tag="gradients")
                key = self.arrivals[at].key(signature, ("train.py", 7, "step"))
                across.add(state, number, key, True, times)
                state.board.counter[0] = number
                waited[at] += done - issued[at]
                now[at] = done
        return max(now) - 100.0

    def publish(self, *, but: tuple[int, ...] = ()) -> None:
        for at, (across, _) in enumerate(self.logs):
            if at not in but:
                across.publish()

    def found(self, at: int, seconds: float) -> Stragglers:
        """What a rank finds."""
        return self.arrivals[at].stragglers(100.0 + self.offsets[self.places[at]], seconds)

    def compared(self, at: int) -> list[Compared]:
        return [each for _, each in self.logs[at][0].compared()]


@pytest.mark.parametrize("places", ["ab", "aabb", "abab", "abcd", "aab"])
@pytest.mark.parametrize("seed", range(3))
def test_the_late_rank_is_named_by_every_rank(places: str, seed: int) -> None:
    for late in range(len(places)):
        job = Job(places, seed, others=seed)
        seconds = job.run(20, {late: 0.2})
        job.publish()
        for at in range(len(places)):
            found = job.found(at, seconds)
            assert [each.rank for each in found] == [seed + late]
            assert found[0].events >= 18
            assert found[0].sites[0].mean == pytest.approx(0.2, rel=0.1)
            assert (found[0].sites[0].tag, found[0].sites[0].site) == ("gradients", "train.py:7, in step")
            assert (found.compared, found.left_out, found.missing) == (20, 0, ())
            assert 0 < found.error <= 2 * TRANSIT
            assert "clocks of hosts compared to 0." in str(found)


@pytest.mark.parametrize("beats", [True, False])
@pytest.mark.parametrize("places", ["ab", "aabb", "abc"])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_named_where_nobody_is_late(places: str, seed: int, beats: bool) -> None:
    job = Job(places, seed, beats=beats)
    seconds = job.run(1100, {})
    job.publish()
    for at in range(len(places)):
        found = job.found(at, seconds)
        assert (list(found), found.compared, found.left_out) == ([], 1100, 0)
        assert 0 < found.error < 0.01


@pytest.mark.parametrize("beats", [True, False])
@pytest.mark.parametrize("late", [{}, {0: 0.05}, {2: 0.3}])
@pytest.mark.parametrize("seed", range(4))
def test_the_true_difference_of_clocks_is_within_the_error(
    beats: bool, late: dict[int, float], seed: int
) -> None:
    job = Job("abcb", seed, beats=beats)
    job.run(1100, late)
    job.publish()
    own = job.offsets["b"]
    truth = np.array([own - job.offsets[host] for host in job.places])
    found = job.compared(1)
    assert [len(each.numbers) for each in found] == [512, 512, 76]
    for each in found:
        assert np.ptp(each.shifts - truth) <= each.error + 1e-5
        assert each.shifts[1] == each.shifts[3] == 0
        if beats:
            assert each.error <= 2 * TRANSIT


def test_a_persistent_straggler_is_within_the_error_without_heartbeats() -> None:
    """The others wait at every operation, so nothing says how much of that is the difference of clocks."""
    job = Job("ab", 3, beats=False)
    seconds = job.run(40, {1: 0.2})
    job.publish()
    for at in range(2):
        found = job.found(at, seconds)
        assert not [each for each in found if each.rank != 1]
        assert found.error == pytest.approx(0.1, rel=0.1)


def test_clocks_of_unlike_speed_show_in_the_error() -> None:
    job = Job("ab", 5)
    job.run(400, {})
    job.offsets["b"] += 0.04
    job.run(100, {}, first=401)
    job.publish()
    (found,) = job.compared(0)
    assert found.error >= 0.02 - TRANSIT


def test_ranks_that_have_not_published_are_named_and_compared_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cross_host_stragglers, "PATIENCE", 0.05)
    job = Job("aab", 1, others=4)
    seconds = job.run(20, {2: 0.2})
    job.publish(but=(2,))
    found = job.found(0, seconds)
    assert (list(found), found.compared, found.left_out, found.missing) == ([], 0, 20, (6,))
    assert "without 20 of which not all are known (not published by rank 6)" in str(found)
    job.publish()
    found = job.found(0, seconds)
    assert ([each.rank for each in found], found.left_out, found.missing) == ([6], 0, ())
    again = job.found(0, seconds)
    assert ([each.seconds for each in again], again.compared) == ([each.seconds for each in found], 20)


def test_operations_that_another_rank_has_not_recorded_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cross_host_stragglers, "PATIENCE", 0.05)
    job = Job("ab", 1)
    seconds = job.run(20, {1: 0.2})
    job.publish()
    across, state = job.logs[0]
    for number in range(21, 26):  # which rank 1 has issued without a recording
        times = 200.0 + number, 0.0, 200.1 + number
        across.note(state, number, times)
        across.add(state, number, 0, True, times)
    job.logs[1][1].board.counter[0] = 25
    job.publish()
    found = job.found(0, seconds)
    assert (found.compared, found.left_out, found.missing) == (20, 5, (1,))


@pytest.mark.parametrize("ended", [{"closed": True}, {"revoked": "lost"}, {"failure": ValueError()}])
def test_groups_that_have_ended_are_left_out(ended: dict[str, Any]) -> None:
    job = Job("ab", 1)
    seconds = job.run(20, {1: 0.2})
    job.publish()
    vars(job.logs[0][1]).update(ended)
    found = job.found(0, seconds)
    assert (list(found), found.left_out) == ([], 20)
    assert [each.rank for each in job.found(1, seconds)] == [1]


@pytest.mark.parametrize("how", ["has left", "has failed", "is away"])
def test_a_rank_that_publishes_nothing_more_is_not_waited_for(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_host_stragglers, "PATIENCE", 1e9)
    job = Job("aab", 1, others=4)
    job.run(10, {2: 0.2})
    job.publish()  # what rank 6 has published last
    seconds = job.run(10, {2: 0.2}, first=11)
    job.publish(but=(2,))
    board = job.logs[2][1].board
    if how == "has left":
        board.mark_closed()
    elif how == "has failed":
        board.mark_failed(Failure(0, "it left the job"))
    else:
        job.away.add(6)
    found = job.found(0, seconds)
    assert (found.compared, found.left_out, found.missing) == (10, 10, (6,))


def test_reading_ends_with_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_host_stragglers, "PATIENCE", 1e9)
    job = Job("ab", 1)
    seconds = job.run(20, {1: 0.2})
    job.publish(but=(1,))
    across, state = job.logs[0]

    def progress_once() -> bool:  # while rank 1 is waited for, another thread ends the world
        state.revoked = "epoch 1 has begun"
        return False

    across._engine.progress_once = progress_once  # type: ignore[method-assign]
    found = job.found(0, seconds)
    assert (list(found), found.compared, found.left_out) == ([], 0, 20)


def test_memory_that_is_closed_meanwhile_ends_reading() -> None:
    job = Job("ab", 1)
    seconds = job.run(20, {1: 0.2})
    job.publish()
    across, state = job.logs[0]

    def clocks() -> dict[int, float]:
        memory = memoryview(bytearray(8))
        memory.release()
        return {0: float(memory[0])}

    peers: Any = across._engine.peers
    peers.clocks = clocks
    with pytest.raises(ValueError, match="released"):  # in a group that is open, an error
        job.found(0, seconds)
    peers.clocks = lambda: vars(state).update(closed=True) or clocks()
    assert (list(job.found(0, seconds)), job.logs[0][0].left) == ([], 20)


def test_parts_hold_what_was_noted_to_the_microsecond() -> None:
    chance = random.Random(0)
    noted = {
        number: (chance.uniform(0, 1e7), chance.uniform(0, 1e5), chance.uniform(0, 1e7))
        for number in chance.sample(range(1 << 40), PART)
    }
    value = packed(noted)
    found = unpacked(value)
    assert found.keys() == noted.keys()
    for number, times in noted.items():
        assert found[number] == pytest.approx(times, abs=1e-6)
    for wrong in (b"", b"x", value[:-20], packed(noted)[1:]):
        assert unpacked(wrong) == {}


def test_a_rank_publishes_what_has_changed_and_keeps_the_latest_parts() -> None:
    parts = NotedParts()
    for number in (1, 5, PART, 3 * PART + 7):
        parts.add(number, (1.0, 2.0, 3.0))
    assert [(part, sorted(unpacked(value))) for part, value in parts.changed()] == [
        (0, [1, 5]), (1, [PART]), (3, [3 * PART + 7]),
    ]  # fmt: skip
    assert list(parts.changed()) == []
    parts.add(2, (4.0, 5.0, 6.0))
    assert [(part, unpacked(value)) for part, value in parts.changed()] == [
        (0, {1: (1.0, 2.0, 3.0), 5: (1.0, 2.0, 3.0), 2: (4.0, 5.0, 6.0)})
    ]
    for part in range(4, 1 + KEPT):
        parts.add(part * PART, (0.0, 0.0, 0.0))
    assert len(list(parts.changed())) == KEPT - 3
    for part in (1 + KEPT, 2 + KEPT):
        parts.add(part * PART, (0.0, 0.0, 0.0))
    for part in (1, 3):  # 0 and 1 are old by now
        parts.add(part * PART + 8, (1.0, 2.0, 3.0))
    assert [(part, list(unpacked(value))) for part, value in parts.changed()] == [
        (3, [3 * PART + 7, 3 * PART + 8]), (1 + KEPT, [(1 + KEPT) * PART]), (2 + KEPT, [(2 + KEPT) * PART]),
    ]  # fmt: skip


def test_boards_across_hosts_give_back_what_ranks_have_published() -> None:
    store = HashStore()
    boards = [StoreBoard(store, Group("g", (3, 7), rank)) for rank in range(2)]
    assert boards[1].published(0) is None
    assert boards[1].noted(0, [1]) == {}
    for number in range(1, KEPT * PART + PART, PART):
        boards[0].note(number, float(number), 0.5, number + 0.25)
    boards[0].counter[0] = 99
    boards[0].publish_noted({7: -3.5})
    assert boards[1].published(0) == (99, {7: -3.5})
    assert boards[1].noted(0, [1, PART + 1, PART + 2]) == {PART + 1: (PART + 1.0, 0.5, PART + 1.25)}
    store.set("board/g/0/noted", "nonsense")
    assert boards[1].published(0) is None


class Vanishing(JobStore):
    """A store in which values are removed by another rank once this one has seen that they are there.

    A request that would wait for a value that is gone fails.
    """

    def check(self, keys: list[str]) -> bool:
        found = super().check(keys)
        for key in keys:
            self.delete_key(key)
        return found

    def get(self, key: str) -> bytes:
        assert super().check([key]), f"waits for {key}"
        return super().get(key)


def test_keys_removed_by_another_rank_are_not_waited_for() -> None:
    store = HashStore()
    writer = StoreBoard(store, Group("g", (3, 7), 0))
    writer.note(5, 1.0, 0.5, 1.25)
    writer.counter[0] = 5
    writer.publish_noted({})
    reader = StoreBoard(Vanishing(store), Group("g", (3, 7), 1))
    assert reader.published(0) == (5, {})
    assert reader.noted(0, [5]) == {5: (1.0, 0.5, 1.25)}
    writer.remove_noted()
    assert (reader.published(0), reader.noted(0, [5])) == (None, {})


def test_keys_of_a_lost_rank_are_removed_by_a_rank_without_keys() -> None:
    store = HashStore()
    boards = [StoreBoard(store, Group("g", (3, 7), rank)) for rank in range(2)]
    before = store.num_keys()
    boards[1].note(5, 1.0, 0.5, 1.25)
    boards[1].counter[0] = 5
    boards[1].publish_noted({})
    assert store.num_keys() == before + 2
    boards[0].remove_noted([1])
    assert store.num_keys() == before


def test_published_values_are_removed_with_their_group() -> None:
    store = HashStore()
    boards = [StoreBoard(store, Group("g", (3, 7, 9), rank)) for rank in range(3)]
    before = store.num_keys()
    for board, count in zip(boards, (5, 3 * PART, (KEPT + 2) * PART), strict=True):
        for number in range(1, count, 100):
            board.note(number, 1.0, 0.5, 1.25)
        board.counter[0] = count
        board.publish_noted({})
    assert store.num_keys() == before + 3 + 1 + 3 + KEPT
    boards[1].remove_noted()
    assert store.num_keys() == before + 2 + 1 + KEPT
    assert boards[0].published(1) is None
    assert boards[0].noted(1, [1]) == {}
    boards[0].remove_noted([2])
    assert store.num_keys() == before
    boards[2].remove_noted([0, 1])  # nothing is left of them
    assert store.num_keys() == before
