"""Connections by which ranks of different hosts see each other's end in `init`, before there are heartbeats.

Rank 0 listens, and ranks of other hosts connect to it before they say that they have come. The kernel closes
the connections of a process that ends, and a host that is down or cut off answers none of its probes. So
rank 0 sees the loss of each of them, and each of them that of rank 0, which collects what ranks exchange in
`init` and therefore tells the others. Once a rank has its world, in which agents look after all, it says so
and closes its connections.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import socket
import struct
import threading
from typing import TYPE_CHECKING, Final

from mcr_plus.core.environment import LOOPBACK, job_secret, on_one_host
from mcr_plus.errors import LaunchError
from mcr_plus.rendezvous.identity import DIED
from mcr_plus.rendezvous.network import meeting_address
from mcr_plus.rendezvous.signing import address_of
from mcr_plus.rendezvous.store_release import StoreRelease

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store

_HELLO: Final = struct.Struct("<I16s")  # rank, and that it has read the job's store
_SETTLED: Final = b"."  # the sender has its world
_CONNECTS_WITHIN: Final = 2.0  # seconds; later only where a firewall drops the request
_PROBES: Final = 5  # without an answer, after which a host is silent
_PROBE_EVERY: Final = 5  # seconds; together 30, for which agents wait as well
_log = logging.getLogger("mcr_plus")
_open: list[Presence] = []  # of the present `init` of this process, or the one that has failed last


class Presence:
    """The connections of one rank; none before `listen` or `connect`. `lost` may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key = b""
        self._listener: socket.socket | None = None
        self._strangers: list[socket.socket] = []  # which have not said who they are
        self._links: dict[int, socket.socket] = {}
        self._lost: dict[int, str] = {}
        self._release: StoreRelease | None = None

    def listen(self, name: str, store: Store, ranks: int) -> tuple[str, int] | None:
        """On rank 0: the address to which ranks of other hosts connect; None if there are none.

        `name`: of this `init`, which `ranks` ranks have from the job's `store`.
        """
        if on_one_host(ranks=ranks) or address_of(store) in (LOOPBACK, "localhost"):
            return None
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((meeting_address(), 0))
            listener.listen(1024)
        except (OSError, LaunchError) as error:
            listener.close()
            _log.debug("ranks of other hosts that die in init show at its deadline: %s", error)
            return None
        listener.setblocking(False)
        self._enter(name)
        self._listener = listener
        host, port = listener.getsockname()
        return host, port

    def connect(self, address: tuple[str, int], name: str, rank: int, store: Store) -> None:
        """On another rank: connect to rank 0, if that can be reached.

        Until `close`, a request to `store` that a silent host does not answer ends too.
        """
        try:
            link = socket.create_connection((address[0], address[1]), _CONNECTS_WITHIN)
        except OSError as error:
            _log.debug("the end of rank 0 in init shows at its deadline: %s", error)
            return
        self._enter(name)
        _probe(link)
        with contextlib.suppress(OSError):  # it shows as the end of rank 0
            link.sendall(_HELLO.pack(rank, self._sign(rank)))
        self._links[0] = link
        self._release = StoreRelease(store, self._is_cut_off)

    def lost(self) -> dict[int, str]:
        """The ranks whose connection has ended before they had their world, and what was seen of them."""
        with self._lock:
            self._accept()
            for rank, link in list(self._links.items()):
                if (seen := _end_of(link)) is not None:
                    self._links.pop(rank).close()
                    if seen:
                        self._lost[rank] = seen
            return dict(self._lost)

    def forget(self, rank: int) -> None:
        """Expect another process in the place of a lost one."""
        with self._lock:
            self._lost.pop(rank, None)

    def close(self) -> None:
        """Say that this rank needs no connections any more, and close them."""
        if self in _open:
            _open.remove(self)
        release, self._release = self._release, None
        if release is not None:
            release.close()
        with self._lock:
            self._accept()
            for link in (*self._links.values(), *self._strangers):
                with contextlib.suppress(OSError):
                    link.send(_SETTLED)
                link.close()
            if self._listener is not None:
                self._listener.close()
            self._listener = None
            self._links.clear()
            self._strangers.clear()

    def _enter(self, name: str) -> None:
        """Close the connections of an earlier `init`, whose end is not that of this rank."""
        settle()
        self._key = job_secret() + name.encode()
        _open.append(self)

    def _sign(self, rank: int) -> bytes:
        return hmac.digest(self._key, str(rank).encode(), hashlib.sha256)[:16]

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                link, _ = self._listener.accept()
            except OSError:  # nobody, or too few file descriptors: this one is not looked after
                break
            _probe(link)
            self._strangers.append(link)
        waiting, self._strangers = self._strangers, []
        for link in waiting:
            try:
                said = link.recv(_HELLO.size)
            except BlockingIOError:
                self._strangers.append(link)
                continue
            except OSError:
                said = b""
            rank, proof = _HELLO.unpack(said) if len(said) == _HELLO.size else (0, b"")
            if hmac.compare_digest(proof, self._sign(rank)):
                self._links[rank] = link
            else:
                link.close()

    def _is_cut_off(self) -> bool:
        return self.lost().get(0, DIED) != DIED


def settle() -> None:
    """Say that this process has its world; nothing where `init` has no connections."""
    for presence in (*_open,):
        presence.close()


def _probe(link: socket.socket) -> None:
    """Have the kernel find out whether the other host answers."""
    link.setblocking(False)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("IDLE", _PROBE_EVERY), ("INTVL", _PROBE_EVERY), ("CNT", _PROBES)):
        if (option := getattr(socket, f"TCP_KEEP{name}", None)) is not None:
            link.setsockopt(socket.IPPROTO_TCP, option, value)


def _end_of(link: socket.socket) -> str | None:
    """What is seen of the other end of a connection: None while it lives, empty once it has its world."""
    try:
        return "" if link.recv(1) == _SETTLED else DIED
    except BlockingIOError:
        return None
    except ConnectionError:
        return DIED
    except OSError as error:
        return f"its host does not answer ({error.strerror})"
