"""Greeting in which a process says, on a new connection, which rank of a job it belongs to."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections.abc import Callable
from typing import Final

from mcr_plus.hosts.acceptor import Acceptor

_HELLO: Final = struct.Struct("<I16s")  # rank, and proof that the sender has read the job's store


def greeting(key: bytes, rank: int) -> bytes:
    """Return the first message of a rank's process. `key`: known only to the processes of the job."""
    return _HELLO.pack(rank, _proof(key, rank))


class Handshakes:
    """A listening socket, and connections whose peers have not greeted yet.

    Attributes:
        strangers: these connections.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        prepare: Callable[[socket.socket], None],
        members: int = 0,
    ) -> None:
        """`prepare`: called for each connection before anything is read from it.

        `members`: number of processes of the job that may connect.
        """
        listener.setblocking(False)
        self.strangers: dict[socket.socket, bytes] = {}  # with the bytes received so far
        self._acceptor = Acceptor(listener, "init", members=members)
        self._key, self._prepare = key, prepare

    @property
    def listener(self) -> socket.socket:
        """Listening socket."""
        return self._acceptor.listener

    def come(self) -> list[tuple[int, socket.socket]]:
        """Return the ranks that have greeted since the last call, and their connections; never blocks.

        Connections of strangers are closed, as are those that have not greeted in time (`Acceptor`).
        """
        # Read arrived data before accepting more connections: only silent ones are dropped for them.
        greeted = [
            (rank, link) for link in list(self.strangers) if (rank := self._greeted_by(link)) is not None
        ]
        while (link := self._acceptor.accept()) is not None:
            link.setblocking(False)
            self._prepare(link)
            self.strangers[link] = b""
            if (rank := self._greeted_by(link)) is not None:
                greeted.append((rank, link))
        return greeted

    def close(self) -> None:
        """Close the socket and the connections of strangers."""
        for each in (self.listener, *self.strangers):  # also in a forked child: nothing is shut down
            each.close()
        self.strangers.clear()

    def _greeted_by(self, link: socket.socket) -> int | None:
        """Return the rank that a stranger has greeted with; the greeting may arrive in pieces."""
        said, ends = self.strangers[link], False
        try:
            more = link.recv(_HELLO.size - len(said))
            said, ends = said + more, not more
        except BlockingIOError:
            return None
        except OSError:
            ends = True
        if len(said) < _HELLO.size and not ends:
            self.strangers[link] = said
            return None
        del self.strangers[link]
        rank, proof = _HELLO.unpack(said) if len(said) == _HELLO.size else (0, b"")
        if hmac.compare_digest(proof, _proof(self._key, rank)) and self._acceptor.admit(link):
            return int(rank)
        self._acceptor.refuse(link, "it has not greeted as a rank of this job")
        return None


def _proof(key: bytes, rank: int) -> bytes:
    return hmac.digest(key, str(rank).encode(), hashlib.sha256)[:16]
