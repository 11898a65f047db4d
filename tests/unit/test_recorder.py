"""Which requests for dumps a rank answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mcr_plus.observe import recorder
from mcr_plus.observe.recorder import Recorder


class Times:
    """A clock, and a recorder whose dumps take so many seconds of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now = 100.0
        self.asked: list[str] = []
        self.written: list[str] = []
        self.seconds = seconds
        clock = SimpleNamespace(monotonic=lambda: self.now, time_ns=lambda: int(self.now * 1e9))
        monkeypatch.setattr(recorder, "time", clock)
        monkeypatch.setattr(recorder, "DumpWatcher", lambda *_: None)
        monkeypatch.setattr(recorder, "dump_folder_of", lambda _: ("dumps", ""))
        monkeypatch.setattr(recorder, "ask", lambda _, text: self.asked.append(text))
        monkeypatch.setattr(recorder, "take_snapshot", lambda _, reason, *__: reason)
        peers = SimpleNamespace(beside=lambda: [1], ask_elsewhere=lambda _: None)
        engine, world = (
            SimpleNamespace(peers=peers, waits=[], add_hook=lambda _: None),
            SimpleNamespace(rank=0),
        )
        self.recorder = Recorder(engine, world, None)  # type: ignore[arg-type]
        monkeypatch.setattr(self.recorder, "_write_for", self._write)
        monkeypatch.setattr(self.recorder, "_note", lambda _: SimpleNamespace())

    def _write(self, reason: str) -> None:
        self.written.append(reason)
        self.now += self.seconds

    def request(self, *texts: str) -> list[str]:
        """The reasons of what is written for these requests."""
        before = len(self.written)
        for text in texts:
            self.recorder._on_request(text)
        return self.written[before:]


def failed(group: str) -> Any:
    """An operation of a group of which none has failed before."""
    state = SimpleNamespace(group=SimpleNamespace(name=group), failure=None)
    return SimpleNamespace(operation=SimpleNamespace(state=state))


@pytest.mark.parametrize("seconds", [0.02, 20.0])
def test_a_failure_that_many_ranks_find_at_once_is_dumped_once(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    times = Times(monkeypatch, seconds)
    many = [f"world\0rank {rank}: PeerLost: rank 99" for rank in range(1, 99)]
    assert times.request(*many) == ["rank 1: PeerLost: rank 99"]
    assert times.request("other\0rank 1: an error") == ["rank 1: an error"]
    assert times.recorder.fails(failed("mine"), ValueError("x")) is not None
    assert times.asked == ["mine\0rank 0: ValueError: x"]
    assert times.request("mine\0rank 1: ValueError: x") == [], "its own dump says more"
    times.now += 60.0
    assert times.request("world\0rank 3: of another group of the name") == [
        "rank 3: of another group of the name"
    ]


def test_signals_to_all_ranks_are_one_demand_where_dumps_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch, 3.0)
    signals = [f"\0SIGUSR2 to rank {rank}" for rank in range(1, 9)]
    assert times.request(*signals) == ["SIGUSR2 to rank 1"]
    times.now += 60.0
    times.recorder._on_signal()
    assert times.request(*signals) == []
    times.now += 60.0
    assert times.request(signals[0]) == ["SIGUSR2 to rank 1"]


def test_a_signal_that_another_rank_has_told_of_is_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's signal may come after the request of a rank that has got it before."""
    times = Times(monkeypatch, 3.0)
    assert times.request("\0SIGUSR2 to rank 1") == ["SIGUSR2 to rank 1"]
    times.recorder._on_signal()
    assert times.written == ["SIGUSR2 to rank 1"]
    assert times.asked == []
    times.now += 60.0
    times.recorder._on_signal()
    times.recorder._on_signal()  # of somebody who wants a newer one
    assert times.written == ["SIGUSR2 to rank 1", "SIGUSR2", "SIGUSR2"]
    times.now += 60.0
    assert times.request("*\0mcr-plus top --dump 1") == ["mcr-plus top --dump 1"]
    times.recorder._on_signal()
    assert times.written[-1] == "SIGUSR2"
