"""Connections of this process that C++ libraries have opened, and keep to themselves."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Mapping
from typing import Final

# Of `struct tcp_info` in Linux's include/uapi/linux/tcp.h: tcpi_probes (without an answer), tcpi_backoff,
# tcpi_unacked, tcpi_last_ack_recv (milliseconds since the last acknowledgement) and tcpi_notsent_bytes. A
# peer that is slow or stopped acknowledges, or answers probes of its closed window, which count as
# acknowledgements.
_INFO: Final = struct.Struct("=3xBB3x16xI28xI84xI")
_PROBES: Final = 2  # without an answer, of an idle connection; one may be on its way

Sockets = Mapping[int, str]
"""File descriptor → the kernel's name of the socket, which is never used again for another one."""


def open_sockets() -> dict[int, str]:
    """The sockets of this process."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


def of_peers(sockets: Iterable[tuple[int, str]], address: str) -> dict[int, str]:
    """Those that are TCP connections whose own end has this address."""
    return {descriptor: name for descriptor, name in sockets if _is_peers(descriptor, address)}


def _is_peers(descriptor: int, address: str) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            is_tcp = connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM
            return is_tcp and connection.getsockname()[0] == address and bool(connection.getpeername())
    except OSError:  # no connection
        return False


def shut_down(sockets: Sockets) -> None:
    """End the connections of these sockets, where they are still open; their owner closes them."""
    for descriptor, name in sockets.items():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == name:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def unacknowledged(sockets: Sockets, seconds: float, *, probes: bool = False) -> str:
    """A peer that has not acknowledged for so long what it was sent, and sent again; empty if all have.

    With `probes`, also one that does not answer when nothing is sent: connections are probed from now on, by
    the kernel, once a second while they are idle.
    """
    for descriptor, name in sockets.items():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") != name:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
                probed, backoff, unacked, since, unsent = _INFO.unpack(info.ljust(_INFO.size, b"\0"))
                asked = (backoff and (unacked or unsent)) or (probes and probed >= _PROBES)
                if asked and since >= 1e3 * seconds:
                    return str(connection.getpeername()[0])
                if probes and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                    _probe(connection)
    return ""


def _probe(connection: socket.socket) -> None:
    """Have the kernel probe a connection once a second while it is idle, and hold on to it for long."""
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 127)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
