"""Who is late all the time, in samples of waits."""

from __future__ import annotations

import pytest

from mcr_plus.observe.persistent_stragglers import Blame, PersistentStragglers


def blame(rank: int, number: int) -> Blame:
    return Blame(rank, "world", number, "all_reduce", "train.py:7, in step")


def first_text(samples: list[Blame | None]) -> tuple[int, str]:
    """Index and text of the first line that is logged; -1 and nothing if none is."""
    found = PersistentStragglers(0.5)
    for index, sample in enumerate(samples):
        if text := found.sample(index * 0.5, sample):
            return index, text
    return -1, ""


def test_a_rank_that_is_late_in_a_part_of_the_samples_is_named() -> None:
    index, text = first_text([blame(3, n) if n % 4 == 0 else None for n in range(200)])
    assert index == 60  # as soon as there are enough
    assert text.startswith(
        "rank 3 is late: this rank has waited for it alone in 25% of the last 30 s, mostly in"
    )
    assert "called at train.py:7, in step" in text


@pytest.mark.parametrize(
    "samples",
    [
        [None] * 200,
        [blame(3, n) if n % 20 == 0 else None for n in range(200)],  # too rarely
        [blame(3, 7)] * 200,  # one long wait
        [blame(n % 2, n) for n in range(200)],  # now one, now the other
        [blame(3, n) if 100 <= n < 130 else None for n in range(200)],  # for a while
        [blame(3, n) for n in range(59)],  # too short
    ],
)
def test_unclear_samples_name_nobody(samples: list[Blame | None]) -> None:
    assert first_text(samples) == (-1, "")


def test_a_straggler_is_logged_again_only_after_minutes() -> None:
    found = PersistentStragglers(0.5)
    told = [index for index in range(1300) if found.sample(index * 0.5, blame(1, index))]
    assert told == [59, 659, 1259]
