"""Checksums of payloads and their comparison, without libraries."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from threading import RLock
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from bit_flips import missed

from mcr_plus.backends import emulation
from mcr_plus.backends.base import NATIVE, Poll
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.engine.options import DispatchOptions
from mcr_plus.errors import BackendError, Unsupported
from mcr_plus.kernels import checksum
from mcr_plus.kernels.checksum_sizes import BLOCK, CHAIN_BYTES
from mcr_plus.pipeline.dispatch import DispatchStage
from mcr_plus.reliability.verify import reducing, verified_run
from mcr_plus.reliability.verify.channel import VerifiedPoll
from mcr_plus.reliability.verify.checksum_table import (
    GOT,
    GOT_SUMS,
    SENT,
    SENT_SUMS,
    Blocks,
    ChecksumMismatch,
    ChecksumPlan,
    ChecksumTable,
    Flows,
    damaged_rows,
    first_block,
    first_difference,
    operations_differ,
    row_words,
)
from mcr_plus.reliability.verify.rows import SharedRows, shared_bytes
from mcr_plus.reliability.verify.steps import VerifiedStep, VerifiedSteps


def taken(values: torch.Tensor) -> list[int]:
    blocks = Blocks(values.nbytes)
    words, address = blocks.new()
    blocks.take(values.data_ptr(), address)
    assert blocks.changed(values.data_ptr(), address) is None
    found: list[int] = words.tolist()
    return found


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128])
@pytest.mark.parametrize("numel", [1, 3, 16_384, 70_001])
def test_a_flipped_bit_changes_the_checksum_of_its_block_alone(dtype: torch.dtype, numel: int) -> None:
    draw = random.Random(numel)
    values = torch.arange(numel).to(dtype)
    before = taken(values)
    assert len(before) == -(-values.nbytes // BLOCK)
    raw = values.view(torch.uint8)
    for at in {0, raw.numel() - 1, *(draw.randrange(raw.numel()) for _ in range(40))}:
        raw[at] ^= (bit := 1 << draw.randrange(8))
        after = taken(values)
        raw[at] ^= bit
        assert np.flatnonzero(np.array(before) != np.array(after)).tolist() == [at // BLOCK]
        assert first_block(before, after) == at // BLOCK
    assert taken(values) == before


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 511, 512, 513, 4104, BLOCK, BLOCK + 1, 3 * BLOCK - 5])
def test_checksums_are_those_of_their_definition(nbytes: int) -> None:
    memory = torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes + 3, np.uint8))
    values = memory[3:]  # no address of words
    assert taken(values) == [checksum.reference(block) for block in values.split(BLOCK) if block.numel()]


def _in_parts(chains: int, address: int, nbytes: int, part: int) -> int:
    checksum.begin_block(chains)
    for at in range(0, nbytes, part):
        checksum.take_part(chains, address + at, min(part, nbytes - at))
    return checksum.end_block(chains)  # type: ignore[no-any-return]


compiled: Any = numba.njit(_in_parts)


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 4096, 4097, 5000, 12_288, BLOCK - 3, BLOCK])
@pytest.mark.parametrize("part", [CHAIN_BYTES, 8 * CHAIN_BYTES])
def test_a_block_that_is_taken_in_parts_has_its_checksum(nbytes: int, part: int) -> None:
    values = torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8))
    chains = torch.empty(CHAIN_BYTES, dtype=torch.uint8)
    assert compiled(chains.data_ptr(), values.data_ptr(), nbytes, part) == checksum.reference(values)


def test_checksums_see_pairs_of_flips_and_exchanged_rows() -> None:
    """Sums would not: two flips of a sign bit cancel each other, and the order of words does not matter."""
    values = torch.from_numpy(np.random.default_rng(5).integers(0, 1 << 62, BLOCK // 8))
    found, flipped = taken(values), values.clone()
    for at, other in ((0, 1), (0, 64), (0, 8), (64, 4096), (5, 8000)):
        for bit in (1 << 62, 1, -(1 << 63)):
            flipped[[at, other]] ^= bit
            assert taken(flipped) != found
            flipped[[at, other]] ^= bit
        flipped[[at, other]] = flipped[[other, at]]
        assert taken(flipped) != found
        flipped[[at, other]] = flipped[[other, at]]
    assert taken(flipped) == found


@pytest.mark.short("512")
@pytest.mark.parametrize("nbytes", [512, 300, 4 * 512])
def test_flips_of_one_line_of_a_bus_do_not_cancel_each_other(nbytes: int) -> None:
    """A multiplication spreads the highest bits of a word least."""
    raw = torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8))
    assert missed(taken, raw, lanes=64) == []


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_first_difference_is_that_of_a_search(ranks: int) -> None:
    draw, words = random.Random(ranks), row_words(ranks)
    parts = Flows.of_parts([32] * ranks)
    plan = ChecksumPlan(ranks, {SENT_SUMS: parts, GOT_SUMS: parts})
    for number in range(40):
        sent = torch.randint(0, 1 << 62, (ranks, ranks, 4), generator=torch.Generator().manual_seed(number))
        got = sent.transpose(0, 1).contiguous()
        damaged = sorted({(draw.randrange(ranks), draw.randrange(ranks)) for _ in range(draw.randrange(3))})
        for source, target in damaged:
            got[target, source, draw.randrange(4)] ^= 1 << draw.randrange(62)
        memory = memoryview(bytearray(shared_bytes(ranks, words)))
        ends = [SharedRows(memory, rank, ranks, words, lambda: None) for rank in range(ranks)]
        polls = []
        for rank, end in enumerate(ends):
            ledger = ChecksumTable(plan, digest=number)
            ledger.take(SENT_SUMS, sent[rank].data_ptr())
            ledger.take(GOT_SUMS, got[rank].data_ptr())
            ledger.join()
            polls.append(end.post(ledger.row))
        assert all(poll() for poll in polls)
        assert [end.agree() for end in ends] == [not damaged] * ranks
        rows = ends[0].read()
        assert damaged_rows(rows) == []
        assert first_difference(rows) == (ChecksumMismatch(1, *damaged[0]) if damaged else None)
        assert not operations_differ(rows)
        victim, word = draw.randrange(ranks), draw.randrange(words)
        stride = len(memory) // 16 // ranks
        memory.cast("q")[(2 * victim + 1) * stride + 1 + word] ^= 1 << draw.randrange(62)
        assert damaged_rows(ends[0].read()) == [victim]
        assert polls[0]()
        assert not ends[0].agree()


def test_the_blocks_of_pieces_are_numbered_through() -> None:
    part, repeats, rest = 2 * BLOCK, 3, [5, BLOCK + 9]
    plan = ChecksumPlan(2, {SENT: Flows.of_parts(rest)}, repeats, part)
    flows = [torch.randint(0, 256, (repeats * part + each,), dtype=torch.uint8) for each in rest]
    ledger = ChecksumTable(plan)
    for piece in range(repeats + 1):
        ends = [piece * part, (piece + 1) * part]
        value = torch.cat([flow[slice(*ends)] for flow in flows])
        ledger.take_piece(SENT, value.data_ptr(), piece)
    assert [ledger.of(SENT, rank) for rank in range(2)] == [taken(flow) for flow in flows]
    assert ledger.of(GOT, 0) == []


def test_rows_in_shared_memory_are_those_of_one_exchange() -> None:
    words, ranks, rings = row_words(3), 3, []
    memory = memoryview(bytearray(shared_bytes(ranks, words)))
    ends = [SharedRows(memory, rank, ranks, words, lambda: rings.append(1)) for rank in range(ranks)]
    for number in range(7):
        rows = np.random.default_rng(number).integers(-(1 << 63), (1 << 63) - 1, (ranks, words))
        order = [(number + step) % ranks for step in range(ranks)]
        polls: dict[int, Poll] = {}
        for rank in order:
            assert not any(poll() for poll in polls.values())
            polls[rank] = ends[rank].post(rows[rank])
        rows[:, -1] = rows[:, :-1].sum(1)
        # A rank that has read may post its next row before the others have read this one.
        assert all(poll() for poll in polls.values())
        first = ends[order[0]]
        assert first.read() == rows.tolist()
        if number == 6:
            early = first.post(np.zeros(words, np.int64))
            assert not early()
        assert [end.read() for end in ends if end is not first] == [rows.tolist()] * 2
    assert len(rings) == 7 * ranks + 1
    late = ends[0].post(np.zeros(words, np.int64))
    ends[0].close()
    assert not late()


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
@pytest.mark.parametrize("numel", [3, 2 * emulation._PIECE + 17])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-15), (torch.bfloat16, 2**-8)])
def test_reductions_in_pieces_are_those_of_numpy(
    op: str, numel: int, dtype: torch.dtype, error: float
) -> None:
    generator = np.random.default_rng(7)
    parts = generator.integers(1, 5, (3, numel)).astype(np.float64)
    parts[1, 0] = np.nan
    nbytes = dtype.itemsize * numel
    signature = Signature("all_reduce", dtype, (), nbytes, "world", 3, reduce_op=op)  # type: ignore[arg-type]
    out = torch.empty(parts.shape[1], dtype=dtype)
    reducing.reduction(signature)(torch.from_numpy(parts).to(dtype), out)
    functions: dict[str, Callable[..., Any]]
    functions = {"SUM": np.sum, "AVG": np.mean, "PRODUCT": np.prod, "MIN": np.min, "MAX": np.max}
    expected = functions[op](parts, axis=0)
    assert np.allclose(out.double().numpy(), expected, rtol=error, equal_nan=True)


def test_steps_are_kept_apart_by_the_operation_that_they_belong_to() -> None:
    group = Group("world", (0, 1), 0)
    assert group.size == 2
    one = Signature("all_reduce", torch.float32, (9,), 36, "world", 2, reduce_op="SUM", tag="a")
    other = one.replace(tag="b")
    steps = [verified_run.derived(each, "all_gather", nbytes=72) for each in (one, other)]
    assert steps[0].digest() != steps[1].digest()


@pytest.mark.long
def test_nothing_is_kept_of_operations_that_are_dropped() -> None:
    channel: Any = SimpleNamespace(bind=lambda _: lambda _: bool, gate=lambda *_: None)
    backend: Any = SimpleNamespace(name="gloo", supports=lambda _: NATIVE, rings=False, host_driven=False)
    courses = verified_run.VerifiedRuns(
        VerifiedSteps(backend, channel), Group("world", (0, 1), 0), lambda *_: iter(())
    )

    def alive() -> int:
        gc.collect()
        return sum(type(each) is VerifiedStep for each in gc.get_objects())

    before = alive()
    starts = []
    for kind in ("all_reduce", "broadcast", "reduce_scatter"):
        one = Signature(kind, torch.float32, (9,), 36, "world", 2, root=0, reduce_op="SUM")
        starts += [courses.bind(one.replace(shape=(2**size,), nbytes=2 ** (2 + size))) for size in range(22)]
    assert alive() >= before + 66
    starts.clear()
    assert alive() == before


def test_libraries_on_streams_are_refused() -> None:
    backend = SimpleNamespace(name="nccl", on_stream=True, keeps_apart=False)
    slot = SimpleNamespace(backend=backend, channel=None)
    runtime: Any = SimpleNamespace(operations={}, channels={"nccl": slot}, engine=SimpleNamespace(off={}))
    world = SimpleNamespace(hosts_of=lambda _: 1)
    context: Any = SimpleNamespace(runtime=runtime, backends={"nccl": backend}, world=world, group=None)
    following: Any = SimpleNamespace(note=lambda text: notes.append(text))
    notes: list[str] = []
    stage = DispatchStage(DispatchOptions.model_validate({"verify": "every"}), context)
    signature = Signature("broadcast", torch.float32, (9,), 36, "world", 2, "cuda", root=0, backend="nccl")
    with pytest.raises(Unsupported, match="`verify` has no checksums for nccl"):
        stage.bind(signature, following)
    assert "nccl is refused" in notes[0]


def test_an_operation_that_is_interrupted_between_its_steps_does_not_pass() -> None:
    """Ctrl-C interrupts it, and the program waits again; an interrupt of a poll changes nothing."""

    def steps() -> Iterator[Poll]:
        yield polled
        raise KeyboardInterrupt

    polls = 0

    def polled() -> bool:
        nonlocal polls
        polls += 1
        if polls == 1:
            raise KeyboardInterrupt
        return polls > 2

    channel: Any = SimpleNamespace()
    attempt = VerifiedPoll(channel, steps(), Message(Signature("barrier", None, (), 0, "world", 2)), RLock())
    channel.tick = attempt.ends
    with pytest.raises(KeyboardInterrupt):
        attempt()
    assert not attempt()
    with pytest.raises(KeyboardInterrupt):
        attempt()
    for _ in range(2):
        with pytest.raises(BackendError, match="was interrupted by KeyboardInterrupt"):
            attempt()
