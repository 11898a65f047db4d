"""Memory for payloads and sums, used again: fresh pages cost more than encoding into them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final

import torch

_KEPT: Final = 512 << 20
"""Bytes that are kept for later; what comes back beyond them is freed."""


class Pool:
    """Lends flat tensors; on the host it keeps what comes back. Any thread may use it.

    On a GPU torch's own allocator does the same, and knows about streams.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._free: dict[int, list[torch.Tensor]] = {}
        self._lock = Lock()

    def lend(self, device: torch.device) -> Loan:
        """What an operation borrows, to be returned as one."""
        return Loan(self, device)

    def take(self, nbytes: int) -> torch.Tensor:
        """A tensor of at least `nbytes` bytes, with whatever is in it."""
        size = _size_class(nbytes)
        with self._lock:
            free = self._free.get(size)
            if free:
                self.nbytes -= size
                return free.pop()
        return torch.empty(size, dtype=torch.uint8)

    def put(self, space: torch.Tensor) -> None:
        """Take a tensor back."""
        size = space.numel()
        with self._lock:
            if self.nbytes + size <= _KEPT:
                self.nbytes += size
                self._free.setdefault(size, []).append(space)


class Loan:
    """What one call of an operation has borrowed; `give_back` once nothing uses it any more."""

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._spaces: list[torch.Tensor] = []

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor with whatever is in it; begins at a multiple of 64 bytes."""
        if self._device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=self._device)
        space = self._pool.take(numel * dtype.itemsize)
        self._spaces.append(space)
        return space[: numel * dtype.itemsize].view(dtype)

    def give_back(self) -> None:
        """Return everything."""
        for space in self._spaces:
            self._pool.put(space)
        self._spaces.clear()

    def then_back(self, function: Callable[[], None]) -> Callable[[], None]:
        """A function that calls another one and gives everything back."""

        def run() -> None:
            function()
            self.give_back()

        return run


def _size_class(nbytes: int) -> int:
    """The next of eight sizes between powers of two, so that at most an eighth is wasted."""
    if nbytes <= 512:
        return 512
    step = 1 << max((nbytes - 1).bit_length() - 4, 6)
    return -(-nbytes // step) * step
