"""Keep the copies of codecs with `keeps_received` between calls, within a memory limit per group.

A payload names the version of the copy on which it is based. A rank without that version asks for all values,
when payload lengths are exchanged or at the beginning of the message. So ranks need not drop the same copies
at the same time, and each rank limits its own memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Final

import torch

from mcr_plus.core import streams as core_streams
from mcr_plus.core.units import format_size

_log = logging.getLogger("mcr_plus")
_SHARE: Final = 2  # copies may use 1 / _SHARE of the memory


@dataclass
class HeldValues:
    """Values of a part that both ends hold; `values` are real numbers, None if dropped."""

    values: torch.Tensor | None
    version: int
    digest: int
    is_whole: bool = True

    def drop(self) -> None:
        """Drop the values, but keep the version, because the next version must be higher."""
        self.values, self.is_whole = None, False


@dataclass(eq=False)
class Copy:
    """Parts sent and received by one operation, or by the messages of one peer and tag.

    `calls`: number of running calls that need the copy. `was_dropped`: True if the copy was dropped since the
    last call. `forget`: called when a copy is dropped whose version is no longer needed.
    """

    sent: dict[Hashable, HeldValues] = field(default_factory=dict)
    received: dict[Hashable, HeldValues] = field(default_factory=dict)
    calls: int = 0
    was_dropped: bool = False
    forget: Callable[[], object] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        both = (*self.sent.values(), *self.received.values())
        return sum(held.values.nbytes for held in both if held.values is not None)

    def drop(self) -> None:
        """Free the values."""
        self.was_dropped = True
        for held in (*self.sent.values(), *self.received.values()):
            held.drop()
        if self.forget is not None:
            self.forget()


class Copies:
    """Copies of a group in the order of their last use. Thread-safe.

    `what`: the group, for a warning. `ranks`: number of the job's ranks on this host, which share the memory.
    """

    def __init__(self, what: str = "the group", ranks: int = 1) -> None:
        self._what, self._ranks = what, ranks
        self._nbytes: dict[Copy, int] = {}
        self._total = 0
        self._lock = Lock()
        self._was_said = False

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self._total

    def begin(self, copy: Copy) -> bool:
        """Keep a copy until `end`; return True if the copy was dropped since its last call."""
        with self._lock:
            copy.calls += 1
            was, copy.was_dropped = copy.was_dropped, False
            return was

    def end(self, copy: Copy, most: int | None) -> None:
        """End a call; drop the least recently used copies while all copies take more than `most` bytes.

        This copy and copies needed by running calls are kept. `most`: None allows half of the host's memory
        divided by its ranks, or half of the memory of the values' GPU.
        """
        most = self._usual(copy) if most is None else most
        with self._lock:
            copy.calls -= 1
            self._total -= self._nbytes.pop(copy, 0)
            self._nbytes[copy] = copy.nbytes
            self._total += self._nbytes[copy]
            if self._total <= most:
                return
            for other in [each for each in self._nbytes if each is not copy and not each.calls]:
                other.drop()
                self._total -= self._nbytes.pop(other)
                if self._total <= most:
                    break
            was_said, self._was_said = self._was_said, True
        if not was_said:
            _log.warning(
                "codec delta: values kept for the tags of %s take more than %s (option keep); the least "
                "recently used are dropped, and sent in full at their next use (reported once)",
                self._what, format_size(most),
            )  # fmt: skip

    def _usual(self, copy: Copy) -> int:
        both = (*copy.sent.values(), *copy.received.values())
        device = next((held.values.device for held in both if held.values is not None), None)
        if device is None or device.type == "cpu":
            return memory_of_host() // (_SHARE * self._ranks)
        return core_streams.streams_of(device).memory() // _SHARE


@cache
def memory_of_host() -> int:
    """Return the bytes of the host's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
