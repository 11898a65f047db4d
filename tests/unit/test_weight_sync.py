"""Both ends of a weight synchronisation in one process, where threads can be made to meet at any point."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mcr_plus.errors import BackendError, InvalidArgument
from mcr_plus.kernels.digest import digest
from mcr_plus.training import weight_link as links
from mcr_plus.training.weight_receiver import WeightReceiver
from mcr_plus.training.weight_source import WeightSource
from mcr_plus.training.weights import Weights

Tensors = dict[str, torch.Tensor]


@contextmanager
def joined(source: Tensors, receiver: Tensors) -> Iterator[tuple[WeightSource, WeightReceiver]]:
    """A source and a receiver, over loopback."""
    ends, listener = threading.Event(), links.listen("127.0.0.1")
    here, there = Weights(source), Weights(receiver)
    one = WeightSource(here, "sync", b"secret", listener, 1, here.nbytes, ends.is_set)
    place = listener.getsockname()[:2]
    other = WeightReceiver(there, "sync", b"secret", place, 0, 1, ends.is_set)
    try:
        yield one, other
    finally:
        ends.set()
        other.close()
        one.close()


def test_damaged_versions_are_never_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    received, number = WeightReceiver._received, 0

    def damaged(self: WeightReceiver, link: links.Link) -> tuple[int, int, int, bytearray]:
        nonlocal number
        kind, newest, count, body = received(self, link)
        number += 1
        if count and number % 2:
            body[-8] ^= 0x11
        return kind, newest, count, body

    monkeypatch.setattr(WeightReceiver, "_received", damaged)
    values = torch.arange(100_000, dtype=torch.int16)
    source, receiver = {"w": values.clone()}, {"w": values.clone()}
    digests: dict[int, int] = {}
    switches = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with joined(source, receiver) as (pushes, pulls):
            pulled, version, ends = 0, 0, time.monotonic() + 30
            while pulled < 100 and time.monotonic() < ends:
                version += 1
                source["w"][version % 50 :: 50] += 1
                digests[version] = digest(source["w"])
                pushes.push(version)
                if (found := pulls.pull(False, 0.0)) is not None:
                    pulled += 1
                    assert digest(receiver["w"]) == digests[found], found
            assert pulled
            assert pulls.stats()["refused"] > 0
    finally:
        sys.setswitchinterval(switches)


def test_a_receiver_that_is_late_and_connects_again_is_not_lost() -> None:
    source, receiver = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    with joined(source, receiver) as (pushes, pulls):
        for version in range(1, 10):  # it pauses after some
            source["w"][version] = version
            pushes.push(version)
            time.sleep(0.02)
        for link in list(pushes._links.values()):
            link.close()
        pushes.push(10)  # the only receiver has no connection now
        seen = 0
        while seen < 10:
            seen = pulls.pull(True, 20.0) or 0
        assert torch.equal(receiver["w"], source["w"])


def test_threads_end_and_a_superseded_connection_is_closed() -> None:
    before = set(threading.enumerate())
    source, receiver = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    with joined(source, receiver) as (pushes, pulls):
        pushes.push(1)
        assert pulls.pull(True, 20.0) == 1
        (first,) = pushes._links.values()
        place = pushes._listener.getsockname()[:2]
        second = links.connect(place, b"secret", 1, lambda: False, 1)
        ends = time.monotonic() + 20
        while first._socket.fileno() >= 0 and time.monotonic() < ends:
            time.sleep(0.01)
        assert first._socket.fileno() < 0
        second.close()
    assert not [each for each in threading.enumerate() if each not in before and each.is_alive()]


@pytest.mark.parametrize("knows", ["the receiver", "the source"])
def test_both_ends_prove_that_they_are_of_the_job(knows: str) -> None:
    """One of them is another program, which says what the protocol asks for, without the secret."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    here, there = links.Link(near, lambda: False), links.Link(far, lambda: False)
    if knows == "the source":
        there.put((1).to_bytes(4, "little") + bytes(64))
        with pytest.raises(BackendError, match="not of this job asked for weights"):
            links.greeted(here, b"secret")
    else:
        there.put(bytes(32))
        there.put(bytes(32))
        with pytest.raises(BackendError, match="not of this job listens"):
            links.greet(here, b"secret", 1)
    here.close()
    there.close()


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(1).expand(3), "is expanded"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "is a conjugated view"),
        (torch.nn.parameter.UninitializedParameter(), "has no shape yet"),
    ],
)
def test_tensors_without_bits_of_their_own_are_refused(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"'w' {text}"):
        Weights({"w": tensor})
