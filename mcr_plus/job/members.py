"""The members of a job as a world begins: their processes, and the store for later decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mcr_plus.core.environment import agent_has_store, ranks_keep_their_own
from mcr_plus.core.job_store import JobStore
from mcr_plus.hosts.protocol import silence
from mcr_plus.membership.epoch_log import EpochLog
from mcr_plus.rendezvous.processes import Peers

if TYPE_CHECKING:
    from mcr_plus.engine.options import DispatchOptions
    from mcr_plus.rendezvous.world import World

_SILENT: Final = 30.0  # s; on overloaded hosts, agents have not run for more than two


def observed(world: World, options: DispatchOptions) -> Peers:
    """Return the processes of the job's ranks, watched as the options say; collective."""
    hosts, roster = len(set(world.hosts)), world.roster
    beats = {"auto": max(_SILENT, silence(hosts)), "off": None}
    return Peers(
        world.rank,
        world.hosts,
        world.store,
        world.timeout,
        stop_grace=options.stop_grace,
        heartbeat=beats[options.heartbeat] if isinstance(options.heartbeat, str) else options.heartbeat,
        shortens=options.heartbeat == "auto",
        secret=world.secret,
        processes=roster.members if roster is not None else (),
        rank_0_serves=not agent_has_store() or (roster is not None and roster.kept is not None),
    )


def first_roster(world: World, peers: Peers, *, native: bool) -> EpochLog:
    """Return the epoch log of a job's first epoch; collective.

    `native`: False if torch.distributed made the world, which then needs a store of its own for later epochs.
    """
    store, members, kept = world.store, peers.processes, world.kept
    assert store is not None
    if kept is None and native and ranks_keep_their_own(len({process.place for process in members})):
        from mcr_plus.rendezvous.key_replicas import open_keepers

        kept = open_keepers(store, world.rank, members, world.timeout)
    if kept is None:
        return EpochLog(JobStore(store), 0, members, world.rank)
    return EpochLog(JobStore(kept, world.secret, "members"), 0, members, world.rank, kept=kept)
