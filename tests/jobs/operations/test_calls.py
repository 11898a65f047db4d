"""Repeated calls: the fast path of a kind has the results of its first call for tensors of any layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Via, run_ranks

import mcr_plus as mcr
from mcr_plus.communicator.calls import BUILDERS
from mcr_plus.errors import McrError
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

both = pytest.mark.parametrize(
    "via",
    [
        pytest.param("mpi", marks=pytest.mark.skipif(not mpi_usable(), reason="needs mpi4py and a launcher")),
        "torch",
    ],
)

N = 6  # elements of a rank's part
Layout = Callable[[np.ndarray], torch.Tensor]


def _strided(values: np.ndarray) -> torch.Tensor:
    space = torch.zeros(2 * len(values), dtype=torch.from_numpy(values).dtype)
    space[::2] = torch.from_numpy(values)
    return space[::2]


def _negative(values: np.ndarray) -> torch.Tensor:
    view: torch.Tensor = torch.ops.aten._neg_view(torch.from_numpy(-values))
    return view


def _leaf(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.copy()).requires_grad_()


LAYOUTS: dict[str, Layout] = {
    "plain": lambda values: torch.from_numpy(values.copy()),
    "strided": _strided,
    "lazily negated": _negative,
    "leaf": _leaf,
}


def _values(rank: int, size: int, step: int) -> np.ndarray:
    """Small whole numbers, so that sums are exact: different on every rank and in every step."""
    return np.arange(size, dtype=np.float32) * (rank + 2) + 100 * step + rank


def calls(via: str) -> list[str]:
    """Run every kind on ranks, each layout between plain ones, three times; return the failures."""
    comm = mcr.init({"version": 1, "pipeline": [{"select": {}}, {"dispatch": {"timeout": "30s"}}]})
    rank, size = comm.rank, comm.size
    wrong: list[str] = []
    for step in range(3):
        for name in ("plain", *LAYOUTS, "plain"):
            layout = LAYOUTS[name]
            own = [_values(each, N, step) for each in range(size)]
            whole = [_values(each, N * size, step) for each in range(size)]
            total = np.sum(whole, axis=0)
            check = partial(_check, wrong, name)

            x = layout(own[rank])
            comm.all_reduce(x)
            check("all_reduce", x, np.sum(own, axis=0))
            for root in range(size):
                x = layout(own[rank])
                comm.broadcast(x, root)
                check("broadcast", x, own[root])
                x = layout(own[rank])
                comm.reduce(x, root)
                check("reduce", x, np.sum(own, axis=0) if rank == root else own[rank])
            target = layout(np.zeros(N * size, np.float32))
            comm.all_gather_into_tensor(target, layout(own[rank]))
            check("all_gather_into_tensor", target, np.concatenate(own))
            target = layout(np.zeros(N, np.float32))
            comm.reduce_scatter_tensor(target, layout(whole[rank]))
            check("reduce_scatter_tensor", target, total[rank * N : (rank + 1) * N])
            target = layout(np.zeros(N * size, np.float32))
            comm.all_to_all_single(target, layout(whole[rank]))
            exchanged = np.concatenate([each[rank * N : (rank + 1) * N] for each in whole])
            check("all_to_all_single", target, exchanged)
            # The message to the next rank and the message from the rank before are asynchronous by nature.
            target = layout(np.zeros(N, np.float32))
            works = [
                comm.irecv(target, (rank - 1) % size, tag=3),
                comm.isend(layout(own[rank]), (rank + 1) % size, 3),
            ]
            for work in works:
                work.wait()
            check("isend and irecv", target, own[(rank - 1) % size])
        wrong += _overlapping(comm, step)
    mcr.finalize()
    return wrong


def _check(wrong: list[str], layout: str, kind: str, tensor: torch.Tensor, expected: np.ndarray) -> None:
    if not np.array_equal(tensor.detach().resolve_neg().numpy(), expected):
        wrong.append(f"{kind}, {layout}: {tensor.tolist()}, expected {expected.tolist()}")


def _overlapping(comm: mcr.Communicator, step: int) -> list[str]:
    """Return an output that contains its input, after calls of the same shapes that did not overlap."""
    rank, size = comm.rank, comm.size
    own = [_values(each, N, step) for each in range(size)]
    whole = [_values(each, N * size, step) for each in range(size)]
    gathered, scattered = torch.zeros(N * size), torch.from_numpy(whole[rank].copy())
    gathered[N : 2 * N] = torch.from_numpy(own[rank])
    comm.all_gather_into_tensor(gathered, gathered[N : 2 * N])
    comm.reduce_scatter_tensor(scattered[1 : N + 1], scattered)
    swapped = torch.from_numpy(whole[rank].copy())
    comm.all_to_all_single(swapped, swapped)
    total = np.sum(whole, axis=0)
    exchanged = np.concatenate([each[rank * N : (rank + 1) * N] for each in whole])
    wrong: list[str] = []
    check = partial(_check, wrong, "overlapping")
    check("all_gather_into_tensor", gathered, np.concatenate(own))
    check("reduce_scatter_tensor", scattered[1 : N + 1], total[rank * N : (rank + 1) * N])
    check("all_to_all_single", swapped, exchanged)
    return wrong


@both
def test_repeated_calls_give_the_results_of_first_ones(via: Via) -> None:
    for result in run_ranks(calls, 3, args=[via], via=via):
        assert result.value == []


def refused() -> dict[str, str]:
    """Runs on a rank: wrong arguments to calls that are known, and to calls that are not."""
    comm = mcr.init({"version": 1, "pipeline": [{"select": {}}, {"dispatch": {}}]})
    x, out = torch.ones(4), torch.ones(4)
    call: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda **options: comm.all_reduce(x, **options),
        "broadcast": lambda **options: comm.broadcast(x, 0, **options),
        "reduce": lambda **options: comm.reduce(x, 0, **options),
        "all_gather_into_tensor": lambda **options: comm.all_gather_into_tensor(out, x, **options),
        "reduce_scatter_tensor": lambda **options: comm.reduce_scatter_tensor(out, x, **options),
        "all_to_all_single": lambda **options: comm.all_to_all_single(out, x, **options),
        "all_gather": lambda **options: comm.all_gather([out], x, **options),
        "all_reduce_coalesced": lambda **options: comm.all_reduce_coalesced([x, out], **options),
        "isend": lambda **options: comm.isend(x, 0, **options),
    }
    every: tuple[dict[str, Any], ...] = ({}, {"bogus": 1}, {"backend": 7}, {"compress": 1.5}, {})
    found = {f"{name} {options}": _error(do, options) for name, do in call.items() for options in every}
    mcr.finalize()
    return found


def _error(do: Callable[..., Any], options: dict[str, Any]) -> str:
    try:
        do(**options)
    except (TypeError, McrError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_wrong_keywords_are_refused_before_and_after_a_right_call() -> None:
    ((found,),) = ([result.value] for result in run_ranks(refused, 1, via="torch"))
    kinds = [*BUILDERS.keys() & {key.split()[0] for key in found}, "all_reduce_coalesced"]
    assert len(kinds) == 9
    for kind in kinds:
        assert found[f"{kind} {{}}"] == ""
        assert found[f"{kind} {{'bogus': 1}}"].startswith("TypeError: ")
        assert "bogus" in found[f"{kind} {{'bogus': 1}}"]
        assert (
            found[f"{kind} {{'backend': 7}}"] == "InvalidArgument: backend: expected a string or None, got 7"
        )
        assert "a codec's name or a mapping, got 1.5" in found[f"{kind} {{'compress': 1.5}}"]
