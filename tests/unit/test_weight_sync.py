"""Both ends of a weight synchronisation in one process, where threads can be made to meet at any point."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from mcr_plus.errors import BackendError, CommTimeout, InvalidArgument, PeerLost, SyncClosed
from mcr_plus.kernels import delta
from mcr_plus.kernels.digest import digest
from mcr_plus.layout.layout import Layout
from mcr_plus.rendezvous import stream as links
from mcr_plus.weight_sync.connection import SourceConnection
from mcr_plus.weight_sync.join import _trouble
from mcr_plus.weight_sync.receiver import AHEAD, WeightReceiver
from mcr_plus.weight_sync.shards import parts_of
from mcr_plus.weight_sync.source import WeightSource
from mcr_plus.weight_sync.weights import Weights

Tensors = dict[str, torch.Tensor]


def laid(source: Tensors, receiver: Tensors) -> tuple[Weights, Weights]:
    """The tensors of rank 0, the source, and of rank 1, with buffers for all of them."""
    both = Weights(source), Weights(receiver)
    parts = parts_of({rank: each.held for rank, each in enumerate(both)}, [0])
    for each in both:
        each.lay(parts)
    return both


@contextmanager
def joined(source: Tensors, receiver: Tensors) -> Iterator[tuple[WeightSource, WeightReceiver]]:
    """A source and a receiver, over loopback."""
    ends, listener = threading.Event(), links.listen("127.0.0.1")
    here, there = laid(source, receiver)
    one = WeightSource(here, "sync", b"secret", listener, {1: [0]}, here.nbytes, ends.is_set)
    sources = {0: (listener.getsockname()[:2], [0])}
    other = WeightReceiver(there, "sync", b"secret", sources, 1, ends.is_set)
    try:
        yield one, other
    finally:
        ends.set()
        other.close()
        one.close()


def test_damaged_versions_are_never_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    received, number = SourceConnection._received, 0

    def damaged(
        self: SourceConnection, link: links.StreamConnection, announced: Any
    ) -> tuple[int, int, int, bytearray]:
        nonlocal number
        kind, newest, count, body = received(self, link, announced)
        number += 1
        if count and number % 2:
            body[-8] ^= 0x11
        return kind, newest, count, body

    monkeypatch.setattr(SourceConnection, "_received", damaged)
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


def test_a_source_without_threads_for_a_moment_serves_later(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, threading.Event()

    def full(self: threading.Thread) -> None:
        if getattr(getattr(self, "_target", None), "__name__", "") == "_serve" and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", full)
    source, receiver = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    with joined(source, receiver) as (pushes, pulls):
        source["w"][3] = 7.0
        pushes.push(1)
        assert pulls.pull(True, 60.0) == 1
        assert torch.equal(receiver["w"], source["w"])
    assert refused.is_set()


@pytest.mark.parametrize("in_order", [True, False])
def test_a_receiver_is_told_how_its_source_ended(in_order: bool) -> None:
    source, receiver = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    with joined(source, receiver) as (pushes, pulls):
        source["w"][3] = 7.0
        pushes.push(1)
        assert pulls.pull(True, 60.0) == 1
        pushes.close(in_order=in_order)
        for _ in range(2):  # again and again
            with pytest.raises(BackendError) as caught:
                pulls.pull(True, 60.0)
            assert type(caught.value) is (SyncClosed if in_order else BackendError), caught.value
        assert torch.equal(receiver["w"], source["w"])
        assert pulls.stats()["version"] == 1


@pytest.mark.parametrize("in_order", [True, False])
def test_a_pull_in_another_thread_is_told_how_its_receiver_was_closed(in_order: bool) -> None:
    source, receiver = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    with joined(source, receiver) as (_, pulls), ThreadPoolExecutor() as pool:
        waiting = pool.submit(pulls.pull, True, 60.0)
        pulls.close(in_order=in_order)
        error = waiting.exception(60.0)
        assert type(error) is (SyncClosed if in_order else BackendError), error


def test_nothing_is_paused_while_a_pull_waits() -> None:
    """Answers of several sources may bring several versions before all have sent the same one."""
    with (
        joined({"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}) as (_, pulls),
        ThreadPoolExecutor() as pool,
    ):
        pulls._unused = AHEAD
        assert pulls._begins_pause()
        waiting = pool.submit(pulls.pull, True, 60.0)
        while not pulls._waiting:
            assert not waiting.done()
        pulls._unused = AHEAD
        assert not pulls._begins_pause()
        pulls.close()
        assert isinstance(waiting.exception(60.0), SyncClosed)
    assert not pulls._waiting


def test_a_source_that_fails_has_not_closed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **more: Any) -> int:
        raise MemoryError("no room for a payload")

    monkeypatch.setattr(delta, "encode", fails)
    source, receiver = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    with joined(source, receiver) as (pushes, pulls):
        pushes.push(1)
        with pytest.raises(BackendError, match="rank 0 sends no more: it or its job has failed") as caught:
            pulls.pull(True, 60.0)
        assert not isinstance(caught.value, SyncClosed)


def test_a_look_at_a_source_takes_no_longer_than_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def refuses(place: object, timeout: float) -> socket.socket:
        given.append(timeout)
        raise OSError("refused")

    monkeypatch.setattr(socket, "create_connection", refuses)
    for left in (0.0, 1000.0):
        error = _trouble(("127.0.0.1", 1), b"secret", time.monotonic() + left)
        assert isinstance(error, OSError)
    assert given == [0.25, 5.0]


def test_a_source_that_goes_while_it_is_looked_at_keeps_no_socket_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = connected_pair()

    def breaks(*args: object) -> None:
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(here, "send", breaks)
    monkeypatch.setattr(links, "connect", lambda *args, **more: here)
    error = _trouble(("127.0.0.1", 1), b"secret", time.monotonic() + 60.0)
    assert isinstance(error, ConnectionResetError)
    assert here._socket.fileno() == -1
    there.close()


@contextmanager
def two_sources(
    history: int, other: float = 0.0
) -> Iterator[tuple[list[Tensors], list[WeightSource], Tensors, WeightReceiver]]:
    """Ranks 0 and 1 have rows of a tensor of 5 x 3000, and rank 2, the receiver, has all of it.

    `other`: the values of the receiver at first; those of the sources are 0.
    """
    ends, rows = threading.Event(), Layout.sharded((5, 3000), [0, 1], 0)
    tensors: list[Tensors] = [{"w": torch.zeros(rows.locals[rank])} for rank in (0, 1)]
    receiver: Tensors = {"w": torch.full((5, 3000), other)}
    weights = [Weights(each, {"w": rows}, rank) for rank, each in enumerate(tensors)] + [Weights(receiver)]
    parts = parts_of({rank: each.held for rank, each in enumerate(weights)}, [0, 1])
    listeners = [links.listen("127.0.0.1") for _ in tensors]
    sources = []
    for rank, listener in enumerate(listeners):
        weights[rank].lay([parts[rank]])
        there = {2: [0]}
        sources.append(WeightSource(weights[rank], "sync", b"s", listener, there, history, ends.is_set))
    weights[2].lay(parts)
    places = {rank: (each.getsockname()[:2], [rank]) for rank, each in enumerate(listeners)}
    pulls = WeightReceiver(weights[2], "sync", b"s", places, 2, ends.is_set)
    try:
        yield tensors, sources, receiver, pulls
    finally:
        ends.set()
        pulls.close()
        for source in sources:
            source.close()


def test_a_version_is_pulled_once_all_sources_have_pushed_it() -> None:
    with two_sources(history=1 << 20) as (tensors, sources, receiver, pulls):
        for version in (1, 2, 3):
            tensors[0]["w"][:, ::100] += version
            sources[0].push(version)
        with pytest.raises(CommTimeout, match="rank 0 has one, rank 1 not yet") as raised:
            pulls.pull(True, 2.0)
        assert raised.value.missing == (1,)
        assert not receiver["w"].any(), "no part of a version is ever in the tensors"
        sums = {1: 1.0, 2: 3.0, 3: 6.0}
        seen = 0
        for version in (1, 2, 3):
            tensors[1]["w"][:, ::100] -= version
            sources[1].push(version)
        while seen < 3:
            seen = pulls.pull(True, 60.0) or 0
            assert (receiver["w"][:3, ::100] == sums[seen]).all()
            assert (receiver["w"][3:, ::100] == -sums[seen]).all()
        assert pulls.stats()["anchors"] == 0


@pytest.mark.long
def test_sources_that_have_dropped_the_version_of_another_lead_to_a_later_one() -> None:
    """Source 1 has only the step from 2 to 3 when source 0 has 2: nothing is pulled before both have 3."""
    with two_sources(history=0) as (tensors, sources, receiver, pulls):
        draw = torch.Generator().manual_seed(0)
        for version in (2, 3):
            tensors[1]["w"].copy_(torch.randn(2, 3000, generator=draw))
            sources[1].push(version)
        tensors[0]["w"].fill_(2.0)
        sources[0].push(2)
        with pytest.raises(CommTimeout):
            pulls.pull(True, 2.0)
        assert not receiver["w"].any()
        tensors[0]["w"].fill_(3.0)
        sources[0].push(3)
        assert pulls.pull(True, 60.0) == 3
        assert (receiver["w"][:3] == 3.0).all()
        assert torch.equal(receiver["w"][3:], tensors[1]["w"])


def test_a_receiver_of_other_weights_catches_up_with_a_source_that_is_always_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Source 1 has pushed once more whenever it is asked; it is asked for all its weights once."""
    tried = SourceConnection._received

    def push(rank: int, version: int) -> None:
        if version <= 40:
            tensors[rank]["w"][:, ::100] += 1
            sources[rank].push(version)
            with sources[rank]._changed:
                assert sources[rank]._changed.wait_for(lambda: sources[rank]._version == version, 60.0)

    def received(self: SourceConnection, link: links.StreamConnection, announced: Any) -> Any:
        def ahead(kind: int, version: int) -> None:
            push(1, version + 1)
            announced(kind, version)

        if self.source == 1:
            return tried(self, link, announced)
        answer = tried(self, link, ahead)
        push(0, answer[1] + 1)
        return answer

    monkeypatch.setattr(SourceConnection, "_received", received)
    with two_sources(history=1 << 20, other=0.5) as (tensors, sources, receiver, pulls):
        for rank in (1, 0):
            push(rank, 1)
        seen = 0
        while seen < 40:
            seen = pulls.pull(True, 60.0) or 0
            assert (receiver["w"][:, ::100] == seen).all()
        assert [each.stats()["anchors"] for each in sources] == [1, 1]


@pytest.mark.long
def test_a_source_that_is_gone_is_named_although_the_lead_is_there() -> None:
    with two_sources(history=0) as (tensors, sources, receiver, pulls):
        for each in sources:
            each.push(1)
        assert pulls.pull(True, 60.0) == 1
        sources[1]._acceptor.listener.close()
        for link in list(sources[1]._links.values()):
            link.close()
        with pytest.raises(PeerLost) as raised:
            pulls.pull(True, 60.0)
        assert raised.value.ranks == (1,)
        assert not tensors[0]["w"].any()
        assert not receiver["w"].any()


def test_threads_end_and_a_superseded_connection_is_closed() -> None:
    before = set(threading.enumerate())
    source, receiver = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    with joined(source, receiver) as (pushes, pulls):
        pushes.push(1)
        assert pulls.pull(True, 20.0) == 1
        (first,) = pushes._links.values()
        place = pushes._acceptor.listener.getsockname()[:2]
        second = links.connect(place, b"secret", 1, lambda: False, 1)
        ends = time.monotonic() + 20
        while first._socket.fileno() >= 0 and time.monotonic() < ends:
            time.sleep(0.01)
        assert first._socket.fileno() < 0
        second.close()
    # A wait of another test's job on a busy machine may have begun its thread meanwhile.
    left = [each for each in threading.enumerate() if each not in before and each.name != "mcr_plus waits"]
    assert not [each for each in left if each.is_alive()]


def connected_pair() -> tuple[links.StreamConnection, links.StreamConnection]:
    """The source's end and the receiver's of a connection on which nothing has been said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    return links.StreamConnection(near, lambda: False), links.StreamConnection(far, lambda: False)


def greeted_pair() -> tuple[links.StreamConnection, links.StreamConnection]:
    """The same of a connection whose greetings are over."""
    source, receiver = connected_pair()
    greeting = threading.Thread(target=links.greet, args=(receiver, b"secret", 1))
    greeting.start()
    assert links.greeted(source, b"secret") == 1
    greeting.join()
    return source, receiver


def frame_of(
    link: links.StreamConnection, other: links.StreamConnection, version: int, *wires: torch.Tensor
) -> bytes:
    """The bytes of a frame that `link` sends, taken off the wire before `other` reads them."""
    payloads = [links.Payload.of(wire) for wire in wires]
    link.send(links.PAYLOADS, version, len(payloads), payloads)
    nbytes = 96 + sum(8 + wire.numel() for wire in wires)
    taken = b""
    while len(taken) < nbytes:
        taken += other._socket.recv(nbytes - len(taken))
    return taken


WIRES = (torch.arange(100, dtype=torch.uint8), torch.arange(7, dtype=torch.uint8))


def received(
    link: links.StreamConnection, other: links.StreamConnection, frame: bytes
) -> tuple[int, int, int, bytearray]:
    """What `link` takes the bytes for that come in place of those of `other`."""
    other.put(frame)
    return link.receive(1000)


@pytest.mark.parametrize("piece", [16, 100, 1 << 20])
def test_frames_come_as_they_were_signed(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_PIECE", piece)
    source, receiver = greeted_pair()
    for version in range(3):
        frame = frame_of(source, receiver, version, *WIRES)
        kind, first, second, body = received(receiver, source, frame)
        assert (kind, first, second) == (links.PAYLOADS, version, 2)
        assert bytes(body) == frame[96:]
        assert torch.equal(torch.frombuffer(body[16:], dtype=torch.uint8), torch.cat(WIRES))
    receiver.send(links.WAIT, 3, 2**64 - 1)
    assert source.receive(0) == (links.WAIT, 3, 2**64 - 1, bytearray())
    for each in (source, receiver):
        each.close()


@pytest.mark.parametrize("at", [0, 4, 8, 9, 16, 31, 32, 63, 64, 95, 96, 104, 111, 112, 200, 218])
def test_a_flipped_byte_ends_the_connection(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each field of the head, the hash, the signature, the lengths, and pieces of both payloads."""
    monkeypatch.setattr(links, "_PIECE", 32)
    source, receiver = greeted_pair()
    frame = bytearray(frame_of(source, receiver, 5, *WIRES))
    assert len(frame) == 219
    frame[at] ^= 0x10
    with pytest.raises(links.AuthenticationFailed):
        received(receiver, source, bytes(frame))
    for each in (source, receiver):
        each.close()


@pytest.mark.parametrize("what", ["repeated", "left out", "of another connection", "sent back"])
def test_frames_that_were_signed_for_another_place_are_refused(what: str) -> None:
    source, receiver = greeted_pair()
    others = greeted_pair()
    first = frame_of(source, receiver, 1, *WIRES)
    second = frame_of(source, receiver, 2, *WIRES)
    if what == "repeated":
        received(receiver, source, first)
        second = first
    elif what == "of another connection":
        second = frame_of(*others, 1, *WIRES)
    elif what == "sent back":
        receiver.send(links.WAIT, 1, 0)
        second = source._socket.recv(96)
        assert len(second) == 96
    with pytest.raises(links.AuthenticationFailed, match="signature of the other end"):
        received(receiver, source, second)
    for each in (source, receiver, *others):
        each.close()


def test_a_receiver_connects_again_after_an_answer_that_was_not_signed() -> None:
    """A relay between the ends changes one byte of the first answer's payload."""
    flips = [8 + 64 + 96 + 8 + 70]  # version, nonce and signature, head of the frame, a length, the header
    threads: list[threading.Thread] = []
    sockets: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket, *, flips_in: list[int]) -> None:
        at = 0
        with suppress(OSError):  # either end may be closed already
            while data := bytearray(source.recv(1 << 16)):
                if flips_in and at <= flips_in[0] < at + len(data):
                    data[flips_in.pop() - at] ^= 1
                at += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def relay(server: socket.socket, place: tuple[str, int]) -> None:
        for _ in range(2):
            near, far = server.accept()[0], socket.create_connection(place)
            sockets.extend((near, far))
            for ends, where in (((near, far), []), ((far, near), flips)):
                threads.append(threading.Thread(target=pump, args=ends, kwargs={"flips_in": where}))
                threads[-1].start()

    ends, listener = threading.Event(), links.listen("127.0.0.1")
    source, receiver = ({"w": torch.zeros(5000)} for _ in range(2))
    here, there = laid(source, receiver)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threads.append(threading.Thread(target=relay, args=(server, listener.getsockname()[:2])))
        threads[0].start()
        pushes = WeightSource(here, "sync", b"secret", listener, {1: [0]}, here.nbytes, ends.is_set)
        sources = {0: (server.getsockname()[:2], [0])}
        pulls = WeightReceiver(there, "sync", b"secret", sources, 1, ends.is_set)
        for version in (1, 2):
            source["w"][version] = version
            pushes.push(version)
            while (pulls.pull(True, 20.0) or 0) < version:
                pass
            assert torch.equal(receiver["w"], source["w"])
        assert not flips
        assert (pulls.stats()["refused"], pulls.stats()["anchors"]) == (1, 0)
        ends.set()
        pulls.close()
        pushes.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        for each in sockets:
            each.close()


GREETING = b"mcrw" + links.VERSION.to_bytes(4, "little")


@pytest.mark.parametrize("said", [b"mcrw" + (2).to_bytes(4, "little"), bytes(range(8))])
@pytest.mark.parametrize("receives", [False, True])
def test_other_versions_are_refused_by_name(said: bytes, receives: bool) -> None:
    """The second begins as version 1 did: with random bytes."""
    here, there = connected_pair()
    there.put(said + bytes(100))
    expected = "has version 2 of this connection, not 3" if said[0] else "has another version of mcr_plus"
    with pytest.raises(BackendError, match=expected):
        links.greet(here, b"secret", 1) if receives else links.greeted(here, b"secret")
    here.close()
    there.close()


@pytest.mark.parametrize("knows", ["the receiver", "the source"])
def test_both_ends_prove_that_they_are_of_the_job(knows: str) -> None:
    """One of them is another program, which says what the protocol asks for, without the secret."""
    here, there = connected_pair()
    if knows == "the source":
        there.put(GREETING + (1).to_bytes(4, "little") + bytes(64))
        with pytest.raises(BackendError, match="not of this job asked for weights"):
            links.greeted(here, b"secret")
    else:
        there.put(GREETING + bytes(32))
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
