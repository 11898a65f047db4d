"""What codecs with `keeps_received` hold between calls, within a number of bytes for each group.

A copy that has been dropped costs its next call the length of all values and nothing else: payloads name the
version that they follow, and lengths of payloads, or the beginning of a message, ask for all values. So ranks
need not drop the same ones at the same time, and each looks at its own memory.
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
_SHARE: Final = 2  # of the host's memory that copies may take, its inverse


@dataclass
class HeldValues:
    """What both ends of a part hold; `values`: real, None if they have been dropped."""

    values: torch.Tensor | None
    version: int
    digest: int
    is_whole: bool = True

    def drop(self) -> None:
        """Keep the version alone, above which the next one has to be."""
        self.values, self.is_whole = None, False


@dataclass(eq=False)
class Copy:
    """The parts that one operation, or the messages of one peer and tag, has sent and received.

    `calls`: in which it is needed at present; `was_dropped`: since the last of them. `forget`: called when it
    is dropped, if nothing has to be known of it then.
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
    """The copies of a group in the order of their last use. Thread-safe.

    `what`: the group, for a warning. `ranks`: of the job on this host, which share its memory.
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
        """Keep a copy until `end`; returns whether it has been dropped since its last call."""
        with self._lock:
            copy.calls += 1
            was, copy.was_dropped = copy.was_dropped, False
            return was

    def end(self, copy: Copy, most: int | None) -> None:
        """A call has ended: drop those that were used least recently while all have more than `most` bytes.

        Neither this one nor those that calls need. `most`: None for half of the host's memory over its ranks,
        or half of the memory of the GPU on which the values are.
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
                "codec delta: what the tags of %s have brought takes more than %s (option keep), so what was "
                "used least recently is dropped, and sent whole when it is used again (reported once)",
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
    """Bytes of the host's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
