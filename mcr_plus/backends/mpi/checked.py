"""Small messages with a checksum before the data, in one MPI message of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mcr_plus.backends.mpi.p2p import CHECKSUM, Receive
from mcr_plus.kernels.checksum import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcr_plus.backends.base import Corrupted, Poll, Start
    from mcr_plus.backends.mpi.p2p import MatchingQueue
    from mcr_plus.core.message import Message, Signature

MOST: Final = 4096
"""Bytes up to which a message is copied behind its checksum: a second message would cost more."""


class _Staged:
    """Memory of a message: checksum, then data."""

    __slots__ = ("address", "memory", "spec")

    def __init__(self, mpi: Any, nbytes: int) -> None:
        self.memory: Any = np.empty(CHECKSUM // 8 + -(-nbytes // 8), np.int64)
        self.address = self.memory.ctypes.data
        self.spec = [mpi.buffer.fromaddress(self.address, CHECKSUM + nbytes), mpi.BYTE]


def _done() -> bool:
    return True


class CheckedMessages:
    """Binds checked messages of one MPI communicator."""

    def __init__(self, mpi: Any, messages: Any, queue: MatchingQueue) -> None:
        self._mpi, self._isend, self._queue = mpi, messages.Isend, queue

    def send(self, signature: Signature) -> Start:
        """Return the start of sends of up to `MOST` bytes."""
        assert signature.dtype is not None
        mpi, call, tag = self._mpi, self._isend, self._queue.tag
        dtype, nbytes, free = signature.dtype, signature.nbytes or 0, list[_Staged]()

        def start(message: Message) -> Poll:
            staged = free.pop() if free else _Staged(mpi, nbytes)
            pack(staged.address, message.inputs[0].data_ptr(), nbytes)
            test = call(staged.spec, message.peer, tag(dtype, message.match_tag, checked=True)).Test
            if test():  # nearly always: libraries copy small messages
                free.append(staged)
                return _done
            return _CheckedSend(test, staged, free)

        return start

    def receive(self, signature: Signature, corrupted: Corrupted) -> Start:
        """Return the start of receives of up to `MOST` bytes; they raise what `corrupted` returns."""
        mpi, queue, free = self._mpi, self._queue, list[_Staged]()

        def start(message: Message) -> Poll:
            staged = free.pop() if free else _Staged(mpi, signature.nbytes or 0)
            return queue.post(_CheckedReceive(queue, signature, message, staged, free, corrupted))

        return start


class _CheckedSend:
    """Poll of a send that did not complete at once."""

    def __init__(self, test: Callable[[], bool], staged: _Staged, free: list[_Staged]) -> None:
        self._test, self._staged, self._free, self._is_done = test, staged, free, False

    def __call__(self) -> bool:
        """See `Poll`."""
        if not self._is_done and self._test():
            self._is_done = True
            self._free.append(self._staged)
        return self._is_done


class _CheckedReceive(Receive):
    """Poll of a receive."""

    checked = CHECKSUM

    def __init__(
        self,
        queue: MatchingQueue,
        signature: Signature,
        message: Message,
        staged: _Staged,
        free: list[_Staged],
        corrupted: Corrupted,
    ) -> None:
        (target,) = message.outputs
        super().__init__(queue, signature, message.peer, message.match_tag, target, staged.spec)
        self._staged, self._free, self._corrupted, self._is_done = staged, free, corrupted, False

    def __call__(self) -> bool:
        """Poll; raises what `Receive` raises, and an error if the message's data has changed."""
        if self._is_done:
            return True
        if self.error is not None:
            raise self.error
        if not super().__call__():
            return False
        nbytes = self.signature.nbytes or 0
        if not unpack(self._staged.address, self.target.data_ptr(), nbytes):
            assert self.source is not None
            self.error = self._corrupted(self.source, 0)
            raise self.error
        self._free.append(self._staged)
        self._is_done = True
        return True
