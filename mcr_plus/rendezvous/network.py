"""The address of this host for connections from other hosts."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Final

from mcr_plus.core.environment import meeting_interface, socket_interface
from mcr_plus.errors import LaunchError

_SIOCGIFADDR: Final = 0x8915


def _interface_address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def host_address() -> str:
    """Return the IPv4 address of the interface in `GLOO_SOCKET_IFNAME`, else of the first except loopback.

    Raises `LaunchError` with the names of the interfaces if there is none.
    """
    return _address(socket_interface(), "GLOO_SOCKET_IFNAME")


def meeting_address() -> str:
    """Return the host's address for the job's store and heartbeats; MCR_SOCKET_IFNAME takes precedence."""
    own = meeting_interface() != socket_interface()
    return _address(meeting_interface(), "MCR_SOCKET_IFNAME" if own else "GLOO_SOCKET_IFNAME")


def _address(chosen: str | None, variable: str) -> str:
    names = [name for _, name in socket.if_nameindex()]
    for name in [chosen] if chosen else names:
        address = _interface_address(name)
        if address is not None and (chosen or not address.startswith("127.")):
            return address
    expected = f"interface {chosen!r} ({variable})" if chosen else "any interface but loopback"
    raise LaunchError(f"no IPv4 address on {expected}; interfaces: {', '.join(names)}")
