"""Coalesced calls on real ranks: many tensors of all sorts, few operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks

import mcr_plus as mcr
from mcr_plus.fusion.coalesce import LARGE
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

DTYPES = [torch.float32, torch.int64]
NUMELS = [3, 1, 0, 17, LARGE // 4 + 5, 64, 5]  # per part; one goes by itself


def values(rank: int, index: int, numel: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return (np.arange(numel) * 3 + 5 * index + 2 * rank) % 7


def laid(content: np.ndarray[Any, np.dtype[np.int64]], dtype: torch.dtype, index: int) -> torch.Tensor:
    """Return a tensor with this content; every third strided."""
    tensor = torch.from_numpy(content).to(dtype)
    return torch.stack([tensor, tensor + 1], 1)[:, 0] if index % 3 == 0 else tensor


def reduced(rank: int, ranks: int) -> tuple[Any, list[Any], list[Any]]:
    wanted = [sum(values(r, i, n) for r in range(ranks)) for i, n in enumerate(NUMELS * 2)]
    tensors = [laid(values(rank, i, n), DTYPES[i % 2], i) for i, n in enumerate(NUMELS * 2)]
    return lambda **how: mcr.all_reduce_coalesced(tensors, **how), tensors, wanted


def gathered(rank: int, ranks: int) -> tuple[Any, list[Any], list[Any]]:
    wanted = [np.concatenate([values(r, i, n) for r in range(ranks)]) for i, n in enumerate(NUMELS)]
    inputs = [laid(values(rank, i, n), DTYPES[i % 2], i) for i, n in enumerate(NUMELS)]
    outputs = [laid(np.zeros_like(each), DTYPES[i % 2], i + 1) for i, each in enumerate(wanted)]
    return lambda **how: mcr.all_gather_coalesced(outputs, inputs, **how), outputs, wanted


def scattered(rank: int, ranks: int) -> tuple[Any, list[Any], list[Any]]:
    sums = [np.sum([values(r, i, n * ranks) for r in range(ranks)], axis=0) for i, n in enumerate(NUMELS)]
    wanted = [each[rank * n : (rank + 1) * n] for each, n in zip(sums, NUMELS, strict=True)]
    inputs = [laid(values(rank, i, n * ranks), DTYPES[i % 2], i) for i, n in enumerate(NUMELS)]
    outputs = [laid(np.zeros_like(each), DTYPES[i % 2], i + 1) for i, each in enumerate(wanted)]
    return lambda **how: mcr.reduce_scatter_coalesced(outputs, inputs, **how), outputs, wanted


def everything(backend: str) -> list[list[Any]]:
    """Run on ranks; return the failures and the sent operations, without and with a stage that fuses."""
    return [through([], backend), through([{"fuse": {"kinds": ["all_reduce"]}}], backend)]


def through(stages: list[dict[str, Any]], backend: str) -> list[Any]:
    pipeline = [*stages, {"select": {}}, {"dispatch": {"timeout": "30s"}}]
    found: list[Any] = []
    with mcr.init({"version": 1, "backends": [backend], "pipeline": pipeline}) as comm:
        for make in (reduced, gathered, scattered):
            for async_op in (False, True):
                call, results, wanted = make(comm.rank, comm.size)
                first = results[0]
                beside = first.as_strided(first.shape, first.stride(), 1) if make is reduced else first
                before = beside.clone()
                with mcr.record() as log:
                    work = call(async_op=async_op)
                    if async_op:
                        work.wait()
                for index, (result, content) in enumerate(zip(results, wanted, strict=True)):
                    if not np.array_equal(result.to(torch.int64).numpy(), content):
                        found.append(f"{make.__name__} {index}: {result.tolist()[:9]}")
                if make is reduced and not torch.equal(before, beside):
                    found.append("what lies between the elements of a strided tensor was changed")
                found.append(sorted(record.fused for record in log.records))
        kept = comm.buffer_bytes
        for _ in range(3):
            with pytest.raises(mcr.McrError, match="nope"):
                reduced(comm.rank, comm.size)[0](backend="nope")
        reduced(comm.rank, comm.size)[0]()
        found.append(comm.buffer_bytes - kept)
    return found


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        pytest.param("mpi", 2, marks=pytest.mark.skipif(not mpi_usable(), reason="needs MPI")),
        ("gloo", 2),
        ("gloo", 3),
    ],
)
def test_coalesced_calls_pack_small_tensors_by_dtype(backend: str, ranks: int) -> None:
    """Calls become one operation for the small tensors of each dtype, and one for each large tensor."""
    results = run_ranks(everything, ranks, args=[backend], via="mpi" if backend == "mpi" else "torch")
    for result in results:
        assert result.value == [[*[[1, 1, 6, 6]] * 2, *[[1, 3, 3]] * 4, 0]] * 2
