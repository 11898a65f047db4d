"""Bits that flip inside the functions of shared memory which take checksums as they move data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mcr_plus.backends.base import Poll
from mcr_plus.backends.shm import collectives_kernels as plain
from mcr_plus.backends.shm.queue import Run
from mcr_plus.core.kinds import REDUCING
from mcr_plus.core.message import Signature
from mcr_plus.dispatch.verify import checked_kernels as words

if TYPE_CHECKING:
    from verify_jobs import Flipper


def faulty(flipper: Flipper, start: Run, signature: Signature, state: Any) -> Run:
    """`start`, with a flipped bit where the flipper is armed."""
    reduces = signature.kind in REDUCING
    whole = state[plain.KIND] == plain.ALL_REDUCE_WHOLE

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
        state[words.FAULT_AFTER] = flipper.step if flipper.in_pieces else 0
        state[words.FAULT_BYTE], state[words.FAULT_MASK] = (
            flipper.draw.randrange(1 << 30),
            1 << flipper.draw.randrange(8),
        )
        state[words.FAULT], flipper.place = place, ""
        poll = start(source, target, keep)

        def ended() -> bool:
            if not poll():
                return False
            flipper.done, state[words.FAULT] = not state[words.FAULT], 0
            return True

        return ended

    return begin
