"""The barrier at the end of a job: no rank exits while others still need it.

shutdown_barrier()    wait until all ranks have reached the same point
abort_barrier()       release the other ranks, because this rank's program has crashed
linger_for()          exit after the ranks that caused a crash, so that the launcher sees them first
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final

from mcr_plus.core.c10d import put
from mcr_plus.core.deadline import Deadline, until

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store
    from mcr_plus.rendezvous.processes import Peers
    from mcr_plus.rendezvous.world import World

SHORT: Final = 5.0  # s
_LONGEST_NAP: Final = 0.02
_CRASHED: Final = "crashed"
_LINGER: Final = 1.0  # s that a rank stays after the failure of another, for a clear message


def shutdown_barrier(
    world: World,
    what: str,
    peers: Peers | None = None,
    *,
    patience: float = SHORT,
    has_failed: Callable[[int], bool] = lambda _: False,
    notes: Collection[str] = (),
    then: Callable[[], None] = lambda: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    """Wait up to `patience` seconds until all ranks have called this; return whether they have.

    With `peers`, dead, stopped and failed ranks are not waited for, and once a rank has called
    `abort_barrier`, none are. `notes`: keys to set in the store before peers see this rank arrive. `then`:
    called if all ranks have arrived, while the store still answers. `meanwhile`: called repeatedly during the
    wait.
    """
    store, deadline = world.store, Deadline(patience)
    if store is None or world.size == 1:
        return True
    here, gone = ([f"{what}/{stage}/{rank}" for rank in range(world.size)] for stage in ("here", "gone"))
    others = [rank for rank in range(world.size) if rank != world.rank]

    def wait(keys: list[str]) -> bool:
        # Rank 0 may be the store's server, and a stopped server never answers.
        if is_away(0):
            return False
        _note(store, [*notes, keys[world.rank]])
        nap = 0.0005
        while not is_away(0) and not store.check(keys):
            if deadline.passed() or any(map(will_not_come, others)) or store.check([_CRASHED]):
                return store.check(keys)  # a rank that exits without an error has set its key before
            nap = min(2 * nap, _LONGEST_NAP)
            meanwhile()
            time.sleep(nap)
        return not is_away(0)

    def is_away(rank: int) -> bool:
        return peers is not None and peers.is_away(rank)

    def will_not_come(rank: int) -> bool:
        return has_failed(rank) or is_away(rank)

    try:
        if complete := wait(here):
            then()
        # The store's own server must outlive the last request to it.
        if world.rank == 0:
            wait(gone)
        elif not is_away(0):
            store.set(gone[world.rank], "1")
    except RuntimeError:
        return False
    return complete


def _note(store: Store, keys: Iterable[str]) -> None:
    for key in keys:
        store.set(key, "1")


def abort_barrier(world: World, peers: Peers) -> None:
    """Release the ranks that wait in a `shutdown_barrier`, which this rank will not reach."""
    with contextlib.suppress(RuntimeError):
        if world.store is not None and not peers.is_away(0):
            put(world.store, _CRASHED, b"1")


def linger_for(peers: Peers, ranks: Collection[int]) -> None:
    """Wait a moment until the processes of `ranks` have ended, if they are visible here."""
    until(lambda: all(peers.status(rank) != "running" for rank in ranks), Deadline(_LINGER), _LONGEST_NAP)
