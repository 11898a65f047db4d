"""What ranks do with the operations of a library that has failed: a function of what each of them has.

Operations of a library in a group are numbered in the order in which they start, which is the same on all
ranks. Each rank stops calling the library and says which of its last operations are complete; from all of
these records, each rank derives the same `Verdict`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mcr_plus.errors import phrase_ranks


class RankOperation(NamedTuple):
    """An operation on one rank.

    Attributes:
        digest: of its signature, the same on all ranks.
        is_done: it is complete on this rank, so that the program may have its result.
        has_input: it can run again: its input is as it was.
        has_result: its output is still the result, and that of all ranks.
    """

    digest: int
    is_done: bool
    has_input: bool
    has_result: bool


@dataclass(frozen=True)
class RankRecord:
    """What one rank has. `next`: the number of its next operation. `operations`: the last ones, by number."""

    next: int
    operations: Mapping[int, RankOperation]

    @property
    def first_open(self) -> int:
        """The number of the first operation that is not complete here."""
        return min(
            (number for number, each in self.operations.items() if not each.is_done), default=self.next
        )


@dataclass(frozen=True)
class Verdict:
    """What runs again.

    Attributes:
        first: operations before this number are complete on all ranks; those from it on run on the other
            library, in their order.
        sources: of those that are complete on some rank already, the group rank that sends its result to
            all others instead: ranks of one operation must not have results of two libraries, which may
            differ in the last bit.
        refusal: why they cannot run again; empty if they can.
    """

    first: int
    sources: Mapping[int, int] = field(default_factory=dict)
    refusal: str = ""


def decide(
    records: Sequence[RankRecord], named: Callable[..., str] = lambda *ranks: phrase_ranks(ranks)
) -> Verdict:
    """The verdict for the records of all ranks of a group, in their order. `named`: see `Group.named`."""
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
