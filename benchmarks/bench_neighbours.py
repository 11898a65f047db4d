"""What jobs with more ranks than cores do to other processes of the host, and to their own ranks.

    python benchmarks/bench_neighbours.py                         about eight minutes
    python benchmarks/bench_neighbours.py --rounds 2 --seconds 20 --output results/neighbours_X.md

Two jobs of three ranks run all_reduces of every library, with and without a codec, in groups that they make
and close. Beside them processes that never yield compute 50 ms every half second: the figure is how long
they needed for it. In turns, the jobs wait as they do by default, or yield in every poll (`dispatch: {wait:
yield}`, and Open MPI's own yields). *Long waits* (`--late` seconds): all ranks of a job but one wait for the
last one, by `wait` or by `is_completed` in a loop, beside one process that computes: the share of a core that
this one got, the longest time for which it had none, and the cores that rank 0 took.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final

import harness
import numpy as np
import torch
import typer
from harness import Output

import mcr_plus as mcr

JOBS: Final = 2
RANKS: Final = 3
COMPUTES: Final = 0.05  # seconds of the core
EVERY: Final = 0.5
STRATEGY: Final = "OMPI_MCA_threads_pthreads_yield_strategy"
WAITS: Final = {"auto": "nanosleep", "yield": "sched_yield"}
"""Policies of `dispatch`, and what Open MPI does in a poll that has found nothing."""
LIBRARIES: Final = ("gloo", "mpi", "msccl")
LATE_RANKS: Final = [3, 4]


def job(wait: str, seconds: float) -> float:
    """On ranks: operations for so many seconds. The longest of this rank."""
    torch.set_num_threads(1)
    pipeline = [{"compress": {}}, {"select": {}}, {"dispatch": {"wait": wait, "timeout": "120s"}}]
    comm = mcr.init({"version": 1, "pipeline": pipeline})
    tensor = torch.ones(5000)
    end = torch.tensor([time.monotonic() + seconds], dtype=torch.float64)
    comm.broadcast(end, 0)
    longest, done = 0.0, torch.zeros(1)
    while not done.item():
        began = time.monotonic()
        with mcr.new_group(list(range(comm.size))) as group:
            for backend in mcr.get_backends():
                for compress in (None, "int8_block"):
                    group.all_reduce(tensor, backend=backend, compress=compress)
            time.sleep(0.002 * comm.rank)
            done.fill_(time.monotonic() > end.item())
            group.all_reduce(done, "MAX")
        longest = max(longest, time.monotonic() - began)
    return longest


def neighbour(seconds: float) -> list[float]:
    """Compute now and then; the seconds that it took each time."""
    took: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(EVERY)
        began, had = time.monotonic(), time.thread_time()
        while time.thread_time() - had < COMPUTES:
            pass
        took.append(time.monotonic() - began)
    return took


def waiting(library: str, polls: bool, seconds: float, begun: str) -> float | None:
    """On ranks: wait for the last one, which comes so many seconds late; rank 0's processor time meanwhile.

    `begun`: a file that is there from then on.
    """
    torch.set_num_threads(1)
    comm = mcr.init({"version": 1, "backends": [library], "pipeline": [{"select": {}}, {"dispatch": {}}]})
    for _ in range(3):
        comm.all_reduce(torch.ones(8))
    comm.barrier()
    Path(begun).touch()
    had = time.process_time()
    if comm.rank == comm.size - 1:
        time.sleep(seconds)
    work = comm.all_reduce(torch.ones(8), async_op=True)
    assert work is not None
    if polls:
        while not work.is_completed():
            pass
    else:
        work.wait()
    return None if comm.rank else time.process_time() - had


def computing(seconds: float) -> tuple[float, float]:
    """Compute for so many seconds; the share of a core that it took, and the longest time without one."""
    began, had, longest = time.monotonic(), time.thread_time(), 0.0
    before = began
    while (now := time.monotonic()) - began < seconds:
        longest, before = max(longest, now - before), now
    return (time.thread_time() - had) / (now - began), longest


def long_wait(library: str, polls: bool, ranks: int, seconds: float) -> list[str]:
    """A row of the table of long waits."""
    words = [sys.executable, __file__, "--as-computing", str(seconds - 2 * EVERY)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        begun = Path(folder, "begun")
        arguments = library, polls, seconds, str(begun)
        job = pool.submit(harness.on_ranks, harness.here(ranks), waiting, *arguments)
        while not (begun.exists() or job.done()):
            time.sleep(0.01)
        beside = subprocess.run(words, capture_output=True, text=True, check=True)
        share, longest = map(float, beside.stdout.split())
        took = job.result()
    way = "is_completed" if polls else "wait"
    return [library, way, str(ranks), f"{share:.2f}", f"{1e3 * longest:.0f}", f"{took / seconds:.2f}"]


def turn(wait: str, seconds: float, neighbours: int) -> tuple[list[float], list[float]]:
    """Seconds of the neighbours' computing, and of the longest round of each job's rank 0, under a policy."""
    os.environ[STRATEGY] = WAITS[wait]
    words = [sys.executable, __file__, "--as-neighbour", str(seconds)]
    try:
        with ThreadPoolExecutor(JOBS) as pool:
            jobs = [
                pool.submit(harness.on_ranks, harness.here(RANKS), job, wait, seconds) for _ in range(JOBS)
            ]
            beside = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(neighbours)]
            took = [float(word) for each in beside for word in each.communicate()[0].split()]
            return took, [each.result() for each in jobs]
    finally:
        del os.environ[STRATEGY]


def row(wait: str, turns: Sequence[tuple[list[float], list[float]]]) -> list[str]:
    """A row of the table."""
    took = [second for neighbours, _ in turns for second in neighbours]
    figures = [
        *(1e3 * np.percentile(took, [50, 99])),
        1e3 * max(took),
        1e3 * max(max(own) for _, own in turns),
    ]
    return [f"wait: {wait}, {WAITS[wait]}", str(len(took)), *(f"{figure:.0f}" for figure in figures)]


@harness.program
def main(
    *,
    rounds: Annotated[int, typer.Option(min=0, help="How often the jobs wait in each way.")] = 4,
    seconds: Annotated[float, typer.Option(min=5, help="Of a turn.")] = 40.0,
    neighbours: Annotated[int, typer.Option(min=1, help="Processes beside the jobs.")] = 4,
    late: Annotated[float, typer.Option(min=0, help="Seconds of a long wait; 0 for none.")] = 10.0,
    ranks: Annotated[list[int], typer.Option(help="Of a job with a long wait.")] = LATE_RANKS,
    output: Output = None,
    as_neighbour: Annotated[float, typer.Option(hidden=True)] = 0.0,
    as_computing: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """See the head of this file."""
    if as_neighbour or as_computing:
        print(*(neighbour(as_neighbour) if as_neighbour else computing(as_computing)))
        return
    parts = []
    if rounds:
        results: dict[str, list[Any]] = harness.in_turns(
            {wait: wait for wait in WAITS}, rounds, lambda wait: turn(wait, seconds, neighbours)
        )
        head = ["way", "times", "median ms", "p99 ms", "longest ms", "longest round of ranks ms"]
        rows = [row(wait, turns) for wait, turns in results.items()]
        harness.show(head, rows)
        title = f"### {neighbours} processes that compute {COMPUTES * 1e3:.0f} ms at a time"
        parts += [title, harness.markdown(head, rows)]
    if late:
        rows = [
            long_wait(library, polls, count, late)
            for count in ranks
            for library in LIBRARIES
            for polls in (False, True)
        ]
        head = ["library", "way", "ranks", "share of a core", "longest without, ms", "cores of rank 0"]
        harness.show(head, rows)
        title = f"### One process that computes, while all ranks but one wait for {late:g} s"
        parts += [title, harness.markdown(head, rows)]
    note = f"Linux {os.uname().release}"
    if output is not None:
        title = f"Beside jobs of more ranks than cores ({JOBS} jobs of {RANKS})"
        harness.write(harness.page(title, harness.command(), note, *parts), output)


if __name__ == "__main__":
    main()
