"""Streams of a device by the module that torch has for its type, and what is retained until an event."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from mcr_plus.core import streams
from mcr_plus.core.streams import DeviceStreams, Retained, streams_of


class Module:
    """As much of `torch.xpu` as streams need; notes its calls."""

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


def test_the_module_of_the_device_is_used(module: Module) -> None:
    of, place = DeviceStreams(torch.device("xpu")), torch.device("xpu", 2)
    assert of.device == 2
    stream = of.create()
    of.current()
    of.event()
    with of.under(stream), of.selected():
        pass
    assert module.calls == [
        ("Stream", place), ("current_stream", place), ("Event",), ("stream", stream), ("device", 2),
    ]  # fmt: skip


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


def test_what_is_retained_is_let_go_in_order_once_its_event_is_reached() -> None:
    retained, events = Retained(), [Event(), Event()]
    for event in events:
        retained.add(event, object())
    events[1].reached = True
    retained.release()
    assert len(retained._kept) == 2
    events[0].reached = True
    retained.release()
    assert not retained._kept
