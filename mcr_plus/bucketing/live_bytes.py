"""Bytes of all tensors of a program, and their peak."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators return while it is on, until they are freed.

    In the backward pass of other devices than the CPU it sees nothing.

    Attributes:
        now: bytes in use. peak: the most at once, since the last `mark`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known = WeakIdKeyDictionary()
        self._active = False

    def add(self, value: Any) -> None:
        """Count the tensors in nested containers, each storage once."""
        for each in tree_iter(value):
            if isinstance(each, torch.Tensor) and each.layout == torch.strided and not each.is_meta:
                self._count(each.untyped_storage())

    def mark(self) -> tuple[int, int]:
        """Return what is in use, and the most since the last mark."""
        peak, self.peak = self.peak, self.now
        return self.now, peak

    def start(self) -> None:
        """Count from now on."""
        self._active = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Count no more; later calls do nothing."""
        if self._active:
            self._active = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count its results."""
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a DTensor: then come the operators on its parts
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known[storage] = size = storage.nbytes()
            weakref.finalize(storage, self._free, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _free(self, size: int) -> None:
        self.now -= size
