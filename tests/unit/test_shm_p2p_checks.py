"""Messages over shared memory that carry checksums of their data, with all ranks in one process."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mcr_plus.backends.shm import faults, p2p_checks
from mcr_plus.backends.shm import p2p_kernels as kernels
from mcr_plus.backends.shm.p2p import PointToPoint
from mcr_plus.backends.shm.segment import Segment, Shape
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.kernels.checksum_sizes import BLOCK

SLOTS = (640, 2048, 128 << 10)
SIZES = (1, 8, 511, 512, 513, 5000, BLOCK, BLOCK + 1, 3 * BLOCK + 77)


class DamagedError(Exception):
    """An error of a rank, first in a block."""


class Rank:
    """A rank's messages, which move only on request."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        group = Group("checks", tuple(range(segment.shape.ranks)), segment.rank)
        self.p2p = PointToPoint(segment, group, glances=1, spins=1, yields=0)
        assert self.p2p.check()

    def send(self, data: torch.Tensor, peer: int, tag: int = 0, mark: int = kernels.CHECKED) -> Any:
        signature = Signature("send", data.dtype, (), data.nbytes, "checks", 2)
        return self.p2p.bind_send(signature, mark)(Message(signature, (data,), peer=peer, match_tag=tag))

    def receive(self, data: torch.Tensor, peer: int | None, tag: int = 0) -> Any:
        signature = Signature("recv", data.dtype, (), data.nbytes, "checks", 2)
        start = self.p2p.bind_receive(signature, DamagedError)
        return start(Message(signature, (), (data,), peer=peer, match_tag=tag))

    def fault(self, peer: int, *, incoming: bool) -> Any:
        """Return the words of the fault of a queue."""
        row = kernels.HEAD + (2 * peer + incoming) * kernels.ROW
        return self.p2p._state[row + kernels.FAULT : row + kernels.ROW]


def world(slot: int, ranks: int = 2, depth: int = 4) -> list[Rank]:
    kernels.prepare()
    shape = Shape(ranks, depth=depth, slot=slot, area=64 * ranks)
    memory = mmap.mmap(-1, shape.nbytes)
    return [Rank(Segment(shape, rank, memory)) for rank in range(ranks)]


def values(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8))


def polled(poll: Any) -> tuple[Any, ...] | None:
    """Return a poll's error, an empty text if it is true, and None if it is not."""
    try:
        return () if poll() else None
    except DamagedError as error:
        return error.args


def settle(polls: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Poll all until all have ended; return the error of each."""
    found: list[tuple[Any, ...] | None] = [None] * len(polls)
    for _ in range(20_000):
        for index, poll in enumerate(polls):
            if found[index] is None:
                found[index] = polled(poll)
        if None not in found:
            return [each for each in found if each is not None]
    raise AssertionError("messages do not arrive")


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("order", ["received first", "sent first", "unexpected", "to itself", "any source"])
def test_messages_arrive_as_they_were_sent(order: str, slot: int) -> None:
    for nbytes in SIZES:
        one, other = world(slot)
        data, out, last = values(nbytes), torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(3)
        if order == "to itself":
            polls = [one.send(data, 0), one.receive(out, 0)]
        elif order == "sent first":
            polls = [one.send(data, 1), other.receive(out, 0)]
        elif order == "unexpected":
            polls = [other.receive(last, 0, tag=1), one.send(data, 1)]
            polls.append(one.send(torch.arange(3.0), 1, tag=1))
            assert settle(polls) == [()] * 3
            assert last.tolist() == [0.0, 1.0, 2.0]
            polls = [other.receive(out, 0)]
        else:
            polls = [other.receive(out, None if order == "any source" else 0), one.send(data, 1)]
        assert settle(polls) == [()] * len(polls), nbytes
        assert torch.equal(out, data), nbytes


@pytest.mark.parametrize("offset", [0, 5])  # only to whole lines do bytes go past the caches
def test_large_messages_arrive_and_their_damaged_block_is_named(offset: int) -> None:
    one, other = world(128 << 10)
    nbytes = p2p_checks.STREAMED_FROM + BLOCK + 77
    data, memory = values(nbytes), torch.zeros(nbytes + 64 + offset, dtype=torch.uint8)
    first = -memory.data_ptr() % 64 + offset
    out = memory[first : first + nbytes]
    assert settle([one.send(data, 1), other.receive(out, 0)]) == [(), ()]
    assert torch.equal(out, data)
    fault, room = one.fault(1, incoming=False), ((128 << 10) - kernels.HEADER) // 512 * 512
    fault[faults.AFTER], fault[faults.BYTE], fault[faults.MASK] = 30, 70_000, 2
    fault[faults.PLACE] = p2p_checks.IN_SLOT
    found = settle([one.send(data, 1), other.receive(out, 0)])
    assert found == [(), (0, (30 * room + 70_000) // BLOCK)]


def test_messages_with_and_without_checksums_follow_each_other() -> None:
    draw = random.Random(3)
    for slot in SLOTS:
        ranks, polls, pairs = world(slot, 3), [], []
        for number in range(60):
            source, target, tag = draw.randrange(3), draw.randrange(3), draw.randrange(2)
            data = values(draw.choice(SIZES), number)
            out = torch.zeros_like(data)
            polls.append(ranks[source].send(data, target, tag, draw.choice((0, kernels.CHECKED))))
            polls.append(ranks[target].receive(out, source, tag))
            pairs.append((data, out))
            if number % 7 == 0:
                settle(polls)
        assert settle(polls) == [()] * len(polls)
        assert all(torch.equal(*pair) for pair in pairs)


def test_every_bit_of_a_small_message_is_found_wherever_it_flips() -> None:
    one, other = world(640)
    data, out = values(12), torch.zeros(12, dtype=torch.uint8)
    row = kernels.HEAD + 2 * kernels.ROW
    for place in ("slot", "fault", "checksum"):
        for bit in range(8 * (8 if place == "checksum" else 12)):
            poll = one.send(data, 1)
            words = one.p2p._state
            slot = int(words[row + kernels.SLOTS] + (words[row + kernels.OWN] - 1) % 4 * 640)
            if place == "fault":
                fault = other.fault(0, incoming=True)
                fault[faults.BYTE], fault[faults.MASK] = divmod(bit, 8)[0], 1 << bit % 8
                fault[faults.PLACE] = p2p_checks.IN_TARGET
            else:
                at = slot + (kernels.CHECKS_AT if place == "checksum" else kernels.HEADER) + bit // 8
                ctypes.c_uint8.from_address(at).value ^= 1 << bit % 8
            assert settle([poll, other.receive(out, 0)]) == [(), (0, 0)], (place, bit)
    assert settle([one.send(data, 1), other.receive(out, 0)]) == [(), ()]


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("order", ["received first", "sent first", "unexpected"])
def test_the_first_damaged_block_is_named(order: str, slot: int) -> None:
    draw, nbytes = random.Random(slot), 3 * BLOCK + 77
    room = (slot - kernels.HEADER) // 512 * 512
    one, other = world(slot, depth=7 if order == "sent first" and slot > BLOCK else 4)
    data, out, last = values(nbytes), torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(3)
    for _ in range(30):
        after = draw.randrange(-(-nbytes // room))
        part = min(room, nbytes - after * room)
        fault, byte = one.fault(1, incoming=False), draw.randrange(part)
        fault[faults.AFTER], fault[faults.BYTE], fault[faults.MASK] = after, byte, 1 << draw.randrange(8)
        fault[faults.PLACE] = p2p_checks.IN_SLOT
        early = []
        if order == "unexpected":
            early = [other.receive(last, 0, tag=1)]
        elif order == "received first":
            early = [other.receive(out, 0)]
        polls = [*early, one.send(data, 1)]
        if order == "unexpected":
            polls.append(one.send(torch.arange(3.0), 1, tag=1))
            assert settle(polls) == [()] * 3
        if order != "received first":
            polls.append(other.receive(out, 0))
        named = (0, (after * room + byte) // BLOCK)
        found = settle(polls)
        assert [each for each in found if each] == [named]
        assert fault[faults.PLACE] == 0


def test_a_damaged_mark_is_found() -> None:
    one, other = world(640)
    out = torch.zeros(12, dtype=torch.uint8)
    row = kernels.HEAD + 2 * kernels.ROW
    poll = one.send(values(12), 1)
    mark = int(one.p2p._state[row + kernels.SLOTS]) + 8 * (kernels.MARK - kernels.TAG)
    ctypes.c_int64.from_address(mark).value ^= 4
    assert settle([poll, other.receive(out, 0)]) == [(), (0, 0)]


def test_a_message_to_itself_that_changes_is_found() -> None:
    (one, _), out = world(640), torch.zeros(2 * BLOCK, dtype=torch.uint8)
    poll = one.send(values(2 * BLOCK), 0)
    ((early,),) = one.p2p._unexpected.values()
    early.data[BLOCK + 5] ^= 1
    assert settle([poll, one.receive(out, 0)]) == [(), (0, 1)]


def test_slots_without_place_for_a_header_carry_none() -> None:
    shape = Shape(2, depth=4, slot=512, area=128)
    segment = Segment(shape, 0, mmap.mmap(-1, shape.nbytes))
    assert not PointToPoint(segment, Group("checks", (0, 1), 0)).check()
