"""Peak of the bytes of all tensors of a program."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class TensorPeak(TorchDispatchMode):
    """Counts the bytes of the storages that operators return, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self._known = WeakIdKeyDictionary()
        self._active = False

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
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor) and each.layout == torch.strided:
                self._count(each.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known[storage] = size = storage.nbytes()
            weakref.finalize(storage, self._free, size)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def _free(self, size: int) -> None:
        self.bytes -= size
