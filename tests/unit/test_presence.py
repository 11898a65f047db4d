"""Connections by which ranks of different hosts see each other's end in `init`; all ends in this process."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import pytest

from mcr_plus.core.environment import on_one_host
from mcr_plus.core.proc import read_stat
from mcr_plus.hosts import stop_detector
from mcr_plus.hosts.handshake import greeting
from mcr_plus.hosts.stop_detector import REPORT, StopDetector
from mcr_plus.membership.rules import Process
from mcr_plus.rendezvous import arrivals, init_connections
from mcr_plus.rendezvous.arrivals import JobArrivals
from mcr_plus.rendezvous.identity import DIED, STOPPED
from mcr_plus.rendezvous.init_connections import InitConnections

STORE: Final[Any] = SimpleNamespace(host="192.0.2.1", port=1)  # not on loopback, as that of several hosts


@pytest.fixture(autouse=True)
def of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All presences are open at a time, and loopback is the network."""
    monkeypatch.setattr(init_connections, "meeting_address", lambda: "127.0.0.1")
    monkeypatch.setattr(init_connections, "on_one_host", lambda *, ranks: False)
    monkeypatch.setattr(init_connections, "settle", lambda: None)


@contextmanager
def job(size: int) -> Iterator[list[InitConnections]]:
    ranks = [InitConnections(math.inf) for _ in range(size)]
    address = ranks[0].listen("name", STORE, size)
    assert address is not None
    for rank in range(1, size):
        ranks[rank].connect(address, "name", rank, STORE)
    yield ranks
    for each in ranks:
        each.close()


def die(rank: InitConnections) -> None:
    """As the kernel ends the connections of a process."""
    with rank._lock:  # a thread of this process may look at them, as none does in a process that ends
        for link in (*rank._links.values(), *(rank._door.strangers if rank._door is not None else ())):
            link.close()
        rank._links.clear()
        if rank._door is not None:
            rank._door.strangers.clear()


def address_of(rank: InitConnections) -> tuple[str, int]:
    assert rank._door is not None
    host, port = rank._door.listener.getsockname()
    return host, port


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_rank_0_sees_the_end_of_each_and_each_that_of_rank_0() -> None:
    with job(4) as ranks:
        assert [each.lost() for each in ranks] == [{}] * 4
        die(ranks[2])
        wait_for(lambda: [each.lost() for each in ranks] == [{2: DIED}, {}, {}, {}])
        die(ranks[0])
        wait_for(lambda: [each.lost() for each in ranks[1:]] == [{0: DIED}, {}, {0: DIED}])


def test_a_death_before_the_first_look_is_seen() -> None:
    with job(3) as ranks:
        die(ranks[1])
        wait_for(lambda: ranks[0].lost() == {1: DIED})


def test_a_rank_that_has_its_world_is_not_lost() -> None:
    with job(3) as ranks:
        ranks[1].close()
        assert [each.lost() for each in ranks] == [{}] * 3
        ranks[0].close()  # which has not looked at rank 2 before
        assert ranks[2].lost() == {}


def test_another_process_may_take_the_place_of_a_lost_rank() -> None:
    with job(2) as ranks:
        die(ranks[1])
        wait_for(lambda: ranks[0].lost() == {1: DIED})
        ranks[0].forget(1)
        ranks[1].connect((address_of(ranks[0]), None), "name", 1, STORE)
        assert ranks[0].lost() == {}
        die(ranks[1])
        wait_for(lambda: ranks[0].lost() == {1: DIED})


@pytest.mark.parametrize("name", ["another", None])
def test_strangers_are_no_ranks(name: str | None) -> None:
    """One that has not read the job's store, or another program."""
    with job(2) as ranks:
        address = address_of(ranks[0])
        if name is None:
            with socket.create_connection(address) as link:
                link.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert ranks[0].lost() == {}
        else:
            stranger = InitConnections(math.inf)
            stranger.connect((address, None), name, 1, STORE)
            assert ranks[0].lost() == {}
            die(stranger)
            stranger.close()
        assert ranks[0].lost() == {}


def test_a_launcher_of_fewer_ranks_says_nothing_of_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one task of srun on each host, which starts ranks itself."""
    by_torch = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    monkeypatch.setattr(init_connections, "on_one_host", partial(on_one_host, by_torch))
    assert InitConnections(math.inf).listen("name", STORE, 2) is None
    rank = InitConnections(math.inf)
    assert rank.listen("name", STORE, 4) is not None
    rank.close()


def test_a_job_on_one_host_and_one_without_a_network_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert InitConnections(math.inf).listen("name", SimpleNamespace(host="127.0.0.1"), 2) is None  # type: ignore[arg-type]
    monkeypatch.setattr(init_connections, "meeting_address", lambda: "192.0.2.1")  # of another host
    assert InitConnections(math.inf).listen("name", STORE, 2) is None
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        rank = InitConnections(math.inf)
        rank.connect((nobody.getsockname(), None), "name", 1, STORE)
        assert rank.lost() == {}


@pytest.mark.parametrize("first", [1, 4, 19])
def test_a_greeting_may_come_in_pieces(first: int) -> None:
    """As TCP may deliver it."""
    with job(2) as ranks, socket.create_connection(address_of(ranks[0])) as link:
        ranks[1].close()
        said = greeting(ranks[0]._key, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(said[:first])
        wait_for(lambda: ranks[0].lost() == {} and first in map(len, _strangers(ranks[0])))
        link.sendall(said[first:])
        wait_for(lambda: ranks[0].lost() == {} and not _strangers(ranks[0]))
        assert list(ranks[0]._links) == [1]
        link.close()
        wait_for(lambda: ranks[0].lost() == {1: DIED})


def _strangers(rank: InitConnections) -> list[bytes]:
    return [] if rank._door is None else list(rank._door.strangers.values())


def test_a_stranger_that_leaves_within_its_greeting_is_forgotten() -> None:
    with job(2) as ranks:
        with socket.create_connection(address_of(ranks[0])) as link:
            link.sendall(b"abc")
        wait_for(lambda: ranks[0].lost() == {} and not _strangers(ranks[0]))


def test_beats_that_were_not_read_do_not_hide_that_a_rank_has_its_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel resets a connection that is closed while something on it has not been read."""
    monkeypatch.setattr(init_connections, "_BEAT_EVERY", 0.0)
    with job(3) as ranks:
        for _ in range(100):
            assert [each.lost() for each in ranks] == [{}] * 3
            ranks[0].lost()
        ranks[1].close()
        for _ in range(100):
            assert [each.lost() for each in ranks] == [{}] * 3
        ranks[0].lost()
        ranks[0].close()
        assert ranks[2].lost() == {}


def test_a_process_beside_a_rank_says_that_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks are other processes here; that of rank 1 is stopped and goes on."""
    rank_0, rank_1 = (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in "01"
    )
    pid = [rank_0.pid]
    monkeypatch.setattr(init_connections, "read_stat", lambda _: read_stat(pid[0]))
    monkeypatch.setattr(init_connections, "os", SimpleNamespace(getpid=lambda: pid[0]))
    try:
        first, second = InitConnections(0.2), InitConnections(0.2)
        listening = first.listen("name", STORE, 2)
        assert listening is not None
        assert listening[1] is not None
        pid[0] = rank_1.pid
        second.connect(listening, "name", 1, STORE)
        for victim, watching in ((rank_1, first), (rank_0, second)):
            number = 1 if victim is rank_1 else 0
            victim.send_signal(signal.SIGSTOP)
            wait_for(lambda: watching.lost() == {number: STOPPED})  # noqa: B023 - within the turn
            victim.send_signal(signal.SIGCONT)
            wait_for(lambda: watching.lost() == {})  # noqa: B023
        processes = [each._witness._process for each in (first, second) if each._witness is not None]
        rank_1.kill()
        rank_1.wait()
        wait_for(lambda: processes[1].poll() is not None)
        assert first.lost() == {}, "the end of a witness says nothing of its rank"
        first.dismiss_witness()
        assert processes[0].poll() is not None
        assert first.lost() == {}
        second.close()
        first.close()
        assert all(each.poll() is not None for each in processes)
    finally:
        for each in (rank_0, rank_1):
            each.kill()
            each.communicate()


def test_a_program_that_wants_no_stop_to_count_has_no_witness() -> None:
    """`dispatch: {stopped: wait}`, as for a debugger."""
    with job(2) as ranks:
        assert [each._witness for each in ranks] == [None, None]


def witness_of_this_process(control: socket.socket) -> StopDetector:
    own = read_stat(os.getpid())
    assert own is not None
    order = {"process": (os.getpid(), own[1]), "rank": 0, "key": "", "grace": 0.5, "address": None}
    control.setblocking(False)
    return StopDetector(order, control, None)


def test_a_rank_that_does_not_listen_hears_of_all_stops_later() -> None:
    """Ranks of a host are stopped together, and the kernel holds so many reports and no more."""
    ranks = range(1, 41)
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    its.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least that there is
    found = witness_of_this_process(its)
    ends = {rank: socket.socketpair() for rank in ranks}
    for rank, (far, near) in ends.items():
        near.setblocking(False)
        found._links[rank] = near
        far.send(b"s")
    thread = threading.Thread(target=found.run, daemon=True)
    thread.start()
    wait_for(lambda: not any(init_connections._unacknowledged(far) for far, _ in ends.values()))
    heard = set[int]()
    own.settimeout(30)
    while heard != set(ranks):
        rank, is_stopped = REPORT.unpack(own.recv(REPORT.size))
        assert is_stopped
        heard.add(rank)
    own.close()
    thread.join(20)
    assert not thread.is_alive()
    for each in (its, *(link for pair in ends.values() for link in pair)):
        each.close()


def test_a_stop_of_the_witness_itself_is_no_stop_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a scheduler suspends a job: the one that goes on first sees the other stopped still."""
    now = 100.0
    monkeypatch.setattr(stop_detector, "time", SimpleNamespace(monotonic=lambda: now))
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own, its:
        found = witness_of_this_process(its)
        verdicts = []
        for now in (100.0, 200.0, 200.1, 200.4, 200.6):  # noqa: B007 - what the clock shows
            found._judge(True)
            verdicts.append(found._is_stopped)
        assert verdicts == [False, False, False, False, True]
        found._judge(False)
        assert not found._is_stopped


def test_a_stop_of_this_rank_itself_is_no_stop_of_one_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(arrivals, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(arrivals, "state_of", lambda *_: "stopped")
    found = JobArrivals(0, 2)
    found.processes[1] = Process(*found.own)
    verdicts = []
    for now in (100.0, 200.0, 200.1, 200.4, 200.6):  # noqa: B007
        error = found.error()
        verdicts.append(error is not None)
    assert verdicts == [False, False, False, False, True]


def test_a_process_forked_in_init_does_not_hide_the_end_of_its_parent() -> None:
    with job(2) as ranks:
        assert [each.lost() for each in ranks] == [{}] * 2
        for each in ranks:
            init_connections._open.append(each)
        ready, go = os.pipe()
        if (child := os.fork()) == 0:
            os.close(go)
            os.read(ready, 1)  # until the parent has ended
            os._exit(0)
        os.close(ready)
        try:
            die(ranks[1])
            wait_for(lambda: ranks[0].lost() == {1: DIED})
        finally:
            os.close(go)
            os.waitpid(child, 0)
            init_connections._open.clear()


def test_a_kernel_without_a_limit_of_silence_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "TCP_USER_TIMEOUT", 250)  # an option that no kernel has
    with job(2) as ranks:
        assert [each.lost() for each in ranks] == [{}] * 2
        die(ranks[1])
        wait_for(lambda: ranks[0].lost() == {1: DIED})
