"""Open the second libraries of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mcr_plus.engine.channel_wrapper import second_of
from mcr_plus.engine.extra_channels import open_further
from mcr_plus.reliability.failover.channel import FailoverChannel

if TYPE_CHECKING:
    from mcr_plus.backends.base import Backend, Channel
    from mcr_plus.engine.engine import Engine
    from mcr_plus.engine.group_state import BackendChannel, GroupState
    from mcr_plus.engine.options import DispatchOptions
    from mcr_plus.rendezvous.world import World


def open_failover(
    world: World,
    engine: Engine,
    state: GroupState,
    channels: Mapping[str, BackendChannel],
    options: DispatchOptions,  # noqa: ARG001 - see `registry.WRAPPERS`
) -> None:
    """Give every library of a group a second library; collective over its ranks.

    Libraries with operations on a stream neither fail over nor take over.
    """
    group = state.group
    slots = {name: slot for name, slot in channels.items() if not slot.backend.on_stream and name != "local"}
    names = list(slots)
    if len(names) < 2 or group.size < 2:
        return

    store = world.store_of(group)
    for name, slot in slots.items():
        second = slots[second_of(names, name) or name].backend
        spare = open_further(world, second, group, f"for-{name}")
        own = slot.backend

        def reopen(number: int, is_given_up: Callable[[], bool], own: Backend = own) -> Channel:
            return open_further(world, own, group, f"{own.name}-again{number}", is_given_up)

        slot.channel = FailoverChannel(slot, second, spare, state, store, engine, reopen)
        engine.wrappers.append(slot.channel)
