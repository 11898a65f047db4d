"""Streams of CUDA and of other accelerators, and memory retained until an event."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mcr_plus.communicator.tensors import as_tensor
from mcr_plus.core import streams
from mcr_plus.core.accelerators import AcceleratorStreams
from mcr_plus.core.streams import DeviceStreams, Retained, streams_of
from mcr_plus.errors import Unsupported


class Module:
    """The part of `torch.cuda` that streams need; notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            return contextlib.nullcontext(name)

        return call

    def current_device(self) -> int:
        return 2


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    made = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    return made


def test_the_module_of_the_device_is_used(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    # Builds of torch with CUDA have it, and it asks the driver, which no test may need.
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    of, place = DeviceStreams(torch.device("cuda")), torch.device("cuda", 2)
    assert of.device == 2
    stream = of.create()
    of.current()
    of.event()
    with of.under(stream), of.selected():
        pass
    assert module.calls == [
        ("Stream", place), ("current_stream", place), ("Event",), ("stream", stream), ("device", 2),
    ]  # fmt: skip


class Queue:
    """The part of `torch.Stream` that streams need: a log of its work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.log: list[Any] = []

    def wait_event(self, event: Mark) -> None:
        self.log.append(event)


class Mark:
    """The part of `torch.Event` that streams need."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reached = False

    def record(self, queue: Queue) -> None:
        queue.log.append("record")

    def query(self) -> bool:
        return self.reached


class Accelerator:
    """The part of `torch.accelerator` that streams need."""

    def __init__(self) -> None:
        self.now = Queue(torch.device("xpu", 2))

    def current_accelerator(self) -> torch.device:
        return torch.device("xpu")

    def current_stream(self, device: torch.device) -> Queue:
        assert device == self.now.device
        return self.now

    def set_stream(self, queue: Queue) -> None:
        self.now = queue


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch, module: Module) -> Accelerator:
    made = Accelerator()
    assert module.current_device() == 2
    monkeypatch.setattr(torch, "accelerator", made)
    monkeypatch.setattr(torch, "Stream", Queue)
    monkeypatch.setattr(torch, "Event", Mark)
    return made


def test_other_accelerators_have_streams_by_what_torch_has_for_all(accelerator: Accelerator) -> None:
    of, before = AcceleratorStreams(torch.device("xpu")), accelerator.now
    stream, event = of.create(), of.event()
    assert event.query()
    stream.wait_event(event)  # never recorded, so there is nothing to wait for
    assert stream.queue.log == []
    with of.under(stream):
        assert of.current() == stream
        assert accelerator.now is stream.queue
    assert accelerator.now is before
    event.record(of.current())
    assert before.log == ["record"]
    assert not event.query()


@pytest.mark.usefixtures("accelerator")
def test_a_wait_is_for_what_has_been_recorded_by_then() -> None:
    of = AcceleratorStreams(torch.device("xpu"))
    stream, event = of.create(), of.event()
    event.record(stream)
    stream.wait_event(event)
    event.record(stream)
    recorded, waited, again = stream.queue.log
    assert (recorded, again) == ("record", "record")
    assert isinstance(waited, Mark)
    waited.reached = True
    assert not event.query()


@pytest.mark.usefixtures("accelerator")
def test_memory_is_kept_until_the_stream_has_finished_with_it() -> None:
    of = AcceleratorStreams(torch.device("xpu"))
    first, second = torch.zeros(1), torch.zeros(1)
    of.keep(first, of.current())
    assert of._kept._kept[0][1] is first
    of.keep(second, of.current())
    assert len(of._kept._kept) == 2
    event: Any = of._kept._kept[0][0]
    event.last.reached = True
    of._kept.release()
    assert [used for _, used in of._kept._kept] == [second]


@pytest.mark.usefixtures("accelerator")
def test_streams_of_other_libraries_and_other_devices_are_refused() -> None:
    with pytest.raises(Unsupported, match="only CUDA has these"):
        AcceleratorStreams(torch.device("xpu")).external(7)
    with pytest.raises(Unsupported, match="x: device meta; known: cpu, cuda, xpu"):
        as_tensor(torch.empty(1, device="meta"), "x")


def test_a_torch_that_raises_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    none = RuntimeError("Cannot access accelerator device when none is available.")  # torch 2.6
    monkeypatch.setattr(torch.accelerator, "current_accelerator", Mock(side_effect=none))
    assert streams.device_types() == ("cpu", "cuda")
    with pytest.raises(Unsupported, match=r"x: device meta; known: cpu, cuda$"):
        as_tensor(torch.empty(1, device="meta"), "x")


@pytest.mark.usefixtures("module")
def test_a_device_without_an_index_is_the_current_one() -> None:
    assert streams_of(torch.device("xpu")) is streams_of(torch.device("xpu", 2))
    assert streams_of(torch.device("xpu", 1)).device == 1


def test_the_host_needs_no_event() -> None:
    assert streams.recorded(torch.device("cpu")) is None
    streams.follow(None, torch.device("cpu"))


class Event:
    def __init__(self) -> None:
        self.reached = False

    def record(self, stream: Any) -> None:
        raise NotImplementedError

    def query(self) -> bool:
        return self.reached


def test_retained_objects_are_released_in_order_after_their_events() -> None:
    retained, events = Retained(), [Event(), Event()]
    for event in events:
        retained.add(event, object())
    events[1].reached = True
    retained.release()
    assert len(retained._kept) == 2
    events[0].reached = True
    retained.release()
    assert not retained._kept
