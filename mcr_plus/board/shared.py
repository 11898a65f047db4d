"""Rows in anonymous shared memory: a memfd that peers open through /proc, so no file is left behind."""

from __future__ import annotations

import math
import mmap
import os
from array import array
from typing import TYPE_CHECKING, Final

from mcr_plus.board.base import (
    DIGEST_BITS,
    DIGEST_MASK,
    NOTE,
    RING,
    TAG_MASK,
    TEXT,
    Failure,
    GroupBoard,
    PeerStatus,
    is_later,
    next_turn,
    peer_status,
    slot_word,
    unpad,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcr_plus.backends.base import Poll
    from mcr_plus.core.c10d import Store
    from mcr_plus.core.group import Group

_HEADER: Final = 64
_WORDS: Final = _HEADER // 8
_MOVES: Final = 3  # header word of a row that counts calls of `mark_moving`
_BALLOTS: Final = 4  # first header word of the ballots in a row, and number of ballots
_TEXTS: Final = _HEADER + RING * 8
_NOTES: Final = _TEXTS + RING * TEXT
_ARRIVALS: Final = _NOTES + NOTE  # RING times of issue, and RING idle times before the issue
# The rest of a row: RING records of the counts sent to and expected from each rank.
_COUNTS: Final = _ARRIVALS + 2 * RING * 8
_NUMBER_BITS: Final = 16  # bits for an operation's number; the other bits hold µs, enough for nine years
_NUMBER_MASK: Final = (1 << _NUMBER_BITS) - 1
_CLOSED: Final = 1
_FAILED: Final = 2


def arrival_times(words: tuple[list[int], list[int]], sequence: int) -> tuple[list[float], list[float]]:
    """Return the times passed to `GroupBoard.arrive`, by group rank; NaN for a rank without a call."""
    number = sequence & _NUMBER_MASK
    times = [
        (word >> _NUMBER_BITS) * 1e-6 if word & _NUMBER_MASK == number and word else math.nan
        for word in words[0]
    ]
    return times, [each * 1e-6 for each in words[1]]


class SharedBoard(GroupBoard):
    """Rows of a group on one host, in memory that all its ranks have mapped."""

    is_live = True
    first_check = 50e-6
    check_every = 0.002

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
        self._moves = self._view[base + 8 * _MOVES : base + 8 * _BALLOTS].cast("Q")
        self._ballots = self._view[base + 8 * _BALLOTS : base + _HEADER].cast("Q")
        self._words = self._view[base + _HEADER : base + _HEADER + RING * 8].cast("Q")
        self._texts = self._view[base + _TEXTS : base + _NOTES]
        self._note = self._view[base + _NOTES : base + _ARRIVALS]
        self._arrivals = self._view[base + _ARRIVALS : base + _COUNTS].cast("Q")
        self._counts = self._view[base + _COUNTS : base + row].cast("Q")
        self._all = self._view[: group.size * row].cast("B").cast("Q")
        peers = [rank for rank in range(group.size) if rank != group.rank]
        self._ballots_of_peers = [
            [rank * self._row_words + _BALLOTS + slot for rank in peers] for slot in range(_BALLOTS)
        ]
        self._cast = 0  # number of ballots cast
        self.ballots = self.cast

    def cast(self, digest: int) -> Poll:
        """Publish this rank's operation; the poll is true once all peers have published the same operation.

        Used for the synchronous operations of one library of the group. A rank has one such operation at a
        time, and the n-th calls of all ranks are compared, in well under 1 µs per peer. If ranks differ, the
        poll stays false, and the slow path of the wait finds the difference in the posts.
        """
        self._cast = number = self._cast + 1
        slot = number % _BALLOTS
        word, everything, others = slot_word(number, digest), self._all, self._ballots_of_peers[slot]
        self._ballots[slot] = word

        def counted() -> bool:
            for other in others:  # a peer may be ahead, if this rank's caller was interrupted
                theirs = everything[other]
                if theirs != word and not is_later(theirs, number):
                    return False
            return True

        return counted

    def post(self, sequence: int, digest: int, text: bytes) -> None:  # noqa: D102
        slot = sequence % RING
        if is_later(self._words[slot], sequence):
            return
        self._texts[slot * TEXT : slot * TEXT + TEXT] = text
        # One aligned 8-byte store publishes tag and digest together; the text was written before.
        self._words[slot] = slot_word(sequence, digest)

    def post_counts(self, sequence: int, sent: Sequence[int], expected: Sequence[int]) -> None:  # noqa: D102
        if is_later(self._words[sequence % RING], sequence):
            return
        start = sequence % RING * 2 * self._size
        self._counts[start : start + 2 * self._size] = memoryview(array("Q", [*sent, *expected]))

    def counts(self, rank: int, sequence: int) -> tuple[int, int] | None:  # noqa: D102
        slot = _COUNTS // 8 + sequence % RING * 2 * self._size
        at = rank * self._row_words + slot + self._rank
        counts = self._all[at], self._all[at + self._size]
        return counts if self._digest_at(rank, sequence) is not None else None

    def all_match(self, sequence: int, digest: int) -> bool:  # noqa: D102
        word = slot_word(sequence, digest)
        slots = range(_WORDS + sequence % RING, self._size * self._row_words, self._row_words)
        return all(self._all[slot] == word for slot in slots)

    def _digest_at(self, rank: int, sequence: int) -> int | None:
        word = self._all[rank * self._row_words + _WORDS + sequence % RING]
        return word & DIGEST_MASK if word >> DIGEST_BITS == sequence & TAG_MASK else None

    def read(self, rank: int, sequence: int) -> PeerStatus:  # noqa: D102
        # Read the counter before the word: then the ring contains every post that the counter includes.
        issued = self._all[rank * self._row_words]
        word = self._all[rank * self._row_words + _WORDS + sequence % RING]
        return peer_status(issued, word, sequence)

    def arrive(self, sequence: int, now: float, idle: float) -> None:  # noqa: D102
        slot = sequence % RING
        self._arrivals[RING + slot] = int(idle * 1e6)
        self._arrivals[slot] = int(now * 1e6) << _NUMBER_BITS | sequence & _NUMBER_MASK  # one aligned store

    def arrival_words(self, sequence: int) -> tuple[list[int], list[int]]:  # noqa: D102
        first, row = _ARRIVALS // 8 + sequence % RING, self._row_words
        return self._all[first::row].tolist(), self._all[first + RING :: row].tolist()

    def seen(self, rank: int) -> int:  # noqa: D102
        return self._all[rank * self._row_words]

    def text(self, rank: int, sequence: int, digest: int) -> str:  # noqa: D102
        start = rank * self._row + _TEXTS + sequence % RING * TEXT
        text = unpad(bytes(self._view[start : start + TEXT]))
        return text if self._digest_at(rank, sequence) == digest else ""

    def close(self) -> None:  # noqa: D102
        fields = (
            self._flags,
            self._compiling,
            self._moves,
            self._ballots,
            self._words,
            self._texts,
            self._note,
            self._arrivals,
            self._counts,
        )
        for view in (self.counter, *fields, self._all, self._view):
            view.release()
        self._memory.close()

    def mark_closed(self) -> None:  # noqa: D102
        self._flags[0] |= _CLOSED

    def is_closed(self, rank: int) -> bool:  # noqa: D102
        return bool(self._all[rank * self._row_words + 1] & _CLOSED)

    def mark_compiling(self, begins: bool) -> None:  # noqa: D102
        self._compiling[0] = next_turn(self._compiling[0], begins)

    def compiling(self, rank: int) -> int:  # noqa: D102
        return self._all[rank * self._row_words + 2]

    def mark_moving(self) -> None:  # noqa: D102
        self._moves[0] += 1

    def moves(self) -> int:  # noqa: D102
        return sum(self._all[_MOVES :: self._row_words])

    def mark_failed(self, failure: Failure) -> None:  # noqa: D102
        if not self._flags[0] & _FAILED:
            self._note[:] = failure.packed()
            self._flags[0] |= _FAILED

    def failure(self, rank: int) -> Failure | None:  # noqa: D102
        if not self._all[rank * self._row_words + 1] & _FAILED:
            return None
        start = rank * self._row + _NOTES
        return Failure.unpacked(bytes(self._view[start : start + NOTE]))


def _row_bytes(ranks: int) -> int:
    """Return the bytes of a row in a group of `ranks`; pages that are never written take no memory."""
    return _COUNTS + RING * 2 * ranks * 8


def map_shared(store: Store, group: Group) -> tuple[mmap.mmap | None, int | None]:
    """Return the group's memory (None if it cannot be mapped) and, on rank 0, the descriptor for peers."""
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
            # Another PID namespace may hold a process with the same number, but not the same inode.
            if os.fstat(descriptor).st_ino != int(inode) or os.fstat(descriptor).st_size != size:
                return None, None
            return mmap.mmap(descriptor, size), None
        finally:
            os.close(descriptor)
    except (OSError, AttributeError, ValueError):
        if group.rank == 0:
            store.set(key, "0:0:0")
        return None, None
