"""Oracle of layouts and redistribution in plain NumPy, from the definition of layouts alone.

A local tensor is written here as an array of the global tensor's flat indices, one for each of its
elements, which `mesh`, `sharded`, `flat` and `boxes` cut out of `arange(volume)`. Nothing here asks the
library which box a rank holds or where it lies in memory. `execute` carries out what all ranks' parts of a
plan say, on values that are unique for every element and addend, so that one that is lost, doubled, in a
wrong place or not summed is seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mcr_plus.layout.layout import Layout
from mcr_plus.layout.messages import BoxRows, ExchangePart
from mcr_plus.layout.program import ExchangeProgram

Ints = NDArray[np.int64]
ADDEND_BITS: Final = 3
"""Bits of a value that count one addend: up to 7, so that no carry looks like another addend."""
_UNWRITTEN: Final = -1


class Wrong(AssertionError):
    """A mistake in a plan."""


@dataclass
class Side:
    """A layout of the library, and its content by the definition.

    Attributes:
        layout: the library's layout.
        tensors: the local tensor of each rank, as global flat indices of its elements.
        addend_of: the addend that each rank holds.
        addends: the number of addends.
        pieces: the non-empty boxes of each rank, in the given order, as flat indices; only if a rank may have
            an element several times.
    """

    layout: Layout
    tensors: dict[int, Ints]
    addend_of: dict[int, int]
    addends: int = 1
    pieces: dict[int, list[Ints]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @cached_property
    def held(self) -> dict[int, Ints]:
        """Return the distinct elements that each rank has."""
        return {rank: np.unique(tensor) for rank, tensor in self.tensors.items()}

    @cached_property
    def wanted(self) -> dict[int, list[Ints]]:
        """Return the distinct boxes of each rank, without empty ones."""
        found = {}
        for rank, tensor in self.tensors.items():
            boxes_ = self.pieces.get(rank, [np.sort(tensor.ravel())])
            found[rank] = [np.array(each) for each in {tuple(box.tolist()) for box in boxes_ if box.size}]
        return found

    def __str__(self) -> str:
        return str(self.layout)


def mesh(shape: Sequence[int], ranks: Any, placements: Sequence[str]) -> Side:
    """Return a mesh of ranks with a placement per dimension, applied from the first to the last."""
    grid = np.asarray(ranks)
    everything = _everything(shape)
    tensors, addend_of = {}, {}
    addends = math.prod(n for n, p in zip(grid.shape, placements, strict=True) if p.startswith("P"))
    for place in np.ndindex(grid.shape):
        part, addend = everything, 0
        for at, count, placement in zip(place, grid.shape, placements, strict=True):
            if placement.startswith("S"):
                part = chunk(part, int(placement[1:]), count, at)
            elif placement.startswith("P"):
                addend = addend * count + at
        tensors[int(grid[place])], addend_of[int(grid[place])] = part, addend
    return Side(Layout.mesh(shape, ranks, placements), tensors, addend_of, addends)


def chunk(tensor: Ints, dim: int, count: int, at: int) -> Ints:
    """Return slice `at` of `count` as `torch.chunk` cuts them: rounded up, the last ones smaller."""
    size = math.ceil(tensor.shape[dim] / count)
    place = (*[slice(None)] * dim, slice(at * size, (at + 1) * size))
    return tensor[place]


def sharded(shape: Sequence[int], ranks: Sequence[int], dim: int, sizes: Sequence[int]) -> Side:
    """Return slices of given sizes along a dimension."""
    parts = np.split(_everything(shape), np.cumsum(sizes)[:-1], axis=dim)
    layout = Layout.sharded(shape, ranks, dim, sizes)
    return Side(layout, dict(zip(ranks, parts, strict=True)), dict.fromkeys(ranks, 0))


def flat(shape: Sequence[int], ranks: Sequence[int], ranges: Sequence[Sequence[tuple[int, int]]]) -> Side:
    """Return contiguous runs of the flattened tensor."""
    none = np.zeros(0, np.int64)
    parts = [np.concatenate([none, *(np.arange(start, stop) for start, stop in listed)]) for listed in ranges]
    layout = Layout.flat(shape, ranks, ranges)
    return Side(layout, dict(zip(ranks, parts, strict=True)), dict.fromkeys(ranks, 0))


def boxes(shape: Sequence[int], listed: Mapping[int, Sequence[Sequence[tuple[int, int]]]]) -> Side:
    """Return any boxes: a single box of a rank as it is, or several of any rank end to end."""
    everything = _everything(shape)
    found = {
        rank: [everything[tuple(slice(low, high) for low, high in box)] for box in some]
        for rank, some in listed.items()
    }
    none = np.zeros(0, np.int64)
    if all(len(some) == 1 for some in found.values()):
        tensors = {rank: one for rank, (one,) in found.items()}
    else:
        tensors = {
            rank: np.concatenate([none, *(box.ravel() for box in some)]) for rank, some in found.items()
        }
    pieces = {rank: [box.ravel() for box in some if box.size] for rank, some in found.items()}
    return Side(Layout.boxes(shape, listed), tensors, dict.fromkeys(found, 0), 1, pieces)


def _everything(shape: Sequence[int]) -> Ints:
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


def values(volume: int, addends: int) -> tuple[Ints, Ints]:
    """Return the value of each addend of each element, [addends, volume], and the values of the sums.

    Low bits count the addends, `ADDEND_BITS` for each; above them is a number of the element in random order,
    so that neighbours of two elements do not add up to the same sum.
    """
    assert addends * ADDEND_BITS <= 42
    numbers = np.random.default_rng(volume).permutation(volume).astype(np.int64) + 1
    bits = np.int64(1) << (ADDEND_BITS * np.arange(addends, dtype=np.int64))
    each = (numbers[None, :] << (ADDEND_BITS * addends)) + bits[:, None]
    return each, each.sum(axis=0)


def check_definition(side: Side) -> None:
    """Check the library's layout against the definition: local shapes, boxes, and their places."""
    layout, everything = side.layout, _everything(side.shape)
    _equal(sorted(layout.ranks), sorted(side.tensors), f"{side}: ranks")
    seen: dict[int, int] = {}
    for piece, rank in enumerate(layout.owners.tolist()):
        tensor = side.tensors[rank]
        low, high = layout.held.lows[piece], layout.held.highs[piece]
        inside = everything[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
        found = _strided(tensor, layout, rank, piece, low, high)
        _equal(found.tolist(), inside.ravel().tolist(), f"{side}: rank {rank}, box {piece}")
        _equal(int(layout.addends[piece]), side.addend_of[rank], f"{side}: addend of rank {rank}")
        seen[rank] = seen.get(rank, 0) + inside.size
    for rank, tensor in side.tensors.items():
        _equal(layout.local_shape(rank), tensor.shape, f"{side}: local shape of rank {rank}")
        _equal(seen.get(rank, 0), tensor.size, f"{side}: elements of rank {rank}")


def _strided(tensor: Ints, layout: Layout, rank: int, piece: int, low: Ints, high: Ints) -> Ints:
    """Return the library's view of a box in a contiguous local tensor."""
    from mcr_plus.layout.regions import Boxes

    extents, strides, offsets = layout.strided(rank, np.array([piece]), Boxes(low[None], high[None]))
    flattened = np.ascontiguousarray(tensor).ravel()
    at: Ints = np.zeros((), np.int64)
    for extent, stride in zip(extents[0].tolist(), strides[0].tolist(), strict=True):
        at = at[..., None] + np.arange(extent) * stride
    at = at.ravel() + int(offsets[0])
    if at.size and (at.min() < 0 or at.max() >= flattened.size):
        raise Wrong(f"{layout}: rank {rank}, box {piece} lies outside of its local tensor")
    return np.asarray(flattened[at], np.int64)


def _equal(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise Wrong(f"{what}: {_brief(found)}, expected {_brief(expected)}")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "…"


# -- execution ------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Moved elements of each step, by receiving and sending rank."""

    received: list[dict[int, int]] = field(default_factory=list)
    sent: list[dict[int, int]] = field(default_factory=list)
    links: list[dict[tuple[int, int], int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Return the elements of all ranks and steps."""
        return sum(sum(step.values()) for step in self.received)

    @property
    def slowest(self) -> int:
        """Return the most elements that one rank sends or receives in each step, summed."""
        steps = zip(self.received, self.sent, strict=True)
        return sum(max([0, *into.values(), *out.values()]) for into, out in steps)

    def entering(self, nodes: Ints) -> dict[int, int]:
        """Return the elements that each node's ranks receive from other nodes."""
        found: dict[int, int] = {}
        for step in self.links:
            for (sender, receiver), size in step.items():
                if nodes[sender] != nodes[receiver]:
                    found[int(nodes[receiver])] = found.get(int(nodes[receiver]), 0) + size
        return found


def execute(
    program: ExchangeProgram,
    source: Side,
    target: Side,
    parts: Mapping[int, Sequence[ExchangePart]] | None = None,
) -> Traffic:
    """Carry out a program on all ranks, and compare every local tensor of the target with the definition's.

    `parts`: the parts of each step by rank; the program's own if None.

    Raises:
        Wrong: lists of senders and receivers differ, a rank sends what it does not have or writes twice, or a
            result differs from the definition.
    """
    ranks = sorted({*source.tensors, *target.tensors})
    if parts is None:
        parts = {rank: program.parts(rank) for rank in ranks}
    volume = math.prod(source.shape)
    each, complete = values(volume, source.addends)
    # Between steps, a rank has at most one value of an element and addend: all of them, or unwritten.
    have: dict[int, dict[int, Ints]] = {}
    for rank, elements in source.held.items():
        mine = np.full(volume, _UNWRITTEN, np.int64)
        mine[elements] = each[source.addend_of[rank]][elements]
        have[rank] = {source.addend_of[rank]: mine}
    traffic = Traffic()
    last = len(program.steps) - 1
    for number, step in enumerate(program.steps):
        of_step = {rank: parts[rank][number] for rank in ranks}
        wires = _exchange(source.shape, of_step, have, traffic)
        addends = source.addends if number == 0 else 1
        if number == last:
            _finish(target, of_step, have, wires, addends, complete)
        else:
            have = _next(step.target, of_step, have, wires, addends, complete)
    return traffic


Wires = dict[tuple[int, int], list[Ints]]
"""Values of each row, by sender and receiver."""


def _elements(shape: tuple[int, ...], rows: Any, row: int) -> Ints:
    """Return the flat indices of a row's box."""
    bounds = zip(rows.boxes.lows[row].tolist(), rows.boxes.highs[row].tolist(), strict=True)
    box = list(bounds)
    if len(box) != len(shape) or any(
        not 0 <= low < high <= n for (low, high), n in zip(box, shape, strict=True)
    ):
        raise Wrong(f"box {box} is empty or not in the tensor of shape {shape}")
    return np.asarray(_everything(shape)[tuple(slice(low, high) for low, high in box)].ravel())


def _listed(rows: BoxRows) -> dict[int, list[tuple[Any, ...]]]:
    """Return the boxes and addends by peer, in their order."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    sides = (rows.peers, rows.addends, *rows.boxes)
    for peer, addend, low, high in zip(*(side.tolist() for side in sides), strict=True):
        found.setdefault(peer, []).append((addend, tuple(low), tuple(high)))
    return found


def _exchange(
    shape: tuple[int, ...],
    parts: Mapping[int, ExchangePart],
    have: Mapping[int, Mapping[int, Ints]],
    traffic: Traffic,
) -> Wires:
    sends = {rank: _listed(part.sends) for rank, part in parts.items()}
    receives = {rank: _listed(part.receives) for rank, part in parts.items()}
    wires: Wires = {}
    received, sent = dict[int, int](), dict[int, int]()
    links: dict[tuple[int, int], int] = {}
    for sender, part in parts.items():
        rows = part.sends
        if (np.diff(rows.peers) < 0).any():
            raise Wrong(f"rank {sender} does not send in the order of its peers")
        for row, (peer, addend) in enumerate(zip(rows.peers.tolist(), rows.addends.tolist(), strict=True)):
            elements = _elements(shape, rows, row)
            store = have.get(sender, {}).get(addend)
            if store is None or (store[elements] == _UNWRITTEN).any():
                raise Wrong(f"rank {sender} sends what it does not have")
            wires.setdefault((sender, peer), []).append(store[elements])
            for counts, key in ((sent, sender), (received, peer)):
                counts[key] = counts.get(key, 0) + elements.size
            links[sender, peer] = links.get((sender, peer), 0) + elements.size
    for sender in parts:
        for receiver in parts:
            _equal(
                receives[receiver].get(sender, []),
                sends[sender].get(receiver, []),
                f"rank {receiver} from rank {sender}",
            )
    strangers = {peer for lists in (*sends.values(), *receives.values()) for peer in lists} - set(parts)
    if strangers:
        raise Wrong(f"ranks {sorted(strangers)} have no part")
    for rank in parts:
        if rank in sends[rank] or rank in receives[rank]:
            raise Wrong(f"rank {rank} sends to itself")
    for what, counts in ((traffic.received, received), (traffic.sent, sent)):
        what.append(counts)
    traffic.links.append(links)
    return wires


def _arrivals(
    shape: tuple[int, ...],
    rank: int,
    part: ExchangePart,
    have: Mapping[int, Mapping[int, Ints]],
    wires: Wires,
) -> list[tuple[int, int, Ints, Ints]]:
    """Return a rank's part of the next layout: box of the layout, addend, elements and their values."""
    found = []
    taken: dict[int, int] = {}
    rows = part.receives
    sides = (rows.peers, rows.addends, rows.pieces)
    for row, (peer, addend, piece) in enumerate(zip(*(side.tolist() for side in sides), strict=True)):
        elements = _elements(shape, rows, row)
        taken[peer] = taken.get(peer, -1) + 1
        found.append((piece, addend, elements, wires[peer, rank][taken[peer]]))
    for row, (addend, piece) in enumerate(
        zip(part.kept.addends.tolist(), part.kept.into.tolist(), strict=True)
    ):
        elements = _elements(shape, part.kept, row)
        store = have.get(rank, {}).get(addend)
        if store is None or (store[elements] == _UNWRITTEN).any():
            raise Wrong(f"rank {rank} keeps what it does not have")
        found.append((piece, addend, elements, store[elements]))
    return found


def _sums(
    arrivals: Sequence[tuple[int, int, Ints, Ints]], size: int, addends: int, where: str
) -> tuple[Ints, Ints]:
    """Return the sums of arrivals by element, and their counts; each addend of an element counts once."""
    result, times = np.zeros(size, np.int64), np.zeros((addends, size), np.int64)
    for _, addend, at, found in arrivals:
        if not 0 <= addend < addends:
            raise Wrong(f"{where}: addend {addend} of {addends}")
        np.add.at(result, at, found)
        np.add.at(times[addend], at, 1)
    if (times > 1).any() or (times != times[0]).any():
        raise Wrong(f"{where}: an element arrives twice, or without one of its addends")
    return result, times[0]


def _next(
    layout: Layout,
    parts: Mapping[int, ExchangePart],
    have: Mapping[int, Mapping[int, Ints]],
    wires: Wires,
    addends: int,
    complete: Ints,
) -> dict[int, dict[int, Ints]]:
    """Return the ranks' values after a step to a layout of the planner: complete values, of any elements."""
    found = {}
    held = np.zeros(len(complete), np.int64)
    for rank, part in parts.items():
        arrivals = _arrivals(layout.shape, rank, part, have, wires)
        result, times = _sums(arrivals, len(complete), addends, f"rank {rank} between steps")
        mine = np.where(times > 0, result, _UNWRITTEN)
        if ((mine != complete) & (times > 0)).any():
            raise Wrong(f"rank {rank} has wrong values between steps")
        held += times
        found[rank] = {0: mine}
    return found


def _finish(
    target: Side,
    parts: Mapping[int, ExchangePart],
    have: Mapping[int, Mapping[int, Ints]],
    wires: Wires,
    addends: int,
    complete: Ints,
) -> None:
    volume = len(complete)
    for rank, tensor in target.tensors.items():
        arrivals = _arrivals(target.shape, rank, parts[rank], have, wires)
        if rank not in target.pieces:
            result, times = _sums(arrivals, volume, addends, f"rank {rank}")
            expected = np.zeros(volume, np.int64)
            expected[tensor.ravel()] = 1
            _equal((times == expected).all(), True, f"rank {rank} has each of its elements once")
            _equal(bool((result[tensor] == complete[tensor]).all()), True, f"rank {rank} has right values")
            continue
        # One of a rank's equal boxes gets the values of both; the other is copied from it.
        first = int(np.searchsorted(target.layout.owners, rank))
        twins = {again: once for once, again in target.layout.target_regions.twins}
        got: list[Ints] = []
        for index, piece in enumerate(target.pieces[rank]):
            mine = [each for each in arrivals if each[0] == first + index]
            result, times = _sums(mine, volume, addends, f"rank {rank}, box {index}")
            if first + index in twins:
                _equal(len(mine), 0, f"rows of rank {rank} for box {index}, a copy")
                got.append(got[twins[first + index] - first])
                continue
            expected = np.zeros(volume, np.int64)
            expected[piece] = 1
            _equal((times == expected).all(), True, f"rank {rank} has each element of box {index} once")
            got.append(result[piece])
        found = np.concatenate([np.zeros(0, np.int64), *got])
        _equal(found.tolist(), complete[tensor.ravel()].tolist(), f"rank {rank} has right values")
    for rank in set(parts) - set(target.tensors):
        if len(parts[rank].receives.peers) or len(parts[rank].kept.addends):
            raise Wrong(f"rank {rank} has no part in the target and gets some of it")


def check_places(
    program: ExchangeProgram,
    source: Side,
    target: Side,
    rank: int,
    parts: Sequence[ExchangePart] | None = None,
) -> None:
    """Check that each row of a rank is in its local tensors where the definition says.

    For layouts in between, check that an element is written and read at the same place.
    """
    places: dict[int, dict[int, int]] = {}
    for number, (step, part) in enumerate(zip(program.steps, parts or program.parts(rank), strict=True)):
        if step.source.inside is not None and not target.pieces:
            _same_place(step.source, step.target, rank, part)  # such rows are not copied
        kept = part.kept
        for layout, boxes_, pieces in (
            (step.source, part.sends.boxes, part.sends.pieces),
            (step.source, kept.boxes, kept.pieces),
            (step.target, part.receives.boxes, part.receives.pieces),
            (step.target, kept.boxes, kept.into),
        ):
            side: Side | None = None  # owner of the local tensor; None for one of the planner's own
            if number == 0 and layout is step.source:
                side = source
            elif layout is program.steps[-1].target or layout.inside is not None:
                side = target
            for row, piece in enumerate(pieces.tolist()):
                low, high = boxes_.lows[row], boxes_.highs[row]
                elements = _everything(layout.shape)[
                    tuple(slice(a, b) for a, b in zip(low, high, strict=True))
                ].ravel()
                if side is not None:
                    found = _strided(side.tensors[rank], layout, rank, piece, low, high)
                    _equal(found.tolist(), elements.tolist(), f"rank {rank}, step {number}, row {row}")
                    continue
                size = math.prod(layout.local_shape(rank) or ())
                at = _strided(np.arange(size), layout, rank, piece, low, high)
                known = places.setdefault(id(layout), {})
                for element, place in zip(elements.tolist(), at.tolist(), strict=True):
                    _equal(known.setdefault(element, place), place, f"rank {rank}, element {element}")
    for known in places.values():
        _equal(len(set(known.values())), len(known), f"rank {rank}: elements at different places")


def _same_place(before: Layout, after: Layout, rank: int, part: ExchangePart) -> None:
    one = before.strided(rank, part.kept.pieces, part.kept.boxes)
    other = after.strided(rank, part.kept.into, part.kept.boxes)
    for a, b in zip(one, other, strict=True):
        _equal(a.tolist(), b.tolist(), f"rank {rank}: kept rows that are not copied")


# -- bounds ---------------------------------------------------------------------------------------


def lacked(source: Side, target: Side) -> dict[int, int]:
    """Return the distinct elements that each rank needs and does not have in full."""
    return {rank: _lacks(source, rank, needed) for rank, needed in target.held.items()}


def lacked_by_boxes(source: Side, target: Side) -> dict[int, int]:
    """Return `lacked`, but count elements again in each distinct box of a rank."""
    return {rank: sum(_lacks(source, rank, box) for box in boxes) for rank, boxes in target.wanted.items()}


def _lacks(source: Side, rank: int, needed: Ints) -> int:
    has = source.held.get(rank, np.zeros(0, np.int64)) if source.addends == 1 else np.zeros(0, np.int64)
    return np.setdiff1d(needed, has, assume_unique=True).size


def least_total(source: Side, target: Side) -> int:
    """Return the fewest elements that all ranks together must receive.

    An element of k addends is summed on one rank by k - 1 receipts, or more, and each further rank that needs
    it receives it; if no rank that needs it holds an addend, one more receipt is necessary.
    """
    volume = math.prod(source.shape)
    needers, near = np.zeros(volume, np.int64), np.zeros(volume, np.int64)
    none = np.zeros(0, np.int64)
    for rank, needed in target.held.items():
        needers[needed] += 1
        near[np.intersect1d(needed, source.held.get(rank, none), assume_unique=True)] += 1
    if source.addends == 1:
        return int((needers - near).sum())
    return int((source.addends - 1 + needers - (near > 0))[needers > 0].sum())


def least_entering(source: Side, target: Side, nodes: Ints) -> dict[int, int]:
    """Return the distinct elements that each node's ranks need and none of them has; without sums."""
    found = {}
    none = np.zeros(0, np.int64)
    for node in np.unique(nodes).tolist():
        needed = [held for rank, held in target.held.items() if nodes[rank] == node]
        has = [held for rank, held in source.held.items() if nodes[rank] == node]
        found[node] = int(np.setdiff1d(np.concatenate([none, *needed]), np.concatenate([none, *has])).size)
    return found


# -- native collectives ---------------------------------------------------------------------------


def check_native(program: ExchangeProgram, source: Side, target: Side) -> None:
    """Check that a native collective in each of its groups leads to the target, by its definition."""
    native = program.native
    assert native is not None
    members = [rank for group in native.groups for rank in group]
    _equal(len(set(members)), len(members), "ranks that are in one group")
    with_elements = [{r for r, held in side.tensors.items() if held.size} for side in (source, target)]
    if native.kind == "broadcast":
        with_elements = [with_elements[0] | with_elements[1]]
    for ranks in with_elements:  # those without elements have nothing to do
        _equal(sorted(members), sorted(ranks), "ranks of all groups")
    if native.kind == "broadcast":
        for group in native.groups:
            (root,) = (rank for rank in group if rank in source.held and source.held[rank].size)
            for rank in {*group} - {root}:
                # Elements in order; local tensors may have other shapes.
                received, sent = target.tensors[rank].ravel(), source.tensors[root].ravel()
                _equal(received.tolist(), sent.tolist(), "what is broadcast")
        return
    for group in native.groups:
        before = [source.tensors[rank].ravel() for rank in group]
        after = [target.tensors[rank].ravel() for rank in group]
        held = sorted(source.addend_of[rank] for rank in group)
        if native.kind == "all_gather":
            _equal(source.addends, 1, "addends that are gathered")
            _equal(len({each.size for each in before}), 1, "sizes of parts")
            for each in after:
                _equal(sorted(np.concatenate(before).tolist()), sorted(each.tolist()), "what is gathered")
            continue
        _equal(held, list(range(source.addends)), "addends in a group")
        for each in before:
            _equal(each.tolist(), before[0].tolist(), "elements of addends")
        if native.kind == "reduce_scatter":
            _equal(len({each.size for each in after}), 1, "sizes of parts")
            _equal(sorted(np.concatenate(after).tolist()), sorted(before[0].tolist()), "parts of the sum")
            continue
        for each in after:
            _equal(each.tolist(), before[0].tolist(), "elements of the sum")


# -- senders --------------------------------------------------------------------------------------


def least_fullest_sender(source: Side, target: Side) -> float:
    """Return the least number of elements that the busiest sender can send, if each rank gets the elements it
    lacks from source holders: a linear program over classes of elements that the same ranks hold.
    """
    from scipy.optimize import linprog

    volume = math.prod(source.shape)
    ranks = sorted({*source.tensors, *target.tensors})
    holders = np.zeros((volume, len(ranks)), bool)
    lacking = np.zeros(volume, np.int64)
    for at, rank in enumerate(ranks):
        if rank in source.held:
            holders[source.held[rank], at] = True
        if rank in target.held:
            needed = target.held[rank]
            lacking[needed] += ~holders[needed, at]
    classes, which = np.unique(holders, axis=0, return_inverse=True)
    demand = np.bincount(which.ravel(), lacking, len(classes))
    pairs = [(each, at) for each in range(len(classes)) for at in classes[each].nonzero()[0] if demand[each]]
    if not pairs:
        return 0.0
    # Variables: each rank's sends of each class, and the maximum over ranks.
    served = np.zeros((len(classes), len(pairs) + 1))
    sent = np.zeros((len(ranks), len(pairs) + 1))
    sent[:, -1] = -1
    for column, (each, at) in enumerate(pairs):
        served[each, column] = sent[at, column] = 1
    cost = np.append(np.zeros(len(pairs)), 1)
    found = linprog(cost, sent, np.zeros(len(ranks)), served, demand, method="highs")
    assert found.success
    return float(found.fun)
