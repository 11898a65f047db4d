"""Compiled functions that move messages through queues between the ranks of a segment.

A message fills a number of slots. The first has a header and the beginning of the data; the rest follows in
whole slots. The sender fills slots and the receiver empties them at the same time, so that a large message
streams.

All functions work on one array, the state of a rank. `advance` moves slots of all queues in turns, returns to
Python for decisions (an unexpected message has arrived, a message is complete), and otherwise after a moment
without progress, so that it never blocks on a dead peer.

A message may carry checksums of its data. Then every slot has a header with the checksums of blocks that end
in the slot, and the functions of `p2p_checks` move the data; they are called by address.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numba
import numba.extending
import numpy as np

from mcr_plus.backends.shm.atomics import call, clock, copy, fence, load_acquire, pause, store_release
from mcr_plus.backends.shm.collectives_state import COPIED, PAST_CACHES
from mcr_plus.backends.shm.faults import FAULT_WORDS
from mcr_plus.backends.shm.slice_kernels import move
from mcr_plus.backends.shm.wakeup import give_way, may_yield, ring
from mcr_plus.kernels.checksum_sizes import CHAIN_BYTES
from mcr_plus.kernels.cpu import compiled, linked

_numba: Any = numba  # partly annotated, which type checkers report
_types: Any = _numba.types

HEADER: Final = 64
"""Bytes before the data of a message: tag, code of the dtype, bytes of data, `CHECKED` or 0, checksums."""
CHECKED: Final = 0x6D63725F76657269
"""Mark of a message that carries checksums: few flipped bits cannot turn another mark into this one."""
CHECKS_AT: Final = 32
"""Offset of the checksums in a header."""

# Words of the state: constants, then two rows per rank: the queue to it and the queue from it.
ROWS: Final = 0
DEPTH: Final = 1
SLOT: Final = 2  # bytes
GLANCES: Final = 3  # checks of all queues in a call without progress
SPINS: Final = 4  # further checks after progress, before yielding and after
YIELDS: Final = 5
NEXT: Final = 6  # first row of the next turn
BELLS: Final = 7
CARRY_OUT: Final = 8  # addresses of the functions that move data with checksums, see `p2p_checks`; or 0
CARRY_IN: Final = 9
ACTIVE: Final = 10  # sends, receives, and messages that are discarded or unexpected; compiled calls need 0
HEAD: Final = 11

# Words of a row.
MODE: Final = 0
FILLED: Final = 1  # addresses of the queue's counters and slots
EMPTIED: Final = 2
SLOTS: Final = 3
OWN: Final = 4  # slots filled or emptied by this rank; slots known to be emptied or filled by the peer
SEEN: Final = 5
TAG: Final = 6  # tag of the current message
CODE: Final = 7
BYTES: Final = 8
MARK: Final = 9  # `CHECKED` or 0
ADDRESS: Final = 10  # address of the message's data; 0: the data is discarded
AT: Final = 11  # bytes moved, -1 before the header
DUE_TAG: Final = 12  # tag that may be accepted without returning to Python
DUE_CODE: Final = 13  # -1: none
DUE_BYTES: Final = 14
DUE_ADDRESS: Final = 15
CHAINS: Final = 16  # address of the checksum chains of the current block
KEPT: Final = 17  # address for arriving checksums; 0 to compare them
DAMAGED: Final = 18  # the first block whose checksum differs, or -1
WAY: Final = 19  # `PAST_CACHES` if parts go to slots past the caches
PARTS: Final = 20  # large parts sent so far
LEAST: Final = 21  # least ns/KiB of each way in the last trial
FAULT: Final = 23  # see `faults`
ROW: Final = FAULT + FAULT_WORDS

# Each queue tries both ways of filling slots; which is faster depends on whether the two cores share a cache.
_LARGE: Final = 8 << 10  # bytes of a part that counts
_PERIOD: Final = 2048  # parts between two trials
_BEFORE: Final = 256  # parts before a trial: the first ones touch new memory, which takes longer
_TRIED: Final = 16  # parts of a trial

# Modes.
IDLE: Final = 0
PUSHES: Final = 1
WATCHES: Final = 2  # watch for the next message
PULLS: Final = 3

# Results of `advance` other than a row.
_NOTHING: Final = -1


@linked
def _places(state, row):  # type: ignore[no-untyped-def]
    """Return the bytes before the data in a message's next slot, and the slot's capacity for data."""
    if state[row + MARK]:
        return np.int64(HEADER), (state[SLOT] - HEADER) // CHAIN_BYTES * CHAIN_BYTES
    skip = np.int64(HEADER) if state[row + AT] < 0 else np.int64(0)
    return skip, state[SLOT] - skip


@linked
def _fill(state, row, slot, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy a part of a message into a slot, in the way that is faster for this queue."""
    if nbytes < _LARGE:
        copy(slot, source, nbytes)
        return
    turn = state[row + PARTS] % _PERIOD - _BEFORE
    state[row + PARTS] += 1
    is_tried = 0 <= turn < _TRIED
    way = turn % 2 if is_tried else state[row + WAY]
    began = clock() if is_tried else np.int64(0)
    move(slot, source, nbytes, way == PAST_CACHES)
    if way == PAST_CACHES:
        fence()
    if is_tried:
        time, least = 1024 * (clock() - began) // nbytes, row + LEAST + way
        state[least] = time if turn < 2 else min(time, state[least])
    if turn == _TRIED - 1:  # the receiver, which then reads from memory, needs longer
        state[row + WAY] = PAST_CACHES if 2 * state[row + LEAST + 1] < state[row + LEAST] else COPIED


@linked
def _push(state, row):  # type: ignore[no-untyped-def]
    """Fill a slot if one is free; return whether a slot was filled."""
    depth, slot, own, at = state[DEPTH], state[SLOT], state[row + OWN], state[row + AT]
    if own - state[row + SEEN] >= depth:
        state[row + SEEN] = load_acquire(state[row + EMPTIED])
        if own - state[row + SEEN] >= depth:
            return False
    place = state[row + SLOTS] + own % depth * slot
    skip, room = _places(state, row)
    if at < 0:
        for word in range(4):
            store_release(place + 8 * word, state[row + TAG + word])
        at = 0
    part = min(room, state[row + BYTES] - at)
    if part > 0:
        if state[row + MARK]:
            call(state[CARRY_OUT], state.ctypes.data + 8 * row, place, at, part)
        else:
            _fill(state, row, place + skip, state[row + ADDRESS] + at, part)
    state[row + AT] = at + part
    state[row + OWN] = own + 1
    store_release(state[row + FILLED], own + 1)
    if at + part == state[row + BYTES]:
        state[row + MODE] = IDLE
    return True


@linked
def _filled(state, row):  # type: ignore[no-untyped-def]
    """Return whether the next slot is filled."""
    if state[row + SEEN] == state[row + OWN]:
        state[row + SEEN] = load_acquire(state[row + FILLED])
    return state[row + SEEN] != state[row + OWN]


@linked
def _pull(state, row):  # type: ignore[no-untyped-def]
    """Empty a slot if one is filled; return whether a slot was emptied."""
    if not _filled(state, row):
        return False
    own, at = state[row + OWN], max(np.int64(0), state[row + AT])
    place = state[row + SLOTS] + own % state[DEPTH] * state[SLOT]
    skip, room = _places(state, row)
    part = min(room, state[row + BYTES] - at)
    if part > 0 and state[row + ADDRESS] != 0:
        if state[row + MARK]:
            call(state[CARRY_IN], state.ctypes.data + 8 * row, place, at, part)
        else:
            copy(state[row + ADDRESS] + at, place + skip, part)
    state[row + AT] = at + part
    state[row + OWN] = own + 1
    store_release(state[row + EMPTIED], own + 1)
    if at + part == state[row + BYTES]:
        state[row + MODE] = IDLE
    return True


@linked
def _pull_on(state, row):  # type: ignore[no-untyped-def]
    """Empty all filled slots of a message; return whether the message is complete."""
    while state[row + MODE] == PULLS and _pull(state, row):
        pass
    ring(state[BELLS])
    return state[row + MODE] == IDLE


@linked
def _look(state, row):  # type: ignore[no-untyped-def]
    """Return whether a message has arrived; accept the message that is due."""
    if not _filled(state, row):
        return False
    place = state[row + SLOTS] + state[row + OWN] % state[DEPTH] * state[SLOT]
    fits = True
    for word in range(3):
        value = load_acquire(place + 8 * word)
        state[row + TAG + word] = value
        if state[row + DUE_TAG + word] != value:
            fits = False
    state[row + MARK] = load_acquire(place + 8 * (MARK - TAG)) if state[CARRY_IN] else np.int64(0)
    state[row + KEPT], state[row + DAMAGED] = 0, -1
    if fits:
        state[row + ADDRESS] = state[row + DUE_ADDRESS]
        state[row + AT] = -1
        state[row + MODE] = PULLS
    state[row + DUE_CODE] = -1
    return True


@linked
def _turn(state):  # type: ignore[no-untyped-def]
    """Move a slot of each queue; return a row for Python, -1 after progress, -2 without progress."""
    rows, index = state[ROWS], state[NEXT]
    result = -2
    for _ in range(rows):
        row = HEAD + index * ROW
        this, index = index, (index + 1) % rows
        mode = state[row + MODE]
        if mode == WATCHES and _look(state, row):
            result = -1
            mode = state[row + MODE]
            if mode == WATCHES:
                state[NEXT] = index
                return this
        moved = False
        if mode == PULLS:
            moved = _pull(state, row)
        elif mode == PUSHES:
            moved = _push(state, row)
        if moved:
            result = -1
            if state[row + MODE] == IDLE:
                state[NEXT] = index
                return this
    return result


@compiled
def advance(state, patient):  # type: ignore[no-untyped-def]
    """Move slots as far as possible, and wait a moment for more if `patient`.

    Returns a row that Python should handle, or `_NOTHING`.
    """
    spins = yields = 0
    most, moved = state[GLANCES], False
    while True:
        found = _turn(state)
        if found != -2:
            ring(state[BELLS])
        if found >= 0:
            return found
        if found == -1:
            spins, moved, most = 0, True, state[SPINS]
        elif not patient:
            break
        elif spins < most:
            spins += 1
            pause()
        elif moved and yields < state[YIELDS] and may_yield(state[BELLS]):
            yields += 1
            give_way(state[BELLS])
        else:
            break
    return _NOTHING


@compiled
def send(state, row, tag, code, nbytes, mark, address):  # type: ignore[no-untyped-def]
    """Begin a send on an idle row; return whether it is done. `mark`: `CHECKED` for checksums, or 0."""
    state[row + TAG], state[row + CODE], state[row + BYTES], state[row + MARK] = tag, code, nbytes, mark
    state[row + ADDRESS], state[row + AT] = address, -1
    state[row + MODE] = PUSHES
    while state[row + MODE] == PUSHES and _push(state, row):
        pass
    ring(state[BELLS])
    return state[row + MODE] == IDLE


@compiled
def expect(state, row, tag, code, nbytes, address):  # type: ignore[no-untyped-def]
    """Accept the next message on an idle row if it has this tag; return whether it is complete."""
    state[row + DUE_TAG], state[row + DUE_CODE], state[row + DUE_BYTES] = tag, code, nbytes
    state[row + DUE_ADDRESS] = address
    state[row + MODE] = WATCHES
    _look(state, row)
    return _pull_on(state, row)


@compiled
def accept(state, row, address, kept):  # type: ignore[no-untyped-def]
    """Begin to receive the message that `advance` has found; return whether it is complete.

    `kept`: address for the checksums of a message that is delivered later; else 0.
    """
    state[row + ADDRESS], state[row + AT], state[row + KEPT] = address, -1, kept
    state[row + MODE] = PULLS
    return _pull_on(state, row)


@cache
def prepare() -> None:
    """Compile the functions, or load them from disk. Takes seconds, during which no peer should wait."""
    words, integer = _types.int64[::1], _types.int64
    advance.compile((words, integer))
    send.compile((words, *[integer] * 6))
    expect.compile((words, *[integer] * 5))
    accept.compile((words, *[integer] * 3))


@_numba.extending.intrinsic
def _words_at(typing_context, address):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return an address as a pointer to int64."""
    pointer = _types.CPointer(_types.int64)
    return pointer(_types.int64), lambda context, builder, signature, args: builder.inttoptr(  # noqa: ARG005
        args[0], context.get_value_type(pointer)
    )


@linked
def _state_of(bound):  # type: ignore[no-untyped-def]
    return _numba.carray(_words_at(bound[0]), (HEAD,))


def send_at() -> tuple[Any, Any]:
    """Describe `send` as a C function, see `images.image`, of a message's words and addresses.

    The words: address of the state, row, tag, code of the dtype, bytes.
    """

    def send_there(bound, source, target):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return np.int64(send(_state_of(bound), bound[1], bound[2], bound[3], bound[4], np.int64(0), source))

    return _types.int64(_types.CPointer(_types.int64), _types.int64, _types.int64), send_there


def expect_at() -> tuple[Any, Any]:
    """Describe `expect` as a C function of the words of `send_at`."""

    def expect_there(bound, source, target):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return np.int64(expect(_state_of(bound), bound[1], bound[2], bound[3], bound[4], target))

    return _types.int64(_types.CPointer(_types.int64), _types.int64, _types.int64), expect_there


def advance_at() -> tuple[Any, Any]:
    """Describe `advance` as a C function of these words: 1 if the message has been sent or received."""

    def advance_there(bound, patient):  # type: ignore[no-untyped-def]
        state = _state_of(bound)
        advance(state, patient)  # Python handles what it returns for other rows, from the next poll on
        return np.int64(state[bound[1] + MODE] == IDLE)

    return _types.int64(_types.CPointer(_types.int64), _types.int64), advance_there
