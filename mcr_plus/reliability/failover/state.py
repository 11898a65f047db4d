"""Detect changed tensors without a full copy, and hold tensors by weak references."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import string_at
from itertools import count
from typing import Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Copy = torch.Tensor | bytes
"""Copy of a tensor's values."""
_SMALL: Final = 512  # bytes
_SAMPLED: Final = 64  # elements of a tensor
_MOST: Final = 4096  # maximum number of storages with a known last write
_numbers = count(1)


def copy_of(tensor: torch.Tensor) -> Copy:
    """Return a copy of the tensor. Small tensors are copied as bytes, in a tenth of the time."""
    if tensor.nbytes <= _SMALL and tensor.is_contiguous():
        return string_at(tensor.data_ptr(), tensor.nbytes)
    return tensor.clone()


def nbytes_of(copy: Copy) -> int:
    """Return the bytes of a copy."""
    return len(copy) if isinstance(copy, bytes) else copy.nbytes


def restored(copy: Copy, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the values of a copy and the form of `like`, the copied tensor."""
    if not isinstance(copy, bytes):
        return copy
    if not copy:
        return torch.empty_like(like)
    return torch.frombuffer(bytearray(copy), dtype=torch.uint8).view(like.dtype).view(like.shape)


def note_writes(writes: dict[int, int], tensors: Iterable[torch.Tensor]) -> None:
    """Record that an operation writes to these tensors, since libraries write without torch's knowledge."""
    number = next(_numbers)
    if len(writes) > _MOST:
        writes.clear()  # unknown storages count as written
    for tensor in tensors:
        writes[tensor.untyped_storage().data_ptr()] = number


class TensorState(NamedTuple):
    """State of a tensor at one point in time.

    `version`: torch's change count; None if torch does not count. `written`: the last operation that writes
    to the tensor. `sample`: some elements, to detect other changes, such as through `tensor.data` or numpy.
    """

    version: int | None
    written: int | None
    sample: Copy

    @classmethod
    def of(cls, tensor: torch.Tensor, writes: dict[int, int]) -> TensorState:
        """Return the state now."""
        return cls(
            None if tensor.is_inference() else tensor._version,
            writes.get(tensor.untyped_storage().data_ptr(), 0),
            _sample_of(tensor),
        )

    def is_that_of(self, tensor: torch.Tensor, writes: dict[int, int]) -> bool:
        """Return whether the tensor is unchanged since."""
        now = TensorState.of(tensor, writes)
        is_counted = self.version is not None and self.version == now.version
        return is_counted and self.written == now.written and _is_same(self.sample, now.sample)


def _sample_of(tensor: torch.Tensor) -> Copy:
    if tensor.nbytes <= _SMALL:
        return copy_of(tensor)
    values = tensor.detach().view(-1)
    if values.numel() > _SAMPLED:
        values = values[:: values.numel() // _SAMPLED]
    return values.clone()


def _is_same(one: Copy, other: Copy) -> bool:
    if isinstance(one, bytes) or isinstance(other, bytes):
        return isinstance(one, bytes) and isinstance(other, bytes) and one == other
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # bytes: a NaN is equal to itself


class WeakTensor:
    """Weak reference to a tensor: its memory lives as long as something else refers to it."""

    __slots__ = ("_layout", "_memory", "_shell")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._memory = StorageWeakRef(tensor.untyped_storage())
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        # A detached tensor shares its source's change count; replacing `data` affects only one of them.
        self._shell = tensor.detach()
        self._shell.data = torch.empty(0, dtype=tensor.dtype, device="cpu")

    def found(self) -> tuple[torch.Tensor, bool]:
        """Return the tensor with its change count, and True; if its memory is freed, a new one and False."""
        dtype = self._shell.dtype
        memory = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        if memory is None:
            _, shape, stride = self._layout
            return torch.empty_strided(shape, stride, dtype=dtype, device="cpu"), False
        self._shell.data = torch.empty(0, dtype=dtype, device="cpu").set_(memory, *self._layout)
        return self._shell, True
