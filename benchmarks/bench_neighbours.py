"""What jobs with more ranks than cores do to other processes of the host, and to their own ranks.

    python benchmarks/bench_neighbours.py                         about six minutes
    python benchmarks/bench_neighbours.py --rounds 2 --seconds 20 --output results/neighbours_X.md

Two jobs of three ranks run all_reduces of every library, with and without a codec, in groups that they make
and close. Beside them processes that never yield compute 50 ms every half second: the figure is how long
they needed for it. In turns, the jobs wait as they do by default, or yield in every poll (`dispatch: {wait:
yield}`, and Open MPI's own yields).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Final

import harness
import numpy as np
import torch
import typer
from harness import Output, Rounds

import mcr_plus as mcr

JOBS: Final = 2
RANKS: Final = 3
COMPUTES: Final = 0.05  # seconds of the core
EVERY: Final = 0.5
STRATEGY: Final = "OMPI_MCA_threads_pthreads_yield_strategy"
WAITS: Final = {"auto": "nanosleep", "yield": "sched_yield"}
"""Policies of `dispatch`, and what Open MPI does in a poll that has found nothing."""


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
    rounds: Rounds = 4,
    seconds: Annotated[float, typer.Option(min=5, help="Of a turn.")] = 40.0,
    neighbours: Annotated[int, typer.Option(min=1, help="Processes beside the jobs.")] = 4,
    output: Output = None,
    as_neighbour: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """See the head of this file."""
    if as_neighbour:
        print(*neighbour(as_neighbour))
        return
    results: dict[str, list[Any]] = harness.in_turns(
        {wait: wait for wait in WAITS}, rounds, lambda wait: turn(wait, seconds, neighbours)
    )
    head = ["way", "times", "median ms", "p99 ms", "longest ms", "longest round of ranks ms"]
    rows = [row(wait, turns) for wait, turns in results.items()]
    harness.show(head, rows)
    note = (
        f"Linux {os.uname().release}; {neighbours} processes that compute {COMPUTES * 1e3:.0f} ms at a time."
    )
    title = f"Beside {JOBS} jobs of {RANKS} ranks"
    harness.write_table(output, title, None, note, head, rows)


if __name__ == "__main__":
    main()
