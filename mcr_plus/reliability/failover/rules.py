"""Decide about the operations of a failed library, by a pure function of all ranks' records.

A library's operations in a group are numbered in the order in which they start, which is the same on all
ranks. Each rank stops calling the library, and records which of its last operations are complete. From all
records, each rank derives the same `Verdict`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mcr_plus.errors import phrase_ranks


class RankOperation(NamedTuple):
    """An operation on one rank.

    Attributes:
        digest: digest of the signature, the same on all ranks.
        is_done: True if it is complete on this rank, so the program may have the result.
        has_input: True if it can run again, because the input is unchanged.
        has_result: True if the output is unchanged, and is the result for all ranks.
    """

    digest: int
    is_done: bool
    has_input: bool
    has_result: bool


@dataclass(frozen=True)
class RankRecord:
    """Record of one rank. `next`: number of the next operation. `operations`: last operations, by number."""

    next: int
    operations: Mapping[int, RankOperation]

    @property
    def first_open(self) -> int:
        """Number of the first operation that is not complete here."""
        return min(
            (number for number, each in self.operations.items() if not each.is_done), default=self.next
        )


@dataclass(frozen=True)
class Verdict:
    """Decision on the operations to run again.

    Attributes:
        first: operations before this number are complete on all ranks; operations from this number on run on
            the other library, in order.
        sources: for each operation that is complete on some rank, the group rank that sends the result to all
            others. Results of two libraries may differ in the last bit, so ranks must not mix them.
        refusal: reason why operations cannot run again; empty if they can.
    """

    first: int
    sources: Mapping[int, int] = field(default_factory=dict)
    refusal: str = ""


def decide(
    records: Sequence[RankRecord], named: Callable[..., str] = lambda *ranks: phrase_ranks(ranks)
) -> Verdict:
    """Return the verdict for the records of all ranks of a group, in order. `named`: see `Group.named`."""
    first = min(record.first_open for record in records)
    sources: dict[int, int] = {}
    for number in range(first, max(record.next for record in records)):
        begun = {rank: record for rank, record in enumerate(records) if number < record.next}
        own = {rank: record.operations.get(number) for rank, record in begun.items()}
        known = {rank: each for rank, each in own.items() if each is not None}
        if len({each.digest for each in known.values()}) > 1:
            return Verdict(first, refusal="ranks have issued different operations")
        if not any(each is None or each.is_done for each in own.values()):
            continue
        lost = [rank for rank, each in own.items() if each is None]
        source = (
            None
            if lost
            else min((rank for rank, each in known.items() if each.is_done and each.has_result), default=None)
        )
        if source is not None:
            sources[number] = source
            continue
        gone = lost or [rank for rank, each in known.items() if not each.has_input]
        if gone:
            return Verdict(
                first,
                refusal=f"{named(*gone)} completed an operation that others have not, and its tensors "
                "have changed since",
            )
    return Verdict(first, sources)
