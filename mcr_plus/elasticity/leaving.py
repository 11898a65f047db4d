"""Agreement of ranks between two steps on those that have notice to leave."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.elasticity.newcomers import StateRequest
from mcr_plus.errors import phrase_ranks
from mcr_plus.job.notice import notice
from mcr_plus.membership.request import JoinRequest
from mcr_plus.membership.rules import ON_NOTICE

_log = logging.getLogger("mcr_plus")


def agreed_with_notices(
    comm: Communicator, wanted: StateRequest, copied: int = -1
) -> tuple[StateRequest, list[int], int]:
    """Agree on the next action between two steps; collective.

    Returns rank 0's `wanted`, the ranks that are told to leave, and the least `copied` of all ranks; the same
    on all ranks. A rank that returns knows that all ranks have completed the step before.
    """
    told = notice.told()
    own = torch.tensor([*wanted, told, copied], device="cpu")
    rows = torch.empty(comm.size * own.numel(), dtype=own.dtype, device="cpu")
    comm.all_gather_into_tensor(rows, own, compress=False, tag="elastic")
    table = rows.view(comm.size, -1)
    leavers: list[int] = table[:, -2].nonzero().flatten().tolist()
    return StateRequest(*table[0, :-2].tolist()), leavers, int(table[:, -1].min())


def ends_on_notice(
    leavers: Sequence[int], rank: int, size: int, least: int | None, done: int, *, waits: bool
) -> bool:
    """Return whether the loop ends on all ranks, because too few would be left; rank 0 says so.

    `waits`: whether newcomers wait. `done`: number of completed steps.
    """
    left = size - len(leavers)
    if not leavers or (left and (waits or left >= (least or 1))):
        return False
    if rank == 0:
        _log.warning(
            "elastic: %s %s notice to leave; %s, so the loop ends on all ranks after %d steps",
            phrase_ranks(leavers),
            "has" if len(leavers) == 1 else "have",
            f"{left} would be left, fewer than min_ranks={least}" if left else "nobody is left",
            done,
        )
    return True


def unless_told(poll: Callable[[JoinRequest], bool]) -> Callable[[JoinRequest], bool]:
    """Return `poll` for a waiting process that ends with status 0 when it is told to leave."""

    def polled(request: JoinRequest) -> bool:
        if notice.told():
            _log.warning("elastic: this process has notice to leave (%s), so it does not join", notice.reason)
            raise SystemExit(0)
        return poll(request)

    return polled


def changes_line(lost: Mapping[int, str], joined: Sequence[int], step: int, size: int, seconds: float) -> str:
    """Describe the change of ranks in one line."""
    losses = [
        f"{phrase_ranks([rank])} {'left on notice' if why == ON_NOTICE else f'was lost ({why})'}"
        for rank, why in lost.items()
    ]
    what = ", ".join([*losses, *([f"{phrase_ranks(joined)} joined"] if joined else [])]) or "no rank was lost"
    who = "1 rank goes" if size == 1 else f"{size} ranks go"
    return f"elastic: {what}; {who} on with step {step} after {seconds:.2f} s"
