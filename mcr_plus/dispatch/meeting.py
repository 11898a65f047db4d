"""The last meeting of all ranks: nobody leaves while others still need it.

meet()            wait for all ranks to come to the same point
call_off()        say that this rank's program has crashed: there is nothing to wait for any more
let_go_first()    let the ranks leave that caused a crash, so that the launcher sees them first
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final

from mcr_plus.c10d import put

if TYPE_CHECKING:
    from mcr_plus.c10d import Store
    from mcr_plus.dispatch.peers import Peers
    from mcr_plus.interfaces import World

SHORT: Final = 5.0  # seconds
_LONGEST_NAP: Final = 0.02
_CRASHED: Final = "crashed"
_LINGER: Final = 1.0  # seconds that a victim stays for the sake of a clear message


def meet(
    world: World,
    what: str,
    peers: Peers | None = None,
    *,
    patience: float = SHORT,
    has_failed: Callable[[int], bool] = lambda _: False,
    notes: Collection[str] = (),
    then: Callable[[], None] = lambda: None,
) -> bool:
    """Wait up to `patience` seconds until all ranks have called this; whether they have.

    With `peers`, ranks that have died or are stopped are not waited for; neither are those that have failed,
    nor anybody once a rank has called it off. `notes` are keys that are set in the store before others see
    this rank there, and `then` is called if all have met, while the store still answers.
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
        _note(store, [*notes, keys[world.rank]])
        nap = 0.0005
        while not is_away(0) and not store.check(keys):
            late = time.monotonic() > deadline
            if late or any(map(will_not_come, others)) or store.check([_CRASHED]):
                return store.check(keys)  # a rank that has left in good order has said so before
            nap = min(2 * nap, _LONGEST_NAP)
            time.sleep(nap)
        return not is_away(0)

    def is_away(rank: int) -> bool:
        return peers is not None and peers.status(rank) in ("dead", "stopped")

    def will_not_come(rank: int) -> bool:
        return has_failed(rank) or is_away(rank)

    try:
        if met := wait(here):
            then()
        # The store's own server must outlive the last question put to it.
        if world.rank == 0:
            wait(gone)
        elif not is_away(0):
            store.set(gone[world.rank], "1")
    except RuntimeError:
        return False
    return met


def _note(store: Store, keys: Iterable[str]) -> None:
    for key in keys:
        store.set(key, "1")


def call_off(world: World, peers: Peers) -> None:
    """Tell all ranks that this one will come to no meeting."""
    with contextlib.suppress(RuntimeError):
        if world.store is not None and peers.status(0) not in ("dead", "stopped"):
            put(world.store, _CRASHED, b"1")


def let_go_first(peers: Peers, ranks: Collection[int]) -> None:
    """Wait a moment until the processes of `ranks` have ended, where this can be seen from here."""
    deadline = time.monotonic() + _LINGER
    while any(peers.status(rank) == "running" for rank in ranks) and time.monotonic() < deadline:
        time.sleep(_LONGEST_NAP)
