"""Streams and events of one device, with the functions that order operations on it.

For CUDA and ROCm they come from `torch.cuda`; `accelerators` has the functions for other devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any, Final, Protocol, TypeVar

import torch

from mcr_plus.core.threads import Background

T = TypeVar("T")
_MOST_KNOWN: Final = 256
_LEGACY: Final = 1  # CUDA's handle of the default stream, which torch calls 0
_OWN_KERNELS: Final = ("cpu", "cuda")


def has_kernels(kind: str) -> bool:
    """Return whether this library has kernels for a device type; the host encodes other devices' tensors."""
    return kind in _OWN_KERNELS


def device_types() -> tuple[str, ...]:
    """Return the device types that calls accept: the host, CUDA, and torch's accelerator."""
    accelerator = None
    with suppress(RuntimeError):  # torch 2.6 raises without an accelerator
        accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type in _OWN_KERNELS:
        return _OWN_KERNELS
    return *_OWN_KERNELS, accelerator.type


def current_accelerator() -> torch.device:
    """Return the current device of the accelerator that torch has loaded; CUDA's without one."""
    kind = device_types()[-1]
    return torch.device(kind, torch.get_device_module(kind).current_device())


class Event(Protocol):
    """An event of a stream, such as `torch.cuda.Event`."""

    def record(self, stream: Any) -> None:
        """Record the event at the end of the work enqueued on `stream`."""
        ...

    def query(self) -> bool:
        """Return whether the stream has reached the event; true for an event that was never recorded."""
        ...


class Streams(Protocol):
    """The streams of the device with index `device` among those of its type."""

    device: int

    def create(self) -> Any:
        """Return a new stream."""
        ...

    def current(self) -> Any:
        """Return the current stream of the calling thread."""
        ...

    def external(self, handle: int | None) -> Any:
        """Return another library's stream by its CUDA handle; None: the default stream."""
        ...

    def event(self) -> Event:
        """Return a new event."""
        ...

    def under(self, stream: Any) -> AbstractContextManager[object]:
        """Make `stream` the calling thread's current stream in a block."""
        ...

    def selected(self) -> AbstractContextManager[object]:
        """Make the device the calling thread's current device in a block."""
        ...

    def background(self, call: Callable[[], T]) -> Background[T]:
        """Run a call that may block in a separate thread, whose current device is this one."""
        ...

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of `tensor` until `stream` has finished the work enqueued so far."""
        ...

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised contiguous tensor in page-locked host memory, with the shape of `like`."""
        ...

    def memory(self) -> int:
        """Return the bytes of the device's memory."""
        ...

    def scratch(self) -> torch.Tensor:
        """Return a tensor with one zero on the device."""
        ...


class DeviceStreams:
    """`Streams` of a CUDA device, by torch's module for its type."""

    def __init__(self, device: torch.device) -> None:
        self._torch: Any = torch.get_device_module(device)
        self.device: int = self._torch.current_device() if device.index is None else device.index
        self._place = torch.device(device.type, self.device)
        self._number: Callable[[int], int] | None = None
        if device.type == "cuda":
            self._number = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._known: dict[int, Any] = {}  # torch creates an object per request, in 7 microseconds

    def create(self) -> Any:  # noqa: D102
        return self._torch.Stream(self._place)

    def current(self) -> Any:  # noqa: D102
        if self._number is None:
            return self._torch.current_stream(self._place)
        number = self._number(self.device)
        stream = self._known.get(number)
        if stream is None:
            if len(self._known) >= _MOST_KNOWN:  # streams of other libraries come and go
                self._known.clear()
            stream = self._known[number] = self._torch.current_stream(self._place)
        return stream

    def external(self, handle: int | None) -> Any:  # noqa: D102
        if handle is None or handle == _LEGACY:
            return self._torch.default_stream(self._place)
        return self._torch.ExternalStream(handle, device=self._place)

    def event(self) -> Event:  # noqa: D102
        event: Event = self._torch.Event()
        return event

    def under(self, stream: Any) -> AbstractContextManager[object]:  # noqa: D102
        if self._number is not None and self._torch.current_device() == self.device:
            return _Under(self, stream, self._torch.set_stream)
        context: AbstractContextManager[object] = self._torch.stream(stream)
        return context

    def selected(self) -> AbstractContextManager[object]:  # noqa: D102
        context: AbstractContextManager[object] = self._torch.device(self.device)
        return context

    def background(self, call: Callable[[], T]) -> Background[T]:  # noqa: D102
        return Background(call, self.selected())

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:  # noqa: D102
        tensor.record_stream(stream)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True, device="cpu")

    def memory(self) -> int:  # noqa: D102
        total: int = self._torch.get_device_properties(self._place).total_memory
        return total

    def scratch(self) -> torch.Tensor:  # noqa: D102
        return torch.zeros(1, dtype=torch.int32, device=self._place)


class _Under:
    """A stream as the current one in a block, on the current device; torch's takes ten times as long."""

    __slots__ = ("_before", "_of", "_set", "_stream")

    def __init__(self, of: Streams, stream: Any, set_stream: Callable[[Any], None]) -> None:
        self._of = of
        self._stream = stream
        self._set = set_stream
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = self._of.current()
        self._set(self._stream)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)


def _made_for(device: torch.device) -> Streams:
    if device.type == "cuda":
        return DeviceStreams(device)
    from mcr_plus.core.accelerators import AcceleratorStreams

    return AcceleratorStreams(device)


_made = cache(_made_for)


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device; without an index, of the current device of its type."""
    if device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return _made(device)


def recorded(device: torch.device) -> Event | None:
    """Return an event at the end of the current stream's work; None for the host, which works in order."""
    if device.type == "cpu":
        return None
    streams = streams_of(device)
    event = streams.event()
    event.record(streams.current())
    return event


def follow(event: Event | None, device: torch.device) -> None:
    """Make the current stream wait for an event of `recorded`."""
    if event is not None:
        streams_of(device).current().wait_event(event)


class Retained:
    """Objects that streams may still use, such as the tensors of a function that has launched kernels.

    A later `add` releases an object once its event has been reached.
    """

    def __init__(self) -> None:
        self._kept = deque[tuple[Event, object]]()

    def add(self, event: Event, used: object) -> None:
        """Keep `used` until the recorded `event` has been reached."""
        self.release()
        self._kept.append((event, used))

    def release(self) -> None:
        """Release objects whose events have been reached, in the order of `add`."""
        kept = self._kept
        with suppress(IndexError):  # another thread may take the last one
            while kept and kept[0][0].query():
                kept.popleft()
