"""The last meeting of all ranks: nobody leaves while others still need it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mcr_plus.dispatch.peers import Peers
    from mcr_plus.interfaces import World

_LAST_WAIT: Final = 5.0  # seconds


def meet(world: World, what: str, peers: Peers | None = None) -> bool:
    """Wait, not for long, until all ranks have called this; whether they have.

    With `peers`, ranks that have died or are stopped are not waited for.
    """
    store, deadline = world.store, time.monotonic() + _LAST_WAIT
    if store is None or world.size == 1:
        return True
    here, gone = ([f"{what}/{stage}/{rank}" for rank in range(world.size)] for stage in ("here", "gone"))
    others = [rank for rank in range(world.size) if rank != world.rank]

    def wait(keys: list[str]) -> bool:
        store.set(keys[world.rank], "1")
        while not store.check(keys):
            missing = peers is not None and any(peers.status(rank) in ("dead", "stopped") for rank in others)
            if time.monotonic() > deadline or missing:
                return store.check(keys)  # a rank that has left in good order has said so before
            time.sleep(0.001)
        return True

    try:
        met = wait(here)
        # The store's own server must outlive the last question put to it.
        if world.rank == 0:
            wait(gone)
        else:
            store.set(gone[world.rank], "1")
    except RuntimeError:
        return False
    return met
