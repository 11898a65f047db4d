"""Random reductions with `sums`, over all libraries in all manners, against integers and trees by hand."""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np
import pytest
import torch
from jobs.elasticity import shrink_jobs
from jobs.reliability import failover_jobs
from jobs.reproducible.test_sums import LIBRARIES, tree
from ranks import run_ranks

import mcr_plus as mcr

CASES: Final = 560  # on each number of ranks and in each setup: 10,000 in all, and 2,880 in crossed ones
FUSE: Final = {"fuse": {"bucket": "16KiB"}}
NODES: Final = {"hierarchical": {"ranks_per_node": 2, "min": 64}}
LAST: Final[list[Any]] = [{"select": {}}, {"dispatch": {}}]
SETUPS: dict[str, Any] = {
    **{name: {"backends": [name]} for name in LIBRARIES},
    "fused": {"pipeline": [FUSE, *LAST]},
    "nodes": {"pipeline": [NODES, *LAST]},
    "failover": failover_jobs.config("gloo", "msccl"),
}
# Bits of a value, powers of two that it is multiplied with, and by which all are divided: int64 has all sums.
RANGES: Final = {
    torch.float32: (24, 20, 30),
    torch.float64: (52, 8, 40),
    torch.bfloat16: (8, 12, 3),
    torch.float16: (11, 3, 4),
}
KINDS: Final = ("all_reduce", "pieces", "reduce", "reduce_scatter", "persistent")


def rounded(numbers: Any, dtype: torch.dtype, scale: int) -> torch.Tensor:
    """Return int64 values as a dtype: processors round them once, and float32 has those of half types."""
    wide = np.float64 if dtype is torch.float64 else np.float32
    return torch.from_numpy(np.ldexp(numbers.astype(wide), -scale)).to(dtype)


class Case:
    """A random reduction, the same on all ranks."""

    def __init__(self, seed: int, ranks: int) -> None:
        choose, rng = random.Random(seed), np.random.default_rng(seed)
        self.dtype = choose.choice(list(RANGES))
        self.sums = choose.choice(["fixed", "exact"])
        self.kind = choose.choice(KINDS)
        self.op = choose.choice([mcr.SUM, mcr.AVG])
        self.waits_later = choose.random() < 0.4
        self.size = max(1, int(10 ** choose.uniform(0, 4.3))) * ranks
        self.cuts = sorted(choose.sample(range(self.size), min(self.size, 4)))
        bits, shifts, scale = RANGES[self.dtype]
        shape = (ranks, self.size)
        numbers = rng.integers(1 - 2**bits, 2**bits, shape) << rng.integers(0, shifts, shape)
        self.rows = [rounded(row, self.dtype, scale) for row in numbers]
        if self.sums == "exact":
            self.wanted = rounded(numbers.sum(0), self.dtype, scale)
        else:
            wide = [row.float() if row.element_size() == 2 else row for row in self.rows]
            self.wanted = tree(wide).to(self.dtype)
        if self.op == mcr.AVG:
            self.wanted = self.wanted / ranks

    def __str__(self) -> str:
        later = ", asynchronous" if self.waits_later else ""
        return f"{self.kind} {self.op} of {self.size} {self.dtype}, {self.sums}{later}"

    def found(self, comm: mcr.Communicator) -> tuple[torch.Tensor, slice]:
        """Run it; return what this rank has got, and of which part that is the sum."""
        x, everything = self.rows[comm.rank].clone(), slice(None)
        options: Any = {"op": self.op, "sums": self.sums, "async_op": self.waits_later}
        works: list[Any] = []
        if self.kind == "pieces":
            pieces = [each for each in x.tensor_split(self.cuts) if each.numel()]
            works = [comm.all_reduce(each, **{**options, "async_op": True}) for each in pieces]
        elif self.kind == "reduce":
            works = [comm.reduce(x, comm.ranks[-1], **options)]
        elif self.kind == "reduce_scatter":
            everything = slice(comm.rank * self.size // comm.size, (comm.rank + 1) * self.size // comm.size)
            own = torch.empty(self.size // comm.size, dtype=self.dtype)
            works, x = [comm.reduce_scatter_tensor(own, x, **options)], own
        elif self.kind == "persistent":
            again = comm.persistent("all_reduce", x, op=self.op, sums=self.sums)
            again()
            x.copy_(self.rows[comm.rank])
            again()
        else:
            works = [comm.all_reduce(x, **options)]
        for work in filter(None, reversed(works)):
            work.wait()
        lacks = self.kind == "reduce" and comm.rank != comm.size - 1
        return self.wanted if lacks else x, everything


def compare(comm: mcr.Communicator, seeds: range, breaks: str | None = None) -> list[str]:
    """Run the cases of these seeds; return those that have other bits."""
    wrong: list[str] = []
    for seed in seeds:
        case = Case(seed, comm.size)
        if breaks is not None and seed % 40 == 7 and comm.rank == seed % comm.size:
            failover_jobs.break_connections(breaks)
        found, part = case.found(comm)
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
        differ = (found.view(integers) != case.wanted[part].view(integers)).sum().item()
        if differ:
            wrong.append(f"seed {seed}: {case}: {differ} elements")
    return wrong


def run(setup: str, first: int, cases: int) -> list[str]:
    torch.set_num_threads(1)
    with mcr.init({"version": 1, **SETUPS[setup]}) as comm:
        wrong = compare(comm, range(first, first + cases), "gloo" if setup == "failover" else None)
        if setup == "failover" and not failover_jobs.channel_of("gloo")._round:
            wrong.append("no library has taken over")
        return wrong


@pytest.mark.long
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_bit_differs(ranks: int, setup: str) -> None:
    first = 100_000 * ranks + 10_000 * list(SETUPS).index(setup)
    for result in run_ranks(run, ranks, args=[setup, first, CASES], via="mpi" if setup == "mpi" else "torch"):
        assert result.value == []


def crossed(seed: int, libraries: list[str]) -> dict[str, Any]:
    """Return a random setup: one or several libraries, with or without buckets, nodes and failover."""
    choose = random.Random(seed)
    fails = seed % 2 == 1
    stages = [stage for stage in (FUSE, NODES) if choose.random() < 0.6]
    last = failover_jobs.config()["pipeline"] if fails else LAST
    chosen = ["gloo", "msccl"] if fails else choose.sample(libraries, choose.randint(1, len(libraries)))
    return {"version": 1, "backends": chosen, "pipeline": [*stages, *last]}


def run_crossed(first: int, setups: int, cases: int) -> list[str]:
    torch.set_num_threads(1)
    wrong = []
    for seed in range(first, first + setups):
        config = crossed(seed, LIBRARIES)
        with mcr.init(config) as comm:
            seeds = range(1000 * seed, 1000 * seed + cases)
            found = compare(comm, seeds, "gloo" if seed % 2 else None)
            if seed % 2 and not failover_jobs.channel_of("gloo")._round:
                found.append("no library has taken over")
            wrong += [f"{config}: {each}" for each in found]
    return wrong


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_bit_differs_in_crossed_setups(ranks: int) -> None:
    via: Any = "mpi" if "mpi" in LIBRARIES else "torch"
    for result in run_ranks(run_crossed, ranks, args=[100 * ranks, 12, 80], via=via):
        assert result.value == []


def run_and_shrink(seed: int) -> list[str]:
    torch.set_num_threads(1)
    with mcr.init(crossed(seed, ["msccl", "gloo"])) as comm:
        wrong = compare(comm, range(CASES // 4), "gloo" if seed % 2 else None)
        if comm.rank == 1:
            shrink_jobs._die_beside(comm)
        shrink_jobs._wait_for_loss(comm)
        return wrong + compare(mcr.shrink(), range(1000, 1000 + CASES // 4))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_no_bit_differs_before_and_after_a_loss(seed: int) -> None:
    results = run_ranks(run_and_shrink, 4, args=[seed], via="torch", check=False)
    assert [result.value for result in results] == [[], None, [], []]


def test_the_cases_tell_orders_apart() -> None:
    """Other orders than the tree's, and sums that are rounded more often, fail in many cases."""

    def in_turn(rows: list[torch.Tensor]) -> torch.Tensor:
        return rows[0] if len(rows) == 1 else in_turn(rows[:-1]) + rows[-1]

    def rest_first(rows: list[torch.Tensor]) -> torch.Tensor:
        half = len(rows) // 2
        return rows[0] if len(rows) == 1 else rest_first(rows[:half]) + rest_first(rows[half:])

    def half_by_half(rows: list[torch.Tensor]) -> torch.Tensor:
        return tree([row.to(torch.bfloat16) for row in rows])

    cases = [Case(seed, ranks) for seed in range(200) for ranks in (3, 4)]
    for mutant, ranks in ((in_turn, 4), (rest_first, 3), (half_by_half, 4)):
        caught = 0
        for case in cases:
            if case.sums != "fixed" or len(case.rows) != ranks or case.op != mcr.SUM:
                continue
            wide = [row.float() if row.element_size() == 2 else row for row in case.rows]
            caught += not torch.equal(mutant(wide).to(case.dtype), case.wanted)
        assert caught > 10, mutant.__name__
    exact = [case for case in cases if case.sums == "exact" and case.op == mcr.SUM]
    assert sum(not torch.equal(tree(case.rows), case.wanted) for case in exact) > 10
