"""Verified payloads: flipped bits that are found, and what verification costs.

    python benchmarks/bench_verify.py --flips 1000 --rounds 5
    python benchmarks/bench_verify.py --flips 0 --rounds 3 --libraries gloo --sizes 64MiB --rate 1gbit
    python benchmarks/bench_verify.py --flips 0 --ways "no kernels" --ways steps --sizes 8 --sizes 64KiB

*Flips*: three ranks run random operations of all kinds, dtypes and sizes, handed to the library below the
engine; in most of them a bit flips on a random rank, in what is sent or in what has arrived. One is found if
all ranks raise `DataCorrupted` with the same operation, ranks, library and block.
*Cost*: calls without verification and with every one verified (`--ways` adds one in ten), in turns, two
ranks; the least time of each, as other processes only ever add to it (up to 1 ms a mean of 10 calls; of one
in ten, always), and the least of the turns' medians. Further ways turn fast paths off, for the costs alone:
`no kernels` those of shared memory that take checksums while they move data, `steps` these, the compiled
small operations and the checksums that messages carry. `--busy` adds processes that compute.
A call is measured for `--seconds` in each turn, and at least twice: with all libraries
and sizes a round takes about half a minute here, and one between hosts a minute; beside other work, up to
four times as long. Before that, the time of checksums of memory, and the work of two ranks in one thread:
without waits, and in processor time, so that other processes disturb it by their use of memory alone.
`--rate 1gbit` measures between two hosts instead (network namespaces, see two_hosts.py; needs root), with a
link of that rate. The report goes to benchmarks/results/verify_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Annotated, Any, Final
from unittest.mock import patch

import harness
import torch
import typer
from harness import HARDWARE, ROOT, Dated, Hardware
from two_hosts import TwoHosts, need_two_hosts

import mcr_plus as mcr
from mcr_plus.backends.base import Start
from mcr_plus.backends.gloo.channel import GlooChannel
from mcr_plus.backends.mpi.channel import MpiChannel
from mcr_plus.backends.shm import collectives_state as plain
from mcr_plus.backends.shm import p2p_kernels
from mcr_plus.backends.shm.backend import SharedMemoryChannel
from mcr_plus.backends.shm.collectives import DirectCollectives, begin_and_advance
from mcr_plus.backends.shm.p2p import PointToPoint
from mcr_plus.backends.shm.reductions import kernels_for
from mcr_plus.backends.shm.segment import Segment, Shape
from mcr_plus.core.group import Group
from mcr_plus.core.kinds import MESSAGES
from mcr_plus.core.message import Message, Signature
from mcr_plus.core.units import parse_size
from mcr_plus.reliability.verify import checked, checked_kernels
from mcr_plus.reliability.verify.checksum_table import Blocks, ChecksumTable, row_words
from mcr_plus.reliability.verify.rows import SharedRows, shared_bytes
from mcr_plus.reliability.verify.small_ops import SmallOperations

sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "support")]
from jobs.reliability import verify_jobs

LIBRARIES: Final = ("msccl", "gloo", "mpi")
SIZES: Final = ("8", "1MiB", "64MiB")
KERNELS: Final = ((checked.Checking, "bind"),)
FAST: Final = (
    *KERNELS,
    (SmallOperations, "bind"),
    *((channel, "bind_checked") for channel in (SharedMemoryChannel, GlooChannel, MpiChannel)),
)
KINDS: Final = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "send")
OPTIONS: Final[dict[str, str | int]] = {
    "off": "off", "every": "every", "one in 10": 10, "no kernels": "every", "steps": "every",
}  # fmt: skip
WITHOUT: Final = {"no kernels": KERNELS, "steps": FAST}
"""Methods that return None in a way, so that operations are bound as if the fast path did not exist."""
MOST: Final = 1000  # samples of a call in a turn
LONGEST: Final = 4  # times as long as wanted is how long a call is measured beside other work


def flipped(backend: str, seed: int, operations: int) -> dict[str, Any] | None:
    """Counts of flips, of those found, and of alarms without one."""
    own = verify_jobs.many_flips(backend, seed, operations)
    with mcr.init(backends=["gloo"]) as comm:
        every = comm.all_gather_object(own)
        if comm.rank:
            return None
    flips = found = alarms = 0
    for each in zip(*every, strict=True):
        raised = [one[5] for one in each]
        if any(one[4] for one in each):
            flips += 1
            found += bool(raised[0]) and all(one == raised[0] for one in raised)
        else:
            alarms += any(raised)
    return {"operations": len(own), "flips": flips, "found": found, "alarms": alarms}


def speeds() -> list[list[str]]:
    """Checksums of memory of some sizes, by one thread: bytes, microseconds, GB/s."""
    rows = []
    torch.set_num_threads(1)
    for nbytes in (8, 64 << 10, 1 << 20, 64 << 20):
        blocks, value = Blocks(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
        _kept, address = blocks.new()
        call = partial(blocks.take, value.data_ptr(), address)
        best = min(harness.seconds(call, 1 if nbytes > 1 << 20 else 20) for _ in range(30))
        rows.append([str(nbytes), f"{1e6 * best:.2f}", f"{nbytes / best / 1e9:.1f}"])
    return rows


def works(nbytes: int = 64 << 20, samples: int = 25) -> list[list[str]]:
    """Direct collectives and messages of two ranks in this thread.

    Returns kind, processor ms without checksums, with, and the ratio.
    """
    shape, words = Shape(2, area=2 << 20), row_words(2)
    memory, rows = mmap.mmap(-1, shape.nbytes), memoryview(bytearray(shared_bytes(2, words)))
    segments = [Segment(shape, rank, memory) for rank in range(2)]
    exchanges = [SharedRows(rows, rank, 2, words, lambda: None) for rank in range(2)]
    ranks = [DirectCollectives(segment, spins=0, yields=0) for segment in segments]
    sources, targets = ([torch.zeros(nbytes // 4) for _ in ranks] for _ in range(2))
    begin_and_advance()
    checked_kernels.prepare()

    def seconds(module: Any, states: list[Any], outputs: list[torch.Tensor]) -> float:
        began = time.thread_time()
        done = [
            bool(module.begin(state, source.data_ptr(), target.data_ptr()))
            for state, source, target in zip(states, sources, outputs, strict=True)
        ]
        while not all(done):
            done = [one or bool(module.advance(state, 0)) for one, state in zip(done, states, strict=True)]
        return time.thread_time() - began

    table = []
    for kind in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"):
        options: dict[str, Any] = {"kernels": kernels_for(torch.float32, "SUM")} if "reduce" in kind else {}
        in_place = kind in ("all_reduce", "broadcast")
        outputs, count = (sources, nbytes // 4) if in_place else (targets, nbytes // 8)
        pairs = [
            [rank.bind(getattr(plain, kind.upper()), count, 4, **options) for rank in ranks] for _ in "ab"
        ]
        for state in pairs[1]:
            checked.fit(state)
        ledgers = [ChecksumTable(checked.plan(state)) for state in pairs[1]]
        states = [checked.extended(*each) for each in zip(pairs[1], ledgers, exchanges, strict=True)]
        times: list[list[float]] = [[], []]
        for _ in range(samples):
            times[0].append(seconds(plain, pairs[0], outputs))
            times[1].append(seconds(checked_kernels, states, outputs))
        table.append(_row(kind, times))
    table.append(_row("send", _messages(nbytes, samples)))
    return table


def _row(name: str, times: list[list[float]]) -> list[str]:
    off, on = (1e3 * min(each) for each in times)
    return [name, f"{off:.1f}", f"{on:.1f}", f"{on / off:.2f}"]


def small_messages() -> list[list[str]]:
    """Messages of two ranks in this thread: bytes, processor µs without checksums, with, difference."""
    table = []
    for nbytes in (8, 4096, 64 << 10):
        off, on = (1e6 * min(each) for each in _messages(nbytes, 300, 50))
        table.append([str(nbytes), f"{off:.2f}", f"{on:.2f}", f"{on - off:+.2f}"])
    return table


def _messages(nbytes: int, samples: int, repeats: int = 1) -> list[list[float]]:
    """Processor seconds of a message without checksums, and of one that carries them."""
    shape = Shape(2, depth=4, slot=128 << 10, area=128)
    memory = mmap.mmap(-1, shape.nbytes)
    ends = [
        PointToPoint(Segment(shape, rank, memory), Group("works", (0, 1), rank), spins=0, yields=0)
        for rank in range(2)
    ]
    p2p_kernels.prepare()
    assert all(end.check() for end in ends)
    value, out = (torch.zeros(nbytes // 4) for _ in range(2))
    send, receive = (Signature(kind, value.dtype, (), nbytes, "works", 2) for kind in MESSAGES)
    sent, received = Message(send, (value,), peer=1), Message(receive, (), (out,), peer=0)
    starts = [ends[0].bind_send(send, mark) for mark in (0, p2p_kernels.CHECKED)]
    begin = ends[1].bind_receive(receive, lambda source, block: AssertionError(f"{source} {block}"))

    def seconds(start: Start) -> float:
        began = time.thread_time()
        for _ in range(repeats):
            polls = start(sent), begin(received)
            while not (polls[0]() & polls[1]()):  # both, at each turn
                pass
        return (time.thread_time() - began) / repeats

    times: list[list[float]] = [[], []]
    for _ in range(samples):
        for each, start in zip(times, starts, strict=True):
            each.append(seconds(start))
    return times


def between_hosts(library: str, rate: str, *options: object) -> dict[str, list[dict[str, list[float]]]]:
    """`costs` of two ranks on hosts of their own."""
    words = [sys.executable, str(ROOT / "benchmarks" / "bench_verify.py"), "--as-rank"]
    words += [json.dumps([library, *options])]
    with TwoHosts(rate) as hosts:
        if library == "mpi":
            out = hosts.mpirun(words, stdout=subprocess.PIPE, text=True).stdout
        else:
            ranks = list(hosts.start(words, stdout=subprocess.PIPE, text=True))
            out = "".join(rank.communicate()[0] for rank in ranks)
    (line,) = (each for each in out.splitlines() if each.startswith("{"))
    found: dict[str, list[dict[str, list[float]]]] = json.loads(line)
    return found


def compared(library: str, turns: dict[str, list[dict[str, list[float]]]], figure: int) -> list[list[str]]:
    """Rows of a table of costs: the least of all turns, of the least calls (figure 0) or of medians (1)."""
    rows = []
    for name in turns["off"][0]:
        least = {way: min(turn[name][figure] for turn in turns[way]) for way in turns}
        off, every = least["off"], least["every"]
        times = [f"{least[way]:.1f}" for way in OPTIONS if way in turns]
        slower = [f"{least[way] / every:.2f}" for way in WITHOUT if way in turns]
        rows.append([library, name, *times, f"{every - off:+.1f}", f"{every / off:.3f}", *slower])
    return rows


@contextmanager
def slow(way: str) -> Iterator[None]:
    """Turn the fast paths off that a way is without."""
    with ExitStack() as stack:
        for owner, method in WITHOUT.get(way, ()):
            stack.enter_context(patch.object(owner, method, return_value=None))
        yield


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Let so many other processes compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def costs(
    backend: str,
    rounds: int,
    ways: Sequence[str],
    sizes: Sequence[int],
    kinds: Sequence[str],
    seconds: float,
    wait: str,
) -> dict[str, Any] | None:
    """Microseconds of calls (the least, the median), by round, with these of `OPTIONS`.

    A call is measured for so many seconds in a turn.
    """
    torch.set_num_threads(1)

    def largest(comm: mcr.Communicator, value: float) -> float:
        tensor = torch.tensor([value], dtype=torch.float64)
        comm.all_reduce(tensor, mcr.MAX)
        return float(tensor)

    def measured(comm: mcr.Communicator, call: harness.Call, verify: str | int) -> list[float]:
        harness.seconds(call, 2)
        once = largest(comm, min(harness.seconds(call) for _ in range(3)))  # the same on all ranks
        repeats = 10 if once < 1e-3 else verify if isinstance(verify, int) else 1
        began, samples = time.perf_counter(), list[float]()
        # Beside other work a mean is undisturbed rarely: as many samples as if it never were, within bounds.
        while len(samples) < max(2, min(MOST, seconds / (repeats * once))):
            for _ in range(1 if once > 1e-2 else 20):
                comm.barrier()
                samples.append(harness.seconds(call, repeats))
            if largest(comm, time.perf_counter() - began) > LONGEST * seconds and len(samples) > 1:
                break
        return [largest(comm, 1e6 * figure) for figure in (min(samples), median(samples))]

    def calls(way: str) -> dict[str, list[float]]:
        found, verify = {}, OPTIONS[way]
        with slow(way), mcr.init(verify_jobs.config(backend, verify=verify, wait=wait)) as comm:
            peer = 1 - comm.rank
            for nbytes in sizes:
                tensor, part = torch.zeros(nbytes // 4), torch.zeros(max(1, nbytes // 8))
                gathered, parts = (torch.zeros(part.numel() * comm.size) for _ in range(2))

                def message(tensor: torch.Tensor = tensor, peer: int = peer) -> None:
                    comm.send(tensor, peer) if comm.rank == 0 else comm.recv(tensor, peer)

                for name, call in (
                    ("all_reduce", partial(comm.all_reduce, tensor)),
                    ("broadcast", partial(comm.broadcast, tensor, 0)),
                    ("all_gather", partial(comm.all_gather_into_tensor, gathered, part)),
                    ("reduce_scatter", partial(comm.reduce_scatter_tensor, part, gathered)),
                    ("all_to_all", partial(comm.all_to_all_single, parts, gathered)),
                    ("reduce", partial(comm.reduce, tensor, 0)),
                    ("send", message),
                ):
                    if name in kinds:
                        found[f"{name} {nbytes}"] = measured(comm, call, verify)
        return found

    turns = harness.in_turns({name: name for name in ways}, rounds, calls)
    is_first = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0"
    return turns if is_first else None


@harness.program
def main(
    flips: Annotated[int, typer.Option(help="Operations of each library, most with a flipped bit.")] = 1000,
    rounds: Annotated[int, typer.Option(help="Of the costs, in turns.")] = 5,
    rate: Annotated[
        str | None, typer.Option(help="Of a link between two hosts, where the costs are measured then.")
    ] = None,
    libraries: Annotated[list[str] | None, typer.Option(help=f"Among: {', '.join(LIBRARIES)}.")] = None,
    sizes: Annotated[
        list[str] | None, typer.Option(help=f"Of the costs; {', '.join(SIZES)} without.")
    ] = None,
    kinds: Annotated[list[str] | None, typer.Option(help=f"Among: {', '.join(KINDS)}.")] = None,
    ways: Annotated[list[str] | None, typer.Option(help=f"Further ones among: {', '.join(OPTIONS)}.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="For which a call is measured in a turn.")] = 0.3,
    wait: Annotated[
        str, typer.Option(help="Of dispatch; spin: small calls as without other work, if it is there.")
    ] = "auto",
    others: Annotated[int, typer.Option("--busy", min=0, help="Processes that compute meanwhile.")] = 0,
    as_rank: Annotated[
        str | None, typer.Option(help="Be a rank of the costs of a library.", hidden=True)
    ] = None,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    if as_rank is not None:
        if (found := costs(*json.loads(as_rank))) is not None:
            print(json.dumps(found))
        return
    libraries = harness.chosen(libraries or LIBRARIES, LIBRARIES, "library")
    ways = harness.chosen(dict.fromkeys(["off", "every", *(ways or ())]), OPTIONS, "way")
    kinds = harness.chosen(kinds or KINDS, KINDS, "kind")
    options = rounds, ways, [parse_size(size) for size in sizes or SIZES], kinds, seconds, wait
    if rate is not None:
        need_two_hosts()
        libraries = [library for library in libraries if library != "msccl"]  # of one host
    parts: list[str] = []
    rows = []
    for library in libraries if flips else ():
        found = harness.on_ranks(harness.here(3), flipped, library, 11, flips)
        rows.append([library, *(str(found[key]) for key in ("operations", "flips", "found", "alarms"))])
    if rows:
        head = ["library", "operations", "with a flipped bit", "found, alike on all ranks", "false alarms"]
        parts += ["### Flipped bits, three ranks", harness.markdown(head, rows)]
    whole = not any(way in WITHOUT for way in ways)
    if rounds and rate is None and whole:
        table = harness.markdown(["bytes", "µs", "GB/s"], speeds())
        parts += ["### Checksums of memory, one thread, the least of 30", table]
    if rounds and rate is None and whole and "msccl" in libraries:
        head = ["operation", "off, ms", "every, ms", "every / off"]
        parts += ["### Processor time of two ranks in one thread, shared memory, 64 MiB, the least of 25"]
        parts += [harness.markdown(head, works())]
        head = ["bytes", "off, µs", "every, µs", "every - off"]
        parts += ["### Processor time of a message and its receive in one thread, least of 300 means of 50"]
        parts += [harness.markdown(head, small_messages())]
    found_turns = {}
    for library in libraries if rounds else ():
        with busy(others):
            if rate is None:
                found_turns[library] = harness.on_ranks(harness.here(2), costs, library, *options)
            else:
                found_turns[library] = between_hosts(library, rate, *options)
    head = ["library", "call (bytes)", *(f"{way}, µs" for way in OPTIONS if way in ways)]
    head += ["every - off", "every / off", *(f"{way} / every" for way in WITHOUT if way in ways)]
    where = ("two ranks" if rate is None else f"two hosts at {rate}") + f", {others} busy processes" * (
        others > 0
    )
    for figure, what in enumerate(("the least call", "the least median")) if found_turns else ():
        rows = [row for each in found_turns.items() for row in compared(*each, figure)]
        parts += [f"### Cost, {where}, {what} of all turns", harness.markdown(head, rows)]
    note = f"{rounds} turns; load average {os.getloadavg()[1]:.0f}"
    text = harness.page("Verified payloads", harness.command(), note, *parts)
    harness.write(text, output, f"verify_{hardware}")


if __name__ == "__main__":
    main()
