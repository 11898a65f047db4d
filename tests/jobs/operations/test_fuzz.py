"""Random SPMD programs that mix libraries, groups and ways of waiting, against a NumPy oracle.

Every rank draws the same program from the same seed, then waits for its handles in an order of its own.
`MCR_FUZZ_PROGRAMS` runs that many per number of ranks instead of the usual ones.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ranks import run_ranks

import mcr_plus as mcr

Array = NDArray[Any]
KINDS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_v",
    "reduce",
    "ring",
    "barrier",
)
DTYPES = ("float32", "float64", "int32", "int64")
OPS: dict[str, Callable[[Array], Array]] = {
    "SUM": lambda parts: parts.sum(axis=0),
    "MAX": lambda parts: parts.max(axis=0),
    "MIN": lambda parts: parts.min(axis=0),
}


@dataclass(frozen=True)
class Step:
    """One operation of a program, equal on all ranks."""

    number: int
    kind: str
    backend: str
    group: int
    numel: int
    dtype: str
    op: str
    root: int
    async_op: bool

    def value(self, rank: int, numel: int) -> Array:
        """Return the input of `rank`: small whole numbers, which every dtype sums exactly."""
        index = np.arange(numel, dtype=np.int64)
        return ((index * 7 + rank * 13 + self.number * 5) % 31 - 15).astype(self.dtype)


@dataclass
class Pending:
    """An operation in flight on this rank, and its expected result."""

    step: Step
    works: list[mcr.Work]
    got: torch.Tensor | None
    expected: Array | None


def groups_of(size: int) -> list[list[int]]:
    """Subsets of the ranks, in orders of their own, overlapping."""
    everyone = list(range(size))
    return [everyone, everyone[::-1], everyone[: max(2, size - 1)], everyone[-2:], everyone[::2]]


def draw(seed: int, size: int, backends: tuple[str, ...]) -> list[Step]:
    """Return the program of a seed."""
    random_ = random.Random(seed)
    steps = []
    for number in range(random_.randint(4, 12)):
        members = groups_of(size)
        group = random_.randrange(len(members))
        steps.append(
            Step(
                number=number,
                kind=random_.choice(KINDS),
                backend=random_.choice(backends),
                group=group,
                numel=random_.choice((0, 1, 3, 17, 256, 1000, 20000)),
                dtype=random_.choice(DTYPES),
                op=random_.choice(tuple(OPS)),
                root=random_.choice(members[group]),
                async_op=random_.random() < 0.7,
            )
        )
    return steps


def counts(step: Step, sender: int, size: int) -> list[int]:
    """Uneven parts of `sender` for each member."""
    return [(step.numel + sender + 2 * receiver) % 5 for receiver in range(size)]


class Program:
    """One rank's run of a program."""

    def __init__(self, rank: int, groups: list[mcr.Communicator], seed: int) -> None:
        self._rank = rank
        self._groups = groups
        self._waits = random.Random(seed * 1000 + rank)  # each rank waits at times of its own
        self._pending: list[Pending] = []
        self.failures: list[str] = []
        self._seed = seed

    def run(self, steps: list[Step]) -> None:
        """Issue all steps, waiting for some at random places and for the rest at the end."""
        for step in steps:
            group = self._groups[step.group]
            if group.rank >= 0:
                self._pending.append(getattr(self, f"_{step.kind}")(step, group, group.rank, group.size))
            while self._pending and self._waits.random() < 0.35:
                self._finish(self._pending.pop(self._waits.randrange(len(self._pending))))
        self._waits.shuffle(self._pending)
        for pending in self._pending:
            self._finish(pending)
        self._pending.clear()

    def _finish(self, pending: Pending) -> None:
        for work in pending.works:
            work.wait()
        if pending.got is None or pending.expected is None:
            return
        if not np.array_equal(pending.got.numpy(), pending.expected):
            self.failures.append(f"seed {self._seed} rank {self._rank} {pending.step}: got {pending.got[:8]}")

    def _common(self, step: Step) -> dict[str, Any]:
        return {"backend": step.backend, "async_op": step.async_op}

    @staticmethod
    def _pack(step: Step, work: Any, got: torch.Tensor | None, expected: Array | None) -> Pending:
        return Pending(step, [] if work is None else [work], got, expected)

    def _all_reduce(self, step: Step, group: mcr.Communicator, rank: int, size: int) -> Pending:
        value = torch.from_numpy(step.value(rank, step.numel))
        parts = np.stack([step.value(peer, step.numel) for peer in range(size)])
        work = group.all_reduce(value, step.op, **self._common(step))  # type: ignore[arg-type]
        return self._pack(step, work, value, OPS[step.op](parts))

    def _reduce(self, step: Step, group: mcr.Communicator, rank: int, size: int) -> Pending:
        value = torch.from_numpy(step.value(rank, step.numel))
        parts = np.stack([step.value(peer, step.numel) for peer in range(size)])
        expected = OPS[step.op](parts) if group.ranks[rank] == step.root else parts[rank]
        work = group.reduce(value, step.root, step.op, **self._common(step))  # type: ignore[arg-type]
        return self._pack(step, work, value, expected)

    def _broadcast(self, step: Step, group: mcr.Communicator, rank: int, size: int) -> Pending:
        value = torch.from_numpy(step.value(rank, step.numel))
        work = group.broadcast(value, step.root, **self._common(step))
        return self._pack(step, work, value, step.value(group.ranks.index(step.root), step.numel))

    def _all_gather(self, step: Step, group: mcr.Communicator, rank: int, size: int) -> Pending:
        value = torch.from_numpy(step.value(rank, step.numel))
        out = torch.full((size * step.numel,), -99, dtype=value.dtype)
        work = group.all_gather_into_tensor(out, value, **self._common(step))
        return self._pack(step, work, out, np.concatenate([step.value(p, step.numel) for p in range(size)]))

    def _reduce_scatter(self, step: Step, group: mcr.Communicator, rank: int, size: int) -> Pending:
        value = torch.from_numpy(step.value(rank, size * step.numel))
        out = torch.full((step.numel,), -99, dtype=value.dtype)
        parts = np.stack([step.value(peer, size * step.numel) for peer in range(size)])
        work = group.reduce_scatter_tensor(out, value, step.op, **self._common(step))  # type: ignore[arg-type]
        return self._pack(step, work, out, OPS[step.op](parts).reshape(size, -1)[rank])

    def _all_to_all(self, step: Step, group: mcr.Communicator, rank: int, size: int) -> Pending:
        value = torch.from_numpy(step.value(rank, size * step.numel))
        out = torch.full((size * step.numel,), -99, dtype=value.dtype)
        columns = [step.value(peer, size * step.numel).reshape(size, -1)[rank] for peer in range(size)]
        work = group.all_to_all_single(out, value, **self._common(step))
        return self._pack(step, work, out, np.concatenate(columns))

    def _all_to_all_v(self, step: Step, group: mcr.Communicator, rank: int, size: int) -> Pending:
        sent = counts(step, rank, size)
        received = [counts(step, peer, size)[rank] for peer in range(size)]
        value = torch.from_numpy(step.value(rank, sum(sent)))
        out = torch.full((sum(received),), -99, dtype=value.dtype)
        columns = []
        for peer in range(size):
            theirs = counts(step, peer, size)
            start = sum(theirs[:rank])
            columns.append(step.value(peer, sum(theirs))[start : start + theirs[rank]])
        work = group.all_to_all_single(out, value, received, sent, **self._common(step))
        return self._pack(step, work, out, np.concatenate(columns))

    def _ring(self, step: Step, group: mcr.Communicator, rank: int, size: int) -> Pending:
        value = torch.from_numpy(step.value(rank, step.numel))
        out = torch.full((step.numel,), -99, dtype=value.dtype)
        left, right = group.ranks[(rank - 1) % size], group.ranks[(rank + 1) % size]
        options: dict[str, Any] = {"tag": step.number, "backend": step.backend}
        works = [group.irecv(out, left, **options), group.isend(value, right, **options)]
        return Pending(step, works, out, step.value((rank - 1) % size, step.numel))

    def _barrier(self, step: Step, group: mcr.Communicator, rank: int, size: int) -> Pending:
        return self._pack(step, group.barrier(**self._common(step)), None, None)


def fuzz(first_seed: int, programs: int, backends: list[str], progress: str) -> dict[str, Any]:
    """Run programs on this rank; failures as text."""
    torch.set_num_threads(1)
    stages = [{"select": {}}, {"dispatch": {"timeout": "30s", "progress": progress}}]
    world = mcr.init({"version": 1, "backends": backends, "pipeline": stages})
    groups = [mcr.new_group(ranks) for ranks in groups_of(world.size)]
    failures: list[str] = []
    done = 0
    for seed in range(first_seed, first_seed + programs):
        program = Program(world.rank, groups, seed)
        program.run(draw(seed, world.size, tuple(backends)))
        failures += program.failures
        done += 1
    mcr.finalize()
    return {"failures": failures[:5], "done": done}


@pytest.mark.short("3-60-thread")
@pytest.mark.parametrize(
    ("ranks", "programs", "progress"),
    [(2, 1500, "caller"), (3, 800, "caller"), (4, 500, "caller"), (2, 400, "thread"), (3, 60, "thread")],
)
def test_random_programs_give_the_oracles_results(ranks: int, programs: int, progress: str) -> None:
    programs = int(os.environ.get("MCR_FUZZ_PROGRAMS", programs))
    args = [ranks * 1_000_000, programs, ["mpi", "gloo", "msccl"], progress]
    results = run_ranks(fuzz, ranks, args=args, timeout=3000)
    for result in results:
        assert result.value["failures"] == []
        assert result.value["done"] == programs
