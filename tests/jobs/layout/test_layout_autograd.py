"""Gradients through redistributions on real ranks, against one process that has the whole tensor."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus import autograd
from mcr_plus.layout import Layout
from mcr_plus.layout.autograd import Replicas
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

needs_mpi = pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and an MPI launcher")

SHAPE = (6, 5)


def layouts(ranks: int) -> dict[str, Layout]:
    """Return all kinds of layouts by name; `P` in a name: addends, only for sources."""
    mesh = np.arange(ranks).reshape(2, -1)
    found = {
        f"{a},{b}": Layout.mesh(SHAPE, mesh, [a, b])
        for a, b in (("R", "R"), ("S0", "S1"), ("S1", "R"), ("P", "S0"), ("R", "P"), ("P", "P"))
    }
    found["P(avg)"] = Layout.mesh(SHAPE, np.arange(ranks), ["P(avg)"])
    found["first half"] = Layout.sharded(SHAPE, range(ranks // 2), 0)
    found["second half"] = Layout.replicated(SHAPE, range(ranks // 2, ranks))
    found["last"] = Layout.replicated(SHAPE, [ranks - 1])
    halo = {
        rank: [((max(0, 6 * rank // ranks - 1), min(6, 6 * (rank + 1) // ranks + 1)), (0, 5))]
        for rank in range(ranks)
    }
    found["halo"] = Layout.boxes(SHAPE, halo)
    found["runs"] = Layout.flat(
        SHAPE, range(ranks), [(30 * r // ranks, 30 * (r + 1) // ranks) for r in range(ranks)]
    )
    # boxes that overlap, one listed twice, in local tensors of one dimension
    found["pieces"] = Layout.boxes(
        SHAPE, {0: [((0, 4), (0, 3)), ((0, 4), (0, 3)), ((2, 6), (0, 5))], 1: [((0, 6), (2, 5))]}
    )
    # only a target: no rank has the rest
    found["part of it"] = Layout.boxes(SHAPE, {ranks - 1: [((1, 4), (2, 5))], 0: [((2, 5), (0, 3))]})
    return found


def at(layout: Layout, rank: int, values: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a rank, given the values of the whole tensor."""
    shape = layout.local_shape(rank)
    assert shape is not None
    local = values.new_zeros(math.prod(shape))
    for piece in layout.pieces(rank):
        low, high = layout.held.lows[piece], layout.held.highs[piece]
        box = values[tuple(slice(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True))]
        if layout.packed:
            begin = int(layout.places[piece, 0])
            local[begin : begin + box.numel()] = box.reshape(-1)
        else:
            local = box.reshape(-1)
    return local.view(shape)


def copies(layout: Layout) -> torch.Tensor:
    """Return, for each element, the number of ranks that hold it."""
    found = torch.zeros(SHAPE, dtype=torch.float64)
    for low, high in zip(layout.held.lows.tolist(), layout.held.highs.tolist(), strict=True):
        found[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] += 1
    return found


def random(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check_pair(comm: mcr.Communicator, source: Layout, target: Layout, replicas: Replicas) -> None:
    rank = comm.rank
    addends = [random(10 + addend) for addend in range(source.addend_count)]
    scale = 1 / len(addends) if source.op == "AVG" else 1.0
    value = (sum(addends[1:], addends[0]) * scale).requires_grad_()
    # Each rank has a loss: the computation after the call is the same on all replicas, or differs on each.
    by_rank = replicas == "sum"
    weights = [random(50) + (peer * random(51) if by_rank else 0) for peer in range(comm.size)]
    total = torch.zeros((), dtype=torch.float64)
    if by_rank:
        for peer in target.ranks:
            local, weight = (at(target, peer, each) for each in (value, weights[peer]))
            total = total + (weight * local.square()).sum()
    else:
        total = (weights[0] * value.square() * (copies(target) > 0)).sum()
    (gradient,) = torch.autograd.grad(total, value, create_graph=True)
    held = copies(source) if by_rank else len(addends) * (copies(source) > 0)
    (second,) = torch.autograd.grad((held * (scale * gradient).square()).sum(), value)

    x = torch.empty(0, dtype=torch.float64, requires_grad=True)  # where the rank has no part
    has_part = rank in source.ranks
    if has_part:
        addend = int(source.addends[source.pieces(rank)[0]]) if len(source.pieces(rank)) else 0
        x = at(source, rank, addends[addend]).requires_grad_()
    y = autograd.redistribute(x, source, target, replicas)
    loss = y.square().sum()
    if rank in target.ranks:
        torch.testing.assert_close(y, at(target, rank, value.detach()))
        loss = (at(target, rank, weights[rank]) * y.square()).sum()
    else:
        assert y.shape == (0,)
    (found,) = torch.autograd.grad(loss, x, create_graph=True)
    (again,) = torch.autograd.grad(found.square().sum(), x)
    if has_part:
        torch.testing.assert_close(found, at(source, rank, scale * gradient.detach()))
        torch.testing.assert_close(again, at(source, rank, scale * second))
    else:
        assert found.shape == again.shape == (0,)


SOME = (
    ("S0,S1", "R,R"),
    ("P,S0", "S1,R"),
    ("P,P", "halo"),
    ("P(avg)", "R,R"),
    ("R,R", "runs"),
    ("first half", "second half"),
    ("halo", "pieces"),
    ("pieces", "halo"),
    ("runs", "part of it"),
)


def failures(every: bool) -> list[str]:
    """Return the pairs that have failed on this rank."""
    failed = []
    with mcr.init() as comm:
        known = layouts(comm.size)
        sources = [name for name in known if name != "part of it"]
        pairs = [(before, after) for before in sources for after in known if "P" not in after]
        for before, after in pairs if every else SOME:
            for replicas in get_args(Replicas):
                try:
                    check_pair(comm, known[before], known[after], replicas)
                except AssertionError as error:  # noqa: PERF203
                    failed.append(f"{before} -> {after}, {replicas}: {error}")
    return failed


@pytest.mark.short("some")
@needs_mpi
@pytest.mark.parametrize("pairs", ["some", "all"])
def test_gradients_are_those_of_one_process(pairs: str) -> None:
    for result in run_ranks(failures, 4, args=[pairs == "all"], timeout=400):
        assert result.value == []


def refusals() -> list[str]:
    said: list[str] = []
    with mcr.init() as comm:
        whole = Layout.replicated(SHAPE, range(comm.size))
        partial = Layout.mesh(SHAPE, range(2), ["P"])
        largest = Layout.mesh(SHAPE, range(2), ["P(max)"])
        x = torch.ones(SHAPE, requires_grad=True)
        cases: list[tuple[Any, ...]] = [
            (x, whole, partial),
            (x, largest, whole),
            (x, whole, whole, "mean"),
            ("x", whole, whole),
        ]
        for case in cases:
            with pytest.raises(mcr.McrError) as caught:
                autograd.redistribute(*case)
            said.append(str(caught.value))
        rows = autograd.redistribute(torch.arange(30).view(SHAPE), whole, whole)
        assert not rows.requires_grad
    return said


def test_arguments_without_a_gradient_are_refused() -> None:
    (result,) = run_ranks(refusals, 1, via="torch")
    partial, largest, word, kind = result.value
    assert "cannot be divided into addends" in partial
    assert largest.endswith("gradients of MAX")
    assert word == "replicas: expected 'same' or 'sum', got 'mean'"
    assert kind == "x: expected a torch.Tensor or None, got str"
