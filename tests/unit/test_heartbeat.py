"""The protocol of heartbeats, by the clock and network of this test: loss, delay, strangers, new agents."""

from __future__ import annotations

import heapq
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcr_plus.core.proc import read_stat, state_of
from mcr_plus.hosts import agent as agents
from mcr_plus.hosts.findings import Findings
from mcr_plus.hosts.protocol import (
    PERIOD,
    Heartbeat,
    RankFinding,
    ReceivedDatagram,
    State,
    distances,
    silence,
)
from mcr_plus.rendezvous.store_connections import release

KEY: Final = b"secret"
LATEST: Final = 0.05  # seconds that a datagram takes at most, where a test sets nothing else


class Network:
    """Agents of hosts with two ranks each, their clocks, and what is between them."""

    def __init__(self, hosts: int, seed: int = 0, *, loss: float = 0.0, latest: float = LATEST) -> None:
        self.ranks = [[2 * host, 2 * host + 1] for host in range(hosts)]
        self.random = random.Random(seed)
        self.loss, self.latest = loss, latest
        self.now = 0.0
        self.sent = [0] * hosts  # datagrams
        self.agents: dict[int, Heartbeat] = {host: self.agent(host) for host in range(hosts)}
        self.reaches: Callable[[int, int], bool] = lambda _, __: True
        self.pauses: dict[int, float] = {}  # until when an agent does not run
        self._turns = count()
        self._events: list[tuple[float, int, int, bytes | None]] = []
        for host in range(hosts):
            self._at(self.random.random() * PERIOD, host, None)

    def agent(self, host: int, heard: tuple[int, ...] = ()) -> Heartbeat:
        return Heartbeat(self.ranks, host, KEY, self.now, heard=heard)

    def _at(self, when: float, host: int, data: bytes | None) -> None:
        heapq.heappush(self._events, (when, next(self._turns), host, data))

    def tell(self, host: int) -> None:
        self.send(host, self.agents[host].all_targets(self.now))

    def send(self, host: int, targets: list[int], *, asks: bool = False) -> None:
        for target in targets:
            self.sent[host] += 1
            data = self.agents[host].datagram(self.now, asks=asks)
            if self.reaches(host, target) and self.random.random() >= self.loss:
                self._at(self.now + self.random.random() * self.latest, target, data)

    def run(self, seconds: float, watch: Callable[[], None] = lambda: None) -> None:
        ends = self.now + seconds
        while self._events[0][0] <= ends:
            when, _, host, data = heapq.heappop(self._events)
            self.now = when
            if self.pauses.get(host, 0.0) > when:
                self._at(self.pauses[host], host, data)
            elif host not in self.agents:
                if data is None:
                    self._at(when + PERIOD, host, None)
            elif data is None:
                self.send(host, self.agents[host].next_targets(when))
                self.send(host, self.agents[host].to_ask(when), asks=True)
                self._at(when + PERIOD, host, None)
                watch()
            else:
                received = self.agents[host].receive(data, when)
                self.send(host, [] if received.asked_by is None else [received.asked_by])
                if received.news:
                    self.tell(host)
        self.now = ends

    def states(self, host: int) -> dict[int, State]:
        return {rank: found.state for rank, found in self.agents[host].findings(self.now).items()}

    def seen(self, host: int, state: State) -> set[int]:
        return {rank for rank, found in self.states(host).items() if found == state}


HOSTS = [2, 3, 4, 8, 16]


@pytest.mark.parametrize("hosts", HOSTS)
def test_hosts_hear_of_each_other_and_send_ten_datagrams_a_second(hosts: int) -> None:
    network = Network(hosts)
    network.run(10.0)
    assert all(sent <= 101 for sent in network.sent)
    for host in range(hosts):
        assert set(network.states(host).values()) == {"running"}
        assert set(network.states(host)) == {rank for rank in range(2 * hosts) if rank // 2 != host}


@given(seed=st.integers(0, 1 << 16), hosts=st.sampled_from([2, 3, 4, 8]), loss=st.sampled_from([0.0, 0.02]))
def test_no_host_is_silent_despite_loss_and_datagrams_out_of_order(
    seed: int, hosts: int, loss: float
) -> None:
    network = Network(hosts, seed, loss=loss, latest=0.15)  # later than the next datagram
    network.run(2.0)

    def watch() -> None:
        assert not any(network.seen(host, "silent") for host in range(hosts))

    network.run(6.0, watch)


@given(seed=st.integers(0, 1 << 16), hosts=st.sampled_from(HOSTS), victim=st.integers(0, 1))
def test_a_death_is_known_everywhere_at_once(seed: int, hosts: int, victim: int) -> None:
    network = Network(hosts, seed)
    network.run(2.0)
    assert network.agents[0].observe({victim: "dead"})
    before = network.sent[:]
    network.tell(0)
    network.run(LATEST * len(distances(hosts)))
    for host in range(1, hosts):
        assert network.seen(host, "dead") == {victim}
    most = len(distances(hosts)) + 1 + len(distances(hosts)) * LATEST / PERIOD
    assert all(now - then <= most for now, then in zip(network.sent, before, strict=True))
    assert not network.agents[0].observe({victim: "dead"})


def test_a_rank_that_goes_on_is_running_again() -> None:
    network = Network(3)
    network.run(1.0)
    network.agents[0].observe({1: "stopped"})
    network.run(0.5)
    assert network.states(2)[1] == "stopped"
    network.agents[0].observe({})
    network.run(0.5)
    assert network.states(2)[1] == "running"


@pytest.mark.long
@given(
    seed=st.integers(0, 1 << 16), hosts=st.sampled_from(HOSTS), beyond=st.sets(st.integers(0, 15), min_size=1)
)
def test_both_sides_of_a_partition_name_the_ranks_beyond(seed: int, hosts: int, beyond: set[int]) -> None:
    side = {host for host in beyond if host < hosts} or {0}
    network = Network(hosts, seed)
    network.run(2.0)
    network.reaches = lambda one, other: (one in side) == (other in side)
    network.run(silence(hosts) + LATEST + 2 * PERIOD)
    for host in range(hosts):
        cut_off = {rank for rank in range(2 * hosts) if (rank // 2 in side) != (host in side)}
        assert network.seen(host, "silent") == cut_off
    network.reaches = lambda _, __: True
    network.run(2.0)
    assert not any(network.seen(host, "silent") for host in range(hosts))


def test_a_host_that_others_reach_is_not_silent_although_one_link_is_down() -> None:
    network = Network(4)
    network.run(2.0)
    network.reaches = lambda one, other: {one, other} != {0, 1}
    network.run(5.0)
    assert not any(network.seen(host, "silent") for host in range(4))


def test_a_host_never_heard_is_unknown_and_never_silent() -> None:
    network = Network(3)
    network.reaches = lambda one, other: 2 not in (one, other)  # a firewall
    network.run(5.0)
    assert network.states(0) == {2: "running", 3: "running", 4: "unknown", 5: "unknown"}


def test_a_host_that_has_said_good_bye_is_not_silent() -> None:
    network = Network(3)
    network.run(1.0)
    network.agents[1].observe({2: "dead"})
    network.agents[1].leave()
    network.tell(1)
    del network.agents[1]
    network.run(5.0)
    for host in (0, 2):
        assert network.states(host)[2] == "dead"
        assert network.states(host)[3] == "left"


@given(seed=st.integers(0, 1 << 16), hosts=st.sampled_from([2, 3, 8]))
def test_an_agent_that_was_kept_from_running_blames_nobody(seed: int, hosts: int) -> None:
    network = Network(hosts, seed)
    network.run(2.0)
    network.pauses[0] = network.now + 5.0  # as if its host had been suspended
    network.run(4.9)
    assert network.seen(1, "silent") == {0, 1}
    network.run(0.1 + 1e-6)
    assert not network.seen(0, "silent")
    network.run(2.0)
    assert not any(network.seen(host, "silent") for host in range(hosts))


def test_a_beat_that_has_waited_for_an_agent_may_be_as_old_as_that_has_not_run() -> None:
    one, other, third = (Heartbeat([[0], [1], [2]], host, KEY, 0.0) for host in range(3))
    other.receive(one.datagram(1.0), 1.5, since=1.1)
    assert other.findings(1.5)[0][1:] == pytest.approx((0.0, 0.4))
    third.receive(other.datagram(1.7), 1.7)  # also for those that it is passed on to
    assert third.findings(1.7)[0].most == pytest.approx(0.6)
    other.receive(one.datagram(1.8), 1.8)
    assert other.findings(1.8)[0] == RankFinding("running")


@pytest.mark.long
@given(seed=st.integers(0, 1 << 16), hosts=st.sampled_from([2, 3, 8]), dead=st.booleans())
def test_an_agent_that_is_replaced_goes_on(seed: int, hosts: int, dead: bool) -> None:
    network = Network(hosts, seed)
    network.run(2.0)
    if dead:
        network.agents[0].observe({1: "dead"})
        network.run(1.0)
    network.agents[0] = network.agent(0, tuple(range(1, hosts)))
    network.agents[0].observe({1: "dead"} if dead else {})

    def watch() -> None:
        assert not any(network.seen(host, "silent") for host in range(hosts))
        assert all(network.seen(host, "dead") == ({1} if dead else set()) for host in range(1, hosts))

    network.run(3.0, watch)
    network.reaches = lambda _, __: False  # also for what it has not heard itself
    network.agents[0] = network.agent(0, tuple(range(1, hosts)))
    network.run(silence(hosts) + 2 * PERIOD)
    assert network.seen(0, "silent") == set(range(2, 2 * hosts))


@given(data=st.binary(max_size=200))
def test_datagrams_of_strangers_change_nothing(data: bytes) -> None:
    agent = Heartbeat([[0], [1]], 0, KEY, 0.0)
    assert agent.receive(data, 1.0) == ReceivedDatagram()
    assert agent.findings(1.0)[1].state == "unknown"


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7), seed=st.integers(0, 100))
def test_changed_datagrams_and_those_of_another_secret_change_nothing(
    place: int, bit: int, seed: int
) -> None:
    agent, other = Heartbeat([[0], [1]], 0, KEY, 0.0), Heartbeat([[0], [1]], 1, KEY, 0.0)
    other.observe({1: "dead"})
    data = bytearray(other.datagram(1.0 + seed))
    right = bytes(data)
    data[place % len(data)] ^= 1 << bit
    assert agent.receive(bytes(data), 1.0) == ReceivedDatagram()
    stranger = Heartbeat([[0], [1]], 1, b"guessed", 0.0)
    stranger.observe({1: "dead"})
    assert agent.receive(stranger.datagram(1.0), 1.0) == ReceivedDatagram()
    assert agent.findings(1.0)[1].state == "unknown"
    assert agent.receive(right, 1.0).news
    assert agent.findings(1.0)[1].state == "dead"


def test_datagrams_that_are_sent_again_by_a_stranger_change_nothing() -> None:
    agent, other = Heartbeat([[0], [1]], 0, KEY, 0.0), Heartbeat([[0], [1]], 1, KEY, 0.0)
    other.observe({1: "dead"})
    old = other.datagram(1.0)
    other.observe({})
    agent.receive(other.datagram(1.1), 1.1)
    for now in (1.2, 1.4, 1.6, 1.75):
        assert agent.receive(old, now) == ReceivedDatagram()
    assert agent.findings(1.75)[1].state == "running"
    assert agent.findings(1.95)[1].state == "silent"


def test_datagrams_of_a_job_of_other_hosts_and_own_ones_are_ignored() -> None:
    agent = Heartbeat([[0], [1]], 0, KEY, 0.0)
    assert agent.receive(Heartbeat([[0], [1], [2]], 1, KEY, 0.0).datagram(1.0), 1.0) == ReceivedDatagram()
    assert agent.receive(Heartbeat([[0], [1]], 0, KEY, 0.0).datagram(1.0), 1.0) == ReceivedDatagram()
    assert agent.findings(1.0)[1].state == "unknown"


def test_sent_parts_are_small() -> None:
    hosts = [[8 * host + rank for rank in range(8)] for host in range(100)]
    assert len(Heartbeat(hosts, 0, KEY, 0.0).datagram(1.0)) < 1300


# -- clocks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_heartbeats_bound_the_difference_of_clocks(seed: int) -> None:
    chance = random.Random(seed)
    offsets = [chance.uniform(1.0, 1e5) for _ in range(2)]
    agents = [Heartbeat([[0, 1], [2, 3]], host, KEY, offsets[host]) for host in range(2)]
    assert agents[0].ahead() == {}
    fastest = [1.0, 1.0]  # of datagrams to each
    for turn in range(40):
        sender, sent, transit = turn % 2, 0.1 * turn, chance.uniform(50e-6, 1e-3)
        data = agents[sender].datagram(sent + offsets[sender])
        agents[1 - sender].receive(data, sent + transit + offsets[1 - sender])
        fastest[1 - sender] = min(fastest[1 - sender], transit)
    difference = offsets[0] - offsets[1]
    assert agents[0].ahead() == {2: pytest.approx(difference + fastest[0], abs=3e-6)}
    assert agents[1].ahead() == {0: pytest.approx(-difference + fastest[1], abs=3e-6)}


def test_the_difference_of_clocks_is_that_of_the_last_minutes() -> None:
    one, other = (Heartbeat([[0], [1]], host, KEY, 0.0) for host in range(2))
    for second in range(1, 400):
        drift = second * 1e-4  # by which the other clock is slow
        other.receive(one.datagram(float(second)), second + 0.001 - drift)
    ahead = other.ahead()[0]
    assert ahead == pytest.approx(0.001 - 399e-4, abs=2e-6)
    for second in range(400, 700):
        other.receive(one.datagram(float(second)), second + 0.001)  # it has been set
    assert other.ahead()[0] == pytest.approx(0.001, abs=1e-5)


# -- findings and processes -----------------------------------------------------------------------


def test_findings_are_read_by_others_until_the_agent_has_not_looked_for_long() -> None:
    memory = mmap.mmap(-1, Findings.size(4))
    findings = Findings(memory, 4)
    assert findings.of(2) == RankFinding("unknown")
    findings.publish([(2, RankFinding("silent", 0.75, 1.25)), (3, RankFinding("dead"))])
    assert findings.of(2) == RankFinding("silent", 0.75, 1.25)
    assert findings.of(3).state == "dead"
    findings._words[0] -= 3_000_000_000
    assert findings.of(2) == RankFinding("unknown")
    assert findings.last(2).state == "silent"
    assert findings.ahead(2) is None
    findings.publish_clocks({2: -12.5})
    assert (findings.ahead(2), findings.ahead(3)) == (-12.5, None)
    assert not findings.has_left(1)
    findings.leave(1)
    assert findings.has_left(1)
    findings.close()
    assert findings.of(2) == RankFinding("unknown")
    assert findings.ahead(2) is None


def test_states_of_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        stat = read_stat(child.pid)
        assert stat is not None
        assert state_of(child.pid, stat[1]) == "running"
        os.kill(child.pid, signal.SIGSTOP)
        _wait_for(lambda: state_of(child.pid, stat[1]) == "stopped")
        os.kill(child.pid, signal.SIGCONT)
        _wait_for(lambda: state_of(child.pid, stat[1]) == "running")
        assert state_of(child.pid, "1") == "dead"  # another process has its number
        child.kill()
        _wait_for(lambda: state_of(child.pid, stat[1]) == "dead")


def test_ranks_that_die_together_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that dies with them, before it has told of all, has told of none."""
    states, clock = {"a": "running", "b": "running", "c": "running"}, SimpleNamespace(now=1.0)
    monkeypatch.setattr(agents, "state_of", lambda _, started: states[started])
    monkeypatch.setattr(agents, "time", SimpleNamespace(monotonic=lambda: clock.now))
    link, other = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    with link, other:
        for each in (link, other):
            each.bind(("127.0.0.1", 0))
            each.setblocking(False)
        order = {
            "key": KEY.hex(),
            "hosts": [[0, 1, 2], [3]],
            "addresses": [each.getsockname() for each in (link, other)],
            "me": 0,
            "processes": {rank: [os.getpid(), started] for rank, started in enumerate(states)},
            "limit": 0.0,
        }
        working = agents.Agent(order, Findings(mmap.mmap(-1, Findings.size(4)), 4), link)
        assert not working._look()
        for now, dead in ((2.0, "a"), (2.005, "b")):
            clock.now, states[dead] = now, "dead"
            assert not working._look()
            working._send([1], now, asks=True)  # a beat would say that both run
            with pytest.raises(BlockingIOError):
                other.recv(1 << 16)
        clock.now = 2.0 + agents._TOGETHER
        assert not working._look()
        beyond = Heartbeat([[0, 1, 2], [3]], 1, KEY, clock.now)
        assert beyond.receive(other.recv(1 << 16), clock.now).news
        assert {rank: each.state for rank, each in beyond.findings(clock.now).items()} == {
            0: "dead",
            1: "dead",
            2: "running",
        }
        clock.now, states["c"] = 3.0, "dead"
        assert working._look()  # of all: at once, as nothing more can follow
        beyond.receive(other.recv(1 << 16), clock.now)
        assert beyond.findings(clock.now)[2].state == "dead"


@pytest.mark.parametrize("told", [True, False])
def test_datagrams_that_are_due_while_a_change_is_held_back_follow(
    monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """The beat of this host, its answer to another one, or its question: none of them is left out."""
    states, clock = {"a": "running", "b": "running"}, SimpleNamespace(now=1.0)
    monkeypatch.setattr(agents, "state_of", lambda _, started: states[started])
    monkeypatch.setattr(agents, "time", SimpleNamespace(monotonic=lambda: clock.now))
    links = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(3)]
    try:
        for each in links:
            each.bind(("127.0.0.1", 0))
            each.setblocking(False)
        order = {
            "key": KEY.hex(),
            "hosts": [[0, 1], [2], [3]],
            "addresses": [each.getsockname() for each in links],
            "me": 0,
            "processes": {rank: [os.getpid(), started] for rank, started in enumerate(states)},
            "limit": 0.0,
        }
        working = agents.Agent(order, Findings(mmap.mmap(-1, Findings.size(4)), 4), links[0])
        working._look()
        states["a"] = "stopped"
        working._look()
        working._send([2], clock.now, asks=True)
        working._send_waiting(clock.now)
        with pytest.raises(BlockingIOError):
            links[2].recv(1 << 16)
        if not told:
            states["a"] = "running"
        clock.now += agents._TOGETHER
        working._look()
        working._send_waiting(clock.now)
        beyond = Heartbeat([[0, 1], [2], [3]], 2, KEY, clock.now)
        asked = [
            beyond.receive(links[2].recv(1 << 16), clock.now).asked_by
            for _ in range(2 if told else 1)  # the change, which goes to all at once, before it
        ]
        assert asked[-1] == 0
        assert beyond.findings(clock.now)[0].state == ("stopped" if told else "running")
        working._send_waiting(clock.now)
        with pytest.raises(BlockingIOError):
            links[2].recv(1 << 16)
    finally:
        for each in links:
            each.close()


def _wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_connections_to_a_server_are_released_and_no_others() -> None:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    clients = [socket.create_connection(server.getsockname()) for server in servers]
    try:
        assert release("localhost", servers[0].getsockname()[1]) == 1
        assert clients[0].recv(1) == b""
        clients[1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            clients[1].recv(1)
        assert release("", 0) == 0
    finally:
        for each in (*servers, *clients):
            each.close()
