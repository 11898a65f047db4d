"""Sums with `sums: fixed` and `exact`: the same bits over all libraries, sizes, cuts and manners."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from jobs.reliability import failover_jobs
from ranks import run_ranks
from unit.test_ordered_sums import exact_sum

import mcr_plus as mcr
from mcr_plus.reliability.failover.attempt import FailoverPoll
from mcr_plus.rendezvous.mpi_launcher import mpi_usable
from mcr_plus.reproducible import steps

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (1, 5, 1000, 4097, 70_001, 600_003)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LIBRARIES = ["msccl", "gloo", "mpi"] if mpi_usable() else ["msccl", "gloo"]
PIPELINE = [{"fuse": {"bucket": "64KiB"}}, {"select": {}}, {"dispatch": {}}]


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values of many magnitudes, so that every order of additions gives other bits."""
    rng = np.random.default_rng((rank, size))
    return torch.from_numpy(rng.standard_normal(size) * 2.0 ** rng.integers(-6, 7, size)).to(dtype)


def tree(rows: list[torch.Tensor]) -> torch.Tensor:
    if len(rows) == 1:
        return rows[0]
    half = 1 << (len(rows) - 1).bit_length() - 1
    return tree(rows[:half]) + tree(rows[half:])


def expected(rows: list[torch.Tensor], sums: str) -> torch.Tensor:
    """Return the sums by torch's additions, or by fractions."""
    dtype = rows[0].dtype
    if sums == "fixed":
        return tree([row if dtype in DTYPES[:2] else row.float() for row in rows]).to(dtype)
    columns = torch.stack([row.double() for row in rows]).T.tolist()
    # What these are is exact in the dtype: torch rounds float64 to half types twice.
    return torch.tensor([exact_sum(column, dtype) for column in columns], dtype=torch.float64).to(dtype)


def run(sums: str, library: str) -> list[str]:
    """Run every kind in every manner; return what differs from the oracle."""
    wrong: list[str] = []
    config: Any = {"version": 1, "backends": [library], "numerics": {"sums": sums}, "pipeline": PIPELINE}
    with mcr.init(config) as comm:
        me, ranks = comm.rank, comm.size
        for dtype in DTYPES:
            for size in SIZES:
                if sums == "exact" and size > 5000:
                    continue  # the oracle is slow
                rows = [values(rank, size * ranks, dtype) for rank in range(ranks)]
                total = expected(rows, sums)

                def check(name: str, found: torch.Tensor, part: slice = slice(None)) -> None:
                    if not torch.equal(found, total[part]):  # noqa: B023 - called at once
                        wrong.append(f"{name} {dtype} {size}: {(found != total[part]).sum()}")  # noqa: B023

                part = slice(me * size, (me + 1) * size)
                x = rows[me].clone()
                mcr.all_reduce(x)
                check("all_reduce", x)
                x = rows[me].clone()
                pieces = x.split(max(1, len(x) // 7))
                works = [mcr.all_reduce(piece, async_op=True) for piece in pieces]  # fused
                for work in reversed(works):
                    assert work is not None
                    work.wait()
                check("pieces", x)
                x = rows[me].clone()
                mcr.reduce(x, ranks - 1)
                if me == ranks - 1:
                    check("reduce", x)
                out = torch.empty(size, dtype=dtype)
                mcr.reduce_scatter_tensor(out, rows[me].clone())
                check("reduce_scatter", out, part)
                whole = rows[me].clone()
                work = mcr.reduce_scatter_tensor(whole[part], whole, async_op=True)  # in place
                assert work is not None
                work.wait()
                check("reduce_scatter in place", whole[part], part)
                uneven = [
                    size + (rank == 0) * (ranks - 1) * (size // 2) - (rank > 0) * (size // 2)
                    for rank in range(ranks)
                ]
                begin = sum(uneven[:me])
                own = torch.empty(uneven[me], dtype=dtype)
                mcr.reduce_scatter_v(own, list(rows[me].split(uneven)))
                check("reduce_scatter_v", own, slice(begin, begin + uneven[me]))
                again = mcr.persistent("all_reduce", x)
                x.copy_(rows[me])
                again()
                check("persistent", x)
                mean = rows[me].clone()
                mcr.all_reduce(mean, mcr.AVG)
                if dtype in DTYPES[:2] and not torch.equal(mean, total / ranks):
                    wrong.append(f"mean {dtype} {size}")
    return wrong


@pytest.mark.short("3-exact-gloo")
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("sums", ["fixed", "exact"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_library_gives_the_bits_of_the_oracle(ranks: int, sums: str, library: str) -> None:
    via: Any = "mpi" if library == "mpi" else "torch"
    for result in run_ranks(run, ranks, args=[sums, library], via=via):
        assert result.value == []


WRAPPED: dict[str, Any] = {
    "failover": [{"select": {}}, {"dispatch": {"failover": True}}],
    "verify": [{"select": {}}, {"dispatch": {"verify": "every"}}],
    "steps": [{"hierarchical": {"ranks_per_node": 2, "min": 64}}, {"select": {}}, {"dispatch": {}}],
}


def beside(sums: str) -> list[str]:
    """Use `sums` with other options, and with what it refuses; return what is wrong."""
    wrong: list[str] = []
    verified: Any = {"rules": [{"match": {"kind": "all_reduce"}, "dispatch": {"verify": "every"}}]}
    for name, pipeline in {**WRAPPED, "verify by rule": PIPELINE}.items():
        config: Any = {"version": 1, "backends": ["msccl", "gloo"], "pipeline": pipeline}
        config |= verified if pipeline is PIPELINE else {}
        with mcr.init({**config, "numerics": {"sums": sums}}) as comm:
            for size in (900, 5003):
                rows = [values(rank, size, torch.float32) for rank in range(comm.size)]
                x = rows[comm.rank].clone()
                mcr.all_reduce(x)
                if not torch.equal(x, expected(rows, sums)):
                    wrong.append(f"{name} {size}")
    codec = [{"compress": {"codec": "int8_block"}}, {"select": {}}, {"dispatch": {}}]
    with mcr.init(
        {"version": 1, "backends": ["msccl"], "numerics": {"sums": sums}, "pipeline": codec}
    ) as comm:
        rows = [values(rank, 5003, torch.float32) for rank in range(comm.size)]
        x = rows[comm.rank].clone()
        mcr.all_reduce(x)  # a codec's sums are its own, but for exact ones
        if torch.equal(x, expected(rows, sums)) != (sums == "exact"):
            wrong.append("codec of the pipeline")
        unsupported: list[Callable[[], Any]] = [
            lambda: mcr.all_reduce(x, sums="exact", compress="int8_block"),
            lambda: mcr.all_reduce(x, sums="exact", compress="exp_window"),
            lambda: mcr.all_reduce(x, sums="fixed", compress=False, backend="msccl:ring"),
        ]
        invalid: list[Callable[[], Any]] = [
            lambda: mcr.broadcast(x, 0, sums="fixed"),
            lambda: mcr.all_reduce(x, sums="exakt"),  # type: ignore[arg-type]
            lambda: mcr.all_reduce(x, mcr.PRODUCT, sums="exact", compress=False),
        ]
        for calls, error in ((unsupported, mcr.Unsupported), (invalid, mcr.InvalidArgument)):
            for call in calls:
                with pytest.raises(error):
                    call()
    return wrong


@pytest.mark.short("fixed")
@pytest.mark.parametrize("sums", ["fixed", "exact"])
def test_sums_beside_other_options(sums: str) -> None:
    for result in run_ranks(beside, 4, args=[sums], via="torch"):
        assert result.value == []


def in_slices() -> list[str]:
    """Add up values of several slices, the last one uneven; return what differs from the oracle."""
    steps.SLICE = 32 << 10  # type: ignore[misc]
    wrong: list[str] = []
    for library in LIBRARIES:
        pipeline = [{"fuse": {"bucket": "1MiB"}}, {"select": {}}, {"dispatch": {}}]
        with mcr.init({"version": 1, "backends": [library], "pipeline": pipeline}) as comm:
            for sums, dtype in (
                ("fixed", torch.float32),
                ("fixed", torch.bfloat16),
                ("exact", torch.float32),
            ):
                rows = [values(rank, 20_011, dtype) for rank in range(comm.size)]
                total, x = expected(rows, sums), rows[comm.rank].clone()
                options: Any = {"sums": sums}
                mcr.all_reduce(x, **options)
                y = rows[comm.rank].clone()
                works = [mcr.all_reduce(part, async_op=True, **options) for part in y.tensor_split(3)]
                for work in works:  # one bucket, which is filled when it starts
                    assert work is not None
                    work.wait()
                wrong += [f"{library} {sums} {dtype}" for each in (x, y) if not torch.equal(each, total)]
    return wrong


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 4])
def test_large_sums_travel_in_slices(ranks: int) -> None:
    for result in run_ranks(in_slices, ranks, via="mpi" if "mpi" in LIBRARIES else "torch"):
        assert result.value == []


def row_parallel() -> list[float]:
    """Return the output of a row-parallel Linear in four blocks, of which each rank has as many as others."""
    torch.set_num_threads(1)
    with mcr.init() as comm:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(33, 256, generator=generator)
        weight = torch.randn(48, 256, generator=generator)
        parts = [a @ w.T for a, w in zip(x.chunk(4, 1), weight.chunk(4, 1), strict=True)]
        each = 4 // comm.size
        output = tree(parts[comm.rank * each : (comm.rank + 1) * each])
        mcr.all_reduce(output, sums="fixed")
        return output.flatten().tolist()


def test_tensor_parallel_ranks_agree_on_the_blocks_of_a_linear() -> None:
    outputs = [result.value for ranks in (1, 2, 4) for result in run_ranks(row_parallel, ranks, via="torch")]
    assert all(output == outputs[0] for output in outputs)


def fail_late() -> list[int]:
    """Let the first step of a sum fail on rank 1 after it has ended on the others, whose next one begins."""
    with mcr.init(failover_jobs.config("gloo", "msccl")) as comm:
        fails, poll = [comm.rank == 1], FailoverPoll.__call__

        def polled(attempt: FailoverPoll) -> bool:
            if not (fails[0] and attempt.poll is not None):
                return poll(attempt)
            if attempt.poll():
                fails[0] = False
                time.sleep(0.2)  # the others end this step meanwhile
                failover_jobs.break_connections("mpi", failover_jobs.channel_of("gloo"))
            return False

        FailoverPoll.__call__ = polled  # type: ignore[assignment, method-assign]
        rows = [values(rank, 30_000, torch.float32) for rank in range(comm.size)]
        x, differ = rows[comm.rank].clone(), []
        for _ in range(2):
            x.copy_(rows[comm.rank])
            comm.all_reduce(x, sums="fixed", backend="gloo")
            differ.append(int((x != tree(rows)).sum()))
        return differ


def test_a_step_can_be_repeated_once_the_next_one_writes_to_its_input() -> None:
    for result in run_ranks(fail_late, 3, via="torch"):
        assert result.value == [0, 0]
