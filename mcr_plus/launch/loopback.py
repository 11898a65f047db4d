"""Move the listening sockets of an MPI launcher from all interfaces to loopback.

`prterun` (Open MPI 5) and Hydra's `mpiexec` bind a control port to every interface, and no setting prevents
that (prterun fails with an include list that contains the loopback device alone). A job on one host needs
no connections from outside, so the parent of the launcher, this process, duplicates each listening
descriptor and binds it again. The launcher is stopped meanwhile, and is not affected.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

_PIDFD_GETFD = 438  # the same number on every architecture of Linux
_LISTEN = "0A"
_ANY = frozenset("0")
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket of a process."""

    descriptor: int
    address: str  # hexadecimal, as /proc/net/tcp writes it
    port: int

    @property
    def on_all_interfaces(self) -> bool:
        """Whether the socket is bound to 0.0.0.0 or [::]."""
        return set(self.address) == _ANY


def listeners(pid: int) -> list[Listener]:
    """The listening TCP sockets of a process; empty if it has exited or belongs to another user."""
    sockets = _sockets(pid)
    if not sockets:
        return []
    return [
        Listener(sockets[inode], address, port) for inode, address, port in _listening() if inode in sockets
    ]


def bind_to_loopback(pid: int) -> int:
    """Bind those listening sockets of our child `pid` to loopback that are bound to all interfaces.

    Returns their number. Raises OSError where a parent may not duplicate the descriptors of its child.
    """
    exposed = [listener for listener in listeners(pid) if listener.on_all_interfaces]
    if not exposed:
        return 0
    os.kill(pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for listener in exposed:
            _rebind(_copy_descriptor(pid, listener.descriptor))
    finally:
        os.kill(pid, signal.SIGCONT)
    return len(exposed)


def _sockets(pid: int) -> dict[str, int]:
    """Descriptors of the open sockets of a process, by inode."""
    descriptors: dict[str, int] = {}
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            target = os.readlink(f"{folder}/{name}")
            if target.startswith("socket:["):
                descriptors[target[8:-1]] = int(name)
    except OSError:
        pass
    return descriptors


def _listening() -> list[tuple[str, str, int]]:
    """Inode, address and port of every listening TCP socket."""
    rows: list[tuple[str, str, int]] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            if words[3] == _LISTEN:
                address, port = words[1].split(":")
                rows.append((words[9], address, int(port, 16)))
    return rows


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
    """Stop listening, bind the same port on loopback, and listen again, all on the owner's socket."""
    host = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
    with listener:
        port = listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        try:
            listener.bind((host, port))
        except OSError:
            listener.bind((host, 0))
        listener.listen(_BACKLOG)
