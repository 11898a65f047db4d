"""Relays: receivers forward messages to other receivers, so that a source sends each message about once.

A source answers the first receiver that asks for a message with its payloads, and later ones with the hash
of its body and a relay: a receiver that has this message, or is getting it. A body is accepted only with the
hash that the source has signed, so relays need not be trusted. A receiver whose relay is lost, silent or
damaged reports this with its next request, and gets another relay or the payloads.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from mcr_plus.errors import BackendError
from mcr_plus.hosts.acceptor import Acceptor
from mcr_plus.rendezvous import stream as links
from mcr_plus.rendezvous.stream import JOINER, AuthenticationFailed, Payload, StreamClosed, StreamConnection

SOURCE: Final = JOINER
"""Stands for the source, in place of a relay, in reports of rates."""
LOST, DAMAGED, LACKING = range(3)
"""Rates reported of a relay that does not answer, damages a message, or does not have it any more."""
SMALLEST: Final = 1 << 16
"""Bytes of a message from which relays are worth their latency."""
_CHILDREN: Final = 3  # of a relay at a time
_FAILURES: Final = 3  # of a receiver's relays in a row, after which it rests
_RESTS: Final = 60.0  # s until a receiver tries a relay again that failed, or relays at all
_SAYS_EVERY: Final = 1.0  # s, while a message has not arrived
_SILENT: Final = 5.0  # s
_WAITS: Final = 60.0  # s for a relay to get a message itself, beside what it takes at this rate:
_SLOWEST: Final = 1e6  # bytes per second
_LONGEST_REQUEST: Final = 256


class RelayTicket(NamedTuple):
    """Answer of a source in place of payloads: the relay, its address, and the hash of the message."""

    relay: int
    host: str
    port: int
    hash: str

    def payload(self) -> Payload:
        """Return it as a frame's payload."""
        return Payload.of(json.dumps(self).encode())

    @classmethod
    def of(cls, body: bytearray) -> RelayTicket:
        """Return the content of a frame with one payload."""
        return cls(*json.loads(body[8:]))


class RelayTree:
    """Choice of relays by a source, whose lock guards it: who holds or fetches which messages, and rates.

    Relays have at most three children at a time. Those on the receiver's host come first, then those with the
    highest measured rates; relays that are less than half as fast as the source are not used.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[str, int]] = {}
        self._held: dict[int, deque[str]] = {}  # last messages of each receiver, as `Relay` keeps them
        self._parents: dict[int, tuple[int, str]] = {}  # relay and message of those that have not asked again
        self._rates: dict[tuple[int, int], int] = {}
        self._failures: Counter[int] = Counter()
        self._rests: dict[tuple[int, int], float] = {}  # of a receiver from a relay; from all: from itself

    def enter(self, rank: int, link: StreamConnection, port: int) -> None:
        """Note the port on which a receiver forwards. Raises `BackendError` if it is none."""
        if not 0 < port < 1 << 16:
            raise BackendError(f"a relay on port {port}")
        self._places[rank] = (link.hosts[1], port)

    def leave(self, rank: int) -> None:
        """Forget a receiver."""
        for known in (self._places, self._held, self._parents, self._failures):
            known.pop(rank, None)
        self._rates = {pair: rate for pair, rate in self._rates.items() if rank not in pair}
        self._rests = {pair: ends for pair, ends in self._rests.items() if rank not in pair}

    def report(self, rank: int, relay: int, rate: int) -> None:
        """Note the bytes per second of a receiver's last message, or how its relay failed.

        A receiver can accuse only the relay that it was given.
        """
        given, body = self._parents.get(rank, (SOURCE, ""))
        if relay not in (SOURCE, given):
            return
        if rate > LACKING:
            self._rates[rank, relay] = rate
        elif relay != SOURCE:
            del self._parents[rank]
            if body in (held := self._held.get(relay, deque())):
                held.remove(body)
            if rate == DAMAGED:
                self._places.pop(relay, None)
            if rate != LACKING:
                self._failures[rank] += 1
                ends = self._rests[rank, relay] = time.monotonic() + _RESTS
                if self._failures[rank] == _FAILURES:
                    self._failures[rank], self._rests[rank, rank] = 0, ends

    def holds(self, body: str) -> bool:
        """Return whether a receiver may still have a message."""
        return any(body in held for held in self._held.values())

    def asks(self, rank: int) -> None:
        """Note that a receiver is done with its relay, which has not failed if that was not reported."""
        if self._parents.pop(rank, None) is not None:
            del self._failures[rank]

    def ticket(self, rank: int, body: str) -> RelayTicket | None:
        """Return the relay from which a receiver shall fetch a message; None for the source itself."""
        place, now = self._places.get(rank), time.monotonic()
        if place is None or self._rests.get((rank, rank), 0.0) > now:
            return None
        loads = Counter(relay for relay, known in self._parents.values() if known == body)
        direct = self._rates.get((rank, SOURCE), 0)
        fits = [
            each
            for each, held in self._held.items()
            if body in held
            and each in self._places
            and loads[each] < _CHILDREN
            and rank not in self._chain(each)
            and self._rests.get((rank, each), 0.0) <= now
            and 2 * self._rates.get((rank, each), direct) >= direct
        ]
        best = min(fits, key=lambda each: self._cost(rank, each, place[0]), default=None)
        if best is None:
            return None
        self._parents[rank] = best, body
        return RelayTicket(best, *self._places[best], body)

    def gets(self, rank: int, body: str) -> None:
        """Note that a receiver is sent a message, or pointed to a relay for it."""
        held = self._held.setdefault(rank, deque(maxlen=2))
        if rank in self._places and body not in held:
            held.append(body)

    def _cost(self, rank: int, relay: int, host: str) -> tuple[bool, int, int]:
        depth = sum(1 for _ in self._chain(relay))
        return self._places[relay][0] != host, -self._rates.get((rank, relay), 0), depth

    def _chain(self, rank: int | None) -> Iterator[int]:
        """Yield a receiver, the relay for which it waits, that one's relay, and so on."""
        while rank is not None:
            yield rank
            rank, _ = self._parents.get(rank, (None, ""))


class Relay:
    """Server of a receiver's last two messages of one source, on threads of its own. `most`: their bytes."""

    def __init__(self, what: str, secret: bytes, ends: Callable[[], bool], host: str, most: int) -> None:
        self._secret, self._ends, self._most = secret, ends, most
        self._acceptor = Acceptor(links.listen(host), what)
        self.port: int = self._acceptor.listener.getsockname()[1]
        self.forwarded = 0  # bytes
        self._kept: deque[tuple[str, Sequence[Payload]]] = deque(maxlen=2)
        self._version = 0
        self._changed = threading.Condition()
        accept = partial(self._acceptor.serve, self._serve, ends)
        threading.Thread(target=accept, name=f"mcr_plus-{what}", daemon=True).start()

    def keep(self, version: int, payloads: Sequence[Payload]) -> None:
        """Offer a message that has arrived and has the hash that the source has signed."""
        with self._changed:
            self._version = version
            self._kept.append((links.hash_of(payloads), payloads))
            while len(self._kept) > 1 and self._nbytes > self._most:
                self._kept.popleft()
            self._changed.notify_all()

    @property
    def _nbytes(self) -> int:
        return sum(len(each.data) for _, payloads in self._kept for each in payloads)

    def _serve(self, connection: socket.socket) -> None:
        """Send one message to one receiver."""
        link = StreamConnection(connection, self._ends)
        try:
            links.greeted(link, self._secret)
            self._acceptor.admit(connection)
            _, version, _, body = link.receive(_LONGEST_REQUEST)
            payloads = self._awaited(link, version, body[8:].decode())
            link.send(links.PAYLOADS, version, len(payloads), payloads)
            self.forwarded += sum(len(each.data) for each in payloads)
        except (OSError, EOFError, BackendError, StreamClosed, ValueError) as error:
            self._acceptor.refuse(connection, error)
        finally:
            link.close()

    def _awaited(self, link: StreamConnection, version: int, body: str) -> Sequence[Payload]:
        """Return a message once it has arrived here; none if it is not among the last two."""
        while True:
            with self._changed:
                found = next((payloads for known, payloads in self._kept if known == body), None)
                if found is not None or self._version >= version or self._ends():
                    return found or ()
                self._changed.wait(_SAYS_EVERY)
            link.send(links.POLL)


def fetch(
    ticket: RelayTicket, version: int, secret: bytes, rank: int, most: int, ends: Callable[[], bool]
) -> tuple[bytearray, list[Payload], float]:
    """Return the body of a message from a relay, its payloads, and the time at which it began to arrive.

    Raises `AuthenticationFailed` if it is not the message of the ticket, `LookupError` if the relay does not
    have it any more, `StreamClosed`, and other errors if the relay is lost, silent or says anything else.
    """
    link = links.connect((ticket.host, ticket.port), secret, rank, ends, 1, silent=_SILENT)
    began, ends_at = [0.0], time.monotonic() + _WAITS + most / _SLOWEST
    try:
        link.send(links.RELAYED, version, 1, [Payload.of(ticket.hash.encode())])
        kind, body = links.POLL, bytearray()
        while kind == links.POLL:
            if time.monotonic() > ends_at:
                raise EOFError("it has not got the message itself")
            kind, _, _, body = link.receive(most, lambda *_: began.append(time.perf_counter()))
        if not link.arrived:
            raise LookupError("it does not have this message any more")
        if links.hash_of(link.arrived) != ticket.hash:
            raise AuthenticationFailed("it sent another message than the source has named")
        return body, link.arrived, began[-1]
    finally:
        link.close()
