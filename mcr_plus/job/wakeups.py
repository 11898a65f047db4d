"""Setup of the shared memory through which ranks of a host wake each other."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcr_plus.core.mapped_memory import made, mapped
from mcr_plus.rendezvous.store import exchange
from mcr_plus.waiting.futex import Wakeups
from mcr_plus.waiting.futex_memory import LINE, SYSTEM_CALL

if TYPE_CHECKING:
    from mcr_plus.core.c10d import Store


def open_bells(store: Store | None, rank: int, hosts: Sequence[str], timeout: float) -> Wakeups:
    """Open the bells of this host; collective over the ranks of the job.

    If the ranks of a host cannot map the same memory, they sleep without bells, which is not an error.
    """
    ranks = [peer for peer, host in enumerate(hosts) if host == hosts[rank]]
    if store is None or len(set(hosts)) == len(hosts) or not SYSTEM_CALL or sys.byteorder != "little":
        return Wakeups(None, ranks, rank)
    size = -(-len(ranks) * LINE // mmap.PAGESIZE) * mmap.PAGESIZE
    memory, descriptor, place = made(size, "mcr_plus bells") if rank == ranks[0] else (None, None, "")
    try:
        places = exchange(store, rank, len(hosts), "bells/memory", place, timeout)
        if rank != ranks[0]:
            memory = mapped(places[ranks[0]], size)
        answers = exchange(store, rank, len(hosts), "bells/mapped", "yes" if memory else "no", timeout)
    finally:
        if descriptor is not None:  # all ranks have mapped it, or never will
            os.close(descriptor)
    usable = all(answers[peer] == "yes" for peer in ranks)
    return Wakeups(memory if usable else None, ranks, rank)
