"""Requests for dumps between processes of one user on one host: datagrams to addresses without a file.

A signal would end a process that has just let go of its handler. A request is a group's name, empty for
none, a zero byte, and the reason; one whose name is `EVERYBODY` is to be passed on to all ranks of the job.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from typing import Final

SAME_FAILURE: Final = 10.0
"""Seconds within which failures of a group on several ranks are one."""
EVERYBODY: Final = "*"
LONGEST: Final = 1024
"""Bytes of a request."""
_CREDENTIALS: Final = struct.Struct("iII")  # of the sender: process, user, group; filled in by the kernel


def ask(processes: Iterable[int], text: str) -> None:
    """Ask the ranks in these processes of this host; returns at once."""
    send((address_of(process) for process in processes), text)


def send(addresses: Iterable[str], text: str) -> None:
    """Send a request to these addresses; returns at once."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
        for address in addresses:
            with contextlib.suppress(OSError):  # it has ended, or takes no requests
                sender.sendto(text.encode()[:LONGEST], address)


def address_of(owner: object) -> str:
    """An abstract address, which nothing is left of. Who sends is checked, since anybody may.

    `owner`: a process, or a name. Containers may share a network but not the numbers of processes.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # it is not shown: nobody is told from those of another container
        namespace = 0
    return f"\0mcr_plus-dump-{namespace}-{owner}"


def opened(address: str) -> socket.socket:
    """A socket that takes requests at an address; raises `OSError` where another one does."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def received(taker: socket.socket) -> list[str]:
    """The requests of processes of this user that have come; those of others are dropped."""
    texts = []
    with contextlib.suppress(OSError):
        while True:
            data, control, _, _ = taker.recvmsg(LONGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
            for _, kind, value in control:
                if kind != socket.SCM_CREDENTIALS:
                    continue
                process, user, _ = _CREDENTIALS.unpack(value)
                if process and user == os.getuid():  # 0: a process of another namespace
                    texts.append(data.decode(errors="replace"))
    return texts
