"""Connection of a receiver to one source rank, and the buffers that the source fills."""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from mcr_plus.errors import BackendError, PeerLost, SyncClosed
from mcr_plus.kernels import delta
from mcr_plus.rendezvous import stream as links
from mcr_plus.rendezvous.stream import AuthenticationFailed, StreamClosed, StreamConnection
from mcr_plus.weight_sync import relays
from mcr_plus.weight_sync.relays import Relay, RelayTicket
from mcr_plus.weight_sync.weights import combined, digest_of

_log = logging.getLogger("mcr_plus")
_TRIES: Final = 8  # connections in a row without an answer
_FAILURES: Final = 3  # unusable answers in a row
_UNKNOWN: Final = 0  # digest of weights that are not usable
_TIMED: Final = 4 << 20  # bytes; shorter messages may already lie in the socket, so timing them means nothing


class SourceAnswer(NamedTuple):
    """Answer of a source rank: the version after its payloads, the number of payloads, and their bytes."""

    version: int
    payloads: int
    body: bytearray


class SourceConnection:
    """Connection to a source rank, and the buffers that it fills, with their version and digests.

    One thread at a time uses it. `has_ended`: whether the source has closed the synchronisation. `rank`: rank
    of this receiver; outside the job its number, with the `offer` that it takes. `ends`: whether to stop;
    `closes`: the same, for threads of the relay.
    """

    def __init__(
        self,
        what: str,
        source: int,
        place: tuple[str, int],
        secret: bytes,
        rank: int,
        held: Sequence[torch.Tensor],
        ends: Callable[[], bool],
        offer: int | None = None,
        closes: Callable[[], bool] | None = None,
    ) -> None:
        self.source, self.version, self.is_whole, self.has_ended = source, 0, True, False
        self.refused = self.received = self.anchors = 0
        self._what, self._place, self._secret, self._rank = what, place, secret, rank
        self._held, self._ends, self._offer, self._closes = held, ends, offer, closes or ends
        self._digests = digest_of(held)
        self._most = links.longest(sum(each.nbytes for each in held))
        self._link: StreamConnection | None = None
        self._entered: StreamConnection | None = None  # on which the source was told of the relay
        self.relay: Relay | None = None  # unless the source is on this host
        self._report: tuple[int, int] | None = None  # for the source: a relay, or itself, and its rate
        self._fruitless = self._failures = 0
        self._rate = 0.0  # bytes per second, from the last long message
        self._apply_s = 0.0  # seconds to apply one version's changes, from the last message with changes

    @property
    def cost(self) -> int:
        """Bytes that arrive in the time that one version's changes take to apply; 0 if unknown."""
        return int(self._rate * self._apply_s)

    def lacks(self, version: int) -> bool:
        """Return whether this source must be asked again to reach a version."""
        return self.version < version or not self.is_whole

    def fetch(
        self, kind: int, aim: int = 0, announced: Callable[[int], object] | None = None
    ) -> SourceAnswer:
        """Send a request and wait for the answer; reconnect if the connection breaks.

        Args:
            kind: `WAIT` for a newer version than the held one, or `POLL`.
            aim: the wanted version, 0 for the newest. The answer is for a newer version if the source has
                dropped the payloads that lead to the wanted one.
            announced: called with the version of the answer before payloads arrive, each time they are sent.

        Raises:
            PeerLost: the source no longer answers.
            SyncClosed: the source has closed the synchronisation.
            BackendError: the source or its job has failed, or the source runs another version of the library.
            StreamClosed: `ends` has become true.
        """
        began = 0.0

        def begun(answer: int, version: int) -> None:
            nonlocal began
            began = time.perf_counter()
            if announced is not None and answer in (links.PAYLOADS, links.RELAYED):
                announced(version)

        while True:
            try:
                link = self.connected()
                self._prepare(link, aim)
                link.send(kind, self.version, combined(self._digests) if self.is_whole else _UNKNOWN)
                answer, version, count, body = self._received(link, begun)
            except (OSError, EOFError) as error:  # a broken connection may be the only problem
                self._broken(error)
                continue
            if answer == links.END:
                self.has_ended = True
                if version == links.FAILED:
                    why = "it or its job has failed, or begun anew"
                    raise BackendError(f"{self._what}: rank {self.source} sends no more: {why}")
                raise SyncClosed(f"{self._what}: rank {self.source} has closed it")
            self._fruitless = 0
            arrived, via = link.arrived, relays.SOURCE
            if answer == links.RELAYED:
                ticket = RelayTicket.of(body)
                try:
                    body, arrived, began = relays.fetch(
                        ticket, version, self._secret, self._rank, self._most, self._ends
                    )
                except StreamClosed:
                    raise
                except Exception as error:  # of any kind: it need not be a relay of ours
                    self._bypass(ticket, error)
                    continue
                count, via = len(arrived), ticket.relay
            self._note(len(body), time.perf_counter() - began, via)
            if self.relay is not None and count:
                self.relay.keep(version, arrived)
            return SourceAnswer(version, count, body)

    def _prepare(self, link: StreamConnection, aim: int) -> None:
        """Send what precedes a request: on a new connection, the port of the relay."""
        own, other = link.hosts
        if own != other and link is not self._entered:
            self._entered = link
            try:
                self.relay = self.relay or Relay(self._what, self._secret, self._closes, own, self._most // 2)
            except (OSError, RuntimeError) as error:
                _log.warning("%s: this receiver does not relay: %s", self._what, error)
            if self.relay is not None:
                link.send(links.ENTER, self.relay.port)
        if self._report is not None:
            link.send(links.REPORT, *self._report)
            self._report = None
        if aim or self.cost:
            link.send(links.AIM, aim, self.cost)

    def _note(self, nbytes: int, seconds: float, via: int) -> None:
        """Note the rate of a long message, for the source, too."""
        if nbytes >= _TIMED:
            self._rate = nbytes / seconds
            self._report = via, int(self._rate)

    def _bypass(self, ticket: RelayTicket, error: Exception) -> None:
        """Log that a relay failed; the source is told with the next request."""
        is_damaged = isinstance(error, AuthenticationFailed)
        self.refused += is_damaged
        how = relays.LACKING if isinstance(error, LookupError) else relays.LOST
        self._report = ticket.relay, relays.DAMAGED if is_damaged else how
        _log.warning(
            "%s: %s bypasses its relay, %s at %s: %s",
            self._what, links.named(self._rank), links.named(ticket.relay), ticket.host, error,
        )  # fmt: skip

    def connected(self) -> StreamConnection:
        """Return the connection, opened if there is none; raises what `fetch` raises."""
        if self._link is None:
            try:
                self._link = links.connect(
                    self._place, self._secret, self._rank, self._ends, _TRIES, self._offer
                )
            except (OSError, EOFError) as error:
                raise self._lost(error) from None
        return self._link

    def check(self) -> None:
        """Reconnect if the source closed an idle connection; raises what `fetch` raises."""
        try:
            self.connected().check()
        except (OSError, EOFError) as error:
            self._broken(error)
            self.connected()

    def _received(
        self, link: StreamConnection, announced: Callable[[int, int], object]
    ) -> tuple[int, int, int, bytearray]:
        """Return the next frame."""
        return link.receive(self._most, announced)

    def _broken(self, error: Exception) -> None:
        """Close the connection; raises `PeerLost` after `_TRIES` connections without an answer."""
        if isinstance(error, AuthenticationFailed):
            self.refused += 1
            _log.warning("%s: %s; %s connects again", self._what, error, links.named(self._rank))
        self.close()
        self._fruitless += 1
        if self._fruitless == _TRIES:
            raise self._lost(error)
        time.sleep(0.05 * (self._fruitless - 1))

    def _lost(self, error: Exception) -> PeerLost:
        return PeerLost(
            f"{self._what}: rank {self.source}, a source of weights, does not answer any more: {error}",
            (self.source,),
            self._what,
            seen="connection closed",
        )

    def close(self, *, says_end: bool = False) -> None:
        """Close the connection, if there is one; `says_end` tells the source that this is intended."""
        link, self._link = self._link, None
        if link is not None:
            if says_end and not link.is_sending:
                with contextlib.suppress(OSError, StreamClosed):
                    link.send(links.END)
            link.close()

    def take(self, answer: SourceAnswer) -> int:
        """Apply an answer to the buffers; returns how many elements it lists as changed.

        An answer that is damaged, or does not follow from the held version, is logged; the next answer then
        has all elements. Raises `BackendError` after three such answers in a row.
        """
        if not self._held:
            self.version = max(self.version, answer.version)
        if not answer.payloads:
            return 0
        try:
            changed = self._apply(answer.body, answer.payloads)
        except BackendError as error:
            self.refused += 1
            self._failures += 1
            if self._failures == _FAILURES:
                raise
            _log.warning(
                "%s: from rank %d: %s; requesting all weights instead", self._what, self.source, error
            )
            return 0
        self._failures = 0
        self.received += len(answer.body)
        return changed

    def _apply(self, body: bytearray, count: int) -> int:
        parts = len(self._held)
        if not parts or count % parts or len(body) < 8 * count:
            raise BackendError(f"{count} payloads in {len(body)} bytes for {parts} buffers")
        sizes = struct.unpack_from(f"<{count}Q", body)
        if sum(sizes) != len(body) - 8 * count:
            raise BackendError(f"payloads of {sum(sizes)} bytes in {len(body) - 8 * count}")
        data = torch.frombuffer(body, dtype=torch.uint8)
        wires = data[8 * count :].split(list(sizes))
        changed, anchors, seconds = 0, 0, 0.0
        was, self.is_whole = self.is_whole, False
        for begin in range(0, count, parts):
            step = wires[begin : begin + parts]
            heads = [delta.header_of(wire) for wire in step]
            for head, digest in zip(heads, self._digests, strict=True):
                delta.follow(head, self.version, digest if was else None)
            began = time.perf_counter()
            for wire, held in zip(step, self._held, strict=True):
                delta.apply(wire, held)
                changed += delta.changed(wire)
            self._digests = [head.digest for head in heads]
            self.version = heads[0].target
            if all(head.is_anchor for head in heads):
                anchors += 1
            else:
                seconds += time.perf_counter() - began
            was = True
        self.is_whole = True
        self.anchors += anchors
        steps = count // parts - anchors
        if steps:
            self._apply_s = seconds / steps
        else:  # full weights do not measure it; halve it, so that one bad measurement cannot last
            self._apply_s /= 2
        return changed
