"""What a receiver of weights gets from one source rank: a connection, and the buffers that it fills."""

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
from mcr_plus.weight_sync.weights import combined, digest_of

_log = logging.getLogger("mcr_plus")
_TRIES: Final = 8  # connections in a row that bring no answer
_FAILURES: Final = 3  # answers in a row that cannot be used
_UNKNOWN: Final = 0  # the digest of weights that are not usable
_TIMED: Final = 4 << 20  # bytes; shorter messages may lie in the socket before they are read


class SourceAnswer(NamedTuple):
    """What a source rank has sent: the version that its payloads lead to, how many they are, and the body."""

    version: int
    payloads: int
    body: bytearray


class SourceConnection:
    """The connection to a source rank, and the buffers for what it sends, with their version and digests.

    One thread at a time uses it. `has_ended`: whether the source has closed the synchronisation. `rank`: of
    this receiver, or its number, if it is outside the job, with the `offer` that it takes; `ends`: whether it
    is to end.
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
    ) -> None:
        self.source, self.version, self.is_whole, self.has_ended = source, 0, True, False
        self.refused = self.received = self.anchors = 0
        self._what, self._place, self._secret, self._rank = what, place, secret, rank
        self._held, self._ends, self._offer = held, ends, offer
        self._digests = digest_of(held)
        self._most = links.longest(sum(each.nbytes for each in held))
        self._link: StreamConnection | None = None
        self._fruitless = self._failures = 0
        self._rate = 0.0  # bytes per second of the last long message
        self._apply_s = 0.0  # of the changes of one version, in the last message with some

    @property
    def cost(self) -> int:
        """Bytes that take as long to arrive as the changes of one version to be applied; 0 if not known."""
        return int(self._rate * self._apply_s)

    def lacks(self, version: int) -> bool:
        """Whether it has to be fetched for this version."""
        return self.version < version or not self.is_whole

    def fetch(
        self, kind: int, aim: int = 0, announced: Callable[[int], object] | None = None
    ) -> SourceAnswer:
        """Ask the source, and wait for its answer, on new connections where they break.

        Args:
            kind: `WAIT` for something newer than what is held, or `POLL`.
            aim: the version that is wanted, 0 for the newest. The answer is for a newer one if the source has
                dropped what leads to this one.
            announced: called with the version of the answer before its payloads come; again if they are sent
                again.

        Raises:
            PeerLost: the source does not answer any more.
            SyncClosed: it has closed the synchronisation.
            BackendError: it, or its job, has failed, or it is of another version.
            Ended: this end is to end.
        """
        began = 0.0

        def begun(answer: int, version: int) -> None:
            nonlocal began
            began = time.perf_counter()
            if announced is not None and answer == links.PAYLOADS:
                announced(version)

        while True:
            try:
                link = self.connected()
                if aim or self.cost:
                    link.send(links.AIM, aim, self.cost)
                link.send(kind, self.version, combined(self._digests) if self.is_whole else _UNKNOWN)
                answer, version, count, body = self._received(link, begun)
            except (OSError, EOFError) as error:  # the connection may have been the trouble
                self._broken(error)
                continue
            if answer == links.END:
                self.has_ended = True
                if version == links.FAILED:
                    why = "it or its job has failed, or begun anew"
                    raise BackendError(f"{self._what}: rank {self.source} sends no more: {why}")
                raise SyncClosed(f"{self._what}: rank {self.source} has closed it")
            self._fruitless = 0
            if len(body) >= _TIMED:
                self._rate = len(body) / (time.perf_counter() - began)
            return SourceAnswer(version, count, body)

    def connected(self) -> StreamConnection:
        """The connection, made if there is none; raises as `fetch`."""
        if self._link is None:
            try:
                self._link = links.connect(
                    self._place, self._secret, self._rank, self._ends, _TRIES, self._offer
                )
            except (OSError, EOFError) as error:
                raise self._lost(error) from None
        return self._link

    def check(self) -> None:
        """Connect again if the source has closed the connection, on which nothing is expected; as `fetch`."""
        try:
            self.connected().check()
        except (OSError, EOFError) as error:
            self._broken(error)
            self.connected()

    def _received(
        self, link: StreamConnection, announced: Callable[[int, int], object]
    ) -> tuple[int, int, int, bytearray]:
        """The next frame."""
        return link.receive(self._most, announced)

    def _broken(self, error: Exception) -> None:
        """Close the connection; raises `PeerLost` if several in a row have brought no answer."""
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
        """Close the connection, if there is one; with a word to the source that this was intended."""
        link, self._link = self._link, None
        if link is not None:
            if says_end and not link.is_sending:
                with contextlib.suppress(OSError, StreamClosed):
                    link.send(links.END)
            link.close()

    def take(self, answer: SourceAnswer) -> int:
        """Apply an answer to the buffers; returns how many elements it lists as changed.

        One that does not follow from what is held, or is damaged, is logged, and the next one is of all
        elements. Raises `BackendError` if that was the third in a row.
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
                "%s: from rank %d: %s; all weights are asked for instead", self._what, self.source, error
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
        else:  # all weights do not show it, so a long one that was chance would last
            self._apply_s /= 2
        return changed
