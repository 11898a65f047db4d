"""Matrices with their owners, and the rounds in which they travel within a bound of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from mcr_plus.core.units import about
from mcr_plus.errors import InvalidArgument
from mcr_plus.layout.layout import Layout

_SLOT: Final = 16 << 20  # bytes of whole gradients on one rank that travel together; enough for full rate
_NAMED: Final = 8  # maximum number of matrices that an error lists
_ROW: Final = 64  # bytes for each element of a row that an exchange needs at least, see `mcr.redistribution`


class OwnedMatrix(NamedTuple):
    """A matrix and its owner.

    Attributes:
        layout: which rank of the job holds which elements of the parameter.
        owner: rank of the job that updates the matrix.
        is_whole: every rank holds the whole parameter, so that the owner updates it in place.
    """

    name: str
    parameter: torch.nn.Parameter
    layout: Layout
    cost: float
    owner: int
    is_whole: bool

    @property
    def nbytes(self) -> int:
        """Bytes of memory for the whole matrix: a multiple of 64, so that the next one is aligned."""
        return -(-self.parameter.numel() * self.parameter.itemsize // 64) * 64


@dataclass(frozen=True)
class MemoryPlan:
    """Matrices that travel together, and memory for them.

    Attributes:
        rounds: matrices of each round, in the order of the backward pass.
        keeps_weights: owners keep their whole weights from step to step. Otherwise they receive the weights
            of a round together with its gradients.
        kept: bytes of the whole weights that the fullest rank keeps.
        slot: bytes of whole tensors of a round on the fullest rank.
        buffers: bytes of the buffers of one exchange.
        ahead: number of rounds whose gradients may travel, or wait, before their turn.
    """

    rounds: Sequence[Sequence[OwnedMatrix]]
    keeps_weights: bool
    kept: int
    slot: int
    buffers: int
    ahead: int

    @property
    def nbytes(self) -> int:
        """Bound of the memory on any rank, without the optimizer's state."""
        return self.kept + self.slots(self.ahead) * self.slot + (self.ahead + 2) * self.buffers

    def slots(self, ahead: int) -> int:
        """Return the number of rounds whose whole tensors are in memory; gathered weights wait to be sent."""
        return ahead + (1 if self.keeps_weights else 2)


def plan_memory(matrices: Sequence[OwnedMatrix], limit: int | None) -> MemoryPlan:
    """Cut the matrices into rounds that fit into `limit` bytes; raises `InvalidArgument` if one does not."""
    found = _fitting(matrices, limit, keeps_weights=True) or _fitting(matrices, limit, keeps_weights=False)
    if found is not None:
        return found
    least = max(map(_least_buffer, matrices))
    largest = sorted((each for each in matrices if not each.is_whole), key=lambda each: -each.nbytes)
    needs = [f"{each.name} {about(4 * each.nbytes + 2 * least)}" for each in largest[:_NAMED]]
    raise InvalidArgument(
        f"memory: {about(limit or 0)} is too little; the largest matrices need {', '.join(needs)} on their "
        "owners: two whole gradients, two whole weights and the buffers of two exchanges"
    )


def _fitting(matrices: Sequence[OwnedMatrix], limit: int | None, *, keeps_weights: bool) -> MemoryPlan | None:
    """Return rounds that fit into `limit` bytes; None if there are none."""
    moved = [each for each in matrices if not each.is_whole]
    kept = _fullest(moved) if keeps_weights else 0
    free = None if limit is None else limit - kept
    factor = 1 if keeps_weights else 2  # whole gradients, and whole weights
    least = max(map(_least_buffer, matrices))
    # One round ahead: two or three slots, and three exchanges, each with buffers for two of its own rounds.
    share = _SLOT if free is None else min(_SLOT, max(0, free) // (9 * factor))
    rounds = _rounds(matrices, max(share, max((each.nbytes for each in moved), default=0)))
    slot = factor * max(_fullest(each for each in few if not each.is_whole) for few in rounds)
    buffers = max(least, 2 * factor * max(map(_fullest, rounds)))
    plan = MemoryPlan(rounds, keeps_weights, kept, slot, buffers, ahead=len(rounds))
    if free is None:
        return plan
    buffers = max(least, min(buffers, (free - plan.slots(0) * slot) // 2))
    ahead = (free - plan.slots(0) * slot - 2 * buffers) // (slot + buffers)
    return replace(plan, buffers=buffers, ahead=min(ahead, len(rounds))) if ahead >= 0 else None


def _least_buffer(matrix: OwnedMatrix) -> int:
    return _ROW * matrix.layout.shape[1]


def _rounds(matrices: Sequence[OwnedMatrix], slot: int) -> list[list[OwnedMatrix]]:
    """Return rounds of at most `slot` bytes on each owner, so that all owners have work in each round.

    Each owner's matrices are taken in the order of the backward pass, from the last one on.
    """
    rounds: list[list[OwnedMatrix]] = []
    reached: dict[int, tuple[int, int]] = {}  # the round of an owner's last matrix, and its bytes there
    for each in reversed(matrices):
        at, load = reached.get(each.owner, (0, 0))
        if load and load + each.nbytes > slot:
            at, load = at + 1, 0
        if at == len(rounds):
            rounds.append([])
        rounds[at].append(each)
        reached[each.owner] = at, load + each.nbytes
    return rounds


def _fullest(matrices: Iterable[OwnedMatrix]) -> int:
    """Return the bytes of these matrices on the owner with most of them."""
    loads: dict[int, int] = {}
    for each in matrices:
        loads[each.owner] = loads.get(each.owner, 0) + each.nbytes
    return max(loads.values(), default=0)
