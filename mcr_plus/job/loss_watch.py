"""Watch over the processes of ranks while their world is made, when no watchdog runs yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcr_plus.engine.options import DispatchOptions
from mcr_plus.rendezvous.processes import Loss, Peers, Sight, loss_of

if TYPE_CHECKING:
    from mcr_plus.config.schema import Config
    from mcr_plus.errors import PeerLost
    from mcr_plus.membership.rules import Process


class LossWatch:
    """Watches the processes of the ranks of a world that is being made."""

    def __init__(
        self, members: Sequence[Process], rank: int, config: Config, sight: Sight | None = None
    ) -> None:
        """`rank`: this process's rank. `sight`: findings of the previous world's agents about other hosts."""
        options = config.options("dispatch")
        assert isinstance(options, DispatchOptions)
        places = tuple(process.place for process in members)
        self._peers = Peers(
            rank, places, None, 0.0, stop_grace=options.stop_grace, processes=members, sight=sight
        )

    def losses(self) -> dict[int, Loss]:
        """Return the losses that this process sees, by rank."""
        found = {rank: self._peers.lost(rank) for rank in range(len(self._peers.processes))}
        return {rank: loss for rank, loss in found.items() if loss is not None}

    def lost(self) -> dict[int, str]:
        """Return the states of the lost ranks."""
        return {rank: loss.status for rank, loss in self.losses().items()}

    def error(self) -> PeerLost | None:
        """Return the error that ends a wait for a value from the ranks, if any of them is lost."""
        return loss_of(self.losses())

    def is_cut_off(self, place: str) -> bool:
        """Return whether a host is silent; `place` as in `Process`."""
        return self._peers.is_cut_off(place)

    def is_away(self, rank: int) -> bool:
        """Return whether a rank's process does not answer now, although its connections are open."""
        return (loss := self._peers.lost(rank)) is not None and loss.status != "dead"
