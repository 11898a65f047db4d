"""Requests for dumps between agents: who is asked, once, and by whom."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest

from mcr_plus.hosts.dump_relay import DumpRelay
from mcr_plus.rendezvous import heartbeats, network
from mcr_plus.rendezvous.identity import own_process

KEY = b"secret"


def test_all_other_hosts_are_asked_and_each_asks_its_ranks_once() -> None:
    relays = [DumpRelay(3, host, KEY) for host in range(3)]
    sent = relays[1].ask("world\0rank 1: an error", 5.0)
    assert [each.host for each in sent] == [0, 2]
    again = [relays[1].step(5.0 + later) for later in (0.01, 0.06, 0.1, 0.3, 9.0)]
    assert [len(each) for each in again] == [0, 2, 0, 2, 0]  # for datagrams that are lost
    for host in (0, 2):
        said = [
            relays[host].receive(each.data, 5.0)
            for each in (*sent, *again[1], *again[3])
            if each.host == host
        ]
        assert said == ["world\0rank 1: an error", "", ""]
    second = relays[1].ask("\0SIGUSR2", 5.0)  # at the same moment
    assert relays[0].receive(second[0].data, 5.0) == "\0SIGUSR2"
    assert relays[0].receive(sent[0].data, 5.0) == "", "an old one"


def test_a_failure_that_many_ranks_find_is_passed_on_once() -> None:
    relays = [DumpRelay(3, host, KEY) for host in range(3)]
    sent = relays[0].ask("world\0rank 0: an error", 5.0)
    assert relays[0].ask("world\0rank 1: an error", 5.1) == [], "another rank of the host"
    assert relays[1].receive(sent[0].data, 5.1) == "world\0rank 0: an error"
    assert relays[1].ask("world\0rank 2: an error", 5.2) == [], "all have been asked by another host"
    assert len(relays[2].ask("world\0rank 4: an error", 5.2)) == 2, "which this one has not heard yet"
    assert len(relays[1].ask("tensor\0rank 2: an error", 5.2)) == 2, "another group"
    assert len(relays[1].ask("*\0SIGUSR2", 5.2)) == len(relays[1].ask("\0SIGUSR2", 5.2)) == 2
    assert len(relays[1].ask("world\0rank 2: an error", 15.2)) == 2, "another failure"


def test_an_agent_that_takes_the_place_of_another_is_heard() -> None:
    first, other = DumpRelay(2, 0, KEY), DumpRelay(2, 1, KEY)
    (asked,) = first.ask("one", 5.0)
    assert other.receive(asked.data, 5.0) == "one"
    (asked,) = DumpRelay(2, 0, KEY).ask("two", 5.1)
    assert other.receive(asked.data, 5.0) == "two"


@pytest.mark.parametrize("fault", ["key", "cut off", "itself", "no host", "changed"])
def test_requests_of_strangers_count_for_nothing(fault: str) -> None:
    sender = {"itself": 0, "no host": 7}.get(fault, 1)
    data = DumpRelay(8, sender, b"another" if fault == "key" else KEY).ask("text", 1.0)[0].data
    if fault == "cut off":
        data = data[:20]
    if fault == "changed":
        data = data.replace(b"text", b"tixt")
    assert DumpRelay(2, 0, KEY).receive(data, 1.0) == ""
    assert DumpRelay(2, 0, KEY).receive(b"mcr1" + data, 1.0) is None, "of another kind"


def test_a_host_whose_agent_takes_no_requests_has_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes without abstract addresses have such agents."""
    own = own_process("a", 0)
    others = [own._replace(place=place) for place in ("here", "there")]
    orders: list[Any] = []

    def refuse(_: str) -> NoReturn:
        raise PermissionError("not here")

    def exchanged(*arguments: Any) -> list[str]:
        mine = json.loads(arguments[4]) if arguments[4] else None
        return [json.dumps(mine), json.dumps(["", None, "token"])]

    monkeypatch.setattr(heartbeats, "opened", refuse)
    monkeypatch.setattr(heartbeats, "exchange", exchanged)
    monkeypatch.setattr(network, "meeting_address", lambda: "127.0.0.1")
    monkeypatch.setattr(heartbeats, "_start", orders.append)
    findings = heartbeats.open_findings(None, 0, others, b"secret", 0.0, 5.0)  # type: ignore[arg-type]
    assert findings is not None
    assert [order["requests"] for order in orders] == [None]
    findings.close()
