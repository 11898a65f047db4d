"""Move an MPI launcher's listening sockets from all interfaces to loopback.

`prterun` (Open MPI 5) and Hydra's `mpiexec` bind a control port to every interface, and no setting prevents
that (prterun fails with an include list that contains the loopback device alone). A job on one host needs no
connections from outside. So the parent of the launcher, this process, stops the launcher, duplicates each
listening descriptor, binds it to loopback, and lets the launcher continue.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

_PIDFD_GETFD = 438  # the same number on every architecture of Linux
_ANY = ("0.0.0.0", "::")
_BACKLOG = 128
_GONE = (errno.ESRCH, errno.EBADF)  # the process is gone, or has closed the descriptor since the listing


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket of a process."""

    descriptor: int
    address: str
    port: int

    @property
    def on_all_interfaces(self) -> bool:
        """True if the socket is bound to 0.0.0.0 or [::]."""
        return self.address in _ANY


def listeners(pid: int) -> list[Listener]:
    """Return the listening TCP sockets of a process; empty if it has exited.

    Raises OSError if this process may not duplicate its descriptors. `/proc/net/tcp` needs no permission, but
    takes milliseconds to read, and the launcher is checked some twenty times while it starts.
    """
    with _copies(pid) as copies:
        return [
            Listener(descriptor, *copy.getsockname()[:2])
            for descriptor, copy in copies
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ]


def bind_to_loopback(pid: int) -> int:
    """Rebind the listening sockets of child `pid` on all interfaces to loopback.

    Returns their number. Raises OSError if a parent may not duplicate the descriptors of its child.
    """
    exposed = {listener.descriptor for listener in listeners(pid) if listener.on_all_interfaces}
    if not exposed:
        return 0
    os.kill(pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        with _copies(pid) as copies:
            for descriptor, copy in copies:
                if descriptor in exposed:
                    _rebind(copy)
    finally:
        os.kill(pid, signal.SIGCONT)
    return len(exposed)


@contextmanager
def _copies(pid: int) -> Iterator[list[tuple[int, socket.socket]]]:
    """Yield duplicates of the open TCP sockets of a process, with their descriptors in that process."""
    with ExitStack() as stack:
        copies: list[tuple[int, socket.socket]] = []
        for descriptor in _sockets(pid):
            try:
                copy = stack.enter_context(_copy_descriptor(pid, descriptor))
            except OSError as error:
                if error.errno in _GONE:
                    continue
                raise
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                copies.append((descriptor, copy))
        yield copies


def _sockets(pid: int) -> list[int]:
    """Return the descriptors of the open sockets of a process."""
    folder = f"/proc/{pid}/fd"
    found: list[int] = []
    with suppress(OSError):  # the process has exited
        for name in os.listdir(folder):
            with suppress(FileNotFoundError):  # the process has closed the descriptor meanwhile
                if os.readlink(f"{folder}/{name}").startswith("socket:["):
                    found.append(int(name))
    return found


def _copy_descriptor(pid: int, descriptor: int) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        copy = int(libc.syscall(_PIDFD_GETFD, process, descriptor, 0))
    finally:
        os.close(process)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return socket.socket(fileno=copy)


def _rebind(listener: socket.socket) -> None:
    """On the owner's socket, stop listening, bind the same port on loopback, and listen again."""
    host = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
    port = listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    try:
        listener.bind((host, port))
    except OSError:
        listener.bind((host, 0))
    listener.listen(_BACKLOG)
