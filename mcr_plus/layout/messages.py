"""Messages of one exchange between two layouts: sender, receiver and box of each message.

The *regions* of a layout are its distinct boxes: each source region (of an addend) has the ranks that hold
it, each target region the ranks that need it. A *demand* is the overlap of a source region and a target
region, for a rank that needs it and does not hold it. The demands on a source region are concatenated in the
order of the target's regions and ranks, and the result is cut into equal shares for the ranks that hold the
region. So all holders send equal amounts, and every rank computes its own sends and receives without
communication. Beyond `_MOST` demands, whole demands are assigned to the holders in turn. If a rank's node
holds the region, only ranks of that node send to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from mcr_plus.layout.regions import Boxes, Flags, Ints, meet, meet_all, row_length, runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcr_plus.layout.layout import Layout

GRAIN: Final = 64 << 10
"""Bytes below which a demand is not cut: its latency would cost more than the share saves."""
_MOST: Final = 1 << 13
_SNAP: Final = 16
"""A cut moves to the end of a demand if that is nearer than 1/16 of a share."""


class BoxRows(NamedTuple):
    """Boxes that a rank sends or receives, in the order in which both sides pack them.

    `peers`: the other rank for each box. `pieces`: the index of this rank's box that contains it (in the
    source for sends, in the target for receives).
    """

    peers: Ints
    boxes: Boxes
    addends: Ints
    pieces: Ints

    @property
    def sizes(self) -> Ints:
        """Number of elements of each box."""
        return self.boxes.volumes

    def take(self, which: Ints | Flags) -> BoxRows:
        """Return some of the rows, by index or mask."""
        return BoxRows(self.peers[which], self.boxes.take(which), self.addends[which], self.pieces[which])

    def ordered(self) -> BoxRows:
        """Return the rows sorted by peer, addend and position in the tensor: the same order on both sides."""
        return self.take(
            np.lexsort([*self.boxes.highs.T[::-1], *self.boxes.lows.T[::-1], self.addends, self.peers])
        )

    @classmethod
    def joined(cls, parts: Sequence[BoxRows], dims: int) -> BoxRows:
        """Concatenate rows; `dims`: number of dimensions of the tensor."""
        none = np.zeros(0, np.int64)
        empty = cls(none, Boxes(none.reshape(0, dims), none.reshape(0, dims)), none, none)
        peers, boxes, addends, pieces = zip(empty, *parts, strict=True)
        lows, highs = zip(*boxes, strict=True)
        return cls(
            np.concatenate(peers), Boxes(np.concatenate(lows), np.concatenate(highs)),
            np.concatenate(addends), np.concatenate(pieces),
        )  # fmt: skip


class KeptBoxes(NamedTuple):
    """Boxes that a rank already holds, copied from box `pieces` in the source to box `into` in the target."""

    boxes: Boxes
    addends: Ints
    pieces: Ints
    into: Ints


@dataclass(frozen=True)
class ExchangePart:
    """One rank's part of an exchange."""

    rank: int
    sends: BoxRows
    receives: BoxRows
    kept: KeptBoxes


class LayoutExchange:
    """A step of a plan: every rank receives the elements that it needs in the target and lacks in the source.

    Args:
        source, target: the layouts; the target has complete values.
        itemsize: bytes of an element.
        nodes: node of each rank of the job; None for one node.
        turn: an offset that rotates the holders of small demands, to balance the load of many tensors.
    """

    def __init__(
        self,
        source: Layout,
        target: Layout,
        itemsize: int,
        nodes: Ints | None = None,
        turn: int = 0,
    ) -> None:
        self.source = source
        self.target = target
        self.itemsize = itemsize
        self.turn = turn
        self.have = source.regions
        self.need = target.target_regions
        self.nodes = None if nodes is None or len(np.unique(nodes)) == 1 else nodes
        replicated = int((self.have.counts > 1).sum())
        self._cuts = replicated * len(self.need.members) <= _MOST

    @property
    def dims(self) -> int:
        """Number of dimensions of the tensor."""
        return len(self.source.shape)

    def part(self, rank: int) -> ExchangePart:
        """Return the sends, receives and copies of a rank."""
        kept: list[tuple[Boxes, Ints, Ints, Ints]] = []
        lacking: list[tuple[Ints, Ints, Ints, Boxes]] = []  # source region, target region, piece, overlap
        mine_have, pieces_have = self.have.of_rank(rank)
        piece_of = np.full(len(self.have.counts), -1)
        piece_of[mine_have] = pieces_have
        for region, piece in zip(*self.need.of_rank(rank), strict=True):
            which, common = meet(self.need.boxes.lows[region], self.need.boxes.highs[region], self.have.boxes)
            own = piece_of[which] >= 0
            kept.append(
                (
                    common.take(own),
                    self.have.addends[which[own]],
                    piece_of[which[own]],
                    np.full(int(own.sum()), piece),
                )
            )
            (rest,) = (~own).nonzero()
            lacking.append(
                (which[rest], np.full(len(rest), region), np.full(len(rest), piece), common.take(rest))
            )
        return ExchangePart(
            rank,
            self._sends(rank, mine_have, pieces_have),
            self._receives(rank, lacking),
            _kept(kept, self.dims),
        )

    # -- receiving --------------------------------------------------------------------------------

    def _receives(self, rank: int, lacking: list[tuple[Ints, Ints, Ints, Boxes]]) -> BoxRows:
        if not lacking:
            return BoxRows.joined([], self.dims)
        regions = np.concatenate([each[0] for each in lacking])
        wanted = np.concatenate([each[1] for each in lacking])
        pieces = np.concatenate([each[2] for each in lacking])
        boxes = Boxes(
            np.concatenate([each[3].lows for each in lacking]),
            np.concatenate([each[3].highs for each in lacking]),
        )
        several = self.have.counts[regions] > 1
        parts = []
        (single,) = (~several).nonzero()
        if len(single):
            at = regions[single]
            holders = self.have.members[self.have.starts[at]]
            parts.append(BoxRows(holders, boxes.take(single), self.have.addends[at], pieces[single]))
        (shared,) = several.nonzero()
        if len(shared) and self._cuts:
            lines = self._lines(np.unique(regions[shared]), rank)
            parts.append(self._cut_for(lines, lines.ranks == rank, wanted, pieces))
        elif len(shared):
            holders = self._in_turn(regions[shared], wanted[shared], np.full(len(shared), rank))
            at = regions[shared]
            parts.append(BoxRows(holders, boxes.take(shared), self.have.addends[at], pieces[shared]))
        return BoxRows.joined(parts, self.dims).ordered()

    def _cut_for(self, lines: _Lines, own: Flags, wanted: Ints, pieces: Ints) -> BoxRows:
        """Return this rank's demands on regions with several holders, cut into the holders' shares."""
        piece_of = np.full(len(self.need.counts), -1)
        piece_of[wanted] = pieces
        demand, holder, boxes = lines.shares(own)
        return BoxRows(
            holder, boxes, self.have.addends[lines.regions[demand]], piece_of[lines.wanted[demand]]
        )

    # -- sending ----------------------------------------------------------------------------------

    def _sends(self, rank: int, mine: Ints, pieces: Ints) -> BoxRows:
        parts = []
        single = self.have.counts[mine] == 1
        for region, piece in zip(mine[single], pieces[single], strict=True):
            parts.append(self._whole_demands(region, piece, rank))
        shared, shared_pieces = mine[~single], pieces[~single]
        if len(shared) and self._cuts:
            lines = self._lines(shared, rank)
            piece_of = np.full(len(self.have.counts), -1)
            piece_of[shared] = shared_pieces
            demand, holder, boxes = lines.shares(np.ones(len(lines.ranks), bool))
            (own,) = (holder == rank).nonzero()
            at = lines.regions[demand[own]]
            parts.append(
                BoxRows(lines.ranks[demand[own]], boxes.take(own), self.have.addends[at], piece_of[at])
            )
        else:
            for region, piece in zip(shared, shared_pieces, strict=True):
                rows = self._whole_demands(region, piece, rank)
                parts.append(rows)
        return BoxRows.joined(parts, self.dims).ordered()

    def _whole_demands(self, region: int, piece: int, rank: int) -> BoxRows:
        """Return the uncut demands on a region that `rank`, one of the holders, serves."""
        which, common = meet(self.have.boxes.lows[region], self.have.boxes.highs[region], self.need.boxes)
        entry, ranks = self.need.entries(which)
        own = np.full(len(entry), region)
        outside = ~self.have.has(own, ranks)
        if self.have.counts[region] > 1:
            outside &= self._in_turn(own, which[entry], ranks) == rank
        entry, ranks = entry[outside], ranks[outside]
        return BoxRows(
            ranks,
            common.take(entry),
            np.full(len(entry), self.have.addends[region]),
            np.full(len(entry), piece),
        )

    def _in_turn(self, regions: Ints, wanted: Ints, ranks: Ints) -> Ints:
        """Return the holder that serves each uncut demand."""
        base = self.have.starts[regions]
        number = self.have.counts[regions]
        place = self.need.find(wanted, ranks) - self.need.starts[wanted]  # among the ranks that need it
        at = (place + wanted + self.turn) % number
        chosen = self.have.members[base + at]
        if self.nodes is not None:  # prefer a holder on the rank's own node
            for entry in (self.nodes[chosen] != self.nodes[ranks]).nonzero()[0]:
                holders = self.have.members[base[entry] : base[entry] + number[entry]]
                near = holders[self.nodes[holders] == self.nodes[ranks[entry]]]
                if len(near):
                    chosen[entry] = near[at[entry] % len(near)]
        return chosen

    # -- regions that several ranks hold ----------------------------------------------------------

    def _lines(self, regions: Ints, rank: int) -> _Lines:
        """Return the demands on each of `regions`, concatenated into lines.

        With nodes, a region has one line for each node that holds it, and one line for all other ranks. Only
        the line of the node of `rank` and the line for all other ranks are made.
        """
        boxes = self.have.boxes.take(regions)
        i, wanted, common = meet_all(boxes, self.need.boxes)
        entry, ranks = self.need.entries(wanted)
        at = regions[i[entry]]
        outside = ~self.have.has(at, ranks)
        entry, ranks, at = entry[outside], ranks[outside], at[outside]
        far = np.full(len(ranks), -1)
        line = far.copy()
        nodes = self.nodes
        if nodes is not None and len(ranks):
            count = int(nodes.max()) + 1
            near = np.unique(self.have.region_of_member * count + nodes[self.have.members])
            line = np.where(np.isin(at * count + nodes[ranks], near), nodes[ranks], far)
            own = int(nodes[rank])
            keep = (line == own) | (line < 0)
            entry, ranks, at, line = entry[keep], ranks[keep], at[keep], line[keep]
        order = np.lexsort((ranks, wanted[entry], line, at))
        entry = entry[order]
        return _Lines(self, at[order], line[order], ranks[order], wanted[entry], common.take(entry))


class _Lines:
    """Demands on regions that several ranks hold, sorted by region and line, and their shares."""

    def __init__(
        self, exchange: LayoutExchange, regions: Ints, lines: Ints, ranks: Ints, wanted: Ints, boxes: Boxes
    ) -> None:
        self.regions = regions
        self.ranks = ranks
        self.wanted = wanted
        self.boxes = boxes
        self._exchange = exchange
        self._lines = lines

    def shares(self, own: Flags) -> tuple[Ints, Ints, Boxes]:
        """Return the demands of `own`, cut into the holders' shares: index of the demand, holder, box."""
        none = np.zeros(0, np.int64)
        if not own.any():
            return none, none, self.boxes.take(none)
        exchange = self._exchange
        sizes = self.boxes.volumes
        ends = sizes.cumsum()
        begins = ends - sizes
        new = np.ones(len(sizes), bool)
        new[1:] = (np.diff(self.regions) != 0) | (np.diff(self._lines) != 0)
        (firsts,) = new.nonzero()
        line_of = new.cumsum() - 1
        bases, totals = begins[firsts], np.add.reduceat(sizes, firsts)
        regions = self.regions[firsts]
        members, starts, number = self._holders(regions, self._lines[firsts])
        shares = np.minimum(number, np.maximum(1, -(-totals * exchange.itemsize // GRAIN)))
        # Cuts of all lines in ascending order: where each line starts, and where its shares meet.
        line = np.repeat(np.arange(len(firsts)), shares)
        index = np.arange(len(line)) - (shares.cumsum() - shares)[line]
        cuts = self._snapped(
            bases[line] + index * totals[line] // shares[line], (totals // shares)[line], begins, ends
        )
        cuts = np.maximum.accumulate(np.where(index == 0, bases[line], cuts))
        cuts_end = np.append(cuts[1:], ends[-1])
        (mine,) = own.nonzero()
        low = np.searchsorted(cuts, begins[mine], side="right") - 1
        high = np.maximum(np.searchsorted(cuts, ends[mine], side="left"), low + 1)
        each = high - low
        which = np.repeat(np.arange(len(mine)), each)
        share = np.arange(len(which)) - (each.cumsum() - each)[which] + low[which]
        demand = mine[which]
        left = np.maximum(cuts[share], begins[demand]) - begins[demand]
        right = np.minimum(cuts_end[share], ends[demand]) - begins[demand]
        run, boxes = runs(self.boxes.take(demand), left, right)
        demand, share = demand[run], share[run]
        at = line_of[demand]
        turn = (regions[at] + exchange.turn) * shares[at]
        return demand, members[starts[at] + (index[share] + turn) % number[at]], boxes

    def _holders(self, regions: Ints, lines: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the holders that serve the lines, concatenated, and each line's first index and length."""
        have, nodes = self._exchange.have, self._exchange.nodes
        if nodes is None:
            return have.members, have.starts[regions], have.counts[regions]
        entry, ranks = have.entries(regions)
        serves = (lines[entry] < 0) | (nodes[ranks] == lines[entry])
        entry, ranks = entry[serves], ranks[serves]
        number = np.bincount(entry, minlength=len(regions))
        return ranks, number.cumsum() - number, number

    def _snapped(self, cuts: Ints, share: Ints, begins: Ints, ends: Ints) -> Ints:
        """Return the cuts, each moved to the nearest end of a demand if close, or else to a row boundary."""
        at = np.minimum(np.searchsorted(ends, cuts, side="right"), len(ends) - 1)
        begin, end = begins[at], ends[at]
        unit = row_length(self.boxes.take(at), share)
        moved = np.minimum(begin + (cuts - begin + unit // 2) // unit * unit, end)
        near = share // _SNAP
        moved = np.where(cuts - begin <= near, begin, moved)
        return np.where(end - cuts <= near, end, moved)


def _kept(parts: list[tuple[Boxes, Ints, Ints, Ints]], dims: int) -> KeptBoxes:
    none = np.zeros(0, np.int64)
    if not parts:
        return KeptBoxes(Boxes(none.reshape(0, dims), none.reshape(0, dims)), none, none, none)
    boxes, addends, pieces, into = zip(*parts, strict=True)
    lows, highs = zip(*boxes, strict=True)
    return KeptBoxes(
        Boxes(np.concatenate(lows), np.concatenate(highs)),
        np.concatenate(addends), np.concatenate(pieces), np.concatenate(into),
    )  # fmt: skip
