"""Source of weights: encodes changes between pushes, and answers receivers, while training goes on."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from mcr_plus.core.units import whole_number
from mcr_plus.errors import BackendError, InvalidArgument, McrError, PeerLost, phrase_ranks
from mcr_plus.hosts.acceptor import Acceptor
from mcr_plus.kernels import delta
from mcr_plus.rendezvous import stream as links
from mcr_plus.rendezvous.stream import JOINER, Payload, StreamClosed, StreamConnection
from mcr_plus.weight_sync.relays import DAMAGED, SMALLEST, RelayTicket, RelayTree
from mcr_plus.weight_sync.weights import Weights, combined, digest_of

_log = logging.getLogger("mcr_plus")
_LOOK_S: Final = 0.5
SMALL: Final = 1 << 20
"""Size up to which weights may be pushed faster than a receiver asks several sources for one version."""
_NOTHING: Final = (-1, 0)
_RETURNS_WITHIN: Final = 5.0  # seconds within which a receiver reconnects


class _VersionStep(NamedTuple):
    """Payloads that lead from `base` to `target`, and digests of the base version, for each buffer."""

    base: int
    base_digests: list[int]
    target: int
    payloads: list[Payload]

    @property
    def nbytes(self) -> int:
        return sum(len(payload.data) for payload in self.payloads)


class _Message(NamedTuple):
    """Answer: payloads that lead from `base`, a version and its digest, or `_NOTHING`, to `target`."""

    base: tuple[int, int]
    target: int
    payloads: list[Payload]

    @property
    def nbytes(self) -> int:
        return sum(8 + len(payload.data) for payload in self.payloads)

    @property
    def hash(self) -> str:
        return links.hash_of(self.payloads)


class WeightSource:
    """Last encoded version, payloads from earlier versions, and a thread per receiver.

    `secret`: key of the synchronisation. `listener`: socket to which receivers connect. `ends`: whether the
    group is closed. `receivers`: ranks that may ask, with the numbers of their buffers. Payloads of earlier
    versions are kept up to `history` bytes. `offers`: buffers of each offer to receivers outside the job,
    which come and go at any time; with offers, the source goes on without any receiver.
    """

    def __init__(
        self,
        weights: Weights,
        what: str,
        secret: bytes,
        listener: Any,
        receivers: Mapping[int, Sequence[int]],
        history: int,
        ends: Callable[[], bool],
        offers: Sequence[Sequence[int]] = (),
    ) -> None:
        self._weights, self._what, self._secret = weights, what, secret
        self._acceptor = Acceptor(listener, what, members=len(receivers))
        self._receivers, self._history, self._group_ends = receivers, history, ends
        self._offers = offers
        self._staging, self._held = weights.buffers(), weights.buffers()
        weights.read(self._held)
        self._digests = digest_of(self._held)
        self._wires = [
            torch.empty(
                delta.most_nbytes(buffer.numel(), buffer.element_size()), dtype=torch.uint8, device="cpu"
            )
            for buffer in self._held
        ]
        self._changed = threading.Condition()
        self._encoding = threading.Lock()  # guards `_held`
        self._steps: deque[_VersionStep] = deque()
        self._kept = 0  # bytes of the payloads in `_steps`
        self._anchors: dict[int, Payload] = {}  # all elements of the held version, by buffer
        self._version = self._pushed = 0
        self._pending: int | None = None
        self._error: McrError | None = None
        self._closed, self._is_in_order = False, True
        self.is_last: Callable[[], bool] = lambda: False  # whether the program will push no more
        self._links: dict[int, StreamConnection] = {}
        self._lost: dict[int, float] = {}  # rank → time of the loss
        self._relays = RelayTree()
        self._messages: dict[tuple[bool, tuple[int, ...]], _Message] = {}  # that relays may have
        self.was_joined = False  # whether a receiver outside the job has ever come
        self._joined: dict[int, int] = {}  # receiver outside the job → version from which it asked
        self._stats: dict[str, Any] = {
            "density": 0.0, "bytes": 0, "seconds": 0.0, "anchors": 0, "sent_bytes": 0, "relayed": 0,
            "push_seconds": 0.0,
        }  # fmt: skip
        accept = partial(self._acceptor.serve, self._serve, self._ends)
        self._threads = [
            threading.Thread(target=each, name=f"mcr_plus-{what}", daemon=True)
            for each in (self._encode_all, accept)
        ]
        for thread in self._threads:
            thread.start()

    # -- of the program's thread --------------------------------------------------------------------

    def push(self, version: int | None) -> int:
        """Publish the weights as they are now, see `WeightSync.push`."""
        number = self._pushed + 1 if version is None else whole_number(version)
        if number is None or not self._pushed < number < 2**63:
            raise InvalidArgument(
                f"push: version {version!r}; expected an integer above {self._pushed}, the last one pushed"
            )
        with self._changed:
            while self._pending is not None and not self._ends():
                self._changed.wait(_LOOK_S)
            self._check()
            begin = time.perf_counter()
            self._weights.read(self._staging)
            self._stats["push_seconds"] = time.perf_counter() - begin
            self._pushed = self._pending = number
            self._changed.notify_all()
        return number

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self._weights.nbytes

    def stats(self) -> dict[str, Any]:
        """Return figures of this rank, see `WeightSync.stats`."""
        with self._changed:
            return {
                **self._stats, "version": self._version, "versions_behind": self._pushed - self._version,
                "history_bytes": self._kept, "receivers": len(self._links), "joined": len(self._joined),
                "lost": sorted(self._lost),
            }  # fmt: skip

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed or self._group_ends():
            raise BackendError(f"{self._what}: closed")
        now = time.monotonic()
        gone = [rank for rank, since in self._lost.items() if now - since > _RETURNS_WITHIN]
        if self._receivers and not self._offers and len(gone) == len(self._receivers):
            ranks = sorted(self._lost)
            raise PeerLost(
                f"{self._what}: no receiver is left: {phrase_ranks(ranks)} closed the connection without a "
                "word and did not reconnect",
                ranks,
                self._what,
                seen="connection closed",
            )

    def settle(self, within: float) -> None:
        """Wait until receivers outside the job have the last version, at most `within` seconds."""
        deadline = time.monotonic() + within
        with self._changed:
            while any(version < self._pushed for version in self._joined.values()) and not self._ends():
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(left, _LOOK_S))

    def close(self, *, in_order: bool = True) -> None:
        """Stop the threads, abandon transfers. `in_order`: receivers see a normal end, not a failure."""
        with self._changed:
            self._closed, self._is_in_order = True, in_order
            self._changed.notify_all()
        for thread in [*self._threads, *self._acceptor.serving]:
            thread.join(5.0)

    def _ends(self) -> bool:
        return self._closed or self._group_ends() or self._error is not None

    # -- the encoding thread ------------------------------------------------------------------------------

    def _encode_all(self) -> None:
        try:
            while True:
                with self._changed:
                    while self._pending is None:
                        if self._ends():
                            return
                        self._changed.wait(_LOOK_S)
                    version = self._pending
                self._encode(version)
        except Exception as error:
            self._error = error if isinstance(error, McrError) else BackendError(f"{self._what}: {error}")
        finally:
            with self._changed:
                self._pending = None
                self._changed.notify_all()

    def _encode(self, version: int) -> None:
        begin = time.perf_counter()
        payloads, before = [], list(self._digests)
        with self._encoding:
            for number, (new, old, wire) in enumerate(
                zip(self._staging, self._held, self._wires, strict=True)
            ):
                versions = (self._version, version)
                nbytes = delta.encode(new, old, wire, versions, self._digests[number], update=True)
                payloads.append(wire[:nbytes].clone())
                self._digests[number] = delta.header_of(wire).digest
            step = _VersionStep(self._version, before, version, [Payload.of(each) for each in payloads])
            with self._changed:
                self._steps.append(step)
                self._kept += step.nbytes
                # Always keep the last step: it is no longer than an anchor would be.
                while len(self._steps) > 1 and self._kept > self._history:
                    self._kept -= self._steps.popleft().nbytes
                self._version, self._pending = version, None
                self._anchors.clear()
                kept = self._messages.items()
                self._messages = {place: each for place, each in kept if self._relays.holds(each.hash)}
                changed = sum(map(delta.changed, payloads))
                self._stats["density"] = changed / max(1, self._weights.numel)
                self._stats["bytes"] = step.nbytes
                self._stats["seconds"] = time.perf_counter() - begin
                self._changed.notify_all()

    # -- threads of receivers -----------------------------------------------------------------------------

    def _serve(self, connection: Any) -> None:
        """Answer one receiver until either end closes."""
        link, rank = StreamConnection(connection, self._ends), -1
        try:
            asks, buffers = self._wanted(link, connection)
            if buffers is None:
                return
            rank = asks
            with self._changed:
                superseded = self._links.get(rank)
                self._links[rank] = link
                self._lost.pop(rank, None)
                if rank > JOINER:
                    self._joined[rank], self.was_joined = 0, True
            if superseded is not None:  # else its thread would hold an unfinished message
                superseded.close()
            elif rank > JOINER:
                _log.info("%s: %s has joined", self._what, links.named(rank))
            while self._answer(link, rank, buffers):
                pass
            if self._forget(rank, link) and rank > JOINER:
                _log.info("%s: %s has left", self._what, links.named(rank))
        except StreamClosed:
            self._say_end(link)
        except (OSError, EOFError, BackendError) as error:
            if rank >= 0:
                self._lose(rank, link, error)
            elif link.is_authenticated:
                _log.warning("%s: a receiver was refused: %s", self._what, error)
            else:
                self._acceptor.refuse(connection, error)
        except Exception as error:  # for example MemoryError
            _log.warning("%s: %s cannot be served: %s", self._what, links.named(rank), error)
            self._lose(rank, link, error)
            self._say_end(link, links.FAILED)
        finally:
            self._acceptor.admit(connection)
            link.close()

    def _wanted(self, link: StreamConnection, connection: Any) -> tuple[int, Sequence[int] | None]:
        """Return the receiver's rank and buffers; None as buffers if it only checks for an answer."""
        rank = links.greeted(link, self._secret)
        self._acceptor.admit(connection)
        if rank == JOINER and self._offers:
            kind, offer, number, _ = link.receive(0)
            if kind == links.END:
                return rank, None
            if kind != links.JOIN or offer >= len(self._offers) or number <= JOINER:
                raise BackendError(f"a receiver outside the job asked for offer {offer} ({kind}, {number:x})")
            return number, self._offers[offer]
        if rank not in self._receivers:
            raise BackendError(f"{links.named(rank)} is not one of the receivers {sorted(self._receivers)}")
        return rank, self._receivers[rank]

    def _say_end(self, link: StreamConnection, how: int = 0) -> None:
        with contextlib.suppress(OSError, StreamClosed):
            if link.is_authenticated and not link.is_sending:
                failed = not self._is_in_order or self._error is not None
                link.send(links.END, links.FAILED if failed else how)

    def _lose(self, rank: int, link: StreamConnection, error: Exception) -> None:
        with self._changed:
            if not self._forget(rank, link) or self._ends():
                return
            if rank < JOINER:
                self._lost[rank] = time.monotonic()
        _log.warning(
            "%s: %s no longer receives weights: %s (others go on)",
            self._what, links.named(rank), error,
        )  # fmt: skip

    def _forget(self, rank: int, link: StreamConnection) -> bool:
        """Drop a connection; return False if the receiver has another one."""
        with self._changed:
            if self._links.get(rank) is not link:
                return False
            del self._links[rank]
            self._joined.pop(rank, None)
            self._relays.leave(rank)
            self._changed.notify_all()
            return True

    def _answer(self, link: StreamConnection, rank: int, buffers: Sequence[int]) -> bool:
        """Answer one request; return False if it was the last."""
        aim = cost = 0
        while (frame := link.receive(0))[0] in (links.AIM, links.ENTER, links.REPORT):
            kind, first, second, _ = frame
            if kind == links.AIM:
                aim, cost = first, second
            else:
                self._note(rank, link, *frame[:3])
        kind, version, digest, _ = frame
        if kind == links.END:
            return False
        least = aim or (version + 1 if kind == links.WAIT else 0)
        with self._changed:
            if self._links.get(rank) is link and rank > JOINER:
                self._joined[rank] = version
                self._changed.notify_all()
        if not self._waited(link, least):
            if link.receive(0)[0] == links.END:
                return False
            raise BackendError("it asks again before it has an answer")
        message, ticket = self._message(rank, version, digest, buffers, aim, cost)
        with self._changed:
            self._stats["relayed"] += ticket is not None
            if ticket is None:
                self._stats["sent_bytes"] += message.nbytes
        if ticket is not None:
            link.send(links.RELAYED, message.target, 1, [ticket.payload()])
        else:
            link.send(links.PAYLOADS, message.target, len(message.payloads), message.payloads)
        return True

    def _note(self, rank: int, link: StreamConnection, kind: int, first: int, second: int) -> None:
        """Note the port of a relay, or a receiver's report of one."""
        with self._changed:
            if kind == links.ENTER:
                self._relays.enter(rank, link, first)
            else:
                self._relays.report(rank, first, second)
        if kind == links.REPORT and second == DAMAGED:
            _log.warning(
                "%s: %s relays no more: what came from it to %s was damaged",
                self._what, links.named(first), links.named(rank),
            )  # fmt: skip

    def _message(
        self, rank: int, version: int, digest: int, buffers: Sequence[int], aim: int, cost: int
    ) -> tuple[_Message, RelayTicket | None]:
        """Return the answer to a request, and the relay from which the receiver shall fetch it, if any."""
        base, place = (version, digest), tuple(buffers)
        with self._changed:
            self._relays.asks(rank)
            newest = aim or self._version
            if newest <= version:
                return _Message(base, newest, []), None
            if (found := self._relayed(rank, base, place, aim or version + 1, exactly=bool(aim))) is not None:
                return found
            payloads = self._chain(version, digest, newest, buffers, cost, exactly=bool(aim))
            if payloads is None:
                base = _NOTHING
                if (found := self._relayed(rank, base, place, aim or version + 1)) is not None:
                    return found
        if payloads is None:
            newest, payloads = self._anchored(buffers)
        message = _Message(base, newest, payloads)
        with self._changed:
            ticket = None
            if message.nbytes >= SMALLEST:
                self._messages[base == _NOTHING, place] = message
                ticket = self._relays.ticket(rank, message.hash)
            self._relays.gets(rank, message.hash)
            return message, ticket

    def _relayed(
        self, rank: int, base: tuple[int, int], place: tuple[int, ...], least: int, *, exactly: bool = False
    ) -> tuple[_Message, RelayTicket] | None:
        """Return a message that a relay has or fetches, also if there is a newer version by now.

        So receivers that start from one version go on together, and one message serves them all.
        """
        known = self._messages.get((base == _NOTHING, place))
        if known is None or known.base != base or known.target < least or (exactly and known.target > least):
            return None
        if (ticket := self._relays.ticket(rank, known.hash)) is None:
            return None
        self._relays.gets(rank, known.hash)
        return known, ticket

    def _waited(self, link: StreamConnection, least: int) -> bool:
        """Wait for a version; return False if the receiver, or its process, ends the connection first."""
        with self._changed:
            while self._version < least:
                if self._ends() or (self.is_last() and self._version == self._pushed):
                    raise StreamClosed
                if link.has_come():
                    return False
                self._changed.wait(_LOOK_S)
        return True

    def _chain(
        self,
        version: int,
        digest: int,
        newest: int,
        buffers: Sequence[int],
        cost: int,
        *,
        exactly: bool = False,
    ) -> list[Payload] | None:
        """Return payloads from one version to another; None if an anchor is faster, or payloads are gone.

        Each step costs the receiver a pass over the weights, equal to `cost` bytes on its connection.
        `exactly`: prefer steps for small weights, as an anchor is of another version: the receiver would ask
        all sources again, and by then there is always a newer version of small weights.
        """
        steps = [step for step in self._steps if version <= step.base and step.target <= newest]
        if not steps or (steps[0].base, steps[-1].target) != (version, newest):
            return None
        if combined([steps[0].base_digests[number] for number in buffers]) != digest:
            return None
        payloads = [step.payloads[number] for step in steps for number in buffers]
        dense = sum(self._held[number].nbytes for number in buffers)
        if len(steps) == 1:
            return payloads
        if exactly and dense <= SMALL:
            fits = sum(8 + len(each.data) for each in payloads) <= links.longest(dense)
            return payloads if fits else None
        sooner = sum(len(each.data) for each in payloads) + cost * len(steps) <= dense + cost
        return payloads if sooner else None

    def _anchored(self, buffers: Sequence[int]) -> tuple[int, list[Payload]]:
        """Return the held version, and payloads of all its elements in these buffers."""
        with self._encoding:  # this delays the encoding of the next version, not the program
            for number in buffers:
                if number not in self._anchors:
                    held = self._held[number]
                    room = delta.most_nbytes(held.numel(), held.element_size())
                    wire = torch.empty(room, dtype=torch.uint8, device="cpu")
                    nbytes = delta.encode_anchor(held, wire, self._version)
                    self._anchors[number] = Payload.of(wire[:nbytes])
            anchors = self._version, [self._anchors[number] for number in buffers]
        with self._changed:
            self._stats["anchors"] += 1
        return anchors
