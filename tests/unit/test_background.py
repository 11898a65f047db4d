"""Blocking calls on threads of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from mcr_plus.core.threads import Background


def _ended(background: Background[int]) -> None:
    event = threading.Event()
    for _ in range(2000):
        if background.done:
            return
        event.wait(0.005)
    raise AssertionError("not done")


def test_the_result_comes_from_another_thread_inside_its_context() -> None:
    inside: list[int] = []

    @contextlib.contextmanager
    def context():  # type: ignore[no-untyped-def]
        inside.append(threading.get_ident())
        yield
        inside.append(0)

    go = threading.Event()

    def call() -> int:
        assert go.wait(20)
        return threading.get_ident()

    background = Background(call, context())
    assert not background.done
    go.set()
    _ended(background)
    assert inside[0] == background.result() != threading.get_ident()


def test_an_error_is_raised_by_result() -> None:
    def call() -> int:
        raise ValueError("seven")

    background = Background(call, contextlib.nullcontext())
    _ended(background)
    with pytest.raises(ValueError, match="seven"):
        background.result()


@pytest.mark.parametrize("late", [False, True])
def test_an_abandoned_result_is_discarded_once(late: bool) -> None:
    go, got, came = threading.Event(), list[int](), threading.Event()

    def call() -> int:
        assert go.wait(20)
        return 7

    def discard(result: int) -> None:
        got.append(result)
        came.set()

    background = Background(call, contextlib.nullcontext())
    steps: list[Callable[[], object]] = [go.set, lambda: _ended(background)]
    for step in (
        [lambda: background.abandon(discard), *steps]
        if late
        else [*steps, lambda: background.abandon(discard)]
    ):
        step()
    assert came.wait(20)
    assert got == [7]
