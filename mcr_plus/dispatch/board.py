"""What each rank of a group is doing, visible to the others without communication.

Every rank owns a row: a counter of the operations it has issued, a ring in which it posts an operation's
32-bit digest and description (and for vector collectives how much it sends to and expects from each rank),
and a note on why it gave up, if it did. Only the owner writes its row.
Peers look at it to compare signatures before an operation starts, to see who has not arrived or will not
come, and never wait on each other here.

On one host the rows lie in anonymous shared memory: a memfd that peers open through /proc, so no name
ever exists that could be left behind. Across hosts, or where that fails on any rank, a row is one value of
the job's store, so that whoever reads it sees the counter and the ring of the same moment.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol, TypeVar

from mcr_plus.c10d import put
from mcr_plus.errors import BackendError, LaunchError, McrError
from mcr_plus.message import Group

if TYPE_CHECKING:
    from mcr_plus.c10d import Store
    from mcr_plus.interfaces import Poll

RING: Final = 512
TEXT: Final = 192
NOTE: Final = 2 * TEXT + 256  # a mismatch: two descriptions, and the words and the group's name around them
_HEADER: Final = 64
_WORDS: Final = _HEADER // 8
_BALLOTS: Final = 4  # the word of a row's header where they begin, and how many there are
_TEXTS: Final = _HEADER + RING * 8
_NOTES: Final = _TEXTS + RING * TEXT
_COUNTS: Final = _NOTES + NOTE  # the rest of a row: RING times what is sent to and expected from each rank
# A slot holds the low 32 bits of the sequence number above the digest. They are many, because a slot is not
# overwritten by operations that are not posted: a post must not look like one of 2³² operations later.
_DIGEST_BITS: Final = 32
_DIGEST_MASK: Final = 0xFFFFFFFF
_TAG_MASK: Final = 0xFFFFFFFF
_STORED: Final = 256  # operations in a row of the store, which is written whole
# A rank has as many descriptions in the store at a time. Each has one of four places by its digest, so that
# operations in flight together do not take each other's.
_TEXT_SETS: Final = 256
_TEXT_PLACES: Final = 4
_FEW: Final = 8  # ranks up to which the rows themselves are compared, and no votes counted
_CLOSED: Final = 1
_FAILED: Final = 2
_Answer = TypeVar("_Answer")


def _word(sequence: int, digest: int) -> int:
    """What a slot of a ring holds of an operation."""
    return (sequence & _TAG_MASK) << _DIGEST_BITS | digest


def _sighting(issued: int, word: int, sequence: int) -> Sighting:
    """What a counter and the word in the slot of `sequence` say."""
    if word >> _DIGEST_BITS == sequence & _TAG_MASK and word:
        return Sighting(max(issued, sequence), word & _DIGEST_MASK)
    return Sighting(issued, None, _is_later(word, sequence))


def _is_later(word: int, sequence: int) -> bool:
    """Whether a slot holds an operation after `sequence`."""
    return 0 < ((word >> _DIGEST_BITS) - sequence & _TAG_MASK) <= _TAG_MASK >> 1


def pad(text: str) -> bytes:
    """A description as the fixed-size record that `post` takes."""
    return text.encode()[: TEXT - 1].ljust(TEXT, b"\0")


def unpad(record: bytes) -> str:
    """What is left of a description that `pad` has made a record of."""
    return record.rstrip(b"\0").decode(errors="replace")


def _text_key(digest: int, place: int) -> str:
    return f"text/{digest % _TEXT_SETS}.{place}"


class Sighting(NamedTuple):
    """What is known of a peer at a sequence number.

    `issued` is how many operations it has issued; `digest` is None unless it has posted this very operation
    and not overwritten it since. `overwritten`: its place in the ring holds a later one.
    """

    issued: int
    digest: int | None = None
    overwritten: bool = False


@dataclass(frozen=True)
class Failure:
    """Why a rank gave up a group: the number of the operation that failed (0: none did), and the error."""

    sequence: int
    text: str

    _NUMBER: ClassVar = struct.Struct("<Q")

    def packed(self) -> bytes:
        """As a record of `NOTE` bytes."""
        text = self.text.encode()[: NOTE - self._NUMBER.size]
        return (self._NUMBER.pack(self.sequence) + text).ljust(NOTE, b"\0")

    @classmethod
    def unpacked(cls, record: bytes) -> Failure:
        """What `packed` made."""
        (sequence,) = cls._NUMBER.unpack_from(record)
        return cls(sequence, record[cls._NUMBER.size :].rstrip(b"\0").decode(errors="replace"))


class GroupBoard(Protocol):
    """The rows of one group. `counter[0]` is this rank's count of issued operations.

    `first_look` and `look_every` say after how many seconds of waiting, and how often, looking at all peers
    is worth its cost. `problem`: why what peers publish cannot be seen, or not be believed (`LaunchError`).
    `ballots`: where rows lie in memory, see `SharedBoard.cast`; None elsewhere.
    """

    problem: McrError | None
    counter: memoryview
    ballots: Callable[[int], Poll] | None
    first_look: float
    look_every: float

    def post(self, sequence: int, digest: int, text: bytes) -> None:
        """Publish operation `sequence`, unless its place holds a later one; `text` comes from `pad`."""
        ...

    def post_counts(self, sequence: int, sent: Sequence[int], expected: Sequence[int]) -> None:
        """Publish, before `post`, how many elements a vector collective moves to and from each group rank."""
        ...

    def counts(self, rank: int, sequence: int) -> tuple[int, int] | None:
        """How many elements `rank` sends to this rank in `sequence`, and how many it expects from it.

        To be asked when all have agreed on the operation; None if the peer has overwritten it since.
        """
        ...

    def look(self, rank: int, sequence: int) -> Sighting:
        """What group rank `rank` has published, with its record of `sequence` if there is one."""
        ...

    def text(self, rank: int, sequence: int, digest: int) -> str:
        """The description that `rank` has posted with this digest; empty if it is not there any more."""
        ...

    def agreed(self, sequence: int, digest: int) -> bool:
        """Whether all ranks have posted this digest for `sequence`. False may mean that one forgot it."""
        ...

    def close(self) -> None:
        """Give the memory back. Nothing else may be called afterwards."""
        ...

    def mark_closed(self) -> None:
        """Say that this rank leaves in good order."""
        ...

    def is_closed(self, rank: int) -> bool:
        """Whether `rank` leaves, or has left, in good order."""
        ...

    def mark_compiling(self, begins: bool) -> None:
        """Say that this rank begins to compile kernels, or has ended."""
        ...

    def compiling(self, rank: int) -> int:
        """A number that changes when `rank` begins or ends to compile kernels, and is odd in between."""
        ...

    def mark_failed(self, failure: Failure) -> None:
        """Say that this rank will issue nothing more in this group, and why; only the first time counts."""
        ...

    def failure(self, rank: int) -> Failure | None:
        """Why `rank` has given up the group; None if it has not."""
        ...


class SharedBoard:
    """Rows in a memory-mapped memfd."""

    problem: McrError | None = None
    first_look = 50e-6
    look_every = 0.002

    def __init__(self, memory: mmap.mmap, group: Group) -> None:
        self._size, self._rank = group.size, group.rank
        self._row = row = _row_bytes(group.size)
        self._row_words = row // 8
        self._memory = memory
        self._view = memoryview(memory)
        base = group.rank * row
        self.counter = self._view[base : base + 8].cast("Q")
        self._flags = self._view[base + 8 : base + 16].cast("Q")
        self._compiling = self._view[base + 16 : base + 24].cast("Q")
        self._ballots = self._view[base + 8 * _BALLOTS : base + _HEADER].cast("Q")
        self._words = self._view[base + _HEADER : base + _HEADER + RING * 8].cast("Q")
        self._texts = self._view[base + _TEXTS : base + _NOTES]
        self._note = self._view[base + _NOTES : base + _COUNTS]
        self._counts = self._view[base + _COUNTS : base + row].cast("Q")
        self._all = self._view[: group.size * row].cast("B").cast("Q")
        peers = [rank for rank in range(group.size) if rank != group.rank]
        self._ballots_of_peers = [
            [rank * self._row_words + _BALLOTS + slot for rank in peers] for slot in range(_BALLOTS)
        ]
        self._cast = 0  # so many ballots
        self.ballots: Callable[[int], Poll] | None = self.cast

    def cast(self, digest: int) -> Poll:
        """Say what operation this rank starts; the poll is true once all peers have said the same.

        For one library of the group and its synchronous operations, of which a rank has one at a time: the
        n-th call of each rank is compared. It costs well under 1 µs with a peer. Where ranks differ, the poll
        stays false, and whoever waits finds the difference in what has been posted.
        """
        self._cast = number = self._cast + 1
        slot = number % _BALLOTS
        word, everything, others = _word(number, digest), self._all, self._ballots_of_peers[slot]
        self._ballots[slot] = word

        def counted() -> bool:
            for other in others:  # of which one may be further on, if its caller was interrupted
                theirs = everything[other]
                if theirs != word and not _is_later(theirs, number):
                    return False
            return True

        return counted

    def post(self, sequence: int, digest: int, text: bytes) -> None:
        """See `GroupBoard.post`."""
        slot = sequence % RING
        if _is_later(self._words[slot], sequence):
            return
        self._texts[slot * TEXT : slot * TEXT + TEXT] = text
        # One aligned 8-byte store publishes tag and digest together; the text was written before.
        self._words[slot] = _word(sequence, digest)

    def post_counts(self, sequence: int, sent: Sequence[int], expected: Sequence[int]) -> None:
        """See `GroupBoard.post_counts`."""
        if _is_later(self._words[sequence % RING], sequence):
            return
        start = sequence % RING * 2 * self._size
        self._counts[start : start + 2 * self._size] = memoryview(array("Q", [*sent, *expected]))

    def counts(self, rank: int, sequence: int) -> tuple[int, int] | None:
        """See `GroupBoard.counts`."""
        slot = _COUNTS // 8 + sequence % RING * 2 * self._size
        at = rank * self._row_words + slot + self._rank
        found = self._all[at], self._all[at + self._size]
        return found if self._digest_at(rank, sequence) is not None else None

    def agreed(self, sequence: int, digest: int) -> bool:
        """See `GroupBoard.agreed`."""
        word = _word(sequence, digest)
        slots = range(_WORDS + sequence % RING, self._size * self._row_words, self._row_words)
        return all(self._all[slot] == word for slot in slots)

    def _digest_at(self, rank: int, sequence: int) -> int | None:
        word = self._all[rank * self._row_words + _WORDS + sequence % RING]
        return word & _DIGEST_MASK if word >> _DIGEST_BITS == sequence & _TAG_MASK else None

    def look(self, rank: int, sequence: int) -> Sighting:
        """See `GroupBoard.look`."""
        issued = self._all[rank * self._row_words]  # before the word: what was posted earlier is seen then
        word = self._all[rank * self._row_words + _WORDS + sequence % RING]
        return _sighting(issued, word, sequence)

    def text(self, rank: int, sequence: int, digest: int) -> str:
        """See `GroupBoard.text`."""
        start = rank * self._row + _TEXTS + sequence % RING * TEXT
        text = unpad(bytes(self._view[start : start + TEXT]))
        return text if self._digest_at(rank, sequence) == digest else ""

    def close(self) -> None:
        """See `GroupBoard.close`."""
        parts = (
            self.counter,
            self._flags,
            self._compiling,
            self._ballots,
            self._words,
            self._texts,
            self._note,
        )
        for view in (*parts, self._counts, self._all, self._view):
            view.release()
        self._memory.close()

    def mark_closed(self) -> None:
        """See `GroupBoard.mark_closed`."""
        self._flags[0] |= _CLOSED

    def is_closed(self, rank: int) -> bool:
        """See `GroupBoard.is_closed`."""
        return bool(self._all[rank * self._row_words + 1] & _CLOSED)

    def mark_compiling(self, begins: bool) -> None:
        """See `GroupBoard.mark_compiling`."""
        self._compiling[0] = _next_turn(self._compiling[0], begins)

    def compiling(self, rank: int) -> int:
        """See `GroupBoard.compiling`."""
        return self._all[rank * self._row_words + 2]

    def mark_failed(self, failure: Failure) -> None:
        """See `GroupBoard.mark_failed`."""
        if not self._flags[0] & _FAILED:
            self._note[:] = failure.packed()
            self._flags[0] |= _FAILED

    def failure(self, rank: int) -> Failure | None:
        """See `GroupBoard.failure`."""
        if not self._all[rank * self._row_words + 1] & _FAILED:
            return None
        start = rank * self._row + _NOTES
        return Failure.unpacked(bytes(self._view[start : start + NOTE]))


class StoreBoard:
    """Rows as values of the job's store: slower, and right across hosts.

    The counter stays local; a peer's `issued` is what it was when the peer last posted. A row is read and
    written whole: two reads could find a counter that has passed an operation of which the ring, read before,
    holds nothing yet.
    """

    ballots: Callable[[int], Poll] | None = None
    _HEADER: Final = 8

    def __init__(self, store: Store, group: Group) -> None:
        self._store: Store | None = store
        self._group = group
        self._row = bytearray(self._HEADER + 8 * _STORED)
        self._issued = memoryview(self._row)[: self._HEADER].cast("Q")
        self._words = memoryview(self._row)[self._HEADER :].cast("Q")
        # The digests that this rank has described and the places of their descriptions, by set, oldest first.
        self._described: dict[int, dict[int, int]] = {}
        self._voted: deque[str] = deque()  # on rank 0 of many, which removes what is old
        self._next_question = 0.0
        # A look is a request per peer to a server that all ranks share.
        self.first_look = 0.02
        self.look_every = max(0.05, 0.0005 * group.size)
        self.problem: McrError | None = None
        self._failed = False
        self._turns = 0  # of compiling
        self.counter = memoryview(bytearray(8)).cast("Q")
        self._publish()

    def _key(self, rank: int, name: str) -> str:
        return f"board/{self._group.name}/{rank}/{name}"

    def _ask(self, question: Callable[[Store], _Answer], otherwise: _Answer) -> _Answer:
        """What the store answers; `otherwise` once it has not, and where a stranger has written the answer.

        A store that has not answered is not asked again, for its process may have died. See `problem`.
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
        return self._ask(lambda store: store.get(key) if store.check([key]) else None, None)

    def _publish(self) -> None:
        self._issued[0] = self.counter[0]
        self._write("row", bytes(self._row))

    def _row_of(self, rank: int) -> memoryview | None:
        """The row of `rank`, in words; every rank writes its own before the board is open."""
        key = self._key(rank, "row")
        row = self._ask(lambda store: store.get(key), None)
        return None if row is None else memoryview(row).cast("Q")

    def post(self, sequence: int, digest: int, text: bytes) -> None:
        """See `GroupBoard.post`."""
        word, slot = _word(sequence, digest), sequence % _STORED
        if self._words[slot] == word or _is_later(self._words[slot], sequence):
            if self._issued[0] < self.counter[0]:
                self._publish()
            return
        described = self._described.setdefault(digest % _TEXT_SETS, {})
        if digest not in described:
            free = len(described)
            place = free if free < _TEXT_PLACES else described.pop(next(iter(described)))
            # First, so that whoever sees the digest finds it. A place and no key per digest, because programs
            # may have a tag for every step.
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
                oldest = self._voted.popleft()
                self._ask(lambda store: store.delete_key(oldest), False)

    def post_counts(self, sequence: int, sent: Sequence[int], expected: Sequence[int]) -> None:
        """See `GroupBoard.post_counts`."""
        word = self._words[sequence % _STORED]
        if word >> _DIGEST_BITS != sequence & _TAG_MASK and not _is_later(word, sequence):
            record = array("Q", [sequence, *sent, *expected]).tobytes()
            self._write(f"counts/{sequence % _STORED}", record)

    def counts(self, rank: int, sequence: int) -> tuple[int, int] | None:
        """See `GroupBoard.counts`."""
        record = self._read(rank, f"counts/{sequence % _STORED}")
        if record is None:
            return None
        posted, *words = memoryview(record).cast("Q")
        if posted != sequence:
            return None
        return words[self._group.rank], words[self._group.size + self._group.rank]

    def _votes(self, sequence: int, digest: int) -> str:
        return f"board/{self._group.name}/votes/{sequence}/{digest:x}"

    def agreed(self, sequence: int, digest: int) -> bool:
        """See `GroupBoard.agreed`. Asked not too often; one request however many ranks there are, if many."""
        now = time.monotonic()
        if now < self._next_question:
            return False
        self._next_question = now + 10e-6 * self._group.size
        if self._group.size > _FEW:
            votes = self._ask(lambda store: store.add(self._votes(sequence, digest), 0), 0)
            return votes == self._group.size
        peers = (rank for rank in range(self._group.size) if rank != self._group.rank)
        return all(self.look(rank, sequence).digest == digest for rank in peers)

    def look(self, rank: int, sequence: int) -> Sighting:
        """See `GroupBoard.look`."""
        row = self._row_of(rank)
        return Sighting(0) if row is None else _sighting(row[0], row[1 + sequence % _STORED], sequence)

    def text(self, rank: int, sequence: int, digest: int) -> str:  # noqa: ARG002 - one for all numbers
        """See `GroupBoard.text`."""
        for place in range(_TEXT_PLACES):
            record = self._read(rank, _text_key(digest, place)) or b""
            if record[:4] == digest.to_bytes(4, "little"):
                return unpad(record[4:])
        return ""

    def close(self) -> None:
        """The store belongs to the job."""

    def mark_closed(self) -> None:
        """See `GroupBoard.mark_closed`."""
        self._publish()  # first: what was issued and not posted has been issued all the same
        self._write("closed", b"1")

    def is_closed(self, rank: int) -> bool:
        """See `GroupBoard.is_closed`."""
        return self._read(rank, "closed") is not None

    def mark_compiling(self, begins: bool) -> None:
        """See `GroupBoard.mark_compiling`."""
        self._turns = _next_turn(self._turns, begins)
        self._write("compiling", str(self._turns).encode())

    def compiling(self, rank: int) -> int:
        """See `GroupBoard.compiling`."""
        return int(self._read(rank, "compiling") or 0)

    def mark_failed(self, failure: Failure) -> None:
        """See `GroupBoard.mark_failed`."""
        if not self._failed:
            self._failed = True
            self._publish()
            self._write("failed", failure.packed())

    def failure(self, rank: int) -> Failure | None:
        """See `GroupBoard.failure`."""
        record = self._read(rank, "failed")
        return None if record is None else Failure.unpacked(record)


class NoBoard:
    """A group of one rank: nobody to compare with."""

    ballots: Callable[[int], Poll] | None = None
    problem: McrError | None = None
    first_look = look_every = 1.0

    def __init__(self) -> None:
        self.counter = memoryview(bytearray(8)).cast("Q")

    def post(self, sequence: int, digest: int, text: bytes) -> None:
        """Nobody looks."""

    def post_counts(self, sequence: int, sent: Sequence[int], expected: Sequence[int]) -> None:
        """Nobody looks."""

    def counts(self, rank: int, sequence: int) -> tuple[int, int] | None:  # noqa: ARG002
        """There is no peer."""
        return None

    def look(self, rank: int, sequence: int) -> Sighting:  # noqa: ARG002 - the protocol's names
        """There is no peer."""
        return Sighting(sequence)

    def agreed(self, sequence: int, digest: int) -> bool:  # noqa: ARG002
        """There is no peer."""
        return True

    def text(self, rank: int, sequence: int, digest: int) -> str:  # noqa: ARG002
        """There is no peer."""
        return ""

    def close(self) -> None:
        """There is nothing to give back."""

    def mark_closed(self) -> None:
        """Nobody looks."""

    def is_closed(self, rank: int) -> bool:  # noqa: ARG002
        """There is no peer."""
        return False

    def mark_compiling(self, begins: bool) -> None:
        """Nobody looks."""

    def compiling(self, rank: int) -> int:  # noqa: ARG002
        """There is no peer."""
        return 0

    def mark_failed(self, failure: Failure) -> None:
        """Nobody looks."""

    def failure(self, rank: int) -> Failure | None:  # noqa: ARG002
        """There is no peer."""
        return None


def _next_turn(turn: int, begins: bool) -> int:
    """The next number that is odd, or even at the end."""
    return turn + 1 + ((turn + 1) % 2 != begins)


def _row_bytes(ranks: int) -> int:
    """Bytes of a row in a group of `ranks`; what is never written takes no memory."""
    return _COUNTS + RING * 2 * ranks * 8


def _map_shared(store: Store, group: Group) -> tuple[mmap.mmap | None, int | None]:
    """The group's memory, and on rank 0 the descriptor that peers open it by."""
    size = group.size * _row_bytes(group.size)
    key = f"board/{group.name}/memory"
    try:
        if group.rank == 0:
            descriptor = os.memfd_create("mcr_plus", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
            store.set(key, f"{os.getpid()}:{descriptor}:{os.fstat(descriptor).st_ino}")
            return memory, descriptor
        pid, number, inode = store.get(key).decode().split(":")
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            # Another PID namespace may hold a process of the same number: the inode tells.
            if os.fstat(descriptor).st_ino != int(inode) or os.fstat(descriptor).st_size != size:
                return None, None
            return mmap.mmap(descriptor, size), None
        finally:
            os.close(descriptor)
    except (OSError, AttributeError, ValueError):
        if group.rank == 0:
            store.set(key, "0:0:0")
        return None, None


def _all(store: Store, what: str, size: int, mine: bool, timeout: float) -> bool:
    """Whether all ranks say so; waits for them. `what` names the question and must be new."""
    if not mine:
        store.set(f"{what}/no", "")
    if store.add(f"{what}/ranks", 1) == size:
        store.set(f"{what}/done", "")
    store.wait([f"{what}/done"], timedelta(seconds=timeout))
    return not store.check([f"{what}/no"])


def open_board(store: Store | None, group: Group, shared: bool, timeout: float) -> GroupBoard:
    """Open the board of `group`; collective over its ranks, which all get the same kind."""
    if group.size == 1 or store is None:
        return NoBoard()
    questions = f"board/{group.name}/votes"
    if shared:
        memory, descriptor = _map_shared(store, group)
        try:
            mapped = _all(store, f"{questions}/mapped", group.size, memory is not None, timeout)
        finally:
            if descriptor is not None:  # all have mapped it, or never will
                os.close(descriptor)
        if mapped and memory is not None:
            return SharedBoard(memory, group)
    stored = StoreBoard(store, group)
    _all(store, f"{questions}/stored", group.size, True, timeout)  # all rows are there before anybody looks
    return stored
