"""Programs: possible sequences of steps from one layout to another, with loads and costs.

Every program is a sequence of exchanges (`messages`), each from one layout to the next, or one native
collective (`native`):

    direct              source → target: every rank receives the elements it lacks from their holders
    gather              source → slices → target: ranks that lack the same elements first receive a slice
                        each, then exchange the slices; with nodes, each element enters each node once
    reduce              source → sums → target: the holders of addends first sum a slice each
    reduce, gather      both

The intermediate layouts are computed from the two layouts alone, so all ranks make the same programs. Halo
exchanges, collectives on a mesh and transfers between meshes all have this form. Planning between any two
layouts follows SuperScaler (Lin et al. 2023, arXiv 2301.08984); sending slices that the receivers gather
follows the cross-mesh resharding of Alpa (Zhuang et al. 2023, arXiv 2211.05322).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.layout.layout import Layout
from mcr_plus.layout.messages import GRAIN, ExchangePart, LayoutExchange
from mcr_plus.layout.native import NativeCollective, native, root_of
from mcr_plus.layout.regions import (
    Boxes,
    Ints,
    Regions,
    as_ints,
    cut_apart,
    meet_all,
    row_length,
    runs,
    volumes,
)

_MOST_PAIRS: Final = 1 << 16  # pairs of regions; beyond it no slices are computed
_MOST_SLICES: Final = 1 << 13  # slices of all ranks together
_CLOSE: Final = 0.05

LOADS: Final = ("sent", "received", "partners", "sent_far", "received_far", "partners_far")
"""Loads of a rank in an exchange: bytes and partners, on its own node and on other nodes."""


@dataclass(frozen=True)
class ExchangeProgram:
    """A redistribution from one layout to another: a sequence of exchanges, or a native collective.

    Attributes:
        name: `direct`, `gather`, `reduce`, `reduce, gather`, or the kind of a native collective.
        steps: the consecutive exchanges; none for a native collective.
        native: the native collective; None for exchanges.
    """

    name: str
    steps: tuple[LayoutExchange, ...] = ()
    native: NativeCollective | None = None

    def parts(self, rank: int) -> list[ExchangePart]:
        """Return the part of a rank in each step."""
        return [step.part(rank) for step in self.steps]


def programs(
    source: Layout, target: Layout, itemsize: int, nodes: Ints | None = None, turn: int = 0
) -> list[ExchangeProgram]:
    """Return all programs from `source` to `target`, the native collective first; the same on all ranks."""
    found = exchanges(source, target, itemsize, nodes, turn)
    one = native(source, target)
    return found if one is None else [ExchangeProgram(one.kind, native=one), *found]


def exchanges(
    source: Layout, target: Layout, itemsize: int, nodes: Ints | None = None, turn: int = 0
) -> list[ExchangeProgram]:
    """Return the programs that consist of exchanges; the first is `direct`."""
    direct = ExchangeProgram("direct", (LayoutExchange(source, target, itemsize, nodes, turn),))
    found = [direct]
    if source.volume == 0 or source.has_gaps:  # intermediate layouts must be complete
        return found
    if source.is_partial:
        sums = summed(source, target, itemsize, turn)
        if sums is not None:
            first = LayoutExchange(source, sums, itemsize, nodes, turn)
            found.append(
                ExchangeProgram("reduce", (first, LayoutExchange(sums, target, itemsize, nodes, turn)))
            )
            slices = sliced(sums, target, itemsize, nodes, turn)
            if slices is not None:
                steps = (
                    LayoutExchange(sums, slices, itemsize, nodes, turn),
                    LayoutExchange(slices, target, itemsize, nodes, turn),
                )
                found.append(ExchangeProgram("reduce, gather", (first, *steps)))
        return found
    slices = sliced(source, target, itemsize, nodes, turn)
    if slices is not None:
        steps = (
            LayoutExchange(source, slices, itemsize, nodes, turn),
            LayoutExchange(slices, target, itemsize, nodes, turn),
        )
        found.append(ExchangeProgram("gather", steps))
    return found


def summed(source: Layout, target: Layout, itemsize: int, turn: int = 0) -> Layout | None:
    """Return the layout of a partial source's regions, cut into slices; one rank sums each slice.

    A rank that sums elements that it needs does not receive them later. So if some holders of an element need
    it, they sum it, unless sharing the sums among all holders gives the fullest rank less volume. Returns
    None if the addends are not cut into the same boxes.
    """
    have, need = source.regions, target.target_regions
    number, addends = len(have.counts), source.addend_count
    if number % addends:
        return None
    per = number // addends
    first = have.boxes.take(np.arange(per))
    for part in have.boxes:
        if not (part.reshape(addends, per, -1) == part[:per]).all():
            return None
    # The holders of each box, over all addends.
    box_of = have.region_of_member % per
    order = np.lexsort((have.members, box_of))
    box_of, members = box_of[order], have.members[order]
    once = np.ones(len(members), bool)
    once[1:] = (np.diff(box_of) != 0) | (np.diff(members) != 0)
    box_of, members = box_of[once], members[once]
    best = _spread(first, box_of, members, itemsize, turn)
    if per * len(need.counts) <= _MOST_PAIRS and not target.overlaps:
        box, wanted, cells = meet_all(first, need.boxes)
        cell, ranks = _members_of(box, box_of, members)
        needs = need.has(wanted[cell], ranks)
        some = np.bincount(cell[needs], minlength=len(box)) > 0
        keep = needs | ~some[cell]
        near = _spread(cells, cell[keep], ranks[keep], itemsize, turn)
        if len(near[0]) <= _MOST_SLICES and _fullest(near, need, addends) <= _fullest(best, need, addends):
            best = near
    return Layout.packed_boxes(source.shape, source.ranks, *best, "sums", op=source.op)


def _spread(boxes: Boxes, box_of: Ints, members: Ints, itemsize: int, turn: int) -> tuple[Ints, Boxes]:
    """Cut each box into slices for its members; returns the rank of each slice, and the slices.

    `box_of`: the index of the box of each entry of `members`, ascending.
    """
    number = np.bincount(box_of, minlength=len(boxes.lows))
    starts = number.cumsum() - number
    which, index, slices = _slices(boxes, np.clip(-(-boxes.volumes * itemsize // GRAIN), 1, number))
    return members[starts[which] + (index + which + turn) % number[which]], slices


def _members_of(some: Ints, box_of: Ints, members: Ints) -> tuple[Ints, Ints]:
    """Return all members of the boxes `some`, as (index in `some`, rank). `box_of`: see `_spread`."""
    begins = np.searchsorted(box_of, some)
    number = np.searchsorted(box_of, some, side="right") - begins
    which = np.repeat(np.arange(len(some)), number)
    return which, members[np.arange(len(which)) - (number.cumsum() - number - begins)[which]]


def _fullest(owned: tuple[Ints, Boxes], need: Regions, addends: int) -> int:
    """Return the elements that the fullest rank receives for the sums, plus those for the target."""
    owners, boxes = owned
    size = 1 + int(max(owners.max(initial=0), need.members.max(initial=0)))
    sums = np.bincount(owners, boxes.volumes, size)
    lacked = np.bincount(need.members, need.boxes.volumes[need.region_of_member], size)
    which, wanted, common = meet_all(boxes, need.boxes)
    own = need.has(wanted, owners[which])
    lacked -= np.bincount(owners[which[own]], common.volumes[own], size)
    return int((addends - 1) * sums.max() + lacked.max())


def sliced(
    source: Layout, target: Layout, itemsize: int, nodes: Ints | None = None, turn: int = 0
) -> Layout | None:
    """Return the layout in which each rank holds its elements, and a slice of those that several ranks lack.

    Slices lie inside the target's local tensors. None if no element is missing on more ranks than hold it, or
    if there would be too many slices.
    """
    have, need = source.regions, target.target_regions
    nodes = None if nodes is None or len(np.unique(nodes)) == 1 else nodes
    # Slices pay off only if several ranks need an element; large cases would take too long to plan.
    if (
        target.overlaps
        or int(need.counts.max(initial=0)) < 2
        or len(have.counts) * len(need.counts) > _MOST_PAIRS
    ):
        return None
    region, wanted, cells = meet_all(have.boxes, need.boxes)
    if int(need.counts[wanted].sum()) > _MOST_SLICES:
        return None
    entry, ranks = need.entries(wanted)
    held = have.has(region[entry], ranks)
    lacking, lackers = entry[~held], ranks[~held]
    if not len(lacking):
        return None
    # Ranks that lack a cell form one group, or one group per node.
    group = np.zeros(len(lacking), np.int64) if nodes is None else nodes[lackers]
    order = np.lexsort((lackers, group, lacking))
    lacking, lackers, group = lacking[order], lackers[order], group[order]
    new = np.ones(len(lacking), bool)
    new[1:] = (np.diff(lacking) != 0) | (np.diff(group) != 0)
    (firsts,) = new.nonzero()
    sizes = np.diff(np.append(firsts, len(lacking)))
    most = np.zeros(len(cells.lows), np.int64)
    np.maximum.at(most, lacking[firsts], sizes)
    few = have.counts[region] if nodes is None else np.ones(len(region), np.int64)
    if not (most > few).any():
        return None
    which, index, boxes = _slices(
        cells, np.clip(-(-cells.volumes * itemsize // GRAIN), 1, np.maximum(most, 1))
    )
    if len(which) > _MOST_SLICES:
        return None
    # Each slice is sent to one rank of every group of its cell, and stays on ranks that hold the cell.
    begin = np.searchsorted(which, np.arange(len(cells.lows)))
    pieces_of_cell = np.bincount(which, minlength=len(cells.lows))

    def slices_of(some: Ints) -> tuple[Ints, Ints]:
        """Return all slices of the cells `some`, as (index in `some`, slice)."""
        number = pieces_of_cell[some]
        at = np.repeat(np.arange(len(some)), number)
        return at, np.arange(len(at)) - (number.cumsum() - number)[at] + begin[some][at]

    at, own = slices_of(lacking[firsts])
    member = firsts[at] + (index[own] + lacking[firsts][at] + turn) % sizes[at]
    kept_at, kept = slices_of(entry[held])
    owners = np.concatenate([lackers[member], ranks[held][kept_at]])
    slices = np.concatenate([own, kept])
    wanted_of = wanted[which[slices]]
    pieces = _pieces(need, wanted_of, owners)
    return Layout.part_of(target, owners, boxes.take(slices), pieces, "slices")


def _pieces(regions: Regions, which: Ints, ranks: Ints) -> Ints:
    """Return the index of the box that contains region `which[i]` in the layout of rank `ranks[i]`."""
    return regions.pieces[regions.find(which, ranks)]


def _slices(boxes: Boxes, number: Ints) -> tuple[Ints, Ints, Boxes]:
    """Cut each flattened box into `number` slices of near equal size.

    Returns, for each resulting box, the index of the original box and of the slice; a slice may be several
    boxes.
    """
    sizes = boxes.volumes
    which = np.repeat(np.arange(len(sizes)), number)
    index = np.arange(len(which)) - (number.cumsum() - number)[which]
    total, count = sizes[which], number[which]
    unit = row_length(boxes, sizes // np.maximum(number, 1))[which]

    def cut(at: Ints) -> Ints:
        return np.where(at >= count, total, total * at // count // unit * unit)

    run, parts = runs(boxes.take(which), cut(index), cut(index + 1))
    return which[run], index[run], parts


# -- loads, costs and bounds ----------------------------------------------------------------------


def load(part: ExchangePart, itemsize: int, nodes: Ints | None = None) -> Ints:
    """Return the loads of a rank in an exchange, in the order of `LOADS`."""
    found = np.zeros((2, 3), np.int64)
    for side, rows in enumerate((part.sends, part.receives)):
        sizes = rows.sizes * itemsize
        far = np.zeros(len(sizes), bool) if nodes is None else nodes[rows.peers] != nodes[part.rank]
        for where, those in enumerate((~far, far)):
            found[where, side] = sizes[those].sum()
            found[where, 2] = max(found[where, 2], len(np.unique(rows.peers[those])))
    return found.ravel()


def native_load(
    one: NativeCollective, source: Layout, rank: int, itemsize: int, nodes: Ints | None = None
) -> Ints:
    """Return the loads of a rank in a native collective with minimum volume, in the order of `LOADS`.

    A broadcast may cross the link between nodes once per receiver, as by a binomial tree.
    """
    if one.kind == "broadcast":
        return _broadcast_load(one, source, rank, itemsize, nodes)
    found = np.zeros((2, 3), np.int64)
    members = one.group_of(rank)
    if members is not None and len(members) > 1:  # a rank alone only copies
        number = len(members)
        size = int(source.held.volumes[source.pieces(rank)].sum()) * itemsize
        times = {"all_gather": number, "reduce_scatter": 1, "all_reduce": 2}[one.kind]
        others = as_ints([member for member in members if member != rank])
        far = 0 if nodes is None else int((nodes[others] != nodes[rank]).sum())
        for where, those in enumerate((len(others) - far, far)):
            # (number - 1) parts, from each of the other ranks
            found[where] = [-(-times * size * those // number)] * 2 + [int(those > 0)]
    return found.ravel()


def _broadcast_load(
    one: NativeCollective, source: Layout, rank: int, itemsize: int, nodes: Ints | None
) -> Ints:
    found = np.zeros((2, 3), np.int64)
    members = one.group_of(rank)
    if members is not None and len(members) > 1:
        root = root_of(members, source)
        size = int(source.held.volumes[source.pieces(root)].sum()) * itemsize
        others = as_ints([member for member in members if member != root])
        far = np.zeros(len(others), bool) if nodes is None else nodes[others] != nodes[root]
        for where, there in enumerate((~far, far)):
            receives = bool(there[others == rank].any())
            sent = -(
                -size * int(there.sum()) // len(members)
            )  # shared by all; the root sends everything once
            sent = max(sent, size * int(rank == root and there.any()))
            found[where] = sent, size * receives, int(there.any())
    return found.ravel()


class MessageCosts(NamedTuple):
    """Costs of a message and of a byte in seconds, inside a node and between nodes (`far`).

    `send`: extra cost of a message of its own (`isend` or `irecv`), compared with a part of an all_to_all.
    The defaults are assumptions for one host and a link of 1 Gbit/s.
    """

    message: float = 15e-6
    byte: float = 1 / 4e9
    far_message: float = 60e-6
    far_byte: float = 1 / 117e6
    send: float = 30e-6
    far_send: float = 120e-6

    def prefers_messages(self, messages: int, peers: int, across: bool) -> bool:
        """Return whether to send messages, at most `messages` a rank, or else an all_to_all of `peers` peers.

        `across`: between nodes. Only latencies are compared: the bytes are the same. If no rank has more than
        one, they are sent as such: their senders may compute meanwhile (decision 68), and no vote precedes
        them.
        """
        if messages == 1:
            return True
        send, part = (self.far_send, self.far_message) if across else (self.send, self.message)
        return messages * send < peers * part

    def seconds(self, loads: NDArray[np.int64], crossing: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the time of exchanges.

        `loads`: [..., 6], maximum loads over ranks. `crossing`: [..., 2], maximum bytes that leave a node,
        and that enter a node, over the node's shared link.
        """
        near = self.message * loads[..., 2] + self.byte * np.maximum(loads[..., 0], loads[..., 1])
        far = self.far_message * loads[..., 5] + self.far_byte * crossing.max(axis=-1)
        total: NDArray[np.float64] = near + far
        return total


def cheapest(seconds: Sequence[float], crossing: Sequence[int]) -> int:
    """Return the index of the program to run: among the fastest, the one with the fewest bytes between nodes.

    `seconds`: expected time of each program. `crossing`: total bytes that each program sends between nodes.
    Times within 5 % of the minimum count as equal, because links carry other traffic, too.
    """
    least = min(seconds)
    fast = [at for at, time in enumerate(seconds) if time <= least * (1 + _CLOSE)]
    return min(fast, key=lambda at: (crossing[at], seconds[at]))


@dataclass(frozen=True)
class VolumeBound:
    """Minimum volume over all plans, in elements.

    Attributes:
        received: number of elements that each rank of the target must receive.
        total: number of elements received by all ranks together; with sums, more than the sum of `received`.
        entering: number of elements that must enter each node.
    """

    received: dict[int, int]
    total: int
    entering: dict[int, int]

    @cached_property
    def fullest(self) -> int:
        """Largest number of elements that a rank must receive."""
        return max(self.received.values(), default=0)


def bound(source: Layout, target: Layout, nodes: Ints | None = None) -> VolumeBound:
    """Return the minimum volume of plans from `source` to `target`, by counting.

    A rank must receive each element that it needs and does not hold once. An element with k addends is
    received k - 1 times on the rank that sums it, and once on every other rank that needs it.
    """
    have, need = source.regions, _apart(target)
    received = dict.fromkeys(target.ranks, 0)
    region, wanted, cells = meet_all(have.boxes, need.boxes)
    for rank in target.ranks:
        lacked: list[NDArray[np.int64]] = []
        mine, _ = need.of_rank(rank)
        (own,) = np.isin(wanted, mine).nonzero()
        lacks = own[~have.has(region[own], np.full(len(own), rank))]
        lacked.append(np.column_stack([cells.lows[lacks], cells.highs[lacks]]))
        different = np.unique(np.concatenate(lacked), axis=0)
        dims = len(source.shape)
        received[rank] = int(volumes(different[:, :dims], different[:, dims:]).sum())
    total = sum(received.values())
    if source.is_partial:
        total = _total_with_sums(source, target)
    entering: dict[int, int] = {}
    if nodes is not None:
        for node in np.unique(nodes[as_ints(target.ranks)]).tolist():
            at_node = nodes[need.members] == node
            wanted_here = np.unique(need.region_of_member[at_node])
            held_here = np.unique(have.region_of_member[nodes[have.members] == node])
            (own,) = (np.isin(wanted, wanted_here) & ~np.isin(region, held_here)).nonzero()
            different = np.unique(np.column_stack([cells.lows[own], cells.highs[own]]), axis=0)
            dims = len(source.shape)
            entering[node] = int(volumes(different[:, :dims], different[:, dims:]).sum())
    return VolumeBound(received, total, entering)


def _apart(target: Layout) -> Regions:
    """Return the regions of a target, cut where they overlap."""
    if not target.overlaps:
        return target.target_regions
    which, boxes = cut_apart(target.held, target.shape)
    return Regions(boxes, np.zeros(len(which), np.int64), target.owners[which])


def _total_with_sums(source: Layout, target: Layout) -> int:
    have, need = source.regions, _apart(target)
    addends = source.addend_count
    region, wanted, cells = meet_all(have.boxes, need.boxes)
    first = have.addends[region] == 0
    total = 0
    for cell in first.nonzero()[0]:
        low, high = cells.lows[cell], cells.highs[cell]
        needers = need.members[need.starts[wanted[cell]] : need.starts[wanted[cell] + 1]]
        inside = ((have.boxes.lows <= low) & (high <= have.boxes.highs)).all(axis=1).nonzero()[0]
        holders = have.entries(inside)[1]
        near = bool(np.isin(needers, holders).any())
        total += int(volumes(low, high)) * (addends - 1 + len(needers) - near)
    return total
