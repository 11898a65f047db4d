"""Bits that flip inside the functions that move data and take its checksums."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mcr_plus.backends.base import Corrupted, Poll, Start
from mcr_plus.backends.gloo.channel import GlooChannel
from mcr_plus.backends.mpi import checked as packed
from mcr_plus.backends.mpi.channel import MpiChannel
from mcr_plus.backends.shm import collectives_state as plain
from mcr_plus.backends.shm import faults, p2p_checks
from mcr_plus.backends.shm import p2p_kernels as rows
from mcr_plus.backends.shm.backend import SharedMemoryChannel
from mcr_plus.backends.shm.queue import Run
from mcr_plus.core.kinds import REDUCING
from mcr_plus.core.message import Message, Signature
from mcr_plus.kernels import checksum
from mcr_plus.reliability.verify import checked_kernels as words

if TYPE_CHECKING:
    from jobs.reliability.verify_jobs import Flipper


def put_fault(fault: int, place: int, draw: random.Random, after: int = 0) -> None:
    """Have a random bit flip, see `faults`."""
    values = {
        faults.AFTER: after,
        faults.BYTE: draw.randrange(1 << 30),
        faults.MASK: 1 << draw.randrange(8),
        faults.PLACE: place,
    }
    for word, value in values.items():
        ctypes.c_int64.from_address(fault + 8 * word).value = value


def faulty(flipper: Flipper, start: Run, signature: Signature, state: Any) -> Run:
    """`start`, with a flipped bit where the flipper is armed."""
    reduces = signature.kind in REDUCING
    whole = state[plain.KIND] == plain.ALL_REDUCE_WHOLE
    fault = state.ctypes.data + 8 * words.FAULT

    def begin(source: int, target: int, keep: object) -> Poll:
        if not flipper.place or (flipper.step and not reduces and not flipper.in_pieces):
            return start(source, target, keep)
        place = words.IN_SLOT if flipper.place == "sent" else words.IN_TARGET
        if whole and flipper.place == "arrived":
            place = words.IN_SUMS
        elif reduces and (flipper.step or flipper.in_pieces):
            place = words.IN_SUMS if flipper.place == "sent" else words.IN_TARGET
        elif reduces and flipper.place == "arrived":
            place = words.IN_PEER
        put_fault(fault, place, flipper.draw, flipper.step if flipper.in_pieces else 0)
        flipper.place = ""
        poll = start(source, target, keep)

        def ended() -> bool:
            if not poll():
                return False
            flipper.done, state[words.FAULT] = not state[words.FAULT], 0
            return True

        return ended

    return begin


def flip_carried(
    channel: SharedMemoryChannel | MpiChannel | GlooChannel, place: Callable[[], str], draw: random.Random
) -> list[int]:
    """Flip a bit of messages with checksums if `place` names one; return the flips."""
    armed, flips = dict[int, int](), list[int]()
    bind = channel.bind_checked
    if isinstance(channel, SharedMemoryChannel):
        _in_slots(channel, armed, flips, draw)
    elif isinstance(channel, MpiChannel):
        _in_packets(armed, flips, draw)
    else:
        _beside_gloo(armed, flips, draw)

    def bind_flipping(signature: Signature, every: int, corrupted: Corrupted) -> Start | None:
        start = bind(signature, every, corrupted)
        if start is None:
            return None

        def begin(message: Message) -> Poll:
            mine = place()
            if mine == "sent" and message.inputs:
                armed[message.inputs[0].data_ptr()] = p2p_checks.IN_SLOT
            elif mine == "arrived" and message.outputs:
                armed[message.outputs[0].data_ptr()] = p2p_checks.IN_TARGET
            return start(message)

        return begin

    channel.bind_checked = bind_flipping  # type: ignore[method-assign]
    return flips


_CARRY = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_carriers: list[Any] = []  # as long as shared memory may call them


def _in_slots(
    channel: SharedMemoryChannel, armed: dict[int, int], flips: list[int], draw: random.Random
) -> None:
    messages = channel._messages("faults")
    assert messages.check()
    state = messages._state
    for word in (rows.CARRY_OUT, rows.CARRY_IN):
        carry = _CARRY(int(state[word]))

        def faulty(row: int, place: int, at: int, nbytes: int, carry: Any = carry) -> None:
            address = ctypes.c_int64.from_address(row + 8 * rows.ADDRESS).value
            where = armed.pop(address, 0)
            if where:
                put_fault(row + 8 * rows.FAULT, where, draw)
                flips.append(address)
            carry(row, place, at, nbytes)

        _carriers.append(_CARRY(faulty))
        state[word] = ctypes.cast(_carriers[-1], ctypes.c_void_p).value


def _in_packets(armed: dict[int, int], flips: list[int], draw: random.Random) -> None:
    pack, unpack = (vars(packed)[name] for name in ("pack", "unpack"))

    def flip(address: int, packet: int, nbytes: int) -> None:
        if armed.pop(address, 0):
            flips.append(address)
            byte = ctypes.c_uint8.from_address(packet + draw.randrange(8 + nbytes))
            byte.value ^= 1 << draw.randrange(8)

    def pack_and_flip(packet: int, source: int, nbytes: int) -> None:
        pack(packet, source, nbytes)
        flip(source, packet, nbytes)

    def flip_and_unpack(packet: int, target: int, nbytes: int) -> Any:
        flip(target, packet, nbytes)
        return unpack(packet, target, nbytes)

    for name, function in {"pack": pack_and_flip, "unpack": flip_and_unpack}.items():
        setattr(packed, name, function)


def _beside_gloo(armed: dict[int, int], flips: list[int], draw: random.Random) -> None:
    of_blocks, first_changed = checksum.of_blocks, checksum.first_changed

    def flip(values: torch.Tensor) -> None:
        address = values.data_ptr()
        if armed.pop(address, 0):
            flips.append(address)
            byte = ctypes.c_uint8.from_address(address + draw.randrange(values.nbytes))
            byte.value ^= 1 << draw.randrange(8)

    def take_and_flip(values: torch.Tensor) -> torch.Tensor:
        words = of_blocks(values)
        flip(values)
        return words

    def flip_and_compare(values: torch.Tensor, sent: torch.Tensor) -> int | None:
        flip(values)
        return first_changed(values, sent)

    for name, function in (("of_blocks", take_and_flip), ("first_changed", flip_and_compare)):
        setattr(checksum, name, function)


def carries_checksum(channel: SharedMemoryChannel, peer: int, *, incoming: bool) -> bool:
    """Return whether the last message to or from a rank carried checksums."""
    row = rows.HEAD + (2 * peer + incoming) * rows.ROW
    return bool(channel._messages("faults")._state[row + rows.MARK] == rows.CHECKED)
