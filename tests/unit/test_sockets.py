"""Connections of other libraries: the watched ones, and their socket options."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.core.sockets import (
    End,
    accepted_in_silence,
    listener_among,
    of_peers,
    open_sockets,
    peer_of,
    shut_down,
    take_connections,
    torn,
    unacknowledged,
)

HERE = {"127.0.0.1"}


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return both ends of a connection over loopback."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        yield one, other


@pytest.mark.long
def test_a_peer_that_reads_nothing_is_not_silent() -> None:
    with connected() as (one, _):
        one.setblocking(False)
        try:
            while True:
                one.send(b"x" * 65536)
        except BlockingIOError:
            pass
        ends = time.monotonic() + 3  # probes of the closed window have pauses of 0.2, 0.4, 0.8, ... seconds
        while time.monotonic() < ends:
            assert unacknowledged(open_sockets(), 0.6, HERE) == ""
            time.sleep(0.05)


def test_idle_connections_to_the_given_hosts_are_probed() -> None:
    pair = socket.socketpair()  # to no host
    with connected() as (one, other), pair[0], pair[1], socket.create_server(("127.0.0.1", 0)) as listening:
        for hosts in (None, {"10.1.2.3"}):
            assert unacknowledged(open_sockets(), 0.6, hosts) == ""
            assert not one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert unacknowledged(open_sockets(), 0.6, HERE) == ""
        for each in (one, other):
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
            assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 127
        assert not listening.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_look_changes_nothing_of_a_socket() -> None:
    with connected() as (one, other):
        before = len(os.listdir("/proc/self/fd"))
        socket.setdefaulttimeout(5.0)
        try:
            assert unacknowledged(open_sockets(), 0.0) == ""
            assert of_peers(open_sockets().items(), "127.0.0.1").keys() == {one.fileno(), other.fileno()}
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(one.fileno())
        assert len(os.listdir("/proc/self/fd")) == before


def test_connections_that_have_ended_are_torn() -> None:
    for end in ("here", "there", "owner", "replaced"):
        with connected() as (one, other), socket.socket() as unused:
            sockets = {one.fileno(): os.readlink(f"/proc/self/fd/{one.fileno()}")}
            assert not torn(sockets)
            if end == "here":
                shut_down(sockets)
            elif end == "there":
                other.close()
            elif end == "owner":
                one.close()
            else:
                os.dup2(unused.fileno(), one.fileno())
            ends = time.monotonic() + 20
            while not torn(sockets) and time.monotonic() < ends:
                time.sleep(0.005)  # the end of a connection comes over loopback
            assert torn(sockets), end


def test_ends_of_both_families() -> None:
    with connected() as (one, other), open(os.devnull) as file:
        assert peer_of(one.fileno()) == End(*other.getsockname())
        assert peer_of(file.fileno()) is None
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server,
        socket.create_connection(("127.0.0.1", server.getsockname()[1])) as one,
        server.accept()[0] as other,
    ):
        assert peer_of(other.fileno()) == End(*one.getsockname())
        shut_down({other.fileno(): open_sockets()[other.fileno()]})
        assert one.recv(1) == b""


def test_a_listener_takes_connections_only_when_it_is_told_to() -> None:
    before = open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = listener_among(open_sockets().items() - before.items())
        assert listener.keys() == {server.fileno()}
        place = server.getsockname()
        with socket.create_connection(place) as old, server.accept()[0] as accepted:
            take_connections(listener, accepts=False)
            with pytest.raises(TimeoutError):
                socket.create_connection(place, timeout=0.3)
            old.sendall(b"x")  # open connections continue
            assert accepted.recv(1) == b"x"
            take_connections(listener, accepts=True)
            with socket.create_connection(place, timeout=20) as new, server.accept()[0] as silent:
                connections = {
                    each.fileno(): open_sockets()[each.fileno()] for each in (accepted, silent, old, new)
                }
                assert accepted_in_silence(connections, listener, 1).keys() == {silent.fileno()}
                assert accepted_in_silence(connections, listener, 2).keys() == {
                    silent.fileno(),
                    accepted.fileno(),
                }
        with socket.create_server(("127.0.0.1", 0)):
            assert listener_among(open_sockets().items() - before.items()) == {}


def strangers_at_gloo() -> list[int]:
    """Check that no stranger connects to gloo's port once a group is open; groups open as before."""
    before = open_sockets()
    comm = mcr.init(backends=["gloo"], timeout=60)
    (listener,) = (
        descriptor
        for descriptor, name in open_sockets().items() - before.items()
        if listener_among([(descriptor, name)]) and gloo_listens_at(descriptor)
    )
    place = gloo_listens_at(listener)
    assert place is not None
    sums, started = [], time.monotonic()
    for _ in range(2):
        for _ in range(5):
            with pytest.raises(TimeoutError):
                socket.create_connection(place, timeout=0.05)
        count = len(open_sockets())
        part = comm.split(0)
        assert part is not None
        with part:
            x = torch.tensor([1 + comm.rank])
            part.all_reduce(x)
            sums.append(int(x))
            part.barrier()
        assert len(open_sockets()) <= count
    assert time.monotonic() - started < 60
    mcr.finalize()
    return sums


def gloo_listens_at(descriptor: int) -> tuple[str, int] | None:
    """Return the address of a listening socket that is not the store's."""
    copy = socket.socket(fileno=os.dup(descriptor))
    with copy:
        place: tuple[str, int] = copy.getsockname()[:2]
    return place if place[1] != int(os.environ.get("MASTER_PORT", 0)) else None


def test_gloo_keeps_no_strangers() -> None:
    for result in run_ranks(strangers_at_gloo, 2, via="torch"):
        assert result.value == [3, 3]
