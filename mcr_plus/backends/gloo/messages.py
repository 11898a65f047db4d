"""Sends and receives through gloo: a header before each message, and threads that detect completion.

A verified message carries the checksums of its blocks of 64 KiB. The checksum of a single block is in the
header; several checksums form a message of their own between header and data, so that no data is copied.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Final, Literal

import torch

from mcr_plus.backends.base import BlockingPoll, Corrupted, ReceivePoll, advice
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import dtype_name
from mcr_plus.core.message import Message, Signature
from mcr_plus.errors import OrderMismatch

# A header: number of the message between two ranks under a tag, bytes, dtype, description, a flag for
# checksums (all bits of a byte, so that a flipped bit cannot hide them), and the checksum of a single block.
_HEADER: Final = struct.Struct("<QQ16s192sBq")
_CARRIES: Final = 255
SLOTS: Final = 2**6  # gloo's tags for one of our tags: one for headers, the others for messages in turn
FIRST_FREE: Final = 2**24 * SLOTS
"""The first of gloo's 31-bit tags that no message uses: our tags are below 2²⁴."""
LONGEST: Final = timedelta(days=1000)
"""gloo's timeout for messages, which may wait for a late rank. Operations have deadlines of their own, and
gloo closes all connections of a group when a wait expires.
"""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as flat bytes, since gloo can move every dtype as bytes."""
    # Not reshape(-1): a contiguous tensor of one element may have any stride, which `view` refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Watchers:
    """Threads that each block on one gloo work; idle threads are reused.

    gloo's sends and receives cannot be polled, and a wait with a timeout closes the connection when it
    expires. These threads only detect completion; the data moves without them.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Callable[[], None]]] = []

    def run(self, task: Callable[[], None]) -> None:
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            # A daemon thread, so that work that never ends does not keep the process alive.
            Thread(target=self._work, args=(inbox,), name="mcr-gloo-watch", daemon=True).start()
        inbox.put(task)

    def _work(self, inbox: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            inbox.get()()
            self._idle.append(inbox)

    def abandon(self) -> None:
        """Forget the threads in a forked child, which does not have them."""
        self._idle.clear()


watchers: Final = _Watchers()
os.register_at_fork(after_in_child=watchers.abandon)


class _WatchedPoll(BlockingPoll):
    """Poll of a send or receive. The first poll starts the watching thread."""

    def __init__(self, running: set[object]) -> None:
        self._state: Literal["new", "watched", "done"] = "new"
        self._error: Exception | None = None
        self._ended = Event()
        self._running = running
        running.add(self)

    def block(self, seconds: float) -> None:
        """See `BlockingPoll`."""
        self._ended.wait(seconds)

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
        self._ended.set()

    def _finish(self) -> None:
        raise NotImplementedError


class WatchedSend(_WatchedPoll):
    """Poll of a message and of its header, which is sent first."""

    def __init__(self, works: list[Any], running: set[object]) -> None:
        super().__init__(running)
        self._works = works

    def _finish(self) -> None:
        for work in self._works:
            work.wait(LONGEST)


class WatchedReceive(_WatchedPoll, ReceivePoll):
    """Poll of a receive that gets the header first: gloo accepts any dtype, and aborts on excess data."""

    def __init__(
        self,
        pg: Any,
        group: Group,
        signature: Signature,
        message: Message,
        running: set[object],
        corrupted: Corrupted | None = None,
    ) -> None:
        """`corrupted`: see `Channel.bind_checked`; None for a receive without checksums."""
        super().__init__(running)
        self._corrupted = corrupted
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
        self()  # receive the message even without polls

    def _finish(self) -> None:
        pg, self._pg = self._pg, None  # a handle kept by the program must not keep gloo's group alive
        self._work.wait(LONGEST)
        self.arriving = True  # the header has arrived
        source = self._work._source_rank() if self.source is None else self.source
        self.source = source
        number, nbytes, dtype, text, carries, word = _HEADER.unpack(self._header.numpy().tobytes())
        target, group = self._target, self._group
        if (nbytes, dtype) != (target.nbytes, _dtype_text(target)):
            raise OrderMismatch(
                f"message #{number} with tag {self._tag} in group '{group.name}': {group.named(source)} "
                f"issued {_text(text)} ({nbytes} bytes); {group.named(group.rank)} issued "
                f"{self._signature.describe()} ({target.nbytes} bytes)"
                f"{advice(dtype == _dtype_text(target), nbytes // target.itemsize)}"
            )
        parts, words = [bytes_of(target)] if nbytes else [], None
        if carries:
            from mcr_plus.kernels.checksum import blocks_of  # imported here: needs numba

            words = torch.full((blocks_of(nbytes),), word, device="cpu")
            if words.numel() > 1:
                parts.insert(0, bytes_of(words))
        slot = slot_of(self._tag, number)
        for work in [pg.recv([part], self.source, slot) for part in parts]:  # in the order of the sends
            work.wait(LONGEST)
        if words is not None and self._corrupted is not None:
            self._compare(words, self._corrupted)

    def _compare(self, words: torch.Tensor, corrupted: Corrupted) -> None:
        from mcr_plus.kernels.checksum import first_changed

        block = first_changed(self._target, words)
        if block is not None:
            assert self.source is not None
            raise corrupted(self.source, block)


def slot_of(tag: int, number: int) -> int:
    """Return gloo's tag of message `number`; receives may read their headers in any order."""
    return tag * SLOTS + 1 + number % (SLOTS - 1)


def parts_of(
    signature: Signature, value: torch.Tensor, number: int, words: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return the parts of message `number` as bytes: header, checksums if there are several, data.

    `words`: checksums (int64) of the blocks of the data `value`; None for a message without checksums.
    """
    parts, word = [bytes_of(value)] if value.numel() else [], 0
    if words is not None and words.numel() == 1:
        word = int(words)
    elif words is not None and words.numel():
        parts.insert(0, bytes_of(words))
    text = signature.describe().encode()[:192]
    carries = 0 if words is None else _CARRIES
    header = _HEADER.pack(number, value.nbytes, _dtype_text(value), text, carries, word)
    return [torch.frombuffer(bytearray(header), dtype=torch.uint8), *parts]


def _dtype_text(tensor: torch.Tensor) -> bytes:
    return dtype_name(tensor.dtype).encode().ljust(16, b"\0")


def _text(record: bytes) -> str:
    return record.rstrip(b"\0").decode(errors="replace")
