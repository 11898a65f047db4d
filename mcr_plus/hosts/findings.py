"""Findings of a host's agent about ranks, in memory that the ranks of the host have mapped."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable, Mapping
from typing import Final

from mcr_plus.hosts.protocol import STATES, RankFinding

_HEADER: Final = 8  # words; the first is the time of the agent's last check, in ns of the monotonic clock
_LONGEST: Final = (1 << 28) - 1  # ms
_FRESH: Final = 2.0  # s after which findings of an agent that no longer runs do not count


class Findings:
    """Two words per rank of the job: its state, written by the agent, and a mark that it has left.

    It also holds, for the lowest rank of each host, the agent's knowledge of that host's clock.

    Attributes:
        addresses: addresses at which this host meets the others.
        requests: address at which the agent takes requests for dumps of all other hosts.
    """

    def __init__(
        self, memory: mmap.mmap, ranks: int, addresses: Iterable[str] = (), requests: str = ""
    ) -> None:
        self.addresses = frozenset(addresses)
        self.requests = requests
        self._ranks = ranks
        self._memory: mmap.mmap | None = memory
        self._words = memoryview(memory).cast("Q")
        self._clocks = memoryview(memory).cast("d")

    @staticmethod
    def size(ranks: int) -> int:
        """Return the bytes of the memory in a job of `ranks` ranks."""
        return -(-8 * (_HEADER + 3 * ranks) // mmap.PAGESIZE) * mmap.PAGESIZE

    def publish(self, found: Iterable[tuple[int, RankFinding]]) -> None:
        """Write the findings about ranks. For the agent."""
        for rank, (state, age, most) in found:
            # One aligned store, so that a reader never sees the state without its age.
            self._words[_HEADER + rank] = STATES.index(state) | _ms(age) << 8 | _ms(most) << 36
        self._words[0] = time.monotonic_ns()

    def publish_clocks(self, ahead: Mapping[int, float]) -> None:
        """Write `Heartbeat.ahead`. For the agent."""
        for rank, seconds in ahead.items():
            self._clocks[_HEADER + 2 * self._ranks + rank] = seconds

    def ahead(self, rank: int) -> float | None:
        """Return the most seconds by which this host's clock is ahead of another host's; None if unknown.

        `rank`: the lowest rank of that host.
        """
        if self._memory is None:
            return None
        return self._clocks[_HEADER + 2 * self._ranks + rank] or None  # 0: never written

    def of(self, rank: int) -> RankFinding:
        """Return the finding for a rank of another host; `unknown` if no agent has checked lately."""
        if self._memory is None or time.monotonic_ns() - self._words[0] > _FRESH * 1e9:
            return RankFinding("unknown")
        return self.last(rank)

    @property
    def looked(self) -> float:
        """Return the time of the agent's last check, by the monotonic clock."""
        return self._words[0] / 1e9 if self._memory is not None else 0.0

    def last(self, rank: int) -> RankFinding:
        """Return the agent's last finding for a rank, whatever its age."""
        word = self._words[_HEADER + rank]
        return RankFinding(STATES[word & 0xFF], (word >> 8 & _LONGEST) / 1e3, (word >> 36) / 1e3)

    def leave(self, rank: int) -> None:
        """Note that a rank of this host ends in good order: its end is not a death."""
        if self._memory is not None:
            self._words[_HEADER + self._ranks + rank] = 1

    def has_left(self, rank: int) -> bool:
        """Return whether a rank of this host has ended in good order."""
        return bool(self._words[_HEADER + self._ranks + rank])

    def close(self) -> None:
        """Unmap the memory; every rank is `unknown` afterwards."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._words.release()
            self._clocks.release()
            memory.close()


def _ms(seconds: float) -> int:
    return min(max(0, round(seconds * 1e3)), _LONGEST)
