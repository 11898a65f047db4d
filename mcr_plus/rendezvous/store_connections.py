"""This process's connections to stores of torch, and the stores that it serves."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.core.addresses import family_of, is_loopback, place_text
from mcr_plus.core.c10d import TCPStore, on_socket
from mcr_plus.core.environment import LOOPBACK, meeting_interface
from mcr_plus.core.sockets import open_sockets, peer_of, shut
from mcr_plus.errors import LaunchError
from mcr_plus.rendezvous.network import meeting_address, prefer

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store

known_stores: dict[tuple[str, int], Store] = {}
"""Stores by host and port of the server, so that this process connects to each only once."""
_own_servers: dict[str, TCPStore] = {}  # by address; see `own_server`
_CONNECTS_WITHIN: Final = 30.0  # seconds
_SERVES_FOR: Final = timedelta(minutes=5)  # timeout of requests to a launcher's store
_LOOK_EVERY: Final = 0.1  # s between checks


def listening(address: str, port: int = 0) -> socket.socket:
    """Return a listening socket bound to one address; TCPStore itself would bind all interfaces."""
    listener = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def opened(
    host: str,
    port: int,
    timeout: timedelta,
    listener: socket.socket | None = None,
    *,
    serves: bool = False,
) -> TCPStore:
    """Connect to the store at an address.

    `listener`: socket on which this process serves the store. `serves`: whether it does so without, on all
    interfaces.
    """
    options: dict[str, Any] = {} if listener is None else on_socket(listener)
    serves |= listener is not None
    # multi_tenant: the program's own init_process_group may use the same port in this process.
    return TCPStore(host, port, None, serves, timeout, wait_for_workers=False, multi_tenant=True, **options)


def served(address: str = LOOPBACK, timeout: timedelta = _SERVES_FOR) -> TCPStore:
    """Return a new store that this process serves at a free port of one address."""
    listener = listening(address)
    return opened(address, listener.getsockname()[1], timeout, listener)


def own_server(timeout: float, *, everywhere: bool = False) -> tuple[str, int]:
    """Return host and port of a store served by this process for others to meet in; started at the first
    call.

    It listens on loopback, unless other hosts must reach it: `everywhere`, or MCR_SOCKET_IFNAME or
    GLOO_SOCKET_IFNAME names an interface.
    """
    address = meeting_address() if everywhere or meeting_interface() else LOOPBACK
    if address not in _own_servers:
        server = _own_servers[address] = served(address, timedelta(seconds=timeout))
        known_stores[server.host, server.port] = server
    return _own_servers[address].host, _own_servers[address].port


def met_in(host: str, port: int, timeout: float) -> Store:
    """Return the store that a rank serves for others (`own_server`); each process connects once.

    Raises `LaunchError` if it does not answer.
    """
    known = known_stores.get((host, port))
    try:
        if known is None:
            known = opened(host, port, timedelta(seconds=min(timeout, _CONNECTS_WITHIN)))
            known_stores[host, port] = known
        known.set_timeout(timedelta(seconds=timeout))
    except RuntimeError as error:
        raise LaunchError(f"no store at {place_text(host, port)}, where ranks meet: {error}") from error
    return known


def _innermost(store: Any) -> Any:
    while (below := getattr(store, "inner", None) or getattr(store, "underlying_store", None)) is not None:
        store = below
    return store


def server_of(store: Store) -> tuple[str, int]:
    """Return host and port of the server behind a store; empty and 0 if it has none."""
    inner = _innermost(store)
    return str(getattr(inner, "host", "")), int(getattr(inner, "port", 0))


def place_of(store: Store) -> str:
    """Return where ranks meet in a store, for messages: the server's address, or the file's path."""
    host, port = server_of(store)
    return place_text(host, port) if host else str(getattr(_innermost(store), "path", "the job's store"))


class StoreRelease:
    """A thread that ends requests to the job's store once nothing will answer them.

    torch's store client waits for an answer without limit, in compiled code. If the store's host is cut off
    or its process stopped, a rank inside such a request would learn nothing that other ranks find out. The
    thread shuts down the connections to the store once `is_lost()` is true, so that requests fail.
    """

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
                known_stores.pop(self._server, None)  # so that the next use connects anew
                release(*self._server)
                return


def release(host: str, port: int) -> int:
    """Shut down all connections of this process to a server; return their number."""
    return sum(map(shut, _connections(host, port)))


def prefer_family_of(store: Store) -> None:
    """Prefer the family of addresses by which this process has reached a store, if other hosts can too."""
    host, port = server_of(store)
    if host and not is_loopback(host):
        for address in _connections(host, port).values():
            prefer(family_of(address))


def _connections(host: str, port: int) -> dict[int, str]:
    """Return the descriptors of this process's connections to a server, with the server's address."""
    with contextlib.suppress(OSError):
        addresses = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        ends = ((descriptor, peer_of(descriptor)) for descriptor in open_sockets())
        return {
            descriptor: end.address
            for descriptor, end in ends
            if end is not None and end.address in addresses and end.port == port
        }
    return {}
