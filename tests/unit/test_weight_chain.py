"""What a source of weights sends to a receiver that is several versions behind."""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from mcr_plus.kernels import delta
from mcr_plus.kernels.digest import digest
from mcr_plus.rendezvous.stream import Payload
from mcr_plus.weight_sync.connection import SourceConnection
from mcr_plus.weight_sync.source import WeightSource, _VersionStep
from mcr_plus.weight_sync.weights import combined

SIZES = [1000, 333]  # of the buffers, in bytes
LAST = 12


def source_of(lengths: Any) -> WeightSource:
    """A source that holds these payloads (versions × buffers), and no connection."""
    made: Any = WeightSource.__new__(WeightSource)
    made._held = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    made._steps = deque(
        _VersionStep(base, [base, base + 100], base + 1, [Payload(memoryview(bytes(n)), b"") for n in row])
        for base, row in enumerate(lengths.tolist())
    )
    found: WeightSource = made
    return found


@pytest.mark.parametrize("buffers", [[0], [1], [0, 1]])
def test_the_earlier_answer_wins(buffers: list[int]) -> None:
    draw = np.random.default_rng(len(buffers) + buffers[0])
    chosen = []
    for _ in range(300):
        lengths = draw.integers(1, 400, (LAST, len(SIZES)))
        source = source_of(lengths)
        cost = int(draw.choice([0, 1, 20, 150, 5000]))
        version = int(draw.integers(LAST))
        aim = int(draw.integers(version + 1, LAST + 1))
        digest = combined([version + 100 * number for number in buffers])
        payloads = source._chain(version, digest, aim, buffers, cost)
        sent = lengths[version:aim, buffers]
        # In units of the time of a byte: changes take their bytes and a pass each, all weights one pass.
        changes = sent.sum() + cost * (aim - version)
        everything = sum(SIZES[number] for number in buffers) + cost
        is_chain = aim - version == 1 or changes <= everything
        assert (payloads is not None) == is_chain
        if payloads is not None:
            assert [len(each.data) for each in payloads] == sent.ravel().tolist()
        chosen.append(is_chain)
    assert 50 < sum(chosen) < 250


@pytest.mark.parametrize(("size", "sent"), [(1 << 20, True), ((1 << 20) + 1, False)])
def test_changes_to_one_version_of_small_weights_are_sent_in_any_case(size: int, sent: bool) -> None:
    """Other sources answer for that version; after one for a newer version all are asked again."""
    source = source_of(np.full((LAST, len(SIZES)), size // 4))
    source._held = [torch.zeros(size, dtype=torch.uint8)]
    assert source._chain(3, combined([3]), LAST, [0], 10_000) is None
    payloads = source._chain(3, combined([3]), LAST, [0], 10_000, exactly=True)
    assert (payloads is not None) == sent
    # What a receiver would refuse is not sent: at most twice its weights and 1 MiB.
    source = source_of(np.full((LAST, len(SIZES)), size // 2))
    source._held = [torch.zeros(size, dtype=torch.uint8)]
    for version in range(LAST - 1):
        payloads = source._chain(version, combined([version]), LAST, [0], 10_000, exactly=True)
        count = LAST - version
        assert (payloads is not None) == (sent and count * (size // 2 + 8) <= 2 * size + (1 << 20))


def test_changes_of_another_base_are_not_sent() -> None:
    source = source_of(np.full((LAST, len(SIZES)), 5))
    digest = combined([3, 103])
    assert source._chain(3, digest, LAST, [0, 1], 0) is not None
    assert source._chain(3, digest + 1, LAST, [0, 1], 0) is None
    assert source._chain(4, digest, LAST, [0, 1], 0) is None
    source._steps.popleft()
    assert source._chain(0, combined([0, 100]), LAST, [0, 1], 0) is None


def test_a_version_that_took_long_by_chance_is_forgotten() -> None:
    """All weights do not show what changes cost, so the estimate that leads to them must not stay."""
    held = torch.arange(5000, dtype=torch.int16)
    feed = SourceConnection("sync", 0, ("127.0.0.1", 1), b"", 1, [held], lambda: False)
    feed._rate, feed._apply_s = 1e9, 1.0
    wire = torch.empty(delta.most_nbytes(held.numel(), 2), dtype=torch.uint8)
    for version in range(1, 41):
        values = held + version
        length = delta.encode_anchor(values, wire, version)
        feed._apply(bytearray(struct.pack("<Q", length)) + wire[:length].numpy().tobytes(), 1)
        assert torch.equal(held, values)
    assert feed.anchors == 40
    assert feed.cost == 0
    values = held.clone()
    values[17] += 1
    length = delta.encode(values, held, wire, (40, 41), digest(held))
    feed._apply(bytearray(struct.pack("<Q", length)) + wire[:length].numpy().tobytes(), 1)
    assert torch.equal(held, values)
    assert feed.cost > 0
