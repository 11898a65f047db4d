"""Accepts connections on a port open to any process, and drops those that do not prove to be members.

Every listening socket that our Python code serves has an `Acceptor`, so one policy holds for all: how long a
connection may take to authenticate, how many may be unauthenticated at once, and how many lines are logged.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

WITHIN: Final = 10.0
"""Seconds that a connection may take to authenticate. A member does so immediately after connecting."""
MOST: Final = 64
"""Connections that may wait to authenticate at once, beside as many as there are members."""
_PAUSE: Final = 0.05  # seconds until a non-blocking listener is polled again that cannot accept
_LOG_EVERY: Final = 60.0  # seconds between two lines about refused connections


class Acceptor:
    """A listening socket, and the accepted connections that have not authenticated yet.

    A dropped connection is shut down: its owner, which may be another thread, reads its end as if the peer
    had closed it, and closes it. Any thread may call all methods.
    """

    def __init__(
        self,
        listener: socket.socket,
        what: str,
        *,
        members: int = 0,
        most: int = MOST,
        within: float = WITHIN,
    ) -> None:
        """`what`: the purpose of the socket, for the log. `members`: how many may connect at the same time.

        A listener with a timeout keeps it; one without becomes non-blocking.
        """
        import logging  # not for `liveness` alone; here, since later there may be no file descriptor

        self._logger = logging.getLogger("mcr_plus")
        if listener.gettimeout() is None:
            listener.setblocking(False)
        self.listener = listener
        self._what, self._most, self._within = what, most + members, within
        self._lock = threading.RLock()
        self._pending: dict[socket.socket, float] = {}  # authentication deadlines, oldest first
        self.serving: list[threading.Thread] = []
        self._log_next, self._left_out = 0.0, 0

    def accept(self) -> socket.socket | None:
        """Accept a connection; None if there is none within the listener's timeout.

        Drops connections that have been silent for too long, and the oldest silent one if there are too many.
        """
        self.expire()
        try:
            connection, _ = self.listener.accept()
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            if self.listener.fileno() >= 0:  # else it was closed meanwhile
                self._log(f"a connection could not be accepted: {error}")
                self._make_room()  # there may be too few file descriptors
                time.sleep(self.listener.gettimeout() or _PAUSE)
            return None
        with self._lock:
            if len(self._pending) >= self._most:
                self._make_room()
            self._pending[connection] = time.monotonic() + self._within
        return connection

    def serve(self, serve: Callable[[socket.socket], object], ends: Callable[[], bool]) -> None:
        """Serve each connection on a thread, one of `serving`; close the listener in the end."""
        with self.listener:
            while not ends() and self.listener.fileno() >= 0:
                if (connection := self.accept()) is None:
                    continue
                name = f"mcr_plus-{self._what}"
                thread = threading.Thread(target=serve, args=(connection,), name=name, daemon=True)
                self.serving = [each for each in self.serving if each.is_alive()]
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads can be started; the peer tries again
                    self.refuse(connection, f"it could not be served: {error}")
                    time.sleep(self.listener.gettimeout() or _PAUSE)
                    continue
                self.serving.append(thread)

    def admit(self, connection: socket.socket) -> bool:
        """Note that the peer has authenticated; return False if the connection was dropped before."""
        with self._lock:
            return self._pending.pop(connection, None) is not None

    def refuse(self, connection: socket.socket, why: object) -> None:
        """Close a connection whose peer is not a member, and log it unless it was dropped before."""
        if self.admit(connection):
            self._log(f"a connection was refused: {why}")
        connection.close()

    def expire(self) -> None:
        """Drop connections that have not authenticated in time."""
        now = time.monotonic()
        with self._lock:
            for connection in [each for each, ends in self._pending.items() if ends <= now]:
                if _is_silent(connection):  # else its owner has yet to read data from it
                    self._give_up(connection, f"it has not authenticated within {self._within:g} s")
            if self._left_out and now >= self._log_next:
                self._log("the last connection was refused as those before")

    def close(self) -> None:
        """Close the listener, and drop all connections that have not authenticated."""
        self.listener.close()
        with self._lock:
            for connection in self._pending:
                _shut(connection)
            self._pending.clear()

    def _make_room(self) -> None:
        with self._lock:
            oldest = next(filter(_is_silent, self._pending), None)
            if oldest is not None:  # else all owners have yet to read data
                self._give_up(oldest, f"{len(self._pending)} connections have not authenticated")

    def _give_up(self, connection: socket.socket, why: str) -> None:
        del self._pending[connection]
        self._log(f"a connection was refused: {why}")
        _shut(connection)

    def _log(self, text: str) -> None:
        """Log the first line at once, and later ones once a minute, with the number of those left out."""
        now = time.monotonic()
        with self._lock:
            if now < self._log_next:
                self._left_out += 1
                return
            more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
            self._log_next, self._left_out = now + _LOG_EVERY, 0
        self._logger.warning("%s: %s%s", self._what, text, more)


def _is_silent(connection: socket.socket) -> bool:
    """Return whether there is no data to read."""
    waiting = select.poll()
    with contextlib.suppress(OSError, ValueError):  # closed by its owner
        waiting.register(connection, select.POLLIN)
        return not waiting.poll(0)
    return True


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
