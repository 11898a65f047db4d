"""Connections of this process that C++ libraries have opened, and keep to themselves."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Mapping
from typing import Final

# Of `struct tcp_info` in Linux's include/uapi/linux/tcp.h: tcpi_backoff, tcpi_unacked and tcpi_last_ack_recv
# (milliseconds since the last acknowledgement). A peer that is slow or stopped acknowledges, or answers
# probes of its closed window, which count as acknowledgements.
_INFO: Final = struct.Struct("=4xB3x16xI28xI")

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


def unacknowledged(sockets: Sockets, seconds: float) -> str:
    """A peer that has not acknowledged for so long what it was sent, and sent again; empty if all have."""
    for descriptor, name in sockets.items():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") != name:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
                backoff, unacked, since = _INFO.unpack(info)
                if backoff and unacked and since >= 1e3 * seconds:
                    return str(connection.getpeername()[0])
    return ""
