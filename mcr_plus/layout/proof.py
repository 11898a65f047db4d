"""Prove that an exchange is correct: each rank checks its own part before the first byte is sent.

`check` verifies the result of planning independently of the planner: the boxes that a rank keeps and receives
cover each of its boxes exactly once for every addend; it receives each box from a rank that holds it; and it
sends only boxes that it holds. The `digests` of sender and receiver are compared, so that both pack and
unpack the same boxes in the same order. If `check` passes on every rank for every step, and all digests
agree, every element of the target is the reduction of its addends, each counted once. The proof is by
induction: each step leads from a complete layout to a complete layout.

`check_native` verifies a native collective in each of several groups: the boxes of a group's members, in
their order, are the inputs and outputs of such a collective. All ranks compare `digest_of_groups`, to make
sure that they run the same collectives in the same groups.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mcr_plus.layout.layout import Layout
from mcr_plus.layout.messages import BoxRows, ExchangePart
from mcr_plus.layout.native import NativeCollective
from mcr_plus.layout.regions import Boxes, Ints, as_ints, contains, cover_once, grids, meet

_PRIMES: Final = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64
)


def check(part: ExchangePart, source: Layout, target: Layout) -> str | None:
    """Return the error in a rank's part of an exchange from `source` to `target`; None if it is correct."""
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
            return f"rank {rank} {does} a box that lies in none of its boxes of the target"
    for piece in own.tolist():
        if wrong := _covered(part, source, target, piece):
            return wrong
    return None


def _not_inside(
    does: str, rank: int, source: Layout, pieces: Ints, boxes: Boxes, addends: Ints
) -> str | None:
    """Return the error if a row lies outside its box in the source, or has another addend; else None."""
    if not (source.owners[pieces] == rank).all():
        return f"rank {rank} {does} a part of a box of another rank"
    if not (contains(source.held.take(pieces), boxes) & (source.addends[pieces] == addends)).all():
        return f"rank {rank} {does} elements outside of its box, or of another addend"
    return None


def _covered(part: ExchangePart, source: Layout, target: Layout, piece: int) -> str | None:
    """Return the error if kept and received boxes do not cover a rank's box of the target once; else None."""
    received, kept = part.receives.pieces == piece, part.kept.into == piece
    low, high = target.held.lows[piece], target.held.highs[piece]
    addends = np.concatenate([part.receives.addends[received], part.kept.addends[kept]])
    sides = zip(part.receives.boxes.take(received), part.kept.boxes.take(kept), strict=True)
    lows, highs = (np.concatenate(side) for side in sides)
    # Treat the addend as one more dimension; every element must be covered once.
    boxes = Boxes(np.column_stack([addends, lows]), np.column_stack([addends + 1, highs]))
    if source.has_gaps:
        _, held = meet(low, high, source.regions.boxes)
        # Kept and received boxes lie inside the source's boxes. If they are disjoint, and as large as the
        # source's part of the box, they cover it.
        if int(boxes.volumes.sum()) == int(held.volumes.sum()) and _apart(boxes):
            return None
    elif cover_once(boxes, np.append(0, low), np.append(source.addend_count, high)):
        return None
    each = " of every addend" if source.is_partial else ""
    borders = list(zip(low.tolist(), high.tolist(), strict=True))
    return f"rank {part.rank} does not get every element{each} of its box {borders} exactly once"


def _apart(boxes: Boxes) -> bool:
    if not len(boxes.lows):
        return True
    low, high = boxes.lows.min(axis=0), boxes.highs.max(axis=0)
    inside = Boxes(boxes.lows - low, boxes.highs - low)
    return all((grid <= 1).all() for _, grid in grids(inside, tuple((high - low).tolist())))


def _all_hold(layout: Layout, ranks: Ints, boxes: Boxes, addends: Ints) -> str | None:
    """Return the error if a rank does not hold the box with the same index, in its addend; else None."""
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
    return f"rank {int(ranks[bad])} should send {borders}, but does not hold it"


def check_native(
    native: NativeCollective, source: Layout, target: Layout, ranks: Collection[int]
) -> str | None:
    """Return the error in the groups of a native collective; None if they are correct.

    Only groups that contain any of `ranks` are checked in detail.
    """
    members = as_ints([rank for group in native.groups for rank in group])
    if len(np.unique(members)) != len(members):
        return "a rank is in two groups, or twice in one"
    holders = np.union1d(source.owners, target.owners)
    others = np.setxor1d(holders, members)
    if len(others):
        return f"rank {int(others[0])} holds elements but is in no group, or the other way round"
    if source.has_gaps:
        return f"a collective of {source}, which may lack elements"
    for group in native.groups:
        check = _wrong_broadcast if native.kind == "broadcast" else partial(_wrong_group, native)
        if not set(group).isdisjoint(ranks) and (wrong := check(as_ints(group), source, target)):
            return f"{native.kind} by ranks {list(group)}: {wrong}"
    return None


def _wrong_group(native: NativeCollective, group: Ints, source: Layout, target: Layout) -> str | None:
    """Return the error in one group; None if it is correct."""
    boxes = []
    for what, layout in (("source", source), ("target", target)):
        at = np.searchsorted(layout.owners, group)
        ends = np.searchsorted(layout.owners, group, side="right")
        if not (ends - at == 1).all():
            return f"not every rank has one box of the {what}"
        sizes = [math.prod(layout.locals[rank]) for rank in group.tolist()]
        if sizes != layout.held.volumes[at].tolist():
            return f"a local tensor of the {what} is not the box alone"
        boxes.append(layout.held.take(at))
    addends = source.addends[np.searchsorted(source.owners, group)]
    expected = np.zeros(1) if native.kind == "all_gather" else np.arange(len(group))
    if not np.array_equal(np.unique(addends), expected) or len(expected) != source.addend_count:
        return "it does not reduce each addend once"
    outer, inner = boxes if native.kind == "reduce_scatter" else boxes[::-1]
    if not ((outer.lows == outer.lows[0]).all() and (outer.highs == outer.highs[0]).all()):
        return "its ranks have different boxes of the whole"
    if native.kind == "all_reduce":
        same = np.array_equal(outer.lows, inner.lows) and np.array_equal(outer.highs, inner.highs)
        in_order = bool((np.diff(group) > 0).all())
        return None if same and in_order else "boxes of source and target differ, or ranks are not in order"
    if not (inner.volumes == inner.volumes[0]).all():
        return "parts are of different sizes"
    if not cover_once(inner, outer.lows[0], outer.highs[0]):
        return "parts do not cover the whole exactly once"
    if not np.array_equal(np.lexsort(inner.lows.T[::-1]), np.arange(len(group))):
        return "ranks are not in the order of their parts"
    return None


def _wrong_broadcast(group: Ints, source: Layout, target: Layout) -> str | None:
    """Return the error in one group of a broadcast; None if it is correct."""
    boxes, ranks = [], []
    for what, layout in (("source", source), ("target", target)):
        (at,) = np.isin(layout.owners, group).nonzero()
        ranks.append(layout.owners[at])
        boxes.append(layout.held.take(at))
        if len(np.unique(ranks[-1])) != len(at):
            return f"a rank has several boxes of the {what}"
        if [math.prod(layout.locals[rank]) for rank in ranks[-1].tolist()] != boxes[-1].volumes.tolist():
            return f"a local tensor of the {what} is not the box alone"
    holder, needers = ranks
    if len(holder) != 1:
        return f"{len(holder)} of its ranks hold the box, instead of one"
    if source.is_partial:
        return "it does not reduce"
    if len(np.setdiff1d(group, np.union1d(holder, needers))):
        return "a rank needs nothing"
    (low,), (high,) = boxes[0]
    if not ((boxes[1].lows == low).all() and (boxes[1].highs == high).all()):
        return "boxes of source and target differ"
    return None if (np.diff(group) > 0).all() else "ranks are not in order"


def digest_of_groups(native: NativeCollective) -> int:
    """Return a hash of a native collective and its groups, equal on ranks that run the same collectives."""
    text = repr((native.kind, native.groups)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def digests(rows: BoxRows, ranks: Ints) -> NDArray[np.int64]:
    """Return a 64-bit hash of the boxes exchanged with each of `ranks`, in order; 0 without boxes.

    The hashes of sender and receiver are equal if both have the same boxes in the same order.
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


def unlike(parts: Sequence[ExchangePart], ranks: Ints) -> str | None:
    """Return the error if two ranks disagree about the boxes between them, or their order; else None."""
    sent = np.stack([digests(part.sends, ranks) for part in parts])
    expected = np.stack([digests(part.receives, ranks) for part in parts])
    differ = np.argwhere(sent != expected.T)
    if not len(differ):
        return None
    sender, receiver = (int(ranks[at]) for at in differ[0])
    return f"rank {sender} would send other boxes than rank {receiver} expects"


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64-bit words by a bijection in which every input bit affects every output bit.

    The finalizer of SplitMix64 (Steele et al. 2014).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(words ^ (words >> np.uint64(31)), np.uint64)
