"""Sends and receives between the ranks of a segment, through one queue per ordered pair of ranks.

The message at the head of a queue goes to the first posted receive that matches it. If no receive matches,
but receives wait for later messages, the message is unexpected and is copied to memory of the receiver. If no
receive waits for its sender, the message stays in the queue and blocks the sender.

`p2p_kernels` moves the data.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mcr_plus.backends.base import NativeStart
from mcr_plus.backends.mpi.p2p import mismatch
from mcr_plus.backends.shm.p2p_kernels import (
    ACTIVE,
    BELLS,
    CARRY_IN,
    CARRY_OUT,
    CHAINS,
    DAMAGED,
    DUE_CODE,
    FILLED,
    HEAD,
    HEADER,
    IDLE,
    MARK,
    MODE,
    NEXT,
    PULLS,
    ROW,
    SLOTS,
    TAG,
    WATCHES,
    accept,
    advance,
    expect,
    send,
)
from mcr_plus.backends.shm.p2p_polls import QueueReceive, QueueSend, Unexpected
from mcr_plus.backends.shm.queue import done_at_once
from mcr_plus.backends.shm.segment import LINE
from mcr_plus.core.kinds import DTYPES
from mcr_plus.kernels.checksum_sizes import BLOCK, CHAIN_BYTES
from mcr_plus.kernels.images import c_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from mcr_plus.backends.base import Corrupted, Poll, Start
    from mcr_plus.backends.shm.segment import Segment
    from mcr_plus.core.group import Group
    from mcr_plus.core.message import Message, Signature

_CHANNEL: Final = 0  # channel of the queues; algorithms use the others
_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}
_KERNELS: Final = "mcr_plus.backends.shm.p2p_kernels"
_NATIVE: Final = 1 << 20  # most bytes of a message that may hold the GIL
_AT_ONCE: Final = 16  # maximum number of returns of `advance` in one poll, so that deadlines are checked


class PointToPoint:
    """Sends and receives of one rank, of two or more, on a segment; one object per segment.

    Not thread-safe. As in MPI, a message goes to the first posted receive with a matching source and tag; a
    message of another dtype or size is discarded, and the receive fails. Messages from one rank to another
    with the same tag stay in order. A message of a rank to itself is copied at once.

    `glances`: number of checks in a poll without progress. `spins` and `yields`: further checks after
    progress, before and after the core is yielded.
    """

    def __init__(
        self, segment: Segment, group: Group, *, glances: int = 10, spins: int = 200, yields: int = 4
    ) -> None:
        shape = segment.shape
        self._segment, self._group = segment, group
        state: Any = np.zeros(HEAD + 2 * shape.ranks * ROW, np.int64)
        state[:NEXT] = 2 * shape.ranks, *shape.first, glances, spins, yields
        state[BELLS] = segment.bells
        self._state: Any = state
        self._chains: Any = None  # see `check`
        self._words = memoryview(state)  # reads and writes single words in half the time
        for peer in range(shape.ranks):
            if peer != group.rank:
                self._describe(_row(peer, False), group.rank, peer)
                self._describe(_row(peer, True), peer, group.rank)
        self._sends: list[deque[QueueSend]] = [deque() for _ in range(shape.ranks)]  # the first has begun
        self._due: list[QueueReceive | None] = [
            None
        ] * shape.ranks  # by source: accepted if the message is next
        self._waiting: dict[
            tuple[int | None, int], deque[QueueReceive]
        ] = {}  # all other waiting receives, by source and tag
        self._wanted = [0] * shape.ranks  # receives, due or waiting, by source
        self._wanted_of_any = 0
        self._unexpected: dict[tuple[int, int], deque[Unexpected]] = {}  # by source and tag
        # The destination of the message that leaves a queue, by source; None if the message is discarded.
        self._coming: list[QueueReceive | Unexpected | None] = [None] * shape.ranks
        self._posted = self._unexpected_count = 0

    def _describe(self, row: int, source: int, target: int) -> None:
        shape, base = self._segment.shape, self._segment.base
        number = shape.queue(source, target, _CHANNEL)
        counters = base + shape.queues + 2 * number * LINE
        slots = base + shape.slots_of(source, target, _CHANNEL)
        self._state[row + FILLED : row + SLOTS + 1] = counters, counters + LINE, slots
        self._state[row + DUE_CODE] = -1

    def check(self) -> bool:
        """Let messages carry checksums; called on all ranks before any message. False if slots are small."""
        if self._segment.shape.first[1] < HEADER + CHAIN_BYTES:
            return False
        if self._chains is None:
            rows = range(HEAD, len(self._state), ROW)
            self._chains = np.empty((len(rows), CHAIN_BYTES), np.uint8)
            for row, chains in zip(rows, self._chains, strict=True):
                self._state[row + CHAINS] = chains.ctypes.data
            from mcr_plus.backends.shm import p2p_checks  # here: only verified messages need it

            self._state[CARRY_OUT], self._state[CARRY_IN] = p2p_checks.prepare()
        return True

    # -- starting ---------------------------------------------------------------------------------

    def bind_send(self, signature: Signature, mark: int = 0) -> Start:
        """Return the start of sends of a signature.

        A send is done when all bytes are in the queue, i.e. at once for a small message if a slot is free. If
        the signature has no size, the size of the message applies. `mark`: `CHECKED` for messages that carry
        checksums, see `check`.
        """
        if signature.nbytes is None:
            return lambda message: self.bind_send(_sized(signature, message.inputs[0]), mark)(message)
        code, nbytes = _described(signature)
        state, words, sends, me = self._state, self._words, self._sends, self._group.rank

        def start(message: Message) -> Poll:
            peer, tensor = message.peer, message.inputs[0]
            assert peer is not None
            if peer == me:
                self._send_to_self(message.match_tag, code, nbytes, mark, tensor.data_ptr())
                return done_at_once
            words[ACTIVE] += 1  # before the kernel, which releases the GIL
            row, tag, queue = _row(peer, False), message.match_tag, sends[peer]
            if not queue and send(state, row, tag, code, nbytes, mark, tensor.data_ptr()):
                words[ACTIVE] -= 1
                return done_at_once
            return begun(peer, tag, tensor)

        def begun(peer: int, tag: int, tensor: torch.Tensor) -> Poll:
            poll = QueueSend(self, tensor, (_row(peer, False), tag, code, nbytes, mark, tensor.data_ptr()))
            sends[peer].append(poll)
            return poll

        if not mark and nbytes <= _NATIVE:
            start.native = self._native("send_at", False, code, nbytes, begun)  # type: ignore[attr-defined]
        return start

    def bind_receive(self, signature: Signature, corrupted: Corrupted | None = None) -> Start:
        """Return the start of receives of a signature.

        The poll raises `OrderMismatch` if the message has another dtype or size, and the error that
        `corrupted` returns if a checksum does not match the data. Its `source`, a group rank, is set once the
        message has arrived.
        """
        if signature.nbytes is None:
            return lambda message: self.bind_receive(_sized(signature, message.outputs[0]), corrupted)(
                message
            )
        code, nbytes = _described(signature)
        me, words = self._group.rank, self._words

        def start(message: Message) -> Poll:
            peer, tag, target = message.peer, message.match_tag, message.outputs[0]
            receive = QueueReceive(self, signature, peer, tag, target, corrupted)
            words[ACTIVE] += 1  # before the kernel, which releases the GIL
            # Unexpected messages are older than messages in the queue, so they match first.
            early = self._take_unexpected(peer, tag) if self._unexpected else None
            if early is not None:
                if early.complete:
                    self._deliver(early, receive)
                else:
                    early.receive = receive
                return receive
            # Matching needs Python if other receives may take the message. Otherwise the kernel accepts the
            # message.
            if peer is None or peer == me or self._is_wanted(peer):
                self._wait(receive)
                return receive
            row = _row(peer, True)
            if words[row + MODE] == PULLS:
                self._wait(receive)
            elif expect(self._state, row, tag, code, nbytes, target.data_ptr()):
                words[ACTIVE] -= 1
                receive.end(peer, words[row + DAMAGED])
            else:
                self._expected(receive, peer)
            return receive

        def begun(peer: int, tag: int, tensor: torch.Tensor) -> Poll:
            receive = QueueReceive(self, signature, peer, tag, tensor, None)
            self._expected(receive, peer)
            return receive

        if corrupted is None and nbytes <= _NATIVE:
            start.native = self._native("expect_at", True, code, nbytes, begun)  # type: ignore[attr-defined]
        return start

    def _native(
        self,
        begin: str,
        incoming: bool,
        code: int,
        nbytes: int,
        begun: Callable[[int, int, torch.Tensor], Poll],
    ) -> Callable[[int | None, int], NativeStart | None]:
        """Return the `native` of a start; `begun` takes over a message to or from a peer, with a tag."""
        state, words = self._state, self._words

        def native(peer: int | None, tag: int) -> NativeStart | None:
            if peer is None or peer == self._group.rank:
                return None
            first, further = (c_kernel(_KERNELS, name).address for name in (begin, "advance_at"))
            bound = np.array([state.ctypes.data, _row(peer, incoming), tag, code, nbytes], np.int64)

            def take_over(source: int, target: int, tensors: tuple[torch.Tensor, ...]) -> Poll:  # noqa: ARG001
                words[ACTIVE] += 1
                return begun(peer, tag, tensors[0])

            return NativeStart(first, further, bound, None, take_over, state[ACTIVE:].ctypes.data)

        return native

    def _expected(self, receive: QueueReceive, peer: int) -> None:
        """Continue a receive that the kernel expects, and that is not complete."""
        if self._words[_row(peer, True) + MODE] == PULLS:
            self._coming[peer] = receive
        else:
            self._wanted[peer] += 1
            self._due[peer] = receive

    def _is_wanted(self, source: int) -> bool:
        """Return whether a receive is due from `source`, or waits for a message that may come from it."""
        return bool(self._wanted[source] or self._wanted_of_any)

    def _wait(self, receive: QueueReceive) -> None:
        """Queue a receive until its message arrives."""
        peer, words = receive.peer, self._words
        self._posted += 1
        receive.number = self._posted
        self._waiting.setdefault((peer, receive.tag), deque()).append(receive)
        if peer is None:
            self._wanted_of_any += 1
        else:
            self._wanted[peer] += 1
        for source in range(self._group.size) if peer is None else (peer,):
            row = _row(source, True)
            if words[row + MODE] == IDLE and source != self._group.rank:
                words[row + MODE] = WATCHES

    def _send_to_self(self, tag: int, code: int, nbytes: int, mark: int, address: int) -> None:
        early = self._new_unexpected(self._group.rank, tag, code, nbytes, mark)
        if early.kept is not None:
            from mcr_plus.kernels.checksum import take_all

            take_all(address, nbytes, early.kept.ctypes.data)
        ctypes.memmove(early.data.ctypes.data, address, nbytes)
        early.complete = True
        receive = self._match(early.source, tag)
        if receive is None:
            self._unexpected.setdefault((early.source, tag), deque()).append(early)
        else:
            self._deliver(early, receive)

    # -- moving -----------------------------------------------------------------------------------

    def progress(self) -> None:
        """Progress pending messages; free without any. Errors are raised by polls."""
        if self._words[ACTIVE]:
            for _ in range(_AT_ONCE):
                index = advance(self._state, 0)
                if index < 0:
                    return
                self._handle(index)

    def drive(self, wanted: QueueSend | QueueReceive) -> bool:
        """Progress pending messages, and wait a moment for `wanted`; return whether it is done.

        Raises:
            OrderMismatch: the message for `wanted` has another dtype or size.
        """
        for _ in range(_AT_ONCE):
            if wanted.error is not None:
                raise wanted.error
            index = advance(self._state, 1)
            if index < 0:
                break
            self._handle(index)
            if wanted.done:
                return True
        return False

    def _handle(self, index: int) -> None:
        """Handle a row that `advance` has returned."""
        peer, incoming = divmod(index, 2)
        if not incoming:
            self._sent(peer)
        elif self._words[_row(peer, True) + MODE] == WATCHES:
            self._arrived(peer)
        else:
            self._taken(peer)

    def _sent(self, peer: int) -> None:
        """Complete a send, and begin the next sends."""
        queue = self._sends[peer]
        while True:
            queue.popleft().done = True
            self._words[ACTIVE] -= 1
            if not queue or not send(self._state, *queue[0].arguments):
                return

    def _arrived(self, source: int) -> None:
        """Match the message at the head of a queue that was not due."""
        row, words = _row(source, True), self._words
        tag, code, nbytes, mark = words[row + TAG : row + MARK + 1]
        due = self._due[source]
        if due is not None:  # posted before all other receives that wait for this source
            self._due[source] = None
            self._waiting.setdefault((source, due.tag), deque()).appendleft(due)
        receive, kept = self._match(source, tag), 0
        if receive is not None:
            fits = self._fits(receive, source, code, nbytes)
            self._coming[source] = receive if fits else None
            words[ACTIVE] += not fits
            address = receive.target.data_ptr() if fits else 0
        elif self._is_wanted(source):
            early = self._new_unexpected(source, tag, code, nbytes, mark)
            self._unexpected.setdefault((source, tag), deque()).append(early)
            self._coming[source] = early
            address = early.data.ctypes.data
            kept = 0 if early.kept is None else early.kept.ctypes.data
        else:
            words[row + MODE] = IDLE
            return
        if accept(self._state, row, address, kept):
            self._taken(source)

    def _taken(self, source: int) -> None:
        """Complete a message that has left its queue."""
        came, due = self._coming[source], self._due[source]
        if due is not None:
            came, self._due[source] = due, None
            self._wanted[source] -= 1
        self._coming[source] = None
        row, words = _row(source, True), self._words
        if self._is_wanted(source):
            words[row + MODE] = WATCHES
        if isinstance(came, Unexpected):
            came.complete = True
            if came.receive is not None:
                self._deliver(came, came.receive)
            return
        words[ACTIVE] -= 1
        if came is not None:
            came.end(source, words[row + DAMAGED])

    # -- matching ---------------------------------------------------------------------------------

    def _match(self, source: int, tag: int) -> QueueReceive | None:
        """Remove and return the first posted receive that matches; None if there is none."""
        found = None
        keys: tuple[tuple[int | None, int], ...] = ((source, tag), (None, tag))
        for key in keys:
            queue = self._waiting.get(key)
            if queue is not None and (found is None or queue[0].number < found.number):
                found = queue[0]
        if found is not None:
            key = (found.peer, tag)
            self._waiting[key].popleft()
            if not self._waiting[key]:
                del self._waiting[key]
            if found.peer is None:
                self._wanted_of_any -= 1
            else:
                self._wanted[found.peer] -= 1
        return found

    def _new_unexpected(self, source: int, tag: int, code: int, nbytes: int, mark: int) -> Unexpected:
        self._unexpected_count += 1
        self._words[ACTIVE] += 1
        early = Unexpected(source, tag, code, nbytes, self._unexpected_count)
        if mark:
            early.kept = np.zeros(max(1, -(-nbytes // BLOCK)), np.int64)
        return early

    def _take_unexpected(self, peer: int | None, tag: int) -> Unexpected | None:
        """Remove and return the first unexpected message that matches a receive; None if there is none."""
        sources = range(self._group.size) if peer is None else (peer,)
        queues = [self._unexpected[source, tag] for source in sources if (source, tag) in self._unexpected]
        if not queues:
            return None
        first = min((queue[0] for queue in queues), key=lambda early: early.number)
        queue = self._unexpected[first.source, tag]
        queue.popleft()
        if not queue:
            del self._unexpected[first.source, tag]
        return first

    def _deliver(self, early: Unexpected, receive: QueueReceive) -> None:
        self._words[ACTIVE] -= 1
        if self._fits(receive, early.source, early.code, early.data.nbytes):
            ctypes.memmove(receive.target.data_ptr(), early.data.ctypes.data, early.data.nbytes)
            self._words[ACTIVE] -= 1
            damaged = -1
            if early.kept is not None:
                from mcr_plus.kernels.checksum import changed

                nbytes, kept = early.data.nbytes, early.kept.ctypes.data
                damaged = changed(receive.target.data_ptr(), nbytes, kept, 0, -(-nbytes // BLOCK))
            receive.end(early.source, damaged)

    def _fits(self, receive: QueueReceive, source: int, code: int, nbytes: int) -> bool:
        """Return whether a message has the dtype and size of the receive; if not, fail the receive."""
        signature = receive.signature
        if signature.dtype is DTYPES[code] and signature.nbytes == nbytes:
            return True
        receive.source = source
        receive.error = mismatch(
            self._group, signature, receive.tag, source, DTYPES[code], nbytes // DTYPES[code].itemsize
        )
        self._words[ACTIVE] -= 1
        return False


def _row(peer: int, incoming: bool) -> int:
    """Return the first word of a queue's row."""
    return HEAD + (2 * peer + incoming) * ROW


def _sized(signature: Signature, tensor: torch.Tensor) -> Signature:
    return signature.replace(shape=tuple(tensor.shape), nbytes=tensor.nbytes)


def _described(signature: Signature) -> tuple[int, int]:
    """Return the dtype code and the bytes of a signature's tensors."""
    assert signature.dtype is not None
    assert signature.nbytes is not None
    return _CODES[signature.dtype], signature.nbytes
