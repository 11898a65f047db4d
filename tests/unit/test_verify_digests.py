"""Digests of payloads and their comparison, without libraries."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mcr_plus.backends.base import Poll
from mcr_plus.core.group import Group
from mcr_plus.core.message import Signature
from mcr_plus.dispatch.options import DispatchOptions
from mcr_plus.dispatch.verify import course
from mcr_plus.dispatch.verify.flows import (
    Difference,
    Flows,
    damaged_rows,
    first_block,
    first_difference,
    row_of,
    row_words,
)
from mcr_plus.dispatch.verify.rows import SharedRows, shared_bytes
from mcr_plus.errors import Unsupported
from mcr_plus.kernels.digest import HASHED, block_hashes, joined
from mcr_plus.pipeline.dispatch import DispatchStage


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128])
@pytest.mark.parametrize("numel", [1, 3, 16_384, 70_001])
def test_a_flipped_bit_changes_the_hash_of_its_block_alone(dtype: torch.dtype, numel: int) -> None:
    draw = random.Random(numel)
    values = torch.arange(numel).to(dtype)
    before = block_hashes(values)
    assert len(before) == -(-values.nbytes // HASHED)
    raw = values.view(torch.uint8)
    for at in {0, raw.numel() - 1, *(draw.randrange(raw.numel()) for _ in range(40))}:
        raw[at] ^= (bit := 1 << draw.randrange(8))
        after = block_hashes(values)
        raw[at] ^= bit
        assert np.flatnonzero(before != after).tolist() == [at // HASHED]
        assert first_block(before.tolist(), after.tolist()) == at // HASHED
        assert joined(before) != joined(after)
    assert (block_hashes(values) == before).all()


def test_a_tensor_of_one_element_may_have_any_stride() -> None:
    value = torch.arange(4.0)[1::2][:1]
    assert value.is_contiguous()
    assert value.stride() == (2,)
    assert block_hashes(value) == block_hashes(torch.tensor([1.0]))


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_first_difference_is_that_of_a_search(ranks: int) -> None:
    draw = random.Random(ranks)
    for _ in range(60):
        sent = [[draw.randrange(1, 1 << 64) for _ in range(ranks)] for _ in range(ranks)]
        got = [list(row) for row in sent]
        damaged = sorted({(draw.randrange(ranks), draw.randrange(ranks)) for _ in range(draw.randrange(3))})
        for source, target in damaged:
            got[source][target] ^= 1 << draw.randrange(64)
        rows = []
        for rank in range(ranks):
            flows = Flows(
                {to: np.array([sent[rank][to]], np.uint64) for to in range(ranks)},
                {of: np.array([got[of][rank]], np.uint64) for of in range(ranks)},
            )
            quiet = Flows({}, {})
            rows.append(row_of([quiet, flows], ranks))
        assert damaged_rows(rows) == []
        assert first_difference(rows) == (Difference(1, *damaged[0]) if damaged else None)
        victim, word = draw.randrange(ranks), draw.randrange(row_words(ranks))
        rows[victim][word] ^= 1 << draw.randrange(64)
        assert damaged_rows(rows) == [victim]


def test_rows_in_shared_memory_are_those_of_one_exchange() -> None:
    words, ranks, rings = row_words(3), 3, []
    memory = memoryview(bytearray(shared_bytes(ranks, words)))
    ends = [SharedRows(memory, rank, ranks, words, lambda: rings.append(1)) for rank in range(ranks)]
    for number in range(7):
        rows = [
            [(1 << 63) + 100 * number + 10 * rank + word for word in range(words)] for rank in range(ranks)
        ]
        order = [(number + step) % ranks for step in range(ranks)]
        polls: dict[int, Poll] = {}
        for rank in order:
            assert not any(poll() for poll in polls.values())
            polls[rank] = ends[rank].post(rows[rank])
        # A rank that has read may post its next row before the others have read this one.
        assert all(poll() for poll in polls.values())
        first = ends[order[0]]
        assert first.read() == rows
        if number == 6:
            early = first.post([0] * words)
            assert not early()
        assert [end.read() for end in ends if end is not first] == [rows] * 2
    assert len(rings) == 7 * ranks + 1


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_reductions_in_pieces_are_those_of_numpy(op: str) -> None:
    generator = np.random.default_rng(7)
    parts = generator.integers(1, 5, (3, 2 * course._PIECE + 17)).astype(np.float64)
    signature = Signature("all_reduce", torch.float64, (), 0, "world", 3, reduce_op=op)  # type: ignore[arg-type]
    out = torch.empty(parts.shape[1], dtype=torch.float64)
    course._reduction(signature)(torch.from_numpy(parts), out)
    functions: dict[str, Callable[..., Any]]
    functions = {"SUM": np.sum, "AVG": np.mean, "PRODUCT": np.prod, "MIN": np.min, "MAX": np.max}
    expected = functions[op](parts, axis=0)
    assert np.allclose(out.numpy(), expected, rtol=1e-15)


def test_steps_are_kept_apart_by_the_operation_that_they_belong_to() -> None:
    group = Group("world", (0, 1), 0)
    assert group.size == 2
    one = Signature("all_reduce", torch.float32, (9,), 36, "world", 2, reduce_op="SUM", tag="a")
    other = one.replace(tag="b")
    steps = [course._derived(each, "all_gather", nbytes=72) for each in (one, other)]
    assert steps[0].digest() != steps[1].digest()


def test_libraries_on_streams_are_refused() -> None:
    backend = SimpleNamespace(name="nccl", on_stream=True, keeps_apart=False)
    slot = SimpleNamespace(backend=backend, channel=None)
    runtime: Any = SimpleNamespace(operations={}, channels={"nccl": slot}, engine=SimpleNamespace(off={}))
    context: Any = SimpleNamespace(runtime=runtime, backends={"nccl": backend})
    following: Any = SimpleNamespace(note=lambda text: notes.append(text))
    notes: list[str] = []
    stage = DispatchStage(DispatchOptions.model_validate({"verify": "every"}), context)
    signature = Signature("broadcast", torch.float32, (9,), 36, "world", 2, "cuda", root=0, backend="nccl")
    with pytest.raises(Unsupported, match="`verify` has no digests for nccl"):
        stage.bind(signature, following)
    assert "nccl is refused" in notes[0]
