"""The libraries of a job: its backends, disabled backends, channels of groups, also of closed ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress

from mcr_plus.backends import backend_class, backends_for, preferred_backends
from mcr_plus.backends.base import Backend, Channel, complete_channel
from mcr_plus.communicator.open_group import give_up, release_unused
from mcr_plus.config.schema import Config
from mcr_plus.core.collector import collector_paused
from mcr_plus.core.file_limit import descriptors_for
from mcr_plus.core.group import Group
from mcr_plus.engine.group_state import BackendChannel
from mcr_plus.engine.options import DispatchOptions
from mcr_plus.errors import BackendUnavailable, LaunchError
from mcr_plus.hierarchy.nodes import may_have_nodes
from mcr_plus.job.process import job
from mcr_plus.rendezvous.store import exchange
from mcr_plus.rendezvous.world import World

Key = tuple[str, tuple[int, ...]]
"""Name and ranks of a group."""


class Libraries:
    """The backends of one job.

    Attributes:
        classes: backends that the ranks have agreed on, in fallback order, and `local`.
        backends: an object of each backend that this job uses.
        disabled: rank → the libraries that it no longer calls, with reasons, as last exchanged.
        dropped: backends that the group of all ranks does not have.
    """

    def __init__(self, config: Config, world: World, classes: Mapping[str, type[Backend]]) -> None:
        self.classes = classes
        self.backends: dict[str, Backend] = {}
        self.disabled: dict[int, Mapping[str, str]] = {}
        self.dropped: frozenset[str] = frozenset()
        self._config = config
        self._world = world

    def open(self) -> None:
        """Create the backends; a single process needs no library, whatever is named."""
        for name, kind in self.classes.items():
            if self._world.size > 1 or name == "local":
                with collector_paused():
                    self.backends[name] = kind(self._world)

    @property
    def names(self) -> list[str]:
        """Return the backends that the group `world` has, in fallback order.

        In a single process that names none: all installed backends, with `local` last.
        """
        if self._world.size == 1 and self._config.backends is None:
            names = [name for name in preferred_backends() if name != "local"]
            return [*(name for name in names if backend_class(name).availability().available), "local"]
        return [
            name
            for name in self.classes
            if name not in self.dropped and (name != "local" or self._world.size == 1)
        ]

    def descriptors(self, size: int) -> int:
        """Return the file descriptors that a group of `size` ranks may take in each of its processes."""
        groups = 1 + 3 * may_have_nodes(self._config, self._world.hosts)
        if self._has_failover:
            groups *= 2  # each library takes over for another one, on a channel of its own
        if any(isinstance(each, DispatchOptions) and each.verify for each in self._config.all_options):
            groups *= 2  # verified operations have a channel of their own
        return groups * descriptors_for(self.classes, size) if size > 1 else 0

    @property
    def _has_failover(self) -> bool:
        options = self._config.options("dispatch")
        return isinstance(options, DispatchOptions) and options.failover

    def disabled_on(self, ranks: Sequence[int]) -> dict[str, str]:
        """Return the libraries that any of these ranks no longer calls, with reasons; equal on all ranks."""
        return {
            name: f"rank {rank}: {reason}"
            for rank in reversed(ranks)
            for name, reason in self.disabled.get(rank, {}).items()
        }

    def note_disabled(self, ranks: Sequence[int], disabled: Sequence[Mapping[str, str]]) -> None:
        """Store the disabled libraries that `ranks` have exchanged."""
        self.disabled.update(zip(ranks, disabled, strict=True))

    def open_channels(self, group: Group) -> tuple[dict[str, BackendChannel], dict[str, str]]:
        """Open a channel of every library that can serve a group; also return why others are left out.

        A library that turns out to be unusable for the group is left out if the configuration names no
        backends. Otherwise this raises `BackendUnavailable`, on all ranks of the group.
        """
        names = backends_for(self.backends, self._world, group)
        channels: dict[str, BackendChannel] = {}
        dropped = {name: reason for name, reason in self.disabled_on(group.ranks).items() if name in names}
        for name, reason in dropped.items():
            if (self._config.backends is not None and not self._has_failover) or len(names) == len(dropped):
                raise BackendUnavailable(f"backend {name}: {reason}")
        with ExitStack() as undo:
            undo.callback(release_unused, channels)
            for name in names:
                if name in dropped:
                    continue
                backend = self.backends[name]
                try:
                    channels[name] = BackendChannel(backend, complete_channel(backend.open(group)))
                except BackendUnavailable as error:  # raised on all ranks of the group alike
                    if self._config.backends is not None or len(names) == 1:
                        if channels:
                            self._wait_for_others(group)
                        raise
                    dropped[name] = str(error)
            undo.pop_all()
        return channels, dropped

    def _wait_for_others(self, group: Group) -> None:
        """Wait until all ranks of a group have reached the library that cannot serve the group.

        Ranks that are still connecting through another library would fail if it were closed here.
        """
        if group.size > 1 and self._world.store is not None:
            store = self._world.store_of(group)
            with suppress(LaunchError, RuntimeError):  # the original error is the one to raise
                exchange(store, group.rank, group.size, "unavailable", "", self._world.timeout, group=group)

    def close(self, clean: bool) -> None:
        """Close the backends; drop those that need no call at the end of the process."""
        for backend in self.backends.values():
            backend.close(clean)
            kind = type(backend)
            at_exit = kind.before_exit is not Backend.before_exit and not clean
            if kind.finalize is Backend.finalize and not at_exit:
                job.backends.pop(id(backend), None)


class IdleChannels:
    """Open channels of closed groups, whose libraries would wait for other ranks if closed by one rank alone.

    All ranks of a group close its channels together, once each of them has closed the group.
    """

    def __init__(self) -> None:
        self._channels: dict[Key, dict[str, Channel]] = {}

    def __len__(self) -> int:
        return len(self._channels)

    def add(self, group: Group, channels: Mapping[str, Channel]) -> None:
        """Take over channels, by library; no operation in flight uses them."""
        if channels:
            self._channels.setdefault((group.name, group.ranks), {}).update(channels)

    def groups_within(self, ranks: Collection[int]) -> dict[str, list[int]]:
        """Return the names and ranks of the groups whose ranks are all among these."""
        return {name: list(members) for name, members in self._channels if set(members) <= set(ranks)}

    def close(self, group: Key, disabled: Collection[str]) -> None:
        """Close the channels of one group, as all its ranks do now, except for `disabled` libraries."""
        for library, channel in self._channels.pop(group, {}).items():
            if library not in disabled:
                channel.close()

    def closable(self, disabled: Collection[str]) -> list[tuple[str, tuple[int, ...], str]]:
        """Return group, ranks and library of each channel to close after its library failed elsewhere."""
        return [
            (name, ranks, library)
            for (name, ranks), channels in self._channels.items()
            for library, channel in channels.items()
            if channel.outlives_library and library not in disabled
        ]

    def close_common(
        self, rank: int, closable: Sequence[Collection[tuple[str, tuple[int, ...], str]]]
    ) -> None:
        """Close the channels that are `closable` on all their ranks, which call this now; others stay open.

        `rank`: this process's rank; `closable`: closable channels by rank of the job.
        """
        for channel in sorted(closable[rank]):
            name, ranks, library = channel
            if all(channel in closable[member] for member in ranks):
                self._channels[name, ranks][library].close()

    def give_up(self) -> None:
        """Free the reserved resources of all remaining channels."""
        give_up(channel for channels in self._channels.values() for channel in channels.values())
