"""Connections by which ranks of different hosts detect each other's loss in `init`, before heartbeats begin.

Rank 0 listens, and ranks of other hosts connect to it before they announce their arrival. The kernel closes
the connections of a process that ends. Each end sends a byte now and then, which the kernel of the other end
acknowledges, whatever the process there does. A host that acknowledges nothing for 1.5 s is down or cut off.
A separate process beside each rank reports when the rank is stopped (`mcr_plus.hosts.stop_detector`;
"witness").

So rank 0 sees the loss of each of these ranks, and each of them sees the loss of rank 0. Rank 0 collects the
values that ranks exchange in `init`, and therefore reports losses to the others. Once a rank has its world,
in which agents watch all ranks, it announces that and closes its connections.
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

from mcr_plus.core.addresses import is_loopback
from mcr_plus.core.deadline import Deadline, until
from mcr_plus.core.environment import job_secret, on_one_host
from mcr_plus.core.proc import read_stat
from mcr_plus.errors import LaunchError
from mcr_plus.rendezvous.identity import DIED, STOPPED
from mcr_plus.rendezvous.network import meeting_address
from mcr_plus.rendezvous.store_connections import StoreRelease, listening, server_of

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store
    from mcr_plus.hosts.handshake import Handshakes

Address = tuple[str, int]
Listening = tuple[Address, Address | None]
"""Addresses where rank 0 and its witness listen; None for no witness."""
_SETTLED: Final = b"."  # the sender has its world
_BEAT: Final = b"~"
_BEAT_EVERY: Final = 0.25  # seconds
_SILENT: Final = 1.5  # s without an acknowledgement; the kernel sends again three times
_CONNECTS_WITHIN: Final = 2.0  # s; longer only if a firewall drops the request
_ARRIVES_WITHIN: Final = 1.0  # seconds
_NAP: Final = 0.001
_log = logging.getLogger("mcr_plus")
_open: list[InitConnections] = []  # of this process's current or last failed `init`


class InitConnections:
    """The connections of one rank; none before `listen` or `connect`. Any thread may call `lost`."""

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
        """Listen, on rank 0, for ranks of other hosts; return the addresses, None if there are none.

        `name`: name of this `init`, which `ranks` ranks have from the job's `store`.
        """
        if on_one_host(ranks=ranks) or is_loopback(server_of(store)[0]):
            return None
        try:
            listener, of_witness = listening(meeting_address()), listening(meeting_address())
        except (OSError, LaunchError) as error:
            _log.debug("lost ranks of other hosts are noticed only at the deadline of init: %s", error)
            return None
        from mcr_plus.hosts.handshake import Handshakes  # imported here, as below: most jobs have one host

        self._enter(name)
        self._door = Handshakes(listener, self._key, _watch, members=ranks)
        own, its = listener.getsockname()[:2], of_witness.getsockname()[:2]
        self._witness = self._start_witness(0, None, of_witness)
        of_witness.close()  # the witness has it now
        return own, its if self._witness is not None else None

    def connect(self, listening: Listening, name: str, rank: int, store: Store) -> None:
        """Connect, on another rank, to rank 0, if it can be reached.

        Until `close`, a request to `store` that a silent host does not answer is ended too.
        """
        from mcr_plus.hosts.handshake import greeting

        (host, port), of_witness = listening
        try:
            link = socket.create_connection((host, port), _CONNECTS_WITHIN)
        except OSError as error:
            _log.debug("the end of rank 0 is noticed only at the deadline of init: %s", error)
            return
        self._enter(name)
        _watch(link)
        with contextlib.suppress(OSError):  # the loss of rank 0 is then seen
            link.sendall(greeting(self._key, rank))
        self._links[0] = link
        if of_witness is not None:
            self._witness = self._start_witness(rank, of_witness, None)
        self._release = StoreRelease(store, self._is_cut_off)

    def lost(self) -> dict[int, str]:
        """Return the ranks that were lost before they had their world, with the evidence."""
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
        """Expect a new process in the place of a lost one."""
        with self._lock:
            self._lost.pop(rank, None)

    def close(self) -> None:
        """Announce that this rank needs no connections any more, and close them."""
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
        """End the witness; keep the connections, whose close would look like the end of this process."""
        with self._lock:
            witness, self._witness = self._witness, None
            if witness is not None:
                witness.close()

    def abandon(self) -> None:
        """Drop the connections in a forked child without a message: they must end with the parent."""
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
        """Close the connections of an earlier `init`; that is not the end of this rank."""
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
            _log.debug("a stop of this rank is noticed only at the deadline of init: %s", error)
            return None

    def _accept(self) -> None:
        if self._door is not None:
            self._links.update(self._door.come())

    def _is_cut_off(self) -> bool:
        return self.lost().get(0, DIED) != DIED


class _DetectorProcess:
    """Handle of this process's witness."""

    def __init__(self, order: dict[str, Any], listener: socket.socket | None) -> None:
        """`order`: see `mcr_plus.hosts.stop_detector`. Raises `OSError` if the process does not start."""
        from mcr_plus.hosts.stop_detector import REPORT
        from mcr_plus.rendezvous.side_processes import command

        self._report = REPORT
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
                start_new_session=True,  # so that a stop of the rank's group does not stop it
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
        """Return the ranks of other hosts that are stopped."""
        with contextlib.suppress(OSError):
            while len(said := self._control.recv(self._report.size)) == self._report.size:
                rank, is_stopped = self._report.unpack(said)
                (self._stopped.add if is_stopped else self._stopped.discard)(rank)
        return self._stopped

    def close(self) -> None:
        """End the witness."""
        self.abandon()
        self._process.kill()
        self._process.wait()

    def abandon(self) -> None:
        """Drop the handle."""
        self._control.close()


def dismiss_witness() -> None:
    """End this process's witness: `init` has failed, so a later stop matters to nobody."""
    for presence in _open:
        presence.dismiss_witness()


def settle() -> None:
    """Announce that this process has its world; do nothing if `init` has no connections."""
    for presence in (*_open,):
        presence.close()


def _after_fork() -> None:
    for presence in _open:
        presence.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)


def _watch(link: socket.socket) -> None:
    """Let the kernel close a connection on which nothing is acknowledged."""
    link.setblocking(False)
    with contextlib.suppress(OSError):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
        with contextlib.suppress(OSError):  # without this option, a silent host shows at the deadline
            link.setsockopt(socket.IPPROTO_TCP, option, round(1e3 * _SILENT))


def _end_of(link: socket.socket, beats: bool) -> str | None:
    """Return evidence for the end of the other side: None while it lives, empty once it has its world.

    `beats`: whether to send a byte for its kernel to acknowledge.
    """
    seen = _heard(link)
    if seen is not None or not beats:
        return seen
    try:
        link.send(_BEAT)
    except BlockingIOError:
        return None
    except OSError as error:
        return "" if _heard(link) == "" else _text_of(error)  # it may have its world by now
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
    """Wait until the other ends have received all data, which a close may discard.

    The kernel resets a connection that is closed with unread data.
    """
    until(lambda: not any(map(_unacknowledged, links)), Deadline(_ARRIVES_WITHIN), _NAP)


def _unacknowledged(link: socket.socket) -> int:
    with contextlib.suppress(OSError):
        return int.from_bytes(fcntl.ioctl(link, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0
