"""Rows as values in the job's store, for groups across hosts."""

from __future__ import annotations

import json
import time
from array import array
from collections import deque
from operator import methodcaller
from typing import TYPE_CHECKING, Final, TypeVar

from mcr_plus.board.base import (
    DIGEST_BITS,
    RING,
    TAG_MASK,
    Failure,
    GroupBoard,
    Noted,
    PeerStatus,
    Published,
    is_later,
    next_turn,
    peer_status,
    slot_word,
    unpad,
)
from mcr_plus.board.operation_notes import KEPT, PART, NotedParts, place_of, unpacked
from mcr_plus.core.c10d import look, put
from mcr_plus.errors import BackendError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mcr_plus.core.c10d import Store
    from mcr_plus.core.group import Group

_STORED: Final = 256  # operations in a row, which is always written as a whole
# Number of descriptions that a rank has in the store. The digest of a description determines four possible
# places, so that concurrent operations do not overwrite each other's description.
_TEXT_SETS: Final = 256
_TEXT_PLACES: Final = 4
_RARER: Final = 0.1  # time between two requests, as a share of the wait so far
_RAREST: Final = 0.005  # s, the longest time between two requests
_FEW: Final = 2  # number of ranks up to which rows are compared directly, without counting votes
_Answer = TypeVar("_Answer")


class StoreBoard(GroupBoard):
    """Rows as values in the job's store: slower, but visible from all hosts.

    The counter stays local; a peer's `issued` dates from its last post. A row is read and written as a whole.
    With separate reads of ring and counter, the counter could include an operation that the ring read before
    lacks.
    """

    _HEADER: Final = 8

    def __init__(self, store: Store, group: Group) -> None:
        super().__init__()
        self._store: Store | None = store
        self._group = group
        self._row = bytearray(self._HEADER + 8 * _STORED)
        self._issued = memoryview(self._row)[: self._HEADER].cast("Q")
        self._words = memoryview(self._row)[self._HEADER :].cast("Q")
        # The digests of this rank's descriptions and the places of the descriptions, by set, oldest first.
        self._described: dict[int, dict[int, int]] = {}
        self._voted: deque[str] = deque()  # on rank 0 of many, which removes old votes
        # Rows of peers as last read. Entries about an operation stay valid, so one request answers for all
        # operations that the peer had posted by then.
        self._read_rows: dict[int, memoryview] = {}
        self._seen: dict[int, int] = {}  # operations that peers had issued at the last read
        self._next_question = 0.0
        self._asked, self._asked_since = -1, 0.0  # last requested operation, and since when
        # Reading the rows takes one request per peer to a server that all ranks share.
        self.first_check = 0.02
        self.check_every = max(0.05, 0.0005 * group.size)
        self._failed = False
        self._turns = 0  # numbers for `compiling`
        self._noted = NotedParts()
        self._has_published = False
        self._moves = f"board/{group.name}/moves"  # one key for all ranks
        self._publish()

    def _key(self, rank: int, name: str) -> str:
        return f"board/{self._group.name}/{rank}/{name}"

    def _ask(self, question: Callable[[Store], _Answer], otherwise: _Answer) -> _Answer:
        """Return the store's answer. Without a valid answer, set `problem` and return `otherwise`.

        After one failure the store gets no more requests, because its process may have died.
        """
        if self._store is None:
            return otherwise
        try:
            return question(self._store)
        except LaunchError as error:
            self.problem = error
        except RuntimeError as error:
            self._store = None
            self.problem = BackendError(
                f"the job's store, in which ranks of several hosts see each other, does not answer: {error}"
            )
        return otherwise

    def _write(self, name: str, value: bytes) -> None:
        key = self._key(self._group.rank, name)
        self._ask(lambda store: put(store, key, value), None)

    def _read(self, rank: int, name: str) -> bytes | None:
        key = self._key(rank, name)
        return self._ask(lambda store: look(store, key), None)

    def _publish(self) -> None:
        self._issued[0] = self.counter[0]
        self._write("row", bytes(self._row))

    def _row_of(self, rank: int) -> memoryview | None:
        """Return the row of `rank` as words; None without a row, e.g. after its world has left the store."""
        row = self._read(rank, "row")
        if row is None:
            return None
        words = memoryview(row).cast("Q")
        self._seen[rank] = words[0]
        return words

    def post(self, sequence: int, digest: int, text: bytes) -> None:  # noqa: D102
        word, slot = slot_word(sequence, digest), sequence % _STORED
        if self._words[slot] == word or is_later(self._words[slot], sequence):
            if self._issued[0] < self.counter[0]:
                self._publish()
            return
        described = self._described.setdefault(digest % _TEXT_SETS, {})
        if digest not in described:
            free = len(described)
            place = free if free < _TEXT_PLACES else described.pop(next(iter(described)))
            # Written before the digest, so that a peer that reads the digest finds the description. Places
            # are reused, because a program may use a new tag (and so a new digest) in every step.
            self._write(_text_key(digest, place), digest.to_bytes(4, "little") + text)
            described[digest] = place
        self._words[slot] = word
        self._publish()
        if self._group.size > _FEW:
            self._vote(sequence, digest)

    def _vote(self, sequence: int, digest: int) -> None:
        votes = self._votes(sequence, digest)
        self._ask(lambda store: store.add(votes, 1), 0)
        if self._group.rank == 0:
            self._voted.append(votes)
            if len(self._voted) > RING:
                self._ask(methodcaller("delete_key", self._voted.popleft()), False)

    def post_counts(self, sequence: int, sent: Sequence[int], expected: Sequence[int]) -> None:  # noqa: D102
        word = self._words[sequence % _STORED]
        if word >> DIGEST_BITS != sequence & TAG_MASK and not is_later(word, sequence):
            record = array("Q", [sequence, *sent, *expected]).tobytes()
            self._write(f"counts/{sequence % _STORED}", record)

    def counts(self, rank: int, sequence: int) -> tuple[int, int] | None:  # noqa: D102
        record = self._read(rank, f"counts/{sequence % _STORED}")
        if record is None:
            return None
        posted, *words = memoryview(record).cast("Q")
        if posted != sequence:
            return None
        return words[self._group.rank], words[self._group.size + self._group.rank]

    def _votes(self, sequence: int, digest: int) -> str:
        return f"board/{self._group.name}/votes/{sequence}/{digest:x}"

    def all_match(self, sequence: int, digest: int) -> bool:
        """See `GroupBoard.all_match`. The rate of requests is limited; many ranks need only one request."""
        if self._group.size > _FEW:
            if not self._may_ask(sequence):
                return False
            votes = self._ask(lambda store: store.add(self._votes(sequence, digest), 0), 0)
            return votes == self._group.size
        word, slot, rows = slot_word(sequence, digest), 1 + sequence % _STORED, self._read_rows
        peers = (rank for rank in range(self._group.size) if rank != self._group.rank)
        missing = [rank for rank in peers if rank not in rows or rows[rank][slot] != word]
        if missing and not self._may_ask(sequence):
            return False
        for rank in missing:
            row = self._row_of(rank)
            if row is None:
                return False
            rows[rank] = row
            if row[slot] != word:
                return False
        return True

    def _may_ask(self, sequence: int) -> bool:
        """Return whether the next request to the store is due; if so, schedule the request after it.

        Requests become rarer during a wait. This lengthens the wait by at most a tenth, and a waiting rank
        takes little of a core on which others compute.
        """
        now = time.monotonic()
        if now < self._next_question:
            return False
        if sequence > self._asked:
            self._asked, self._asked_since = sequence, now
        waited = now - self._asked_since
        self._next_question = now + max(10e-6 * self._group.size, min(_RARER * waited, _RAREST))
        return True

    def note(self, sequence: int, issued: float, idle: float, done: float) -> None:  # noqa: D102
        self._noted.add(sequence, (issued, idle, done))

    def publish_noted(self, clocks: Mapping[int, float]) -> None:  # noqa: D102
        for part, value in self._noted.changed():
            self._write(f"noted/{place_of(part)}", value)
        said = json.dumps([self.counter[0], list(clocks.items())])
        self._write("noted", said.encode())  # last: the store already has the operations that it announces
        self._has_published = True

    def published(self, rank: int) -> Published | None:  # noqa: D102
        record = self._read(rank, "noted")
        if record is None:
            return None
        try:
            issued, clocks = json.loads(record)
            return Published(int(issued), {int(rank): float(seconds) for rank, seconds in clocks})
        except (ValueError, TypeError):  # a store without signatures
            return None

    def noted(self, rank: int, sequences: Sequence[int]) -> Noted:  # noqa: D102
        found: Noted = {}
        for part in sorted({sequence // PART for sequence in sequences}):
            if (value := self._read(rank, f"noted/{place_of(part)}")) is not None:
                there = unpacked(value).items()
                found |= {number: times for number, times in there if number // PART == part}
        return found

    def remove_noted(self, others: Sequence[int] = ()) -> None:  # noqa: D102
        for rank in (*([self._group.rank] if self._has_published else []), *others):
            said = self.published(rank)
            places = range(min(said.issued // PART + 1, KEPT)) if said is not None else ()
            for name in ("noted", *(f"noted/{place}" for place in places)):
                self._ask(methodcaller("delete_key", self._key(rank, name)), False)

    def read(self, rank: int, sequence: int) -> PeerStatus:  # noqa: D102
        row = self._row_of(rank)
        return PeerStatus(0) if row is None else peer_status(row[0], row[1 + sequence % _STORED], sequence)

    def seen(self, rank: int) -> int:  # noqa: D102
        return self._seen.get(rank, 0)

    def text(self, rank: int, sequence: int, digest: int) -> str:  # noqa: ARG002, D102 - one for all numbers
        for place in range(_TEXT_PLACES):
            record = self._read(rank, _text_key(digest, place)) or b""
            if record[:4] == digest.to_bytes(4, "little"):
                return unpad(record[4:])
        return ""

    def mark_closed(self) -> None:  # noqa: D102
        self._publish()  # first: the counter includes operations that were not posted
        self._write("closed", b"1")

    def is_closed(self, rank: int) -> bool:  # noqa: D102
        return self._read(rank, "closed") is not None

    def mark_compiling(self, begins: bool) -> None:  # noqa: D102
        self._turns = next_turn(self._turns, begins)
        self._write("compiling", str(self._turns).encode())

    def compiling(self, rank: int) -> int:  # noqa: D102
        return int(self._read(rank, "compiling") or 0)

    def mark_moving(self) -> None:  # noqa: D102
        self._ask(lambda store: store.add(self._moves, 1), 0)

    def moves(self) -> int:  # noqa: D102
        return self._ask(lambda store: store.add(self._moves, 0), 0)

    def mark_failed(self, failure: Failure) -> None:  # noqa: D102
        if not self._failed:
            self._failed = True
            self._publish()
            self._write("failed", failure.packed())

    def failure(self, rank: int) -> Failure | None:  # noqa: D102
        record = self._read(rank, "failed")
        return None if record is None else Failure.unpacked(record)


def _text_key(digest: int, place: int) -> str:
    return f"text/{digest % _TEXT_SETS}.{place}"
