"""Decisions of a job's members, stored in several places: a keeper on each host has a copy.

A keeper (`hosts.key_replica`) is a process of its own, so that it does not end with the rank that started it.
Keepers are ordered by their hosts' first ranks. A value is written to all of them in this order. A decision
is written by `compare_set`: the first keeper decides the value, and each further keeper is given the answer
of the previous one. The answer of the last keeper counts: all others have the value by then, so it is not
lost with any of them. See docs/design/membership.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import select
import socket
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import DistError

from mcr_plus.core.addresses import family_of
from mcr_plus.core.c10d import Store
from mcr_plus.core.deadline import Deadline, until
from mcr_plus.core.environment import LOOPBACK
from mcr_plus.core.proc import read_stat
from mcr_plus.errors import LaunchError
from mcr_plus.hosts.key_replica import ADD, ANSWER, COMPARE_SET, GET, LEAVE, REQUEST, SET, TOKEN
from mcr_plus.rendezvous.heartbeats import hosts_of
from mcr_plus.rendezvous.network import meeting_address
from mcr_plus.rendezvous.side_processes import command, wait_for
from mcr_plus.rendezvous.store import exchange
from mcr_plus.rendezvous.store_connections import listening

if TYPE_CHECKING:
    from mcr_plus.membership.rules import Process

_MOST: Final = 8  # most hosts with a keeper
_ANSWERS_WITHIN: Final = 30.0  # seconds
_LOOK_EVERY: Final = 100  # ms between checks whether the host is cut off
_NAP: Final = 0.01
_log = logging.getLogger("mcr_plus")


class _OutOfReachError(Exception):
    """A keeper does not answer now, or never will."""


class _ReplicaConnection:
    """Connection of a rank to the keeper of one host.

    Attributes:
        place: place of the host, as in `Process.place`.
        ended: whether the keeper has ended, with its values, or has not answered for long.
    """

    def __init__(self, place: str, address: tuple[str, int], token: bytes) -> None:
        self.place, self.ended = place, False
        self._address, self._token = address, token
        self._link: socket.socket | None = None

    def ask(self, kind: int, key: bytes, value: bytes, is_away: Callable[[], bool]) -> bytes | None:
        """Return the answer to a request: the value, None for none. Raises `_OutOfReachError`."""
        if self.ended or is_away():
            raise _OutOfReachError
        deadline = Deadline(_ANSWERS_WITHIN)
        try:
            if self._link is None:
                self._connect(deadline, is_away)
            assert self._link is not None
            self._link.sendall(REQUEST.pack(kind, len(key), len(value)) + key + value)
            has, size = ANSWER.unpack(self._receive(ANSWER.size, deadline, is_away))
            found = self._receive(size, deadline, is_away)
            return found if has else None
        except OSError as error:
            self.close()
            # Reset, closed or refused by a host that answers: the process is gone.
            self.ended = isinstance(error, ConnectionError)
            raise _OutOfReachError from error
        except _OutOfReachError:
            self.close()
            raise

    def _connect(self, deadline: Deadline, is_away: Callable[[], bool]) -> None:
        link = self._link = socket.socket(family_of(self._address[0]), socket.SOCK_STREAM)
        link.setblocking(False)
        status = link.connect_ex(self._address)
        if status not in (0, errno.EINPROGRESS):
            raise OSError(status, os.strerror(status))
        self._wait(select.POLLOUT, deadline, is_away)
        if status := link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(status, os.strerror(status))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(_ANSWERS_WITHIN)
        link.sendall(self._token)

    def _receive(self, size: int, deadline: Deadline, is_away: Callable[[], bool]) -> bytes:
        received = bytearray()
        assert self._link is not None
        while len(received) < size:
            self._wait(select.POLLIN, deadline, is_away)
            data = self._link.recv(size - len(received))
            if not data:
                raise ConnectionResetError
            received += data
        return bytes(received)

    def _wait(self, event: int, deadline: Deadline, is_away: Callable[[], bool]) -> None:
        poll = select.poll()
        assert self._link is not None
        poll.register(self._link, event)
        while not poll.poll(_LOOK_EVERY):
            self.ended |= deadline.passed()  # counts as ended: every further request would take as long
            if is_away() or self.ended:
                raise _OutOfReachError

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        link, self._link = self._link, None
        if link is not None:
            link.close()


class ReplicatedKeys(Store):
    """The keepers of a job as one store: a value agreed on in it is not lost with any of them."""

    def __init__(self, keepers: Sequence[_ReplicaConnection], part: str, own: tuple[int, str, str]) -> None:
        """`part`: prefix of all keys. `own`: number, start time and place of this process."""
        super().__init__()
        self._keepers, self._part, self._own = list(keepers), part, own
        self._is_cut_off: Callable[[str], bool] = lambda _: False
        self._timeout = _ANSWERS_WITHIN

    def watch(self, is_cut_off: Callable[[str], bool], places: Collection[str]) -> None:
        """Leave out, from now on, hosts for which this is true, and hosts that are not among the places.

        Called for the members of an epoch: a host without members takes no part in it.
        """
        self._is_cut_off = is_cut_off
        for keeper in self._keepers:
            if keeper.place not in places:
                keeper.close()
        self._keepers = [keeper for keeper in self._keepers if keeper.place in places]

    def part(self, name: str) -> ReplicatedKeys:
        """Return the same keepers under another prefix."""
        return ReplicatedKeys(self._keepers, name, self._own)

    def leave(self) -> None:
        """Report that the keepers are not needed; a host's keeper ends once all its ranks have done so."""
        for keeper in self._keepers:
            if keeper.place == self._own[2] and not keeper.ended:
                with contextlib.suppress(_OutOfReachError):
                    keeper.ask(LEAVE, b"", json.dumps(self._own[:2]).encode(), lambda: False)
        self.close()

    def close(self) -> None:
        """Close the connections to the keepers; the next request opens new ones."""
        for keeper in self._keepers:
            keeper.close()

    def _answers(self, kind: int, key: str, value: bytes = b"") -> Iterator[bytes | None]:
        """Return the keepers' answers to a request, in order; raise `DistError` if none answers."""
        reached, name = 0, f"{self._part}/{key}".encode()
        for keeper in self._keepers:
            away = keeper.place
            with contextlib.suppress(_OutOfReachError):
                found = keeper.ask(kind, name, value, lambda: self._is_cut_off(away))  # noqa: B023
                reached += 1
                if kind == COMPARE_SET and found is not None:
                    value = found
                yield found
        if not reached:
            raise DistError("no keeper of the ranks' decisions can be reached")

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        for _ in self._answers(SET, key, value.encode() if isinstance(value, str) else value):
            pass

    def compare_set(self, key: str, expected_value: str, desired_value: str | bytes) -> bytes:
        """Write a value unless the key has one, and return the result; `expected_value` must be empty."""
        if expected_value:
            raise ValueError("compare_set: values can only be written where there is none")
        value = desired_value.encode() if isinstance(desired_value, str) else desired_value
        *_, found = self._answers(COMPARE_SET, key, value)
        assert found is not None
        return found

    def add(self, key: str, value: int) -> int:
        """Add to a counter; return its new value."""
        *_, last = self._answers(ADD, key, str(value).encode())
        return int(last or 0)

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys have a value, each with any of the keepers."""
        return all(any(found is not None for found in self._answers(GET, key)) for key in keys)

    def get(self, key: str) -> bytes:
        """Wait for a value; return the one of the last keeper that has a value."""

        def found() -> list[bytes]:
            return [value for value in self._answers(GET, key) if value is not None]

        if not (values := until(found, Deadline(self._timeout), _NAP)):
            raise DistError(f"wait timeout, key: {key}")
        return values[-1]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys have a value."""
        deadline = Deadline(self._timeout if timeout is None else timeout)
        if not until(lambda: self.check(keys), deadline, _NAP):
            raise DistError(f"wait timeout, keys: {', '.join(keys[:3])}")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of `get` and `wait`."""
        self._timeout = timeout.total_seconds()


def open_keepers(
    store: Store, rank: int, processes: Sequence[Process], timeout: float
) -> ReplicatedKeys | None:
    """Start the keepers of a job; collective over its ranks. None if no host can have a keeper."""
    hosts = hosts_of(processes)
    me = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    starts = rank == hosts[me][0] and me < _MOST
    token = secrets.token_bytes(TOKEN)
    address = None
    started: subprocess.Popen[bytes] | None = None
    if starts:
        order = {"token": token.hex(), "processes": [processes[peer][:2] for peer in hosts[me]]}
        address, started = _start(order, LOOPBACK if len(hosts) == 1 else None)
    mine = json.dumps([address, token.hex()])
    try:
        texts = exchange(store, rank, len(processes), "keepers", mine, timeout)
    finally:
        if started is not None:
            wait_for(started)
    answers = [json.loads(text) for text in texts]
    firsts = [ranks[0] for ranks in hosts[:_MOST]]
    keepers = [
        _ReplicaConnection(processes[first].place, tuple(answers[first][0]), bytes.fromhex(answers[first][1]))
        for first in firsts
        if answers[first][0] is not None
    ]
    own = read_stat(os.getpid())
    part = f"members/{answers[0][1][:16]}"
    identity = (os.getpid(), own[1] if own else "", processes[rank].place)
    return ReplicatedKeys(keepers, part, identity) if keepers else None


def _start(
    order: dict[str, Any], address: str | None
) -> tuple[tuple[str, int] | None, subprocess.Popen[bytes] | None]:
    """Start this host's keeper; return its address, and the process that ends once the keeper has started."""
    listener = None
    try:
        listener = listening(address or meeting_address())
        started = subprocess.Popen(
            command("mcr_plus.hosts.key_replica"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(listener.fileno(),),
        )
        assert started.stdin is not None
        with started.stdin as stream:
            stream.write(json.dumps({**order, "socket": listener.fileno()}).encode())
        return listener.getsockname()[:2], started
    except (OSError, LaunchError) as error:
        _log.warning("this host has no keeper of the ranks' decisions: %s", error)
        return None, None
    finally:
        if listener is not None:
            listener.close()
