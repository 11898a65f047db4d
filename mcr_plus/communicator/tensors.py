"""Conversion of the caller's tensors for libraries: contiguous, flat, without a copy where possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from mcr_plus.core.kinds import DTYPES, dtype_name
from mcr_plus.core.streams import device_types, has_kernels
from mcr_plus.errors import InvalidArgument, Unsupported

_NOT_SHARED: Final = (BufferError, RuntimeError, TypeError, ValueError)
_GPUS: Final = (2, 10, 13)
"""DLPack device types of CUDA, ROCm and CUDA's managed memory."""


def as_tensor(value: Any, name: str) -> torch.Tensor:
    """Return a torch tensor on the memory of `value`, a tensor or an object with DLPack; never a copy.

    Raises `InvalidArgument` for other objects, `ArrayOnDevice` for device arrays, `Unsupported` for layouts,
    devices and dtypes that libraries cannot send.
    """
    tensor = value if isinstance(value, torch.Tensor) else _from_dlpack(value, name)
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "of nested tensors" if tensor.is_nested else tensor.layout
        raise Unsupported(f"{name}: layout {layout}; only strided (dense) tensors are supported")
    if not has_kernels(tensor.device.type) and tensor.device.type not in (known := device_types()):
        raise Unsupported(f"{name}: device {tensor.device}; known: {', '.join(known)}")
    if tensor.dtype not in DTYPES:
        dtypes = ", ".join(map(dtype_name, DTYPES))
        raise Unsupported(f"{name}: dtype {dtype_name(tensor.dtype)}; known: {dtypes}")
    return tensor.detach() if tensor.requires_grad else tensor


class ArrayOnDevice(InvalidArgument):
    """An array of another library is on a device, so streams must be ordered: see `arrays`."""


def is_on_device(value: Any) -> bool:
    """Return True if an object is an array of another library in GPU memory."""
    if isinstance(value, torch.Tensor):
        return False
    if hasattr(value, "__cuda_array_interface__"):
        return True
    device = getattr(value, "__dlpack_device__", None)
    try:
        return device is not None and int(device()[0]) in _GPUS
    except _NOT_SHARED:  # such as an array on several devices; `__dlpack__` will repeat the reason
        return False


def tensor_on(array: Any) -> torch.Tensor:
    """Return a tensor on the memory of a device array, without ordering streams.

    Raises `InvalidArgument` if this needs a copy, or torch cannot use the memory.
    """
    name = type(array).__name__
    interface = getattr(array, "__cuda_array_interface__", {})
    address, is_read_only = interface.get("data", (None, False))
    if is_read_only or interface.get("mask") is not None:
        raise InvalidArgument(f"{name}: the array is read-only or has a mask; pass a writeable one without")
    _check_strides(interface.get("strides"), name)
    error: Exception | None = None
    if hasattr(array, "__dlpack__"):
        try:
            return from_dlpack(array.__dlpack__(stream=-1))
        except _NOT_SHARED as reason:  # such as CuPy's managed memory; the other interface covers it
            error = reason
    try:
        tensor = torch.as_tensor(array, device="cuda") if interface else None
    except _NOT_SHARED as reason:
        tensor, error = None, reason
    if tensor is not None and (not tensor.numel() or tensor.data_ptr() == address):
        return tensor
    raise InvalidArgument(
        f"{name}: the array cannot be shared with torch"
        + (", as it lies on another device than the current one" if tensor is not None else f": {error}")
    ) from error


def _check_strides(strides: object, name: str) -> None:
    """Raise `InvalidArgument` for negative strides, on which torch aborts the process."""
    if isinstance(strides, tuple) and any(stride < 0 for stride in strides):
        raise InvalidArgument(f"{name}: the array has negative strides, unsupported by torch; pass a copy")


def _from_dlpack(value: Any, name: str) -> torch.Tensor:
    if type(value) is not np.ndarray and is_on_device(value):
        raise ArrayOnDevice(
            f"{name}: {type(value).__name__} on a device; this call takes tensors there (torch.from_dlpack)"
        )
    if not hasattr(value, "__dlpack__"):
        raise InvalidArgument(
            f"{name}: expected a tensor or an array with DLPack, got {type(value).__name__}"
        )
    flags = getattr(value, "flags", None)
    if flags is not None and getattr(flags, "writeable", True) is False:
        raise InvalidArgument(f"{name}: the array is read-only; pass a writeable one")
    _check_strides(getattr(value, "strides", None), name)
    try:
        return from_dlpack(value)
    except _NOT_SHARED as error:
        raise InvalidArgument(
            f"{name}: {type(value).__name__} cannot be shared through DLPack: {error}"
        ) from error


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is contiguous, without lazy conjugation or negation."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a contiguous copy without lazy conjugation or negation."""
    return (
        tensor
        if is_plain(tensor)
        else tensor.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    )


def plain_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or an uninitialised contiguous tensor to copy back later."""
    return tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def check_apart(tensor: torch.Tensor) -> None:
    """Raise `InvalidArgument` if elements of an output share memory, as after `expand`."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise InvalidArgument(
            f"a tensor of shape {list(tensor.shape)} is an output, but its elements share memory "
            f"(strides {list(tensor.stride())}, as from expand); pass a copy: tensor.contiguous()"
        )


def check_distinct(outputs: Sequence[torch.Tensor]) -> None:
    """Raise `InvalidArgument` if a tensor is listed as an output twice."""
    filled = [each.data_ptr() for each in outputs if each.numel()]
    if len(set(filled)) < len(filled):
        raise InvalidArgument(
            "the same tensor is an output more than once, as in [tensor] * 2; pass a tensor for each"
        )


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two contiguous tensors share memory."""
    start_a, start_b = a.data_ptr(), b.data_ptr()
    return (
        start_a < start_b + b.numel() * b.element_size() and start_b < start_a + a.numel() * a.element_size()
    )


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one flat view over tensors that are adjacent in memory; None if they are not."""
    first = tensors[0]
    at = first.data_ptr()
    for tensor in tensors:
        if not is_plain(tensor) or tensor.data_ptr() != at or tensor.dtype != first.dtype:
            return None
        at += tensor.numel() * tensor.element_size()
    total = sum(tensor.numel() for tensor in tensors)
    storage = first.untyped_storage()
    if at - storage.data_ptr() > storage.nbytes():
        return None  # separate allocations that are adjacent by chance
    return first.as_strided((total,), (1,))


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors' values in one flat tensor: a view if they are adjacent, else a copy."""
    view = joined(tensors)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if view is None else view


def pack_space(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Return a flat tensor for the tensors' values, and True if `unpack` must copy it out afterwards."""
    view = joined(tensors)
    if view is not None:
        return view, False
    total = sum(tensor.numel() for tensor in tensors)
    return torch.empty(total, dtype=tensors[0].dtype, device=tensors[0].device), True


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy consecutive parts of `flat` into `tensors`."""
    with torch.inference_mode():  # else tensors created in inference mode cannot be written
        for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
            tensor.copy_(part.view(tensor.shape))
