"""Operations that are complete here, kept for ranks on which they are not."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from mcr_plus.dispatch.failover.attempt import Attempt

_MOST: Final = 64
_MOST_BYTES: Final = 256 << 20  # of their tensors and copies; the last operation is kept in any case
_FREE: Final = 4  # copies of a size that wait to be used again


class Kept:
    """The last complete operations, and memory for copies of inputs."""

    def __init__(self) -> None:
        self._attempts: deque[Attempt] = deque()
        self._nbytes = 0
        self._free: dict[int, list[torch.Tensor]] = {}  # by bytes

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts)

    def add(self, attempt: Attempt) -> None:
        """Keep an operation, and let go of the oldest ones."""
        self._attempts.append(attempt)
        self._nbytes += attempt.kept_bytes
        while len(self._attempts) > _MOST or (self._nbytes > _MOST_BYTES and len(self._attempts) > 1):
            oldest = self._attempts.popleft()
            self._nbytes -= oldest.kept_bytes
            for copy in oldest.let_go():
                free = self._free.setdefault(copy.nbytes, [])
                if len(free) < _FREE and copy.numel():
                    free.append(copy.view(-1))

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, in the memory of a former one if there is some: new memory is slow."""
        free = self._free.get(tensor.nbytes)
        return free.pop().view(tensor.dtype).view(tensor.shape).copy_(tensor) if free else tensor.clone()

    def clear(self) -> None:
        """Let go of everything."""
        self._attempts.clear()
        self._free.clear()
        self._nbytes = 0
