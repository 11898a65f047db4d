"""Checksums taken by the functions that move data in shared memory, with all ranks in one process."""

from __future__ import annotations

import ctypes
import mmap
import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from mcr_plus.backends.shm import collectives_state as plain
from mcr_plus.backends.shm import faults
from mcr_plus.backends.shm.collectives import DirectCollectives
from mcr_plus.backends.shm.reductions import kernels_for
from mcr_plus.backends.shm.segment import Segment, Shape
from mcr_plus.kernels.checksum_sizes import BLOCK
from mcr_plus.reliability.verify import checked
from mcr_plus.reliability.verify import checked_kernels as kernels
from mcr_plus.reliability.verify.checksum_table import (
    GOT,
    SENT,
    ChecksumTable,
    damaged_rows,
    first_block,
    first_difference,
    row_words,
)
from mcr_plus.reliability.verify.row_kernels import AGREE, DIFFER
from mcr_plus.reliability.verify.rows import SharedRows, shared_bytes

KINDS = {
    "all_reduce": plain.ALL_REDUCE,
    "all_gather": plain.ALL_GATHER,
    "all_to_all": plain.ALL_TO_ALL,
    "reduce_scatter": plain.REDUCE_SCATTER,
    "broadcast": plain.BROADCAST,
}
ROOT = 1
NEVER = 1 << 62  # bytes
PLACES = (kernels.IN_SLOT, kernels.IN_SUMS, kernels.IN_TARGET)


class Rank:
    """One rank, which acts only on request."""

    def __init__(
        self, segment: Segment, rows: SharedRows, kind: str, count: int, whole: int, streamed: int
    ) -> None:
        reduces = kind in ("all_reduce", "reduce_scatter")
        direct = DirectCollectives(segment, spins=0, yields=0, whole=whole, streamed=streamed)
        options: dict[str, Any] = {"kernels": kernels_for(torch.float32, "SUM")} if reduces else {}
        state = direct.bind(KINDS[kind], count, 4, root=ROOT, **options)
        assert checked.fit(state)
        self.segment = segment  # its memory
        self.ledger, self.rows = ChecksumTable(checked.plan(state)), rows
        self.state = checked.extended(state, self.ledger, rows)
        ranks, me = segment.shape.ranks, segment.rank
        takes_all, gives_all = kind in ("all_to_all", "reduce_scatter"), kind in ("all_gather", "all_to_all")
        values = np.random.default_rng(me).integers(0, 1000, count * (ranks if takes_all else 1))
        self.source = torch.from_numpy(values.astype(np.float32))
        self.target = torch.zeros(count * (ranks if gives_all else 1))
        if kind == "broadcast" and me == ROOT:
            self.target = self.source
        self.given = self.source.clone()

    def begin(self) -> bool:
        self.source.copy_(self.given)
        return bool(kernels.begin(self.state, self.source.data_ptr(), self.target.data_ptr()))

    def advance(self) -> bool:
        return bool(kernels.advance(self.state, 0))

    @property
    def verdict(self) -> int:
        return int(self.state[kernels.VERDICT])


def world(kind: str, ranks: int, count: int, whole: int = 8192, streamed: int = NEVER) -> list[Rank]:
    shape = Shape(ranks, area=2 * BLOCK * ranks)
    memory, words = mmap.mmap(-1, shape.nbytes), row_words(ranks)
    rows = memoryview(bytearray(shared_bytes(ranks, words)))
    return [
        Rank(
            Segment(shape, rank, memory),
            SharedRows(rows, rank, ranks, words, lambda: None),
            kind,
            count,
            whole,
            streamed,
        )
        for rank in range(ranks)
    ]


def run(ranks: list[Rank]) -> None:
    done = [rank.begin() for rank in ranks]
    for _ in range(1000):
        if all(done):
            return
        done = [one or rank.advance() for one, rank in zip(done, ranks, strict=True)]
    raise AssertionError("it does not end")


def expected(kind: str, given: list[np.ndarray[Any, Any]], me: int, count: int) -> np.ndarray[Any, Any]:
    blocks = [each.reshape(-1, count) for each in given]
    if kind == "all_reduce":
        return np.asarray(sum(each.astype(np.float64) for each in given))
    if kind == "reduce_scatter":
        return np.asarray(sum(each[me].astype(np.float64) for each in blocks))
    if kind == "broadcast":
        return given[ROOT]
    return np.concatenate(given if kind == "all_gather" else [each[me] for each in blocks])


@pytest.mark.parametrize("streamed", [0, NEVER])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_numpy_and_all_agree(kind: str, ranks: int, streamed: int) -> None:
    for count in (1, 5, 2000, 16_384, 3 * 16_384 * ranks, 150_001):
        every = world(kind, ranks, count, streamed=streamed)
        for _ in range(2):
            run(every)
            given = [rank.given.numpy() for rank in every]
            for me, rank in enumerate(every):
                assert rank.verdict == AGREE, count
                assert np.array_equal(rank.target.numpy(), expected(kind, given, me, count)), (count, me)


def flipped(every: list[Rank], victim: int, place: int, after: int, byte: int, bit: int) -> bool:
    """Run, while a bit flips on a rank if it comes to that place; returns whether it has."""
    state = every[victim].state
    fault = state[kernels.FAULT : kernels.FAULT + faults.FAULT_WORDS]
    fault[faults.BYTE], fault[faults.MASK], fault[faults.AFTER] = byte, 1 << bit, after
    fault[faults.PLACE] = place
    run(every)
    done, state[kernels.FAULT] = not state[kernels.FAULT], 0
    assert [rank.verdict for rank in every] == [DIFFER if done else AGREE] * len(every), (place, byte, bit)
    return done


@pytest.mark.parametrize("streamed", [0, NEVER])
@pytest.mark.parametrize("whole", [0, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_of_a_small_payload_is_found_wherever_it_flips(
    kind: str, whole: int, streamed: int
) -> None:
    every, found = world(kind, 2, 3, whole, streamed), 0
    for victim, place, after in product(range(2), (*PLACES, kernels.IN_PEER), range(2)):
        for bit in range(every[victim].target.nbytes * 8):
            found += flipped(every, victim, place, after, *divmod(bit, 8))
    assert found >= 2 * 96


@pytest.mark.parametrize("streamed", [0, NEVER])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_names_ranks_and_the_first_block(kind: str, ranks: int, streamed: int) -> None:
    draw, found = random.Random(ranks), 0
    every = world(kind, ranks, 10 * 16_384 + 77, streamed=streamed)
    places = PLACES if streamed else (kernels.IN_SLOT, kernels.IN_SUMS, kernels.IN_PEER)
    for _ in range(60):
        victim, place = draw.randrange(ranks), draw.choice(places)
        if not flipped(every, victim, place, draw.randrange(12), draw.randrange(1 << 30), draw.randrange(8)):
            continue
        found += 1
        rows = every[0].rows.read()
        assert damaged_rows(rows) == []
        difference = first_difference(rows)
        assert difference is not None
        if place != kernels.IN_PEER:  # a slot that other ranks may read after this one
            assert victim in (difference.source, difference.target)
        end = 2 * difference.stage
        sent = every[difference.source].ledger.of(end + SENT, difference.target)
        got = every[difference.target].ledger.of(end + GOT, difference.source)
        assert len(sent) == len(got)
        assert first_block(sent, got) is not None
    assert found > 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_between_two_ranks_is_found(kind: str) -> None:
    """The test changes values that one rank has put and the other has not taken yet."""
    first, second = world(kind, 2, 3)
    if kind == "broadcast":
        first, second = second, first  # the root
    state = first.state
    for bit in range(96):
        assert not first.begin()
        number = state[plain.RANK] * state[plain.RING] + state[plain.BASE] % state[plain.RING]
        slot = int(state[plain.AREAS] + number * state[plain.AREA])
        if kind in ("all_to_all", "reduce_scatter"):
            slot += int(second.state[plain.RANK] * state[plain.SLICE]) * 4
        ctypes.c_uint8.from_address(slot + bit // 8).value ^= 1 << bit % 8
        done = [first.advance(), second.begin()]
        while not all(done):
            done = [first.advance(), second.advance()]
        assert [first.verdict, second.verdict] == [DIFFER] * 2, bit
