"""The board of a group: its interface, its records, and the board of a group without peers."""

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
NOTE: Final = 2 * TEXT + 256  # a mismatch: two descriptions, and the words and the group's name around them
# A slot holds the low 32 bits of the sequence number above the digest. As many, because operations that are
# not posted leave slots untouched: an old post must not match an operation fewer than 2³² later.
DIGEST_BITS: Final = 32
DIGEST_MASK: Final = 0xFFFFFFFF
TAG_MASK: Final = 0xFFFFFFFF


class PeerStatus(NamedTuple):
    """A peer's row at a sequence number.

    `issued` is how many operations it has issued; `digest` is None unless it has posted this very operation
    and not overwritten it since. `overwritten`: its slot in the ring holds a later one.
    """

    issued: int
    digest: int | None = None
    overwritten: bool = False


@dataclass(frozen=True)
class Failure:
    """Why a rank failed: the number of the operation that failed (0: none did), and the error."""

    sequence: int
    text: str

    _NUMBER: ClassVar = struct.Struct("<Q")

    def packed(self) -> bytes:
        """As a record of `NOTE` bytes."""
        text = self.text.encode()[: NOTE - self._NUMBER.size]
        return (self._NUMBER.pack(self.sequence) + text).ljust(NOTE, b"\0")

    @classmethod
    def unpacked(cls, record: bytes) -> Failure:
        """The inverse of `packed`."""
        (sequence,) = cls._NUMBER.unpack_from(record)
        return cls(sequence, record[cls._NUMBER.size :].rstrip(b"\0").decode(errors="replace"))


Noted = dict[int, tuple[float, float, float]]
"""Operations by their numbers, see `GroupBoard.noted`."""


class Published(NamedTuple):
    """That a rank has published what it has noted of its operations up to number `issued`.

    `clocks`: see `GroupBoard.publish_noted`.
    """

    issued: int
    clocks: Mapping[int, float]


class GroupBoard:
    """The rows of one group. This class itself is the board of a group without peers.

    Attributes:
        counter: `counter[0]` is the number of operations this rank has issued.
        ballots: see `SharedBoard.cast`; None unless the rows lie in memory.
        is_live: whether `seen` is what ranks have issued by now.
        first_check: seconds of waiting after which reading all peers' rows is worth its cost; `check_every`
            seconds later again.
        problem: why the peers' rows cannot be read, or cannot be trusted (`LaunchError`).
    """

    ballots: Callable[[int], Poll] | None = None
    is_live: bool = False
    first_check: float = 1.0
    check_every: float = 1.0
    problem: McrError | None = None

    def __init__(self) -> None:
        self.counter = memoryview(bytearray(8)).cast("Q")

    def post(self, sequence: int, digest: int, text: bytes) -> None:
        """Publish operation `sequence`, unless its slot holds a later one; `text` comes from `pad`."""

    def post_counts(self, sequence: int, sent: Sequence[int], expected: Sequence[int]) -> None:
        """Publish, before `post`, how many elements a vector collective moves to and from each group rank."""

    def counts(self, rank: int, sequence: int) -> tuple[int, int] | None:  # noqa: ARG002
        """How many elements `rank` sends to this rank in `sequence`, and how many it expects from it.

        Valid once `all_match` is true for the operation; None if the peer has overwritten the record since.
        """
        return None

    def read(self, rank: int, sequence: int) -> PeerStatus:  # noqa: ARG002
        """The row of group rank `rank`, with its record of `sequence` if there is one."""
        return PeerStatus(sequence)

    def arrive(self, sequence: int, now: float, idle: float) -> None:
        """Publish when this rank has issued `sequence`, and its `WaitTime` until then.

        In seconds of `time.perf_counter`, which is one clock on a host. Only while operations are recorded.
        """

    def arrival_words(self, sequence: int) -> tuple[list[int], list[int]] | None:  # noqa: ARG002
        """What `arrive` has published for `sequence`, for `arrival_times`; None where ranks do not see it."""
        return None

    def note(self, sequence: int, issued: float, idle: float, done: float) -> None:
        """Note an operation for `publish_noted`, where ranks do not see `arrive`; seconds as there."""

    def publish_noted(self, clocks: Mapping[int, float]) -> None:
        """Publish what was noted. `clocks`: `Peers.clocks` of this rank's host."""

    def published(self, rank: int) -> Published | None:  # noqa: ARG002
        """What `rank` has said with the latest `publish_noted`; None without one."""
        return None

    def noted(self, rank: int, sequences: Sequence[int]) -> Noted:  # noqa: ARG002
        """What `rank` has published of these operations: times of issue, idle until then, and of the end."""
        return {}

    def remove_noted(self, others: Sequence[int] = ()) -> None:
        """Remove what this rank has published with `publish_noted`, once no rank needs it any more.

        `others`: ranks whose part is removed, too, since they cannot do it.
        """

    def seen(self, rank: int) -> int:  # noqa: ARG002
        """How many operations `rank` has issued as far as this process has read; from any thread."""
        return 0

    def text(self, rank: int, sequence: int, digest: int) -> str:  # noqa: ARG002
        """The description that `rank` has posted with this digest; empty if it is not there any more."""
        return ""

    def all_match(self, sequence: int, digest: int) -> bool:  # noqa: ARG002
        """Whether all ranks have posted this digest for `sequence`.

        False may also mean that a rank has overwritten its post since, or that it is too early to read again.
        """
        return True

    def close(self) -> None:
        """Free the memory. Nothing else may be called afterwards."""

    def mark_closed(self) -> None:
        """Publish that this rank leaves in good order."""

    def is_closed(self, rank: int) -> bool:  # noqa: ARG002
        """Whether `rank` leaves, or has left, in good order."""
        return False

    def mark_compiling(self, begins: bool) -> None:
        """Publish that this rank begins to compile kernels, or has ended."""

    def compiling(self, rank: int) -> int:  # noqa: ARG002
        """A number that changes when `rank` begins or ends to compile kernels, and is odd in between."""
        return 0

    def mark_moving(self) -> None:
        """Publish that a library has failed on this rank, see `mcr_plus.reliability.failover`."""

    def moves(self) -> int:
        """A number that changes when any rank calls `mark_moving`."""
        return 0

    def mark_failed(self, failure: Failure) -> None:
        """Publish that this rank issues nothing more in this group, and why; only the first call counts."""

    def failure(self, rank: int) -> Failure | None:  # noqa: ARG002
        """Why `rank` issues nothing more in the group; None if it has not failed."""
        return None


def pad(text: str) -> bytes:
    """A description as the fixed-size record that `GroupBoard.post` takes."""
    return text.encode()[: TEXT - 1].ljust(TEXT, b"\0")


def unpad(record: bytes) -> str:
    """The description in a record of `pad`."""
    return record.rstrip(b"\0").decode(errors="replace")


def slot_word(sequence: int, digest: int) -> int:
    """The 64 bits in a ring's slot that record an operation."""
    return (sequence & TAG_MASK) << DIGEST_BITS | digest


def is_later(word: int, sequence: int) -> bool:
    """Whether a slot holds an operation after `sequence`."""
    return 0 < ((word >> DIGEST_BITS) - sequence & TAG_MASK) <= TAG_MASK >> 1


def peer_status(issued: int, word: int, sequence: int) -> PeerStatus:
    """The status from a peer's counter and the word in the slot of `sequence`."""
    if word >> DIGEST_BITS == sequence & TAG_MASK and word:
        return PeerStatus(max(issued, sequence), word & DIGEST_MASK)
    return PeerStatus(issued, None, is_later(word, sequence))


def next_turn(turn: int, begins: bool) -> int:
    """The next number for `GroupBoard.compiling`: odd if compiling `begins`, even if it ends."""
    return turn + 1 + ((turn + 1) % 2 != begins)
