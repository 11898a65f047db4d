"""Reused buffers for payloads, sums and received data: fresh pages cost more than filling them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Final

import torch

_KEPT: Final = 512 << 20
"""Most bytes to keep for reuse; tensors released beyond them are freed."""


class Pool:
    """Lends flat tensors; on the host it keeps released ones for reuse. Thread-safe.

    On a GPU torch's own allocator does the same, with respect to streams.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._free: dict[int, list[torch.Tensor]] = {}
        self._lock = Lock()

    def lease(self, device: torch.device) -> Lease:
        """Return a lease for one call, whose tensors are released together."""
        return Lease(self, device)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return an uninitialised flat uint8 tensor of at least `nbytes` bytes."""
        size = _size_class(nbytes)
        with self._lock:
            free = self._free.get(size)
            if free:
                self.nbytes -= size
                return free.pop()
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def put(self, space: torch.Tensor) -> None:
        """Take back a tensor of `take`."""
        size = space.numel()
        with self._lock:
            if self.nbytes + size <= _KEPT:
                self.nbytes += size
                self._free.setdefault(size, []).append(space)

    def clear(self) -> None:
        """Free the kept tensors."""
        with self._lock:
            self.nbytes = 0
            self._free.clear()


class Lease:
    """The tensors of one call of an operation; call `release` once nothing uses them.

    On a device they are freed with the lease: functions that follow an operation keep theirs until their
    kernels are done.
    """

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._spaces: list[torch.Tensor] = []
        self._held: list[torch.Tensor] = []  # tensors on a device

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat uninitialised tensor that begins at a multiple of 64 bytes."""
        if torch.is_inference_mode_enabled():  # its tensors cannot be written outside of it
            with torch.inference_mode(False):
                return self.tensor(numel, dtype)
        if self._device.type != "cpu":
            space = torch.empty(numel, dtype=dtype, device=self._device)
            self._held.append(space)
            return space
        space = self._pool.take(numel * dtype.itemsize)
        self._spaces.append(space)
        return space[: numel * dtype.itemsize].view(dtype)

    def release(self) -> None:
        """Return all tensors to the pool."""
        for space in self._spaces:
            self._pool.put(space)
        self._spaces.clear()

    def release_after(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls `function` and then releases the tensors."""

        def run() -> None:
            function()
            self.release()

        return run


def _size_class(nbytes: int) -> int:
    """Return the next of eight sizes between powers of two, so that at most an eighth is wasted."""
    if nbytes <= 512:
        return 512
    step = 1 << max((nbytes - 1).bit_length() - 4, 6)
    return -(-nbytes // step) * step
