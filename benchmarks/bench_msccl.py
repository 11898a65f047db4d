"""What goes through the msccl backend's shared memory, against MPI and gloo, called directly and in turn.

    mcr-plus run -n 2 benchmarks/bench_msccl.py
    mcr-plus run -n 2 benchmarks/bench_msccl.py --kinds all_reduce --sizes 8,64KiB,64MiB --rounds 15

Every round calls every library a number of times, so that what else the machine does meets them all alike.
Printed are medians over rounds of the microseconds of a call, the smallest in brackets, how many times as
long the others take, and how long a copy of as many bytes takes while all ranks copy: no result can be
written faster. Results are compared with the true ones before anything is timed.

`send_recv` is a message to the neighbour and one back, between ranks 0 and 1, 2 and 3, and so on. Its copy
is two, because these follow each other.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any, Final

import harness
import numpy as np
import torch
from harness import Call, Output, Rounds
from mpi4py import MPI

from mcr_plus.backends.base import Start
from mcr_plus.backends.shm import collectives_state, p2p_kernels
from mcr_plus.backends.shm.collectives import DirectCollectives, begin_and_advance
from mcr_plus.backends.shm.p2p import PointToPoint
from mcr_plus.backends.shm.queue import WorkQueue
from mcr_plus.backends.shm.reductions import kernels_for
from mcr_plus.backends.shm.segment import Shape, open_segment
from mcr_plus.core.c10d import PrefixStore, ProcessGroupGloo, TCPStore, gloo_group
from mcr_plus.core.group import Group
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.units import format_size, parse_size

KINDS: Final = ("all_reduce", "all_gather", "all_to_all", "send_recv")
SIZES: Final = "8,64,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
LIBRARIES: Final = ("msccl", "mpi", "gloo", "copy")
HEAD: Final = ["operation", "size", *LIBRARIES, "mpi / msccl", "gloo / msccl", "msccl / copy"]


def candidates(
    kind: str, nbytes: int, comm: Any, gloo: Any, queue: WorkQueue, collectives: DirectCollectives
) -> tuple[dict[str, Call], Any]:
    """How to do an operation on as many bytes by each library; and what compares the result."""
    me, ranks = comm.rank, comm.size
    count = max(ranks, nbytes // 4 // ranks * ranks)
    block = count // ranks
    whole = torch.arange(count, dtype=torch.float32) % 1000
    source = whole * (me + 1)
    target = torch.empty_like(source)
    mine = source[:block]
    kernels = kernels_for(torch.float32, "SUM")
    if kind == "all_reduce":
        state = collectives.bind(collectives_state.ALL_REDUCE, count, 4, kernels)
        wanted = whole * (ranks * (ranks + 1) // 2)
        calls: tuple[Call, Call] = (
            _mpi(comm.Allreduce, source, target),
            lambda: gloo.allreduce([target]).wait(),
        )
    elif kind == "all_gather":
        state = collectives.bind(collectives_state.ALL_GATHER, block, 4)
        wanted = torch.cat([whole[:block] * (rank + 1) for rank in range(ranks)])
        calls = (
            _mpi(comm.Allgather, mine, target),
            lambda: gloo._allgather_base(target, mine).wait(),
        )
    else:
        state = collectives.bind(collectives_state.ALL_TO_ALL, block, 4)
        part = whole[me * block : (me + 1) * block]
        wanted = torch.cat([part * (rank + 1) for rank in range(ranks)])
        calls = (
            _mpi(comm.Alltoall, source, target),
            lambda: gloo.alltoall_base(target, source, [], []).wait(),
        )
    addresses = source.data_ptr(), target.data_ptr()
    begin = queue.bind(*begin_and_advance(), state)

    def ours() -> None:
        poll = begin(*addresses, None)
        while not poll():
            os.sched_yield()

    def check(call: Call) -> bool:
        target.copy_(source)
        call()
        return torch.equal(target, wanted)

    copied, into = source.numpy(), target.numpy()
    found = {"msccl": ours, "mpi": calls[0], "gloo": calls[1], "copy": lambda: np.copyto(into, copied)}
    return found, check


def message_candidates(nbytes: int, comm: Any, gloo: Any, box: PointToPoint) -> tuple[dict[str, Call], Any]:
    """The same for a message there and back."""
    count, peer, first = max(1, nbytes // 4), comm.rank ^ 1, comm.rank % 2 == 0
    source = torch.arange(count, dtype=torch.float32) % 1000 * (comm.rank + 1)
    wanted = torch.arange(count, dtype=torch.float32) % 1000 * (peer + 1)
    target = torch.empty_like(source)
    signature = Signature("send", torch.float32, (count,), 4 * count, "bench", comm.size)
    send, receive = box.bind_send(signature), box.bind_receive(signature.replace(kind="recv"))
    outgoing = Message(signature, inputs=(source,), peer=peer)
    incoming = Message(signature, outputs=(target,), peer=peer)

    def finish(start: Start, message: Message) -> None:
        poll = start(message)
        while not poll():
            os.sched_yield()

    copied, into = source.numpy(), target.numpy()
    given, gotten = [copied, MPI.FLOAT], [into, MPI.FLOAT]
    steps: dict[str, tuple[Call, Call]] = {
        "msccl": (lambda: finish(send, outgoing), lambda: finish(receive, incoming)),
        "mpi": (lambda: comm.Send(given, peer), lambda: comm.Recv(gotten, peer)),
        "gloo": (
            lambda: gloo.send([source], peer, 0).wait(),
            lambda: gloo.recv([target], peer, 0).wait(),
        ),
        "copy": (lambda: np.copyto(into, copied), lambda: np.copyto(into, copied)),
    }

    def both(one: Call, other: Call) -> Call:
        def call() -> None:
            one()
            other()

        return call

    def check(call: Call) -> bool:
        target.zero_()
        call()
        return torch.equal(target, wanted)

    return {name: both(*(pair if first else pair[::-1])) for name, pair in steps.items()}, check


def _mpi(call: Callable[[Any, Any], object], source: torch.Tensor, target: torch.Tensor) -> Call:
    first, second = [source.numpy(), MPI.FLOAT], [target.numpy(), MPI.FLOAT]
    return lambda: call(first, second)


def row_of(kind: str, nbytes: int, spent: dict[str, list[float]]) -> list[str]:
    """A line of the report."""
    middle = {name: median(each) for name, each in spent.items()}
    return [
        kind,
        format_size(nbytes),
        *(f"{middle[name]:.1f} ({min(spent[name]):.1f})" for name in LIBRARIES),
        *(f"{middle[name] / middle['msccl']:.2f}" for name in ("mpi", "gloo")),
        f"{middle['msccl'] / middle['copy']:.2f}",
    ]


def free_port(comm: Any) -> int:
    """A port of loopback that nothing listens on, the same on all ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(comm.bcast(probe.getsockname()[1]))


@harness.program
def main(kinds: str = ",".join(KINDS), sizes: str = SIZES, rounds: Rounds = 9, output: Output = None) -> None:
    comm = MPI.COMM_WORLD
    if comm.size < 2:
        raise SystemExit("nothing to compare on one rank; start it with mcr-plus run -n 2")
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", free_port(comm), comm.size, comm.rank == 0)
    gloo = gloo_group(
        PrefixStore("gloo", store),
        comm.rank,
        comm.size,
        devices=[ProcessGroupGloo.create_device(interface="lo")],
        threads=2,
        timeout=timedelta(seconds=60),
    )
    group = Group("bench", tuple(range(comm.size)), comm.rank)
    segment = open_segment(store, group, Shape(comm.size), 60)
    queue, collectives, box = WorkQueue(), DirectCollectives(segment), PointToPoint(segment, group)
    p2p_kernels.prepare()
    rows = []
    for kind in harness.chosen(kinds.split(","), KINDS, "kind"):
        for nbytes in map(parse_size, sizes.split(",")):
            if kind == "send_recv":
                found, check = message_candidates(nbytes, comm, gloo, box)
            else:
                found, check = candidates(kind, nbytes, comm, gloo, queue, collectives)
            wrong = [name for name in LIBRARIES[:3] if not check(found[name])]
            if wrong:
                raise SystemExit(f"{kind} of {nbytes} bytes: wrong results of {', '.join(wrong)}")
            spent = harness.slowest(
                found, rounds, comm.Barrier, partial(comm.allreduce, op=MPI.MAX), most=500
            )
            rows.append(row_of(kind, nbytes, spent))
    gloo.shutdown()
    if comm.rank == 0:
        title = f"{comm.size} ranks, {MPI.Get_library_version().split(',')[0]}, microseconds"
        harness.show(HEAD, rows, title, width=150)
        note = f"{title}: medians of rounds in which all take turns, the smallest in brackets."
        harness.write_table(output, "Shared memory against MPI and gloo", comm.size, note, HEAD, rows)
    comm.Barrier()


if __name__ == "__main__":
    main()
