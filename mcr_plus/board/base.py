"""Interface and records of boards, and the board of a group of one rank."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mcr_plus.backends.base import Poll
    from mcr_plus.errors import McrError

RING: Final = 512
TEXT: Final = 192
NOTE: Final = 2 * TEXT + 256  # a mismatch: two descriptions, the group's name, and the text around them
# A slot holds the low 32 bits of the sequence number above the digest. All 32 bits are needed: operations
# that are not posted leave slots untouched, and an old post must not be taken for an operation up to 2³²
# numbers later.
DIGEST_BITS: Final = 32
DIGEST_MASK: Final = 0xFFFFFFFF
TAG_MASK: Final = 0xFFFFFFFF


class PeerStatus(NamedTuple):
    """A peer's row at a sequence number.

    `issued`: number of operations that the peer has issued. `digest`: None unless the peer has posted this
    operation and not overwritten it. `overwritten`: the slot in the peer's ring holds a later operation.
    """

    issued: int
    digest: int | None = None
    overwritten: bool = False


@dataclass(frozen=True)
class Failure:
    """Failure of a rank: the number of the failed operation (0 for none), and the error."""

    sequence: int
    text: str

    _NUMBER: ClassVar = struct.Struct("<Q")

    def packed(self) -> bytes:
        """Return the failure as a record of `NOTE` bytes."""
        text = self.text.encode()[: NOTE - self._NUMBER.size]
        return (self._NUMBER.pack(self.sequence) + text).ljust(NOTE, b"\0")

    @classmethod
    def unpacked(cls, record: bytes) -> Failure:
        """Return the failure in a record of `packed`."""
        (sequence,) = cls._NUMBER.unpack_from(record)
        return cls(sequence, record[cls._NUMBER.size :].rstrip(b"\0").decode(errors="replace"))


Noted = dict[int, tuple[float, float, float]]
"""Times of operations by number, see `GroupBoard.noted`."""


class Published(NamedTuple):
    """Announcement that a rank has published its noted operations up to number `issued`.

    `clocks`: see `GroupBoard.publish_noted`.
    """

    issued: int
    clocks: Mapping[int, float]


class GroupBoard:
    """Rows of one group. This class itself is the board of a group without peers.

    Attributes:
        counter: `counter[0]` is the number of operations that this rank has issued.
        ballots: see `SharedBoard.cast`; None unless the rows are in shared memory.
        is_live: whether `seen` is up to date.
        first_check: seconds of waiting before a rank first reads all peers' rows; `check_every`: seconds
            between further reads.
        problem: error if the peers' rows cannot be read, or cannot be trusted (`LaunchError`).
    """

    ballots: Callable[[int], Poll] | None = None
    is_live: bool = False
    first_check: float = 1.0
    check_every: float = 1.0
    problem: McrError | None = None

    def __init__(self) -> None:
        self.counter = memoryview(bytearray(8)).cast("Q")

    def post(self, sequence: int, digest: int, text: bytes) -> None:
        """Publish operation `sequence`, unless the slot holds a later operation; `text` comes from `pad`."""

    def post_counts(self, sequence: int, sent: Sequence[int], expected: Sequence[int]) -> None:
        """Publish the counts of a vector collective to and from each group rank; called before `post`."""

    def counts(self, rank: int, sequence: int) -> tuple[int, int] | None:  # noqa: ARG002
        """Return the elements that `rank` sends to this rank in `sequence`, and expects from this rank.

        Valid once `all_match` is true for the operation; None if the peer has overwritten the record.
        """
        return None

    def read(self, rank: int, sequence: int) -> PeerStatus:  # noqa: ARG002
        """Return the row of group rank `rank`, with the record of `sequence` if there is one."""
        return PeerStatus(sequence)

    def arrive(self, sequence: int, now: float, idle: float) -> None:
        """Publish the time when this rank issued a recorded operation, and its `IdleTime` until then.

        Both are in seconds of `time.perf_counter`, which is one clock on a host.
        """

    def arrival_words(self, sequence: int) -> tuple[list[int], list[int]] | None:  # noqa: ARG002
        """Return the words that `arrive` published for `sequence`; None if ranks cannot see them."""
        return None

    def note(self, sequence: int, issued: float, idle: float, done: float) -> None:
        """Note an operation for `publish_noted`, if ranks cannot see `arrive`; seconds as in `arrive`."""

    def publish_noted(self, clocks: Mapping[int, float]) -> None:
        """Publish the noted operations. `clocks`: `Peers.clocks` of this rank's host."""

    def published(self, rank: int) -> Published | None:  # noqa: ARG002
        """Return the latest `publish_noted` of `rank`; None without one."""
        return None

    def noted(self, rank: int, sequences: Sequence[int]) -> Noted:  # noqa: ARG002
        """Return the times that `rank` has published for these operations: issue, idle time before, end."""
        return {}

    def remove_noted(self, others: Sequence[int] = ()) -> None:
        """Remove the operations that this rank published with `publish_noted`, once no rank needs them.

        `others`: ranks that cannot remove theirs, so this rank does.
        """

    def seen(self, rank: int) -> int:  # noqa: ARG002
        """Return the number of operations that `rank` had issued when last read; callable from any thread."""
        return 0

    def text(self, rank: int, sequence: int, digest: int) -> str:  # noqa: ARG002
        """Return the description that `rank` posted with this digest; empty if it has been overwritten."""
        return ""

    def all_match(self, sequence: int, digest: int) -> bool:  # noqa: ARG002
        """Return whether all ranks have posted this digest for `sequence`.

        Also False if a rank has overwritten its post, or if the rows may not be read again yet.
        """
        return True

    def close(self) -> None:
        """Free the memory. No other method may be called afterwards."""

    def mark_closed(self) -> None:
        """Publish that this rank leaves normally."""

    def is_closed(self, rank: int) -> bool:  # noqa: ARG002
        """Return whether `rank` leaves, or has left, normally."""
        return False

    def mark_compiling(self, begins: bool) -> None:
        """Publish that this rank begins or ends compiling kernels."""

    def compiling(self, rank: int) -> int:  # noqa: ARG002
        """Return a number that changes when `rank` starts or stops compiling kernels; odd meanwhile."""
        return 0

    def mark_moving(self) -> None:
        """Publish that a library has failed on this rank, see `mcr_plus.reliability.failover`."""

    def moves(self) -> int:
        """Return a number that changes when any rank calls `mark_moving`."""
        return 0

    def mark_failed(self, failure: Failure) -> None:
        """Publish why this rank issues no more operations in the group; only the first call counts."""

    def failure(self, rank: int) -> Failure | None:  # noqa: ARG002
        """Return the reason why `rank` issues no more operations in the group; None if it has not failed."""
        return None


def pad(text: str) -> bytes:
    """Return a description as the fixed-size record that `GroupBoard.post` takes."""
    return text.encode()[: TEXT - 1].ljust(TEXT, b"\0")


def unpad(record: bytes) -> str:
    """Return the description in a record of `pad`."""
    return record.rstrip(b"\0").decode(errors="replace")


def slot_word(sequence: int, digest: int) -> int:
    """Return the 64-bit word for an operation in a slot of the ring."""
    return (sequence & TAG_MASK) << DIGEST_BITS | digest


def is_later(word: int, sequence: int) -> bool:
    """Return whether a slot holds an operation after `sequence`."""
    return 0 < ((word >> DIGEST_BITS) - sequence & TAG_MASK) <= TAG_MASK >> 1


def peer_status(issued: int, word: int, sequence: int) -> PeerStatus:
    """Return the status for a peer's counter and its word in the slot of `sequence`."""
    if word >> DIGEST_BITS == sequence & TAG_MASK and word:
        return PeerStatus(max(issued, sequence), word & DIGEST_MASK)
    return PeerStatus(issued, None, is_later(word, sequence))


def next_turn(turn: int, begins: bool) -> int:
    """Return the next number for `GroupBoard.compiling`: odd if compiling `begins`, even if it ends."""
    return turn + 1 + ((turn + 1) % 2 != begins)
