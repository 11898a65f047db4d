"""Dump requests between processes of one user on one host: datagrams to addresses without a file.

Signals are not used, since a signal would end a process that has just removed its handler. A request is a
group's name (empty for none), a zero byte, and the reason. A request named `EVERYBODY` is forwarded to all
ranks of the job.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from typing import Final

SAME_FAILURE: Final = 10.0
"""Seconds within which failures of a group on several ranks count as one."""
EVERYBODY: Final = "*"
LONGEST: Final = 1024
"""Maximum bytes of a request."""
_CREDENTIALS: Final = struct.Struct("iII")  # process, user and group of the sender; filled in by the kernel


def ask(processes: Iterable[int], text: str) -> None:
    """Send a request to the ranks in these processes of this host; returns at once."""
    send((address_of(process) for process in processes), text)


def send(addresses: Iterable[str], text: str) -> None:
    """Send a request to these addresses; returns at once."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
        for address in addresses:
            with contextlib.suppress(OSError):  # the process has ended, or takes no requests
                sender.sendto(text.encode()[:LONGEST], address)


def address_of(owner: object) -> str:
    """Return an abstract address, without a file. Receivers check senders, since anybody may send.

    `owner`: a process, or a name. Containers may share a network but not process numbers.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # no namespaces are visible: do not distinguish containers
        namespace = 0
    return f"\0mcr_plus-dump-{namespace}-{owner}"


def opened(address: str) -> socket.socket:
    """Return a socket that receives requests at an address; raise `OSError` if another socket does."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def received(taker: socket.socket) -> list[str]:
    """Return the requests that processes of this user have sent; drop those of other users."""
    texts = []
    with contextlib.suppress(OSError):
        while True:
            data, control, _, _ = taker.recvmsg(LONGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
            for _, kind, value in control:
                if kind != socket.SCM_CREDENTIALS:
                    continue
                process, user, _ = _CREDENTIALS.unpack(value)
                if process and user == os.getuid():  # 0: a process in another namespace
                    texts.append(data.decode(errors="replace"))
    return texts
