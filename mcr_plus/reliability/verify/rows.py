"""Exchange checksums: every rank gets all ranks' rows of 64-bit words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from mcr_plus.core.message import Message, Signature
from mcr_plus.reliability.verify.row_kernels import AGREE, claim, compared, gathered, post

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcr_plus.backends.base import Poll
    from mcr_plus.reliability.verify.steps import VerifiedSteps

_LINE: Final = 8  # words
_TRIES: Final = 100  # checks of other ranks' rows per poll, about as long as a poll of shared memory


class RowExchange(Protocol):
    """Exchanges of rows of one length, one at a time and in the same order on all ranks."""

    @property
    def number(self) -> int:
        """Number of the last exchange that this rank has begun."""
        ...

    def post(self, row: Any) -> Poll:
        """Publish this rank's int64 row with its sum; the returned poll is true once all have arrived."""
        ...

    def ring(self) -> None:
        """Wake ranks that wait for a row posted by compiled code."""
        ...

    def agree(self) -> bool:
        """Return whether all rows are undamaged, of the same operation, and match (all data arrived)."""
        ...

    def read(self) -> list[list[int]]:
        """Return the rows of all ranks, in rank order."""
        ...


class SharedRows:
    """Rows in memory shared by the ranks of a host.

    A rank posts its next row only after it has read all current rows. So two rows per rank are enough: no
    rank still reads the previous row when it is overwritten.
    """

    def __init__(
        self, memory: memoryview, rank: int, ranks: int, words: int, ring: Callable[[], None]
    ) -> None:
        """Use `memory` of `shared_bytes`, initially zeros. `ring`: wakes ranks that wait."""
        self._all: Any = np.frombuffer(memory, np.int64)
        self._base = self._all.ctypes.data
        self._row, self._words, self._ranks, self.ring = 8 * _stride(words), words, ranks, ring
        self._mine = rank * 2 * self._row
        self._counter: Any = np.zeros(1, np.int64)
        self._verdict = 0

    @property
    def number(self) -> int:
        """See `RowExchange`."""
        return int(self._counter[0])

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Addresses for compiled code that exchanges rows itself.

        The address of the last exchange's number, the address of the first row, and the distance in bytes
        between the rows of two ranks.
        """
        return self._counter.ctypes.data, self._base, 2 * self._row

    def post(self, row: Any) -> Poll:
        """See `RowExchange`."""
        number = claim(self._counter.ctypes.data)
        post(row.ctypes.data, self._words, self._base + number % 2 * self._row + self._mine, number)
        self.ring()
        return self.poll()

    def poll(self) -> Poll:
        """Return whether all rows of this rank's current exchange have arrived."""
        number, ranks, stride = self.number, self._ranks, 2 * self._row
        first = self._base + number % 2 * self._row

        def is_there() -> bool:
            if not self._base:  # closed, so the memory is unmapped
                return False
            self._verdict = verdict = gathered(first, stride, ranks, number, _TRIES)
            return bool(verdict)

        return is_there

    def agree(self) -> bool:
        """See `RowExchange`."""
        return self._verdict == AGREE

    def read(self) -> list[list[int]]:
        """See `RowExchange`."""
        first = self.number % 2 * self._row // 8 + 1
        rows: list[list[int]] = self._all.reshape(self._ranks, -1)[:, first : first + self._words].tolist()
        return rows

    def close(self) -> None:
        """Release the memory."""
        self._base, self._all = 0, None


class LibraryRows:
    """Rows exchanged by a library's all_gather, for ranks on several hosts."""

    def __init__(self, steps: VerifiedSteps, group: str, ranks: int, words: int) -> None:
        self._ranks = ranks
        self._step = steps.bind(
            Signature(
                "all_gather", torch.int64, (words,), 8 * words * ranks, group, ranks, tag="verify",
                backend=steps.backend.name, async_op=True,
            )
        )  # fmt: skip
        self._all = torch.empty(ranks, words, dtype=torch.int64, device="cpu")
        self.number = 0

    def post(self, row: Any) -> Poll:
        """See `RowExchange`."""
        self.number += 1
        row[-1] = row[:-1].sum()
        self._all = torch.empty_like(self._all)
        message = Message(self._step.signature, (torch.from_numpy(row),), (self._all.view(-1),))
        gate, poll = self._step.gate(message), None

        def is_there() -> bool:
            nonlocal gate, poll
            if gate is not None:
                if not gate():
                    return False
                gate = None
            if poll is None:
                poll = self._step.start(message)
            return poll()

        return is_there

    def ring(self) -> None:
        """Do nothing: the library wakes the ranks."""

    def agree(self) -> bool:
        """See `RowExchange`."""
        rows = self._all
        return bool(compared(rows.data_ptr(), 8 * rows.shape[1], self._ranks) == AGREE)

    def read(self) -> list[list[int]]:
        """See `RowExchange`."""
        rows: list[list[int]] = self._all.tolist()
        return rows


def _stride(words: int) -> int:
    """Return the words of a row in shared memory, with its number, rounded up to whole cache lines."""
    return -(-(1 + words) // _LINE) * _LINE


def shared_bytes(ranks: int, words: int) -> int:
    """Return the bytes of the memory of `SharedRows`."""
    return 8 * 2 * ranks * _stride(words)
