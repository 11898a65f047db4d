"""Looks at the processes of ranks while a world is made of them: nothing else does so then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcr_plus.engine.options import DispatchOptions
from mcr_plus.errors import PeerLost, phrase_ranks
from mcr_plus.rendezvous.processes import Loss, Peers, Sight

if TYPE_CHECKING:
    from mcr_plus.config.schema import Config
    from mcr_plus.membership.rules import Process


class LossWatch:
    """The processes of the ranks of a world that is being made."""

    def __init__(
        self, members: Sequence[Process], rank: int, config: Config, sight: Sight | None = None
    ) -> None:
        """`rank`: of this process. `sight`: what the agents of the world before see, of other hosts."""
        options = config.options("dispatch")
        assert isinstance(options, DispatchOptions)
        places = tuple(process.place for process in members)
        self._peers = Peers(
            rank, places, None, 0.0, stop_grace=options.stop_grace, processes=members, sight=sight
        )

    def losses(self) -> dict[int, Loss]:
        """Why ranks are lost, of those that this process sees."""
        found = {rank: self._peers.lost(rank) for rank in range(len(self._peers.processes))}
        return {rank: loss for rank, loss in found.items() if loss is not None}

    def lost(self) -> dict[int, str]:
        """The states of the ranks that are lost."""
        return {rank: loss.status for rank, loss in self.losses().items()}

    def error(self) -> PeerLost | None:
        """The error of a wait for a value of the ranks, if any is lost."""
        return loss_of(self.losses())

    def is_cut_off(self, place: str) -> bool:
        """Whether a host is silent; `place` as in `Process`."""
        return self._peers.is_cut_off(place)

    def is_away(self, rank: int) -> bool:
        """Whether the process of a rank answers nothing now, and its connections are open."""
        return (loss := self._peers.lost(rank)) is not None and loss.status != "dead"


def loss_of(losses: dict[int, Loss]) -> PeerLost | None:
    """The error of a wait for ranks of the job of which these are lost; None if none is."""
    if not losses:
        return None
    seen = "; ".join(dict.fromkeys(loss.seen for loss in losses.values()))
    return PeerLost(f"{phrase_ranks(list(losses))} of the job: {seen}", list(losses), seen=seen)
