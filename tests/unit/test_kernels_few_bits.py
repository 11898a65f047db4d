"""Numbers of a few bits, and places of bits, against Python's integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from mcr_plus.kernels import few_bits
from mcr_plus.kernels.few_bits import SLACK


def words_of(number: int, count: int) -> list[int]:
    return [number >> 32 * word & 0xFFFFFFFF for word in range(count)]


@settings(max_examples=examples(80), deadline=None)
@given(st.integers(1, 17), st.data())
def test_numbers_are_contiguous(width: int, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(0, (1 << width) - 1), min_size=1, max_size=90))
    needed = -(-len(drawn) * width // 32)
    words = np.full(needed, 0xA5A5A5A5, np.uint32)
    few_bits.pack(np.array(drawn, np.uint32), width, len(drawn), words)
    whole = sum(number << width * i for i, number in enumerate(drawn))
    assert words.tolist() == words_of(whole, needed)
    numbers = np.zeros(len(drawn) + SLACK, np.uint32)
    few_bits.unpack(words, width, len(drawn), numbers)
    assert numbers[: len(drawn)].tolist() == drawn


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_positions_of_set_flags_ascend(drawn: list[bool]) -> None:
    count = -(-len(drawn) // 32)
    flags = np.zeros(32 * count, np.uint8)
    flags[: len(drawn)] = drawn
    words = np.full(count, 0xA5A5A5A5, np.uint32)
    few_bits.pack_flags(flags.view(np.uint64), words)
    assert words.tolist() == words_of(sum(flag << i for i, flag in enumerate(drawn)), count)
    wanted = [i for i, flag in enumerate(drawn) if flag]
    for find, source in (
        (few_bits.places_of_bits, words),
        (few_bits.places_of_flags, flags.view(np.uint64)),
    ):
        places = np.zeros(32 * count + SLACK, np.uint32)
        assert find(source, places) == len(wanted)
        assert places[: len(wanted)].tolist() == wanted
