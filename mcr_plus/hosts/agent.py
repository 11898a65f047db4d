"""The agent of a host: a process that watches the host's ranks and exchanges heartbeats with other agents.

`mcr.init` starts it in jobs on several hosts. It is a process of its own, so that a rank that computes or
holds the GIL does not keep it from running. It imports only the standard library, is not tied to the rank
that started it, and ends when the ranks of its host have ended. It consists of two processes that replace
each other, so that the death of one is not taken for the death of the host.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from mcr_plus.core.proc import state_of
from mcr_plus.hosts.arguments import taken_order
from mcr_plus.hosts.dump_relay import DumpRelay
from mcr_plus.hosts.dump_request import ask, received
from mcr_plus.hosts.findings import Findings
from mcr_plus.hosts.page import Page
from mcr_plus.hosts.page_exchange import HOSTS, ROOM, Datagram, PageExchange
from mcr_plus.hosts.protocol import PERIOD, Heartbeat, State

_LOOK_EVERY: Final = PERIOD / 2  # s between checks of processes, since nothing announces a stop
_TOGETHER: Final = 0.02
"""Seconds for which a change is held back. If a whole host ends, its ranks end one after another, and then
the agent. Without the delay, other hosts would hear only of the first ranks before the host is silent.
"""
_GOOD_BYES: Final = (0.0, 0.02, 0.04)  # s before each of the last datagrams, as some may be lost
_LARGEST: Final = 1 << 16  # bytes of a datagram
_BURST: Final = 1000  # datagrams received between two checks
_RESTARTS: Final = 20  # restarts of the working process within a minute
_NICE: Final = -15


class Agent:
    """The working process of a host's agent.

    `order` is written by `mcr_plus.rendezvous.heartbeats`: the `key` of the signatures (hexadecimal), the
    ranks of all `hosts` and the `addresses` of their agents (null without one), the number of this host
    (`me`), process and start time of each of its ranks (`processes`), the `limit` of silence in seconds (0
    for the default), and the `job` and `version` on status pages. `page`: this agent's page, None for none.
    """

    def __init__(
        self,
        order: Mapping[str, Any],
        findings: Findings,
        link: socket.socket,
        page: Page | None = None,
        requests: socket.socket | None = None,
    ) -> None:
        """`requests`: socket for dump requests of this host's ranks to other ranks; None if there is none."""
        hosts: list[list[int]] = order["hosts"]
        self._findings, self._link = findings, link
        self._addresses = [None if each is None else tuple(each) for each in order["addresses"]]
        self._own = {int(rank): (pid, started) for rank, (pid, started) in order["processes"].items()}
        self._others = [rank for ranks in hosts for rank in ranks if rank not in self._own]
        known = [{findings.last(rank).state for rank in ranks} for ranks in hosts]
        heard = [
            number
            for number, states in enumerate(known)
            if number != order["me"] and not states <= {"unknown", "left"}
        ]
        key, now = bytes.fromhex(order["key"]), time.monotonic()
        self._heartbeat = Heartbeat(hosts, order["me"], key, now, limit=order["limit"], heard=heard)
        self._emptied = now  # time at which all datagrams had been received
        self._told: dict[int, State] | None = None  # published states of ranks not running
        self._changed: float | None = None  # time of the first unpublished change
        self._waiting: set[int] = set()  # hosts that get a datagram once the change is published
        self._asking = False  # whether one of these datagrams asks for an answer
        self._relay, self._requests = DumpRelay(len(hosts), order["me"], key), requests
        self._exchange: PageExchange | None = None
        if page is not None:
            own = {rank: pid for rank, (pid, _) in self._own.items()}
            self._exchange = PageExchange(len(hosts), order["me"], key, order["job"], own, page)
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        if requests is not None:
            self._poll.register(requests, select.POLLIN)
        self._watched: dict[int, int] = {}  # pidfd → rank: each announces the end of a process
        for rank, (pid, _) in self._own.items():
            with contextlib.suppress(OSError, AttributeError):  # without pidfds, periodic checks do
                descriptor = os.pidfd_open(pid)
                self._watched[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)

    def run(self, supervisor: int) -> bool:
        """Work until all ranks of this host have ended; return False if the supervising process has."""
        next_beat = time.monotonic()
        while os.getppid() == supervisor:
            ended = self._look()
            now = time.monotonic()
            if ended:
                self._say_good_bye()
                return True
            self._send_waiting(now)
            if now >= next_beat:
                self._send(self._heartbeat.next_targets(now), now)
                next_beat = max(next_beat + PERIOD, now)
            self._send(self._heartbeat.to_ask(now), now, asks=True)
            self._findings.publish(self._heartbeat.findings(now).items())
            self._findings.publish_clocks(self._heartbeat.ahead())
            self._pass_requests_on(now)
            if self._exchange is not None:
                self._send_each(self._exchange.step(now))
            until = min(next_beat, now + _LOOK_EVERY, self._heartbeat.next_silence(now))
            if self._changed is not None:
                until = min(until, self._changed + _TOGETHER)
            self._sleep(until - now)
            self._receive()
        return False

    def _look(self) -> bool:
        """Check the ranks of this host, and report changes to other hosts; return whether all have ended.

        The first result is published at once: the agent may replace an agent that had published it.
        """
        states: dict[int, State] = {}
        ended = True
        for rank, (pid, started) in self._own.items():
            state = state_of(pid, started)
            if state != "running" and not self._findings.has_left(rank):
                states[rank] = state
            ended &= state == "dead" or self._findings.has_left(rank)
        now = time.monotonic()
        if states == self._told:
            self._changed = None
        elif self._told is None or ended or now - (self._changed or now) >= _TOGETHER:
            self._told, self._changed = states, None
            if self._heartbeat.observe(states):
                self._tell_all()
        else:
            self._changed = self._changed or now
        return ended

    def _say_good_bye(self) -> None:
        self._heartbeat.leave()
        for pause in _GOOD_BYES:
            time.sleep(pause)
            self._tell_all()

    def _sleep(self, seconds: float) -> None:
        """Sleep until a datagram arrives or a rank ends, for at most `seconds`."""
        for descriptor, _ in self._poll.poll(max(1, seconds * 1e3)):
            if descriptor in self._watched:
                self._poll.unregister(descriptor)
                del self._watched[descriptor]
                os.close(descriptor)

    def _receive(self) -> None:
        """Receive the datagrams that have arrived, answer them, and pass news on."""
        news, targets = False, set[int]()
        for _ in range(_BURST):
            now = time.monotonic()
            try:
                data = self._link.recv(_LARGEST)
            except OSError:
                self._emptied = now
                break
            if self._exchange is not None and (answers := self._exchange.receive(data, now)) is not None:
                self._send_each(answers)
                continue
            if (request := self._relay.receive(data, now)) is not None:
                if request:
                    ask((pid for pid, _ in self._own.values()), request)
                continue
            heard = self._heartbeat.receive(data, time.monotonic(), self._emptied)
            news |= heard.news
            if heard.asked_by is not None:
                targets.add(heard.asked_by)
        now = time.monotonic()
        self._send(sorted(targets.union(self._heartbeat.all_targets(now) if news else ())), now)

    def _pass_requests_on(self, now: float) -> None:
        for text in received(self._requests) if self._requests is not None else ():
            self._send_each(self._relay.ask(text, now))
        self._send_each(self._relay.step(now))

    def _tell_all(self) -> None:
        now = time.monotonic()
        self._send(self._heartbeat.all_targets(now), now)

    def _send_each(self, datagrams: Iterable[Datagram]) -> None:
        for host, data in datagrams:
            address = self._addresses[host]
            if address is not None:
                with contextlib.suppress(OSError):
                    self._link.sendto(data, address)

    def _send_waiting(self, now: float) -> None:
        """Send the datagrams that `_send` has delayed, unless the change is still held back."""
        if self._waiting and self._changed is None:
            waiting, self._waiting, asks, self._asking = self._waiting, set(), self._asking, False
            self._send(sorted(waiting), now, asks=asks)

    def _send(self, hosts: list[int], now: float, *, asks: bool = False) -> None:
        """Send all findings: now, or later if a change is held back.

        A beat sent in between would claim that there is no change.
        """
        if self._changed is not None:
            self._waiting.update(hosts)
            self._asking |= asks and bool(hosts)
            return
        data = self._heartbeat.datagram(now, asks=asks) if hosts else b""
        for host in hosts:
            address = self._addresses[host]
            if address is not None:
                with contextlib.suppress(OSError):  # the link may be down
                    self._link.sendto(data, address)


def supervise(work: Callable[[int], bool]) -> None:
    """Run `work(pid of this process)` in a child until it returns True; restart it if the child dies.

    `work` returns False when its supervisor has died: then the child replaces it. Never returns.
    """
    starts: list[float] = []
    while len(starts) < _RESTARTS:
        now = time.monotonic()
        starts = [each for each in starts if now - each < 60.0] + [now]
        me = os.getpid()
        child = os.fork()
        if child == 0:
            if work(me):
                os._exit(0)
            continue  # replaces the supervisor
        if _outcome(child) == 0:
            os._exit(0)
    os._exit(1)


def _outcome(child: int) -> int:
    """Return a child's exit status; kill a stopped child, which would look like a dead host."""
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return status
        os.kill(child, signal.SIGKILL)


def _run_before_others() -> None:
    """Let this process run at once, if permitted, on cores that other processes keep busy.

    A priority among ordinary processes (`nice`) would count only within this session, which the scheduler
    treats as one process (autogroup). The agent runs for a small part of the time.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.nice(_NICE)


def main() -> None:
    """Read an order from standard input, and run this host's agent; the started process itself ends."""
    order = taken_order()
    if os.fork():
        os._exit(0)  # the agent is nobody's child, so no rank has to wait for it
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.close(nothing)
    _run_before_others()
    ranks = sum(map(len, order["hosts"]))
    findings = Findings(mmap.mmap(order["memory"], Findings.size(ranks)), ranks)
    link = socket.socket(fileno=order["socket"])
    link.setblocking(False)
    requests = None if order["requests"] is None else socket.socket(fileno=order["requests"])
    if requests is not None:
        requests.setblocking(False)
    with contextlib.suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 6)  # not behind the job's own data
    page: Page | None = None
    with contextlib.suppress(OSError, AttributeError):  # without this page, top does not show other hosts
        page = Page({"job": order["job"]}, order["version"], name=HOSTS, room=ROOM)
    supervise(lambda supervisor: Agent(order, findings, link, page, requests).run(supervisor))
