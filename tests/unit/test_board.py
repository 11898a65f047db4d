"""The board: one rank posts, the others see the post."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcr_plus.board.base import RING, Failure, GroupBoard, pad
from mcr_plus.board.shared import SharedBoard
from mcr_plus.board.store import _FEW, _STORED, StoreBoard
from mcr_plus.core.c10d import HashStore, Store
from mcr_plus.core.group import Group

Boards = list[GroupBoard]


def shared(size: int) -> Boards:
    memory = mmap.mmap(-1, 1 << 22)
    return [SharedBoard(memory, Group("g", tuple(range(size)), rank)) for rank in range(size)]


def stored(size: int) -> Boards:
    store = HashStore()
    return [StoreBoard(store, Group("g", tuple(range(size)), rank)) for rank in range(size)]


KINDS = pytest.mark.parametrize("make", [shared, stored])


def issue(board: GroupBoard, sequence: int, digest: int, text: str = "op") -> None:
    board.counter[0] = sequence
    board.post(sequence, digest, pad(text))


def all_match(board: Any, sequence: int, digest: int) -> bool:
    board._next_question = 0.0  # ask at once
    return bool(board.all_match(sequence, digest))


@KINDS
def test_posted_signatures_are_visible_to_peers(make: Callable[[int], Boards]) -> None:
    first, second, third = make(3)
    assert first.read(1, 1).issued == 0
    issue(second, 7, 0xABCDEF, "all_reduce SUM float32[4]")
    for board in (first, third):
        status = board.read(1, 7)
        assert (status.issued, status.digest) == (7, 0xABCDEF)
        assert board.text(1, 7, 0xABCDEF) == "all_reduce SUM float32[4]"
        assert board.read(1, 6).digest is None
        assert board.read(0, 7).digest is None


@KINDS
def test_agreement_needs_all_ranks_and_one_digest(make: Callable[[int], Boards]) -> None:
    boards = make(3)
    for board in boards[:2]:
        issue(board, 1, 5)
    assert not all_match(boards[0], 1, 5)
    issue(boards[2], 1, 6)
    assert not all_match(boards[0], 1, 5)
    for board in boards:
        issue(board, 2, 9)
    assert all(all_match(board, 2, 9) for board in boards)
    assert not all_match(boards[1], 2, 8)


def test_one_request_answers_for_all_operations_that_a_peer_has_posted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = stored(2)
    row_of = Mock(side_effect=cast("StoreBoard", first)._row_of)
    monkeypatch.setattr(first, "_row_of", row_of)
    for sequence in range(1, 6):
        for board in (first, second):
            issue(board, sequence, 10 + sequence)
    issue(first, 6, 16)
    assert all(all_match(first, sequence, 10 + sequence) for sequence in range(1, 6))
    assert row_of.call_count == 1
    assert not all_match(first, 6, 16)
    issue(second, 6, 17)  # another operation
    assert not all_match(first, 6, 16)
    assert not all_match(first, 5, 16)
    assert row_of.call_count == 4
    lap = 5 + _STORED  # the same place in the row
    issue(first, lap, 15)
    assert not all_match(first, lap, 15)
    issue(second, lap, 15)
    assert all_match(first, lap, 15)


def test_a_row_missing_from_the_store_is_not_waited_for() -> None:
    first, second = stored(2)
    issue(second, 7, 5)
    store = cast("StoreBoard", second)._store
    assert store is not None
    store.set_timeout(timedelta(seconds=5))  # of `get`, which would wait, and raise an error then
    store.delete_key(cast("StoreBoard", second)._key(1, "row"))
    assert first.read(1, 7).issued == 0
    assert not all_match(first, 7, 5)
    assert first.problem is None
    issue(second, 8, 6)
    assert first.read(1, 8).digest == 6


@KINDS
def test_late_post_does_not_overwrite_the_slot_of_a_newer_operation(
    make: Callable[[int], Boards],
) -> None:
    first, second = make(2)
    ring = RING if isinstance(second, SharedBoard) else _STORED
    second.counter[0] = 3 + ring
    second.post_counts(3 + ring, (5, 6), (7, 8))
    second.post(3 + ring, 5, pad("later"))
    second.post_counts(3, (1, 2), (3, 4))
    second.post(3, 9, pad("earlier"))
    assert first.read(1, 3 + ring).digest == 5
    assert first.text(1, 3 + ring, 5) == "later"
    assert first.counts(1, 3 + ring) == (5, 7)
    assert first.read(1, 3).overwritten


@given(earlier=st.integers(1, 10_000), laps=st.integers(1, 1000))
def test_old_posts_are_not_taken_for_new_ones(earlier: int, laps: int) -> None:
    first, second = shared(2)
    issue(second, earlier, 1, "old")
    second.counter[0] = later = earlier + laps * RING  # the same slot; numbers between were not posted
    assert first.read(1, later).digest is None
    assert not all_match(first, later, 1)
    assert first.read(1, earlier).digest == 1


@KINDS
def test_counts_are_visible_to_their_peers(make: Callable[[int], Boards]) -> None:
    first, second, third = make(3)
    for sequence in (1, 2, RING + 1):
        second.post_counts(sequence, [10 + sequence, 11, 12], [20, 21, 22 + sequence])
        issue(second, sequence, 5)
    assert first.counts(1, 2) == (12, 20)
    assert third.counts(1, 2) == (12, 24)
    assert first.counts(1, RING + 1) == (11 + RING, 20)
    assert first.counts(1, RING + 2) is None
    assert first.counts(2, 2) is None


def test_overwritten_counts_are_not_taken_for_old_ones() -> None:
    first, second = shared(2)
    for sequence in (1, RING + 1):
        second.post_counts(sequence, [sequence, 0], [0, 0])
        issue(second, sequence, 5)
    assert first.counts(1, 1) is None


@KINDS
def test_overwritten_posts_are_not_mistaken_for_other_operations(make: Callable[[int], Boards]) -> None:
    first, second = make(2)
    issue(second, 3, 1)
    issue(second, 3 + RING, 2)
    assert first.read(1, 3) == (3 + RING, None, True)
    assert first.read(1, 4) == (3 + RING, None, False)
    assert first.read(1, 3 + RING) == (3 + RING, 2, False)


def test_a_ballot_is_counted_when_all_ranks_have_cast_the_same() -> None:
    boards = [cast(SharedBoard, board) for board in shared(3)]
    for number in range(1, 40):  # many times as many as a row has room for
        polls: list[Callable[[], bool]] = []
        for rank, board in enumerate(boards):
            assert not any(poll() for poll in polls)
            polls.append(board.cast(5 + number if (number, rank) != (39, 1) else 7))
        assert [poll() for poll in polls] == [number < 39] * 3


def test_a_peer_at_a_later_ballot_counts_for_earlier_ones() -> None:
    first, second = (cast(SharedBoard, board) for board in shared(2))
    poll = first.cast(1)
    for number in range(1, 9):
        assert not poll() or number > 1
        second.cast(number)
    assert poll()


@KINDS
def test_failing_and_leaving_are_visible_to_peers(make: Callable[[int], Boards]) -> None:
    first, second = make(2)
    assert not first.is_closed(1)
    assert first.failure(1) is None
    second.mark_failed(Failure(4, "CommTimeout: nobody came"))
    second.mark_failed(Failure(9, "a later one does not count"))
    assert first.failure(1) == Failure(4, "CommTimeout: nobody came")
    assert not first.is_closed(1)
    second.mark_closed()
    assert first.is_closed(1)
    assert not first.is_closed(0)


@KINDS
def test_compiling_is_odd_whenever_the_group_was_opened(make: Callable[[int], Boards]) -> None:
    first, second = make(2)
    seen = [first.compiling(1)]
    for begins in (False, True, True, False, True):  # the first: it had begun before this group was opened
        second.mark_compiling(begins)
        seen.append(first.compiling(1))
        assert seen[-1] % 2 == begins
    assert seen[0] == 0
    assert len(set(seen)) == len(seen)


@KINDS
def test_long_text_is_cut_and_not_spilled(make: Callable[[int], Boards]) -> None:
    first, second = make(2)
    issue(second, 1, 1, "x" * 1000)
    issue(second, 2, 2, "next")
    assert set(first.text(1, 1, 1)) == {"x"}
    assert first.text(1, 2, 2) == "next"
    assert first.text(1, 1, 2) in ("", "next")


def test_the_store_keeps_no_more_for_more_posts() -> None:
    store = HashStore()
    ranks = _FEW + 1  # so many that votes are counted
    boards = [StoreBoard(store, Group("g", tuple(range(ranks)), rank)) for rank in range(ranks)]

    def issue_all(first: int, last: int) -> int:
        for sequence in range(first, last):
            for board in boards:
                issue(board, sequence, sequence % 7)
        return store.num_keys()

    kept = issue_all(1, RING + 50)
    assert issue_all(RING + 50, 2 * RING) == kept
    assert all_match(boards[-1], 2 * RING - 1, (2 * RING - 1) % 7)
    assert boards[1].read(0, 1) == (2 * RING - 1, None, True)


class Hurried:
    """A store that lets others act before each request."""

    def __init__(self, store: Store, before: Callable[[str], None]) -> None:
        self.store, self.before = store, before

    def __getattr__(self, name: str) -> Any:
        request = getattr(self.store, name)

        def ask(*args: Any) -> Any:
            self.before(str(args[0]))
            return request(*args)

        return ask


def test_posts_between_two_requests_are_not_mistaken_for_missing_ones() -> None:
    store = HashStore()
    peer = StoreBoard(store, Group("g", (0, 1), 0))
    for request in range(4):  # before which of the requests of a look
        asked = 0

        def post(key: str, turn: int = request) -> None:
            nonlocal asked
            if asked == turn:
                for sequence in (10 * turn + 46, 10 * turn + 47):
                    issue(peer, sequence, sequence)
            asked += 1

        board: Any = StoreBoard(store, Group("g", (0, 1), 1))
        board._store = Hurried(store, post)
        status = board.read(0, 10 * request + 46)
        assert status.digest is not None or status.issued <= 10 * request + 46
