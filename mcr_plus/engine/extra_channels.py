"""Additional channels of a group, separate from the channel of its ordinary operations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mcr_plus.backends.base import Channel, complete_channel

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcr_plus.backends.base import Backend
    from mcr_plus.core.group import Group
    from mcr_plus.rendezvous.world import World


def open_further(
    world: World,
    backend: Backend,
    group: Group,
    purpose: str,
    is_given_up: Callable[[], bool] = lambda: False,
) -> Channel:
    """Open another channel of a library; collective over the group's ranks.

    Each `purpose` gets its own channel. `is_given_up`: returns True once nobody waits for it any more.
    """
    of_purpose = replace(group, name=f"{group.name}/{purpose}")
    world.watch_store(of_purpose, is_given_up)
    world.opening.add(of_purpose.name)
    try:
        return complete_channel(backend.open(of_purpose))
    finally:
        world.leave_store(of_purpose.name)
        world.opening.discard(of_purpose.name)
