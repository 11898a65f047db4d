"""Opening the second libraries of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mcr_plus.backends.base import Channel, complete_channel
from mcr_plus.dispatch.failover.channel import FailoverChannel
from mcr_plus.dispatch.failover.rules import second_of

if TYPE_CHECKING:
    from mcr_plus.backends.base import Backend
    from mcr_plus.dispatch.engine import Engine
    from mcr_plus.dispatch.group_state import BackendChannel, GroupState
    from mcr_plus.rendezvous.world import World


def open_failover(
    world: World, engine: Engine, state: GroupState, channels: Mapping[str, BackendChannel]
) -> None:
    """Give every library of a group a second one; collective over its ranks.

    Libraries whose operations run on a stream neither fail over nor take over.
    """
    group = state.group
    slots = {name: slot for name, slot in channels.items() if not slot.backend.on_stream and name != "local"}
    names = list(slots)
    if len(names) < 2 or group.size < 2:
        return

    def opened(backend: Backend, purpose: str, is_given_up: Callable[[], bool] = lambda: False) -> Channel:
        of_purpose = replace(group, name=f"{group.name}/{purpose}")
        world.watch_store(of_purpose, is_given_up)
        world.opening.add(of_purpose.name)
        try:
            return complete_channel(backend.open(of_purpose))
        finally:
            world.leave_store(of_purpose.name)
            world.opening.discard(of_purpose.name)

    store = world.store_of(group)
    for name, slot in slots.items():
        second = slots[second_of(names, name) or name].backend
        spare = opened(second, f"for-{name}")
        own = slot.backend

        def reopen(number: int, is_given_up: Callable[[], bool], own: Backend = own) -> Channel:
            return opened(own, f"{own.name}-again{number}", is_given_up)

        slot.channel = FailoverChannel(slot, second, spare, state, store, engine, reopen)
        engine.failovers.append(slot.channel)
