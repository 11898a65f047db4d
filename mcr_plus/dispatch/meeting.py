"""The last meeting of all ranks: nobody leaves while others still need it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mcr_plus.dispatch.peers import Peers
    from mcr_plus.interfaces import World

SHORT: Final = 5.0  # seconds
_LONGEST_NAP: Final = 0.02


def meet(
    world: World,
    what: str,
    peers: Peers | None = None,
    *,
    patience: float = SHORT,
    has_failed: Callable[[int], bool] = lambda _: False,
) -> bool:
    """Wait up to `patience` seconds until all ranks have called this; whether they have.

    With `peers`, ranks that have died or are stopped are not waited for; neither are those that have failed.
    """
    store, deadline = world.store, time.monotonic() + patience
    if store is None or world.size == 1:
        return True
    here, gone = ([f"{what}/{stage}/{rank}" for rank in range(world.size)] for stage in ("here", "gone"))
    others = [rank for rank in range(world.size) if rank != world.rank]

    def wait(keys: list[str]) -> bool:
        # Rank 0 may be the store's server, and a question to a stopped one is not answered, ever.
        if is_away(0):
            return False
        store.set(keys[world.rank], "1")
        nap = 0.0005
        while not is_away(0) and not store.check(keys):
            if time.monotonic() > deadline or any(map(will_not_come, others)):
                return store.check(keys)  # a rank that has left in good order has said so before
            nap = min(2 * nap, _LONGEST_NAP)
            time.sleep(nap)
        return not is_away(0)

    def is_away(rank: int) -> bool:
        return peers is not None and peers.status(rank) in ("dead", "stopped")

    def will_not_come(rank: int) -> bool:
        return has_failed(rank) or is_away(rank)

    try:
        met = wait(here)
        # The store's own server must outlive the last question put to it.
        if world.rank == 0:
            wait(gone)
        elif not is_away(0):
            store.set(gone[world.rank], "1")
    except RuntimeError:
        return False
    return met
