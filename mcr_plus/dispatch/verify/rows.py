"""The exchange of digests: every rank gets the rows of 64-bit words of all ranks."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch

from mcr_plus.core.message import Message, Signature

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mcr_plus.backends.base import Poll
    from mcr_plus.dispatch.failover.second import SecondLibrary

WORD: Final = 1 << 64
_LINE: Final = 8  # words


class Rows(Protocol):
    """Exchanges of rows of one length, one at a time and in the same order on all ranks."""

    def post(self, row: Sequence[int]) -> Poll:
        """Publish this rank's row; the poll is true once those of all ranks are there."""
        ...

    def read(self) -> list[list[int]]:
        """The rows of all ranks, in their order."""
        ...


class SharedRows:
    """Rows in memory that the ranks of a host share.

    A rank posts the next row only once it has read all of the present ones, so two rows for each rank are
    enough: the one before is not read any more when it is overwritten.
    """

    def __init__(
        self, memory: memoryview, rank: int, ranks: int, words: int, ring: Callable[[], None]
    ) -> None:
        """`memory`: of `shared_bytes`, zeros at first. `ring`: wakes ranks that wait."""
        self._stride, self._words = _stride(words), words
        self._all = memory.cast("Q")
        self._rank, self._ranks, self._ring = rank, ranks, ring
        self._number = 0

    def post(self, row: Sequence[int]) -> Poll:
        """See `Rows`."""
        self._number = number = self._number + 1
        everything, places = self._all, self._places()
        mine = places[self._rank]
        everything[mine + 1 : mine + 1 + self._words] = memoryview(array("Q", row))
        everything[mine] = number  # after the row: one aligned store publishes it
        self._ring()

        def is_there() -> bool:
            return all(everything[place] == number for place in places)

        return is_there

    def read(self) -> list[list[int]]:
        """See `Rows`."""
        words = self._words
        return [self._all[place + 1 : place + 1 + words].tolist() for place in self._places()]

    def _places(self) -> range:
        first = self._number % 2 * self._stride
        return range(first, first + 2 * self._stride * self._ranks, 2 * self._stride)

    def close(self) -> None:
        """Let go of the memory."""
        self._all.release()


class LibraryRows:
    """Rows by an all_gather of a library, for ranks of several hosts."""

    def __init__(self, library: SecondLibrary, group: str, ranks: int, words: int) -> None:
        self._library = library
        self._signature = Signature(
            "all_gather", torch.int64, (words,), 8 * words * ranks, group, ranks, tag="verify",
            backend=library.backend.name, async_op=True,
        )  # fmt: skip
        self._all = torch.empty(0, dtype=torch.int64, device="cpu")

    def post(self, row: Sequence[int]) -> Poll:
        """See `Rows`."""
        mine = torch.from_numpy(np.array(row, np.uint64).view(np.int64))
        self._all = torch.empty(len(row) * self._signature.ranks, dtype=torch.int64, device="cpu")
        message = Message(self._signature, (mine,), (self._all,))
        gate: Poll | None = self._library.gate(message)
        poll: Poll | None = None

        def is_there() -> bool:
            nonlocal gate, poll
            if gate is not None:
                if not gate():
                    return False
                gate, poll = None, self._library.poll(message)
            return poll is not None and poll()

        return is_there

    def read(self) -> list[list[int]]:
        """See `Rows`."""
        unsigned = self._all.numpy().view(np.uint64)
        return unsigned.reshape(self._signature.ranks, -1).tolist()


def _stride(words: int) -> int:
    """Words of a row in shared memory: its number, and whole cache lines."""
    return -(-(1 + words) // _LINE) * _LINE


def shared_bytes(ranks: int, words: int) -> int:
    """Bytes of the memory of `SharedRows`."""
    return 8 * 2 * ranks * _stride(words)
