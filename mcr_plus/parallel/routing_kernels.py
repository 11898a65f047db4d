"""Index lists of expert parallelism on the CPU: destinations of tokens, and the order of their rows.

A *choice* is a pair of a token and one of its k experts. A *row* of a message is a token, sent once to each
rank that has one of its experts. An *entry* is a choice that is kept. Entries are ordered by expert, then by
token, so the entries for one rank are adjacent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mcr_plus.kernels.compiling import preparing
from mcr_plus.kernels.cpu import compiled

Ints = npt.NDArray[np.int64]


class SentRows(NamedTuple):
    """Index lists of a sending rank. Rows for the rank itself stay in place and are not counted.

    Attributes:
        bad: flat index of the first expert id out of range; -1 if all are in range. Otherwise the other lists
            are invalid.
        load: [k, experts] number of tokens with each expert as first, second, … choice, even if dropped.
        counts: [experts] number of entries.
        firsts: [ranks + 1] first row for each rank.
        tokens: [rows] token of each row.
        token_firsts, token_rows: the rows of token t are `token_rows[token_firsts[t] : token_firsts[t + 1]]`.
        entry_rows: [entries] row, counted from the first row for its rank; for this rank itself, the token.
        entry_choices: [entries] token × k + index of the choice.
    """

    bad: int
    load: Ints
    counts: Ints
    firsts: Ints
    tokens: Ints
    token_firsts: Ints
    token_rows: Ints
    entry_rows: npt.NDArray[np.int32]
    entry_choices: Ints


class ReceivedRows(NamedTuple):
    """Destinations of rows. *Positions* are ordered by this rank's experts, then by rank, then by token.

    Attributes:
        bad: True if an entry names a row that was not received; the other lists are then invalid.
        sources: [positions] received row for the position, or -1 - t for this rank's own token t.
        places: [entries] position of each entry; entries are ordered by rank, then by expert.
        row_firsts, row_positions: the positions of received row j are
            `row_positions[row_firsts[j] : row_firsts[j + 1]]`.
        own_firsts, own_positions: the same for this rank's own tokens.
    """

    bad: bool
    sources: Ints
    places: Ints
    row_firsts: Ints
    row_positions: Ints
    own_firsts: Ints
    own_positions: Ints


@compiled
def _keep(ids, capacity, load, counts, kept):  # type: ignore[no-untyped-def]
    """Mark and count the choices within capacity, and return the first id that is out of range."""
    tokens, k = ids.shape
    bad = -1
    for c in range(k):  # first choices take precedence over second choices
        for t in range(tokens):
            expert = ids[t, c]
            if expert >= 0 and expert < counts.size:
                load[c, expert] += 1
                if capacity < 0 or counts[expert] < capacity:
                    counts[expert] += 1
                    kept[t, c] = 1
            elif expert != -1 and (bad < 0 or t * k + c < bad):
                bad = t * k + c
    return bad


@compiled
def _sum_up(counts, firsts):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(counts.size):
        firsts[i] = total
        total += counts[i]
    if firsts.size > counts.size:
        firsts[counts.size] = total
    return total


@compiled
def _count_rows(ids, kept, owners, rank, rows, seen):  # type: ignore[no-untyped-def]
    for t in range(ids.shape[0]):
        for c in range(ids.shape[1]):
            if kept[t, c]:
                to = owners[ids[t, c]]
                if to != rank and seen[to] != t:
                    seen[to] = t
                    rows[to] += 1


@compiled
def _sent(ids, owners, ranks, rank, capacity):  # type: ignore[no-untyped-def]
    tokens, k = ids.shape
    load, counts = np.zeros((k, owners.size), np.int64), np.zeros(owners.size, np.int64)
    kept, seen = np.zeros((tokens, k), np.uint8), np.full(ranks, -1, np.int64)
    bad = _keep(ids, capacity, load, counts, kept)
    ends = np.empty(owners.size, np.int64)  # end of each expert's entries so far
    entries = _sum_up(counts, ends)
    of_ranks, firsts = np.zeros(ranks, np.int64), np.empty(ranks + 1, np.int64)
    _count_rows(ids, kept, owners, rank, of_ranks, seen)
    rows = _sum_up(of_ranks, firsts)
    token_of, token_rows = np.empty(rows, np.int64), np.empty(rows, np.int64)
    token_firsts = np.empty(tokens + 1, np.int64)
    entry_rows, entry_choices = np.empty(entries, np.int32), np.empty(entries, np.int64)
    following = firsts.copy()
    for i in range(ranks):
        seen[i] = -1
    found = 0
    for t in range(tokens):
        token_firsts[t] = found
        for c in range(k):
            if kept[t, c]:
                expert = ids[t, c]
                to = owners[expert]
                if to != rank and seen[to] != t:
                    seen[to] = t
                    token_of[following[to]] = t
                    token_rows[found] = following[to]
                    following[to] += 1
                    found += 1
                at = ends[expert]
                ends[expert] += 1
                entry_rows[at] = t if to == rank else following[to] - 1 - firsts[to]
                entry_choices[at] = t * k + c
    token_firsts[tokens] = found
    return bad, load, counts, firsts, token_of, token_firsts, token_rows, entry_rows, entry_choices


@compiled
def _place(counts, firsts, rows, rank, tokens, sources, places):  # type: ignore[no-untyped-def]
    """Assign each entry its position; return whether an entry names a missing row."""
    ranks, experts = counts.shape
    starts = np.empty((ranks, experts), np.int64)
    at = 0
    for expert in range(experts):
        for source in range(ranks):
            starts[source, expert] = at
            at += counts[source, expert]
    bad = False
    entry = 0
    for source in range(ranks):
        known = tokens if source == rank else firsts[source + 1] - firsts[source]
        for expert in range(experts):
            at = starts[source, expert]
            for _ in range(counts[source, expert]):
                row = np.int64(rows[entry])
                bad |= row < 0 or row >= known
                sources[at] = -1 - row if source == rank else firsts[source] + row
                places[entry] = at
                entry += 1
                at += 1
    return bad


@compiled
def _group(sources, sign, first, firsts):  # type: ignore[no-untyped-def]
    """Group the positions by number i = sign × source - first, for i from 0."""
    counts = np.zeros(firsts.size - 1, np.int64)
    for at in range(sources.size):
        i = sign * sources[at] - first
        if i >= 0:
            counts[i] += 1
    positions = np.empty(_sum_up(counts, firsts), np.int64)
    ends = firsts.copy()
    for at in range(sources.size):
        i = sign * sources[at] - first
        if i >= 0:
            positions[ends[i]] = at
            ends[i] += 1
    return positions


@compiled
def _received(counts, firsts, rows, rank, tokens):  # type: ignore[no-untyped-def]
    sources, places = np.empty(rows.size, np.int64), np.empty(rows.size, np.int64)
    row_firsts, own_firsts = np.zeros(firsts[-1] + 1, np.int64), np.zeros(tokens + 1, np.int64)
    bad = _place(counts, firsts, rows, rank, tokens, sources, places)
    if bad:
        return bad, sources, places, row_firsts, places, own_firsts, places
    row_positions = _group(sources, 1, 0, row_firsts)
    own_positions = _group(sources, -1, 1, own_firsts)
    return bad, sources, places, row_firsts, row_positions, own_firsts, own_positions


@compiled
def _addresses(firsts, bases, nbytes):  # type: ignore[no-untyped-def]
    found = np.empty(firsts[bases.size], np.int64)
    for rank in range(bases.size):
        for row in range(firsts[rank], firsts[rank + 1]):
            found[row] = bases[rank] + (row - firsts[rank]) * nbytes
    return found


def sent(ids: Ints, owners: Ints, ranks: int, rank: int, capacity: int | None) -> SentRows:
    """Return the lists of a sending rank.

    Args:
        ids: [tokens, k] experts of each token; -1 for none.
        owners: [experts] rank of each expert.
        ranks, rank: number of ranks, and this rank.
        capacity: maximum number of entries of an expert, first choices before second, then by token; None for
            no limit.
    """
    return SentRows(*_sent(ids, owners, ranks, rank, -1 if capacity is None else capacity))


def received(counts: Ints, firsts: Ints, rows: npt.NDArray[np.int32], rank: int, tokens: int) -> ReceivedRows:
    """Return the lists of a receiving rank.

    Args:
        counts: [ranks, own experts] number of entries from each rank for each expert.
        firsts: [ranks + 1] first row of each rank; this rank has no rows.
        rows: `entry_rows` of all ranks for this rank, concatenated.
        rank, tokens: this rank, and its number of tokens.
    """
    return ReceivedRows(*_received(counts, firsts, rows, rank, tokens))


def addresses(firsts: Ints, bases: Ints, nbytes: int) -> Ints:
    """Return the address of each row in a buffer: rows of rank r from `bases[r]` on, `nbytes` apart."""
    return _addresses(firsts, bases, nbytes)  # type: ignore[no-any-return]


def prepare() -> None:
    """Compile, or load from disk, the kernels of this file."""
    with preparing("expert routing"):
        one: Any = np.zeros(1, np.int64)
        found = sent(np.zeros((1, 1), np.int64), one, 1, 0, None)
        received(np.ones((1, 1), np.int64), np.zeros(2, np.int64), found.entry_rows, 0, 1)
        addresses(np.zeros(2, np.int64), one, 4)
