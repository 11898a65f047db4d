"""Collectives and messages of shared memory by the way in which ranks hand over their data.

    mcr-plus run -n 2 benchmarks/bench_one_copy.py --output results/one-copy_HARDWARE_YYYYMM.md

Data are copied into slots, stored there past the caches, or read by peers in place. Sizes are bytes from one
rank to another (of all_reduce and broadcast: of the buffer). The ways take turns in every round, whatever the
runtime would choose. Printed are the least microseconds of a call, and the median in brackets. `huge pages`
reads in place with buffers on pages of 2 MiB, which the kernel finds faster; the system must allow them
(`madvise`). `--one-place` puts every slice at the beginning of its slot, and messages into 4 cells of 128 KiB
instead of many small ones. send_recv sends a message to a peer and back; messages are not read in place.
Which way is best depends on where the ranks' cores are: run it several times, or pin the ranks.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Final

import harness
import torch
from bench_msccl import free_port
from harness import Call, Output, Rounds
from mpi4py import MPI

from mcr_plus.backends.shm import collectives_state as words
from mcr_plus.backends.shm import p2p_kernels
from mcr_plus.backends.shm.backend import shape_of
from mcr_plus.backends.shm.collectives import DirectCollectives, begin_and_advance
from mcr_plus.backends.shm.p2p import PointToPoint
from mcr_plus.backends.shm.queue import WorkQueue
from mcr_plus.backends.shm.reductions import kernels_for
from mcr_plus.backends.shm.segment import open_segment
from mcr_plus.core.c10d import TCPStore
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import Kind
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.units import format_size, parse_size

KINDS: Final = {
    "all_reduce": words.ALL_REDUCE,
    "all_gather": words.ALL_GATHER,
    "all_to_all": words.ALL_TO_ALL,
    "broadcast": words.BROADCAST,
    "reduce_scatter": words.REDUCE_SCATTER,
    "send_recv": 0,
}
SIDES: Final[tuple[Kind, Kind]] = ("send", "recv")
SIZES: Final = "16KiB,32KiB,128KiB,512KiB,1MiB,2MiB,4MiB,16MiB,32MiB,64MiB"
WAYS: Final = {
    "copied": (words.COPIED, False),
    "past caches": (words.PAST_CACHES, False),
    "in place": (words.IN_PLACE, False),
    "huge pages": (words.IN_PLACE, True),
}
HEAD: Final = ["operation", "bytes", *WAYS, "copied / best"]


def room(nbytes: int, huge: bool) -> torch.Tensor:
    """A tensor, on huge pages or not."""
    if not huge:
        return torch.ones(nbytes // 4)
    memory = mmap.mmap(-1, nbytes + (4 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.float32)
    start = -whole.data_ptr() % (2 << 20) // 4
    return whole[start : start + nbytes // 4].fill_(1)


def candidate(
    kind: str, nbytes: int, way: str, queue: WorkQueue, collectives: DirectCollectives, one_place: bool
) -> Call:
    """One call of a way."""
    ranks, (first, huge) = MPI.COMM_WORLD.size, WAYS[way]
    state: Any = collectives.bind(KINDS[kind], nbytes // 4, 4, kernels_for(torch.float32, "MAX"))
    state[words.FIRST] = first
    if one_place:
        state[words.PLACES] = 1
    source = room(nbytes * (ranks if kind in ("all_to_all", "reduce_scatter") else 1), huge)
    target = source if kind in ("all_reduce", "broadcast") else room(nbytes * ranks, huge)
    begin = queue.bind(*begin_and_advance(), state)

    def call() -> None:
        poll = begin(source.data_ptr(), target.data_ptr(), None)
        while not poll():
            pass

    return call


def to_and_fro(nbytes: int, way: str, p2p: PointToPoint) -> Call:
    """Send a message to the next rank of a pair and back."""
    comm, data = MPI.COMM_WORLD, room(nbytes, False)
    peer, is_idle = comm.rank ^ 1, comm.rank ^ 1 >= comm.size
    send, receive = (
        Signature(kind, data.dtype, (nbytes // 4,), nbytes, "bench", comm.size) for kind in SIDES
    )
    begin, expect = p2p.bind_send(send), p2p.bind_receive(receive)
    out, into = Message(send, (data,), (), peer=peer), Message(receive, (), (data,), peer=peer)
    starts = [partial(begin, out), partial(expect, into)]
    row = p2p_kernels.HEAD + 2 * peer * p2p_kernels.ROW

    def call() -> None:
        if is_idle:
            return
        # Far from the parts that try both ways, with up to 16 MiB.
        p2p._state[row + p2p_kernels.PARTS], p2p._state[row + p2p_kernels.WAY] = 512, WAYS[way][0]
        for start in starts if comm.rank % 2 == 0 else reversed(starts):
            poll = start()
            while not poll():
                pass

    return call


@harness.program
def main(
    kinds: str = ",".join(KINDS),
    sizes: str = SIZES,
    rounds: Rounds = 9,
    one_place: bool = False,
    output: Output = None,
) -> None:
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", free_port(comm), comm.size, comm.rank == 0)
    group = Group("bench", tuple(range(comm.size)), comm.rank)
    shape = shape_of(comm.size)
    if one_place:
        shape = replace(shape, cells=4, cell=128 << 10)
    segment = open_segment(store, group, shape, 60)
    p2p_kernels.prepare()
    p2p = PointToPoint(segment, group)
    queue, collectives = WorkQueue(), DirectCollectives(segment, way=words.COPIED)
    rows = []
    for kind in harness.chosen(kinds.split(","), KINDS, "kind"):
        for nbytes in map(parse_size, sizes.split(",")):
            if kind == "send_recv" and nbytes > 16 << 20:
                continue
            ways = list(WAYS)[: 2 if kind in ("reduce_scatter", "send_recv") else None]
            found = {
                way: to_and_fro(nbytes, way, p2p)
                if kind == "send_recv"
                else candidate(kind, nbytes, way, queue, collectives, one_place)
                for way in ways
            }
            spent = harness.slowest(
                found, rounds, comm.Barrier, partial(comm.allreduce, op=MPI.MAX), most=500
            )
            least = {way: min(each) for way, each in spent.items()}
            cells = (f"{least[way]:.1f} ({median(spent[way]):.1f})" for way in found)
            best = min(least["past caches"], least.get("in place", math.inf))
            filled = [*cells, *["-"] * (len(WAYS) - len(found))]
            rows.append([kind, format_size(nbytes), *filled, f"{least['copied'] / best:.2f}"])
    if comm.rank == 0:
        harness.show(HEAD, rows, f"{comm.size} ranks, microseconds", width=120)
        note = f"{comm.size} ranks, microseconds: the least of {rounds} rounds in turns, medians in brackets."
        title = "Large data in shared memory: copied, past the caches, or read in place"
        harness.write_table(output, title, comm.size, note, HEAD, rows)
    comm.Barrier()


if __name__ == "__main__":
    main()
