"""Bells: a rank wakes a sleeping peer on its host immediately.

The ranks of a host share a memory mapping with a line for each rank. A line has a word (a futex) that is 1
while the rank sleeps, and eight bytes in which peers request to be woken. Before it sleeps, a rank writes 1
into its own word, and into its byte in the lines of the peers for which it waits. It polls once more, and
then sleeps while its word is 1, for a bounded time. A rank that has made progress reads the bytes of its own
line, which takes one load from its own cache while no peer sleeps.

Some rings are spurious, because a byte stays set until it is answered. Without a ring, a rank sleeps only for
its bounded time, so deadlines and dead peers are detected without bells too.

Ranks of one host whose numbers are equal modulo eight share a byte, and are woken together.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from mcr_plus.waiting.futex_memory import BYTES, EVERYBODY, LINE, SYSTEM_CALL, WAIT, WAKE, WANTED

_KNOWN: Final = 64  # sets of ranks with cached positions


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@lru_cache(maxsize=1)
def _system_call() -> Any:
    function = ctypes.CDLL(None, use_errno=True).syscall  # releases the GIL
    function.restype = ctypes.c_long
    return function


class Wakeups:
    """The lines of the ranks on this host, as used by one rank.

    Attributes:
        wanted: one word, nonzero while a peer requests to be woken by this rank.
        table: address of a table for compiled code: the addresses of `wanted` and of the first line, the
            number of lines, and a flag (waits are calm); 0 without bells.
    """

    def __init__(self, memory: mmap.mmap | None, ranks: Sequence[int], rank: int) -> None:
        """Map the lines. `ranks`: the job's ranks on this host, in order. `memory`: None for no bells."""
        self._memory = memory
        self._ranks = tuple(ranks)
        self._me = me = self._ranks.index(rank)
        self._known: dict[tuple[int, ...], list[int]] = {}  # results of `_places`
        self.table = 0
        if memory is None:
            self.wanted = memoryview(bytearray(BYTES)).cast("Q")
            return
        view = memoryview(memory)
        self._words = view.cast("Q")
        self._flags = view
        own = me * LINE
        self.wanted = view[own + WANTED : own + WANTED + BYTES].cast("Q")
        self._anchor = ctypes.c_char.from_buffer(memory)
        self._base = ctypes.addressof(self._anchor)
        self._table = array("q", [self._base + own + WANTED, self._base, len(self._ranks), 1])
        self.table = self._table.buffer_info()[0]

    def __bool__(self) -> bool:
        return self._memory is not None

    def set_calm(self, calm: bool) -> None:
        """Set a flag for compiled code: waits are calm, so a yield does not lose the core to other work."""
        if self._memory is not None:
            self._table[3] = calm

    def arm(self, ranks: tuple[int, ...]) -> None:
        """Request a wake-up from the ranks in `ranks` that are on this host, before the last poll."""
        self._words[self._me * LINE // 8] = 1
        flags = self._flags
        for place in self._places(ranks):
            flags[place] = 1

    def _places(self, ranks: tuple[int, ...]) -> list[int]:
        """Return the positions of this rank's byte in the lines of `ranks`."""
        places = self._known.get(ranks)
        if places is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            places = self._known[ranks] = [
                line * LINE + WANTED + self._me % BYTES
                for line, rank in enumerate(self._ranks)
                if rank in ranks and line != self._me
            ]
        return places

    def asleep(self) -> int:
        """Return the number of ranks that sleep, or are about to."""
        return sum(self._words[: len(self._ranks) * LINE // 8 : LINE // 8])

    def sleep(self, seconds: float) -> None:
        """Sleep until a peer rings, for at most `seconds`; return at once if a peer has rung since `arm`."""
        if not SYSTEM_CALL:
            time.sleep(seconds)
            return
        whole = int(seconds)
        limit = _TimeSpec(whole, int((seconds - whole) * 1e9))
        address = self._base + self._me * LINE
        _system_call()(
            SYSTEM_CALL, ctypes.c_void_p(address), WAIT, 1, ctypes.byref(limit), None, 0
        )  # a signal also ends the sleep, which is harmless

    def ring(self) -> None:
        """Wake the ranks that wait for this rank; call it after progress if `wanted[0]` is set."""
        own = self._me * LINE + WANTED
        for byte in range(BYTES):
            if self._flags[own + byte]:
                self._flags[own + byte] = 0
                for line in range(byte, len(self._ranks), BYTES):
                    self._wake(line)

    def close(self) -> None:
        """Unmap the memory; no sleep or ring may follow."""
        memory, self._memory, self.table = self._memory, None, 0
        if memory is not None:
            for view in (self.wanted, self._words, self._flags):
                view.release()
            del self._anchor
            memory.close()

    def ring_own(self) -> None:
        """Wake other threads of this rank."""
        if self._memory is not None:
            self._wake(self._me)

    def _wake(self, line: int) -> None:
        if self._words[line * LINE // 8]:
            self._words[line * LINE // 8] = 0
            address = ctypes.c_void_p(self._base + line * LINE)
            _system_call()(SYSTEM_CALL, address, WAKE, EVERYBODY, None, None, 0)
