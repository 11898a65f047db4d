"""`ReplicatedKeys` on keepers: real ones in processes of their own, whose deaths lose nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import DistError

from mcr_plus.core.proc import read_stat
from mcr_plus.hosts.key_replica import COMPARE_SET, TOKEN, KeyReplica
from mcr_plus.rendezvous.key_replicas import ReplicatedKeys, _ReplicaConnection, _start

TOKENS = bytes(range(TOKEN))


def _me() -> tuple[int, str]:
    stat = read_stat(os.getpid())
    assert stat is not None
    return os.getpid(), stat[1]


def _listening(port: int) -> int:
    """The process that listens on a port of loopback."""
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    (line,) = [line for line in lines if f"127.0.0.1:{port} " in line]
    return int(line.partition("pid=")[2].partition(",")[0])


def _kill(pid: int) -> None:
    """Kill a process and wait until it has ended, and its connections with it."""
    os.kill(pid, signal.SIGKILL)
    _wait_until_ended(pid)


def _wait_until_ended(*pids: int) -> None:
    ends = time.monotonic() + 30
    while any((stat := read_stat(pid)) is not None and stat[0] not in "ZX" for pid in pids):
        assert time.monotonic() < ends
        time.sleep(0.005)


class Kept:
    """Two keepers, in the order of their places."""

    def __init__(self) -> None:
        self.addresses: list[tuple[str, int]] = []
        self.pids: list[int] = []
        self.stores: list[ReplicatedKeys] = []
        for _ in range(2):
            address, started = _start({"token": TOKENS.hex(), "processes": [_me()]}, "127.0.0.1")
            assert address is not None
            assert started is not None
            started.wait()
            self.addresses.append(address)
            self.pids.append(_listening(address[1]))

    def store(self) -> ReplicatedKeys:
        keepers = [
            _ReplicaConnection(f"host {number}", each, TOKENS) for number, each in enumerate(self.addresses)
        ]
        self.stores.append(ReplicatedKeys(keepers, "part", (*_me(), "host 0")))
        return self.stores[-1]


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    for store in made.stores:
        store.close()
    for pid in made.pids:
        stat = read_stat(pid)
        if stat is not None and b"keeper" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def test_a_store(kept: Kept) -> None:
    one, other = kept.store(), kept.store()
    assert not one.check(["a"])
    one.set("a", "1")
    one.set("b", b"\0" * 100_000)
    assert (other.get("a"), other.get("b")) == (b"1", b"\0" * 100_000)
    assert one.check(["a", "b"])
    assert [one.add("n", 2), other.add("n", 3), one.add("n", 0)] == [2, 5, 5]
    assert other.compare_set("c", "", "mine") == b"mine"
    assert one.compare_set("c", "", "yours") == b"mine"
    assert not one.part("another").check(["a"])
    with pytest.raises(ValueError, match="only be written where there is none"):
        one.compare_set("c", "mine", "yours")


@pytest.mark.parametrize("dies", [0, 1])
def test_written_values_outlive_a_keeper(kept: Kept, dies: int) -> None:
    one, other = kept.store(), kept.store()
    assert one.compare_set("decision", "", "first") == b"first"
    other.check(["decision"])
    os.kill(kept.pids[dies], signal.SIGKILL)
    assert one.get("decision") == b"first"
    assert other.compare_set("decision", "", "second") == b"first"
    _wait_until_ended(kept.pids[dies])
    _kill(kept.pids[1 - dies])
    with pytest.raises(DistError, match="no keeper of the ranks' decisions"):
        one.check(["decision"])


def test_a_writer_between_two_keepers_is_given_what_others_have_decided(kept: Kept) -> None:
    """One that has reached the first keeper alone, which then dies, learns it from the second."""
    late = _ReplicaConnection("host 0", kept.addresses[0], TOKENS)
    assert late.ask(COMPARE_SET, b"part/decision", b"late", lambda: False) == b"late"
    late.close()
    _kill(kept.pids[0])
    assert kept.store().compare_set("decision", "", "theirs") == b"theirs"
    assert kept.store().compare_set("decision", "", "late") == b"theirs"


def test_all_writers_get_one_answer(kept: Kept) -> None:
    answers: list[bytes] = []

    def write(number: int) -> None:
        answers.append(kept.store().compare_set("decision", "", f"of {number}"))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert len(set(answers)) == 1


def test_a_host_that_is_cut_off_is_left_out_and_comes_back(kept: Kept) -> None:
    store, cut = kept.store(), {"host 1"}
    store.watch(lambda place: place in cut, {"host 0", "host 1"})
    store.set("a", "1")
    cut.clear()
    _kill(kept.pids[0])
    assert not store.check(["a"]), "the second keeper has not got it"


def test_a_stopped_keeper_is_waited_for_until_its_host_is_silent(kept: Kept) -> None:
    store, cut = kept.store(), set[str]()
    store.watch(lambda place: place in cut, {"host 0", "host 1"})
    store.set("a", "1")
    os.kill(kept.pids[1], signal.SIGSTOP)
    began = time.monotonic()
    threading.Timer(0.3, cut.add, ["host 1"]).start()
    assert store.get("a") == b"1"
    assert 0.2 < time.monotonic() - began < 20


def test_strangers_and_nonsense_are_dropped(kept: Kept) -> None:
    for text in (b"\0" * TOKEN, TOKENS + b"\x01" + b"\xff" * 8):
        with socket.create_connection(kept.addresses[0], 5) as link:
            link.sendall(text)
            assert link.recv(1) == b""
    assert not kept.store().check(["a"]), "it answers others as before"


def test_a_keeper_ends_once_its_ranks_have_left_or_died(kept: Kept) -> None:
    kept.store().leave()
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(program) as rank:
        stat = read_stat(rank.pid)
        assert stat is not None
        order = {"token": TOKENS.hex(), "processes": [(rank.pid, stat[1])]}
        address, started = _start(order, "127.0.0.1")
        assert address is not None
        assert started is not None
        started.wait()
        pid = _listening(address[1])
        assert pid not in kept.pids
        rank.kill()
    _wait_until_ended(pid, kept.pids[0])
    assert read_stat(kept.pids[1]) is not None, "the rank has left the keeper of its own host"


def test_requests_by_themselves() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        keeper = KeyReplica(json.loads('{"token": "00", "processes": []}'), listener)
        assert keeper.answer(COMPARE_SET, b"k", b"1") == b"1"
        assert keeper.answer(COMPARE_SET, b"k", b"2") == b"1"
        keeper.run()  # without ranks it ends at once
