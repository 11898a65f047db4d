"""Streams and events of accelerators other than CUDA, such as XPU and devices outside torch.

Implemented with `torch.Stream`, `torch.Event` and `torch.accelerator`, which cover all accelerators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mcr_plus.core.streams import DeviceStreams, Event, Retained
from mcr_plus.errors import Unsupported


class AcceleratorEvent:
    """An event of an accelerator; each `record` makes a new torch event.

    Waiting for one record must not wait for later ones, but some accelerators do not keep them apart: if a
    stream waits for an event that it records again, `torch_openreg` waits forever.
    """

    __slots__ = ("_device", "last")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.last: torch.Event | None = None

    def record(self, stream: AcceleratorStream) -> None:
        """See `Event.record`."""
        event = torch.Event(self._device)
        event.record(stream.queue)
        self.last = event

    def query(self) -> bool:
        """See `Event.query`."""
        return self.last is None or self.last.query()


class AcceleratorStream:
    """A stream of an accelerator; two streams of the same queue are equal."""

    __slots__ = ("queue",)

    def __init__(self, queue: torch.Stream) -> None:
        self.queue = queue

    def wait_event(self, event: AcceleratorEvent) -> None:
        """Make later work on the stream wait for the work that `event` has recorded so far."""
        if event.last is not None:
            self.queue.wait_event(event.last)

    def wait_stream(self, other: AcceleratorStream) -> None:
        """Make later work on the stream wait for the present work of `other`."""
        self.queue.wait_stream(other.queue)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AcceleratorStream) and self.queue == other.queue

    def __hash__(self) -> int:
        return hash(self.queue)


class AcceleratorStreams(DeviceStreams):
    """`Streams` of an accelerator of any type, by torch's generic functions."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._kept = Retained()

    def create(self) -> Any:  # noqa: D102
        return AcceleratorStream(torch.Stream(self._place))

    def current(self) -> Any:  # noqa: D102
        return AcceleratorStream(torch.accelerator.current_stream(self._place))

    def external(self, handle: int | None) -> Any:  # noqa: D102
        raise Unsupported(f"a stream of another library ({handle}) on {self._place}: only CUDA has these")

    def event(self) -> Event:  # noqa: D102
        return AcceleratorEvent(self._place)

    @contextmanager
    def under(self, stream: Any) -> Iterator[None]:  # noqa: D102
        before = self.current()
        with self.selected():  # torch selects the device of a stream that becomes current
            torch.accelerator.set_stream(stream.queue)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before.queue)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """See `Streams.keep`. Avoids `record_stream`, which some accelerators lack."""
        event = self.event()
        event.record(stream)
        self._kept.add(event, tensor)
