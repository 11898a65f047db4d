"""Proof that an exchange does what it should, by each rank for its own part, before the first byte is sent.

`check` looks at the result of planning without the planner: that what a rank keeps and receives covers each
of its boxes exactly once for every addend, that it receives from ranks that hold what they are to send, and
that it sends what it holds. `digests` are compared between sender and receiver, so that both pack and unpack
the same boxes in the same order. If `check` passes on every rank for every step, and all digests agree, every
element of the target has the reduction of all its addends, each once: by induction over the steps, each of
which is between complete layouts.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mcr_plus.layout.layout import Layout
from mcr_plus.layout.messages import Part, Rows
from mcr_plus.layout.regions import Boxes, Ints, as_ints, contains, cover_once

_PRIMES: Final = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64
)


def check(part: Part, source: Layout, target: Layout) -> str | None:
    """What is wrong with a rank's part of an exchange from `source` to `target`; None if nothing is."""
    rank = part.rank
    if (part.sends.peers == rank).any() or (part.receives.peers == rank).any():
        return f"rank {rank} exchanges with itself"
    if wrong := _all_hold(source, part.receives.peers, part.receives.boxes, part.receives.addends):
        return wrong
    if not np.isin(part.sends.peers, as_ints(target.ranks)).all():
        return f"rank {rank} sends to a rank that has no part in the target"
    for does, rows in (("sends", part.sends), ("keeps", part.kept)):
        if wrong := _not_inside(does, rank, source, rows.pieces, rows.boxes, rows.addends):
            return wrong
    copies = [second for _, second in target.target_regions.twins]
    own = np.setdiff1d(target.pieces(rank), as_ints(copies))
    for does, into in (("receives", part.receives.pieces), ("keeps", part.kept.into)):
        if not np.isin(into, own).all():
            return f"rank {rank} {does} what belongs to none of its boxes of the target"
    for piece in own.tolist():
        if wrong := _covered(part, source, target, piece):
            return wrong
    return None


def _not_inside(
    does: str, rank: int, source: Layout, pieces: Ints, boxes: Boxes, addends: Ints
) -> str | None:
    """What is wrong with the boxes of a rank's source that rows are read from."""
    if not (source.owners[pieces] == rank).all():
        return f"rank {rank} {does} a part of a box of another rank"
    if not (contains(source.held.take(pieces), boxes) & (source.addends[pieces] == addends)).all():
        return f"rank {rank} {does} what is outside of its box, or another addend"
    return None


def _covered(part: Part, source: Layout, target: Layout, piece: int) -> str | None:
    """What is wrong with the boxes that a rank keeps and receives for one of its boxes of the target."""
    received, kept = part.receives.pieces == piece, part.kept.into == piece
    low, high = target.held.lows[piece], target.held.highs[piece]
    addends = np.concatenate([part.receives.addends[received], part.kept.addends[kept]])
    sides = zip(part.receives.boxes.take(received), part.kept.boxes.take(kept), strict=True)
    lows, highs = (np.concatenate(side) for side in sides)
    # With the addend as one more dimension, of which every element is covered once.
    boxes = Boxes(np.column_stack([addends, lows]), np.column_stack([addends + 1, highs]))
    if cover_once(boxes, np.append(0, low), np.append(source.addend_count, high)):
        return None
    each = " of every addend" if source.is_partial else ""
    borders = list(zip(low.tolist(), high.tolist(), strict=True))
    return f"rank {part.rank} does not get every element{each} of its box {borders} exactly once"


def _all_hold(layout: Layout, ranks: Ints, boxes: Boxes, addends: Ints) -> str | None:
    """Whether each rank holds the box with the same index, as a part of the addend; what is wrong
    otherwise.
    """
    begins = np.searchsorted(layout.owners, ranks, side="left")
    ends = np.searchsorted(layout.owners, ranks, side="right")
    found = np.zeros(len(ranks), bool)
    for index in range(int((ends - begins).max(initial=0))):
        (some,) = ((begins + index < ends) & ~found).nonzero()
        at = begins[some] + index
        found[some] = contains(layout.held.take(at), boxes.take(some)) & (layout.addends[at] == addends[some])
    if found.all():
        return None
    bad = int(np.flatnonzero(~found)[0])
    borders = list(zip(boxes.lows[bad].tolist(), boxes.highs[bad].tolist(), strict=True))
    return f"rank {int(ranks[bad])} is to send {borders}, which it does not hold"


def digests(rows: Rows, ranks: Ints) -> NDArray[np.int64]:
    """For each of `ranks`, 64 bits of the boxes exchanged with it in their order; 0 if there are none.

    Equal for the sender and the receiver of the same boxes in the same order.
    """
    found = np.zeros(len(ranks), np.uint64)
    if not len(rows.peers):
        return found.view(np.int64)
    words = np.column_stack([rows.addends, *rows.boxes]).astype(np.uint64)
    (firsts,) = np.concatenate([[True], np.diff(rows.peers) != 0]).nonzero()
    lengths = np.diff(np.append(firsts, len(rows.peers)))
    index = np.arange(len(rows.peers)) - np.repeat(firsts, lengths)
    with np.errstate(over="ignore"):
        mixed = _mixed(index.astype(np.uint64) + np.uint64(1))
        for column in range(words.shape[1]):
            mixed = _mixed(mixed ^ _mixed(words[:, column] + _PRIMES[column % 4]))
        sums = np.add.reduceat(mixed, firsts) | np.uint64(1)
    found[np.searchsorted(ranks, rows.peers[firsts])] = sums
    return found.view(np.int64)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits that spreads every one of them (the finalizer of SplitMix64, Steele et al.
    2014).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(words ^ (words >> np.uint64(31)), np.uint64)
