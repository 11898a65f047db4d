"""Assignment of elements to source ranks and receivers: parts of a model, each encoded once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from mcr_plus.errors import InvalidArgument, phrase_ranks
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.regions import Boxes, Regions, as_ints, cut_apart, meet_all


class HeldShard(NamedTuple):
    """Shard of a tensor on one rank. `shape`: of the whole tensor; `boxes`: None for the whole tensor.

    `is_complex`: the tensor is complex; its last dimension, of size 2, and its dtype are the real view's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: Boxes | None = None
    is_complex: bool = False

    @property
    def bounds(self) -> Boxes:
        """Boxes of the shard; one box for a whole tensor."""
        if self.boxes is not None:
            return self.boxes
        return Boxes(np.zeros((1, len(self.shape)), np.int64), as_ints(self.shape)[None, :])

    def __str__(self) -> str:
        parts = " (parts of complex numbers)" if self.is_complex else ""
        return f"'{self.name}' of shape {list(self.shape)}, {self.dtype}{parts}"


def held_by(name: str, layout: Layout, rank: int, dtype: str, tail: Sequence[int] = ()) -> HeldShard:
    """Return a rank's shard of a tensor by its layout. `tail`: (2,) for a complex tensor."""
    own = layout.pieces(rank)
    lows, highs = (
        np.concatenate([side[own], np.tile(as_ints(ends), (len(own), 1))], axis=1)
        for side, ends in zip(layout.held, ([0] * len(tail), tail), strict=True)
    )
    return HeldShard(name, (*layout.shape, *tail), dtype, Boxes(lows, highs), is_complex=bool(tail))


class ShardAssignment(NamedTuple):
    """Elements of one dtype that a source rank sends to the same receivers, in the order of the buffer.

    `boxes`: for each tensor, disjoint boxes, each in row-major order.
    """

    source: int
    receivers: tuple[int, ...]
    dtype: str
    boxes: list[tuple[str, Boxes]]


def parts_of(
    held: Mapping[int, Sequence[HeldShard]], sources: Sequence[int], of_job: str = ""
) -> list[ShardAssignment]:
    """Divide the elements that receivers need among source ranks; equal arguments give equal results.

    If several source ranks hold an element, the source with the fewest bytes assigned so far sends it.
    `held`: shards of all ranks; ranks outside `sources` are receivers.

    Raises:
        InvalidArgument: ranks disagree about the shape or dtype of a tensor, no source holds an element that
            a receiver holds, or no receiver holds any element of a source's tensor.
    """
    receivers = [rank for rank in held if rank not in sources]
    tensors: dict[str, list[tuple[int, HeldShard]]] = {}
    for rank in (*sources, *receivers):
        for each in held[rank]:
            tensors.setdefault(each.name, []).append((rank, each))
    sent = dict.fromkeys(sources, 0)
    found: dict[tuple[int, tuple[int, ...], str], list[tuple[str, Boxes]]] = defaultdict(list)
    for name, holders in tensors.items():
        first = _agreed(holders, of_job)
        here = _regions([row for row in holders if row[0] in sources])
        there = _regions([row for row in holders if row[0] not in sources])
        if receivers:
            _match(first, here, there, sources, receivers, of_job)
        for source, needed_by, boxes in _shared(here, there, sent, getattr(torch, first.dtype).itemsize):
            found[source, needed_by, first.dtype].append((name, boxes))
    place = {rank: number for number, rank in enumerate(sources)}
    return [ShardAssignment(*key, found[key]) for key in sorted(found, key=lambda key: place[key[0]])]


def whole_of(held: Mapping[int, Sequence[HeldShard]], sources: Sequence[int]) -> list[HeldShard] | None:
    """Return all source tensors as whole shards; None if elements are missing. Raises like `parts_of`."""
    tensors: dict[str, list[tuple[int, HeldShard]]] = {}
    for rank in sources:
        for each in held[rank]:
            tensors.setdefault(each.name, []).append((rank, each))
    found = []
    for holders in tensors.values():
        whole = _agreed(holders)._replace(boxes=None)
        regions = _regions(holders)
        if (0 if regions is None else int(regions.boxes.volumes.sum())) < math.prod(whole.shape):
            return None
        found.append(whole)
    return found


def _agreed(holders: Sequence[tuple[int, HeldShard]], of_job: str = "") -> HeldShard:
    """Return the shape and dtype of a tensor, on which all its holders must agree."""
    rank, first = holders[0]
    for other, held in holders:
        if held[:3] != first[:3]:
            raise InvalidArgument(
                f"sync: rank {rank}{of_job} has {first}, rank {other}{of_job} has {held}, as whole tensors"
            )
    return first


def _regions(holders: Sequence[tuple[int, HeldShard]]) -> Regions | None:
    """Return the disjoint boxes of a tensor that ranks hold, with the ranks; None if there are none."""
    bounds = [held.bounds for _, held in holders]
    owners = as_ints([rank for (rank, _), boxes in zip(holders, bounds, strict=True) for _ in boxes.lows])
    if not len(owners):
        return None
    boxes = Boxes(*(np.concatenate(side) for side in zip(*bounds, strict=True)))
    some = boxes.volumes > 0
    if not some.any():
        return None
    owners, boxes = owners[some], boxes.take(some)
    which, cut = cut_apart(boxes, holders[0][1].shape)
    return Regions(cut, np.zeros(len(which), np.int64), owners[which])


def _match(
    tensor: HeldShard,
    here: Regions | None,
    there: Regions | None,
    sources: Sequence[int],
    receivers: Sequence[int],
    of_job: str,
) -> None:
    """Raise `InvalidArgument` unless a receiver needs elements of a tensor, and sources hold all of these."""
    if here is None and there is None:
        return
    if there is None:
        raise InvalidArgument(
            f"sync: {tensor} is a tensor of src={list(sources)}, and none of the receivers, "
            f"{phrase_ranks(receivers)}{of_job}, holds any of it"
        )
    covered = np.zeros(len(there.boxes.lows), np.int64)
    if here is not None:
        _, wanted, common = meet_all(here.boxes, there.boxes)
        np.add.at(covered, wanted, common.volumes)
    (lacking,) = (covered < there.boxes.volumes).nonzero()
    if len(lacking):
        low, high = (side[lacking[0]].tolist() for side in there.boxes)
        box = list(zip(low, high, strict=True))
        rank = int(there.members[there.starts[lacking[0]]])
        raise InvalidArgument(
            f"sync: {tensor}: no rank of src={list(sources)} holds all elements in {box}, which "
            f"rank {rank}{of_job} has; are all ranks that hold parts of the source in src?"
        )


def _shared(
    here: Regions | None, there: Regions | None, sent: dict[int, int], itemsize: int
) -> Iterator[tuple[int, tuple[int, ...], Boxes]]:
    """Yield (source rank, receivers, boxes) for a tensor; adds the bytes to `sent`."""
    if here is None or there is None:
        return
    region, wanted, common = meet_all(here.boxes, there.boxes)
    owners = np.zeros(len(here.boxes.lows), np.int64)
    needed = np.bincount(region, common.volumes, len(owners))
    for number in np.unique(region).tolist():
        holders = here.members[here.starts[number] : here.starts[number + 1]].tolist()
        owner = owners[number] = min(holders, key=sent.__getitem__)
        sent[owner] += int(needed[number]) * itemsize
    needs = [tuple(each.tolist()) for each in np.split(there.members, there.starts[1:-1])]
    kinds = {need: number for number, need in enumerate(dict.fromkeys(needs))}
    kind_of = as_ints([kinds[need] for need in needs])[wanted]
    names = list(kinds)
    keys = owners[region] * len(kinds) + kind_of
    for key in np.unique(keys).tolist():
        yield key // len(kinds), names[key % len(kinds)], common.take(keys == key)
