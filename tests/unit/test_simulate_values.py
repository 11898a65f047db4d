"""Values of simulated operations are those of ranks with equal data; memory and folding of small cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mcr_plus.bucketing.live_bytes import LiveBytes
from mcr_plus.core.kinds import KINDS, collective
from mcr_plus.core.message import Message, Signature
from mcr_plus.simulate.values import fill

RANKS = 3


def signature(kind: str, **more: object) -> Signature:
    made = Signature(kind, torch.float32, (4,), 16, "world", RANKS)  # type: ignore[arg-type]
    return made.replace(**more)


def expected(kind: str, own: NDArray[np.float32], rank: int, op: str) -> NDArray[np.float32]:
    """Return the output of a rank if all ranks pass `own`."""
    everyone = np.stack([own] * RANKS)
    reduced = everyone.sum(0) if op == "SUM" else everyone.mean(0)
    blocks = everyone.reshape(RANKS, RANKS, -1)
    values: dict[str, NDArray[np.float32]] = {
        "all_reduce": reduced,
        "reduce": reduced,
        "broadcast": own,
        "all_gather": everyone.reshape(-1),
        "gather": everyone.reshape(-1),
        "reduce_scatter": reduced.reshape(RANKS, -1)[rank],
        "all_to_all": blocks[:, rank].reshape(-1),
        "scatter": own.reshape(RANKS, -1)[rank],
    }
    return values[kind]


@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("lists", [False, True])
def test_every_collective_gives_what_equal_ranks_would_get(rank: int, op: str, lists: bool) -> None:
    done = 0
    for kind in KINDS:
        row = collective(kind)
        if kind != row.kind or kind in ("send", "recv", "barrier"):
            continue
        own = np.arange(1.0, 7.0, dtype=np.float32)  # six values, two for each rank
        wanted = expected(kind, own, rank, op if row.reduces else "SUM")
        source = torch.from_numpy(own.copy())
        target = source if row.in_place else torch.zeros(len(wanted))
        given = {"reduce_op": op} if row.reduces else {}
        if row.rooted:
            given["root"] = rank  # type: ignore[assignment]
        inputs = tuple(source.chunk(RANKS)) if lists and row.sends == "each" else (source,)
        outputs = tuple(target.chunk(RANKS)) if lists and row.receives == "each" else (target,)
        fill(Message(signature(kind, **given), inputs, outputs), rank, None)
        assert np.array_equal(target.numpy(), wanted), kind
        done += 1
    assert done == 8


def test_uneven_blocks() -> None:
    source, target = torch.arange(1.0, 7.0), torch.zeros(6)
    message = Message(
        signature("all_to_all_v"), (source,), (target,), input_counts=(1, 2, 3), output_counts=(2, 2, 2)
    )
    fill(message, 1, None)
    assert target.tolist() == [2, 3, 2, 3, 2, 3]
    fill(Message(signature("all_gather_v"), (source[:2],), (target,)), 1, None)
    assert target.tolist() == [1, 2] * 3


def test_what_another_rank_sent_is_received_and_else_zeros() -> None:
    target = torch.full((4,), 7.0)
    fill(Message(signature("recv"), (), (target,), peer=0), 1, torch.arange(4.0))
    assert target.tolist() == [0, 1, 2, 3]
    fill(Message(signature("recv"), (), (target,), peer=0), 1, None)
    assert target.tolist() == [0] * 4
    target.fill_(7)
    fill(Message(signature("broadcast", root=0), (), (target,)), 1, None)
    assert target.tolist() == [7] * 4
    fill(Message(signature("broadcast", root=0), (), (target,)), 1, torch.arange(2))  # 16 bytes of integers
    assert target.view(torch.int64).tolist() == [0, 1]


def test_the_peak_counts_each_storage_once_and_forgets_those_that_are_freed() -> None:
    kib = 256  # elements of float32
    tensors = LiveBytes()
    tensors.start()
    first = torch.zeros(8 * kib)
    views = [first.view(8, kib), first[:kib], first.t()]
    second = torch.ones(4 * kib)
    del second
    third = first + 1  # 8 KiB, after the 4 KiB of `second` were freed
    tensors.stop()
    fourth = torch.zeros(100 * kib)
    assert tensors.peak == 16 * 1024
    assert tensors.now == 16 * 1024
    del first, views, third, fourth
    assert tensors.now == 0
