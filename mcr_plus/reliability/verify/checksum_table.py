"""What ranks send each other in an operation, as checksums of blocks, and the first difference."""

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
"""Stages of a verified operation at most: a reduction sends values, and then sums."""
WORD: Final = 1 << 64
SENT, GOT, SENT_SUMS, GOT_SUMS = range(2 * STAGES)
"""What a rank sends and gets in each stage: a row has a word for each rank, for each of these in turn."""
LARGE: Final = 512 << 10
"""Bytes from which several threads take checksums, where torch has them."""


def row_words(ranks: int) -> int:
    """Words of a row: for each stage one for each receiver and each sender, the digest of the operation, and
    the sum of these.
    """
    return STAGES * 2 * ranks + 2


class Flows(NamedTuple):
    """What a rank sends to others, or gets from them, in a tensor.

    Attributes:
        peers: for each flow the first of the ranks that it goes to or comes from, and how many there are.
        offsets, nbytes: where it lies, in bytes, and its size; of an operation in pieces, in the last piece.
    """

    peers: Sequence[tuple[int, int]]
    offsets: Sequence[int]
    nbytes: Sequence[int]

    @classmethod
    def one(cls, peer: int, nbytes: int, peers: int = 1) -> Flows:
        """A whole tensor, which goes to one rank, or to so many of them."""
        return cls([(peer, peers)], [0], [nbytes])

    @classmethod
    def of_parts(cls, nbytes: Sequence[int]) -> Flows:
        """A part of the tensor for each rank, in their order."""
        return cls([(rank, 1) for rank in range(len(nbytes))], [0, *accumulate(nbytes[:-1])], nbytes)


class ChecksumPlan:
    """The flows of an operation, and where the checksums of their blocks are kept.

    An operation may run in pieces: `repeats` of them, in which each flow has `part` bytes (whole blocks),
    and a last one. Blocks are numbered through all pieces of a flow.
    """

    def __init__(
        self, ranks: int, ends: Mapping[int, Flows], repeats: int = 0, part: int = 0, stride: int = 0
    ) -> None:
        """`ends`: by `SENT` and so on; those of which this rank has nothing are left out.

        `stride`: bytes from a flow to the next one in a piece, if they do not follow each other.
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
    """Parts of a tensor for `checksums`."""

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
    """The checksums of one operation.

    Attributes:
        row: `row_words` of int64, with a sum that is still missing.
    """

    def __init__(self, plan: ChecksumPlan, digest: int = 0) -> None:
        """`digest`: of the operation's signature, so that ranks find out whether they run the same."""
        self.plan = plan
        self._checksums: Any = np.zeros(max(1, plan.blocks), np.int64)
        self.row: Any = np.zeros(row_words(plan.ranks), np.int64)
        self.row[-2] = digest
        self._at, self.address = self._checksums.ctypes.data, self.row.ctypes.data
        self._flows = plan.flows.ctypes.data, len(plan.flows), self._at, self.address
        # Of an operation in one piece, by far the most frequent.
        self._last = {end: last.take for end, (_, last) in plan.cuts.items()}

    @property
    def joined(self) -> tuple[int, int, int, int]:
        """The arguments of `join`."""
        return self._flows

    def cut(self, end: int) -> tuple[int, int, int]:
        """Of the last or only piece: address of the cut, its parts and blocks; zeros where there is none."""
        if end not in self.plan.cuts:
            return 0, 0, 0
        cut = self.plan.cuts[end][1]
        return cut.address, cut.parts, cut.blocks

    def take(self, end: int, address: int) -> None:
        """Take the checksums of what is sent or got, of the last piece at `address` or of the only one."""
        self._last[end](address, self._at)

    def take_piece(self, end: int, address: int, piece: int) -> None:
        """Take those of one piece."""
        plan = self.plan
        if piece == plan.repeats:
            self.take(end, address)
        else:
            plan.cuts[end][0].take(address, self._at + piece * plan.step)

    def join(self) -> None:
        """Fill the row with one word for each flow."""
        join(*self._flows)

    def of(self, end: int, peer: int) -> list[int]:
        """The checksums of the blocks of one flow; none if there is none."""
        word = end * self.plan.ranks + peer
        for first, blocks, at, count in self.plan.flows.tolist():
            if at <= word < at + count:
                found: list[int] = self._checksums[first : first + blocks].tolist()
                return found
        return []


class Blocks:
    """Checksums of a message of `nbytes`, as a tensor that travels."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._cut = nbytes, _Cut([(0, nbytes, 0)])
        self.count = self._cut.blocks

    def new(self) -> tuple[torch.Tensor, int]:
        """Memory for one int64 for each block, and its address."""
        words = torch.empty(self.count, dtype=torch.int64, device="cpu")
        return words, words.data_ptr()

    def take(self, address: int, words: int) -> None:
        """Write the checksums of what lies at an address to another."""
        self._cut.take(address, words)

    def changed(self, address: int, words: int) -> int | None:
        """The first block of what lies at an address that does not have its checksum."""
        if self._nbytes < LARGE:
            parts = [changed(address, self._nbytes, words, 0, self.count)]
        else:
            parts = cpu.spread(changed, self.count, self._nbytes, address, self._nbytes, words)
        return next((block for block in parts if block >= 0), None)


class ChecksumMismatch(NamedTuple):
    """The first payload that has changed: in which stage, from which group rank, to which one."""

    stage: int
    source: int
    target: int


def damaged_rows(rows: Sequence[Sequence[int]]) -> list[int]:
    """The ranks whose rows have changed on their way."""
    return [rank for rank, row in enumerate(rows) if (sum(row[:-1]) - row[-1]) % WORD]


def operations_differ(rows: Sequence[Sequence[int]]) -> bool:
    """Whether ranks have run different operations."""
    return len({row[-2] for row in rows}) > 1


def first_difference(rows: Sequence[Sequence[int]]) -> ChecksumMismatch | None:
    """The first payload that has not arrived as it was sent; None if all have."""
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
    """The first block whose checksums differ."""
    return next(
        (number for number, pair in enumerate(zip(sent, got, strict=False)) if pair[0] != pair[1]), None
    )
