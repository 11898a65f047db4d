"""A thread that ends requests to the job's store once nothing will answer them.

torch's store client waits for an answer without limit, in compiled code. If the store's host is cut off or
its process stopped, a rank inside such a request would learn nothing that other ranks find out.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.core.sockets import open_sockets, peer_of, shut
from mcr_plus.rendezvous.known_stores import forget_store

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store

_LOOK_EVERY: Final = 0.1  # s between checks


class StoreRelease:
    """Shuts down the connections to a store once `is_lost()` is true, so that requests to it fail."""

    def __init__(self, store: Store, is_lost: Callable[[], bool]) -> None:
        self._server = server_of(store)
        self._is_lost = is_lost
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mcr_plus store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(_LOOK_EVERY):
            if self._is_lost():
                forget_store(*self._server)
                release(*self._server)
                return


def server_of(store: Any) -> tuple[str, int]:
    """Return host and port of the server behind one of our stores or torch's; empty and 0 if it has none."""
    while True:
        inner = getattr(store, "_store", None) or getattr(store, "underlying_store", None)
        if inner is None:
            return str(getattr(store, "host", "")), int(getattr(store, "port", 0))
        store = inner


def release(host: str, port: int) -> int:
    """Shut down all connections of this process to a server; return their number."""
    with contextlib.suppress(OSError):
        addresses = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        ends = ((descriptor, peer_of(descriptor)) for descriptor in open_sockets())
        return sum(
            shut(descriptor)
            for descriptor, end in ends
            if end is not None and end.address in addresses and end.port == port
        )
    return 0
