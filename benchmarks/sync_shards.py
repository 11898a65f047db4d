"""Weights of sharded trainers to tensor parallel servers, beside gathering and broadcasting them over gloo.

`bench_sync.py --only-shards` runs it: ranks 0 and 1, on one host, hold rows of a matrix, ranks 2 and 3, on
another host, columns of it, cut in the middle of no row or block; a vector is whole on all. Every version is
compared with slices of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import harness
import torch
import torch.distributed as dist

import mcr_plus as mcr

SOURCES: Final = (0, 1)
SERVERS: Final = (2, 3)
WIDTH: Final = 999  # columns; what the last row lacks is the vector
GATHERED: Final = "gather, broadcast"
DENSE: Final = "boxes by send and recv"
OURS: Final = "mcr.sync"
WAYS: Final = (GATHERED, DENSE, OURS)
_NETWORK: Final = Path("/proc/net/dev")
_BITS: Final = torch.int16


class Cut:
    """How versions of `numel` elements are cut: views of the matrix and of the vector in a flat version."""

    def __init__(self, numel: int) -> None:
        self.rows, self.rest = divmod(numel, WIDTH)
        shape = (self.rows, WIDTH)
        half = -(-self.rows // 2)
        self.row_bounds = {0: (0, half), 1: (half, self.rows)}
        half = -(-WIDTH // 2)
        self.column_bounds = {2: (0, half), 3: (half, WIDTH)}
        self.layouts: Mapping[str, tuple[mcr.Layout, mcr.Layout]] = {
            "matrix": (mcr.Layout.sharded(shape, SOURCES, 0), mcr.Layout.sharded(shape, SERVERS, 1))
        }

    def matrix(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[: self.rows * WIDTH].view(self.rows, WIDTH)

    def vector(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.rows * WIDTH :]

    def part(self, flat: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
        """What a rank holds of a version: views of it."""
        matrix = self.matrix(flat)
        if rank in SOURCES:
            begin, end = self.row_bounds[rank]
            return {"matrix": matrix[begin:end], "vector": self.vector(flat)}
        begin, end = self.column_bounds[rank]
        return {"matrix": matrix[:, begin:end], "vector": self.vector(flat)}


def on_hosts(path: str) -> list[dict[str, Any]] | None:
    """Bytes and seconds of every way at every learning rate; rank 0's answer."""
    torch.set_num_threads(1)
    with mcr.init(backends=["gloo"]) as comm:
        harness.join_gloo(comm)
        sources, receivers = dist.new_group(list(SOURCES)), dist.new_group([0, *SERVERS])
        found: Mapping[float, list[torch.Tensor]] = torch.load(path, weights_only=True)
        rows = [
            _row(comm, rate, way, versions, (sources, receivers))
            for rate, versions in found.items()
            for way in WAYS
        ]
        dist.destroy_process_group()
        return rows if comm.rank == 0 else None


def _row(
    comm: mcr.Communicator, rate: float, way: str, versions: Sequence[torch.Tensor], groups: Any
) -> dict[str, Any]:
    cut, rank = Cut(versions[0].numel()), comm.rank
    state = {name: each.clone() for name, each in cut.part(versions[0], rank).items()}
    layouts = {name: pair[rank in SERVERS] for name, pair in cut.layouts.items()}
    sync = mcr.sync(state, src=SOURCES, layout=layouts) if way == OURS else None
    scratch = torch.empty_like(versions[0])
    sizes, seconds, pauses, copies = [], [], [], []
    for new in versions[1:]:
        expected = cut.part(new, rank)
        if rank in SOURCES:
            for name, each in expected.items():
                state[name].copy_(each)
        comm.barrier()
        before, begin = _sent(), time.monotonic()
        if sync is not None:
            sync.push()
            sync.pull(timeout=120)
        elif way == GATHERED:
            _gather_and_broadcast(cut, rank, state, scratch, groups)
        else:
            _send_boxes(cut, rank, state)
        end = time.monotonic()
        comm.barrier()
        sizes.append(_sent() - before)
        for name, each in expected.items():
            if not torch.equal(state[name].view(_BITS), each.contiguous().view(_BITS)):
                raise SystemExit(f"{way}: {name} differs on rank {rank}")
        if sync is not None and rank in SERVERS:
            pauses.append(sync.stats()["pause_seconds"])
            copies.append(_copy_seconds(state))
        # All hosts are this machine, whose monotonic clock they share.
        times = comm.all_gather_object((begin, end))
        seconds.append(max(times[each][1] for each in SERVERS) - min(times[each][0] for each in SOURCES))
    answers = comm.all_gather_object((median(pauses or [0.0]), median(copies or [0.0])))
    if sync is not None:
        sync.close()
    changed = [(a.view(_BITS) != b.view(_BITS)).float().mean().item() for a, b in pairwise(versions)]
    pause, copy = max(answers[each] for each in SERVERS)
    return {
        "rate": rate, "way": way, "density": median(changed), "bytes": median(sizes),
        "seconds": median(seconds), "dense_bytes": versions[0].nbytes, "pause": pause, "copy": copy,
    }  # fmt: skip


def _sent() -> int:
    """Bytes that this host's interfaces have sent, but for those that stayed on it."""
    lines = _NETWORK.read_text().splitlines()[2:]
    named = (line.partition(":") for line in lines)
    return sum(int(figures.split()[8]) for name, _, figures in named if name.strip() != "lo")


def _copy_seconds(state: Mapping[str, torch.Tensor]) -> float:
    """Of one copy of a server's tensors, to memory that has been written before."""
    targets = {name: each.clone() for name, each in state.items()}
    begin = time.perf_counter()
    for name, each in state.items():
        targets[name].copy_(each)
    return time.perf_counter() - begin


def _gather_and_broadcast(
    cut: Cut, rank: int, state: Mapping[str, torch.Tensor], scratch: torch.Tensor, groups: Any
) -> None:
    """All rows to all sources, as `full_tensor()` brings them, all of them to servers, which take columns."""
    sources, receivers = groups
    if rank in SOURCES:
        begin, end = cut.row_bounds[rank]
        most = cut.row_bounds[0][1]
        padded = torch.zeros((most, WIDTH), dtype=scratch.dtype)
        padded[: end - begin].copy_(state["matrix"])
        gathered = [torch.empty_like(padded) for _ in SOURCES]
        dist.all_gather(gathered, padded, group=sources)
        for source in SOURCES:
            low, high = cut.row_bounds[source]
            cut.matrix(scratch)[low:high].copy_(gathered[source][: high - low])
        cut.vector(scratch).copy_(state["vector"])
    if rank != 1:
        dist.broadcast(scratch, 0, group=receivers)
    if rank in SERVERS:
        for name, each in cut.part(scratch, rank).items():
            state[name].copy_(each)


def _send_boxes(cut: Cut, rank: int, state: Mapping[str, torch.Tensor]) -> None:
    """Each source sends each server what both hold of the matrix, and the first one the vector."""
    if rank in SOURCES:
        works = []
        for server in SERVERS:
            low, high = cut.column_bounds[server]
            works.append(dist.isend(state["matrix"][:, low:high].contiguous(), server))
            if rank == 0:
                works.append(dist.isend(state["vector"], server))
        for work in works:
            assert work is not None
            work.wait()
        return
    for source in SOURCES:
        dist.recv(state["matrix"][slice(*cut.row_bounds[source])], source)
        if source == 0:
            dist.recv(state["vector"], source)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Those of one link, as a table."""
    dense = {row["rate"]: row for row in rows if row["way"] == GATHERED}
    head = [
        "way", "AdamW at", "density", "bytes on the link", "weights / bytes", "ms", "gather, broadcast / ms",
        "pause ms", "one copy ms",
    ]  # fmt: skip
    lines = []
    for row in rows:
        times = [f"{1e3 * row['pause']:.2f}", f"{1e3 * row['copy']:.2f}"] if row["way"] == OURS else ["", ""]
        lines.append([
            row["way"], f"{row['rate']:g}", f"{row['density']:.2%}", f"{row['bytes']:,.0f}",
            f"{row['dense_bytes'] / row['bytes']:,.1f}", f"{1e3 * row['seconds']:,.1f}",
            f"{dense[row['rate']]['seconds'] / row['seconds']:,.1f}", *times,
        ])  # fmt: skip
    return harness.markdown(head, lines)
