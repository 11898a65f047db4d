"""Sends and receives between the ranks of an arena, through one queue from each rank to each other.

A message fills a number of slots: a header and the first of its data, then the rest in whole slots. The
sender fills slots and the receiver empties them at the same time, so that a large message streams.

What is at the head of a queue goes to the receive posted first among those that fit it. If none does while
receives wait for something behind it, it is moved aside to memory of the receiver; if none waits for anything
of that sender it stays where it is, and holds its sender back.

`advance` is compiled: it moves slots of all queues in turns, returns to Python for what Python decides (a
message has come that nobody was expecting, a message is over), and otherwise as soon as nothing has moved
for a moment, so that nothing in it waits for a peer that is dead.
"""

from __future__ import annotations

import ctypes
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numba
import numpy as np

from mcr_plus.backends.mailbox import mismatch
from mcr_plus.backends.msccl.arena import LINE
from mcr_plus.backends.msccl.atomics import copy, load_acquire, pause, store_release
from mcr_plus.backends.msccl.ringing import give_way, may_yield, ring
from mcr_plus.kernels.cpu import compiled
from mcr_plus.message import DTYPES

if TYPE_CHECKING:
    import torch

    from mcr_plus.backends.msccl.arena import Arena
    from mcr_plus.interfaces import Poll, Start
    from mcr_plus.message import Group, Message, Signature

_types: Any = numba.types  # annotated in part, which type checkers take for a mistake of ours

_CHANNEL: Final = 0  # of the queues; algorithms use the others
_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}
_HEADER: Final = 64  # bytes: tag, code of the dtype, bytes of data
_AT_ONCE: Final = 16  # calls of Python by `advance` in one poll, so that deadlines are looked at

# Words of the state: what does not change, then two rows per rank, of the queue to it and the queue from it.
_ROWS: Final = 0
_DEPTH: Final = 1
_SLOT: Final = 2  # bytes
_GLANCES: Final = 3  # looks at all queues in a call in which nothing moves
_SPINS: Final = 4  # how often to look again once something has moved, on the core and after giving it away
_YIELDS: Final = 5
_NEXT: Final = 6  # row to begin with: each has its turn
_BELLS: Final = 7
_HEAD: Final = 8

# Words of a row.
_MODE: Final = 0
_FILLED: Final = 1  # addresses of the queue's counters and slots
_EMPTIED: Final = 2
_SLOTS: Final = 3
_OWN: Final = 4  # slots filled or emptied by this rank, and known to be emptied or filled by the other
_SEEN: Final = 5
_TAG: Final = 6  # of the message that is moved
_CODE: Final = 7
_BYTES: Final = 8
_ADDRESS: Final = 9  # of its data; 0: they are thrown away
_AT: Final = 10  # bytes moved, -1 before the header
_DUE_TAG: Final = 11  # of the message that is let in without asking Python
_DUE_CODE: Final = 12  # -1: none
_DUE_BYTES: Final = 13
_DUE_ADDRESS: Final = 14
_ROW: Final = 15

# Modes.
_IDLE: Final = 0
_PUSHES: Final = 1
_WATCHES: Final = 2  # for a message to come
_PULLS: Final = 3

# What `advance` returns when it is not a row.
_NOTHING: Final = -1


@compiled
def _push(state, row):  # type: ignore[no-untyped-def]
    """Fill a slot if one is free; whether one was."""
    depth, slot, own, at = state[_DEPTH], state[_SLOT], state[row + _OWN], state[row + _AT]
    if own - state[row + _SEEN] >= depth:
        state[row + _SEEN] = load_acquire(state[row + _EMPTIED])
        if own - state[row + _SEEN] >= depth:
            return False
    place = state[row + _SLOTS] + own % depth * slot
    room = slot
    if at < 0:
        for word in range(3):
            store_release(place + 8 * word, state[row + _TAG + word])
        at = 0
        place += _HEADER
        room -= _HEADER
    part = min(room, state[row + _BYTES] - at)
    if part > 0:
        copy(place, state[row + _ADDRESS] + at, part)
    state[row + _AT] = at + part
    state[row + _OWN] = own + 1
    store_release(state[row + _FILLED], own + 1)
    if at + part == state[row + _BYTES]:
        state[row + _MODE] = _IDLE
    return True


@compiled
def _filled(state, row):  # type: ignore[no-untyped-def]
    """Whether the next slot is there to be emptied."""
    if state[row + _SEEN] == state[row + _OWN]:
        state[row + _SEEN] = load_acquire(state[row + _FILLED])
    return state[row + _SEEN] != state[row + _OWN]


@compiled
def _pull(state, row):  # type: ignore[no-untyped-def]
    """Empty a slot if one is filled; whether one was."""
    if not _filled(state, row):
        return False
    slot, own, at = state[_SLOT], state[row + _OWN], state[row + _AT]
    place = state[row + _SLOTS] + own % state[_DEPTH] * slot
    room = slot
    if at < 0:
        at = 0
        place += _HEADER
        room -= _HEADER
    part = min(room, state[row + _BYTES] - at)
    if part > 0 and state[row + _ADDRESS] != 0:
        copy(state[row + _ADDRESS] + at, place, part)
    state[row + _AT] = at + part
    state[row + _OWN] = own + 1
    store_release(state[row + _EMPTIED], own + 1)
    if at + part == state[row + _BYTES]:
        state[row + _MODE] = _IDLE
    return True


@compiled
def _pull_on(state, row):  # type: ignore[no-untyped-def]
    """Empty all filled slots of a message; whether all of it has been taken."""
    while state[row + _MODE] == _PULLS and _pull(state, row):
        pass
    ring(state[_BELLS])
    return state[row + _MODE] == _IDLE


@compiled
def _look(state, row):  # type: ignore[no-untyped-def]
    """Whether a message has come; the one that is due is let in."""
    if not _filled(state, row):
        return False
    place = state[row + _SLOTS] + state[row + _OWN] % state[_DEPTH] * state[_SLOT]
    fits = True
    for word in range(3):
        value = load_acquire(place + 8 * word)
        state[row + _TAG + word] = value
        if state[row + _DUE_TAG + word] != value:
            fits = False
    if fits:
        state[row + _ADDRESS] = state[row + _DUE_ADDRESS]
        state[row + _AT] = -1
        state[row + _MODE] = _PULLS
    state[row + _DUE_CODE] = -1
    return True


@compiled
def _turn(state):  # type: ignore[no-untyped-def]
    """Move a slot of each queue; a row for Python, -1 if something has moved, -2 if not."""
    rows, index = state[_ROWS], state[_NEXT]
    result = -2
    for _ in range(rows):
        row = _HEAD + index * _ROW
        this, index = index, (index + 1) % rows
        mode = state[row + _MODE]
        if mode == _WATCHES and _look(state, row):
            result = -1
            mode = state[row + _MODE]
            if mode == _WATCHES:
                state[_NEXT] = index
                return this
        moved = False
        if mode == _PULLS:
            moved = _pull(state, row)
        elif mode == _PUSHES:
            moved = _push(state, row)
        if moved:
            result = -1
            if state[row + _MODE] == _IDLE:
                state[_NEXT] = index
                return this
    return result


@compiled
def advance(state, patient):  # type: ignore[no-untyped-def]
    """Move what can be moved, waiting a moment for more if `patient`.

    Returns a row that Python should look at, or `_NOTHING`.
    """
    spins = yields = 0
    most, moved = state[_GLANCES], False
    while True:
        found = _turn(state)
        if found != -2:
            ring(state[_BELLS])
        if found >= 0:
            return found
        if found == -1:
            spins, moved, most = 0, True, state[_SPINS]
        elif not patient:
            break
        elif spins < most:
            spins += 1
            pause()
        elif moved and yields < state[_YIELDS] and may_yield(state[_BELLS]):
            yields += 1
            give_way(state[_BELLS])
        else:
            break
    return _NOTHING


@compiled
def send(state, row, tag, code, nbytes, address):  # type: ignore[no-untyped-def]
    """Begin a send on an idle row; whether it is done."""
    state[row + _TAG], state[row + _CODE], state[row + _BYTES] = tag, code, nbytes
    state[row + _ADDRESS], state[row + _AT] = address, -1
    state[row + _MODE] = _PUSHES
    while state[row + _MODE] == _PUSHES and _push(state, row):
        pass
    ring(state[_BELLS])
    return state[row + _MODE] == _IDLE


@compiled
def expect(state, row, tag, code, nbytes, address):  # type: ignore[no-untyped-def]
    """Let in the next message on an idle row if it is this one; whether all of it has been taken."""
    state[row + _DUE_TAG], state[row + _DUE_CODE], state[row + _DUE_BYTES] = tag, code, nbytes
    state[row + _DUE_ADDRESS] = address
    state[row + _MODE] = _WATCHES
    _look(state, row)
    return _pull_on(state, row)


@compiled
def let_in(state, row, address):  # type: ignore[no-untyped-def]
    """Begin to take the message that `advance` has found; whether all of it has been taken."""
    state[row + _ADDRESS], state[row + _AT] = address, -1
    state[row + _MODE] = _PULLS
    return _pull_on(state, row)


@cache
def prepare() -> None:
    """Compile, or load from disk, what messages need: some seconds, which no peer should wait for."""
    words, integer = _types.int64[::1], _types.int64
    advance.compile((words, integer))
    send.compile((words, *[integer] * 5))
    expect.compile((words, *[integer] * 5))
    let_in.compile((words, integer, integer))


def _done() -> bool:
    return True


class _Send:
    """The poll of a send that was not done at once."""

    done = False
    error: Exception | None = None  # sends have none of their own

    def __init__(
        self, messages: Messages, tensor: torch.Tensor, arguments: tuple[int, int, int, int, int]
    ) -> None:
        self.messages, self.tensor, self.arguments = messages, tensor, arguments

    def __call__(self) -> bool:
        return self.done or self.messages.drive(self)


class _Receive:
    """The poll of a receive; knows its source once its message is there."""

    done = False
    error: Exception | None = None
    number = 0  # order of posting, of those that wait
    source: int

    def __init__(
        self, messages: Messages, signature: Signature, peer: int | None, tag: int, target: torch.Tensor
    ) -> None:
        self.messages, self.signature = messages, signature
        self.peer, self.tag, self.target = peer, tag, target

    def __call__(self) -> bool:
        """Poll; raises `OrderMismatch` for a message of another dtype or size."""
        return self.done or self.messages.drive(self)


class _Aside:
    """A message in memory of this process, and the receive that has been posted for it while it came in."""

    __slots__ = ("code", "complete", "data", "number", "receive", "source", "tag")

    def __init__(self, source: int, tag: int, code: int, nbytes: int, number: int) -> None:
        self.source, self.tag, self.code, self.number = source, tag, code, number
        self.data: Any = np.empty(nbytes, np.uint8)
        self.complete = False
        self.receive: _Receive | None = None


class Messages:
    """The sends and receives of one rank of two or more on an arena; one object per arena. Not thread-safe.

    A message goes to the receive posted first among those it fits by source and tag, as in MPI; one of
    another dtype or size is thrown away and fails that receive. Messages from one rank to another with the
    same tag stay in order. One to oneself is copied at once.

    `glances`: how often a poll looks again before it returns; `spins` and `yields`: the same on the core and
    after giving it away, once something has moved.
    """

    def __init__(
        self, arena: Arena, group: Group, *, glances: int = 10, spins: int = 200, yields: int = 4
    ) -> None:
        shape = arena.shape
        self._arena, self._group = arena, group
        state: Any = np.zeros(_HEAD + 2 * shape.ranks * _ROW, np.int64)
        state[:_NEXT] = 2 * shape.ranks, shape.depth, shape.slot, glances, spins, yields
        state[_BELLS] = arena.bells
        self._state = state
        self._words = memoryview(state)  # single words are read and written in half the time
        for peer in range(shape.ranks):
            if peer != group.rank:
                self._describe(_row(peer, False), group.rank, peer)
                self._describe(_row(peer, True), peer, group.rank)
        self._sends: list[deque[_Send]] = [deque() for _ in range(shape.ranks)]  # the first has begun
        self._due: list[_Receive | None] = [None] * shape.ranks  # by source: let in if its message is next
        self._waiting: dict[tuple[int | None, int], deque[_Receive]] = {}  # all others, by source and tag
        self._wanted = [0] * shape.ranks  # receives, due or waiting, of each source
        self._wanted_of_any = 0
        self._aside: dict[tuple[int, int], deque[_Aside]] = {}  # by source and tag
        # Who gets what is being taken out of a queue; None: it is thrown away.
        self._coming: list[_Receive | _Aside | None] = [None] * shape.ranks
        self._in_flight = 0  # sends, receives, and messages being moved aside or thrown away
        self._posted = self._put_aside = 0

    def _describe(self, row: int, source: int, target: int) -> None:
        shape, base = self._arena.shape, self._arena.base
        number = shape.queue(source, target, _CHANNEL)
        counters = base + shape.queues + 2 * number * LINE
        slots = base + shape.slots + number * shape.depth * shape.slot
        self._state[row + _FILLED : row + _SLOTS + 1] = counters, counters + LINE, slots
        self._state[row + _DUE_CODE] = -1

    # -- starting ---------------------------------------------------------------------------------

    def bind_send(self, signature: Signature) -> Start:
        """How to send tensors of a signature.

        The poll is done when all bytes are in the queue, which for a small message and a free slot is so at
        once.
        """
        code, nbytes = _described(signature)
        state, sends, me = self._state, self._sends, self._group.rank

        def start(message: Message) -> Poll:
            peer, tensor = message.peer, message.inputs[0]
            assert peer is not None
            if peer == me:
                self._send_to_self(message.match_tag, code, nbytes, tensor.data_ptr())
                return _done
            arguments = _row(peer, False), message.match_tag, code, nbytes, tensor.data_ptr()
            queue = sends[peer]
            if not queue and send(state, *arguments):
                return _done
            poll = _Send(self, tensor, arguments)
            queue.append(poll)
            self._in_flight += 1
            return poll

        return start

    def bind_receive(self, signature: Signature) -> Start:
        """How to receive tensors of a signature.

        The poll raises `OrderMismatch` if the message has another dtype or size. It has `source`, a
        group rank, once the message is there.
        """
        code, nbytes = _described(signature)
        me, words, coming, due = self._group.rank, self._words, self._coming, self._due

        def start(message: Message) -> Poll:
            peer, tag, target = message.peer, message.match_tag, message.outputs[0]
            receive = _Receive(self, signature, peer, tag, target)
            aside = self._take_aside(peer, tag) if self._aside else None
            if aside is not None:
                self._in_flight += 1
                if aside.complete:
                    self._deliver(aside, receive)
                else:
                    aside.receive = receive
                return receive
            if peer is None or peer == me or self._is_wanted(peer):
                self._wait(receive)
                return receive
            row = _row(peer, True)
            if words[row + _MODE] == _PULLS:
                self._wait(receive)
            elif expect(self._state, row, tag, code, nbytes, target.data_ptr()):
                receive.source, receive.done = peer, True
            else:
                self._in_flight += 1
                if words[row + _MODE] == _PULLS:
                    coming[peer] = receive
                else:
                    self._wanted[peer] += 1
                    due[peer] = receive
            return receive

        return start

    def _is_wanted(self, source: int) -> bool:
        """Whether a receive is due from there or waits for a message that may come from there."""
        return bool(self._wanted[source] or self._wanted_of_any)

    def _wait(self, receive: _Receive) -> None:
        """Let a receive wait for a message."""
        peer, words = receive.peer, self._words
        self._in_flight += 1
        self._posted += 1
        receive.number = self._posted
        self._waiting.setdefault((peer, receive.tag), deque()).append(receive)
        if peer is None:
            self._wanted_of_any += 1
        else:
            self._wanted[peer] += 1
        for source in range(self._group.size) if peer is None else (peer,):
            row = _row(source, True)
            if words[row + _MODE] == _IDLE and source != self._group.rank:
                words[row + _MODE] = _WATCHES

    def _send_to_self(self, tag: int, code: int, nbytes: int, address: int) -> None:
        aside = self._new_aside(self._group.rank, tag, code, nbytes)
        ctypes.memmove(aside.data.ctypes.data, address, nbytes)
        aside.complete = True
        receive = self._match(aside.source, tag)
        if receive is None:
            self._aside.setdefault((aside.source, tag), deque()).append(aside)
        else:
            self._deliver(aside, receive)

    # -- moving -----------------------------------------------------------------------------------

    def progress(self) -> None:
        """Let everything in flight go on; at no cost if nothing is. Raises nothing: polls do."""
        if self._in_flight:
            for _ in range(_AT_ONCE):
                index = advance(self._state, 0)
                if index < 0:
                    return
                self._serve(index)

    def drive(self, wanted: _Send | _Receive) -> bool:
        """Let everything in flight go on, and wait a moment for `wanted`; whether that is done.

        Raises:
            OrderMismatch: `wanted` has met a message that does not fit it.
        """
        for _ in range(_AT_ONCE):
            if wanted.error is not None:
                raise wanted.error
            index = advance(self._state, 1)
            if index < 0:
                break
            self._serve(index)
            if wanted.done:
                return True
        return False

    def _serve(self, index: int) -> None:
        """Do what `advance` has left to Python."""
        peer, incoming = divmod(index, 2)
        if not incoming:
            self._sent(peer)
        elif self._words[_row(peer, True) + _MODE] == _WATCHES:
            self._arrived(peer)
        else:
            self._taken(peer)

    def _sent(self, peer: int) -> None:
        """A send is done: those behind it have their turn."""
        queue = self._sends[peer]
        while True:
            queue.popleft().done = True
            self._in_flight -= 1
            if not queue or not send(self._state, *queue[0].arguments):
                return

    def _arrived(self, source: int) -> None:
        """A message that was not due is at the head of a queue: find out where it goes."""
        row, words = _row(source, True), self._words
        tag, code, nbytes = words[row + _TAG : row + _BYTES + 1]
        due = self._due[source]
        if due is not None:  # it was posted before all that wait for something from there
            self._due[source] = None
            self._waiting.setdefault((source, due.tag), deque()).appendleft(due)
        receive = self._match(source, tag)
        if receive is not None:
            fits = self._fits(receive, source, code, nbytes)
            self._coming[source] = receive if fits else None
            self._in_flight += not fits
            address = receive.target.data_ptr() if fits else 0
        elif self._is_wanted(source):
            aside = self._new_aside(source, tag, code, nbytes)
            self._aside.setdefault((source, tag), deque()).append(aside)
            self._coming[source] = aside
            self._in_flight += 1
            address = aside.data.ctypes.data
        else:
            words[row + _MODE] = _IDLE
            return
        if let_in(self._state, row, address):
            self._taken(source)

    def _taken(self, source: int) -> None:
        """All of a message has been taken out of its queue."""
        came, due = self._coming[source], self._due[source]
        if due is not None:
            came, self._due[source] = due, None
            self._wanted[source] -= 1
        self._coming[source] = None
        self._in_flight -= 1
        if self._is_wanted(source):
            self._words[_row(source, True) + _MODE] = _WATCHES
        if isinstance(came, _Receive):
            came.source, came.done = source, True
        elif came is not None:
            came.complete = True
            if came.receive is not None:
                self._deliver(came, came.receive)

    # -- matching ---------------------------------------------------------------------------------

    def _match(self, source: int, tag: int) -> _Receive | None:
        """The receive posted first among those that fit; it does not wait any more."""
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

    def _new_aside(self, source: int, tag: int, code: int, nbytes: int) -> _Aside:
        self._put_aside += 1
        return _Aside(source, tag, code, nbytes, self._put_aside)

    def _take_aside(self, peer: int | None, tag: int) -> _Aside | None:
        """The message put aside first among those that fit a receive."""
        sources = range(self._group.size) if peer is None else (peer,)
        queues = [self._aside[source, tag] for source in sources if (source, tag) in self._aside]
        if not queues:
            return None
        first = min((queue[0] for queue in queues), key=lambda aside: aside.number)
        queue = self._aside[first.source, tag]
        queue.popleft()
        if not queue:
            del self._aside[first.source, tag]
        return first

    def _deliver(self, aside: _Aside, receive: _Receive) -> None:
        if self._fits(receive, aside.source, aside.code, aside.data.nbytes):
            ctypes.memmove(receive.target.data_ptr(), aside.data.ctypes.data, aside.data.nbytes)
            self._in_flight -= 1
            receive.source, receive.done = aside.source, True

    def _fits(self, receive: _Receive, source: int, code: int, nbytes: int) -> bool:
        """Whether a message is what the receive expects; if not, the receive is over."""
        signature = receive.signature
        if signature.dtype is DTYPES[code] and signature.nbytes == nbytes:
            return True
        receive.source = source
        receive.error = mismatch(
            self._group, signature, receive.tag, source, DTYPES[code], nbytes // DTYPES[code].itemsize
        )
        self._in_flight -= 1
        return False


def _row(peer: int, incoming: bool) -> int:
    """Word of the row of a queue."""
    return _HEAD + (2 * peer + incoming) * _ROW


def _described(signature: Signature) -> tuple[int, int]:
    """Code of the dtype and bytes of a signature's tensors."""
    assert signature.dtype is not None
    assert signature.nbytes is not None
    return _CODES[signature.dtype], signature.nbytes
