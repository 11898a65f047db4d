"""A store that is lost with the rank that had it: whatever is asked then ends with the loss of that rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mcr_plus.core.c10d import FileStore, HashStore, PrefixStore, Store, TCPStore, look, put
from mcr_plus.core.job_store import JobStore
from mcr_plus.errors import LaunchError, PeerLost


class Lost:
    """The store of a rank that has died."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.has_died = False

    def __getattr__(self, name: str) -> Any:
        if self.has_died:
            raise RuntimeError("Connection reset by peer")
        return getattr(self._store, name)


def watched(inner: Any, lost: Callable[[], PeerLost | None]) -> JobStore:
    return JobStore(inner, timeout=30.0, lost=lost)


REQUESTS: list[Callable[[JobStore], object]] = [
    lambda store: store.get("here"),
    lambda store: store.set("mine", "1"),
    lambda store: store.check(["here"]),
    lambda store: store.look("here"),
    lambda store: store.wait(["here"]),
    lambda store: store.signed(b"secret", "part").set("signed", "1"),
    lambda store: store.signed(b"secret", "part").look("absent"),
]


@pytest.mark.parametrize("request_of", REQUESTS)
def test_an_error_of_the_store_is_the_loss_behind_it(request_of: Callable[[JobStore], object]) -> None:
    looks: list[int] = []

    def lost() -> PeerLost | None:
        looks.append(1)  # the death shows a little later than the error
        return PeerLost("rank 0 of the job: process has died", [0]) if len(looks) > 3 else None

    inner = Lost()
    store = watched(inner, lost)
    store.set("here", "1")
    request_of(store)
    inner.has_died = True
    with pytest.raises(PeerLost, match="rank 0"):
        request_of(store)


def test_a_store_that_is_lost_in_between_is_the_loss_too() -> None:
    inner = Lost()

    def lost() -> PeerLost | None:
        inner.has_died = True  # its last value cannot be looked for any more
        return PeerLost("rank 0 of the job: process has died", [0])

    with pytest.raises(PeerLost, match="rank 0"):
        watched(inner, lost).wait(["here"], timedelta(seconds=20))


@pytest.mark.parametrize("request_of", REQUESTS)
def test_without_a_loss_the_error_stays(request_of: Callable[[JobStore], object]) -> None:
    inner = Lost()
    store = watched(inner, lambda: None)
    inner.has_died = True
    with pytest.raises(RuntimeError, match="Connection reset"):
        request_of(store)


def _tcp(**options: Any) -> Store:
    return TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda _: HashStore(),
        lambda folder: FileStore(str(folder / "store"), 1),
        lambda _: _tcp(),
        lambda _: _tcp(use_libuv=False),
        lambda _: PrefixStore("part", PrefixStore("part", _tcp())),
        lambda _: JobStore(HashStore(), b"secret", "part"),
        lambda _: watched(JobStore(_tcp(), b"secret", "part"), lambda: None),
    ],
    ids=["hash", "file", "tcp", "tcp without libuv", "parts", "signed", "watched"],
)
def test_a_look_returns_the_value_and_writes_nothing(make: Callable[[Path], Store], tmp_path: Path) -> None:
    store = make(tmp_path)
    assert look(store, "a") is None
    assert not store.check(["a"])
    for value in (b"\0\xff value", b"", b"x" * 100_000):
        put(store, "a", value)
        assert look(store, "a") == value == store.get("a")
    assert look(store, "a/b") is None


def test_reading_an_unsigned_value_is_refused() -> None:
    inner = HashStore()
    put(inner, "a", b"of another program, long enough for a signature to precede it")
    with pytest.raises(LaunchError, match="not written by a rank of this job"):
        look(JobStore(inner, b"secret", "part"), "a")
