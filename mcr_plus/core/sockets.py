"""Connections of this process that are opened and owned by others, such as C++ libraries.

They are accessed through their descriptors with the C library: a Python socket object on a copy of the
descriptor would change the shared flags (`socket.setdefaulttimeout`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

# Fields of `struct tcp_info` in Linux's include/uapi/linux/tcp.h: tcpi_probes (unanswered probes of a closed
# window or an idle connection), tcpi_backoff, tcpi_unacked, and tcpi_last_ack_recv (milliseconds since the
# last acknowledgement). The kernel acknowledges and answers probes even if the process is slow or stopped.
_INFO: Final = struct.Struct("=3xBB3x16xI28xI")
_RECEIVED: Final = struct.Struct("=128xQ")  # tcpi_bytes_received, Linux 4.1 and later
_ESTABLISHED: Final = 1  # tcpi_state, the first byte
_PROBES: Final = 2  # unanswered probes; the answer to a single one may be in transit
_NAME_SIZE: Final = 128  # size of struct sockaddr_storage
_IDLE_S: Final = 1  # seconds of idleness before a probe, and between probes
_KEEP_ALIVE: Final = (
    (socket.TCP_KEEPIDLE, _IDLE_S),
    (socket.TCP_KEEPINTVL, _IDLE_S),
    (socket.TCP_KEEPCNT, 127),
)
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_* constants that Python's `socket` lacks
_DROP: Final = struct.pack("=HBBI", 6, 0, 0, 0)  # classic BPF: return 0, the bytes of the packet to keep
_libc = ctypes.CDLL(None)

Sockets = Mapping[int, str]
"""File descriptor → the kernel's name of the socket, which is never reused for another socket."""


class End(NamedTuple):
    """One end of a connection; IPv4 addresses in IPv4 form, also for an IPv6 socket."""

    address: str
    port: int


def open_sockets() -> dict[int, str]:
    """Return the sockets of this process."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


def peer_of(descriptor: int) -> End | None:
    """Return the other end of a TCP connection; None for anything else."""
    return _end(_libc.getpeername, descriptor) if _is_tcp(descriptor) else None


def of_peers(sockets: Iterable[tuple[int, str]], address: str) -> dict[int, str]:
    """Return the sockets that are TCP connections with this local address."""
    return {
        descriptor: name
        for descriptor, name in sockets
        if peer_of(descriptor) and (own := _end(_libc.getsockname, descriptor)) and own.address == address
    }


def listener_among(sockets: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Return the socket that listens for TCP connections; empty if there are several."""
    found = {
        descriptor: name
        for descriptor, name in sockets
        if _is_tcp(descriptor) and _number(descriptor, socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }
    return found if len(found) == 1 else {}


def take_connections(listeners: Sockets, accepts: bool) -> None:
    """Make the kernel drop connection requests to listening sockets, or pass them on again.

    A peer repeats a dropped request, after a second at first. Does nothing on systems without socket filters.
    """
    for descriptor, name in listeners.items():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") != name:
                continue
            if accepts:
                _set(descriptor, socket.SOL_SOCKET, _DETACH_FILTER, 0)
            else:
                code = ctypes.create_string_buffer(_DROP, len(_DROP))
                program = struct.pack("@HP", 1, ctypes.addressof(code))  # struct sock_fprog
                _libc.setsockopt(descriptor, socket.SOL_SOCKET, _ATTACH_FILTER, program, len(program))


def accepted_in_silence(connections: Sockets, listeners: Sockets, least: int) -> dict[int, str]:
    """Return connections accepted by these listeners that have received fewer than `least` bytes."""
    ports = {own.port for each in listeners if (own := _end(_libc.getsockname, each))}
    found = {}
    for descriptor, name in connections.items():
        with contextlib.suppress(OSError):
            own = _end(_libc.getsockname, descriptor)
            info = _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
            if own is not None and own.port in ports and _RECEIVED.unpack(info)[0] < least:
                found[descriptor] = name
    return found


def shut_down(sockets: Sockets) -> None:
    """End the connections of these sockets if they are still open; their owner closes them."""
    for descriptor, name in sockets.items():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == name:
                shut(descriptor)


def shut(descriptor: int) -> bool:
    """End a connection; return whether there was one."""
    return bool(_libc.shutdown(descriptor, socket.SHUT_RDWR) == 0)


def torn(sockets: Sockets) -> bool:
    """Return whether one of these connections has ended, at either end, or was closed by its owner."""
    try:
        return any(
            os.readlink(f"/proc/self/fd/{descriptor}") != name
            or _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED
            for descriptor, name in sockets.items()
        )
    except OSError:  # closed
        return True


def unacknowledged(sockets: Sockets, seconds: float, hosts: Collection[str] | None = None) -> str:
    """Return a peer whose kernel has acknowledged nothing for `seconds`; empty if there is none.

    With `hosts`, only connections to these addresses count, and the kernel probes them once a second while
    they are idle, so that a silent peer is found even if only the peer has to send.
    """
    for descriptor, name in sockets.items():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") != name:
                continue
            peer = peer_of(descriptor)
            if peer is None or (hosts is not None and peer.address not in hosts):
                continue
            probed, backoff, unacked, since = _INFO.unpack(
                _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            )
            quiet = since / 1e3 - seconds
            if quiet >= 0 and ((backoff and unacked) or probed >= _PROBES or (probed and quiet >= _IDLE_S)):
                return peer.address
            if hosts is not None:
                _probe(descriptor)
    return ""


def _is_tcp(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        return _number(descriptor, socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP
    return False


def _probe(descriptor: int) -> None:
    """Make the kernel probe an idle connection, and keep it for long."""
    if not _number(descriptor, socket.SOL_SOCKET, socket.SO_KEEPALIVE):
        for option, value in _KEEP_ALIVE:
            _set(descriptor, socket.IPPROTO_TCP, option, value)
        _set(descriptor, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _end(call: Callable[..., int], descriptor: int) -> End | None:
    name, size = ctypes.create_string_buffer(_NAME_SIZE), ctypes.c_uint(_NAME_SIZE)
    if call(descriptor, name, ctypes.byref(size)) != 0:
        return None
    family, port = struct.unpack_from("=H", name)[0], struct.unpack_from("!H", name, 2)[0]
    if family == socket.AF_INET:
        return End(socket.inet_ntop(family, name.raw[4:8]), port)
    if family == socket.AF_INET6:
        return End(socket.inet_ntop(family, name.raw[8:24]).removeprefix("::ffff:"), port)
    return None


def _option(descriptor: int, level: int, option: int, size: int) -> bytes:
    """Return the option's value, zero-padded if the kernel's is shorter; raise `OSError` without one."""
    value, length = ctypes.create_string_buffer(size), ctypes.c_uint(size)
    if _libc.getsockopt(descriptor, level, option, value, ctypes.byref(length)) != 0:
        raise OSError(f"descriptor {descriptor} has no such option")
    return value.raw


def _number(descriptor: int, level: int, option: int) -> int:
    return int.from_bytes(_option(descriptor, level, option, 4), sys.byteorder)


def _set(descriptor: int, level: int, option: int, value: int) -> None:
    _libc.setsockopt(descriptor, level, option, struct.pack("=i", value), 4)
