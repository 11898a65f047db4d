"""Connections by which ranks of different hosts see each other's loss in `init`, before there are heartbeats.

Rank 0 listens, and ranks of other hosts connect to it before they say that they have come. The kernel closes
the connections of a process that ends. Each end sends a byte now and then, which the kernel of the other one
acknowledges, whatever the process there does; where none does for one and a half seconds, that host is down
or cut off. That a process is stopped is said by a process beside it (`mcr_plus.hosts.stop_detector`).

So rank 0 sees the loss of each of them, and each of them that of rank 0, which collects what ranks exchange
in `init` and therefore tells the others. Once a rank has its world, in which agents look after all, it says
so and closes its connections.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.core.deadline import Deadline, until
from mcr_plus.core.environment import LOOPBACK, job_secret, on_one_host
from mcr_plus.core.proc import read_stat
from mcr_plus.errors import LaunchError
from mcr_plus.hosts.handshake import Handshakes, greeting
from mcr_plus.hosts.stop_detector import REPORT
from mcr_plus.rendezvous.identity import DIED, STOPPED
from mcr_plus.rendezvous.network import meeting_address
from mcr_plus.rendezvous.side_processes import command
from mcr_plus.rendezvous.signing import address_of
from mcr_plus.rendezvous.store_release import StoreRelease

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store

Address = tuple[str, int]
Listening = tuple[Address, Address | None]
"""Where rank 0 listens, and where its witness does, if it has one."""
_SETTLED: Final = b"."  # the sender has its world
_BEAT: Final = b"~"
_BEAT_EVERY: Final = 0.25  # seconds
_SILENT: Final = 1.5  # seconds in which nothing is acknowledged; the kernel sends again three times
_CONNECTS_WITHIN: Final = 2.0  # seconds; later only where a firewall drops the request
_ARRIVES_WITHIN: Final = 1.0  # seconds
_NAP: Final = 0.001
_log = logging.getLogger("mcr_plus")
_open: list[InitConnections] = []  # of the present `init` of this process, or the one that has failed last


class InitConnections:
    """The connections of one rank; none before `listen` or `connect`. `lost` may be called by any thread."""

    def __init__(self, grace: float) -> None:
        """`grace`: seconds for which a process must be stopped to count as lost; may be infinite."""
        self._grace = grace
        self._lock = threading.Lock()
        self._key = b""
        self._door: Handshakes | None = None
        self._links: dict[int, socket.socket] = {}
        self._lost: dict[int, str] = {}
        self._next_beat = 0.0
        self._witness: _DetectorProcess | None = None
        self._release: StoreRelease | None = None

    def listen(self, name: str, store: Store, ranks: int) -> Listening | None:
        """On rank 0: the addresses to which ranks of other hosts connect; None if there are none.

        `name`: of this `init`, which `ranks` ranks have from the job's `store`.
        """
        if on_one_host(ranks=ranks) or address_of(store) in (LOOPBACK, "localhost"):
            return None
        try:
            listener, of_witness = _listener(), _listener()
        except (OSError, LaunchError) as error:
            _log.debug("ranks of other hosts that are lost in init show at its deadline: %s", error)
            return None
        self._enter(name)
        self._door = Handshakes(listener, self._key, _watch, members=ranks)
        own, its = listener.getsockname(), of_witness.getsockname()
        self._witness = self._start_witness(0, None, of_witness)
        of_witness.close()  # the witness has it
        return own, its if self._witness is not None else None

    def connect(self, listening: Listening, name: str, rank: int, store: Store) -> None:
        """On another rank: connect to rank 0, if that can be reached.

        Until `close`, a request to `store` that a silent host does not answer ends too.
        """
        (host, port), of_witness = listening
        try:
            link = socket.create_connection((host, port), _CONNECTS_WITHIN)
        except OSError as error:
            _log.debug("the end of rank 0 in init shows at its deadline: %s", error)
            return
        self._enter(name)
        _watch(link)
        with contextlib.suppress(OSError):  # it shows as the end of rank 0
            link.sendall(greeting(self._key, rank))
        self._links[0] = link
        if of_witness is not None:
            self._witness = self._start_witness(rank, of_witness, None)
        self._release = StoreRelease(store, self._is_cut_off)

    def lost(self) -> dict[int, str]:
        """The ranks that are lost before they had their world, and what is seen of them."""
        with self._lock:
            self._accept()
            now = time.monotonic()
            beats = now >= self._next_beat
            if beats:
                self._next_beat = now + _BEAT_EVERY
            for rank, link in list(self._links.items()):
                if (seen := _end_of(link, beats)) is not None:
                    self._links.pop(rank).close()
                    if seen:
                        self._lost[rank] = seen
            stopped = self._witness.stopped() if self._witness is not None else ()
            return dict.fromkeys((rank for rank in stopped if rank in self._links), STOPPED) | self._lost

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
            links = self._all_links()
            for link in links:
                with contextlib.suppress(OSError):
                    link.send(_SETTLED)
            _wait_for_arrival(links)
            for link in links:
                link.close()
            if self._door is not None:
                self._door.close()
            if self._witness is not None:
                self._witness.close()
            self._door = self._witness = None
            self._links.clear()

    def dismiss_witness(self) -> None:
        """End the witness; the connections stay, because their end would look like that of this process."""
        with self._lock:
            witness, self._witness = self._witness, None
            if witness is not None:
                witness.close()

    def abandon(self) -> None:
        """In a forked child: let go of connections, which would not end with the parent, without a word."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        for link in self._all_links():
            link.close()
        if self._door is not None:
            self._door.close()
        if self._witness is not None:
            self._witness.abandon()
        self._door = self._witness = self._release = None
        self._links = {}

    def _all_links(self) -> list[socket.socket]:
        return [*self._links.values(), *(self._door.strangers if self._door is not None else ())]

    def _enter(self, name: str) -> None:
        """Close the connections of an earlier `init`, whose end is not that of this rank."""
        settle()
        self._key = job_secret() + name.encode()
        _open.append(self)

    def _start_witness(
        self, rank: int, address: Address | None, listener: socket.socket | None
    ) -> _DetectorProcess | None:
        own = read_stat(os.getpid())
        if own is None or self._grace == math.inf or not sys.executable:
            return None
        order = {
            "process": (os.getpid(), own[1]),
            "rank": rank,
            "key": self._key.hex(),
            "grace": self._grace,
            "address": address,
        }
        try:
            return _DetectorProcess(order, listener)
        except (OSError, subprocess.SubprocessError) as error:
            _log.debug("a stop of this rank in init shows at its deadline: %s", error)
            return None

    def _accept(self) -> None:
        if self._door is not None:
            self._links.update(self._door.come())

    def _is_cut_off(self) -> bool:
        return self.lost().get(0, DIED) != DIED


class _DetectorProcess:
    """The witness of this process, as its rank has it."""

    def __init__(self, order: dict[str, Any], listener: socket.socket | None) -> None:
        """`order`: see `mcr_plus.hosts.stop_detector`. Raises `OSError` if the process does not start."""
        self._stopped: set[int] = set()
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        order |= {"control": its.fileno(), "listener": None if listener is None else listener.fileno()}
        try:
            self._process = subprocess.Popen(
                command("mcr_plus.hosts.stop_detector"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[each.fileno() for each in (its, listener) if each is not None],
                start_new_session=True,  # so that what stops the rank's group does not stop it
            )
        except OSError:
            self._control.close()
            raise
        finally:
            its.close()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            pipe.write(json.dumps(order).encode())

    def stopped(self) -> set[int]:
        """The ranks of other hosts that are stopped."""
        with contextlib.suppress(OSError):
            while len(said := self._control.recv(REPORT.size)) == REPORT.size:
                rank, is_stopped = REPORT.unpack(said)
                (self._stopped.add if is_stopped else self._stopped.discard)(rank)
        return self._stopped

    def close(self) -> None:
        """End it."""
        self.abandon()
        self._process.kill()
        self._process.wait()

    def abandon(self) -> None:
        """Let go of it."""
        self._control.close()


def dismiss_witness() -> None:
    """End the process that looks after this one: `init` has failed, and a later stop matters to nobody."""
    for presence in _open:
        presence.dismiss_witness()


def settle() -> None:
    """Say that this process has its world; nothing where `init` has no connections."""
    for presence in (*_open,):
        presence.close()


def _after_fork() -> None:
    for presence in _open:
        presence.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)


def _listener() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.bind((meeting_address(), 0))
        made.listen(1024)
    except (OSError, LaunchError):
        made.close()
        raise
    return made


def _watch(link: socket.socket) -> None:
    """Have the kernel close a connection on which nothing is acknowledged."""
    link.setblocking(False)
    with contextlib.suppress(OSError):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
        with contextlib.suppress(OSError):  # a kernel without it; then a silent host shows at the deadline
            link.setsockopt(socket.IPPROTO_TCP, option, round(1e3 * _SILENT))


def _end_of(link: socket.socket, beats: bool) -> str | None:
    """What is seen of the other end of a connection: None while it lives, empty once it has its world.

    `beats`: whether to send something that its kernel acknowledges.
    """
    seen = _heard(link)
    if seen is not None or not beats:
        return seen
    try:
        link.send(_BEAT)
    except BlockingIOError:
        return None
    except OSError as error:
        return "" if _heard(link) == "" else _text_of(error)  # it may have settled meanwhile
    return None


def _heard(link: socket.socket) -> str | None:
    try:
        while said := link.recv(4096):
            if _SETTLED in said:
                return ""
    except BlockingIOError:
        return None
    except OSError as error:
        return _text_of(error)
    return DIED


def _text_of(error: OSError) -> str:
    return DIED if isinstance(error, ConnectionError) else f"its host does not answer ({error.strerror})"


def _wait_for_arrival(links: Collection[socket.socket]) -> None:
    """Wait until the other ends have all that was sent, which a close may take back.

    The kernel resets a connection that is closed while something on it has not been read.
    """
    until(lambda: not any(map(_unacknowledged, links)), Deadline(_ARRIVES_WITHIN), _NAP)


def _unacknowledged(link: socket.socket) -> int:
    with contextlib.suppress(OSError):
        return int.from_bytes(fcntl.ioctl(link, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0
