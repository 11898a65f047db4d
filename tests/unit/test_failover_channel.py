"""A synchronous operation that begins without the lock, while another thread stops its library."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import torch

from mcr_plus.backends.base import Poll
from mcr_plus.core.message import Message, Signature
from mcr_plus.dispatch.failover.attempt import Attempt
from mcr_plus.dispatch.failover.channel import FailoverChannel


def test_an_operation_that_begins_as_the_library_is_stopped_does_not_run_on_it() -> None:
    channel: list[FailoverChannel] = []

    def start(_: Message) -> Poll:
        other = threading.Thread(target=channel[0].fail, args=("its connection is torn",))
        other.start()
        other.join()
        return lambda: True

    library: Any = SimpleNamespace(name="gloo", stops_as_whole=False, breaks=lambda _: "")
    own: Any = SimpleNamespace(closes_alone=True, outlives_library=False, bind=lambda _: start)
    engine: Any = SimpleNamespace(
        lock=threading.RLock(), writes={}, off={}, peers=SimpleNamespace(keep=[]), ring=lambda: None
    )
    group = SimpleNamespace(name="world", rank=0, size=2, ranks=(0, 1))
    board = SimpleNamespace(mark_moving=lambda: None)
    state: Any = SimpleNamespace(group=group, board=board, is_its_thread=lambda: False)
    store: Any = SimpleNamespace(compare_set=lambda *_: b"")
    slot: Any = SimpleNamespace(backend=library, channel=own)
    made = FailoverChannel(slot, library, own, state, store, engine, cast("Any", None))
    channel.append(made)

    x = torch.ones(4)
    signature = Signature("all_reduce", x.dtype, (4,), 16, "world", 2, reduce_op="SUM", backend="gloo")
    attempt = made.bind(signature)(Message(signature, (x,), (x,)))
    assert isinstance(attempt, Attempt)
    assert not attempt(), "it waits for the second library"
    assert made._running_here() == [attempt], "so that its rank says that it is not complete"
    assert torch.equal(attempt.again(signature).inputs[0], torch.ones(4))
