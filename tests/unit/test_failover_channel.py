"""A synchronous operation that begins without the lock, while another thread stops or returns its library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mcr_plus.backends.base import Poll
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import BackendError
from mcr_plus.reliability.failover.attempt import FailoverPoll
from mcr_plus.reliability.failover.channel import Binding, FailoverChannel

SIGNATURE = Signature("all_reduce", torch.float32, (4,), 16, "world", 2, reduce_op="SUM", backend="gloo")


class Library:
    """The channel of a library. `starts` is called as an operation starts."""

    closes_alone, outlives_library = True, False

    def __init__(self, starts: Callable[[Message], None]) -> None:
        self.starts = starts

    def bind(self, _: Signature) -> Callable[[Message], Poll]:
        def start(message: Message) -> Poll:
            self.starts(message)
            return lambda: True

        return start

    def release(self) -> None:
        """Nothing is open."""


def channel_of(own: Library, *, stops_as_whole: bool = False) -> FailoverChannel:
    """Return a channel that has no operation yet; the library works."""
    library: Any = SimpleNamespace(
        name="gloo", stops_as_whole=stops_as_whole, breaks=lambda _: "", host_driven=False, rings=False
    )
    engine: Any = SimpleNamespace(
        lock=threading.RLock(), writes={}, off={}, peers=SimpleNamespace(keep=[]), ring=lambda: None,
        bound=[], backends=[],
    )  # fmt: skip
    group = Group("world", (0, 1), 0)
    board = SimpleNamespace(mark_moving=lambda: None)
    state: Any = SimpleNamespace(group=group, board=board, is_its_thread=lambda: False)
    store: Any = SimpleNamespace(compare_set=lambda *_: b"")
    slot: Any = SimpleNamespace(backend=library, channel=own)
    return FailoverChannel(slot, library, cast("Any", own), state, store, engine, cast("Any", None))


def message() -> Message:
    x = torch.ones(4)
    return Message(SIGNATURE, (x,), (x,))


@pytest.mark.parametrize("stops_as_whole", [False, True])
def test_an_operation_that_begins_as_the_library_is_stopped_does_not_run_on_it(stops_as_whole: bool) -> None:
    def stop(_: Message) -> None:
        other = threading.Thread(target=made.fail, args=("its connection is torn",))
        other.start()
        other.join()

    made = channel_of(Library(stop), stops_as_whole=stops_as_whole)
    attempt = made.bind(SIGNATURE)(message())
    assert isinstance(attempt, FailoverPoll)
    assert not attempt(), "it waits for the second library"
    assert made._running_here() == [attempt], "so that its rank says that it is not complete"
    assert torch.equal(attempt.again(SIGNATURE).inputs[0], torch.ones(4))
    # No call ends the operations that the library has, so all of them stay, with the library's own poll.
    polls = [held[2] for held in made._engine.peers.keep if held[2] is not None]
    assert [poll() for poll in polls] == [True] * stops_as_whole


def test_an_operation_keeps_its_place_as_another_thread_returns_to_the_library() -> None:
    """The other thread starts waiting operations, but has not done so when the next operation begins."""
    started: list[Message] = []
    first, second = message(), message()

    def note(begun: Message) -> None:
        if begun is first:
            program.start()
            program.join(0.2)  # it waits for its turn
        started.append(begun)

    made = channel_of(Library(note))
    begin = made.bind(SIGNATURE)
    program = threading.Thread(target=begin, args=(second,))
    made.moved, made._starts_at_once = True, False
    made._queue.append(made._opened(Binding(SIGNATURE, begin, 0), first))
    with made.lock:
        made._return_to(cast("Any", Library(note)))
        made._start_queued()
    program.join()
    assert [*map(id, started)] == [id(first), id(second)]
    assert made._starts_at_once


def test_an_operation_that_begins_as_all_is_refused_is_refused() -> None:
    errors: list[BaseException] = []

    def start() -> None:
        try:
            begin(message())
        except BackendError as error:
            errors.append(error)

    made = channel_of(Library(lambda _: pytest.fail("the library has failed")))
    begin, program = made.bind(SIGNATURE), threading.Thread(target=start)
    made._stop()
    with made.lock:
        program.start()
        program.join(0.1)  # it waits for the lock
        made._refuse("no library is left")
    program.join()
    (error,) = errors
    assert "no library is left" in str(error)
