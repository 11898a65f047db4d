"""Connections of other libraries: which are looked at, and what is asked of the kernel."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from mcr_plus.core.sockets import open_sockets, unacknowledged


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over loopback."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        yield one, other


def test_connections_that_acknowledge_are_not_named() -> None:
    with connected() as (one, other):
        one.sendall(b"x" * 1000)
        assert unacknowledged(open_sockets(), 0.0) == ""
        # A closed window: the peer reads nothing, and its kernel answers all the same.
        one.setblocking(False)
        try:
            while True:
                one.send(b"x" * 65536)
        except BlockingIOError:
            pass
        assert unacknowledged(open_sockets(), 0.6) == ""
        assert other.recv(1000)


def test_idle_connections_are_probed_once_that_is_asked_for() -> None:
    pair = socket.socketpair()  # of no host
    with connected() as (one, other), pair[0], pair[1]:
        assert unacknowledged(open_sockets(), 0.6) == ""
        assert not one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert unacknowledged(open_sockets(), 0.6, probes=True) == ""
        for each in (one, other):
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
            assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 127
        assert not pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
