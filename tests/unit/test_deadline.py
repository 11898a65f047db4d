"""The remaining time of a timeout."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from mcr_plus.core.deadline import Deadline
from mcr_plus.errors import InvalidArgument


@pytest.mark.parametrize("timeout", [100, 100.0, timedelta(minutes=1, seconds=40)])
def test_the_time_left_shrinks_as_the_clock_runs(timeout: float | timedelta) -> None:
    before = time.monotonic()
    deadline = Deadline(timeout)
    after = time.monotonic()
    for _ in range(3):
        time.sleep(0.01)
        earliest = time.monotonic()
        left = deadline.left()
        latest = time.monotonic()
        assert left is not None
        assert before + 100 - latest <= left <= after + 100 - earliest
        assert not deadline.passed()


@pytest.mark.parametrize("timeout", [0, -5, timedelta(0)])
def test_a_timeout_of_zero_has_passed_at_once(timeout: float | timedelta) -> None:
    deadline = Deadline(timeout)
    assert deadline.left() == 0.0
    assert deadline.passed()


def test_without_a_timeout_it_never_passes() -> None:
    deadline = Deadline(None)
    assert deadline.left() is None
    assert not deadline.passed()


@pytest.mark.parametrize("timeout", ["soon", b"1", [1.0], float("nan")])
def test_other_types_and_nan_are_refused(timeout: object) -> None:
    with pytest.raises(InvalidArgument, match="timeout: expected seconds, a timedelta or None, got"):
        Deadline(timeout)  # type: ignore[arg-type]
