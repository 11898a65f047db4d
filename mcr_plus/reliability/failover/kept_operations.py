"""Keep operations that are complete on this rank, because other ranks may still need them.

The memory for copies, and for tensors that the program has dropped, is limited. Above the limit, the oldest
operations hold their tensors only by weak references. Nothing is lost as long as the program itself holds
these tensors, as it does for gradient buckets.
"""

from __future__ import annotations

from collections import deque
from threading import RLock
from typing import TYPE_CHECKING, Final

from mcr_plus.reliability.failover.state import Copy, copy_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from mcr_plus.reliability.failover.attempt import FailoverPoll

_MOST: Final = 64
_MOST_BYTES: Final = 256 << 20  # kept tensors and copies; the last operation's are always kept
_FREE: Final = 4  # spare copies per size
_MOST_FREE_BYTES: Final = 256 << 20  # bytes of all spare copies


class KeptOperations:
    """The last complete operations, and memory for copies of inputs."""

    def __init__(self) -> None:
        self._attempts: deque[FailoverPoll] = deque()
        self._nbytes = 0
        # Synchronous operations call `add` without the engine's lock, other threads with the lock.
        self._making_room = RLock()
        self._free: dict[int, list[torch.Tensor]] = {}  # number of bytes → spare copies
        self._free_nbytes = 0

    def __iter__(self) -> Iterator[FailoverPoll]:
        return iter(self._attempts)

    def add(self, attempt: FailoverPoll) -> None:
        """Keep an operation; drop tensors of the oldest ones if memory is short."""
        self._attempts.append(attempt)
        self._nbytes += attempt.kept_bytes
        if len(self._attempts) > _MOST:
            oldest = self._attempts.popleft()
            self._nbytes -= oldest.kept_bytes
            self._take_back(oldest.let_go())
        if self._nbytes > _MOST_BYTES:
            with self._making_room:
                self._make_room()

    def _make_room(self) -> None:
        """First drop tensors, oldest first, then copies."""
        *older, _ = self._attempts
        for give_copies in (False, True):
            for attempt in older:
                if self._nbytes <= _MOST_BYTES:
                    return
                self._nbytes -= attempt.kept_bytes
                if give_copies:
                    self._take_back(attempt.give_copies())
                else:
                    attempt.weaken()
                self._nbytes += attempt.kept_bytes

    def _take_back(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            if isinstance(copy, bytes):
                continue
            free = self._free.setdefault(copy.nbytes, [])
            if len(free) < _FREE and copy.numel():
                free.append(copy.view(-1))
                self._free_nbytes += copy.nbytes
        if self._free_nbytes > _MOST_FREE_BYTES:  # there are many sizes, which may not recur
            self._free.clear()
            self._free_nbytes = 0

    def copied(self, tensor: torch.Tensor) -> Copy:
        """Return a copy of a tensor, in an earlier copy's memory if possible, because new memory is slow."""
        free = self._free.get(tensor.nbytes)
        if not free:
            return copy_of(tensor)
        self._free_nbytes -= tensor.nbytes
        return free.pop().view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def clear(self) -> None:
        """Drop everything."""
        self._attempts.clear()
        self._free.clear()
        self._nbytes = self._free_nbytes = 0
