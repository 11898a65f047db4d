"""Open the verification of a group's operations."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mcr_plus.backends.shm.backend import SharedMemoryChannel
from mcr_plus.core.mapped_memory import made, mapped
from mcr_plus.engine.extra_channels import open_further
from mcr_plus.kernels import checksum
from mcr_plus.kernels.compiling import preparing
from mcr_plus.reliability.verify import checked_kernels, row_kernels
from mcr_plus.reliability.verify.channel import VerifiedChannel
from mcr_plus.reliability.verify.checksum_table import row_words
from mcr_plus.reliability.verify.rows import LibraryRows, RowExchange, SharedRows, shared_bytes
from mcr_plus.reliability.verify.steps import VerifiedSteps
from mcr_plus.rendezvous.store import exchange

if TYPE_CHECKING:
    from mcr_plus.core.group import Group
    from mcr_plus.engine.engine import Engine
    from mcr_plus.engine.group_state import BackendChannel, GroupState
    from mcr_plus.engine.options import DispatchOptions
    from mcr_plus.rendezvous.world import World


def open_verification(
    world: World,
    engine: Engine,
    state: GroupState,
    channels: Mapping[str, BackendChannel],
    options: DispatchOptions,
) -> None:
    """Verify the operations of every library of a group; collective over its ranks.

    Operations on a stream are excluded: dispatch refuses to bind them.
    """
    group, every = state.group, options.verify
    slots = {name: slot for name, slot in channels.items() if not slot.backend.on_stream and name != "local"}
    if group.rank < 0 or group.size < 2:
        return
    with preparing("checksums"):
        checksum.prepare()
        row_kernels.prepare()
        if any(isinstance(slot.channel, SharedMemoryChannel) for slot in slots.values()):
            checked_kernels.prepare()
    for name, slot in slots.items():
        channel = open_further(world, slot.backend, group, f"verify-{name}")
        channel.votes = False  # ranks compare operations with their checksums
        steps = VerifiedSteps(slot.backend, channel)
        rows, close = _open_rows(world, engine, group, steps)
        slot.channel = VerifiedChannel(
            slot.channel, steps, group, world.store_of(group), engine, rows, every, close
        )
        engine.wrappers.append(slot.channel)


def _open_rows(
    world: World, engine: Engine, group: Group, steps: VerifiedSteps
) -> tuple[RowExchange, Callable[[], None]]:
    """Open the exchange of checksums, by shared memory if all ranks can map it; return it and `close`."""
    words = row_words(group.size)
    name = steps.backend.name
    by_library = LibraryRows(steps, group.name, group.size, words), lambda: None
    if world.hosts_of(group) > 1:
        return by_library
    size = shared_bytes(group.size, words)
    store, what = world.store_of(group), f"verify/{group.name}/{name}"
    memory, descriptor, place = made(size, "mcr_plus") if group.rank == 0 else (None, None, "")
    try:
        place = exchange(store, group.rank, group.size, f"{what}/memory", place, world.timeout, group=group)[
            0
        ]
        if memory is None and place:
            memory = mapped(place, size)
        has = exchange(
            store, group.rank, group.size, f"{what}/mapped", "y" * bool(memory), world.timeout, group=group
        )
    finally:
        if descriptor is not None:
            os.close(descriptor)
    if memory is None or not all(has):
        return by_library
    view = memoryview(memory)
    rows = SharedRows(view, group.rank, group.size, words, engine.ring)
    kept = memory

    def close() -> None:
        rows.close()
        view.release()
        kept.close()

    return rows, close
