"""Connections of this process that C++ libraries have opened, and keep to themselves."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

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


def shut_down(sockets: Sockets) -> None:
    """End the connections of these sockets, where they are still open; their owner closes them."""
    for descriptor, name in sockets.items():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == name:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
