"""The job of this process, after its ranks have connected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mcr_plus.core.environment import usable_cores
from mcr_plus.core.group import Group
from mcr_plus.core.job_store import GroupStore, JobStore
from mcr_plus.errors import PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mcr_plus.membership.epoch_log import EpochLog
    from mcr_plus.rendezvous.key_replicas import ReplicatedKeys
    from mcr_plus.waiting.futex import Wakeups


@dataclass(frozen=True)
class World:
    """Description of the job for backends and stages.

    `store`: the job's own key-value store (a `torch.distributed.Store`); None for a single process and while
    explaining. `hosts`: host of each global rank. `libraries`: library of each backend on rank 0 (`Open MPI
    5.0.11`), where known. `cores`: number of cores for all ranks of this host together, since launchers bind
    each rank to its own cores. `secret`: shared by the ranks only; empty if there is none. `bells`: wake up
    sleeping ranks of this host; compiled code that moves data for a peer rings them itself. `stores`: see
    `store_of`. `opening`: names in `stores` that are not groups of the program. `roster`: epoch log of a
    world that has replaced another one. `kept`: the keepers that the ranks already have, under a new name;
    None for none. `lost`: returns the error if one of some ranks is known to be lost by now.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    timeout: float
    store: JobStore | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    cores: int = field(default_factory=lambda: len(usable_cores()))
    secret: bytes = field(default=b"", repr=False)
    bells: Wakeups | None = None
    stores: dict[str, GroupStore] = field(default_factory=dict, repr=False)
    opening: set[str] = field(default_factory=set, repr=False)
    roster: EpochLog | None = field(default=None, repr=False)
    kept: ReplicatedKeys | None = field(default=None, repr=False)
    lost: Callable[[Sequence[int]], PeerLost | None] | None = field(default=None, repr=False)

    def store_of(self, group: Group) -> GroupStore:
        """Return the store for the data of `group`; its keys are removed when all its ranks have left it.

        Only for members of groups of several ranks, which have a store. A wait for a value ends when a rank
        of the group is lost.
        """
        if group.name not in self.stores:
            self.watch_store(group)
        return self.stores[group.name]

    def watch_store(self, group: Group, is_given_up: Callable[[], bool] = lambda: False) -> None:
        """Create the store for a group; its waits also end once `is_given_up` returns true."""
        assert self.store is not None
        store, lost = self.store, self.lost

        def error() -> PeerLost | None:
            if is_given_up():
                return PeerLost(f"group '{group.name}' is no longer being opened", [], seen="given up")
            return None if lost is None else lost(group.ranks)

        if lost is not None:
            store = JobStore(store, timeout=self.timeout, lost=error)
        self.stores[group.name] = GroupStore(store, group)

    def leave_store(self, name: str) -> None:
        """Drop the keys of a group in the store, once its other ranks do so too."""
        store = self.stores.pop(name, None)
        if store is not None:
            store.leave()

    @property
    def oversubscribed(self) -> bool:
        """True if this host has more ranks than cores for them."""
        return self.hosts.count(self.hosts[self.rank]) > self.cores

    def hosts_of(self, group: Group) -> int:
        """Return the number of hosts of a group's ranks."""
        return len({self.hosts[rank] for rank in group.ranks})

    @property
    def single_host(self) -> bool:
        """True if all ranks share a host."""
        return len(set(self.hosts)) <= 1
