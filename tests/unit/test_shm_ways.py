"""How a direct collective chooses the way of its data and their places in slots."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mcr_plus.backends.shm import collectives_state as words
from mcr_plus.backends.shm.backend import shape_of
from mcr_plus.backends.shm.collectives import DirectCollectives
from mcr_plus.backends.shm.segment import Shape
from mcr_plus.backends.shm.slice_kernels import next_way, note_trial, place_of, slot_of

FASTEST = words.LEAST_AT // 8


def choosing(kind: int, first: int) -> tuple[Any, Any]:
    """Return a state that chooses, and its times."""
    state, times = np.zeros(words.WORDS, np.int64), np.zeros(words.TRIED // 8, np.int64)
    state[words.KIND], state[words.FIRST], state[words.TRIALS] = kind, first, times.ctypes.data
    state[words.COUNT], state[words.WIDTH] = 1000, 4
    return state, times


def calls(state: Any, count: int) -> list[tuple[int, bool]]:
    """Return the ways of some calls, and whether they were trials."""
    found = []
    for _ in range(count):
        state[words.BEGAN] = 0
        found.append((int(next_way(state)), bool(state[words.BEGAN])))
    return found


def test_every_way_is_tried_in_each_round_and_again_after_a_period() -> None:
    state, times = choosing(words.ALL_GATHER, words.IN_PLACE)
    for _ in range(2):
        found = calls(state, words.PERIOD)
        trials = [(number, way) for number, (way, tried) in enumerate(found) if tried]
        assert trials == [
            (words.ROUND * number + way, way) for number in range(words.ROUNDS) for way in range(words.WAYS)
        ]
        assert {way for way, tried in found if not tried} == {words.IN_PLACE}
        assert list(times[FASTEST : FASTEST + words.WAYS]) == [words.UNKNOWN] * words.WAYS


@pytest.mark.parametrize("kind", [words.ALL_GATHER, words.BROADCAST, words.SCATTER, words.ALL_REDUCE])
@pytest.mark.parametrize("first", range(3))
def test_the_fastest_way_is_chosen_if_it_saves_enough(kind: int, first: int) -> None:
    chance = random.Random(kind)
    for _ in range(200):
        state, times = choosing(kind, first)
        calls(state, words.WAYS)
        measured = [chance.choice((words.UNKNOWN, chance.randint(1, 99))) for _ in range(words.WAYS)]
        times[FASTEST : FASTEST + words.WAYS] = measured
        # One that only sends does not see what the others wait for: a third of the time instead of 7/8.
        biased = first == words.IN_PLACE and kind in (words.BROADCAST, words.SCATTER)
        enough = 7 / 24 if biased else 7 / 8
        faster = [each for each in measured if each < enough * measured[first]]
        expected = measured.index(min(faster)) if faster else first
        assert calls(state, 5) == [(expected, False)] * 5, measured


def test_the_least_time_per_byte_counts() -> None:
    state, times = choosing(words.ALL_GATHER, words.COPIED)
    calls(state, words.WAYS)
    state[words.WAY], now = words.PAST_CACHES, time.monotonic_ns()
    for microseconds in (500_000, 300_000, 400_000):
        state[words.BEGAN] = now - 1000 * microseconds
        note_trial(state)
    passed = time.monotonic_ns() - now
    least = times[FASTEST + words.PAST_CACHES]
    assert 300_000_000 * 1000 // 4000 <= least <= (300_000_000 + passed) * 1000 // 4000  # ps per byte
    assert times[FASTEST] == words.UNKNOWN


class Room:
    """A segment's addresses without its memory."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.rank, self.base, self.bells, self.probe = shape, 0, 1 << 20, 0, None


EVEN = (
    words.ALL_REDUCE,
    words.ALL_GATHER,
    words.ALL_TO_ALL,
    words.REDUCE_SCATTER,
    words.SCATTER,
    words.BROADCAST,
)
PARTED = (words.ALL_TO_ALL, words.REDUCE_SCATTER, words.SCATTER)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_slices_that_may_be_in_flight_together_never_overlap(ranks: int) -> None:
    chance, shape, number = random.Random(ranks), Shape(ranks, area=64 * ranks << 10, ring=3), 0
    room: Any = Room(shape)
    direct, last, starts = DirectCollectives(room), list[tuple[int, int]](), set()
    for _ in range(300):
        width, kind = chance.choice((1, 2, 4, 8)), chance.choice(EVEN)
        state = direct.bind(kind, chance.randint(1, 200_000 // width), width)
        state[words.BASE], parts = number, ranks if kind in PARTED else 1
        for index in range(int(state[words.SLICES])):
            left = min(state[words.SLICE], state[words.COUNT] - index * state[words.SLICE])
            nbytes = int((parts - 1) * state[words.SLICE] + left) * width
            start = int(slot_of(state, 0, index)) - (room.base + shape.areas)
            starts.add(start)
            last = [*last, (start, start + nbytes)][-shape.ring :]
            assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(last)))
            assert start >= 0
            assert start + nbytes <= shape.ring * shape.area
        number += int(state[words.SLICES])
    assert len(starts) > 3 * shape.ring  # not always at the beginning of slots


@pytest.mark.parametrize("kind", [words.EXCHANGE, words.SHARE, words.REDUCE_SCATTER_V])
def test_slices_of_uneven_sizes_fit_a_slot_for_every_number_of_ranks(kind: int) -> None:
    for ranks in range(2, 129):
        room: Any = Room(shape_of(ranks))
        for width in (1, 2, 4, 8):
            pattern = DirectCollectives(room).bind(kind, 0, width)
            parts = 1 if kind == words.SHARE else ranks
            part = int(pattern[words.SLICE]) * width
            header = int(pattern[words.HEADER])
            assert header >= 8 * (2 + ranks)
            assert part >= 64
            assert header + parts * part <= room.shape.area
            for most in (0, 1, part // width // 3, part // width):
                state = DirectCollectives(room).of_sizes(pattern, [most] * ranks, [most] * ranks)
                for base in range(0, 40, 3):
                    state[words.BASE] = base
                    place = int(place_of(state, np.int64(0), np.int64(most)))
                    assert 0 <= place <= part - most * width
