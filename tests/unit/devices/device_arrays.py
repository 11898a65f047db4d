"""An array library next to torch on a simulated device, like CuPy, with its own streams and memory.

Like CuPy's arrays, its arrays have `__cuda_array_interface__` and DLPack. Their freed memory belongs to the
next allocation on the stream on which it was allocated, whatever torch's `record_stream` is told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack
from unit.devices.device_model import FakeStream, FakeStreams
from unit.devices.device_tensors import Block, DeviceTensor, uploaded

ALONE = -1
"""A stream in DLPack: no ordering."""


class PoolBlock(Block):
    """Memory that torch's allocator does not know."""

    @property
    def users(self) -> list[FakeStream]:
        return []

    @users.setter
    def users(self, _: list[FakeStream]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass


class Capsule:
    """The result of `__dlpack__`, which keeps the memory."""

    def __init__(self, tensor: DeviceTensor) -> None:
        self.plain, self.block = tensor.plain, tensor.block

    def tensor(self) -> DeviceTensor:
        tensor: DeviceTensor = torch.Tensor._make_subclass(DeviceTensor, self.plain)
        tensor.plain, tensor.block = self.plain, self.block
        return tensor


class ArrayLibrary:
    """The library on one rank. `states`: whether its arrays state their stream."""

    def __init__(self, home: FakeStreams, *, states: bool = True) -> None:
        self.home, self.states = home, states
        self.current = home.create()

    @contextlib.contextmanager
    def under(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream the current one of the library."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def go_on_with(self, stream: FakeStream) -> None:
        """Make a stream the current one from here on, after the work of the present one."""
        stream.wait_stream(self.current)
        self.current = stream

    def array(self, values: Any) -> Array:
        """Values on the device, written there by the library's current stream."""
        with self.home.under(self.current):
            tensor = uploaded(self.home, torch.as_tensor(values, dtype=torch.float32))
            tensor.block.__class__ = PoolBlock
        return Array(self, tensor)


class Array:
    """An array of the library, and operations on it, which run on the library's current stream."""

    def __init__(self, library: ArrayLibrary, tensor: DeviceTensor) -> None:
        self.library, self.tensor = library, tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        plain = self.tensor.plain
        facts = {
            "shape": tuple(plain.shape),
            "typestr": "<f4",
            "data": (plain.data_ptr(), False),
            "version": 3,
        }
        stream = self.library.current.cuda_stream
        return facts | {"strides": None, "stream": stream} if self.library.states else facts | {"version": 2}

    def __dlpack__(self, *, stream: int | None = None) -> Capsule:
        home = self.library.home
        assert stream is not None, "the default stream, which the library has not been asked for"
        if stream != ALONE:
            event = home.event()
            event.record(self.library.current)
            home.external(stream).wait_event(event)
        return Capsule(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.library.home.device

    def write(self, values: Any) -> None:
        with self.library.home.under(self.library.current):
            self.tensor.copy_(uploaded(self.library.home, torch.as_tensor(values, dtype=torch.float32)))

    def read(self) -> list[float]:
        with self.library.home.under(self.library.current):
            values: list[float] = self.tensor.reshape(-1).tolist()
        return values

    def view(self, *shape: int) -> Array:
        """Return the same memory in another shape."""
        return Array(self.library, self.tensor.view(*shape))  # type: ignore[arg-type]

    @property
    def T(self) -> Array:  # noqa: N802 - as the library's
        return Array(self.library, self.tensor.t())  # type: ignore[arg-type]


def shared(value: Any) -> Any:
    """torch's `from_dlpack`, for capsules of the library too."""
    return value.tensor() if isinstance(value, Capsule) else from_dlpack(value)
