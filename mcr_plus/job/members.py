"""The members of a job as a world begins: their processes, losses among them, and the store for decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mcr_plus.core.environment import agent_has_store, ranks_keep_their_own
from mcr_plus.core.job_store import JobStore
from mcr_plus.engine.options import DispatchOptions
from mcr_plus.errors import PeerLost, phrase_ranks
from mcr_plus.hosts.protocol import silence
from mcr_plus.membership.epoch_log import EpochLog
from mcr_plus.rendezvous.processes import Peers, Sight

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mcr_plus.config.schema import Config
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


class MemberWatch(Peers):
    """The processes of a world's members while the world is made, when no watchdog runs yet."""

    def __init__(self, roster: EpochLog, config: Config, sight: Sight | None = None) -> None:
        """`sight`: findings of the previous world's agents about members on other hosts."""
        options = config.options("dispatch")
        assert isinstance(options, DispatchOptions)
        members = roster.members
        places = tuple(process.place for process in members)
        grace = options.stop_grace
        super().__init__(roster.rank, places, None, 0.0, stop_grace=grace, processes=members, sight=sight)
        self.roster = roster


class EpochWatch(MemberWatch):
    """The processes of an epoch's members, and their decisions."""

    def error(self, ranks: Iterable[int] | None = None) -> PeerLost | None:  # noqa: ARG002 - about all of them
        """Return the error that ends a wait for a value from the members, if any."""
        if lost := self.states():
            seen = ", ".join(dict.fromkeys(lost.values()))
            text = f"{phrase_ranks(list(lost))} of epoch {self.roster.epoch}: {seen}"
            return PeerLost(text, list(lost), seen=seen)
        if self.roster.is_being_left:
            return PeerLost(self.given_up, seen="reported by another rank")
        return None

    @property
    def given_up(self) -> str:
        """Text for the case that another member has given the epoch up."""
        return f"a rank of epoch {self.roster.epoch} has seen the loss of another one"
