"""Agreement of ranks between two steps on those that have notice to leave."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from mcr_plus.communicator.communicator import Communicator
from mcr_plus.elasticity.newcomers import StateRequest
from mcr_plus.job.notice import notice
from mcr_plus.membership.request import JoinRequest

_log = logging.getLogger("mcr_plus")


def agreed_with_notices(comm: Communicator, wanted: StateRequest) -> tuple[StateRequest, list[int]]:
    """Return rank 0's `wanted`, and the ranks that are told to leave; the same on all ranks; collective.

    A rank that returns knows that all ranks have completed the step before.
    """
    told = notice.told()
    own = torch.tensor([*wanted, told], device="cpu")
    rows = torch.empty(comm.size * own.numel(), dtype=own.dtype, device="cpu")
    comm.all_gather_into_tensor(rows, own, compress=False, tag="elastic")
    table = rows.view(comm.size, -1)
    if told:
        _log.info("elastic: rank %d has notice to leave: %s", comm.rank, notice.reason)
    return StateRequest(*table[0, :-1].tolist()), table[:, -1].nonzero().flatten().tolist()


def unless_told(poll: Callable[[JoinRequest], bool]) -> Callable[[JoinRequest], bool]:
    """Return `poll` for a waiting process that ends with status 0 when it is told to leave."""

    def polled(request: JoinRequest) -> bool:
        if notice.told():
            _log.warning("elastic: this process has notice to leave (%s), so it does not join", notice.reason)
            raise SystemExit(0)
        return poll(request)

    return polled
