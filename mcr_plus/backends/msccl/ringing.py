"""Waking peers that sleep, from compiled code: what `mcr_plus.dispatch.bells` describes."""

from __future__ import annotations

from typing import Final

from mcr_plus.backends.msccl.atomics import (
    clock,
    exchange,
    fence,
    futex_wake,
    load_acquire,
    sched_yield,
    store_release,
)
from mcr_plus.dispatch.bells import BYTES, LINE
from mcr_plus.kernels.cpu import compiled

_AWAY_NS: Final = 1_000_000  # a peer that is waited for takes less, other work takes its time slice


@compiled
def _answer(bells):  # type: ignore[no-untyped-def]
    """Wake those who have asked for it."""
    wanted, first, lines = load_acquire(bells), load_acquire(bells + 8), load_acquire(bells + 16)
    asked = exchange(wanted, 0)
    for line in range(lines):
        at = first + line * LINE
        if (asked >> (8 * (line % BYTES))) & 0xFF and exchange(at, 0):
            futex_wake(at)


@compiled
def may_yield(bells):  # type: ignore[no-untyped-def]
    """Whether the core goes to a peer if it is given away, as far as is known."""
    return bells == 0 or load_acquire(bells + 24) != 0


@compiled
def give_way(bells):  # type: ignore[no-untyped-def]
    """Yield. If the core was away for long, there are no more yields before `Waiting` has looked at why."""
    before = clock()
    sched_yield()
    if bells and clock() - before > _AWAY_NS:
        store_release(bells + 24, 0)


@compiled
def ring(bells):  # type: ignore[no-untyped-def]
    """To be called after a counter that peers may wait for has been stored; `bells` is `Bells.table`."""
    if bells:
        fence()  # the counter is visible before the look: a peer asks first, then looks at it, then sleeps
        if load_acquire(load_acquire(bells)):
            _answer(bells)
