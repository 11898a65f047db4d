"""Channels of closed groups that all ranks must close together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcr_plus.communicator.open_group import give_up

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mcr_plus.backends.base import Channel
    from mcr_plus.core.group import Group

Key = tuple[str, tuple[int, ...]]
"""Name and ranks of a group."""


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
