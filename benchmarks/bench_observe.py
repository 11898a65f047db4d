"""What it costs to observe a job: metrics per operation, and the report of many operations.

    python benchmarks/bench_observe.py --rounds 9 --operations 1000000

A job of one rank, in which nothing waits for others, calls a synchronous all_reduce of 8 bytes, in turns
without anything, recorded by `mcr.record`, with metrics for Prometheus in a file, and by code from which the
statements are taken out that remember the last operations for dumps and `mcr-plus top`, which are always on.
A time of a call is the median of the rounds, of the processor and not of a clock. Then `mcr-plus report`
makes its page of recordings of two ranks with so many operations together, written for it; its time is that
of the whole command.
The report goes to benchmarks/results/observe_<hardware>_<yyyymm>.md.
"""

from __future__ import annotations

import os
import re
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from types import FunctionType
from typing import Annotated, Any, Final

import harness
import torch
import typer
from harness import HARDWARE, MCR_PLUS, Dated, Hardware, Rounds

import mcr_plus as mcr
from mcr_plus.engine import operation
from mcr_plus.job.init import current
from mcr_plus.observe.options import observe_options
from mcr_plus.observe.publisher import open_publisher
from mcr_plus.observe.record import Record
from mcr_plus.observe.record_file import file_of, save_recording

CALLS: Final = 5000
PLAIN: Final = "not observed"
REMEMBERING: Final = 5  # statements in `engine/operation.py` that remember an operation
GOAL_S, GOAL_BYTES = 20.0, 20_000_000
KINDS: Final = (
    ("all_to_all", "embedding", "gloo"),
    ("all_reduce", "gradients", "msccl"),
    ("all_gather", None, "mpi"),
)


@contextmanager
def published(folder: Path) -> Iterator[None]:
    """Metrics in a file, while the block runs."""
    options = observe_options().model_validate({"prometheus": str(folder / "job.prom"), "every": 1.0})
    publisher = open_publisher(options, current().world, mcr.__version__)
    assert publisher is not None
    publisher.start(current().engine)
    yield
    publisher.close()


@contextmanager
def forgetful() -> Iterator[None]:
    """Operations bound while the block runs are not remembered: the statement is not in their code."""
    source, found = re.subn(
        r"^( +)remember\(\(.*\)\)$", r"\1pass", Path(operation.__file__).read_text(), flags=re.MULTILINE
    )
    assert found == REMEMBERING
    other: dict[str, Any] = {"__name__": operation.__name__}
    exec(compile(source, operation.__file__, "exec"), other)
    changed = [
        (function, vars(other["BoundOperation"])[name].__code__)
        for name, function in vars(operation.BoundOperation).items()
        if isinstance(function, FunctionType)
    ]
    before = [function.__code__ for function, _ in changed]
    for function, code in changed:
        function.__code__ = code
    try:
        yield
    finally:
        for (function, _), code in zip(changed, before, strict=True):
            function.__code__ = code


def calls(rounds: int) -> dict[str, list[float]]:
    """Microseconds of the processor per call, by how it is observed and round."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Any] = {
            PLAIN: (nullcontext, nullcontext),
            "not even remembered": (forgetful, nullcontext),
            "recorded": (nullcontext, mcr.record),
            "metrics": (nullcontext, lambda: published(Path(folder))),
        }

        def turn(way: Any) -> float:
            around, within = way
            with around(), mcr.init({"version": 1}) as comm:
                tensor = torch.ones(2)
                for _ in range(CALLS // 10):
                    comm.all_reduce(tensor, mcr.MAX)
                with within():
                    began = time.process_time()
                    for _ in range(CALLS):
                        comm.all_reduce(tensor, mcr.MAX)
                    return 1e6 * (time.process_time() - began) / CALLS

        return harness.in_turns(ways, rounds, turn)


def write_recordings(folder: Path, count: int) -> float:
    """Recordings of two ranks, of `count` operations together; returns the seconds that one has taken."""
    began = 0.0
    for rank in range(2):
        records, ends, at = [], [], 0.0
        for number in range(1, count // 2 + 1):
            kind, tag, backend = KINDS[number % 3]
            at += 1e-3 * (1 + number % 4)
            nbytes = 4096 * (1 + number % 7)
            records.append(
                Record(
                    sequence=number,
                    kind=kind,
                    tag=tag,
                    group="world",
                    backend=backend,
                    codec=None,
                    bytes=nbytes,
                    wire_bytes=nbytes,
                    fused=1,
                    t_issue=at + 1e-5 * ((number * (3 + rank)) % 17),
                    t_done=at + 8e-4,
                    waited=3e-4,
                    ranks=2,
                    error=None,
                    dtype="float32",
                    is_async=number % 3 == 1,
                )
            )
            if number % 12 == 0:
                ends.append(at + 9e-4)
        about = {
            "job": "measured",
            "rank": rank,
            "size": 2,
            "host": "node",
            "hosts": ["node", "node"],
            "epoch_us": 0.0,
            "began": 0.0,
            "ended": at + 1.0,
            "choices": [],
            "config": {"version": 1},
            "versions": {"mcr_plus": mcr.__version__},
        }
        began = time.perf_counter()
        save_recording(file_of(folder, rank), records, ends, about)
    return time.perf_counter() - began


@harness.program
def main(
    rounds: Rounds = 9,
    operations: Annotated[
        int, typer.Option(min=100, help="Of the report, of both ranks together.")
    ] = 1_000_000,
    hardware: Hardware = HARDWARE,
    output: Dated = None,
) -> None:
    found = calls(rounds)
    plain = found[PLAIN]
    rows = [
        [
            name,
            f"{median(times):.2f}",
            f"{median(us - each for us, each in zip(times, plain, strict=True)):+.2f}",
            f"{min(times):.2f}",
        ]
        for name, times in found.items()
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = write_recordings(folder, operations)
        page = folder / "report.html"
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        harness.run([*MCR_PLUS, "report", str(folder), "-o", str(page)])
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        processors = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        size = page.stat().st_size
    figures = [
        ["mcr-plus report, wall clock", f"{seconds:.1f} s", f"≤ {GOAL_S:.0f} s"],
        ["mcr-plus report, processors", f"{processors:.1f} s", ""],
        ["the page", f"{size / 1e3:.0f} kB", f"≤ {GOAL_BYTES / 1e6:.0f} MB"],
        ["writing the file of one rank", f"{written:.1f} s", ""],
    ]
    text = harness.page(
        "What it costs to observe a job",
        harness.command(),
        "a call is a synchronous all_reduce of 8 bytes in a job of one rank: time of the processor, the "
        f"median of {rounds} turns of {CALLS:,} calls, and of its differences from one that is not observed "
        f"in the same round; load average {os.getloadavg()[0]:.0f}",
        "### A call",
        harness.markdown(["way", "µs of the processor", "more", "least"], rows),
        f"### The report of {operations:,} operations",
        harness.markdown(["what", "measured", "goal"], figures),
    )
    harness.write(text, output, f"observe_{hardware}")


if __name__ == "__main__":
    main()
