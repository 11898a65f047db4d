"""Receivers that forward weights: choice of relays, what they keep, and relays that fail."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcr_plus.errors import BackendError
from mcr_plus.rendezvous import stream as links
from mcr_plus.rendezvous.stream import Payload
from mcr_plus.weight_sync import relays
from mcr_plus.weight_sync.receiver import WeightReceiver
from mcr_plus.weight_sync.relays import DAMAGED, LACKING, LOST, SOURCE, Relay, RelayTicket, RelayTree
from mcr_plus.weight_sync.shards import parts_of
from mcr_plus.weight_sync.source import WeightSource
from mcr_plus.weight_sync.weights import Weights

NUMEL = 200_000
BITS = torch.int16


@contextmanager
def group(count: int, sources: int = 1) -> Iterator[tuple[list[WeightSource], list[WeightReceiver], Any]]:
    """Sources on 127.0.0.2, which receivers on 127.0.0.1 take for another host, and the tensors."""
    first = torch.arange(NUMEL, dtype=torch.int32).remainder(977).to(BITS)
    names = [f"w{number}" for number in range(sources)]
    ranks = range(sources, sources + count)
    held = {rank: {name: first.clone() for name in names} for rank in range(sources + count)}
    for rank in range(sources):
        held[rank] = {names[rank]: held[rank][names[rank]]}
    weights = {rank: Weights(each) for rank, each in held.items()}
    parts = parts_of({rank: each.held for rank, each in weights.items()}, range(sources))
    ends, places, made = threading.Event(), {}, []
    for rank in range(sources):
        listener = links.listen("127.0.0.2")
        places[rank] = (listener.getsockname()[:2], [rank])
        weights[rank].lay([parts[rank]])
        needs = {each: [0] for each in ranks}
        made.append(WeightSource(weights[rank], "sync", b"secret", listener, needs, 1 << 30, ends.is_set))
    receivers = []
    for rank in ranks:
        weights[rank].lay(parts)
        receivers.append(WeightReceiver(weights[rank], "sync", b"secret", places, rank, ends.is_set))
    try:
        yield made, receivers, held
    finally:
        ends.set()
        for receiver in receivers:
            receiver.close()
        for source in made:
            source.close()


def pushed(
    sources: list[WeightSource], receivers: list[WeightReceiver], held: Any, versions: range, seed: int = 0
) -> None:
    """Push versions, each once all receivers have the one before; all bits arrive."""
    random = torch.Generator().manual_seed(seed)
    for version in versions:
        for rank, source in enumerate(sources):
            (mine,) = held[rank].values()
            mine.copy_(torch.randint(-30_000, 30_000, (NUMEL,), generator=random, dtype=BITS))
            source.push(version)
        for rank, receiver in enumerate(receivers, len(sources)):
            while receiver.pull(True, 60.0) != version:
                pass
            for number in range(len(sources)):
                assert torch.equal(held[rank][f"w{number}"], held[number][f"w{number}"]), (rank, number)


@pytest.mark.parametrize("sources", [1, 2])
def test_a_source_sends_each_message_once(sources: int) -> None:
    with group(7, sources) as (made, receivers, held):
        pushed(made, receivers, held, range(1, 6))
        for source in made:
            stats = source.stats()
            assert stats["relayed"] == 6 * 5
            assert 5 * 2 * NUMEL * 0.9 < stats["sent_bytes"] < 5 * 2 * NUMEL * 1.01
        assert sum(each.stats()["forwarded_bytes"] for each in receivers) == pytest.approx(
            6 * sum(source.stats()["sent_bytes"] for source in made), rel=0.01
        )


def flipped(payloads: Any) -> list[Payload]:
    """Return payloads of which one byte has changed, with the hashes from before."""
    (first, *others) = payloads
    data = bytearray(first.data)
    data[len(data) // 2] ^= 1
    return [Payload(memoryview(data), first.hash), *others]


def forged(payloads: Any) -> list[Payload]:
    """Return payloads of which one byte has changed, with their own hashes."""
    return [Payload.of(bytes(each.data)) for each in flipped(payloads)]


@pytest.mark.parametrize("change", [flipped, forged])
def test_a_relay_that_damages_weights_is_named_and_bypassed(
    change: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    awaited = Relay._awaited
    monkeypatch.setattr(Relay, "_awaited", lambda *args: change(awaited(*args)))
    with caplog.at_level(logging.WARNING, "mcr_plus"), group(3) as (made, receivers, held):
        pushed(made, receivers, held, range(1, 4))
        assert sum(each.stats()["refused"] for each in receivers) >= 1
    assert "bypasses its relay, rank" in caplog.text
    assert "relays no more: what came from it to rank" in caplog.text


def silent(_relay: Relay, link: links.StreamConnection, *_: Any) -> Any:
    """Say nothing until the other end has gone."""
    while not link.has_come():
        time.sleep(0.05)
    raise EOFError


def gone(*_: Any) -> Any:
    """End the connection."""
    raise EOFError


@pytest.mark.parametrize("way", [pytest.param(silent, marks=pytest.mark.long), gone])
def test_a_relay_that_is_silent_or_gone_is_bypassed(
    way: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relays, "_SILENT", 0.5)
    monkeypatch.setattr(Relay, "_awaited", way)
    with caplog.at_level(logging.WARNING, "mcr_plus"), group(3) as (made, receivers, held):
        pushed(made, receivers, held, range(1, 5))
        assert made[0].stats()["relayed"] >= 2
    assert "bypasses its relay" in caplog.text


def test_a_receiver_waits_at_its_relay_for_what_is_on_its_way() -> None:
    ends = threading.Event()
    relay = Relay("sync", b"secret", ends.is_set, "127.0.0.1", 1 << 20)
    messages = [[Payload.of(bytes([number]) * 9), Payload.of(b"other")] for number in range(4)]
    tickets = [RelayTicket(1, "127.0.0.1", relay.port, links.hash_of(each)) for each in messages]

    def fetched(version: int) -> Any:
        return relays.fetch(tickets[version], version, b"secret", 2, 1 << 20, ends.is_set)

    try:
        late = threading.Timer(2.5, relay.keep, (1, messages[1]))  # longer than a word of the relay takes
        late.start()
        body, payloads, _ = fetched(1)
        assert bytes(body[16:]) == bytes([1]) * 9 + b"other"
        assert links.hash_of(payloads) == tickets[1].hash
        for version in (2, 3):
            relay.keep(version, messages[version])
        assert bytes(fetched(2)[0][16:25]) == bytes([2]) * 9
        with pytest.raises(LookupError, match="does not have this message any more"):
            fetched(1)
        assert relay.forwarded == 2 * 14
    finally:
        ends.set()


def tree(hosts: dict[int, str]) -> RelayTree:
    """Return the tree of receivers on these hosts."""
    found = RelayTree()
    for rank, host in hosts.items():
        link: Any = SimpleNamespace(hosts=("source", host))
        found.enter(rank, link, 1000 + rank)
    return found


def chosen(found: RelayTree, rank: int, body: str = "body") -> int | None:
    ticket = found.ticket(rank, body)
    found.gets(rank, body)
    return None if ticket is None else ticket.relay


def test_relays_are_chosen_by_host_rate_and_load() -> None:
    found = tree({rank: "a" if rank < 4 else "b" for rank in range(1, 9)})
    assert chosen(found, 1) is None
    assert chosen(found, 4) == 1
    assert chosen(found, 2) == 1  # of its own host
    assert chosen(found, 5) == 4
    assert chosen(found, 6) == 4
    assert chosen(found, 7) == 4
    assert chosen(found, 8) in (5, 6, 7)  # three wait for 4 already
    assert chosen(found, 9) is None  # it has not told its port
    assert chosen(found, 3) == 1
    found.report(3, 1, 100)
    found.asks(2)
    assert chosen(found, 3) == 1
    assert found.holds("body")
    for rank in range(1, 10):
        assert chosen(found, rank, "next") is None or rank > 1
        chosen(found, rank, "last")
    assert not found.holds("body")


def test_a_relay_never_waits_for_a_receiver_that_waits_for_it() -> None:
    found = tree(dict.fromkeys(range(1, 4), "a"))
    assert [chosen(found, rank) for rank in (1, 2)] == [None, 1]
    found.asks(1)  # again, for the same message: 2 waits for it
    assert chosen(found, 1) is None
    found.asks(2)
    assert chosen(found, 1) == 2


def test_relays_that_failed_or_are_slow_are_left_out() -> None:
    found = tree(dict.fromkeys(range(1, 8), "a"))
    assert [chosen(found, rank) for rank in (1, 2)] == [None, 1]
    found.report(2, SOURCE, 1000)
    found.report(2, 1, 499)
    assert chosen(found, 2, "body") is None
    found = tree(dict.fromkeys(range(1, 8), "a"))
    assert [chosen(found, rank) for rank in (1, 2, 3)] == [None, 1, 1]
    found.report(2, SOURCE, 1000)
    found.report(2, 1, 500)
    assert chosen(found, 2) == 1
    found.report(4, 1, DAMAGED)  # which was not its relay
    assert chosen(found, 4) == 1
    found.report(4, 1, DAMAGED)
    assert chosen(found, 4) in (2, 3)
    found.leave(2)
    assert chosen(found, 5) in (3, 4)
    found.report(5, 2, DAMAGED)  # which has left


def test_a_relay_that_lacks_a_message_is_asked_for_others_and_a_lost_one_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = tree(dict.fromkeys(range(1, 8), "a"))
    assert [chosen(found, rank) for rank in (1, 2)] == [None, 1]
    found.report(2, 1, LACKING)
    found.asks(2)
    assert chosen(found, 2) is None
    assert [chosen(found, rank, "next") for rank in (1, 2)] == [None, 1]
    found.report(2, 1, LOST)
    found.asks(2)
    assert [chosen(found, rank, "last") for rank in (1, 2, 3)] == [None, None, 1]
    now[0] += 61.0
    assert [chosen(found, rank, "newest") for rank in (1, 2)] == [None, 1]
    found.asks(2)  # it has got the message


def test_a_receiver_whose_relays_fail_in_a_row_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = tree(dict.fromkeys(range(1, 9), "a"))
    for rank in range(1, 8):
        chosen(found, rank)
    for success in (False, True, False):
        for _ in range(2):
            found.report(8, found.ticket(8, "body").relay, LOST)  # type: ignore[union-attr]
            found.asks(8)
        if success:
            assert found.ticket(8, "body") is not None
            found.asks(8)
        else:
            found.report(8, found.ticket(8, "body").relay, LOST)  # type: ignore[union-attr]
            found.asks(8)
            assert found.ticket(8, "body") is None
        now[0] += 61.0
        for rank in range(1, 8):
            found.gets(rank, "body")


def test_a_port_that_is_none_is_refused() -> None:
    link: Any = SimpleNamespace(hosts=("source", "a"))
    with pytest.raises(BackendError, match="a relay on port 70000"):
        RelayTree().enter(1, link, 70_000)


def test_a_receiver_that_cannot_listen_goes_on_without_relaying(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> Any:
        raise OSError("Cannot assign requested address")

    with group(2) as (made, receivers, held):
        monkeypatch.setattr(links, "listen", refused)
        with caplog.at_level(logging.WARNING, "mcr_plus"):
            pushed(made, receivers, held, range(1, 3))
        assert made[0].stats()["relayed"] == 0
    assert "this receiver does not relay: Cannot assign requested address" in caplog.text


@given(st.data())
def test_nobody_waits_in_a_circle(data: st.DataObject) -> None:
    """In any order of asking, failing and leaving, waiting ends at a receiver that asked the source."""
    found, waits = tree(dict.fromkeys(range(6), "a")), dict[int, int]()
    for _ in range(data.draw(st.integers(1, 40))):
        rank, event = data.draw(st.integers(0, 5)), data.draw(st.sampled_from(["asks", "fails", "leaves"]))
        if event == "fails" and rank in waits:
            found.report(rank, waits[rank], data.draw(st.sampled_from([LOST, DAMAGED, LACKING])))
        waits.pop(rank, None)
        if event == "leaves":
            found.leave(rank)
            link: Any = SimpleNamespace(hosts=("source", "a"))
            found.enter(rank, link, 1000 + rank)
            continue
        found.asks(rank)
        relay = chosen(found, rank)
        if relay is not None:
            waits[rank] = relay
        for each in waits:
            seen = [each]
            while (after := waits.get(seen[-1])) is not None:
                assert after not in seen
                seen.append(after)
        assert all(list(waits.values()).count(each) <= 3 for each in waits.values())
