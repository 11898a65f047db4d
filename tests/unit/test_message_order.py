"""The starting order of sends and receives that wait for other work, such as a copy to the host."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from mcr_plus.engine.work import IssuedWork, start_messages

CHANNELS = tuple(SimpleNamespace() for _ in range(2))


class CountedMessage(SimpleNamespace):
    """A message that counts how often its tag is read."""

    reads = 0

    @property
    def match_tag(self) -> int:
        CountedMessage.reads += 1
        return int(self.tag)


def issued(
    channel: int, kind: str, tag: int, peer: int | None, ready: bool, done: bool = False
) -> IssuedWork:
    operation: Any = SimpleNamespace(
        backend_channel=CHANNELS[channel], signature=SimpleNamespace(kind=kind), inline=False
    )
    message: Any = CountedMessage(tag=tag, peer=peer, after=SimpleNamespace(probe=lambda: ready))
    work = IssuedWork(operation, message, None, 0)
    work.is_done = done
    return work


def overtakes(work: IssuedWork, earlier: IssuedWork) -> bool:
    """MPI 4.1, section 3.5, by pairs."""
    peers = work.message.peer, earlier.message.peer
    return (
        work.operation.backend_channel is earlier.operation.backend_channel
        and work.operation.signature.kind == earlier.operation.signature.kind
        and work.message.match_tag == earlier.message.match_tag
        and (peers[0] == peers[1] or None in peers)
    )


@pytest.mark.parametrize("seed", range(20))
def test_messages_start_in_order_and_no_other_waits(seed: int) -> None:
    draw = random.Random(seed)
    works = [
        issued(
            draw.randrange(2),
            kind := draw.choice(["send", "recv"]),
            draw.randrange(3),
            draw.choice([0, 1, 2, *([None] * (kind == "recv"))]),
            draw.random() < 0.7,
            draw.random() < 0.1,
        )
        for _ in range(60)
    ]
    started: list[IssuedWork] = []
    waiting = start_messages(works, started.append)
    expected: list[IssuedWork] = []
    for work in works:
        behind = any(overtakes(work, earlier) for earlier in expected)
        assert work.is_behind(expected) == behind
        after = work.message.after
        assert after is not None
        if not work.is_done and (behind or not after.probe()):
            expected.append(work)
    assert waiting == expected
    assert started == [work for work in works if not work.is_done and work not in expected]


def test_a_poll_looks_at_each_message_a_few_times() -> None:
    """The test resembles a state that changes its layout, with a message per tensor."""
    works = [issued(0, "send", number, number % 4, ready=False) for number in range(500)]
    CountedMessage.reads = 0
    assert start_messages(works, lambda _: None) == works
    assert CountedMessage.reads <= 4 * len(works)
