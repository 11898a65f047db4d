"""Memory of gloo's operations that are given up: no other one gets it, as gloo may still write there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import numpy as np
import pytest
import torch

from mcr_plus.backends.base import Poll
from mcr_plus.backends.gloo.channel import GlooChannel
from mcr_plus.core.buffers import Pool
from mcr_plus.core.c10d import HashStore, ProcessGroupGloo, gloo_group
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature

NUMEL: Final = 3001  # elements for each rank
KINDS: Final = ("reduce_scatter", "reduce_scatter_v", "all_gather_v", "all_reduce")


@contextmanager
def channels(pools: list[Pool], seconds: float) -> Iterator[list[GlooChannel]]:
    """Return both ranks of a group; gloo gives up its operations after this many seconds."""
    store, timeout, opened = HashStore(), timedelta(seconds=seconds), list[GlooChannel]()

    def make(rank: int) -> GlooChannel:
        device: Any = ProcessGroupGloo.create_device(hostname="127.0.0.1")
        group = gloo_group(store, rank, 2, devices=[device], threads=2, timeout=timeout)
        return GlooChannel(group, Group("g", (0, 1), rank), timeout, opened, {}, set(), pools[rank])

    with ThreadPoolExecutor(2) as both:
        opened += both.map(make, range(2))
    made = list(opened)
    try:
        yield made
    finally:
        for each in made:
            each.drop()


def signature(kind: Any) -> Signature:
    """Return the signature of an int16 all_reduce, which gloo does not make itself."""
    dtype = torch.int16 if kind == "all_reduce" else torch.float64
    shape = (2 * NUMEL,) if kind == "reduce_scatter" else (NUMEL,)
    return Signature(kind, dtype, shape, 8 * NUMEL, "g", 2, reduce_op="SUM")


def values(kind: str, rank: int, number: int) -> torch.Tensor:
    dtype = torch.int16 if kind == "all_reduce" else torch.float64
    numel = 2 * NUMEL if kind.startswith("reduce_scatter") else NUMEL
    return (torch.arange(numel) % 97 + 100 * rank + 7 * number).to(dtype)


def expected(kind: str, rank: int, number: int) -> np.ndarray[Any, Any]:
    both = [values(kind, each, number).numpy() for each in range(2)]
    if kind == "all_gather_v":
        return np.concatenate(both)
    total = both[0] + both[1]
    return np.asarray(total[rank * NUMEL :][:NUMEL] if kind.startswith("reduce_scatter") else total)


def started(channel: GlooChannel, kind: str, rank: int, number: int) -> tuple[Poll, torch.Tensor]:
    """Return an operation that has begun on a rank, and the tensor of its result."""
    value = values(kind, rank, number)
    out = torch.zeros(len(expected(kind, rank, number)), dtype=value.dtype)
    counts, made = (NUMEL, NUMEL), signature(kind)
    message = Message(made, (value,), (out,), input_counts=counts, output_counts=counts)
    return channel.bind(made)(message), out


def ended(poll: Poll) -> None:
    """Wait for an operation; raises its error."""
    while not poll():
        threading.Event().wait(0.001)


@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_that_gloo_gives_up_keeps_its_memory(kind: str) -> None:
    pools = [Pool(), Pool()]
    with channels(pools, 60.0) as good:
        for number in range(3):
            with channels(pools, 0.2) as bad:
                with pytest.raises(RuntimeError):
                    ended(started(bad[0], kind, 0, number)[0])  # the other rank does not come
                assert pools[0].nbytes == 0, "its memory may be lent to another operation"
                begun = [started(each, kind, rank, number) for rank, each in enumerate(good)]
                with suppress(RuntimeError):
                    started(bad[1], kind, 1, number + 1)  # too late: the operation was given up
                for rank, (poll, out) in enumerate(begun):
                    ended(poll)
                    assert np.array_equal(out.numpy(), expected(kind, rank, number))
                assert pools[0].nbytes > 0, "of an operation that ended well, memory is used again"
                pools[0].clear()
