"""Connections by which ranks of different hosts see each other's end in `init`; all ends in this process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import pytest

from mcr_plus.core.environment import on_one_host
from mcr_plus.rendezvous import presence
from mcr_plus.rendezvous.identity import DIED
from mcr_plus.rendezvous.presence import Presence

STORE: Final[Any] = SimpleNamespace(host="192.0.2.1", port=1)  # not on loopback, as that of several hosts


@pytest.fixture(autouse=True)
def of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All presences are open at a time, and loopback is the network."""
    monkeypatch.setattr(presence, "meeting_address", lambda: "127.0.0.1")
    monkeypatch.setattr(presence, "on_one_host", lambda *, ranks: False)
    monkeypatch.setattr(presence, "settle", lambda: None)


@contextmanager
def job(size: int) -> Iterator[list[Presence]]:
    ranks = [Presence() for _ in range(size)]
    address = ranks[0].listen("name", STORE, size)
    assert address is not None
    for rank in range(1, size):
        ranks[rank].connect(address, "name", rank, STORE)
    yield ranks
    for each in ranks:
        each.close()


def die(rank: Presence) -> None:
    """As the kernel ends the connections of a process."""
    for link in (*rank._links.values(), *rank._strangers):
        link.close()
    rank._links.clear()
    rank._strangers.clear()


def test_rank_0_sees_the_end_of_each_and_each_that_of_rank_0() -> None:
    with job(4) as ranks:
        assert [each.lost() for each in ranks] == [{}] * 4
        die(ranks[2])
        assert [each.lost() for each in ranks] == [{2: DIED}, {}, {}, {}]
        die(ranks[0])
        assert [each.lost() for each in ranks[1:]] == [{0: DIED}, {}, {0: DIED}]


def test_a_death_before_the_first_look_is_seen() -> None:
    with job(3) as ranks:
        die(ranks[1])
        assert ranks[0].lost() == {1: DIED}


def test_a_rank_that_has_its_world_is_not_lost() -> None:
    with job(3) as ranks:
        ranks[1].close()
        assert [each.lost() for each in ranks] == [{}] * 3
        ranks[0].close()  # which has not looked at rank 2 before
        assert ranks[2].lost() == {}


def test_another_process_may_take_the_place_of_a_lost_rank() -> None:
    with job(2) as ranks:
        die(ranks[1])
        assert ranks[0].lost() == {1: DIED}
        ranks[0].forget(1)
        assert ranks[0]._listener is not None
        ranks[1].connect(ranks[0]._listener.getsockname(), "name", 1, STORE)
        assert ranks[0].lost() == {}
        die(ranks[1])
        assert ranks[0].lost() == {1: DIED}


@pytest.mark.parametrize("name", ["another", None])
def test_strangers_are_no_ranks(name: str | None) -> None:
    """One that has not read the job's store, or another program."""
    with job(2) as ranks:
        assert ranks[0]._listener is not None
        address = ranks[0]._listener.getsockname()
        if name is None:
            with socket.create_connection(address) as link:
                link.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert ranks[0].lost() == {}
        else:
            stranger = Presence()
            stranger.connect(address, name, 1, STORE)
            assert ranks[0].lost() == {}
            die(stranger)
            stranger.close()
        assert ranks[0].lost() == {}


def test_a_launcher_of_fewer_ranks_says_nothing_of_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one task of srun on each host, which starts ranks itself."""
    by_torch = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    monkeypatch.setattr(presence, "on_one_host", partial(on_one_host, by_torch))
    assert Presence().listen("name", STORE, 2) is None
    rank = Presence()
    assert rank.listen("name", STORE, 4) is not None
    rank.close()


def test_a_job_on_one_host_and_one_without_a_network_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Presence().listen("name", SimpleNamespace(host="127.0.0.1"), 2) is None  # type: ignore[arg-type]
    monkeypatch.setattr(presence, "meeting_address", lambda: "192.0.2.1")  # of another host
    assert Presence().listen("name", STORE, 2) is None
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        rank = Presence()
        rank.connect(nobody.getsockname(), "name", 1, STORE)
        assert rank.lost() == {}
