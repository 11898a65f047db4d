"""Sends and receives through gloo: a header before each message, and threads that detect completion."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, Literal

import torch

from mcr_plus.backends.base import ReceivePoll
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import dtype_name
from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import OrderMismatch

# A header: number of the message between two ranks under a tag, bytes, dtype, description.
_HEADER: Final = struct.Struct("<QQ16s192s")
SLOTS: Final = 2**6  # gloo's tags per tag of ours: one for headers, the others for messages in turn
FIRST_FREE: Final = 2**24 * SLOTS
"""The first of gloo's tags, of 31 bits, that are not used for messages, as ours are below 2²⁴."""
LONGEST: Final = timedelta(days=1000)
"""For messages, which may wait for a rank that comes late: deadlines are those of operations, and gloo closes
all connections of a group when a wait expires."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as flat bytes, as gloo can move every dtype."""
    # Not reshape(-1): a contiguous tensor of one element may have any stride, which `view` refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Watchers:
    """Threads that each block on one gloo work; idle ones are reused.

    gloo's sends and receives cannot be polled, and a wait with a timeout closes the connection when it
    expires. The data moves without these threads, which only detect completion.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Callable[[], None]]] = []

    def run(self, task: Callable[[], None]) -> None:
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            # A daemon, so that a work that never ends does not keep the process alive.
            Thread(target=self._work, args=(inbox,), name="mcr-gloo-watch", daemon=True).start()
        inbox.put(task)

    def _work(self, inbox: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            inbox.get()()
            self._idle.append(inbox)

    def abandon(self) -> None:
        """In a forked child, which does not have the threads."""
        self._idle.clear()


watchers: Final = _Watchers()
os.register_at_fork(after_in_child=watchers.abandon)


class _Watched:
    """The poll of a send or receive. The first poll starts the watching thread."""

    def __init__(self, running: set[object]) -> None:
        self._state: Literal["new", "watched", "done"] = "new"
        self._error: Exception | None = None
        self._running = running
        running.add(self)

    def __call__(self) -> bool:
        if self._state == "new":
            self._state = "watched"
            watchers.run(self._watch)
        if self._state != "done":
            return False
        if self._error is not None:
            raise self._error
        return True

    def _watch(self) -> None:
        try:
            self._finish()
        except Exception as error:
            self._error = error
        self._running.discard(self)
        self._state = "done"

    def _finish(self) -> None:
        raise NotImplementedError


class WatchedSend(_Watched):
    """The poll of a message and of the header sent before it."""

    def __init__(self, works: list[Any], running: set[object]) -> None:
        super().__init__(running)
        self._works = works

    def _finish(self) -> None:
        for work in self._works:
            work.wait(LONGEST)


class WatchedReceive(_Watched, ReceivePoll):
    """Receives the header first: gloo accepts any dtype, and aborts if a message is too long."""

    def __init__(
        self, pg: Any, group: Group, signature: Signature, message: Message, running: set[object]
    ) -> None:
        super().__init__(running)
        self._pg: Any = pg
        self._group = group
        self._signature = signature
        self._target = message.outputs[0]
        self._tag = message.match_tag
        self._header = torch.empty(_HEADER.size, dtype=torch.uint8, device="cpu")
        header, slot = [self._header], self._tag * SLOTS
        if message.peer is None:
            self._work = pg.recv_anysource(header, slot)
        else:
            self.source = message.peer
            self._work = pg.recv(header, message.peer, slot)
        self()  # the message must be received even without polls

    def _finish(self) -> None:
        pg, self._pg = self._pg, None  # a handle kept by the program must not keep gloo's group alive
        self._work.wait(LONGEST)
        self.arriving = True  # the header is there
        if self.source is None:
            self.source = self._work._source_rank()
        number, nbytes, dtype, text = _HEADER.unpack(self._header.numpy().tobytes())
        target, group = self._target, self._group
        if (nbytes, dtype) != (target.nbytes, _dtype_text(target)):
            raise OrderMismatch(
                f"message #{number} with tag {self._tag} in group '{group.name}': rank {self.source} issued "
                f"{_text(text)} ({nbytes} bytes); rank {group.rank} issued {self._signature.describe()} "
                f"({target.nbytes} bytes)"
            )
        if nbytes:
            pg.recv([bytes_of(target)], self.source, slot_of(self._tag, number)).wait(LONGEST)


def slot_of(tag: int, number: int) -> int:
    """Return gloo's tag of message `number`; receives may read their headers in any order."""
    return tag * SLOTS + 1 + number % (SLOTS - 1)


def header_of(signature: Signature, value: torch.Tensor, number: int) -> torch.Tensor:
    """Return the header of message `number`, which has the data `value`."""
    text = signature.describe().encode()[:192]
    return torch.frombuffer(
        bytearray(_HEADER.pack(number, value.nbytes, _dtype_text(value), text)), dtype=torch.uint8
    )


def _dtype_text(tensor: torch.Tensor) -> bytes:
    return dtype_name(tensor.dtype).encode().ljust(16, b"\0")


def _text(record: bytes) -> str:
    return record.rstrip(b"\0").decode(errors="replace")
