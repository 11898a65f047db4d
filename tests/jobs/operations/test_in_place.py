"""Large data of shared memory by all ways: results, refusals of reads in place, ranks that give up."""

from __future__ import annotations

import ctypes
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msccl_jobs as jobs
import numpy as np
import pytest
import torch
from ranks import has_come, meet, own_rank, run_ranks, wait_for_ranks

import mcr_plus as mcr
from mcr_plus.backends.shm import backend, readable
from mcr_plus.backends.shm import collectives_state as words
from mcr_plus.backends.shm.collectives import DirectCollectives, begin_and_advance, unreadable
from mcr_plus.backends.shm.collectives_kernels import _take
from mcr_plus.backends.shm.segment import LINE, Segment, open_segment
from mcr_plus.core.group import Group
from mcr_plus.kernels.cpu import compiled
from mcr_plus.rendezvous.mpi_launcher import mpi_usable

CONFIG: Any = {"version": 1, "backends": ["msccl", "gloo"], "pipeline": [{"dispatch": {}}]}
SIZES = (4095, 4096, 8192, 100_003, (1 << 19) + 5, (1 << 22) + 17)  # float32: below and above each limit
KINDS = ("all_reduce", "all_gather", "all_to_all", "broadcast", "gather", "scatter", "all_to_all_v")
reads = pytest.mark.skipif(bool(readable.why_not()), reason=f"peers cannot be read: {readable.why_not()}")


def hand_over(way: int | None) -> None:
    """Let later groups hand over data in one way; None for what turns out to be fastest."""
    mock.patch.object(backend, "DirectCollectives", partial(DirectCollectives, way=way)).start()


def values(rank: int, size: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng((rank, size, seed)).integers(-99, 99, size).astype(np.float32)


def misaligned(data: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the data in a tensor that begins in the middle of a cache line."""
    whole = torch.empty(len(data) + 5)
    whole[5:] = torch.from_numpy(data)
    return whole[5:]


def tensors(kind: str, size: int) -> tuple[list[np.ndarray[Any, Any]], list[int]]:
    """Return every rank's data, and the elements that each rank gets from every rank of all_to_all_v."""
    ranks = mcr.get_world_size()
    counts = [size // (rank + 1) for rank in range(ranks)]
    blocks = ranks if kind in ("all_to_all", "scatter") else 1
    each = sum(counts) if kind == "all_to_all_v" else blocks * size
    return [values(rank, each, size) for rank in range(ranks)], counts


def run(kind: str, size: int, root: int, make: Any = misaligned) -> tuple[Any, Any]:
    """Run one operation; return what this rank has got, and what NumPy expects."""
    data, counts = tensors(kind, size)
    me, ranks = mcr.get_rank(), mcr.get_world_size()
    mine, part = make(data[me]), slice(me * size, (me + 1) * size)
    if kind == "all_reduce":
        mcr.all_reduce(mine)
        return mine, np.sum(data, axis=0)
    if kind == "broadcast":
        mcr.broadcast(mine, root)
        return mine, data[root]
    if kind == "gather":
        into = [torch.empty(size) for _ in range(ranks)] if me == root else None
        mcr.gather(mine, into, root)
        return (torch.cat(into), np.concatenate(data)) if into else (mine, data[me])
    if kind == "scatter":
        target = torch.empty(size)
        mcr.scatter(target, list(mine.chunk(ranks)) if me == root else None, root)
        return target, data[root][part]
    if kind == "all_gather":
        target = torch.empty(ranks * size)
        mcr.all_gather_into_tensor(target, mine)
        return target, np.concatenate(data)
    if kind == "all_to_all":
        target = torch.empty(ranks * size)
        mcr.all_to_all_single(target, mine)
        return target, np.concatenate([each[part] for each in data])
    target, first = torch.empty(ranks * counts[me]), sum(counts[:me])
    mcr.all_to_all_single(target, mine, [counts[me]] * ranks, counts)
    return target, np.concatenate([each[first : first + counts[me]] for each in data])


def failures(make: Any = misaligned) -> list[str]:
    ranks = mcr.get_world_size()
    sizes = SIZES if ranks == 2 else SIZES[:5]
    cases = [(kind, size, root) for size in sizes for kind in KINDS for root in {0, ranks - 1}]
    wrong = []
    for kind, size, root in cases:
        found, expected = run(kind, size, root, make)
        if not np.array_equal(found.numpy(), expected):
            wrong.append(f"{kind} of {size} with root {root}")
    return wrong


def overlapping(size: int, root: int, shift: int, async_op: bool) -> list[str]:
    """Run all kinds with a block inside the other buffer: this rank's own, or `shift` elements beside it."""
    me, ranks = mcr.get_rank(), mcr.get_world_size()
    all_values = [values(rank, ranks * size, size + shift) for rank in range(ranks)]
    part, wrong = slice(me * size, (me + 1) * size), []
    low = min(max(me * size + shift, 0), (ranks - 1) * size)
    # Only the block matters to the ranks that pass one, and it begins elsewhere if it is shifted.
    blocks = [
        data[min(max(rank * size + shift, 0), (ranks - 1) * size) :][:size]
        for rank, data in enumerate(all_values)
    ]
    summed = np.sum(all_values, axis=0)

    def check(name: str, found: Any, expected: Any, work: Any) -> None:
        if work is not None:
            work.wait()
        if not np.array_equal(found.numpy(), expected):
            wrong.append(f"{name} of {size} at {shift}, root {root}, async {async_op}")

    def fresh() -> tuple[torch.Tensor, torch.Tensor]:
        whole = misaligned(all_values[me])
        return whole, whole[low : low + size]

    whole, block = fresh()
    work = mcr.all_gather_into_tensor(whole, block, async_op=async_op)
    check("all_gather", whole, np.concatenate(blocks), work)
    whole, block = fresh()
    check("reduce_scatter", block, summed[part], mcr.reduce_scatter_tensor(block, whole, async_op=async_op))
    whole, block = fresh()
    work = mcr.all_to_all_single(whole, whole, async_op=async_op)
    check("all_to_all", whole, np.concatenate([each[part] for each in all_values]), work)
    whole, block = fresh()
    work = mcr.gather(block, list(whole.chunk(ranks)) if me == root else None, root, async_op=async_op)
    check(
        "gather", whole if me == root else block, np.concatenate(blocks) if me == root else blocks[me], work
    )
    whole, block = fresh()
    work = mcr.scatter(block, list(whole.chunk(ranks)) if me == root else None, root, async_op=async_op)
    check("scatter", block, all_values[root][part], work)
    return wrong


def overlaps(way: int | None, backend: str) -> list[str]:
    """Run `overlapping` in sizes on both sides of each limit, and often, so that calls are repeated."""
    hand_over(way)
    wrong = []
    with mcr.init({**CONFIG, "backends": [backend]}) as comm:
        for size in (3, 4096, 100_003, (1 << 19) + 5) if backend == "msccl" else (3, 5000):
            for shift in (0, 0, 0, 1, -size // 2):
                for async_op in (False, True):
                    wrong += overlapping(size, size % comm.size, shift, async_op)
        size = 50_001
        whole = torch.zeros(comm.size * size)
        own = whole[comm.rank * size :][:size]
        again = mcr.persistent("all_gather_into_tensor", whole, own)
        for turn in range(6):
            own.fill_(turn + comm.rank)
            again() if turn < 3 else again.start().wait()
            if whole.view(comm.size, size).ne(turn + torch.arange(comm.size).view(-1, 1)).any():
                wrong.append(f"persistent all_gather in turn {turn}")
    return wrong


WAYS = {"by trials": None, "past caches": words.PAST_CACHES, "in place": words.IN_PLACE}


@pytest.mark.short("3-")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_block_inside_the_other_buffer(ranks: int, way: str) -> None:
    for result in run_ranks(overlaps, ranks, args=[WAYS[way], "msccl"], via="torch"):
        assert result.value == []


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_block_inside_the_other_buffer_of_other_libraries(backend: str) -> None:
    if backend == "mpi" and not mpi_usable():
        pytest.skip("needs mpi4py and an MPI launcher")
    for result in run_ranks(overlaps, 2, args=[None, backend], via="torch" if backend == "gloo" else "mpi"):
        assert result.value == []


def everything(way: int | None) -> list[str]:
    """Run all kinds; also in place, asynchronously, and on memory that other processes have mapped."""
    hand_over(way)
    with mcr.init(CONFIG) as comm:
        wrong = failures()
        wrong += [f"shared: {each}" for each in failures(lambda data: torch.from_numpy(data).share_memory_())]
        me, ranks, size = comm.rank, comm.size, 100_003
        part = slice(me * size, (me + 1) * size)
        data = [values(rank, ranks * size, 1) for rank in range(ranks)]
        target = torch.from_numpy(data[me].copy())
        mcr.all_to_all_single(target, target)
        if not np.array_equal(target.numpy(), np.concatenate([each[part] for each in data])):
            wrong.append("all_to_all in place")
        target = torch.from_numpy(data[me].copy())
        mcr.all_gather_into_tensor(target, target[part])
        if not np.array_equal(
            target.numpy(), np.concatenate([data[r][r * size :][:size] for r in range(ranks)])
        ):
            wrong.append("all_gather in place")
        works, targets = [], []
        for seed in range(4):  # inputs are freed at once
            targets.append(torch.empty(ranks * size))
            source = torch.from_numpy(values(me, size, seed))
            works.append(mcr.all_gather_into_tensor(targets[-1], source, async_op=True))
            del source
        for seed, work in reversed(list(enumerate(works))):
            assert work is not None
            work.wait()
            if not np.array_equal(
                targets[seed].numpy(), np.concatenate([values(rank, size, seed) for rank in range(ranks)])
            ):
                wrong.append(f"asynchronous all_gather {seed}")
        with tempfile.NamedTemporaryFile() as file:
            values(me, size, 7).tofile(file)
            file.flush()
            mapped = torch.from_file(file.name, shared=False, size=size)
            target = torch.empty(ranks * size)
            mcr.all_gather_into_tensor(target, mapped)
            if not np.array_equal(target.numpy(), np.concatenate([values(r, size, 7) for r in range(ranks)])):
                wrong.append("a mapped file")
        empty = torch.empty(0)
        mcr.all_gather_into_tensor(empty, empty)
    return wrong


def by_all_ways() -> dict[str, list[str]]:
    return {name: everything(way) for name, way in WAYS.items()}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_results(ranks: int) -> None:
    for result in run_ranks(by_all_ways, ranks, via="torch"):
        assert result.value == {"by trials": [], "past caches": [], "in place": []}


def in_turns() -> list[str]:
    """Run kinds of changing sizes one after the other, so that places in slots change with each of them."""
    chance, wrong = np.random.default_rng(5), []
    with mcr.init(CONFIG) as comm:
        for step in range(250):
            kind, size = chance.choice(KINDS), int(2 ** chance.uniform(8, 17)) + 1
            found, expected = run(kind, size, step % comm.size)
            if not np.array_equal(found.numpy(), expected):
                wrong.append(f"{kind} of {size} in step {step}")
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_of_changing_sizes(ranks: int) -> None:
    for result in run_ranks(in_turns, ranks, via="torch"):
        assert result.value == []


@reads
def test_a_foreign_process_is_not_taken_for_a_peer() -> None:
    memory = bytearray(2 * 128)
    lines = range(0, 256, 128)
    here, there = (readable.Probe(memory, rank, lines) for rank in range(2))  # type: ignore[arg-type]
    assert here.run() == ""
    there._number.value += 1
    assert "not a rank of this job" in here.run()
    assert "No such process" in readable.read((1 << 22) + 1, 0)[1]


@reads
def test_a_setting_of_the_kernel_that_forbids_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert readable.why_not() == ""
    scope = tmp_path / "ptrace_scope"
    scope.write_text("3\n")
    monkeypatch.setattr(readable, "_YAMA", scope)
    assert "is 3, and 0 would allow it" in readable.why_not()


@compiled
def _take_now(state):  # type: ignore[no-untyped-def]
    return _take(state, 0)


def withdrawn() -> list[Any]:
    """Let the root of a broadcast withdraw its data when rank 1 has looked at its tag, but not yet read."""
    me, size = own_rank(), 1 << 16
    begin, _ = begin_and_advance()
    memory = open_segment(jobs.connect(), Group("g", (0, 1), me), jobs.small(2), 60)
    data = torch.full((size,), me + 1, dtype=torch.uint8)
    collectives = DirectCollectives(memory, way=words.IN_PLACE)  # owns memory that states use
    state = collectives.bind(words.BROADCAST, size)
    jobs.wait(lambda: _verdicts(memory) == [readable.READS] * 2)
    meet("opened", 2)
    if me == 0:
        assert begin(state, data.data_ptr(), data.data_ptr()) == 0
        meet("put", 2)
        collectives.withdraw()
        meet("withdrawn", 2)
        return [bool(state[words.EXPOSES])]
    meet("put", 2)
    meet("withdrawn", 2)
    state[words.TARGET] = data.data_ptr()
    return [int(_take_now(state)), unreadable(state)]


def _verdicts(memory: Segment) -> list[int]:
    at = [memory.base + rank * LINE + readable.VERDICT_AT for rank in range(memory.shape.ranks)]
    return [ctypes.c_int64.from_address(each).value for each in at]


@reads
def test_data_withdrawn_while_a_peer_takes_them_are_not_taken() -> None:
    first, second = run_ranks(withdrawn, 2, via="torch")
    assert first.value == [True]
    assert second.value == [0, 0]


def given_up() -> list[str]:
    """Let the root of a broadcast give up and overwrite its data before rank 1 takes part."""
    hand_over(words.IN_PLACE)
    mcr.init(CONFIG, timeout=3.0)
    me, told = mcr.get_rank(), []
    data = torch.full((1 << 16,), float(me + 1))
    for _ in range(3):
        mcr.broadcast(data, 0)  # a known call, which looks at no board while data are there
    if me == 1:
        wait_for_ranks("gave up", 1)
    try:
        mcr.broadcast(data, 0)
        told.append(f"got {data[0]}")
    except mcr.McrError as error:
        told.append(type(error).__name__)
    data.fill_(-1)
    has_come("gave up")
    comm = mcr.reset()
    mcr.broadcast(data.fill_(comm.rank + 5), 0)
    told.append(str(data[:: 1 << 15].tolist()))
    return told


@reads
def test_data_of_a_rank_that_has_given_up_are_not_taken() -> None:
    first, second = run_ranks(given_up, 2, via="torch")
    assert first.value == ["CommTimeout", "[5.0, 5.0]"]
    assert "got" not in second.value[0]
    assert second.value[1] == "[5.0, 5.0]"
