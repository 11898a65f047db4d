"""Connections that say nothing, or what no member says: how many a listening socket keeps, and how long."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest
import torch
from unit.test_weight_sync import laid

from mcr_plus.core.proc import read_stat
from mcr_plus.elasticity import state_stream
from mcr_plus.elasticity.state_source import StateSource
from mcr_plus.hosts import acceptor as acceptors
from mcr_plus.hosts.acceptor import Acceptor
from mcr_plus.hosts.handshake import Handshakes, greeting
from mcr_plus.hosts.key_replica import ANSWER, GET, REQUEST, SET, KeyReplica
from mcr_plus.observe import prometheus
from mcr_plus.rendezvous import stream as links
from mcr_plus.weight_sync.source import WeightSource

STRANGERS = 200
KEY = b"k" * 32
WITHIN = 1.0  # seconds, of the tests
SAYINGS = pytest.mark.parametrize("said", [b"", b"G", b"GET / HTTP/1.1\r\n\r\n" + bytes(100)])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections have to authenticate sooner than in jobs."""
    monkeypatch.setattr(Acceptor.__init__, "__kwdefaults__", {"members": 0, "most": 64, "within": WITHIN})


@contextlib.contextmanager
def strangers(place: tuple[str, int], said: bytes, number: int = STRANGERS) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(socket.create_connection(place)) for _ in range(number)]
        for link in links:
            with contextlib.suppress(ConnectionError):  # refused while others of them connect
                link.sendall(said)
        yield links


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]


@SAYINGS
def test_a_rank_greets_beside_strangers_who_do_not_stay(
    said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        door, place, before = Handshakes(listener, KEY, lambda _: None), listener.getsockname(), descriptors()
        with strangers(place, said), socket.create_connection(place) as member:
            assert door.come() == []
            member.sendall(greeting(KEY, 3))
            came: list[tuple[int, socket.socket]] = []

            def has_come() -> bool:
                came.extend(door.come())
                return bool(came)

            wait_for(has_come)
            ((rank, link),) = came
            assert rank == 3
            link.close()
            door.come()  # what was given up is closed
            assert len(door.strangers) <= acceptors.MOST
            wait_for(lambda: not door.come() and not door.strangers)
            assert descriptors() - before <= STRANGERS + 2  # the other ends, which are in this process
        door.close()
    assert len(lines(caplog)) == 1


@pytest.mark.short("said2]")
@SAYINGS
def test_a_keeper_answers_beside_strangers_who_do_not_stay(said: bytes) -> None:
    own = read_stat(os.getpid())
    assert own is not None
    token = bytes(range(32))
    order = {"token": token.hex(), "processes": [(os.getpid(), own[1])]}
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        keeper, place = KeyReplica(json.loads(json.dumps(order)), listener), listener.getsockname()
        thread = threading.Thread(target=keeper.run)
        thread.start()
        with strangers(place, said) as links, socket.create_connection(place) as member:
            member.settimeout(30)
            member.sendall(token + REQUEST.pack(SET, 1, 2) + b"a" + b"bc")
            size = ANSWER.size + 2
            assert member.recv(size, socket.MSG_WAITALL) == ANSWER.pack(True, 2) + b"bc"
            for link in links:
                link.settimeout(30)
                with contextlib.suppress(ConnectionError):
                    assert link.recv(1) == b""
            time.sleep(WITHIN)  # a member may be silent as long as it likes
            member.sendall(REQUEST.pack(GET, 1, 0) + b"a")
            assert member.recv(size, socket.MSG_WAITALL) == ANSWER.pack(True, 2) + b"bc"
        wait_for(lambda: not keeper._buffers)
        keeper._ranks.clear()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.short("G]")
@SAYINGS
def test_a_receiver_gets_weights_beside_strangers_who_do_not_stay(
    said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ends, listener = threading.Event(), links.listen("127.0.0.1")
    weights, _ = laid({"w": torch.arange(8.0)}, {"w": torch.zeros(8)})
    source = WeightSource(weights, "sync", b"secret", listener, {1: [0]}, 1 << 20, ends.is_set)
    place = listener.getsockname()
    with strangers(place, said) as those:
        receiver = links.connect(place, b"secret", 1, ends.is_set, 1)
        receiver.send(links.POLL, 0, 0)
        assert receiver.receive(1 << 20)[0] == links.PAYLOADS
        for each in those:
            each.settimeout(30)
            with contextlib.suppress(ConnectionError):
                while each.recv(4096):
                    pass
        wait_for(lambda: sum(each.is_alive() for each in source._acceptor.serving) <= 1)
        receiver.send(links.POLL, 0, 0)  # it may be silent as long as it likes
        assert receiver.receive(1 << 20)[0] == links.PAYLOADS
        receiver.close()
    ends.set()
    source.close()
    refused = lines(caplog)
    assert len(refused) == 1
    assert refused[0].startswith("sync: a connection was refused: ")


@SAYINGS
def test_a_newcomer_gets_its_state_beside_strangers(said: bytes) -> None:
    model = torch.nn.Linear(2, 2)
    source = StateSource(model, torch.optim.SGD(model.parameters(), 0.1), b"secret", "state", "127.0.0.1")
    with strangers(source.place, said, 20):
        newcomer = links.connect(source.place, b"secret", 1, lambda: False, 1)
        assert state_stream.receive(newcomer)[0] == state_stream.COPY
        newcomer.close()
    source.close()


@pytest.mark.short("said2]")
@SAYINGS
def test_metrics_are_scraped_beside_strangers_who_do_not_stay(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(prometheus, "WITHIN", WITHIN)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sink = prometheus.Port(port)
    try:
        before = descriptors()
        with strangers(("127.0.0.1", port), said, 20):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
                assert answer.status == 200
            wait_for(lambda: descriptors() <= before + 20)  # those of the strangers
    finally:
        sink.close()


def test_the_oldest_silent_connection_makes_room_and_lines_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("mcr_plus.hosts.acceptor.time.monotonic", lambda: now[0])
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        acceptor = Acceptor(listener, "test", members=1, most=2, within=10.0)

        def connect() -> tuple[socket.socket, socket.socket]:
            far = stack.enter_context(socket.create_connection(listener.getsockname()))

            def has_come() -> bool:
                accepted.append(acceptor.accept())
                return accepted[-1] is not None

            wait_for(has_come, 1e9)
            near = accepted[-1]
            assert near is not None
            return stack.enter_context(near), far

        accepted: list[socket.socket | None] = []
        (first, its), (second, _), (third, _) = (connect() for _ in range(3))
        its.sendall(b"x")
        wait_for(lambda: first.recv(1, socket.MSG_PEEK) == b"x", 1e9)
        connect()
        assert second.recv(1) == b""  # the first one has said something
        assert acceptor.admit(first)
        assert not acceptor.admit(second)
        assert not acceptor.admit(first)
        connect()
        connect()
        assert third.recv(1) == b""
        assert lines(caplog) == ["test: a connection was refused: 3 connections have not authenticated"]
        now[0] += 61
        acceptor.expire()
        assert lines(caplog)[1:] == [
            "test: a connection was refused: it has not authenticated within 10 s "
            "(1 more since the last such line)"
        ]
        acceptor.close()


def test_too_few_descriptors_cost_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def gettimeout(self) -> float:
            return 0.001

        def fileno(self) -> int:
            return 9

        def accept(self) -> None:
            raise OSError(24, "Too many open files")

    acceptor = Acceptor(Full(), "test")  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        assert [acceptor.accept() for _ in range(5)] == [None] * 5
    assert [record.getMessage() for record in caplog.records] == [
        "test: a connection could not be accepted: [Errno 24] Too many open files"
    ]


FULL = """
import os, resource, select, socket, time
from mcr_plus.hosts.acceptor import Acceptor
listener = socket.create_server(("127.0.0.1", 0))
acceptor = Acceptor(listener, "test")
far = socket.create_connection(listener.getsockname())
poll = select.poll()
poll.register(listener, select.POLLIN)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (os.open(os.devnull, os.O_RDONLY) + 1, most))  # all are used
ends, polls = time.monotonic() + 1, 0
while time.monotonic() < ends:
    assert poll.poll(1000) and acceptor.accept() is None
    polls += 1
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
assert acceptor.accept() is not None
print(polls)
"""


def test_a_listener_that_never_blocks_is_polled_with_pauses_without_descriptors() -> None:
    answer = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) <= 50
