"""Wake sleeping peers from compiled code, by the protocol of `mcr_plus.waiting.futex`."""

from __future__ import annotations

from typing import Final

from mcr_plus.backends.shm.atomics import (
    clock,
    exchange,
    fence,
    futex_wake,
    load_acquire,
    sched_yield,
    store_release,
)
from mcr_plus.kernels.cpu import compiled
from mcr_plus.waiting.futex_memory import BYTES, LINE

_AWAY_NS: Final = 1_000_000  # a peer returns the core sooner; other work keeps it for a time slice


@compiled
def _answer(bells):  # type: ignore[no-untyped-def]
    """Wake the peers that have requested it."""
    wanted, first, lines = load_acquire(bells), load_acquire(bells + 8), load_acquire(bells + 16)
    asked = exchange(wanted, 0)
    for line in range(lines):
        at = first + line * LINE
        if (asked >> (8 * (line % BYTES))) & 0xFF and exchange(at, 0):
            futex_wake(at)


@compiled
def may_yield(bells):  # type: ignore[no-untyped-def]
    """Return whether a yield probably gives the core to a peer."""
    return bells == 0 or load_acquire(bells + 24) != 0


@compiled
def give_way(bells):  # type: ignore[no-untyped-def]
    """Yield. After a long loss of the core, `may_yield` is False until `WaitStrategy` checks the load."""
    before = clock()
    sched_yield()
    if bells and clock() - before > _AWAY_NS:
        store_release(bells + 24, 0)


@compiled
def ring(bells):  # type: ignore[no-untyped-def]
    """Wake waiting peers; called after storing a counter. `bells` is `Wakeups.table`."""
    if bells:
        fence()  # counter before request: a peer sets its request, checks the counter, then sleeps
        if load_acquire(load_acquire(bells)):
            _answer(bells)
