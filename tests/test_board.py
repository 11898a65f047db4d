"""The board: what one rank posts and the others see."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcr_plus.c10d import HashStore
from mcr_plus.dispatch.board import RING, Failure, GroupBoard, SharedBoard, StoreBoard, pad
from mcr_plus.message import Group

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


def agreed(board: Any, sequence: int, digest: int) -> bool:
    board._next_question = 0.0  # ask at once
    return bool(board.agreed(sequence, digest))


@KINDS
def test_peers_see_what_was_posted(make: Callable[[int], Boards]) -> None:
    first, second, third = make(3)
    assert first.look(1, 1).issued == 0
    issue(second, 7, 0xABCDEF, "all_reduce SUM float32[4]")
    for board in (first, third):
        sighting = board.look(1, 7)
        assert (sighting.issued, sighting.digest) == (7, 0xABCDEF)
        assert sighting.text == "all_reduce SUM float32[4]"
        assert board.look(1, 6).digest is None
        assert board.look(0, 7).digest is None


@KINDS
def test_agreement_needs_all_ranks_and_one_digest(make: Callable[[int], Boards]) -> None:
    boards = make(3)
    for board in boards[:2]:
        issue(board, 1, 5)
    assert not agreed(boards[0], 1, 5)
    issue(boards[2], 1, 6)
    assert not agreed(boards[0], 1, 5)
    for board in boards:
        issue(board, 2, 9)
    assert all(agreed(board, 2, 9) for board in boards)
    assert not agreed(boards[1], 2, 8)


@given(earlier=st.integers(1, 10_000), laps=st.integers(1, 1000))
def test_old_posts_are_not_taken_for_new_ones(earlier: int, laps: int) -> None:
    first, second = shared(2)
    issue(second, earlier, 1, "old")
    second.counter[0] = later = earlier + laps * RING  # the same slot; those between were not posted
    assert first.look(1, later).digest is None
    assert not agreed(first, later, 1)
    assert first.look(1, earlier).digest == 1


@KINDS
def test_counts_are_seen_by_those_they_are_about(make: Callable[[int], Boards]) -> None:
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


def test_a_post_may_be_forgotten() -> None:
    first, second = shared(2)
    issue(second, 3, 1)
    issue(second, 3 + RING, 2)
    sighting = first.look(1, 3)
    assert sighting.digest is None
    assert first.forgotten(sighting, 3)
    assert not first.forgotten(sighting, 4)


@KINDS
def test_leaving_is_seen(make: Callable[[int], Boards]) -> None:
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


def test_long_text_is_cut_and_not_spilled() -> None:
    first, second = shared(2)
    issue(second, 1, 1, "x" * 1000)
    issue(second, 2, 2, "next")
    assert set(first.look(1, 1).text or "") == {"x"}
    assert first.look(1, 2).text == "next"


def test_store_forgets_old_posts() -> None:
    store = HashStore()
    board = StoreBoard(store, Group("g", (0, 1), 0))
    for sequence in range(1, RING + 50):
        issue(board, sequence, sequence)
    peer = StoreBoard(store, Group("g", (0, 1), 1))
    assert peer.look(0, 1).digest is None
    assert peer.look(0, RING + 49).digest == RING + 49
