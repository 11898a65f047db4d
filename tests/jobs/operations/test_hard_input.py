"""Operations of shared memory with killed ranks, memory of every sort, and kernels that refuse reads.

Results are compared with NumPy's. Tensors of a list are neighbours in memory, so they are sent from there.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import random
import struct
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from ranks import own_rank, run_ranks
from torch.utils.data import DataLoader, Dataset

import mcr_plus as mcr
from mcr_plus.backends.shm import readable

CONFIG: Final[Any] = {"version": 1, "backends": ["msccl", "gloo"], "pipeline": [{"dispatch": {}}]}
KINDS: Final = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_v", "gather", "gather_v", "all_to_all",
    "all_to_all_v", "reduce_scatter", "reduce_scatter_v", "scatter", "scatter_v", "messages", "barrier",
)  # fmt: skip
ROOTED: Final = ("reduce", "broadcast", "gather", "gather_v", "scatter", "scatter_v")
EACH: Final = ("all_to_all", "reduce_scatter", "scatter")  # different data to each rank
ODD_SIZES: Final = (0, 1, 257, 100_003, (1 << 19) + 5)
LARGE: Final = 1 << 20  # elements
Array = np.ndarray[Any, Any]
Place = Callable[[Array], torch.Tensor]


# -- operations -----------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def drawn(rank: int, peer: int, size: int, dtype: str) -> Array:
    """Return what a rank sends to a peer; sums of four of them are exact in every dtype."""
    return np.random.default_rng((rank, peer, size)).integers(-25, 25, size).astype(dtype)


def data_of(kind: str, size: int, root: int, dtype: str) -> tuple[list[Array], list[Array]]:
    """Return what this rank sends, and the tensors that it has in the end."""
    me, ranks = mcr.get_rank(), mcr.get_world_size()
    everyone, plain = range(ranks), kind.removesuffix("_v")

    def one(rank: int) -> Array:
        return drawn(rank, ranks, size // (rank + 1) if kind != plain else size, dtype)

    def between(rank: int, peer: int) -> Array:
        shift = rank if kind == "all_to_all_v" else 0
        count = size // ((peer + shift) % ranks + 1) if kind != plain else size // ranks
        return drawn(rank, peer, count, dtype)

    if kind == "barrier":
        return [], []
    if plain in EACH:
        sent = [between(me, peer) for peer in everyone] if plain != "scatter" or me == root else []
        theirs = [between(rank, me) for rank in everyone]
        if plain == "all_to_all":
            return sent, theirs
        return sent, [theirs[root] if plain == "scatter" else sum(theirs[1:], theirs[0])]
    all_sent = [one(rank) for rank in everyone]
    results = {
        "all_reduce": lambda: [sum(all_sent[1:], all_sent[0])],
        "reduce": lambda: [sum(all_sent[1:], all_sent[0]) if me == root else all_sent[me]],
        "broadcast": lambda: [all_sent[root]],
        "all_gather": lambda: all_sent,
        "gather": lambda: all_sent if me == root else [],
        "messages": lambda: [all_sent[me - 1]],
    }
    return [all_sent[me]], results[plain]()


def laid(parts: list[Array], place: Place) -> list[torch.Tensor]:
    """Return neighbours in memory with these values."""
    return list(place(np.concatenate(parts)).split([len(each) for each in parts])) if parts else []


def call(kind: str, root: int, sent: list[torch.Tensor], into: list[torch.Tensor]) -> None:
    me, ranks, plain = mcr.get_rank(), mcr.get_world_size(), kind.removesuffix("_v")
    run = getattr(mcr, kind if plain != "all_to_all" else plain, None)
    if kind == "messages":
        work = mcr.isend(sent[0], (me + 1) % ranks)
        mcr.recv(into[0], (me - 1) % ranks)
        work.wait()
        return
    assert run is not None
    arguments: dict[str, Callable[[], tuple[Any, ...]]] = {
        "all_reduce": lambda: (into[0],),
        "reduce": lambda: (into[0], root),
        "broadcast": lambda: (into[0], root),
        "all_gather": lambda: (into, sent[0]),
        "gather": lambda: (sent[0], into or None, root),
        "all_to_all": lambda: (into, sent),
        "reduce_scatter": lambda: (into[0], sent),
        "scatter": lambda: (into[0], sent or None, root),
        "barrier": lambda: (),
    }
    run(*arguments[plain]())


def is_right(
    kind: str,
    size: int,
    root: int,
    dtype: str = "float32",
    place: Place = torch.tensor,
    into: Place = torch.tensor,
) -> bool:
    """Run one operation; return whether this rank has NumPy's result. `place`: makes tensors only read."""
    sent, expected = data_of(kind, size, root, dtype)
    if kind in ("all_reduce", "reduce", "broadcast"):
        writes = kind == "all_reduce" or (kind == "reduce") == (mcr.get_rank() == root)
        targets = laid(sent, into if writes else place)
    else:
        targets = laid([np.zeros_like(each) for each in expected], into)
    sources = laid(sent, place)
    call(kind, root, sources, targets)
    return all(np.array_equal(found.numpy(), each) for found, each in zip(targets, expected, strict=True))


# -- killed ranks ---------------------------------------------------------------------------------


def killed(kind: str, size: int) -> list[Any]:
    """Kill the last rank in the middle of operations; the others return the error."""
    mcr.init(CONFIG)
    ranks = mcr.get_world_size()
    assert all(is_right(kind, size, root) for root in range(ranks))
    if mcr.get_rank() == ranks - 1:
        kill = f"sleep {random.uniform(0.01, 0.1)}; kill -KILL {os.getpid()}"
        subprocess.Popen(["sh", "-c", kill], start_new_session=True)
    turn = 0
    try:
        while is_right(kind, size, turn % ranks):
            turn += 1
    except mcr.PeerLost as error:
        return [list(error.ranks), str(error)]
    return [[], f"other data in turn {turn}"]


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (3, 4))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_is_named_by_all_others(kind: str, ranks: int) -> None:
    for size in (256, 1 << 17, LARGE):  # broadcasts of the second are read in place
        *others, last = run_ranks(killed, ranks, args=[kind, size], via="torch", check=False)
        assert last.returncode == -9
        for result in others:
            lost, text = result.value or [[], result.stderr]
            assert ranks - 1 in lost, (size, result.rank, text)  # and those that have ended with the error
            assert f"rank {ranks - 1}" in text, (size, result.rank, text)


# -- memory of every sort -------------------------------------------------------------------------


def offset(data: Array) -> torch.Tensor:
    whole = torch.from_numpy(np.zeros(len(data) + 1, data.dtype))
    whole[1:] = torch.from_numpy(data)
    return whole[1:]


def beside_words(data: Array) -> torch.Tensor:
    """Return the values at an odd address."""
    whole = np.zeros(data.nbytes + 1, np.uint8)
    there = whole[1:].view(data.dtype)
    there[:] = data
    return torch.from_numpy(there)


def strided(data: Array) -> torch.Tensor:
    whole = torch.from_numpy(np.zeros(2 * len(data) + 1, data.dtype))
    whole[1::2] = torch.from_numpy(data)
    return whole[1::2]


def locked(data: Array) -> torch.Tensor:
    """Return the values in pages that stay in memory, where the limit allows."""
    tensor = torch.tensor(data)
    ctypes.CDLL(None).mlock(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(data.nbytes))
    return tensor


def mapped_to_read(data: Array) -> torch.Tensor:
    """Return the values in a file's pages, to which this process may not write."""
    if not len(data):
        return torch.tensor(data)
    with tempfile.NamedTemporaryFile() as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no tensors that are read-only
        data.tofile(file.name)
        return torch.from_numpy(np.memmap(file.name, data.dtype, "r"))


PLACES: Final[dict[str, tuple[Place, Place]]] = {
    "offset": (offset, offset),
    "odd address": (beside_words, beside_words),
    "strided": (strided, strided),
    "locked": (locked, locked),
    "mapped to read": (mapped_to_read, torch.tensor),
}


def everywhere() -> list[str]:
    with mcr.init(CONFIG) as comm:
        return [
            f"{kind} of {size} {dtype}, {name}, root {root}"
            for name, (place, into) in PLACES.items()
            for dtype in ("int8", "float32")
            for size in ODD_SIZES
            for kind in KINDS
            for root in ({0, comm.size - 1} if kind in ROOTED else {0})
            if not is_right(kind, size, root, dtype, place, into)
        ]


@pytest.mark.parametrize("ranks", [2, 3])
def test_memory_of_every_sort(ranks: int) -> None:
    for result in run_ranks(everywhere, ranks, via="torch"):
        assert result.value == []


class Rows(Dataset[torch.Tensor]):
    """Rows of a table, which a worker of a loader reads in memory shared with its parent."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.table[index].clone()


def loading() -> list[str]:
    """Send from and receive into memory that a forked worker of a loader has mapped."""
    with mcr.init(CONFIG) as comm:
        mine = [drawn(rank, 0, LARGE, "float32").reshape(8, -1) for rank in range(comm.size)]
        table, wrong = torch.tensor(mine[comm.rank]).share_memory_(), []
        for expected in (mine[comm.rank], sum(mine[1:], mine[0])):
            loader = DataLoader(Rows(table), batch_size=None, num_workers=1, multiprocessing_context="fork")
            for index, row in enumerate(loader):
                gathered = torch.empty(comm.size, *table.shape)
                mcr.all_gather_into_tensor(gathered, table)
                if not np.array_equal(row.numpy(), expected[index]):
                    wrong.append(f"row {index} of the worker")
                if not np.array_equal(gathered[comm.rank].numpy(), expected):
                    wrong.append(f"all_gather beside row {index}")
            if expected is mine[comm.rank]:
                mcr.all_reduce(table)
        return wrong


def test_memory_shared_with_a_worker_of_a_loader() -> None:
    for result in run_ranks(loading, 2, via="torch"):
        assert result.value == []


def forking() -> list[Any]:
    """Fork children in the middle of large operations: idle ones, and ones that try an operation."""
    with mcr.init(CONFIG) as comm:
        mine, codes, wrong = [drawn(rank, 0, LARGE, "float32") for rank in range(comm.size)], [], []
        for turn in range(6):
            source, target = torch.tensor(mine[comm.rank]), torch.empty(comm.size * LARGE)
            work = mcr.all_gather_into_tensor(target, source, async_op=True)
            if (child := os.fork()) == 0:
                os._exit(_child(turn))
            assert work is not None
            work.wait()
            mcr.all_reduce(source)  # writes to pages that the child may still share
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            if not np.array_equal(target.numpy(), np.concatenate(mine)):
                wrong.append(f"all_gather {turn}")
            if not np.array_equal(source.numpy(), sum(mine[1:], mine[0])):
                wrong.append(f"all_reduce {turn}")
        return [codes, wrong]


def _child(turn: int) -> int:
    try:
        if turn % 2:
            mcr.all_reduce(torch.ones(LARGE))
            return 1
    except mcr.NotInitialized as error:
        return 7 if "belongs to the parent process" in str(error) else 2
    return 0


def test_forked_children_beside_large_operations() -> None:
    for result in run_ranks(forking, 2, via="torch"):
        assert result.value == [[0, 7] * 3, []]


BLOCK: Final = 1 << 20


def _blocks(rank: int) -> Iterator[Array]:
    """Yield 2^31 + 1 bytes of a rank."""
    first = np.random.default_rng(rank).integers(0, 256, BLOCK).astype(np.uint8)
    for index in range(2048):
        yield first + np.uint8(index % 251)
    yield first[:1]


def huge() -> list[str]:
    """Run operations of more bytes than 32 bits count."""
    wrong = []
    with mcr.init(CONFIG) as comm:
        data = torch.empty((1 << 31) + 1, dtype=torch.uint8)
        for name in ("broadcast", "all_reduce"):
            for part, block in zip(data.split(BLOCK), _blocks(comm.rank), strict=True):
                part.copy_(torch.from_numpy(block))
            if name == "broadcast":
                mcr.broadcast(data, 1)
                expected = _blocks(1)
            else:
                mcr.all_reduce(data, "MAX")
                expected = map(np.maximum, _blocks(0), _blocks(1))
            pairs = enumerate(zip(data.split(BLOCK), expected, strict=True))
            wrong += [f"{name} at {at} MiB" for at, (a, b) in pairs if not np.array_equal(a.numpy(), b)][:3]
    return wrong


def _available() -> int:
    """Return the GiB that processes may still use."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    return next((int(line.split()[1]) >> 20 for line in lines if line.startswith("MemAvailable")), 0)


@pytest.mark.long
@pytest.mark.skipif(_available() < 10, reason="less than 10 GiB of memory are available")
def test_more_bytes_than_32_bits_count() -> None:
    for result in run_ranks(huge, 2, via="torch"):
        assert result.value == []


# -- kernels that refuse --------------------------------------------------------------------------


def refuse_reads() -> str:
    """Make the kernel refuse process_vm_readv to this process; return why it cannot, or ''."""
    words = [
        (0x20, 0, 0, 4),  # the architecture
        (0x15, 0, 3, 0xC000003E),  # x86-64, or allow
        (0x20, 0, 0, 0),  # the system call
        (0x15, 0, 1, 310),  # process_vm_readv, or allow
        (0x06, 0, 0, 0x00050001),  # EPERM
        (0x06, 0, 0, 0x7FFF0000),  # allow
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *word) for word in words))
    program = struct.pack("@HP", len(words), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    # no new privileges; then the filter, for all threads
    if libc.prctl(38, 1, 0, 0, 0) or libc.syscall(317, 1, 1, program):
        return os.strerror(ctypes.get_errno())
    return ""


def become_another_user() -> None:
    """Become nobody, who may read all files, but no memory of others."""
    libc, reads_files = ctypes.CDLL(None, use_errno=True), 1 << 1
    assert libc.prctl(8, 1, 0, 0, 0) == 0  # keep capabilities
    os.setresuid(65534, 65534, 65534)
    header, data = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *(reads_files,) * 2, *(0,) * 4)
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())


def refused(how: str) -> list[Any]:
    """Run all kinds while the kernel lets a rank read no peer; return why not, failures, and what is said."""
    messages: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("mcr_plus").addHandler(Kept())
    logging.getLogger("mcr_plus").setLevel(logging.INFO)
    if own_rank() == 0 and how == "filter":
        if problem := refuse_reads():
            return [problem, [], []]
    elif own_rank() == 0 and how == "user":
        become_another_user()
    elif own_rank() == 0:
        readable.read = lambda pid, address: (0, "process_vm_readv: Operation not permitted")
    with mcr.init(CONFIG) as comm:
        mcr.new_group([0, 1]).barrier()
        wrong = [
            f"{kind} of {size}, root {root}"
            for size in ODD_SIZES
            for kind in KINDS
            for root in ({0, comm.size - 1} if kind in ROOTED else {0})
            if not is_right(kind, size, root)
        ]
    return ["", wrong, [each for each in messages if "twice" in each]]


@pytest.mark.short
@pytest.mark.skipif(bool(readable.why_not()), reason=f"peers cannot be read: {readable.why_not()}")
@pytest.mark.parametrize(
    "how",
    [
        "pretended",
        pytest.param(
            "filter", marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="a filter for x86-64")
        ),
        pytest.param(
            "user", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
        ),
    ],
)
def test_data_are_copied_where_the_kernel_refuses_reads(how: str) -> None:
    first, second = run_ranks(refused, 2, args=[how], via="torch", env={"MCR_SECRET": "of two users"})
    if first.value[0]:
        pytest.skip(f"no filter can be installed: {first.value[0]}")
    assert first.value[1] == second.value[1] == []
    (said,) = first.value[2]
    assert "process_vm_readv: Operation not permitted" in said
    assert second.value[2] == []
