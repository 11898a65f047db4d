"""What ranks have sent and what has arrived, as hashes of blocks, and the first difference between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mcr_plus.dispatch.verify.rows import WORD
from mcr_plus.kernels.digest import joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcr_plus.kernels.digest import Array

STAGES: Final = 2
"""Stages of a verified operation at most: a reduction sends values, and then sums."""

Hashes = dict[int, "Array"]
"""Hashes of blocks by the rank that they go to, or come from; without those that there are none of."""


class Flows(NamedTuple):
    """What a rank has `sent` in a stage, by receiver, and what it has `got`, by sender."""

    sent: Hashes
    got: Hashes


class Difference(NamedTuple):
    """The first payload that has changed: in which stage, from which group rank, to which one."""

    stage: int
    source: int
    target: int


def row_words(ranks: int) -> int:
    """Words of a row: for each stage one for each receiver and each sender, and their sum."""
    return STAGES * 2 * ranks + 1


def row_of(stages: Sequence[Flows], ranks: int) -> list[int]:
    """The row of a rank."""
    row: list[int] = []
    for flows in stages:
        for hashes in flows:
            known: dict[int, int] = {}  # what goes to all ranks is joined once
            for rank in range(ranks):
                each = hashes.get(rank)
                if each is None:
                    row.append(0)
                    continue
                if id(each) not in known:
                    known[id(each)] = joined(each)
                row.append(known[id(each)])
    row += [0] * (row_words(ranks) - 1 - len(row))
    row.append(sum(row) % WORD)
    return row


def damaged_rows(rows: Sequence[Sequence[int]]) -> list[int]:
    """The ranks whose rows have changed on their way."""
    return [rank for rank, row in enumerate(rows) if sum(row[:-1]) % WORD != row[-1]]


def first_difference(rows: Sequence[Sequence[int]]) -> Difference | None:
    """The first payload that has not arrived as it was sent; None if all have."""
    ranks = len(rows)
    for stage in range(STAGES):
        begin, middle, end = (2 * stage * ranks + part * ranks for part in range(3))
        sent = [row[begin:middle] for row in rows]
        got = [list(column) for column in zip(*(row[middle:end] for row in rows), strict=True)]
        if sent != got:
            return next(
                Difference(stage, source, target)
                for source in range(ranks)
                for target in range(ranks)
                if sent[source][target] != got[source][target]
            )
    return None


def first_block(sent: Sequence[int], got: Sequence[int]) -> int | None:
    """The first block whose hashes differ."""
    return next(
        (number for number, pair in enumerate(zip(sent, got, strict=False)) if pair[0] != pair[1]), None
    )
