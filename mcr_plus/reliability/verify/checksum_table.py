"""Checksums of the blocks that ranks exchange in an operation, and the first mismatch."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from mcr_plus.kernels import cpu
from mcr_plus.kernels.checksum import changed, checksums, join
from mcr_plus.kernels.checksum_sizes import BLOCK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STAGES: Final = 2
"""Most stages of a verified operation: a reduction sends values, then sums."""
WORD: Final = 1 << 64
SENT, GOT, SENT_SUMS, GOT_SUMS = range(2 * STAGES)
"""Sent and received data of each stage: a row has a word per rank for each of these in turn."""
LARGE: Final = 512 << 10
"""Bytes from which several threads take checksums, where torch has threads."""


def row_words(ranks: int) -> int:
    """Return the number of words of a row.

    A row has, per stage, a word for each receiver and each sender, then the operation's digest and the sum of
    all words.
    """
    return STAGES * 2 * ranks + 2


class Flows(NamedTuple):
    """Parts of a tensor that a rank sends to other ranks, or receives from them.

    Attributes:
        peers: first peer rank and number of peers of each flow.
        offsets, nbytes: offset and size of each flow in bytes; for an operation in pieces, those in the last
            piece.
    """

    peers: Sequence[tuple[int, int]]
    offsets: Sequence[int]
    nbytes: Sequence[int]

    @classmethod
    def one(cls, peer: int, nbytes: int, peers: int = 1) -> Flows:
        """Return a whole tensor as one flow to or from `peers` ranks, beginning with `peer`."""
        return cls([(peer, peers)], [0], [nbytes])

    @classmethod
    def of_parts(cls, nbytes: Sequence[int]) -> Flows:
        """Return a part of the tensor for each rank, in rank order."""
        return cls([(rank, 1) for rank in range(len(nbytes))], [0, *accumulate(nbytes[:-1])], nbytes)


class ChecksumPlan:
    """Flows of an operation, and the places of the checksums of their blocks.

    An operation may run in pieces: `repeats` pieces, in which each flow has `part` bytes (whole blocks), and
    a last piece. Blocks are numbered consecutively through all pieces of a flow.
    """

    def __init__(
        self, ranks: int, ends: Mapping[int, Flows], repeats: int = 0, part: int = 0, stride: int = 0
    ) -> None:
        """Plan for the flows of `ends`, by `SENT` and so on; ends without data on this rank are missing.

        `stride`: bytes from one flow to the next in a piece, if flows are not contiguous.
        """
        self.ranks = ranks
        before = repeats * (part // BLOCK)  # blocks of a flow before the last piece
        self.step = 8 * (part // BLOCK)
        flows, first = [], 0
        self.cuts: dict[int, tuple[_Cut, _Cut]] = {}
        for end, (peers, offsets, nbytes) in ends.items():
            whole, last = [], []
            for number, ((peer, count), offset, size) in enumerate(zip(peers, offsets, nbytes, strict=True)):
                whole.append((number * (stride or part), part, first))
                last.append((offset, size, first + before))
                blocks = before + -(-size // BLOCK)
                flows.append((first, blocks, end * ranks + peer, count))
                first += blocks
            self.cuts[end] = _Cut(whole), _Cut(last)
        self.blocks, self.repeats = first, repeats
        self.flows = np.array(flows or np.empty((0, 4)), np.int64)


class _Cut:
    """Parts of a tensor as arguments of `checksums`."""

    __slots__ = ("address", "blocks", "nbytes", "parts", "table")

    def __init__(self, parts: Sequence[tuple[int, int, int]]) -> None:
        self.table = np.array(parts or np.empty((0, 3)), np.int64)
        self.address, self.parts = self.table.ctypes.data, len(parts)
        self.nbytes = sum(nbytes for _, nbytes, _ in parts)
        self.blocks = sum(-(-nbytes // BLOCK) for _, nbytes, _ in parts)

    def take(self, base: int, out: int) -> None:
        """Write the checksums of the blocks at `base` to `out`."""
        if self.nbytes < LARGE:
            checksums(base, self.address, self.parts, out, 0, self.blocks)
        else:
            cpu.spread(checksums, self.blocks, self.nbytes, base, self.address, self.parts, out)


class ChecksumTable:
    """Checksums of one operation.

    Attributes:
        row: `row_words` int64; the last word, the sum, is filled in when the row is posted.
    """

    def __init__(self, plan: ChecksumPlan, digest: int = 0) -> None:
        """Prepare for a plan. `digest`: digest of the operation's signature, which ranks compare."""
        self.plan = plan
        self._checksums: Any = np.zeros(max(1, plan.blocks), np.int64)
        self.row: Any = np.zeros(row_words(plan.ranks), np.int64)
        self.row[-2] = digest
        self._at, self.address = self._checksums.ctypes.data, self.row.ctypes.data
        self._flows = plan.flows.ctypes.data, len(plan.flows), self._at, self.address
        # Most operations run in one piece, so bind their cuts once.
        self._last = {end: last.take for end, (_, last) in plan.cuts.items()}

    @property
    def joined(self) -> tuple[int, int, int, int]:
        """Arguments of `join`."""
        return self._flows

    def cut(self, end: int) -> tuple[int, int, int]:
        """Return the cut of the last or only piece: address, parts and blocks; zeros without a cut."""
        if end not in self.plan.cuts:
            return 0, 0, 0
        cut = self.plan.cuts[end][1]
        return cut.address, cut.parts, cut.blocks

    def take(self, end: int, address: int) -> None:
        """Take the checksums of sent or received data at `address`, of the last or only piece."""
        self._last[end](address, self._at)

    def take_piece(self, end: int, address: int, piece: int) -> None:
        """Take the checksums of one piece."""
        plan = self.plan
        if piece == plan.repeats:
            self.take(end, address)
        else:
            plan.cuts[end][0].take(address, self._at + piece * plan.step)

    def join(self) -> None:
        """Fill the row with one word for each flow."""
        join(*self._flows)

    def of(self, end: int, peer: int) -> list[int]:
        """Return the checksums of the blocks of one flow; none without a flow."""
        word = end * self.plan.ranks + peer
        for first, blocks, at, count in self.plan.flows.tolist():
            if at <= word < at + count:
                found: list[int] = self._checksums[first : first + blocks].tolist()
                return found
        return []


class Blocks:
    """Checksums of a message of `nbytes`, as a tensor to send."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._cut = nbytes, _Cut([(0, nbytes, 0)])
        self.count = self._cut.blocks

    def new(self) -> tuple[torch.Tensor, int]:
        """Return memory for one int64 per block, and its address."""
        words = torch.empty(self.count, dtype=torch.int64, device="cpu")
        return words, words.data_ptr()

    def take(self, address: int, words: int) -> None:
        """Write the checksums of the data at `address` to `words`."""
        self._cut.take(address, words)

    def changed(self, address: int, words: int) -> int | None:
        """Return the first block at `address` with a different checksum; None if all match."""
        if self._nbytes < LARGE:
            parts = [changed(address, self._nbytes, words, 0, self.count)]
        else:
            parts = cpu.spread(changed, self.count, self._nbytes, address, self._nbytes, words)
        return next((block for block in parts if block >= 0), None)


class ChecksumMismatch(NamedTuple):
    """First changed payload: stage, sender and receiver (group ranks)."""

    stage: int
    source: int
    target: int


def damaged_rows(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks with rows that changed in transit."""
    return [rank for rank, row in enumerate(rows) if (sum(row[:-1]) - row[-1]) % WORD]


def operations_differ(rows: Sequence[Sequence[int]]) -> bool:
    """Return whether ranks have run different operations."""
    return len({row[-2] for row in rows}) > 1


def first_difference(rows: Sequence[Sequence[int]]) -> ChecksumMismatch | None:
    """Return the first payload that differs between sender and receiver; None if all are equal."""
    ranks = len(rows)
    for stage in range(STAGES):
        begin, middle, end = (2 * stage * ranks + part * ranks for part in range(3))
        sent = [row[begin:middle] for row in rows]
        got = [list(column) for column in zip(*(row[middle:end] for row in rows), strict=True)]
        if sent != got:
            return next(
                ChecksumMismatch(stage, source, target)
                for source in range(ranks)
                for target in range(ranks)
                if sent[source][target] != got[source][target]
            )
    return None


def first_block(sent: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the first block with different checksums."""
    return next(
        (number for number, pair in enumerate(zip(sent, got, strict=False)) if pair[0] != pair[1]), None
    )
