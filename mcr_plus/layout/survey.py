"""Compute the plans of all ranks in one process, without a job, for `mcr-plus layout`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcr_plus.errors import InvalidArgument
from mcr_plus.layout import proof
from mcr_plus.layout.addends import to_itself
from mcr_plus.layout.layout import Layout
from mcr_plus.layout.native import may_reduce
from mcr_plus.layout.program import (
    LOADS,
    ExchangeProgram,
    MessageCosts,
    VolumeBound,
    bound,
    cheapest,
    load,
    native_load,
    programs,
)
from mcr_plus.layout.regions import Ints, as_ints

if TYPE_CHECKING:
    import torch


def parse_mesh(text: str) -> tuple[list[str], Ints]:
    """Return the placements of a layout such as `S0,R @2x4`, and its mesh of ranks; see `parse_layout`."""
    match = re.fullmatch(r"\s*(\S(?:.*\S)?)\s*@\s*(\d+(?:x\d+)*)\s*(?:\+\s*(\d+))?\s*", text)
    if match is None:
        raise InvalidArgument(
            f"{text!r}: expected placements and a mesh, such as 'S0,R @2x4'; '@2x4+8' for ranks 8 to 15"
        )
    placements, mesh, first = match.groups()
    extents = [int(extent) for extent in mesh.split("x")]
    ranks = np.arange(int(np.prod(extents))).reshape(extents) + int(first or 0)
    return [each.strip() for each in placements.split(",")], ranks


def parse_layout(text: str, shape: Sequence[int]) -> Layout:
    """Parse a layout such as `S0,R @2x4`: a placement for each dimension of a mesh of ranks.

    `@2x4+8`: the mesh consists of ranks 8 to 15. See `Layout.mesh` for placements.

    Raises:
        InvalidArgument: the text has a wrong form, or the layout is invalid.
    """
    placements, ranks = parse_mesh(text)
    return Layout.mesh(shape, ranks, placements)


def node_of_rank(ranks: Collection[int], nodes: int) -> Ints | None:
    """Return the node of each rank from 0 to the largest, distributed evenly in order; None for one node."""
    if nodes == 1:
        return None
    number = max(ranks) + 1
    if nodes > number:
        raise InvalidArgument(f"nodes: {nodes} nodes, but only {number} ranks")
    return np.arange(number) * nodes // number


class ProgramOutcome(NamedTuple):
    """Outcome of one program on all ranks.

    `loads`: [ranks, steps, 6], in the order of `program.LOADS`. `links`: [nodes, nodes], bytes from each
    node to each other node. `wrong`: error found by the proof; None if there is none. `seconds`: expected
    time.
    """

    program: ExchangeProgram
    loads: NDArray[np.int64]
    links: NDArray[np.int64]
    wrong: str | None
    seconds: float

    @property
    def received(self) -> NDArray[np.int64]:
        """Bytes that each rank receives."""
        found: NDArray[np.int64] = self.loads[:, :, [1, 4]].sum(axis=(1, 2))
        return found

    @property
    def sent(self) -> NDArray[np.int64]:
        """Bytes that each rank sends."""
        found: NDArray[np.int64] = self.loads[:, :, [0, 3]].sum(axis=(1, 2))
        return found


@dataclass(frozen=True)
class ProgramSurvey:
    """All programs from one layout to another, on all ranks; the plan is the cheapest program.

    Attributes:
        ranks: ranks that have a part in either layout.
        outcomes: outcome of each program.
    """

    source: Layout
    target: Layout
    itemsize: int
    nodes: Ints | None
    ranks: tuple[int, ...]
    outcomes: tuple[ProgramOutcome, ...]

    @cached_property
    def plan(self) -> ProgramOutcome:
        """Program that a job would run."""
        crossing = [int(outcome.links.sum()) for outcome in self.outcomes]
        return self.outcomes[cheapest([outcome.seconds for outcome in self.outcomes], crossing)]

    @cached_property
    def bound(self) -> VolumeBound:
        """Least volume of any plan, in elements."""
        return bound(self.source, self.target, self.nodes)


def survey(
    source: Layout,
    target: Layout,
    itemsize: int,
    nodes: Ints | None = None,
    dtype: torch.dtype | None = None,
) -> ProgramSurvey:
    """Make and prove all plans from `source` to `target`, on every rank.

    `nodes`: the node of each rank; None for one node. `dtype`: excludes plans that could leave replicas of
    this dtype with different bits; None: all plans.

    Raises:
        InvalidArgument: the layouts do not fit each other.
    """
    if source.shape != target.shape:
        raise InvalidArgument(f"source {source} and target {target} have different global shapes")
    if target.is_partial and source != target:
        raise InvalidArgument(f"target {target}: values cannot be divided into addends")
    source.check_source()
    source, target = to_itself(source, target)
    ranks = tuple(sorted({*source.ranks, *target.ranks}))
    node_of = np.zeros(max(ranks, default=0) + 1, np.int64) if nodes is None else nodes
    found = []
    for program in programs(source, target, itemsize, nodes):
        one = program.native
        if one is not None and dtype is not None and not may_reduce(one, source, dtype):
            continue
        loads = np.zeros((len(ranks), max(len(program.steps), 1), len(LOADS)), np.int64)
        links = np.zeros([int(node_of.max()) + 1] * 2, np.int64)
        wrong: str | None = None
        # There is no job, so run the checks of every rank here.
        if one is not None:
            wrong = proof.check_native(one, source, target, ranks)
            for at, rank in enumerate(ranks):
                loads[at, 0] = native_load(one, source, rank, itemsize, nodes)
                _add_links(links, node_of, one.group_of(rank) or (), rank, loads[at, 0])
        for number, step in enumerate(program.steps):
            parts = [step.part(rank) for rank in ranks]
            for at, part in enumerate(parts):
                loads[at, number] = load(part, itemsize, nodes)
                np.add.at(links[node_of[part.rank]], node_of[part.sends.peers], part.sends.sizes * itemsize)
                wrong = wrong or proof.check(part, step.source, step.target)
            wrong = wrong or proof.unlike(parts, as_ints(ranks))
        crossing = np.zeros((len(links), *loads.shape[1:-1], 2), np.int64)
        np.add.at(crossing, node_of[as_ints(ranks)], loads[..., 3:5])
        seconds = float(MessageCosts().seconds(loads.max(axis=0), crossing.max(axis=0)).sum())
        np.fill_diagonal(links, 0)
        found.append(ProgramOutcome(program, loads, links, wrong, seconds))
    return ProgramSurvey(source, target, itemsize, nodes, ranks, tuple(found))


def _add_links(links: NDArray[np.int64], node_of: Ints, group: Sequence[int], rank: int, row: Ints) -> None:
    """Add the bytes that a rank sends in a native collective, spread evenly over its peers on other nodes."""
    nodes = node_of[as_ints(group)]
    far = nodes[nodes != node_of[rank]]
    if len(far):
        np.add.at(links[node_of[rank]], far, -(-int(row[3]) // len(far)))
