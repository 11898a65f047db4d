"""Ranks that arrive in `init`, and signs that one of them will not, before they know each other.

A rank that has arrived publishes its process, so that ranks which share its /proc see its death or stop.
Ranks of other hosts have connections for that (`rendezvous.init_connections`). If a rank has not arrived, the
supervisor of `mcr-plus run --min-ranks` may note in the job's store that it has ended for good.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

from mcr_plus.core.c10d import PrefixStore, Store
from mcr_plus.core.environment import agent_has_store, host_name, job_secret, min_ranks
from mcr_plus.core.job_store import JobStore
from mcr_plus.core.proc import Stop, state_of
from mcr_plus.errors import PeerLost, phrase_ranks
from mcr_plus.membership.epoch_log import TAKES_IN, TRAINING
from mcr_plus.rendezvous.identity import DIED, STOPPED, is_visible, own_process
from mcr_plus.rendezvous.init_connections import InitConnections

if TYPE_CHECKING:
    from mcr_plus.membership.rules import Process

PREFIX: Final = "mcr_plus"
"""Prefix of the ranks' keys in the launcher's store."""
NAME_OF_JOB: Final = "job"
"""Key with the name of the part of a job that takes newcomers in."""
_SUPERVISOR: Final = "supervisor"  # name under which its values are signed
STOPPED_FOR: Final = 0.5
"""Default time in s after which the rank of a stopped process counts as lost."""
SLACK: Final = 10.0
"""Seconds that rank 0's verdict on an exchange may take to arrive."""


class JobArrivals:
    """The ranks of a job that is about to begin, as one of them sees the others.

    Attributes:
        own: this process.
        processes: processes of the ranks that are known here to have arrived, by rank.
        presence: the connections with ranks of other hosts.
    """

    def __init__(
        self, rank: int, size: int, launchers: Store | None = None, stopped: float = STOPPED_FOR
    ) -> None:
        """`launchers`: the store in which a supervisor notes the ends of ranks, if the job has one.

        `stopped`: seconds for which a process must be stopped to count as lost; may be infinite.
        """
        self.own = own_process(host_name(), rank)
        self.processes: dict[int, Process] = {}
        self.presence = InitConnections(stopped)
        self._grace = stopped
        self._stops: dict[int, Stop] = {}  # stopped ranks of this host
        self._others = [each for each in range(size) if each != rank]
        secret = job_secret()
        has_supervisor = bool(secret) and agent_has_store() and min_ranks() is not None
        self._records = (
            JobStore(launchers, secret, _SUPERVISOR) if launchers is not None and has_supervisor else None
        )

    def forget_restarted(self) -> list[int]:
        """Forget dead ranks that a supervisor restarts; return those that had arrived."""
        if self._records is None:
            return []
        ended = self._ended()
        lost = self._lost()
        found = [rank for rank in lost if rank not in ended and lost[rank] != STOPPED]
        for rank in found:
            self.presence.forget(rank)
        return [rank for rank in found if self.processes.pop(rank, None) is not None]

    def error(self) -> PeerLost | None:
        """Return the error of a wait for other ranks, if one of them is lost."""
        lost = self._lost() | self._ended()
        if not lost:
            return None
        ranks = sorted(lost)
        seen = "; ".join(dict.fromkeys(lost[rank] for rank in ranks))
        return PeerLost(f"{phrase_ranks(ranks)} of the job: {seen}", ranks, seen=seen)

    def _lost(self) -> dict[int, str]:
        """Return the ranks seen to be lost, and the evidence for each."""
        here = {rank: each for rank, each in self.processes.items() if is_visible(self.own, each)}
        states = {rank: state_of(each.pid, each.started) for rank, each in here.items()}
        now = time.monotonic()
        self._stops = {
            rank: self._stops.get(rank) or Stop(self._grace, now)
            for rank, state in states.items()
            if state == "stopped"
        }
        found = {rank: seen for rank, seen in self.presence.lost().items() if rank not in here}
        found |= {rank: STOPPED for rank, stop in self._stops.items() if stop.is_certain(now)}
        return found | {rank: DIED for rank, state in states.items() if state == "dead"}

    def _ended(self) -> dict[int, str]:
        records = self._records
        if records is None:
            return {}
        return {
            rank: records.get(_key(rank)).decode() for rank in self._others if records.check([_key(rank)])
        }


def have_met(store: Store) -> bool:
    """Return whether the ranks of a job have found each other; `store`: the launcher's, without a prefix."""
    return PrefixStore(PREFIX, store).check([NAME_OF_JOB])


def have_trained(store: Store) -> bool:
    """Return whether a rank has reached `mcr.elastic`, or made another world, after `have_met`."""
    return _part_of_job(store).check([TRAINING])


def takes_in(store: Store) -> bool:
    """Return whether a rank takes in restarted processes, after `have_met`."""
    return _part_of_job(store).check([TAKES_IN])


def _part_of_job(store: Store) -> Store:
    part = PrefixStore(PREFIX, store)
    return PrefixStore(part.get(NAME_OF_JOB).decode(), part)


def note_end(store: Store, rank: int, how: str) -> None:
    """Note in a launcher's store, for ranks in `init`, that a rank has ended and will not be restarted."""
    if secret := job_secret():
        JobStore(PrefixStore(PREFIX, store), secret, _SUPERVISOR).set(_key(rank), how)


def loss_as_text(loss: PeerLost) -> str:
    """Return the text with which rank 0 reports a loss to the other ranks."""
    return json.dumps({"lost": [str(loss), loss.ranks, loss.seen]})


def raise_loss(result: dict[str, Any]) -> None:
    """Raise the loss in a text of `loss_as_text`, if it reports one."""
    if "lost" in result:
        text, ranks, seen = result["lost"]
        raise PeerLost(text, ranks, seen=seen)


def _key(rank: int) -> str:
    return f"ended/{rank}"
